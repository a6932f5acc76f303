"""What torch's DistributedDataParallel has and ours has not yet: each says so."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline._checkpoint import LoadsEither


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"DistributedDataParallel.{name} is not there in this version of paceline"
    )


class Unsupported(LoadsEither, TorchDDP):
    """torch's class with the methods refused that need its own reducer.

    Their inherited code would fail on attributes that only torch's constructor makes.
    """

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Not there yet."""
        _refuse("register_comm_hook")

    def _register_builtin_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("_register_builtin_comm_hook")

    def _register_buffer_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("_register_buffer_comm_hook")

    def _register_fused_optim(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("_register_fused_optim")

    def _get_ddp_logging_data(self) -> NoReturn:
        _refuse("_get_ddp_logging_data")

    def _set_ddp_runtime_logging_sample_rate(self, *_: Any) -> NoReturn:
        _refuse("_set_ddp_runtime_logging_sample_rate")

    def _set_sparse_metadata(self, *_: Any) -> NoReturn:
        _refuse("_set_sparse_metadata")

    def _update_process_group(self, *_: Any) -> NoReturn:
        _refuse("_update_process_group")

    def _remove_autograd_hooks(self) -> NoReturn:
        _refuse("_remove_autograd_hooks")

    def _check_reducer_finalized(self) -> NoReturn:
        _refuse("_check_reducer_finalized")
