"""What `paceline.init()` reads from launchers' variables, without starting processes.

Processes under SLURM 22.05 (srun, sbatch, salloc), under mpirun of Open MPI 5.0 and of
MPICH 5.0 and under submitit 1.5.4 have printed these variables.  Those of MVAPICH2 are
as accelerate reads them.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from paceline._launch.launchers import find_launch
from paceline._launch.slurm import first_host
from paceline._launch.variables import Launch

MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    **MASTER,
    "TORCHELASTIC_RUN_ID": "none",
}
ALLOCATION = {
    "SLURM_JOB_ID": "1000",
    "SLURM_JOBID": "1000",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "login,node[003-005,9]",
    "SLURM_NODELIST": "login,node[003-005,9]",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x3),1(x2)",
}
BATCH = {
    **ALLOCATION,
    "ENVIRONMENT": "BATCH",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {
    **ALLOCATION,
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[003-005]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
SRUN_LAUNCH = Launch("slurm", 4, 5, 0, 1, "node003", 12000 + 1000 + 2 * 7919)
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-6325@1",
    "PMIX_RANK": "1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
}
ALONE = Launch("none", 0, 1, 0, 1)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def check_refused(environ: dict[str, str], *words: str) -> None:
    """Check that a single error contains all the words."""
    with pytest.raises(ValueError) as caught:
        find_launch(environ)
    assert [word for word in words if word not in str(caught.value)] == []


Launches = list[tuple[dict[str, str], Launch]]


def check_found(launches: Launches) -> None:
    for environ, launch in launches:
        assert find_launch(environ) == launch, environ


# ---- torchrun, and variables set by the user -----------------------------------------


def test_torchrun_and_own_variables_say_all_of_a_launch():
    own = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    check_found(
        [
            (TORCHRUN, Launch("torchrun", 3, 4, 1, 2, "head", 1234)),
            (own, Launch("environment", 3, 4, None, None, "head", 1234)),
            ({"RANK": "0", "WORLD_SIZE": "1"}, Launch("environment", 0, 1)),
            ({"PATH": "/bin", "HOME": "/root"}, ALONE),
            ({}, ALONE),
            (dict.fromkeys([*TORCHRUN, *SRUN, "TF_CONFIG"], " "), ALONE),
        ]
    )


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_one_missing_variable_is_named(name):
    present = without(TORCHRUN, name, "TORCHELASTIC_RUN_ID")
    assert len(present) == 5
    check_refused(present, f"set, but not {name}:", *map("=".join, present.items()))


@pytest.mark.parametrize("name", without(TORCHRUN, "TORCHELASTIC_RUN_ID"))
def test_one_variable_alone_is_refused(name):
    missing = [n for n in ("RANK", "WORLD_SIZE", *MASTER) if n != name]
    check_refused({name: TORCHRUN[name]}, f"{name}=", ", ".join(missing), "unset")


WRONG_NUMBERS = {
    "RANK": ["-1", "two", "1.0", "1_0", "٣"],
    "WORLD_SIZE": ["0", "4 4"],
    "LOCAL_RANK": ["-1"],
    "LOCAL_WORLD_SIZE": ["0"],
    "MASTER_PORT": ["0", "65536", "http"],
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_a_wrong_number_is_named_with_its_value(name):
    for value in WRONG_NUMBERS[name]:
        check_refused({**TORCHRUN, name: value}, f"{name} is ", value)


def test_numbers_have_their_limits():
    for port in (1, 65535):
        launch = find_launch({**TORCHRUN, "MASTER_PORT": str(port)})
        assert launch.master_port == port
    check_refused({**TORCHRUN, "RANK": "4"}, "rank 4 of 4", "torchrun", "WORLD_SIZE")
    check_refused({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 of 2", "LOCAL_RANK")
    check_refused({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "5 ranks", "LOCAL_WORLD_SIZE")
    unknown = without(TORCHRUN, "LOCAL_WORLD_SIZE")
    assert find_launch({**unknown, "LOCAL_RANK": "3"}).local_rank == 3
    check_refused({**unknown, "LOCAL_RANK": "4"}, "local rank 4 of 4")


# ---- SLURM ---------------------------------------------------------------------------


def test_the_step_counts_before_its_allocation():
    names = ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"]
    launch = find_launch(without(SRUN, *names))
    assert (launch.world_size, launch.local_world_size) == (8, 2)
    assert launch.master_addr == "login"
    for less in (SRUN, without(SRUN, "SLURM_STEP_ID"), without(SRUN, "SLURM_JOB_ID")):
        assert find_launch(less) == SRUN_LAUNCH


def test_the_oldest_names_of_slurm_will_do():
    new = [name for name in SRUN if name.startswith(("SLURM_STEP_", "SLURM_JOB_"))]
    launch = find_launch(without(SRUN, *new, "SLURM_NTASKS"))
    assert (launch.rank, launch.world_size, launch.master_addr) == (4, 8, "login")
    assert launch.master_port == SRUN_LAUNCH.master_port


@pytest.mark.parametrize("variables", [ALLOCATION, BATCH])
def test_what_srun_did_not_start_is_alone(variables):
    launch = find_launch(variables)
    assert (launch.launcher, launch.rank, launch.world_size) == ("none", 0, 1)
    assert launch.note == "SLURM_NTASKS is 8, but srun did not start this process"
    assert not find_launch({**variables, "SLURM_NTASKS": "1"}).note


def test_a_shell_that_salloc_starts_as_a_step_is_alone():
    step = {"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290"}
    shell = {**BATCH, **step, "SLURM_PTY_PORT": "34533"}
    for environ in (shell, {**shell, "SLURM_STEP_NUM_TASKS": "1"}):
        assert find_launch(environ).launcher == "none"


def test_a_shell_of_srun_with_several_tasks_is_refused():
    named = {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "34277"}
    shell = {**SRUN, "SLURM_STEP_ID": "0", **named}
    check_refused(shell, "--pty", "SLURM_STEP_NUM_TASKS=5", "RANK=0", "WORLD_SIZE=1")
    one = {**shell, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert find_launch(one).world_size == 1
    # Programs that srun starts from that shell, and programs with a terminal.
    for changes in ({"SLURM_STEP_ID": "1"}, {"SLURM_JOB_NAME": "python"}):
        assert find_launch({**shell, **changes}).world_size == 5
    assert find_launch(without(shell, "SLURM_PTY_PORT")).world_size == 5
    told = {**shell, "RANK": "0", "WORLD_SIZE": "1"}
    assert find_launch(told).launcher == "environment"


def test_a_task_without_a_step_is_refused():
    environ = without({**SRUN, "SLURM_PROCID": "1"}, "SLURM_STEP_ID", "SLURM_STEPID")
    check_refused(environ, "SLURM_PROCID=1", "SLURM_STEP_ID")


@pytest.mark.parametrize(
    "names",
    [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS",
        "SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_NODELIST",
        "SLURM_JOB_ID SLURM_JOBID",
    ],
)
def test_a_missing_variable_of_srun_is_named(names):
    first = names.split()[0]
    check_refused(without(SRUN, *names.split()), first, "srun", "MASTER_")


def test_the_users_master_counts_with_srun():
    names = [n for n in SRUN if "NODELIST" in n or n.startswith("SLURM_JOB")]
    launch = find_launch({**without(SRUN, *names), **MASTER})
    assert (launch.master_addr, launch.master_port) == ("head", 1234)
    launch = find_launch({**SRUN, "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("node003", 1234)


def test_a_step_of_one_task_needs_no_master():
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    launch = find_launch(environ)
    assert (launch.launcher, launch.world_size) == ("slurm", 1)
    assert launch.master_addr is None


def test_jobs_and_steps_of_one_host_have_ports_of_their_own():
    ports = [
        find_launch({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        for job in range(4_000_000, 4_000_100)
        for step in range(20)
    ]
    numbers = {launch.master_port or 0 for launch in ports}
    assert len(numbers) == len(ports)
    assert 12000 <= min(numbers) <= max(numbers) < 32000


def test_only_counts_of_this_node_in_a_whole_list_are_taken():
    for value in ("2(x2)", "2(x2),2", "2(x2,1", "", "2,2,1,0,"):
        environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": value}
        environ.pop("SLURM_TASKS_PER_NODE")
        assert find_launch(environ).local_world_size is None
    assert find_launch({**SRUN, "SLURM_NODEID": "3"}).local_world_size is None
    assert find_launch(without(SRUN, "SLURM_NODEID")).local_world_size is None
    assert find_launch({**SRUN, "SLURM_NODEID": "1"}).local_world_size == 2


# The first line that `scontrol show hostnames` of SLURM 22.05 prints.
@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-005,9]", "node003"),
        ("node[9,003-005]", "node9"),
        ("rack[0-1]node[1-2],x", "rack0node1"),
        ("a,b[1-2]", "a"),
        ("b,a", "b"),
        ("login", "login"),
        ("c[1,3-4],d", "c1"),
        ("node[7]", "node7"),
        ("gpu-01.example.org", "gpu-01.example.org"),
    ],
)
def test_the_first_host_is_that_of_scontrol(nodes, first):
    assert first_host(nodes) == first


NO_NODES = ["", "n[1-2", "n1-2]", "n[a-b]", "n[]", "n[1-]", "n[[1]]"]


@pytest.mark.parametrize("nodes", [*NO_NODES, "a,,b", ",a", "a,", "a b"])
def test_what_is_no_list_of_nodes_is_refused(nodes):
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        first_host(nodes)


# ---- MPI -----------------------------------------------------------------------------


def test_open_mpi_on_one_host_needs_no_master():
    launch = find_launch(OPEN_MPI)
    assert launch == Launch("openmpi", 1, 2, 1, 2, "127.0.0.1", launch.master_port)
    assert launch.master_port is not None
    assert 12000 <= launch.master_port < 32000
    other = find_launch({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-6326@1"})
    assert other.master_port != launch.master_port
    version_4 = without(OPEN_MPI, "PMIX_NAMESPACE")
    assert find_launch(version_4).master_port == 29500
    version_4["OMPI_MCA_ess_base_jobid"] = "2886860801"
    assert find_launch(version_4).master_port != 29500


def test_mpich_on_one_host_needs_no_master():
    assert find_launch(MPICH) == Launch("mpich", 1, 2, 1, 2, "127.0.0.1", 29500)
    one = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert find_launch(one) == Launch("mpich", 0, 1)
    in_job = find_launch({**MPICH, **ALLOCATION})
    assert in_job.launcher == "mpich"
    assert in_job.master_port != 29500


@pytest.mark.parametrize("lone", [OPEN_MPI, MVAPICH, MPICH])
def test_a_world_of_one_that_was_inherited_does_not_count(lone):
    numbers = ("0", "1", "0", "1")
    inherited = dict(zip(lone, numbers, strict=False))
    assert find_launch(inherited).world_size == 1
    assert find_launch({**inherited, **SRUN}) == SRUN_LAUNCH


@pytest.mark.parametrize("variables", [OPEN_MPI, MVAPICH, MPICH])
def test_mpirun_over_several_hosts_needs_a_master(variables):
    size = next(name for name in variables if name.endswith("_SIZE"))
    environ = {**variables, size: "4"}
    check_refused(environ, f"{size}=4", "MASTER_ADDR", "MASTER_PORT")
    launch = find_launch({**environ, **MASTER})
    assert (launch.rank, launch.world_size, launch.local_rank) == (1, 4, 1)
    assert (launch.master_addr, launch.master_port) == ("head", 1234)


@pytest.mark.parametrize("variables", [OPEN_MPI, MVAPICH, MPICH])
def test_ranks_that_may_be_elsewhere_need_a_master(variables):
    names = [name for name in variables if "LOCAL" in name]
    environ = without(variables, *names)
    check_refused(environ, "MASTER_ADDR")
    assert find_launch({**environ, **MASTER}).local_rank is None
    local = find_launch({**environ, **MASTER, "LOCAL_RANK": "0"})
    assert local.local_rank == 0


@pytest.mark.parametrize(
    "name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"]
)
def test_half_of_an_mpirun_is_refused(name):
    variables = OPEN_MPI if name in OPEN_MPI else MPICH
    check_refused(without(variables, name), name, "mpirun")
    check_refused({**variables, name: "x"}, name, "'x'")
    check_refused({**variables, **MASTER, name: "0" if "SIZE" in name else "2"})


def test_the_local_tasks_of_submitit_are_ranks_of_one_host():
    launch = find_launch(SUBMITIT)
    assert launch == Launch("submitit", 1, 2, 1, 2, "127.0.0.1", launch.master_port)
    # In the shell of an allocation, another job of submitit has another port.
    shell = {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **SUBMITIT}
    assert find_launch(shell) == launch
    other = find_launch({**shell, "SUBMITIT_LOCAL_JOB_ID": "4712"})
    assert other.master_port != launch.master_port != 29500
    check_refused(without(SUBMITIT, "SUBMITIT_LOCAL_GLOBALID"), "GLOBALID", "submitit")


def test_a_rank_without_a_number_of_ranks_is_refused():
    check_refused({"PMIX_RANK": "1"}, "PMIX_RANK=1", "WORLD_SIZE", "mpirun")
    # A shell that salloc starts as a step may have rank 0 of one.
    assert find_launch({"PMIX_RANK": "0"}) == ALONE


# ---- engines, whose tasks have no variables ------------------------------------------


def spark_of(n_tasks):
    context = SimpleNamespace(getTaskInfos=lambda: ["127.0.0.1:1"] * n_tasks)
    return {"BarrierTaskContext": SimpleNamespace(get=lambda: context)}


def ray_of(n_workers):
    context = SimpleNamespace(get_world_size=lambda: n_workers)
    return {"get_context": lambda: context}


@pytest.mark.parametrize(
    ("name", "engine_of", "context", "helper"),
    [
        ("pyspark", spark_of, "BarrierTaskContext", "TorchDistributor"),
        ("ray.train", ray_of, "get_context()", "TorchTrainer"),
    ],
)
def test_one_of_several_tasks_of_an_engine_does_not_train_alone(
    monkeypatch, name, engine_of, context, helper
):
    several = SimpleNamespace(**engine_of(2))
    monkeypatch.setitem(sys.modules, name, several)
    check_refused({}, f"{context} counts 2 tasks", helper, "MASTER_PORT")
    assert find_launch(TORCHRUN).launcher == "torchrun"
    assert find_launch({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    # One task, a context without a number, and a driver, where asking is an error.
    for engine in (engine_of(1), ray_of(None), {}):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**engine))
        assert find_launch({}) == ALONE


# ---- TF_CONFIG -----------------------------------------------------------------------

CLUSTER = {"worker": ["b:2", "a:3", "[::1]:4"], "chief": ["a:1"]}


def config(kind: object, index: object, cluster: object = CLUSTER) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def test_the_chief_is_first_and_workers_follow_it_and_evaluators_are_outside():
    one = {"chief": ["a:1"]}
    near = {**CLUSTER, "evaluator": ["c:1", "a:9", "a:8"]}
    one_host = {"worker": ["a:1"], "evaluator": ["a:2"]}
    two = {"worker": ["[::1]:4", "b:2"]}
    check_found(
        [
            (config("chief", 0), Launch("tf_config", 0, 4, 0, 2, "a", 1)),
            (config("worker", 0), Launch("tf_config", 1, 4, 0, 1, "a", 1)),
            (config("worker", "1"), Launch("tf_config", 2, 4, 1, 2, "a", 1)),
            (config("worker", 1, near), Launch("tf_config", 2, 4, 1, 2, "a", 1)),
            (config("worker", 2), Launch("tf_config", 3, 4, 0, 1, "a", 1)),
            (config("worker", 1, two), Launch("tf_config", 1, 2, 0, 1, "::1", 4)),
            (config("chief", 0, one), Launch("tf_config", 0, 1, 0, 1)),
            (config("evaluator", 0), Launch("tf_config", -1, 4, 0)),
            (config("evaluator", 0, near), Launch("tf_config", -1, 4, 0)),
            (config("evaluator", 1, near), Launch("tf_config", -1, 4, 2)),
            (config("evaluator", 2, near), Launch("tf_config", -1, 4, 3)),
            (config("evaluator", 0, one_host), Launch("tf_config", -1, 1, 1)),
        ]
    )
    check_refused(config("evaluator", 3, near), "evaluator 3", "3 of them")
    alone = config("evaluator", 0, {"evaluator": ["a:1"]})
    check_refused(alone, "neither a chief nor a worker")


def test_the_users_master_counts_with_a_cluster():
    launch = find_launch({**config("worker", 0), **MASTER})
    assert (launch.master_addr, launch.master_port) == ("head", 1234)


@pytest.mark.parametrize("text", ["{}", '{"environment": "cloud"}', '{"cluster": {}}'])
def test_a_config_without_a_cluster_is_no_launch(text):
    assert find_launch({"TF_CONFIG": text}) == ALONE


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{cluster", "not JSON"),
        ("[1]", "not a JSON object"),
        ('"chief"', "not a JSON object"),
        (json.dumps({"cluster": CLUSTER}), "task is None"),
        (json.dumps({"cluster": CLUSTER, "task": "worker"}), "task is 'worker'"),
        (json.dumps({"task": {"type": "worker", "index": 0}}), "cluster is None"),
        (json.dumps({"cluster": {}, "task": {"type": "worker"}}), "cluster is {}"),
        (json.dumps({"cluster": ["a:1"], "task": {}}), "cluster is ['a:1']"),
    ],
)
def test_a_malformed_config_is_refused(text, words):
    check_refused({"TF_CONFIG": text}, "TF_CONFIG", words, '"task"')


WRONG_TASKS = [
    (config("boss", 0), "'boss'"),
    (config("ps", 0), "parameter server"),
    (config(None, 0), "type is None"),
    (config(["worker"], 0), "type is ['worker']"),
    (config("worker", 3), "worker 3"),
    (config("chief", 1), "chief 1"),
    *[(config("worker", i), f"index is {i!r}") for i in (-1, None, True, 1.0, "x")],
    (config("evaluator", -1), "index is -1"),
]
NO_ADDRESSES = ["b", ":2", "b:0", "b:65536"]
WRONG_CLUSTERS = [
    ({"ps": ["p:1"]}, "parameter server"),
    ({"ps": []}, "parameter server"),
    ({"boss": ["p:1"]}, "'boss'"),
    ({"chief": ["a:1", "c:1"]}, "more than one chief"),
    ({"chief": ["b:2"]}, "b:2 appears 2 times"),
    ({"worker": ["b:2", "b:2"]}, "b:2 appears 2 times"),
    ({"worker": "b:2"}, "worker is 'b:2'"),
    ({"worker": [2]}, "worker is [2]"),
    *[({"worker": [bad]}, f"{bad!r} is not host:port") for bad in NO_ADDRESSES],
    ({"evaluator": ["c"]}, "'c' is not host:port"),
]


@pytest.mark.parametrize(("environ", "words"), WRONG_TASKS)
def test_a_wrong_task_is_refused(environ, words):
    check_refused(environ, "TF_CONFIG", words)


@pytest.mark.parametrize(("changes", "words"), WRONG_CLUSTERS)
def test_a_wrong_cluster_is_refused(changes, words):
    check_refused(config("worker", 0, {**CLUSTER, **changes}), "TF_CONFIG", words)


# ---- several launchers ---------------------------------------------------------------


def test_the_first_complete_launcher_counts():
    order = {
        "torchrun": TORCHRUN,
        "openmpi": OPEN_MPI,
        "mvapich": MVAPICH,
        "mpich": MPICH,
        "submitit": SUBMITIT,
        "tf_config": config("chief", 0),
        "slurm": SRUN,
    }
    every = {name: value for of in order.values() for name, value in of.items()}
    for launcher, variables in order.items():
        assert find_launch(every).launcher == launcher
        every = without(every, *variables)
    environ = {**TORCHRUN, "TF_CONFIG": "{", "PMI_RANK": "x", "SLURM_STEP_ID": "0"}
    assert find_launch(environ).launcher == "torchrun"


def test_srun_that_speaks_mpis_protocol_is_srun():
    same = {"PMI_RANK": "4", "PMI_SIZE": "5"}
    assert find_launch({**SRUN, **same}) == SRUN_LAUNCH
    # Hydra's daemons are tasks of srun and number their own children.
    for other in ({**same, "PMI_RANK": "3"}, {**same, "PMI_SIZE": "6"}):
        assert find_launch({**SRUN, **other, **MASTER}).launcher == "mpich"
    # A shell of the allocation, from which a user starts mpirun, is not a step.
    in_batch = {**BATCH, "PMI_RANK": "0", "PMI_SIZE": "8", **MASTER}
    assert find_launch(in_batch).launcher == "mpich"


def test_own_variables_that_agree_are_let_pass():
    agreeing = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "MASTER_PORT": "7"}
    launch = find_launch({**SRUN, **agreeing})
    assert (launch.launcher, launch.master_port) == ("slurm", 7)
    sized = find_launch({**without(SRUN, "SLURM_NODEID"), "LOCAL_WORLD_SIZE": "3"})
    assert sized.local_world_size == 3


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
)
def test_own_variables_that_disagree_are_named(name):
    check_refused({**SRUN, name: "3"}, f"{name} is 3", "slurm", f"unset {name}")
