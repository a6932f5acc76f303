"""``model.reducer`` and ``model.logger``: objects that other libraries call.

Lightning, accelerate, mmcv, pipelining and torch itself reach through a wrapper to its
reducer.  These two objects take the same calls as torch's, and apply them to ours.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from paceline import _environment, _recorder
from paceline._compat import torch_core, torch_groups
from paceline._ddp import strict
from paceline._ddp.forward_pass import ForwardPass
from paceline._ddp.model_spec import sum_over_ranks
from paceline._ddp.session import Session
from paceline._ddp.step_callbacks import wait_for
from paceline._ddp.step_log import join_numbers

_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_ALWAYS = (
    "MASTER_PORT",
    "MASTER_ADDR",
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_VISIBLE_DEVICES",
)
_OF_BACKEND = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}
_GLOO_THREADS = 2  # torch's ProcessGroupGloo


def _do_nothing(*_: Any) -> None:
    """Do nothing: this class needs no such call."""


class _Facade:
    """Refers to its wrapper weakly."""

    def __init__(self, wrapper: Any) -> None:
        self._reference = weakref.ref(wrapper)

    @property
    def _wrapper(self) -> Any:
        wrapper = self._reference()
        if wrapper is None:
            raise RuntimeError("the DistributedDataParallel of this object is gone")
        return wrapper

    @property
    def _session(self) -> Session:
        session: Session = self._wrapper._session
        return session


class ReducerFacade(_Facade):
    """Methods of ``torch.distributed.Reducer`` that others call, for one wrapper."""

    prepare_for_forward = _do_nothing  # the wrapper's own forward does this
    set_logger = _do_nothing  # the wrapper has one
    _delay_all_reduce = _do_nothing  # averages are in place before each backward ends
    _push_all_rebuilt_params = _do_nothing  # shadow steps get the order by themselves
    _reset_state = _do_nothing  # the next forward makes a new world
    _set_forward_pass_work_handle = _do_nothing  # join.py notifies joined ranks
    _set_optimizer_in_backward = _do_nothing  # the wrapper steps such optimizers

    # ---- before and after a forward -----------------------------------------------

    def prepare_for_backward(self, outputs: Any = ()) -> None:
        """Synchronise the next backward, of `outputs`, although its forward was not."""
        session, reducer = self._session, self._session.reducer
        if reducer is None or reducer.is_active:
            return
        reducer.await_backward()
        session.requested_step = reducer.step
        ForwardPass(session, reducer).watch(outputs)

    def _rebuild_buckets(self) -> bool:
        """Tell, once, that the buckets are in the order in which gradients arrived.

        There is nothing to do: the first backward has sorted them.
        """
        reducer, log = self._session.reducer, self._session.log
        if log.has_rebuilt or reducer is None or reducer.step == 0:
            return False
        log.has_rebuilt = True
        return True

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        """Wait for futures before the next backward ends."""
        session, pending = self._session, list(futures)
        if session.reducer is None:
            wait_for(pending)
        else:
            session.callbacks.once(session.reducer, lambda: wait_for(pending))

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward has not ended, or left parameters out.

        The latter only under ``strict``.
        """
        reducer = self._session.reducer
        if reducer is not None and reducer.is_active:
            raise RuntimeError(
                f"{strict.UNFINISHED}The last backward was not seen to end: run the "
                "model's forward through the wrapper, or call finalize_backward()."
            )
        self._session.refuse_unused()

    def _set_manual_finalization_required(self, required: bool) -> None:
        """Let ``finalize_backward()`` end the steps, or the backwards."""
        session, is_manual = self._session, bool(required)
        is_active = session.reducer is not None and session.reducer.is_active
        if is_active and is_manual != session.options.is_manual:
            raise RuntimeError(
                "set_manual_finalization_required cannot be called after forward while "
                "a backward pass is expected or in progress."
            )
        session.options = dataclasses.replace(session.options, is_manual=is_manual)
        session.set_up_alone()
        if session.reducer is not None:
            session.reducer.is_manual = is_manual

    def _finalize_backward_manual(self) -> None:
        """End the step of the last backward."""
        reducer, problem = self._session.reducer, None
        if not self._session.options.is_manual:
            problem = (
                "but manual backward finalization is not required. Set "
                "require_manual_backward_finalization to true first."
            )
        elif reducer is None or not reducer.is_active:
            problem = (
                "but no gradient reduction requires finalization. This can happen if "
                "no_sync() is active or finalize_backward() was already called for "
                "this backward pass."
            )
        elif torch_core.is_in_backward() and not all(reducer.ready_counts):
            problem = "before all DDP buckets were ready. Call it after backward()."
        if reducer is None or problem is not None:
            raise RuntimeError(f"finalize_backward() called {problem}")
        reducer.finish()

    # ---- what it knows --------------------------------------------------------------

    def _get_local_used_map(self) -> torch.Tensor:
        """Return on how many ranks each parameter was used in the last step.

        int32, one number for each parameter that requires a gradient.  With
        ``find_unused_parameters`` all ranks must call together; otherwise, as in torch,
        a rank counts only itself.
        """
        reducer = self._session.reducer
        counts = reducer.ready_counts if reducer is not None else b""
        used = torch.tensor([int(n > 0) for n in counts], dtype=torch.int32)
        if reducer is None or not self._wrapper.find_unused_parameters:
            return used
        return sum_over_ranks(self._session.world, used)

    def _ddp_graph_static(self) -> bool:
        """Tell whether every step had equally many gradients of each parameter."""
        return self._session.log.is_static(self._session.reducer)

    def get_backward_stats(self) -> list[int]:
        """Return when the bucket of each gradient was full in the last step.

        Nanoseconds after the forward's end; 0 if no gradient arrived, or if steps are
        not recorded.
        """
        reducer, recorder = self._session.reducer, self._session.recorder
        if reducer is None:
            return [0] * len(self._session.model.trainable)
        stats: dict[int, int] = {}
        step = _recorder.own_step(recorder, reducer.step)
        for recorded, bucket in zip(step.buckets, reducer.buckets, strict=False):
            stats |= dict.fromkeys(bucket, recorded.ready - step.forward_end)
        return [stats.get(i, 0) if n else 0 for i, n in enumerate(reducer.ready_counts)]

    # ---- settings -------------------------------------------------------------------

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure every ``sample_rate``-th step after the first ten."""
        rate = operator.index(sample_rate)
        if rate < 1:
            raise ValueError(f"sample_rate is {rate}: give 1 or more")
        self._session.log.rate = rate

    def _set_static_graph(self) -> None:
        """Declare that the graph never changes; see the wrapper's own."""
        self._wrapper.static_graph = True

    def _set_sparse_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Ignore a hint: sparse gradients contain their rows."""
        dict(metadata)

    def _remove_autograd_hooks(self) -> None:
        """Remove the hooks from the parameters: gradients are no longer averaged."""
        if self._session.reducer is not None:
            self._session.reducer.detach()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next forward on."""
        self._wrapper.process_group = group
        self._session.move(group)

    # ---- communication --------------------------------------------------------------

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket over the group's ranks, without dividing it."""
        group = self._wrapper.process_group
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])


