"""The devices of a wrapper's replicas, and the streams that they compute on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from paceline import _gpu, _native
from paceline._dp.devices import CPU

N_SLOTS = 3  # PLI_RING_SLOTS
_ALIGNMENT = 64
_N_TRIED = 1 << 13  # 64-bit numbers

_log = logging.getLogger("paceline")


class Cpu:
    """The CPU in place of GPUs: all work is done when a call returns."""

    def index_of_tensor(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return `expected` for a tensor on the CPU."""
        return expected if tensor.is_cpu else None

    def device(self, index: int) -> torch.device:
        """Return the CPU as torch names it."""
        return CPU

    def on(self, index: int, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that changes nothing."""
        return nullcontext()

    def is_capturing(self) -> bool:
        """Return False: the CPU captures no graphs."""
        return False


HOST = Cpu()


class Streams(NamedTuple):
    """The streams of a group's members, as numbers and as torch's objects."""

    group: Group
    numbers: tuple[int, ...]
    handles: list[Any]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Make these streams current, so that memory is allocated for them.

        A thread of autograd has the forward's stream on one device, and the default
        streams on all others.
        """
        group, machine = self.group, self.group.machine
        if group.is_cpu or group.native.streams() == self.numbers:
            yield
            return
        with contextlib.ExitStack() as stack:
            here = machine.current()
            for index, handle in zip(group.indices, self.handles, strict=True):
                stack.enter_context(machine.on(index, handle))
            stack.enter_context(machine.on(here, machine.current_stream(here)))
            yield


class Group:
    """Devices of this process, or the CPU several times; the model is on member 0.

    Attributes
    ----------
    indices : list of int
        torch's number of each; a device may be there more than once.
    devices : list of torch.device
    machine : _gpu.Machine, or Cpu
        Access to the devices.
    native : paceline._native.DeviceGroup or None
        None on the CPU.
    rooms : list of torch.Tensor or None
        By member, memory in which it adds up gradients.
    readers : list of int
        The members that can find out by themselves what changed on member 0.

    Raises
    ------
    RuntimeError
        If bytes copied between two GPUs arrive as other bytes.
    """

    def __init__(self, indices: Sequence[int], machine: Any) -> None:
        self._in_flight: dict[Callable[[], None], Streams] = {}  # by what releases it
        self.machine = machine
        self.indices = list(indices)
        self.devices: list[torch.device] = [
            machine.device(index) for index in self.indices
        ]
        self.native: Any = None  # the CPU needs none
        if not self.is_cpu:
            opened = [_gpu.open_device(index) for index in self.indices]
            self.native = _native.DeviceGroup(opened)
        self.rooms: list[torch.Tensor | None] = [None] * len(self.indices)
        self._memories: dict[tuple[str, int], torch.Tensor] = {}
        self.readers = [] if self.is_cpu else self._try()

    def _try(self) -> list[int]:
        """Make each two GPUs exchange bytes, once per process; return `readers`.

        On some machines GPUs report access to each other, and read wrong bytes.
        """
        for j, k in itertools.combinations(range(len(self)), 2):
            key = self.indices[j], self.indices[k]
            if key[0] != key[1] and key not in _gpu.tried:
                # In a thread on the default streams, without torch's modes.
                with ThreadPoolExecutor(1) as thread:
                    _gpu.tried[key] = thread.submit(self._try_pair, j, k).result()
        ways = [(self.indices[0], index) for index in self.indices]
        can_read = self.native.readers()
        return [
            k for k, way in enumerate(ways) if can_read[k] and _gpu.tried.get(way, True)
        ]

    def _try_pair(self, j: int, k: int) -> bool:
        """Raise if a copy from member to member changes bytes.

        Tell whether a kernel of one member reads the other's memory right; else log it.
        """
        numbers = self.native.streams()
        sent = torch.arange(1, _N_TRIED + 1) * 0x0123456789ABCDF  # of varied bytes
        one, other = self.devices[j], self.devices[k]
        for source, target in ((j, k), (k, j)):
            block = sent.to(self.devices[source])
            try:
                place = block.to(self.devices[target])  # torch enables peer access
            except RuntimeError:  # and fails at the driver's limit
                place = sent.to(self.devices[target])
            place.fill_(-1)
            self.native.copy(numbers, source, [block], target, [place])
            if not torch.equal(place.cpu(), sent):
                raise RuntimeError(
                    f"data that {self.devices[source]} sends to {self.devices[target]} "
                    "arrives as other bytes: an IOMMU, or PCIe access control (ACS), "
                    "redirects copies between GPUs, torch's too. Turn it off (in the "
                    "BIOS, or by the kernel's iommu=off), or give device_ids=[0]"
                )
        if j > 0 or not _gpu.machine.can_access(self.indices[k], self.indices[0]):
            return True  # no kernel reads
        if not self.native.readers()[k]:
            _log.warning(
                "the driver refuses peer access between %s and %s: copies go through "
                "the host's memory",
                one,
                other,
            )
            return True
        block, place = sent.to(one), sent.to(other).fill_(-1)
        blocks = [place if member == k else None for member in range(len(self))]
        segment = [block], [0], block.nbytes, blocks
        ring, sums = self.ring(_ALIGNMENT), self.sums(1)
        self.native.broadcast(numbers, ring, [segment], sums)
        if torch.equal(place.cpu(), sent):
            return True
        _log.warning(
            "kernels of %s and %s read wrong bytes: all parameters are sent", one, other
        )
        return False

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def is_cpu(self) -> bool:
        """Whether all members are the CPU, where calls return when all work is done."""
        return self.machine is HOST

    def streams(self) -> Streams:
        """Return the streams that are current in this thread."""
        if self.is_cpu:
            return Streams(self, (), [None] * len(self))
        handles = [self.machine.current_stream(index) for index in self.indices]
        return Streams(self, self.native.streams(), handles)

    def ring(self, slot_bytes: int) -> torch.Tensor:
        """Return memory of member 0 for parameters in transit."""
        return self._memory("ring", 0, N_SLOTS * slot_bytes)

    def sums(self, n_segments: int) -> list[torch.Tensor | None]:
        """Return memory by member for checksums of segments, its own and member 0's."""
        return [
            self._memory("sums", k, 8 * n_segments * (1 if k == 0 else 2))
            for k in range(len(self))
        ]

    def _memory(self, name: str, member: int, n_bytes: int) -> torch.Tensor:
        memory = self._memories.get((name, member))
        if memory is None or len(memory) != n_bytes:
            device = self.devices[member]
            memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
            self._memories[name, member] = memory
        return memory

    # ---- sums of gradients ----------------------------------------------------------

    def make_rooms(self, n_bytes: int) -> None:
        """Allocate memory in which all members but 0 add up gradients.

        Only sums use it from the next transfer of parameters on.
        """
        n_bytes += _ALIGNMENT * len(self)  # each row of a shard is aligned
        room = self.rooms[-1]
        if room is not None and len(room) >= n_bytes:
            return
        if room is not None:  # sums may use it, on streams unknown to torch
            self.machine.synchronize()
        for k, device in enumerate(self.devices[1:], 1):
            self.rooms[k] = torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def hold(self, streams: Streams, release: Callable[[], None]) -> None:
        """Keep gradients whose sum has begun until settle(), which releases them."""
        self._in_flight[release] = streams

    def settle(self) -> None:
        """Make streams wait for sums of gradients; then their memory may be freed.

        Without a lock, which Ctrl-C could leave taken; the next call does again what it
        has broken off.
        """
        held = dict(self._in_flight)
        for numbers in {streams.numbers for streams in held.values()}:
            self.native.settle(numbers)
        for release in held:
            if self._in_flight.pop(release, None) is not None:
                release()

    def __del__(self) -> None:
        # Left by a failed backward that was the last.
        if getattr(self, "_in_flight", None) and not sys.is_finalizing():
            self.settle()

    def member_of(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return the member on whose device a tensor is, `expected` first."""
        index = self.machine.index_of_tensor(tensor, self.indices[expected])
        if index == self.indices[expected]:
            return expected
        return self.indices.index(index) if index in self.indices else None
