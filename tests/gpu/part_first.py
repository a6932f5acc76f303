"""What is worth knowing first, in four minutes: does it work at all?

A machine that is lent may be lost at any moment.  This builds the package once, without
nvcc (its kernels for every architecture take a minute; NVRTC makes those of this one in
seconds), and tries one thing of each kind, the most telling first.
"""

from __future__ import annotations

import importlib
import sys
import time

import part_build
from checks import checks_of, run_here

BUILD = [
    ("driver", part_build.driver),
    ("build", lambda: part_build.build("nvrtc", False)),
    ("imports", lambda: part_build.imports(["nvrtc"])),
    ("has_gpu", lambda: part_build.has_gpu("nvrtc")),
]


def run(seconds: float) -> bool:
    """Build, then check one rank, replicas, two ranks, and take one figure."""
    until = time.monotonic() + seconds - 10
    part_build.BUILT.mkdir(parents=True, exist_ok=True)
    is_built = run_here(BUILD)
    importlib.invalidate_caches()  # the package's folder was not there before
    sys.path_importer_cache.clear()
    return is_built and run_with_build(until)


def run_with_build(until: float) -> bool:
    """Run the checks, which import the package that now is there."""
    import bench_steps
    import check_failures
    import check_features
    import check_gradients
    import check_models
    import check_modes
    import check_replicas
    import check_replicas_modes
    import session
    from replica_world import in_one_process

    alone = [
        check_models.model_digits,
        check_gradients.sizes_and_types,
        check_failures.an_exception_in_backward,
        check_modes.graph_of_digits,
    ]
    together = [
        check_models.model_digits,
        check_gradients.sizes_and_types,
        check_models.model_transformer,
        check_gradients.unused_parameters,
        check_features.buffers_of_rank_0,
        check_failures.an_exception_in_backward,
        check_failures.a_rank_that_is_killed,
    ]
    replicas = [
        check_replicas.train_mlp,
        check_replicas_modes.evaluation_sees_all_writes,
        check_replicas_modes.a_step_waits_for_nothing,
    ]
    good = session.run_on_ranks(alone, (1,), until)
    good = session.run_on_ranks(in_one_process(replicas), (1,), until) and good
    timed = [c for c in checks_of(bench_steps) if c.name == "step_time_digits"]
    good = session.run_on_ranks(together, (2,), until) and good
    return session.run_on_ranks(timed, (1,), until) and good
