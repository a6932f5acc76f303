"""A process group in Python, for tests of groups that are neither Gloo nor NCCL."""

import paceline
import torch.distributed as dist


class WaitOnly(dist.Work):
    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def wait(self, timeout):  # torch's core calls it with this name
        self.counts["wait"] = self.counts.get("wait", 0) + 1
        return self.work.wait()


class FutureOnly(dist.Work):
    """A Work with a future only: its inherited wait() never returns."""

    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def get_future(self):
        self.counts["get_future"] = self.counts.get("get_future", 0) + 1
        return self.work.get_future()


class WaitAndFuture(FutureOnly):
    """A Work whose wait() and future must both be used."""

    wait = WaitOnly.wait


class Over(dist.ProcessGroup):
    """A group in Python that forwards to another one and counts its calls."""

    def __init__(self, inner, works=None):
        super().__init__(inner.rank(), inner.size())
        self.inner, self.works, self.counts = inner, works, {}
        self.fails_at = None

    def begin(self, kind, *args):
        n = self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.fails_at is not None and kind == "allreduce" and n >= self.fails_at:
            raise ConnectionError("the cable is out")
        work = getattr(self.inner, kind)(*args)
        return work if self.works is None else self.works(work, self.counts)

    # The names and options with which torch calls them.
    def allreduce(self, tensors, opts):
        return self.begin("allreduce", tensors, opts)

    def broadcast(self, tensors, opts):
        return self.begin("broadcast", tensors, opts)

    def allgather(self, outputs, inputs, opts):
        return self.begin("allgather", outputs, inputs, opts)

    def getBackendName(self):
        return "over"


def wrap_over(group, module, **options):
    return paceline.DistributedDataParallel(module, process_group=group, **options)
