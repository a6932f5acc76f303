"""The checks of each part and the sizes of their worlds; see main.py.

A part imports its modules when it runs, since `first` builds the package for them.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from dataclasses import replace
from functools import partial

import session
from checks import Check, Skip, checks_of, is_fake, run_here

GRADIENTS = ("check_gradients", "check_models", "check_modes", "check_features")
REPLICAS = ("check_replicas", "check_replicas_modes")
ON_RANKS = {
    "alone": (GRADIENTS, (1,)),
    "nccl": (GRADIENTS, (2, 3)),
    "failures": (("check_input", "check_failures"), (1, 2, 3)),
    "memory": (("check_memory",), (1, 2)),
}
FIRST_NCCL = 23003  # 2.30.3 is the first to put two ranks on one GPU

# One check of each kind, the most informative first.
FIRST_ALONE = """check_models.model_digits check_gradients.sizes_and_types
    check_failures.an_exception_in_backward check_modes.graph_of_digits"""
FIRST_REPLICAS = """check_replicas.train_mlp
    check_programs.programs_writes
    check_replicas_modes.a_step_waits_for_nothing"""
FIRST_TOGETHER = """check_models.model_digits check_gradients.sizes_and_types
    check_models.model_transformer check_rows.rows_models
    check_failures.an_exception_in_backward check_failures.a_rank_that_is_killed"""


def run(name: str, seconds: float) -> bool:
    until = time.monotonic() + seconds - 15
    if name in ON_RANKS:
        modules, sizes = ON_RANKS[name]
        return session.run_on_ranks(checks_in(modules), sizes, until)
    if name in ("build", "kernels", "contexts", "sanitizer"):
        good: bool = importlib.import_module(f"part_{name}").run(seconds)
        return good
    others = {
        "first": first,
        "shared": shared,
        "replicas": replicas,
        "expandable": partial(under, "expandable_segments:True"),
        "pools": partial(under, "backend:cudaMallocAsync"),
        "rows": rows,
        "traces": traces,
        "bench": bench,
        "rehearsal": rehearsal,
    }
    return others[name](until)


def rehearsal(until: float) -> bool:
    """Run the checks of `alone`, `nccl` and `failures` in as few processes as possible.

    All run with 2 ranks; with 3 ranks those that are not about one more model; with 1
    rank those without other ranks.
    """
    modules, _ = ON_RANKS["failures"]
    found = []
    for each in checks_in((*GRADIENTS, *modules)):
        sizes = set(each.worlds)
        if 2 in sizes:
            sizes.discard(1)
            if each.module == "check_models" and each.name != "model_digits":
                sizes.discard(3)
        found.append(replace(each, worlds=tuple(sizes)))
    return session.run_on_ranks(found, (2, 3, 1), until)


def checks_in(modules: tuple[str, ...]) -> list[Check]:
    return [c for name in modules for c in checks_of(importlib.import_module(name))]


def named(words: str) -> list[Check]:
    pairs = (word.split(".") for word in words.split())
    return [getattr(importlib.import_module(module), name) for module, name in pairs]


def first(until: float) -> bool:
    """Build without nvcc; check one rank, replicas, two ranks; measure one figure.

    A rented machine may be lost at any moment.  nvcc needs a minute for the kernels of
    all architectures; NVRTC compiles those of this one in seconds.
    """
    import part_build

    part_build.BUILT.mkdir(parents=True, exist_ok=True)
    steps = [
        ("driver", part_build.driver),
        ("build", lambda: part_build.build("nvrtc", False)),
        ("imports", lambda: part_build.imports(["nvrtc"])),
        ("has_gpu", lambda: part_build.has_gpu("nvrtc")),
    ]
    is_built = bool(os.environ.get("PACELINE_GPU_INSTALLED")) or run_here(steps)
    importlib.invalidate_caches()  # the package's folder is new
    sys.path_importer_cache.clear()
    if not is_built:
        return False
    from replica_world import in_one_process

    good = session.run_on_ranks(named(FIRST_ALONE), (1,), until)
    one_process = in_one_process(named(FIRST_REPLICAS))
    good = session.run_on_ranks(one_process, (1,), until) and good
    good = session.run_on_ranks(named(FIRST_TOGETHER), (2,), until) and good
    timed = named("bench_steps.step_time_digits")
    return session.run_on_ranks(timed, (1,), until) and good


def knows_nccl() -> None:
    """Skip the check if NCCL is too old to run two ranks on one GPU."""
    from paceline import _native

    if is_fake():
        raise Skip("a rehearsal")
    version = _native.nccl_version(None)
    if version < FIRST_NCCL:
        raise Skip(f"NCCL is {version}; {session.SHARE} is known from {FIRST_NCCL} on")


def shared(until: float) -> bool:
    """Two ranks that NCCL treats as on one GPU, without sockets."""
    try:
        knows_nccl()
    except Skip:
        return run_here([("knows_nccl", knows_nccl)])
    modules = ("check_gradients", "check_models", "check_failures")
    return session.run_on_ranks(session.share(checks_in(modules)), (2,), until)


def replicas(until: float) -> bool:
    """DataParallel: several replicas on one GPU, in one process."""
    from replica_world import in_one_process

    return session.run_on_ranks(in_one_process(checks_in(REPLICAS)), (1,), until)


def rows(until: float) -> bool:
    """Run the rows of tests/parity for GPUs, which the Python suite simulates."""
    from replica_world import in_one_process

    programs = in_one_process(checks_in(("check_programs",)))
    good = session.run_on_ranks(programs, (1,), until)
    return session.run_on_ranks(checks_in(("check_rows",)), (2, 3), until) and good


def under(allocator: str, until: float) -> bool:
    """DataParallel, and one rank with a reducer, with another allocator of torch."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    good = replicas(until)
    modules, sizes = ON_RANKS["alone"]
    return session.run_on_ranks(checks_in(modules), sizes, until) and good


def traces(until: float) -> bool:
    """Trace a step of each wrapper with torch.profiler, into OUT."""
    from replica_world import in_one_process

    good = session.run_on_ranks(named("check_traces.of_a_rank"), (1,), until)
    of_replicas = in_one_process(named("check_traces.of_replicas"))
    return session.run_on_ranks(of_replicas, (1,), until) and good


def bench(until: float) -> bool:
    """Time replicas, whole steps of one rank, kernels in this process, two ranks.

    Each figure with a target for GPUs is judged ("meets", "misses").  A benchmark is
    not a test: a figure that misses its target fails nothing.
    """
    from replica_world import in_one_process

    steps = checks_in(("bench_steps",))
    timed = in_one_process(checks_in(("bench_replicas",)))
    good = session.run_on_ranks(timed, (1,), until)
    good = session.run_on_ranks(steps, (1,), until) and good
    if not is_fake():
        good = run_here(importlib.import_module("bench_kernels").checks()) and good
    return session.run_on_ranks(steps, (2,), until) and good
