"""Runs torch's own tests of DistributedDataParallel beside RPC with our class.

They lie in the torch wheel: `ddp_under_dist_autograd_test`, without those for GPUs.  In
fresh processes, over Gloo and TensorPipe; with `-m hand`, by torch's class too.
"""

import os

import pytest
import torch
from support.ranks import run_ranks, values

pytest.importorskip("expecttest", reason="torch's own tests import it")

TIMEOUT = 60.0  # of one test, in seconds: the longest takes a tenth of it
COMPARED, TRAINED = ("DdpComparisonTest", 4), ("DdpUnderDistAutogradTest", 6)
TESTS = {  # where it is, the number of processes, and how often each wraps a module
    "test_ddp_comparison": (*COMPARED, [1] * 4),
    "test_ddp_comparison_uneven_inputs": (*COMPARED, [1] * 4),
    "test_ddp_dist_autograd_local_vs_remote": (*COMPARED, [2] * 4),
    "test_ddp_dist_autograd_sparse_grads": (*COMPARED, [1] * 4),
    "test_backward_ddp_inside": (*TRAINED, [1] * 4 + [0] * 2),
    "test_backward_ddp_outside": (*TRAINED, [1] * 4 + [0] * 2),
    "test_backward_ddp_outside_uneven_inputs": (*TRAINED, [1] * 4 + [0] * 2),
}


kept = []  # torch's wrappers: to drop one soon after a backward here may hang in torch


def run_in_process(rank, _, home, test, is_torch, folder):
    """Run one of torch's tests in this process; return how many wrappers were made."""
    import paceline
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as file
    from torch.testing._internal.distributed.rpc import (
        tensorpipe_rpc_agent_test_fixture as rpc_fixture,
    )

    torch.set_num_threads(1)
    built = 0
    theirs = torch.nn.parallel.DistributedDataParallel

    class Counted(theirs if is_torch else paceline.DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            nonlocal built
            built += 1
            super().__init__(*args, **kwargs)
            if is_torch:
                kept.append(self)

    class Case(
        rpc_fixture.TensorPipeRpcAgentTestFixture, getattr(file, home), TestCase
    ):
        pass

    file.DistributedDataParallel = Counted
    case = Case(test)
    case.rank, case.file_name = rank, os.path.join(folder, "meeting")
    getattr(case, test)()
    return built


def run(test, is_torch, folder):
    home, n_processes, built = TESTS[test]
    outcomes = run_ranks(
        run_in_process,
        n_processes,
        *(home, test, is_torch, str(folder)),
        timeout=TIMEOUT,
        rendezvous="none",
        # The master may ask a trainer for a group before that has its default one.
        env={"TORCH_DIST_INIT_BARRIER": "1"},
    )
    assert values(outcomes) == built


@pytest.mark.parametrize("test", TESTS)
def test_our_class_passes_torchs_own(test, tmp_path):
    run(test, False, tmp_path)


@pytest.mark.hand
@pytest.mark.parametrize("test", TESTS)
def test_torchs_own_class_passes_them(test, tmp_path):
    run(test, True, tmp_path)
