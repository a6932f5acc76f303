"""The checks of client programs' runs fail when they should."""

from __future__ import annotations

import pytest
import torch
from launches import Run, check_equal
from support.clients import check_wrappers, end_all, start

OURS = "0 paceline.DistributedDataParallel\n1 paceline.DistributedDataParallel"
TORCHS = OURS.replace("paceline", "torch.nn.parallel.distributed")


@pytest.mark.parametrize("lines", [TORCHS, OURS.replace("1 paceline", "1 torch")])
def test_a_wrapper_of_torch_in_one_rank_fails_a_run(lines, tmp_path):
    (tmp_path / "1.txt").write_text(lines)
    with pytest.raises(AssertionError, match="torch"):
        check_wrappers("paceline", tmp_path)


def test_a_rank_without_a_wrapper_fails_a_run(tmp_path):
    (tmp_path / "1.txt").write_text(OURS.split("\n")[0])
    with pytest.raises(AssertionError, match="wrappers of each rank"):
        check_wrappers("paceline", tmp_path)


def test_one_bit_in_one_rank_fails_a_comparison():
    one, other = torch.ones(3), torch.ones(3)
    other[1] += torch.finfo(torch.float32).eps
    left = Run("", [{"train": [one]}, {"train": [one]}])
    right = Run("", [{"train": [one]}, {"train": [other]}])
    with pytest.raises(AssertionError, match="rank 1: train"):
        check_equal(left, right)


def test_a_process_that_a_program_leaves_is_found_and_killed(tmp_path):
    leaving = "import subprocess; subprocess.Popen(['sleep', '600'])"
    process, mark = start(["python3", "-c", leaving], tmp_path)
    assert process.wait(60) == 0
    assert end_all(mark, patience=0) == ["sleep 600 "]
