"""Uses of a wrapper besides training: the same script with torch and with Paceline."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from cases import (
    PARTS,
    Branches,
    as_torch,
    grads_of,
    has_argument,
    net,
    on_gpus_too,
    step_of,
)
from surface_cases import Counting, X
from torch import nn
from torch.distributed._composable.replicate import replicate as composable
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors
from torch.utils.checkpoint import checkpoint

# ---- forward and its surroundings --------------------------------------------------


def test_a_forward_shows_the_active_wrapper_where_something_is_compiled(ranks):
    torch.compile(lambda x: x, backend="eager")  # dynamo may now inspect it

    class Curious(nn.Linear):
        def forward(self, x):
            self.seen = TorchDDP._get_active_ddp_module()
            return {}["mine"] if x is None else super().forward(x)

    model = ranks.wrap(Curious(2, 1))
    model(X).sum().backward()
    assert model.module.seen is model
    assert TorchDDP._get_active_ddp_module() is None
    with torch.no_grad():
        model(X)
    assert model.module.seen is model
    assert TorchDDP._active_ddp_module is None
    with pytest.raises(KeyError, match=r"^'mine'$"):
        model(None)
    assert TorchDDP._active_ddp_module is None
    assert model._session.open_forwards.items == []


@on_gpus_too()
@as_torch()
def test_a_forward_made_of_its_parts_gives_the_gradients_of_torch(ranks, wrap):
    model = wrap(net())
    for step in range(3):
        model.zero_grad()
        x = ranks.integers(3, 6, key=step)
        inputs, kwargs = model._pre_forward(x, scale=1)
        assert kwargs == {"scale": 1}
        assert inputs[0] is x
        model._post_forward(model.module(*inputs)).sum().backward()
        yield grads_of(model)


@as_torch()
def test_composable_replicate_is_carried_by_our_wrapper(ranks, wrap):
    kind = ranks.ours if wrap == ranks.wrap else TorchDDP
    module, home = net(), sys.modules[composable.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "DistributedDataParallel", kind)
        composable(module, process_group=ranks.group)
        for step in range(3):
            yield step_of(module, ranks.integers(3, 6, key=step))
    assert type(composable.state(module)._ddp) is kind


@as_torch()
def test_the_cap_that_dynamo_reads_is_that_of_torch_and_may_be_set(ranks, wrap):
    model = wrap(net())
    yield model.bucket_bytes_cap
    model.bucket_bytes_cap = 3
    yield model.bucket_bytes_cap


# ---- through the facades ------------------------------------------------------------


@as_torch()
def test_prepare_for_backward_synchronises_what_ran_without(ranks, wrap):
    """accelerate's trigger_sync_in_backward and torch's pipelining do this."""
    model = wrap(net())
    for with_output in (False, True, False):
        model.zero_grad()
        with model.no_sync():
            first, second = (model(ranks.integers(3, 6, key=k)) for k in range(2))
            first.sum().backward()
        outputs = list(_find_tensors(second)) if with_output else []
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward(outputs)
        second.sum().backward()
        yield grads_of(model)
        ranks.assert_same(grads_of(model), "gradients")


def test_prepare_for_backward_counts_for_one_backward(ranks):
    model = ranks.wrap(net())
    with model.no_sync():
        first, second = (model(ranks.integers(3, 6, key=k)) for k in range(2))
    model.reducer.prepare_for_backward([])
    first.sum().backward()
    ranks.assert_same(grads_of(model), "gradients")
    model.zero_grad()
    second.sum().backward()
    rows = ranks.all(grads_of(model)[0])
    assert not torch.equal(*rows)


class Manual(nn.Module):
    """Runs backward in its forward, like Lightning's manual optimisation."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, wrapper):
        loss = self.net(x).sum()
        if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
            wrapper.require_forward_param_sync = True
            wrapper.reducer._rebuild_buckets()
            wrapper.reducer.prepare_for_backward([])
        loss.backward()
        wrapper.require_backward_grad_sync = False


@as_torch()
def test_a_manual_backward_inside_a_forward_is_averaged(ranks, wrap):
    model = wrap(Manual())
    for step in range(3):
        model.zero_grad()
        model(ranks.integers(3, 6, key=step), model)
        model.require_backward_grad_sync = True
        yield grads_of(model)


def test_buckets_are_rebuilt_once_in_the_eyes_of_others(ranks):
    model = ranks.wrap(net())
    answers = []
    for _ in range(3):
        answers.append(model.reducer._rebuild_buckets())
        model(ranks.integers(3, 6)).sum().backward()
    assert answers == [False, True, False]


def test_the_map_of_used_parameters_is_that_of_the_last_step(ranks):
    model = ranks.wrap(Branches())
    for both in (True, False, True):
        model(X, both).sum().backward()
        used = model.reducer._get_local_used_map()
        assert used.dtype == torch.int32
        assert used.tolist() == [1, 1, int(both), int(both)]


