"""The devices of a wrapper's replicas, and the streams that they compute on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from paceline import _gpu, _native
from paceline._dp.devices import CPU

N_SLOTS = 3  # PLI_RING_SLOTS
_ALIGNMENT = 64
_N_TRIED = 1 << 13  # numbers of 64 bits

_log = logging.getLogger("paceline")


class Cpu:
    """The CPU in the place of GPUs: all has happened when a call returns."""

    def index_of_tensor(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return `expected` for what is on the CPU."""
        return expected if tensor.is_cpu else None

    def device(self, index: int) -> torch.device:
        """Return the CPU as torch names it."""
        return CPU

    def on(self, index: int, stream: Any) -> AbstractContextManager[Any]:
        """Return what changes nothing."""
        return nullcontext()

    def is_capturing(self) -> bool:
        """Tell that no graph is captured."""
        return False


HOST = Cpu()


class Streams(NamedTuple):
    """Streams of a group, one a member: as numbers, and as torch has them."""

    group: Group
    numbers: tuple[int, ...]
    handles: list[Any]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Have these streams be the current ones: what is allocated is theirs.

        A thread of autograd's has the stream of one device from the forward, and the
        default ones of all others.
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
    """Devices of this process, or the CPU several times; member 0's has the model.

    Attributes
    ----------
    indices : list of int
        The number of each, as torch counts; one may be there more than once.
    devices : list of torch.device
    machine : _gpu.Machine, or Cpu
        What knows of the devices.
    native : paceline._native.DeviceGroup or None
        None on the CPU.
    rooms : list of torch.Tensor or None
        By member, memory in which it adds up gradients.
    can_compare : bool
        Members may find out by themselves what has changed on member 0.

    Raises
    ------
    RuntimeError
        If two GPUs do not get each other's bytes.
    """

    def __init__(self, indices: Sequence[int], machine: Any) -> None:
        self._in_flight: list[tuple[Streams, Callable[[], None]]] = []
        self._lock = threading.Lock()
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
        self.can_compare = not self.is_cpu and self._try()

    def _try(self) -> bool:
        """Have each two GPUs exchange bytes, once a process; return `can_compare`.

        There are machines whose GPUs are said to reach each other, and get wrong bytes.
        """
        for j, k in itertools.combinations(range(len(self)), 2):
            key = self.indices[j], self.indices[k]
            if key[0] != key[1] and key not in _gpu.tried:
                # In a thread on the default streams, without modes of torch's.
                with ThreadPoolExecutor(1) as thread:
                    _gpu.tried[key] = thread.submit(self._try_pair, j, k).result()
        first = self.indices[0]
        return all(_gpu.tried.get((first, index), True) for index in self.indices)

    def _try_pair(self, j: int, k: int) -> bool:
        """Raise if bytes do not arrive as they were sent, from member to member.

        Tell whether a kernel of one reads of the other what is there; log where not.
        """
        numbers = self.native.streams()
        sent = torch.arange(1, _N_TRIED + 1) * 0x0123456789ABCDF  # each byte is another
        one, other = self.devices[j], self.devices[k]
        for source, target in ((j, k), (k, j)):
            block = sent.to(self.devices[source])
            place = block.to(self.devices[target])  # as torch gives its memory access
            place.fill_(-1)
            self.native.copy(numbers, source, [block], target, [place])
            if not torch.equal(place.cpu(), sent):
                raise RuntimeError(
                    f"what {self.devices[source]} sends to {self.devices[target]} "
                    "arrives as other bytes: an IOMMU, or PCIe access control (ACS), "
                    "redirects copies between GPUs, torch's too. Turn it off (in the "
                    "BIOS, or by the kernel's iommu=off), or give device_ids=[0]"
                )
        if j > 0 or not _gpu.machine.can_access(self.indices[k], self.indices[0]):
            return True  # no kernel reads
        if not self.native.readers()[k]:
            _log.warning(
                "the driver refuses peer access between %s and %s: copies go by way of "
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
        """Whether all members are the CPU: what is done has happened at once."""
        return self.machine is HOST

    def streams(self) -> Streams:
        """Return the streams that are current in this thread."""
        if self.is_cpu:
            return Streams(self, (), [None] * len(self))
        handles = [self.machine.current_stream(index) for index in self.indices]
        return Streams(self, self.native.streams(), handles)

    def ring(self, slot_bytes: int) -> torch.Tensor:
        """Return memory of member 0 that parameters pass through."""
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
        """Have memory in which all members but 0 add up gradients.

        It is theirs alone from the next transfer of parameters on.
        """
        n_bytes += _ALIGNMENT * len(self)  # shards of as many rows begin at multiples
        room = self.rooms[-1]
        if room is not None and len(room) >= n_bytes:
            return
        if room is not None:  # sums may be in it, on streams that torch does not know
            self.machine.synchronize()
        for k, device in enumerate(self.devices[1:], 1):
            self.rooms[k] = torch.empty(n_bytes, dtype=torch.uint8, device=device)

    def hold(self, streams: Streams, release: Callable[[], None]) -> None:
        """Keep gradients whose sum has begun until settle(), which releases them."""
        with self._lock:
            self._in_flight.append((streams, release))

    def settle(self) -> None:
        """Have streams wait for sums of gradients, whose memory may be freed then."""
        with self._lock:
            held, self._in_flight = self._in_flight, []
        for numbers in {streams.numbers for streams, _ in held}:
            self.native.settle(numbers)
        for _, release in held:
            release()

    def __del__(self) -> None:
        # Of a backward that has failed, and nothing came after it.
        if self._in_flight and not sys.is_finalizing():
            self.settle()

    def member_of(self, tensor: torch.Tensor, expected: int) -> int | None:
        """Return the member on whose device a tensor is, `expected` first."""
        index = self.machine.index_of_tensor(tensor, self.indices[expected])
        if index == self.indices[expected]:
            return expected
        return self.indices.index(index) if index in self.indices else None
