"""docs/kubernetes.md: what users apply is what the API and torchrun take."""

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


def manifests() -> dict[str, Any]:
    """Return what the page has, by kind."""
    texts = [block.text for block in blocks_of(PAGE) if block.language == "yaml"]
    found = [one for text in texts for one in yaml.safe_load_all(text)]
    return {manifest["kind"]: manifest for manifest in found}


def template_of(kind: str) -> Any:
    spec = manifests()[kind]["spec"]
    workers = spec.get("pytorchReplicaSpecs", {}).get("Worker", spec)
    return workers["template"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_a_manifest_is_what_the_api_takes(kind, version):
    validate.validate(manifests()[kind], version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_field_that_is_misspelt_is_found(version):
    job = manifests()["Job"]
    job["spec"]["completionsMode"] = job["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError, match="completionsMode"):
        validate.validate(job, version, strict=True)


def test_the_operators_job_has_a_template_of_the_api():
    job = manifests()["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]) <= JOB_FIELDS
    assert set(job["spec"]["elasticPolicy"]) <= ELASTIC_FIELDS
    assert isinstance(job["spec"]["nprocPerNode"], str)
    template = {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": "digits"},
        "template": template_of("PyTorchJob"),
    }
    validate.validate(template, NEWEST, strict=True)
    # The operator looks for a container of that name.
    assert template_of("PyTorchJob")["spec"]["containers"][0]["name"] == "pytorch"


def test_the_job_and_its_service_find_one_another():
    service, job = (manifests()[kind] for kind in ("Service", "Job"))
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    assert template_of("Job")["spec"]["subdomain"] == service["metadata"]["name"]
    words = template_of("Job")["spec"]["containers"][0]["command"]
    options = torchrun.get_args_parser().parse_args(words[1:])
    assert words[0] == "torchrun"
    assert options.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:29400"
    assert options.nnodes == str(job["spec"]["completions"])
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert options.training_script == "train.py"


@pytest.mark.parametrize("kind", ["Job", "PyTorchJob"])
def test_what_is_mounted_is_there(kind):
    spec = template_of(kind)["spec"]
    mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
