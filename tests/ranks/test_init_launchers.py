"""`paceline.init()` in processes with the environment of each launcher."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.prints import without_gloo

JOB = str(Path(__file__).parent / "jobs" / "joining.py")
SECONDS = 120
LAUNCHERS = "SLURM", "OMPI_", "PMI", "MPI_LOCAL", "TORCHELASTIC_", "TF_CONFIG", "PRTE_"
OWN = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
OWN += ["MASTER_ADDR", "MASTER_PORT"]
ENV = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(LAUNCHERS) and name not in OWN
}
ENV["OMP_NUM_THREADS"] = "1"

# Try again if a port is in use, or if torch aborts: see test_install_children.py.
AGAIN = ("EADDRINUSE", "terminate called without an active exception")
TRIES = 5


def free_port():
    """Return a free port among those that `paceline.init()` derives from jobs."""
    while True:
        port = random.randrange(12000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def run_jobs(commands, *, is_real=False):
    """Run processes; return their reports, by rank, and what else they print.

    `commands` makes their commands from a free port.
    """
    for _ in range(TRIES):
        codes, out, err = run(commands(free_port()), is_real)
        if not any(words in err for words in AGAIN):
            break
    assert not any(codes), err
    reports = [json.loads(line) for line in without_gloo(out).splitlines()]
    return sorted(reports, key=lambda report: int(report["rank"])), err


def run(commands, is_real=False):
    """Run commands concurrently."""
    start = subprocess.Popen if is_real else warm.Popen
    running = [
        start(
            command,
            env={**ENV, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, variables in commands
    ]
    try:
        printed = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    return codes, "".join(out for out, _ in printed), "".join(err for _, err in printed)


def run_ranks_with(variables):
    """Start two ranks; `variables` makes their environment from rank and free port."""
    return run_jobs(
        lambda port: [([sys.executable, JOB], variables(rank, port)) for rank in (0, 1)]
    )


def check_world(reports, err, launcher, n_hosts=1):
    """Check that all ranks are in one world and average their gradients."""
    size = len(reports)
    mean = sum(range(size)) / size
    assert [report["rank"] for report in reports] == list(range(size))
    for rank, report in enumerate(reports):
        assert report["grad"] == [[mean, mean]]
        assert report["world_size"] == size
        assert report["launcher"] == launcher
        assert report["device"] == "cpu"
        assert report["is_same"]
        assert report["is_initialized"]
        environ = report["environ"]
        assert (environ["RANK"], environ["WORLD_SIZE"]) == (str(rank), str(size))
        assert environ["LOCAL_RANK"] == str(report["local_rank"])
    hosts = f"{n_hosts} host{'s' * (n_hosts > 1)}"
    line = f"paceline: {size} ranks on {hosts}, backend gloo, launcher {launcher}\n"
    assert err.count("paceline: ") == 1
    assert line in err


def local_ranks(reports):
    return [report["local_rank"] for report in reports]


def test_torchrun_makes_a_world():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", JOB]
    reports, err = run_jobs(lambda port: [(command, {})], is_real=True)
    check_world(reports, err, "torchrun")
    assert local_ranks(reports) == [0, 1]


# ---- the environment of each launcher, in ranks that this process starts ------------


WORDS = {
    "slurm": """
        SLURM_JOB_ID={job} SLURM_JOB_NODELIST=localhost SLURM_LOCALID={rank}
        SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_PROCID={rank} SLURM_STEP_ID=0
        SLURM_TASKS_PER_NODE=2
    """,
    "openmpi": """
        OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=2
        OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 MASTER_PORT={port}
    """,
    "mvapich": """
        MV2_COMM_WORLD_LOCAL_RANK={rank} MV2_COMM_WORLD_LOCAL_SIZE=2
        MV2_COMM_WORLD_RANK={rank} MV2_COMM_WORLD_SIZE=2 MASTER_PORT={port}
    """,
    "mpich": """
        MPI_LOCALNRANKS=2 MPI_LOCALRANKID={rank} PMI_RANK={rank} PMI_SIZE=2
        MASTER_PORT={port}
    """,
    "submitit": """
        SUBMITIT_LOCAL_GLOBALID={rank} SUBMITIT_LOCAL_LOCALID={rank}
        SUBMITIT_LOCAL_NTASKS=2 MASTER_PORT={port}
    """,
    # A user's settings.  Without a launcher's local rank, init() counts it.
    "environment": """
        RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}
    """,
}


def variables_of(launcher, rank, port):
    """Return the variables that a launcher sets for a rank."""
    words = WORDS[launcher].format(rank=rank, port=port, job=port - 12000)
    return dict(word.split("=") for word in words.split())


@pytest.mark.parametrize("launcher", WORDS)
def test_ranks_with_the_variables_of_a_launcher_make_a_world(launcher):
    ports = []

    def note_port(rank, port):
        ports.append(str(port))
        return variables_of(launcher, rank, port)

    reports, err = run_ranks_with(note_port)
    check_world(reports, err, launcher)
    assert local_ranks(reports) == [0, 1]
    if launcher != "environment":
        assert reports[1]["environ"] == {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost" if launcher == "slurm" else "127.0.0.1",
            "MASTER_PORT": ports[-1],
        }


@pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun")
def test_a_real_mpirun_makes_a_world():
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = ["mpirun", "-n", "2", sys.executable, JOB]
    reports, err = run_jobs(
        lambda port: [(command, {**root, "MASTER_PORT": str(port)})], is_real=True
    )
    check_world(reports, err, reports[0]["launcher"])
    assert reports[0]["launcher"] in ("openmpi", "mpich")


def test_local_ranks_are_counted_by_host():
    reports, err = run_ranks_with(
        lambda rank, port: {
            **variables_of("environment", rank, port),
            "NCCL_HOSTID": f"host-{rank}",
        }
    )
    check_world(reports, err, "environment", n_hosts=2)
    assert local_ranks(reports) == [0, 0]


ALONE = """
import os, paceline
before = dict(os.environ)
try:
    paceline.init(timeout=1)
except RuntimeError as error:
    print(error)
    assert dict(os.environ) == before
"""


def test_a_rank_that_meets_no_other_says_where_it_waited():
    ports = [free_port(), free_port()]
    ranks = [
        ([sys.executable, "-c", ALONE], variables_of("slurm", rank, port))
        for rank, port in enumerate(ports)
    ]
    codes, out, err = run(ranks)
    assert codes == [0, 0], err
    for rank, (port, line) in enumerate(zip(ports, out.splitlines(), strict=True)):
        start = f"rank {rank} of 2 (launcher: slurm) could not join the world at "
        assert line.startswith(f"{start}localhost:{port}: ")
        assert "MASTER_ADDR and MASTER_PORT" in line