@as_torch()
def test_a_rank_without_hooks_keeps_its_own_gradients(ranks, wrap):
    model = wrap(net())
    model._remove_autograd_hooks()
    yield step_of(model, ranks.integers(3, 6))
    assert not torch.equal(*ranks.all(grads_of(model)[0]))


def test_calls_that_have_nothing_to_do_are_taken(ranks):
    model = ranks.wrap(net())
    model._check_reducer_finalized()
    model._set_sparse_metadata({})
    model._set_ddp_sink_clone(False)
    for name in (
        "prepare_for_forward",
        "_delay_all_reduce",
        "_push_all_rebuilt_params",
    ):
        assert getattr(model.reducer, name)() is None
    assert not hasattr(model.reducer, "nonsense")
    assert not hasattr(model, "nonsense")
    assert model._distributed_rank == ranks.rank
    model(ranks.integers(3, 6)).sum().backward()
    model._check_reducer_finalized()


# ---- logging data -------------------------------------------------------------------


ONLY_OURS = {"can_set_static_graph"}  # torch adds it only when it is destroyed
LATER_KEYS = {"num_buckets_reduced", "unused_parameter_size"}
TIMES = "_time", "_time_start", "_time_end"


def logging_data(model):
    is_later = has_argument("skip_all_reduce_unused_params")
    skipped = ONLY_OURS if is_later else ONLY_OURS | LATER_KEYS
    return {
        name: None if name.endswith(TIMES) else value
        for name, value in model._get_ddp_logging_data().items()
        if name not in skipped
    }


@as_torch(
    group=["all ranks", "each rank alone"],
    option=["static_graph", "find_unused_parameters", "gradient_as_bucket_view"],
)
def test_logging_data_has_the_keys_and_values_of_torch(ranks, wrap, group, option):
    if group == "each rank alone":
        ranks.group = ranks.alone()
    model = wrap(net(), bucket_cap_mb=25, **{option: True})
    for step in range(4):
        model(ranks.integers(3, 6, key=step)).sum().backward()
    model(ranks.integers(3, 6))
    yield logging_data(model)


@as_torch(option=["find_unused_parameters", "gradient_as_bucket_view"])
def test_forwards_without_a_backward_are_iterations_too(ranks, wrap, option):
    model = wrap(net(), bucket_cap_mb=25, **{option: True})
    for step in range(12):
        out = model(ranks.integers(3, 6, key=step))
        if step in (2, 5, 6, 8):
            out.sum().backward()
        with torch.no_grad():
            model(ranks.integers(3, 6))
        data = logging_data(model)
        yield {k: v for k, v in data.items() if not k.endswith(TIMES)}


def test_times_of_a_step_are_in_their_order(ranks):
    model = ranks.wrap(net())
    for step in range(3):
        model(ranks.integers(3, 6, key=step)).sum().backward()
        assert min(model.reducer.get_backward_stats()) > 0
        data = model._get_ddp_logging_data()
    starts = [
        data["forward_compute_time_start"],
        data["backward_compute_time_start"],
        data["backward_comm_time_start"],
        data["backward_comm_time_end"],
    ]
    assert starts == sorted(starts)
    assert data["avg_forward_compute_time"] >= 1
    overlap = data["backward_compute_comm_overlap_time"]
    assert 0 <= overlap <= data["backward_comm_time"]
    assert overlap <= data["backward_compute_time"]
    stats = model.reducer.get_backward_stats()
    assert len(stats) == 6
    assert min(stats) > 0
    model.module.requires_grad_(False)
    assert model.reducer.get_backward_stats() == stats


def test_the_last_of_several_gradients_gives_a_parameter_its_place(ranks):
    class Twice(nn.Linear):
        def forward(self, x):
            forward = super().forward
            return checkpoint(forward, self.then(forward(x)), use_reentrant=True)

    module = Twice(4, 4)
    module.then = nn.Linear(4, 4)
    model, x = ranks.wrap(module, static_graph=True), torch.ones(2, 4)
    for _ in range(3):
        model(x).sum().backward()
    model(x)
    order = model._get_ddp_logging_data()["prev_iteration_grad_ready_order_indices"]
    assert order == "3, 2, 1, 0"


@as_torch()
def test_steps_are_sampled_as_torch_samples_them(ranks, wrap):
    model = wrap(net())
    with pytest.raises(TypeError):
        model._set_ddp_runtime_logging_sample_rate(1.5)
    model._set_ddp_runtime_logging_sample_rate(4)
    for step in range(20):
        model(ranks.integers(3, 6, key=step)).sum().backward()
        yield model._get_ddp_logging_data()["iteration"]


def test_real_buckets_are_told_where_they_are_several(ranks):
    model = ranks.wrap(net(), bucket_cap_mb=0.02)
    with pytest.raises(ValueError, match="sample_rate is 0"):
        model.reducer._set_ddp_runtime_logging_sample_rate(0)
    for step in range(3):
        model(ranks.integers(3, 6, key=step)).sum().backward()
    data = model._get_ddp_logging_data()
    sizes = [int(size) for size in data["rebuilt_bucket_sizes"].split(", ")]
    assert (
        len(sizes)
        == data["num_buckets_reduced"]
        == len(model._session.reducer.buckets)
        > 1
    )
    assert sum(sizes) == data["total_parameter_size_bytes"]