class LoggerFacade(_Facade):
    """Methods of ``torch.distributed.Logger`` that others call, for one wrapper."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the data as torch does: ``strs_map`` and ``ints_map``."""
        data = _logging_data(self._wrapper)
        return SimpleNamespace(
            strs_map={k: v for k, v in data.items() if isinstance(v, str)},
            ints_map={k: v for k, v in data.items() if not isinstance(v, str)},
        )

    def _set_comm_hook_name(self, name: str) -> None:
        """Note the name of the hook that carries the gradients."""
        self._session.hooks.name = name

    def _set_uneven_input_join(self) -> None:
        """Note that a join context was entered."""
        self._session.log.entries["join_uneven_inputs"] = 1

    _set_static_graph = _do_nothing  # the wrapper's attribute holds it
    set_construction_data_and_log = _do_nothing  # taken from the wrapper
    set_runtime_stats_and_log = _do_nothing  # forwards record the step before

    def set_error_and_log(self, error: str) -> None:
        """Note an error: ``has_error``, ``error`` and ``iteration`` in the data."""
        self._session.log.note_error(str(error))


def _logging_data(wrapper: Any) -> dict[str, Any]:
    """Return all logging data of a wrapper: strings and integers.

    Times are in nanoseconds, sizes in bytes; torch documents the keys in
    ``c10/util/Logging.h``.
    """
    log = wrapper._session.log
    data = _of_construction(wrapper)
    data["can_set_static_graph"] = int(log.is_static(wrapper._session.reducer))
    if wrapper.static_graph:
        data["static_graph"] = 1
    if wrapper._session.hooks.name:
        data["comm_hook"] = wrapper._session.hooks.name
    data |= log.entries
    if wrapper.skip_all_reduce_unused_params:
        data["num_buckets_reduced"] = log.n_buckets_used
    return data


def _of_construction(wrapper: Any) -> dict[str, Any]:
    parameters = wrapper._session.model.trainable
    sizes = [p.numel() * p.element_size() for p in parameters]
    buckets = wrapper._session.log.first_buckets or [list(range(len(parameters)))]
    backend = _backend_of(wrapper.process_group)
    data: dict[str, Any] = {
        "world_size": wrapper.process_group.size(),
        "rank": wrapper.process_group.rank(),
        "module_name": type(wrapper.module).__name__,
        "device_ids": join_numbers(wrapper.device_ids or ()),
        "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
        "broadcast_buffers": int(wrapper.forward_sync_buffers),
        "bucket_cap_bytes": int(wrapper.bucket_bytes_cap),
        "find_unused_parameters": int(wrapper.find_unused_parameters),
        "gradient_as_bucket_view": int(wrapper.gradient_as_bucket_view),
        "is_multi_device_module": 0,
        "has_sync_bn": int(
            any(
                isinstance(part, torch.nn.SyncBatchNorm)
                for part in wrapper.module.modules()
            )
        ),
        "backend_name": backend,
        "dtypes": ", ".join(
            sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})
        ),
        "total_parameter_size_bytes": sum(sizes),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": join_numbers(sum(sizes[i] for i in b) for b in buckets),
        "iteration": 0,
    }
    for name in (*_ALWAYS, *_OF_BACKEND.get(backend, ())):
        key = name.lower().removeprefix("torch_" if "NCCL" in name else "")
        data[key] = _environment.of_launcher(name)
    if backend == "gloo":
        data["gloo_num_threads"] = _GLOO_THREADS
    return data


def _backend_of(group: dist.ProcessGroup) -> str:
    try:
        return str(dist.get_backend(group))
    except (RuntimeError, ValueError, TypeError):  # not registered, or destroyed
        return torch_groups.cpu_backend_name(group)
