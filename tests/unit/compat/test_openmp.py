"""The threads of OpenMP that work for torch."""

import os

import pytest
import torch
from paceline._compat import openmp


def n_threads():
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="without OpenMP")
def test_workers_of_this_thread_end_and_come_back():
    values, before = torch.ones(1 << 22), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(2):
            assert (values + 1).sum().item() == 2 << 22
            n_at_work = n_threads()
            openmp.end_workers()
            assert n_threads() == n_at_work - 3
    finally:
        torch.set_num_threads(before)
