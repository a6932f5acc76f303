"""Types of the native module (csrc/python)."""

import os
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, final

import torch

MAX_HOSTS: int
MAX_SHARED_MEMORY_RANKS: int
N_LINK_STREAMS: int

class PeerError(RuntimeError): ...
class PeerTimeoutError(PeerError, TimeoutError): ...
class MismatchError(RuntimeError): ...

def attach_torch(**callables: Any) -> None: ...
def after_fork_in_child() -> None: ...
def has_ended(pid: int, /) -> bool: ...
def die_with(pidfd: int, pipe_fd: int, /) -> None: ...
def isa() -> str: ...
def flatten(value: Any, /) -> tuple[Tree, list[Any]]: ...
def scatter(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], n: int, dim: int, /
) -> Scattered: ...
def gather(
    outputs: Sequence[Any], sizes: tuple[int, ...], dim: int, join: Any = None, /
) -> Any: ...
def measure(
    params: Sequence[torch.Tensor],
    buffers: Sequence[tuple[dict[str, Any], str]],
    bucket_bytes: int,
    last_bytes: int,
    sparse: Sequence[int] = (),
    device: Device | None = None,
    world_size: int = 0,
    /,
) -> tuple[int, int, int]: ...
def unwound_keeper(
    kept: list[Any], /
) -> Callable[[CodeType, int, BaseException], None]: ...
def nccl_version(path: str | None, /) -> int: ...
def driver_version(path: str | None, /) -> int: ...

@final
class Listener:
    def __new__(cls) -> Listener: ...
    @property
    def address(self) -> str: ...

@final
class Device:
    def __new__(
        cls,
        index: int,
        driver: str | None = None,
        nvrtc: str | None = None,
        dlpack_type: int = 2,
    ) -> Device: ...
    @property
    def index(self) -> int: ...
    @property
    def kernels(self) -> str: ...
    @property
    def name(self) -> str: ...
    def synchronize(self) -> None: ...

@final
class DeviceGroup:
    def __new__(cls, devices: Sequence[Device]) -> DeviceGroup: ...
    def streams(self) -> tuple[int, ...]: ...
    def copy(
        self,
        streams: tuple[int, ...],
        source: int,
        tensors: list[torch.Tensor],
        target: int,
        places: list[torch.Tensor],
        /,
    ) -> None: ...
    def broadcast(
        self,
        streams: tuple[int, ...],
        ring: torch.Tensor,
        segments: list[
            tuple[list[torch.Tensor], list[int], int, list[torch.Tensor | None]]
        ],
        /,
    ) -> None: ...
    def refresh(
        self,
        streams: tuple[int, ...],
        ring: torch.Tensor,
        segments: list[
            tuple[list[torch.Tensor], list[int], int, list[torch.Tensor | None]]
        ],
        sums: list[torch.Tensor | None],
        /,
    ) -> None: ...
    def sum(
        self,
        streams: tuple[int, ...],
        rooms: list[torch.Tensor | None],
        rows: list[tuple[int, torch.Tensor]],
        to: torch.Tensor,
        /,
    ) -> None: ...
    def pack(
        self,
        streams: tuple[int, ...],
        member: int,
        gradients: list[torch.Tensor | None],
        slots: list[torch.Tensor],
        offsets: list[int],
        block: torch.Tensor,
        /,
    ) -> list[int]: ...

@final
class Recorder:
    def __new__(cls, path: str | os.PathLike[str], who: str) -> Recorder: ...
    def record(self, activity: int, step: int, /) -> None: ...
    def close(self) -> None: ...

@final
class World:
    def __new__(
        cls,
        rank: int,
        world_size: int,
        arena_bytes: int,
        n_ops: int,
        timeout: float,
        pids: Sequence[int],
        meeting: Listener | str | None,
        group_comm: Any = None,
        device: Device | None = None,
        device_bytes: int = 0,
        nccl: str | None = None,
        accumulate: str = "nccl",
        hosts: tuple[Sequence[int], tuple[str, ...], Sequence[int]] | None = None,
    ) -> World: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def uses_group(self) -> bool: ...
    def issue(
        self,
        kind: str,
        dtype: str,
        reduction: str,
        offset_bytes: int,
        n_elems: int,
        root: int = 0,
        /,
    ) -> int: ...
    def wait(self, ticket: int, /) -> None: ...
    def recover(self) -> None: ...
    def broadcast(self, tensors: Sequence[torch.Tensor], root: int = 0, /) -> None: ...
    def note_exception(self, text: str | None, /) -> None: ...
    def record(self, recorder: Recorder, /) -> None: ...
    def leave(self) -> None: ...

@final
class Reducer:
    def __new__(
        cls,
        world: World,
        params: Sequence[torch.Tensor],
        buffers: Sequence[tuple[dict[str, Any], str]],
        bucket_bytes: int,
        last_bytes: int,
        view_bytes: int,
        sparse: Sequence[int] = (),
        caps: Sequence[int] = (),
    ) -> Reducer: ...
    sync: bool
    keeps_grads: bool
    strict: bool
    follows_forwards: bool
    ends_with_step: bool
    on_finish: Callable[[], object] | None
    contexts: Callable[[int], Sequence[Any]] | None
    @property
    def has_other_buffers(self) -> bool: ...
    @property
    def ready_counts(self) -> bytes: ...
    unused: bytes
    @property
    def step(self) -> int: ...
    @property
    def is_active(self) -> bool: ...
    @property
    def n_active(self) -> int: ...
    @property
    def buckets(self) -> list[list[int]]: ...
    def forward_begins(self) -> None: ...
    def forward_ends(self, is_watched: bool, is_training: bool, /) -> int: ...
    def await_backward(self) -> None: ...
    def forward_fails(self, /) -> None: ...
    def sync_buffers(self) -> None: ...
    def apply_buffers(self) -> None: ...
    def on_output(self, is_synchronised: bool, token: int, /) -> bool: ...
    def arrive_in_context(self, index: int, task: int, /) -> None: ...
    def detach(self) -> None: ...
    def shadow_step(
        self, is_first: bool, binds_results: bool, /
    ) -> tuple[int, int]: ...
    def set_join(self, divides_by_active: bool, raises: bool, /) -> None: ...
    def abandon(self, text: str, /) -> None: ...
    def set_comm_hook(
        self,
        hook: Any,
        bucket_bytes: int,
        last_bytes: int,
        caps: Sequence[int] = (),
    ) -> None: ...
    def poll(self) -> None: ...
    def read_bucket(self, bucket: int, tensor: torch.Tensor, /) -> None: ...
    def write_bucket(self, bucket: int, tensor: torch.Tensor, /) -> None: ...

@final
class Watch:
    def __new__(
        cls,
        dicts: list[dict[str, Any]],
        items: list[tuple[dict[str, Any], str]],
        parameters: list[tuple[dict[str, Any], str]],
    ) -> Watch: ...
    def changed(self) -> bool: ...

@final
class Hook:
    @property
    def function(self) -> Callable[[torch.Tensor], None]: ...

@final
class BackwardEnd:
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

@final
class Tree:
    def unflatten(self, leaves: Sequence[Any], /) -> Any: ...
    def path(self, index: int, /) -> str: ...

@final
class Scattered:
    @property
    def tree(self) -> Tree: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    def leaves(self, k: int, /) -> list[Any]: ...
    def chunk(self, k: int, /) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
