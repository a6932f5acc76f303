"""What the tests of process groups of other kinds share: a group in Python."""

import paceline
import torch.distributed as dist


class WaitOnly(dist.Work):
    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def wait(self, timeout):  # as torch's core calls it
        self.counts["wait"] = self.counts.get("wait", 0) + 1
        return self.work.wait()


class FutureOnly(dist.Work):
    """The inherited wait() of such a Work never returns."""

    def __init__(self, work, counts):
        super().__init__()
        self.work, self.counts = work, counts

    def get_future(self):
        self.counts["get_future"] = self.counts.get("get_future", 0) + 1
        return self.work.get_future()


class WaitAndFuture(FutureOnly):
    """Each of the two is to be called."""

    wait = WaitOnly.wait


class Over(dist.ProcessGroup):
    """A group in Python over another; it counts its calls."""

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

    # As torch calls them, with options.
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