# ---- subclasses ---------------------------------------------------------------------


class Scaled(nn.Module):
    """A module by itself, like a kernel of gpytorch."""

    def __init__(self, factor=2.0):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))


def beside_another_module(base):
    class Shape(base, Scaled):
        def forward(self, x):
            return super().forward(x) * self.factor

    return Shape


def with_positions(base):
    class Shape(base):
        def __init__(self, module, device_ids=None, output_device=None, dim=0, **named):
            super().__init__(module, device_ids, output_device, dim, **named)

    return Shape


def with_the_names_of_its_module_first(base):
    class Shape(base):
        def __getattr__(self, name):
            wrapped = super().__getattr__("module")
            if hasattr(wrapped, name):
                return getattr(wrapped, name)
            return super().__getattr__(name)

    return Shape


def with_the_state_of_its_module(base):
    class Shape(base):
        def state_dict(self, *args, **kwargs):
            return self.module.state_dict(*args, **kwargs)

        def load_state_dict(self, *args, **kwargs):
            return self.module.load_state_dict(*args, **kwargs)

        def named_parameters(self, *args, **kwargs):
            return self.module.named_parameters(*args, **kwargs)

    return Shape


# For others see ../../clients/test_training_libraries.py: mmengine's.
SHAPES = [
    beside_another_module,
    with_positions,
    with_the_names_of_its_module_first,
    with_the_state_of_its_module,
]


@as_torch(shape=SHAPES)
def test_a_shape_of_subclass_trains_and_keeps_its_state(ranks, wrap, shape):
    base = ranks.ours if wrap == ranks.wrap else TorchDDP
    module = nn.Sequential(nn.BatchNorm1d(6), *net())
    model = shape(base)(module, process_group=ranks.group)
    for step in range(3):
        yield [*step_of(model, ranks.integers(3, 6, key=step)), *model.buffers()]
    state = {name: t + 1 for name, t in model.state_dict().items()}
    model.load_state_dict(state)
    yield [len(state), *model.eval().state_dict().values()]
    assert not model.training
    assert not module[0].training
    yield "".join(state)


@as_torch(part=[*PARTS], compiled=[False, True])
def test_a_subclass_may_have_parts_of_a_forward_of_its_own(ranks, wrap, part, compiled):
    torch._dynamo.reset()
    if compiled:
        torch.compile(lambda x: x, backend="eager")
    base = ranks.ours if wrap == ranks.wrap else TorchDDP
    module = nn.Sequential(nn.BatchNorm1d(6), *net())
    model = type("Own", (base,), PARTS[part])(module, process_group=ranks.group)
    for step in range(3):
        x = ranks.integers(3, 6, key=step)
        yield [*step_of(model, x), *model.buffers()]
    with pytest.raises((AttributeError, TypeError)):
        model(None)
    yield step_of(model, x)


@on_gpus_too()
def test_a_rank_may_train_on_alone_and_come_back(ranks):
    alone = ranks.alone()
    model, plain = ranks.wrap(net()), net()
    x = ranks.integers(3, 6)
    plain(x).sum().backward()
    own = grads_of(plain)
    for group, is_alone in ((None, False), (alone, True), (dist.group.WORLD, False)):
        if group is not None:
            model._update_process_group(group)
        step_of(model, x)
        parts = [None] * ranks.n
        dist.all_gather_object(parts, own)
        for i, gradient in enumerate(grads_of(model)):
            mean = sum(part[i] for part in parts) / ranks.n
            assert torch.equal(gradient, own[i] if is_alone else mean)


def test_buffers_come_with_a_backward_although_a_forward_has_raised(ranks):
    module = Counting(ranks.rank)
    model = ranks.wrap(module)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 7))
    module.seen.fill_(float(ranks.rank + 5))
    model(X).sum().backward()
    assert module.seen.item() == 5.0


def test_an_evaluation_in_another_thread_leaves_a_forward_its_own(ranks):
    class Waits(nn.Linear):
        def forward(self, x):
            if torch.is_grad_enabled():
                others.append(threading.Thread(target=evaluate))
                others[-1].start()
                is_inside.wait()
            else:
                is_inside.set()
                may_leave.wait()
            return super().forward(x)

    def evaluate():
        with torch.no_grad():
            model(X)

    is_inside, may_leave, others = threading.Event(), threading.Event(), []
    model = ranks.wrap(Waits(2, 1))
    with model.no_sync():
        y = model(X * (ranks.rank + 1))
    may_leave.set()
    model(X)
    for thread in others:
        thread.join()
    y.sum().backward()  # its forward was in no_sync
    assert torch.equal(model.module.weight.grad, X * (ranks.rank + 1))
