"""``model.reducer`` and ``model.logger``: what other libraries call on torch's own.

Lightning, accelerate, mmcv, pipelining and torch itself reach through a wrapper into
its reducer.  These two objects take the same calls, and know what each means for ours.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline import _logging_data, _strict
from paceline._finish import wait_for
from paceline._pass import Pass

if TYPE_CHECKING:
    from paceline._surface import Surface


class _Facade:
    """Knows its wrapper without keeping it."""

    def __init__(self, wrapper: Surface) -> None:
        self._reference = weakref.ref(wrapper)

    @property
    def _wrapper(self) -> Surface:
        wrapper = self._reference()
        if wrapper is None:
            raise RuntimeError("the DistributedDataParallel of this object is gone")
        return wrapper


class Reducer(_Facade):
    """What ``torch.distributed.Reducer`` is asked by name, for one wrapper."""

    # ---- before and after a forward -----------------------------------------------

    def prepare_for_forward(self) -> None:
        """Do nothing: forwards are prepared in the wrapper's own."""

    def prepare_for_backward(self, outputs: Any = ()) -> None:
        """Have the next backward synchronised, although its forward was not.

        Parameters
        ----------
        outputs : torch.Tensor or sequence of torch.Tensor
            What is to be differentiated.  None need be given.
        """
        wrapper = self._wrapper
        reducer = wrapper._reducer
        if reducer is None or reducer.is_active:
            return
        reducer.forward_ends(True)
        wrapper._demand.step = reducer.step
        Pass(reducer, wrapper._demand, is_first=False).watch(outputs)

    def _rebuild_buckets(self) -> bool:
        """Tell, once, that the buckets are in the order in which gradients came.

        Nothing is to be done: the first backward has seen to it.
        """
        wrapper = self._wrapper
        reducer, journal = wrapper._reducer, wrapper._journal
        if journal.has_rebuilt or reducer is None or reducer.step == 0:
            return False
        journal.has_rebuilt = True
        return True

    def _delay_all_reduce(self) -> None:
        """Do nothing: no backward ends before all its gradients are averaged."""

    def _install_post_backward_futures(self, futures: Iterable[Any]) -> None:
        """Wait for futures before the next backward ends."""
        wrapper = self._wrapper
        pending = list(futures)
        if wrapper._reducer is None:
            wait_for(pending)
        else:
            wrapper._finish.once(wrapper._reducer, lambda: wait_for(pending))

    def _check_reducer_finalized(self) -> None:
        """Raise where the last backward has not ended, or left parameters out.

        Raises
        ------
        RuntimeError
            In the first case; in the second under ``strict`` alone.
        """
        wrapper = self._wrapper
        if wrapper._reducer is not None and wrapper._reducer.is_active:
            raise RuntimeError(
                f"{_strict.UNFINISHED}The last backward was not seen to end: run the "
                "model's forward through the wrapper."
            )
        wrapper._refuse_unused()

    # ---- what it knows --------------------------------------------------------------

    def _get_local_used_map(self) -> torch.Tensor:
        """Return on how many ranks each parameter was used in the last step.

        int32, a number for each parameter that requires a gradient.  With
        ``find_unused_parameters`` all ranks must ask together; without it, as in torch,
        a rank knows of itself alone.
        """
        wrapper = self._wrapper
        fires = wrapper._reducer.fires if wrapper._reducer is not None else b""
        used = torch.tensor([int(n > 0) for n in fires], dtype=torch.int32)
        if wrapper._is_alone or not wrapper.find_unused_parameters:
            return used
        world, total = wrapper._world, torch.zeros_like(used)
        for rank in range(world.world_size):
            of_rank = used.clone()
            world.broadcast([of_rank], rank)
            total += of_rank
        return total

    def _ddp_graph_static(self) -> bool:
        """Tell whether every step had as many gradients of each parameter."""
        wrapper = self._wrapper
        wrapper._compare_with_last_step()
        return wrapper._journal.is_static

    def get_backward_stats(self) -> list[int]:
        """Return when each gradient came in the last sampled step.

        Nanoseconds after the forward's end; 0 where none came.
        """
        wrapper = self._wrapper
        times = [0] * len(wrapper._model.trainable)
        sample = wrapper._journal.last
        for i, at in sample.arrivals if sample is not None else []:
            times[i] = at - sample.forward_end  # type: ignore[union-attr]
        return times

    # ---- settings -------------------------------------------------------------------

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Measure every ``sample_rate``-th step after the first ten."""
        self._wrapper._journal.rate = int(sample_rate)

    def _set_static_graph(self) -> None:
        """Declare that the graph never changes; see the wrapper's own."""
        self._wrapper.static_graph = True

    def _set_sparse_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Take a hint that is not needed: sparse gradients tell their rows."""
        dict(metadata)

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: gradients are no longer averaged."""
        if self._wrapper._reducer is not None:
            self._wrapper._reducer.detach()

    def _reset_state(self) -> None:
        """Do nothing: the next forward leaves a failed step behind."""

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from the next forward on."""
        self._wrapper._join_group(group)

    def _push_all_rebuilt_params(self) -> None:
        """Do nothing: a rank that stands in knows the order."""

    def _set_forward_pass_work_handle(self, *_: Any) -> None:
        """Do nothing: what a joined rank is told is told otherwise."""

    def _set_optimizer_in_backward(self) -> None:
        """Do nothing: the wrapper steps such optimizers."""

    def set_logger(self, logger: Any) -> None:
        """Do nothing: the wrapper has one."""

    # ---- communication --------------------------------------------------------------

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket over the group's ranks, without dividing it."""
        group = self._wrapper.process_group
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        future: torch.futures.Future[Any] = work.get_future()
        return future.then(lambda done: done.value()[0])


class Logger(_Facade):
    """What ``torch.distributed.Logger`` is asked by name, for one wrapper."""

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Return the data as torch does: ``strs_map`` and ``ints_map``."""
        data = _logging_data.of(self._wrapper)
        return SimpleNamespace(
            strs_map={k: v for k, v in data.items() if isinstance(v, str)},
            ints_map={k: v for k, v in data.items() if not isinstance(v, str)},
        )

    def _set_comm_hook_name(self, name: str) -> None:
        """Note which hook carries the gradients."""
        self._wrapper._name_comm_hook(name)

    def _set_static_graph(self) -> None:
        """Do nothing: the wrapper's attribute tells."""

    def _set_uneven_input_join(self) -> None:
        """Note that a join context was entered."""
        self._wrapper._journal.entries["join_uneven_inputs"] = 1

    def set_construction_data_and_log(self, *_: Any) -> None:
        """Do nothing: the wrapper knows how it was made."""

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing: each forward records the sampled step before it."""

    def set_error_and_log(self, error: str) -> None:
        """Note an error: ``has_error``, ``error`` and ``iteration`` in the data."""
        self._wrapper._journal.note_error(str(error))
