"""docs/kubernetes.md: the API and torchrun accept the manifests that users apply."""

from __future__ import annotations

from typing import Any

import pytest
from documents import ROOT, blocks_of
from torch.distributed import run as torchrun

yaml = pytest.importorskip("yaml", reason="needs requirements/clients.txt")
validate = pytest.importorskip("kubernetes_validate")

PAGE = ROOT / "docs" / "kubernetes.md"
NEWEST = validate.latest_version()
OLDEST = "1.29"
JOB_FIELDS = {"nprocPerNode", "elasticPolicy", "pytorchReplicaSpecs", "runPolicy"}
ELASTIC_FIELDS = {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
TRAINER_FIELDS = {"image", "command", "numNodes", "numProcPerNode", "resourcesPerNode"}
TEMPLATES = ["Job digits", "Job digits-gpu", "TrainJob digits", "PyTorchJob digits"]


def manifests() -> dict[str, Any]:
    """Return the manifests of the page, by kind and name."""
    texts = [block.text for block in blocks_of(PAGE) if block.language == "yaml"]
    found = [one for text in texts for one in yaml.safe_load_all(text)]
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


def template_of(name: str) -> Any:
    """Return the template of a manifest's pods, with the additions of its trainer."""
    spec = manifests()[name]["spec"]
    if "trainer" not in spec:
        return spec.get("pytorchReplicaSpecs", {}).get("Worker", spec)["template"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    assert (job["name"], template["spec"]["containers"][0]["name"]) == ("node", "node")
    assert set(spec["trainer"]) == TRAINER_FIELDS
    resources = {"resources": spec["trainer"]["resourcesPerNode"]}
    template["spec"]["containers"][0].update(resources)
    return template


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", ["Service digits", "Job digits", "Job digits-gpu"])
def test_a_manifest_is_what_the_api_takes(name, version):
    validate.validate(manifests()[name], version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_field_that_is_misspelt_is_found(version):
    job = manifests()["Job digits"]
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError, match="completionsMode"):
        validate.validate(job, version, strict=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_pods_of_a_manifest_are_those_of_the_api(name):
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "digits"},
        "template": template_of(name),
    }
    validate.validate(template, NEWEST, strict=True)
    # The image's user may write to the volume.
    user, group, of_files, _ = template["template"]["spec"]["securityContext"].values()
    arguments = f"ARG UID={user}\nARG GID={group}\n"
    assert arguments in (ROOT / "Dockerfile").read_text()
    assert of_files == group


def test_the_operators_job_has_the_fields_of_the_operator():
    job = manifests()["PyTorchJob digits"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]) <= JOB_FIELDS
    assert set(job["spec"]["elasticPolicy"]) <= ELASTIC_FIELDS
    assert isinstance(job["spec"]["nprocPerNode"], str)
    (container,) = template_of("PyTorchJob digits")["spec"]["containers"]
    assert container["name"] == "pytorch"  # the name that the operator looks for


def test_the_trainers_job_has_its_fields():
    job = manifests()["TrainJob digits"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert set(job["spec"]) == {"runtimeRef", "trainer", "runtimePatches"}
    words = job["spec"]["trainer"]["command"]
    options = torchrun.get_args_parser().parse_args(words[1:])
    assert options.rdzv_endpoint == "digits-node-0-0.digits:29400"
    # The job for GPUs starts a rank per GPU.
    (container,) = template_of("Job digits-gpu")["spec"]["containers"]
    assert container["command"][:4] == ["paceline", "run", "-n", "gpu"]
    assert "nvidia.com/gpu" in container["resources"]["limits"]


def test_the_job_and_its_service_find_one_another():
    service, job = (manifests()[f"{kind} digits"] for kind in ("Service", "Job"))
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert template_of("Job digits")["spec"]["subdomain"] == service["metadata"]["name"]
    words = template_of("Job digits")["spec"]["containers"][0]["command"]
    options = torchrun.get_args_parser().parse_args(words[1:])
    assert words[0] == "torchrun"
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:29400"
    assert options.nnodes == str(job["spec"]["completions"])
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert options.training_script == "train.py"


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_mounted_is_there(name):
    spec = template_of(name)["spec"]
    mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
