"""DistributedDataParallel: torch's class in name and contract, our core underneath."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from typing_extensions import Self

from paceline import _environment
from paceline._checkpoint import LoadsEither, Wrapped
from paceline._compat import torch_core, torch_groups
from paceline._ddp.join import JoinContext, ShadowSteps
from paceline._ddp.model_spec import Model
from paceline._ddp.options import (
    MIB,
    Options,
    check_delayed,
    read_group,
    warn_of_deprecated,
)
from paceline._ddp.options import read as read_options
from paceline._ddp.session import JoinState, Phase, Session
from paceline._ddp.torch_surface import TorchSurface


class DistributedDataParallel(LoadsEither[Wrapped], TorchSurface):
    """Trains one model on all ranks of a process group: a drop-in for torch's class.

    Each rank runs the same script on its share of the data; gradients come out of
    ``backward()`` averaged over the ranks, and parameters stay equal.  Gradients travel
    while backward still runs: on the CPU through memory that the ranks of a host share,
    on GPUs by NCCL.

    Parameters
    ----------
    module : torch.nn.Module
        The model, with its parameters on the CPU, or all on one GPU (CUDA).
    device_ids : list of one int, str or torch.device, optional
        The GPU that the module is on: each forward moves its inputs there.  If None,
        inputs stay where they are.  None or empty on the CPU.
    output_device : int, str or torch.device, optional
        Kept for compatibility: outputs stay where the module makes them.
    dim : int, default 0
        Kept for compatibility.
    broadcast_buffers : bool, optional
        Whether rank 0's buffers (BatchNorm's statistics) reach every rank; default
        True.
    init_sync : bool, default True
        Whether rank 0's parameters and buffers are copied to all ranks at construction.
        (That the ranks' models agree is checked in any case.)
    process_group : torch.distributed.ProcessGroup, optional
        The ranks, up to 4,096; by default those of the default group.  On the CPU, with
        Gloo or NCCL, the ranks of a host (up to 1,024) average gradients in shared
        memory, and hosts (up to 1,024) by sockets between their first ranks.  With more
        ranks, or a group of another kind (MPI, a subclass in Python), they use the
        group's own collectives, which must accept CPU tensors.  On GPUs gradients
        always travel by NCCL, even if the group is over Gloo.
    bucket_cap_mb : float, optional
        The size of a bucket: gradients that are averaged together, in MiB.  Default: 1
        in shared memory; torch's 25 with NCCL, a communication hook or the group's
        collectives.  On GPUs the bucket that fills last has at most 1, because no
        computation hides its all-reduce.
    find_unused_parameters, static_graph : bool
        Accepted and not needed: unused parameters are found in any case, and a graph
        may change from step to step (unless ``strict``).
    gradient_as_bucket_view : bool, default False
        On GPUs, whether the ``.grad`` of parameters of 32 KiB and more is a view of its
        bucket, so that gradients are in memory only once.  The next step overwrites a
        view that you keep, as with torch's class.  On the CPU new gradients of that
        size are always views; there the option decides whether a ``.grad`` that existed
        before the backward is replaced by a view, or stays the same tensor.
    skip_all_reduce_unused_params, batched_grad_copy, check_reduction : bool
        Accepted and not needed.
    lazy_bucket_allocation : bool
        Accepted, without effect: buckets keep their memory.
    device_mesh : torch.distributed.DeviceMesh, optional
        A 1-D mesh, or a 1-D slice of a larger one, instead of ``process_group``.  With
        a slice, the module may come from ``parallelize_module``, as in torch's class,
        and may also be evaluated before the first step.
    bucket_cap_mb_list : list of float, optional
        The size of each bucket in MiB, in the order in which buckets fill.
    forward_sync_buffers : bool, optional
        The newer name of ``broadcast_buffers``; False still copies them at the start.
    delay_all_reduce_named_params, param_to_hook_all_reduce : optional
        Accepted together, and not needed: gradients of the named parameters are
        averaged with all others.
    mixed_precision : torch.nn.parallel.distributed._MixedPrecision, optional
        Computes forwards in its ``param_dtype``, averages gradients in its
        ``reduce_dtype``, and keeps buffers in its ``buffer_dtype``: float16, bfloat16,
        float32, float64, or None, which changes nothing (a ``reduce_dtype`` of None
        means ``param_dtype``).  Experimental in torch.  FSDP's ``MixedPrecision`` will
        do, but BatchNorm is computed in ``param_dtype`` too.  As alternatives,
        ``autocast`` chooses a dtype per operation; ``bf16_compress_hook`` only averages
        in 16 bits.
    strict : bool, optional
        Whether to raise torch's errors for uses that this class otherwise supports:
        unused parameters without ``find_unused_parameters``; with it, a gradient of a
        parameter that no output depends on; a second gradient of a parameter in one
        backward; a graph that changes under ``static_graph``; bfloat16 hooks on the
        CPU.  Default: whether ``PACELINE_STRICT`` is 1.
    accumulate_in_fp32 : bool
        Removed: True raises an error that says what to write instead.

    Attributes
    ----------
    module : torch.nn.Module
        The model.
    require_backward_grad_sync : bool
        Whether gradients of a forward's backward are averaged.  Each forward reads it,
        as in torch.  :meth:`no_sync` sets it.

    Raises
    ------
    RuntimeError
        On every rank, if no parameter of some rank's model requires a gradient, or a
        lazy parameter has no shape yet.
    paceline.MismatchError
        On every rank, if the models differ; the message names the first difference.
    NotImplementedError
        On every rank, if an argument or a device is not supported yet, if parameters
        are on several GPUs, or if the driver or NCCL is missing or too old.
    TypeError
        On every rank, if an argument has a wrong type.
    ValueError
        If there is no process group.  On every rank, if an argument is out of range,
        ``device_ids`` is not the module's device, two ranks share a GPU, or torch's
        class wraps a part of the module.  From a forward: if torch's class wraps this.
    paceline.PeerError
        If another rank dies during construction; later also from ``backward()``, and
        from a forward that waits for rank 0's buffers.

    Examples
    --------
    With one rank; in a script for ``torchrun``, ``dist.init_process_group("gloo")``
    makes a group of all ranks:

    >>> import torch, torch.distributed as dist
    >>> from paceline import DistributedDataParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(torch.nn.Linear(10, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(8, 10)).square().mean().backward()
    ...     optimizer.step()  # by the mean of the ranks' gradients
    >>> list(model.state_dict())
    ['module.weight', 'module.bias']
    >>> dist.destroy_process_group()

    Notes
    -----
    The contract is that of `torch's class
    <https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>`_.
    Where it differs:

    - Parameters may be frozen and unfrozen at any time.  After wrapping they may be
      converted, replaced or added, and frozen ones may be trained: the next forward
      notices this on every rank, and wraps the model anew.  It also does so if buffers
      are added, removed or change their size (if a buffer grows in a forward, each rank
      keeps its own in that step).  As in torch, no buffer travels if the model had none
      when it was wrapped.  Tensors that never travel may differ: frozen parameters that
      only some ranks add, and buffers without ``broadcast_buffers``.  If only one rank
      changes a tensor that travels, all ranks raise ``MismatchError``.
    - A copy (``copy.deepcopy``, ``pickle``) first communicates in a forward that
      records gradients, or in a join, so one rank may make and evaluate a copy alone.
      If ranks only evaluate a copy (an average of the wrapper's weights), each uses its
      own buffers; torch's copy takes over rank 0's in its first forward.  Send them
      yourself, or evaluate on rank 0.
    - A parameter that no rank used in a step keeps its ``.grad``, whatever the flags.
    - Ranks need not use a sparse embedding in each step.  If its gradient is dense on
      any rank, the average is dense on all.  Any parameter's gradient may be sparse.
    - Evaluation (``torch.no_grad``) never communicates.  The first after a step uses
      rank 0's buffers from the end of that step's backward.  In the forward that trains
      next, ranks take over rank 0's buffers; in torch each rank keeps its own there.
    - If a model has buffers, all ranks need the same forwards that record gradients:
      each takes over rank 0's.  While one awaits its backward, later ones keep theirs
      on GPUs, across hosts, and if the group's own collectives carry gradients.  In a
      join context forwards only take over buffers that came with a step.
    - Wrappers may share parts.  A buffer that the graph of another wrapper has saved
      must not change before its backward, which raises autograd's own error; statistics
      of batch and instance norms in training may, since no backward needs them.
    - Each step carries the number of forwards since the last one.  If ranks are not in
      the same step (one has caught an exception between forward and backward), all
      raise ``MismatchError``.  If a forward must not be trained, run it under
      ``torch.no_grad()``, through ``wrapper.module``, or in evaluation mode if steps
      are in training mode.  If a loss must not count, let it still depend on the output
      (``0 * output.sum()``).  A reentrant checkpoint around the wrapper hides its
      forwards: then steps are paired by their order, as in torch.
    - Every backward of a synchronised forward is averaged, even with several forwards,
      a retained graph, or a local backward in between.  torch averages only the first
      backward after the last forward; later ones stay local.  So do ours if outputs are
      hidden in objects that are no container, dataclass or pytree.
    - ``no_sync()`` also works around ``backward()`` alone.
    - In a backward a large parameter's ``.grad`` is None from the arrival of its
      gradient until the average is there, unless the parameter has hooks of yours (on
      GPUs only with ``gradient_as_bucket_view``).
    - After that backward ``.grad`` is a view of a bucket.  It cannot grow or be freed:
      ``resize_()``, a larger ``out=`` and ``untyped_storage().resize_()`` raise torch's
      error for a storage that is not resizable.  Apply them to ``p.grad.clone()``.
    - If a gradient is None on every rank (set by a hook, or returned by a
      ``Function``), ``.grad`` stays unchanged, so that no optimizer steps by it; torch
      makes it zeros.
    - If a rank dies, leaves or fails, the others raise ``PeerError``, which names it;
      in a backward ``PeerError`` also replaces their own exceptions.
    - On the CPU sums are taken in rank order, so each run gives the same bits.
    - If the group's own collectives carry gradients, sums are in the group's order, and
      only the group can notice a rank that dies, as in torch.  If the group itself has
      failed, wrap the model anew on every rank.
    - In a context of ``torch.distributed.autograd`` gradients are averaged there, at
      the end of the backward, for models on the CPU only.  The forward must be in that
      context too.  torch's engine raises our errors as ``RuntimeError``.

    With ``mixed_precision``:

    - Outside of forward and backward parameters have their own dtype.  ``.grad`` always
      has that dtype, even under ``no_sync()``.  In torch parameters have
      ``param_dtype`` from a forward, even an evaluation, to a synchronised backward.
    - In its forward and backward the module has copies in place of its parameters, with
      their classes and attributes, but no leaves: ``is_leaf`` is False, ``.grad`` None,
      and freezing one or assigning it to another part raises.  As with torch's class,
      changes of copies in place are lost.  Code that reaches a parameter in another way
      (a list of tensors, a closure, an optimizer, a hook's argument) gets the original,
      and so does ``wrapper.module(...)``.  ``_mp_param`` has only a shape and a dtype.
    - On the CPU 16-bit gradients are summed in float32, and rounded once; on GPUs with
      a ``reduce_dtype`` of float32, else as NCCL sums them.  A single rank rounds
      nothing.
    - Buffers of integers stay integers; torch makes BatchNorm count in
      ``buffer_dtype``.
    - Communication hooks may be registered: they get buckets of ``reduce_dtype``.
      Optimizers in backward, tied parameters, accumulation and both kinds of
      ``torch.utils.checkpoint`` work.  Other code that computes a part again in the
      backward gets copies only if the outputs are in containers, dataclasses, pytrees.
    - Modules with ``sparse=True``, and parts compiled by ``torch.jit``, are refused.
    - On the CPU torch 2.13 averages uninitialised memory in its first step; with
      ``gradient_as_bucket_view`` later steps use old gradients.  Here the first step is
      like any other, and both settings give the same bits.

    As in torch, ``max_norm`` of an embedding scales the rows that its own rank used.

    On GPUs:

    - A GradScaler, autocast and SyncBatchNorm are used as with torch's class.
    - After 3 steps, in which the reducer learns the order of buckets, a CUDA graph can
      capture a whole step.  A replay uses the same parameters, and does not watch the
      other ranks.
    - No step waits for the GPU.  If NCCL fails or a rank is lost, the step's
      ``backward()`` or the next one raises.
    - Ctrl-C in a backward that waits for another rank takes effect once that rank
      arrives or the group's timeout ends: until then torch waits for its own thread.
    - Gradients of parameters that are declared sparse travel as dense ones.
    - Forwards take over rank 0's buffers as they were at the end of the last backward.
    """

    __module__ = "paceline"

    def __init__(  # the signature is torch's
        self,
        module: Wrapped,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        strict: bool | None = None,
        accumulate_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        torch_core.warn_of_wrapper(module, type(self))
        warn_of_deprecated(check_reduction, broadcast_buffers, forward_sync_buffers)
        delayed = delay_all_reduce_named_params, param_to_hook_all_reduce
        check_delayed(*delayed)
        group = read_group(process_group, device_mesh)
        if isinstance(module, torch.nn.Module):  # otherwise every rank raises below
            is_slice = device_mesh is not None and torch_groups.is_mesh_slice(
                device_mesh
            )
            torch_groups.localize(module, is_slice)
        options, error = read_options(
            group,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            sync_buffers=(broadcast_buffers, forward_sync_buffers),
            sync_at_start=init_sync,
            mixed_precision=mixed_precision,
            strict=strict,
            accumulate_in_fp32=accumulate_in_fp32,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        torch_groups.wait_for_gloo_at_exit()
        self._session = Session(self, options)
        self.module = module
        self.dim = dim
        self.is_multi_device_module = False
        self.process_group = options.group
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = False
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        self.mixed_precision = mixed_precision
        self.require_forward_param_sync = True
        self.broadcast_bucket_size = 250 * MIB  # for torch's code
        self.bucket_bytes_cap = options.network_caps.bucket_bytes
        self.bucket_bytes_cap_list = list(options.network_caps.each)
        self.bucket_bytes_cap_default = not (bucket_cap_mb or bucket_cap_mb_list)
        # For the inherited to_kwargs().
        self.use_side_stream_for_tensor_copies = _environment.copies_by_side_stream()
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._delay_all_reduce_all_params = False
        devices = device_ids, output_device
        read_arguments = functools.partial(self._read_arguments, *devices, *delayed)
        self._session.set_up(read_arguments, error)
        if static_graph:
            self._set_static_graph()

    # ---- uneven inputs ------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> JoinContext:
        """Return a context in which ranks may take different numbers of steps.

        A rank that leaves the context waits for the others, and takes part in their
        steps with zeros; its own ``.grad`` stay unchanged.  At the end every rank has
        the parameters, and with ``broadcast_buffers`` the buffers, of the rank that
        left last; if several did, of the highest.

        Parameters
        ----------
        divide_by_initial_world_size : bool, default True
            Whether gradients are divided by the number of all ranks, or by the number
            of ranks that still train.
        enable : bool, default True
            If False, the context does nothing.
        throw_on_early_termination : bool, default False
            Whether to raise on every rank once one has run out of batches.

        Returns
        -------
        context manager

        Raises
        ------
        RuntimeError
            With ``throw_on_early_termination``: on a rank that has run out, at the end
            of the context; on the others, from the forward that it missed, before the
            module runs.
        paceline.PeerError
            Within a second, wherever this rank waits for a rank that has died in the
            context, or left it by an exception.

        Notes
        -----
        The contract is that of `torch's method
        <https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>`_.
        Where it differs:

        - It counts synchronised backwards, not forwards: the context may contain
          several forwards before a backward, evaluation, and ``no_sync()`` in any form.
          With ``throw_on_early_termination`` each forward that records gradients first
          checks that no rank has run out, so the module may have collectives.
        - Rank 0 sends its buffers until it runs out, then the lowest rank that still
          trains (torch: the highest) sends its own.  In the step in which the sender
          changes, ranks keep their buffers.
        - ``divide_by_initial_world_size=False`` scales the averages over all ranks by
          ``n_ranks / n_active``, in float64, and rounds them again.  That is exact if
          the ratio is a power of two; with float32 on 2, 4, 8... ranks the result is
          the sum divided by ``n_active``, rounded once.
        - An exception in the context ends it on all ranks; all may catch it and go on.

        Do not nest the contexts of several wrappers: give all wrappers to torch's
        ``Join([...])``.  Do not change the model in the context after a rank has run
        out.

        In torch's ``Join([...])`` this class is a joinable, with torch's limits: it
        counts forwards (those that record gradients), so each needs one backward, and
        ``no_sync()`` must be around both.  A rank that has run out gets the averages as
        its ``.grad`` there, so a sharded optimizer in the list uses them; with torch's
        class it uses old gradients.  Such a rank waits in the process group, so it
        notices an exception on another rank only when the group does.

        Examples
        --------
        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> batches_of_this_rank = torch.ones(3, 4, 2)
        >>> with model.join():
        ...     for batch in batches_of_this_rank:
        ...         model.zero_grad()
        ...         model(batch).mean().backward()
        >>> model.module.weight.grad
        tensor([[1., 1.]])
        >>> dist.destroy_process_group()
        """
        state = JoinState(
            divides_by_active=not divide_by_initial_world_size,
            raises=throw_on_early_termination,
            is_active=True,
        )
        return JoinContext(self, self._session, enable, state)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch's ``Join`` runs on a joined rank.

        Parameters
        ----------
        **kwargs
            ``divide_by_initial_world_size``, as for :meth:`join`; arguments for other
            joinables are ignored.

        Returns
        -------
        torch.distributed.algorithms.JoinHook
        """
        session = self._session
        session.adopt()
        session.enter_join(
            JoinState(not kwargs.get("divide_by_initial_world_size", True))
        )
        session.n_join_hooks += 1
        return ShadowSteps(self, session)

    # ---- state --------------------------------------------------------------------

    if TYPE_CHECKING:  # torch's class gives no types

        def train(self, mode: bool = True) -> Self: ...

    def __getstate__(self) -> dict[str, Any]:
        if not torch_groups.is_default_group(self.process_group):
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. That is, when you have called "
                "init_process_group and have not passed process_group argument to DDP "
                "constructor"
            )
        state = copy.copy(self.__dict__)
        for name in ("_session", "process_group", "device_mesh"):
            state.pop(name, None)
        state["_hooks"] = copy.copy(self._session.hooks)
        state["_option_values"] = {
            field.name: getattr(self._session.options, field.name)
            for field in dataclasses.fields(Options)
            if field.name != "group"
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_option_values" not in state:  # of torch's class: see `paceline.install`
            self.__class__ = TorchDDP  # type: ignore[assignment]
            self.__setstate__(state)
            return
        torch_core.attach()  # this process may have constructed none
        state = dict(state)
        values = state.pop("_option_values")
        hooks = state.pop("_hooks")
        torch.nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)  # a copy is in no join context
        options = Options(group=torch_groups.default_group(), **values)
        self.process_group = options.group
        model = Model.of(self.module)
        self._session = Session(self, options, Phase.COPIED)
        self._session.model, self._session.hooks = model, hooks
        for _, parameter in model.parameters[:1]:
            self._follow_module(parameter.device)  # torch.load() may have moved it
