"""What programs reach for besides training: the same script by torch and by us."""

import copy
import sys
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from cases import (
    Branches,
    assert_equal,
    grads_of,
    has_argument,
    net,
    on_ranks,
    skip_without_argument,
)
from paceline import DistributedDataParallel
from torch import nn
from torch.distributed._composable.replicate import replicate as composable
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation, _find_tensors

X = torch.tensor([[1.0, 2.0]])


class Counting(nn.Module):
    """Has a buffer that each rank writes for itself."""

    def __init__(self, rank):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.tensor([float(rank)]))

    def forward(self, x):
        return self.layer(x)


class Chain(nn.Module):
    """Four layers.  Of torch's own modules not every torch compiles the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def pair(ranks, module, **options):
    """Return the same module behind our wrapper, and behind torch's."""
    mine = ranks.wrap(copy.deepcopy(module), **options)
    return mine, ranks.wrap_by_torch(copy.deepcopy(module), **options)


def assert_same_grads(mine, theirs):
    for a, b in zip(grads_of(mine), grads_of(theirs), strict=True):
        assert_equal(a, b, "a gradient")


# ---- forward, and what is round it -------------------------------------------------


@on_ranks(1, 2)
def test_a_forward_shows_the_active_wrapper_where_something_is_compiled(ranks):
    torch.compile(lambda x: x, backend="eager")  # from here on dynamo may ask

    class Curious(nn.Linear):
        def forward(self, x):
            self.seen = TorchDDP._get_active_ddp_module()
            return super().forward(x)

    model = ranks.wrap(Curious(2, 1))
    model(X).sum().backward()
    assert model.module.seen is model
    assert TorchDDP._get_active_ddp_module() is None
    with torch.no_grad():
        model(X)
    assert model.module.seen is model
    assert TorchDDP._active_ddp_module is None


@on_ranks(1)
def test_a_forward_that_raises_leaves_no_active_wrapper(ranks):
    class Bad(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    torch.compile(lambda x: x, backend="eager")
    model = ranks.wrap(Bad(1, 1))
    with pytest.raises(KeyError):
        model(X)
    assert TorchDDP._active_ddp_module is None
    assert model._session.open_forwards.items == []


@on_ranks(2)
def test_a_forward_made_of_its_parts_gives_the_gradients_of_torch(ranks):
    both = pair(ranks, net())
    for step in range(3):
        for model in both:
            model.zero_grad()
            x = ranks.integers(3, 6, key=step)
            inputs, kwargs = model._pre_forward(x, scale=1)
            assert kwargs == {"scale": 1}
            assert inputs[0] is x
            output = model._post_forward(model.module(*inputs))
            output.sum().backward()
        assert_same_grads(*both)


@on_ranks(2)
def test_composable_replicate_is_carried_by_our_wrapper(ranks):
    home = sys.modules[composable.__module__]

    torchs, home.DistributedDataParallel = home.DistributedDataParallel, ranks.ours
    try:
        mine, theirs = net(), net()
        composable(mine, process_group=ranks.group)
        for step in range(3):
            mine.zero_grad()
            mine(ranks.integers(3, 6, key=step)).sum().backward()
            home.DistributedDataParallel = torchs
            if step == 0:
                composable(theirs, process_group=ranks.group)
            theirs.zero_grad()
            theirs(ranks.integers(3, 6, key=step)).sum().backward()
            home.DistributedDataParallel = ranks.ours
            assert_same_grads(mine, theirs)
        assert type(composable.state(mine)._ddp) is ranks.ours
    finally:
        home.DistributedDataParallel = torchs


@on_ranks(2)
def test_torch_compile_splits_the_graph_at_buckets(ranks):
    graphs = []

    def backend(graph, inputs):
        if len(graph.graph.nodes) > 2:
            graphs.append(graph)
        return graph.forward

    for whole in (False, True):
        torch._dynamo.reset()
        graphs.clear()
        module = Chain()
        if whole:
            model = torch.compile(ranks.wrap(module, bucket_cap_mb=1), backend=backend)
        else:
            compiled = torch.compile(module, backend=backend)
            model = ranks.wrap(compiled, bucket_cap_mb=1)
        model(torch.ones(1, 600)).sum().backward()
        assert len(graphs) > 1, f"one graph where whole is {whole}"


@on_ranks(1)
def test_the_cap_that_dynamo_reads_is_that_of_torch_and_may_be_set(ranks):
    mine, theirs = pair(ranks, net())
    assert mine.bucket_bytes_cap == theirs.bucket_bytes_cap == 25 << 20
    mine.bucket_bytes_cap = 3
    assert mine.bucket_bytes_cap == 3


# ---- through the facades ------------------------------------------------------------


@on_ranks(2)
def test_prepare_for_backward_synchronises_what_ran_without(ranks):
    """As accelerate's trigger_sync_in_backward and pipelining do."""
    both = pair(ranks, net())
    for with_output in (False, True, False):
        for model in both:
            model.zero_grad()
            with model.no_sync():
                first, second = (model(ranks.integers(3, 6, key=k)) for k in range(2))
                first.sum().backward()
            outputs = list(_find_tensors(second)) if with_output else []
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True
            model.reducer.prepare_for_backward(outputs)
            second.sum().backward()
        assert_same_grads(*both)
        ranks.assert_same(grads_of(both[0]), "gradients")


@on_ranks(2)
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


@on_ranks(2)
def test_a_manual_backward_inside_a_forward_is_averaged(ranks):
    """As Lightning's manual optimisation runs it."""

    class Manual(nn.Module):
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

    both = pair(ranks, Manual())
    for step in range(3):
        for model in both:
            model.zero_grad()
            model(ranks.integers(3, 6, key=step), model)
            model.require_backward_grad_sync = True
        assert_same_grads(*both)


@on_ranks(2)
def test_buckets_are_rebuilt_once_in_the_eyes_of_others(ranks):
    model = ranks.wrap(net())
    answers = []
    for _ in range(3):
        answers.append(model.reducer._rebuild_buckets())
        model(ranks.integers(3, 6)).sum().backward()
    assert answers == [False, True, False]


@on_ranks(2)
def test_the_map_of_used_parameters_is_that_of_the_last_step(ranks):
    model = ranks.wrap(Branches())
    for both in (True, False, True):
        model(X, both).sum().backward()
        used = model.reducer._get_local_used_map()
        assert used.dtype == torch.int32
        assert used.tolist() == [1, 1, int(both), int(both)]


@on_ranks(2, changes=[True, False])
def test_a_graph_that_changes_is_not_called_static(ranks, changes):
    model = ranks.wrap(Branches(), find_unused_parameters=True)
    for step in range(3):
        model(X, both=changes and step == 1).sum().backward()
        is_static = not (changes and step > 0)
        assert model.reducer._ddp_graph_static() is is_static
        data = model._get_ddp_logging_data()
        assert data["can_set_static_graph"] == int(is_static)


@on_ranks(2)
def test_a_rank_without_hooks_keeps_its_own_gradients(ranks):
    both = pair(ranks, net())
    for model in both:
        model._remove_autograd_hooks()
        model(ranks.integers(3, 6)).sum().backward()
    assert_same_grads(*both)
    assert not torch.equal(*ranks.all(grads_of(both[0])[0]))


@on_ranks(1, 2)
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

UNLIKE_TORCH = {
    "can_set_static_graph": "torch tells only as it is destroyed",
}
LATER_KEYS = {"num_buckets_reduced", "unused_parameter_size"}
TIMES = "_time", "_time_start", "_time_end"


@on_ranks(1, 2)
def test_logging_data_has_the_keys_and_values_of_torch(ranks):
    both = pair(ranks, net(), bucket_cap_mb=25)
    for model in both:
        for step in range(3):
            model(ranks.integers(3, 6, key=step)).sum().backward()
        model(ranks.integers(3, 6))
    mine, theirs = (model._get_ddp_logging_data() for model in both)
    if not has_argument("skip_all_reduce_unused_params"):
        mine = {name: mine[name] for name in mine if name not in LATER_KEYS}
    assert set(mine) - set(UNLIKE_TORCH) == set(theirs)
    for name, value in theirs.items():
        if not name.endswith(TIMES):
            assert mine[name] == value, name


@on_ranks(1, 2)
def test_times_of_a_step_are_in_their_order(ranks):
    model = ranks.wrap(net())
    for step in range(3):
        model(ranks.integers(3, 6, key=step)).sum().backward()
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


@on_ranks(1, 2)
def test_steps_are_sampled_as_torch_samples_them(ranks):
    both = pair(ranks, net())
    seen = []
    for model in both:
        model._set_ddp_runtime_logging_sample_rate(4)
        for step in range(20):
            model(ranks.integers(3, 6, key=step)).sum().backward()
            seen.append(model._get_ddp_logging_data()["iteration"])
    assert seen[:20] == seen[20:]


@on_ranks(2)
def test_real_buckets_are_told_where_they_are_several(ranks):
    model = ranks.wrap(net(), bucket_cap_mb=0.02)
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


# ---- ignored parameters and buffers -------------------------------------------------


@on_ranks(2)
def test_what_is_ignored_is_neither_copied_nor_averaged(ranks):
    def make():
        torch.manual_seed(ranks.rank)
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        names = ["2.weight", "1.running_mean"]
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, names)
        return module

    both = ranks.wrap(make()), ranks.wrap_by_torch(make())
    for model in both:
        x = ranks.integers(4, 2)
        model(x).sum().backward()
        model(x).sum().backward()
    assert_same_grads(*both)
    for mine, theirs in zip(both[0].buffers(), both[1].buffers(), strict=True):
        assert torch.equal(mine, theirs)
    for model in both:
        assert model.parameters_to_ignore == {"2.weight", "1.running_mean"}
        assert not torch.equal(*ranks.all(model.module[2].weight.data))
        assert not torch.equal(*ranks.all(model.module[2].weight.grad))
        assert not torch.equal(*ranks.all(model.module[1].running_mean))
        assert torch.equal(*ranks.all(model.module[0].weight.grad))


@on_ranks(2)
def test_a_parameter_of_the_module_itself_may_be_ignored_in_both_spellings(ranks):
    for name in ("weight", ".weight"):
        module = nn.Linear(2, 1)
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, [name])
        model = ranks.wrap(module)
        model(X + ranks.rank).sum().backward()
        assert not torch.equal(*ranks.all(module.weight.grad))


@on_ranks(2, sync=["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_come_from_rank_0_at_the_start_as_in_torch(ranks, sync):
    skip_without_argument(sync)
    both = pair(ranks, Counting(ranks.rank), **{sync: False})
    mine, theirs = (model.module.seen.item() for model in both)
    assert mine == theirs


@on_ranks(2)
def test_without_init_sync_ranks_keep_what_they_have(ranks):
    skip_without_argument("init_sync")
    both = pair(ranks, Counting(ranks.rank + 1), init_sync=False)
    assert [model.module.seen.item() for model in both] == [ranks.rank + 1.0] * 2


# ---- buffers ------------------------------------------------------------------------


def averaging(state, buffers):
    """Start the sum of all buffers."""
    return [
        dist.all_reduce(buffer, group=state, async_op=True).get_future()
        for buffer in buffers.values()
    ]


@on_ranks(2, where=["PRE_FORWARD", "POST_FORWARD"])
def test_a_hook_for_buffers_does_what_it_does_in_torch(ranks, where):
    both = pair(ranks, Counting(ranks.rank + 1))
    place = _BufferCommHookLocation[where]
    seen = []
    for model in both:
        model.module.seen.fill_(ranks.rank + 1)
        model._register_buffer_comm_hook(ranks.group, averaging, place)
        for _ in range(2):
            model(X).sum().backward()
        seen.append(model.module.seen.item())
    assert seen[0] == seen[1] == 6.0


@on_ranks(2)
def test_synchronisation_of_buffers_may_be_switched_off_and_on(ranks):
    model = ranks.wrap(Counting(0))
    seen = []
    for value in (False, True):
        model.broadcast_buffers = value
        assert model.forward_sync_buffers is model.will_sync_module_buffers() is value
        out = model(X)
        model.module.seen.fill_(ranks.rank + 5)
        out.sum().backward()
        model(X)
        seen.append(model.module.seen.item())
    assert seen == [5.0 + ranks.rank, 5.0]


@on_ranks(2)
def test_forward_sync_is_required_by_steps_that_synchronise(ranks):
    both = pair(ranks, Counting(0))
    for model in both:
        seen = []
        model(X).sum().backward()
        seen.append(model.require_forward_param_sync)
        with torch.no_grad():
            model(X)
        seen.append(model.require_forward_param_sync)
        model(X).sum().backward()
        with model.no_sync():
            model(X)
        seen.append(model.require_forward_param_sync)
        assert seen == [True, False, False]


# ---- other constructor arguments ----------------------------------------------------


@on_ranks(2)
def test_delayed_gradients_come_out_averaged(ranks):
    module = net()
    named = [(n, p) for n, p in module.named_parameters() if n.endswith("weight")]
    model = ranks.wrap(
        module,
        delay_all_reduce_named_params=named,
        param_to_hook_all_reduce=named[0][1],
    )
    plain = ranks.wrap(net())
    for step in range(2):
        for one in (model, plain):
            one.zero_grad()
            one(ranks.integers(3, 6, key=step)).sum().backward()
        assert_same_grads(model, plain)
    assert model.parameters_to_ignore == {name for name, _ in named}
    assert len(model._module_parameters) == 3


@on_ranks(1)
def test_one_of_two_arguments_for_delayed_gradients_is_refused(ranks):
    module = net()
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        for given in (
            {"param_to_hook_all_reduce": module[0].weight},
            {"delay_all_reduce_named_params": [("0.weight", module[0].weight)]},
        ):
            with pytest.raises(ValueError, match="need to be set at the same time"):
                wrap(module, **given)


@on_ranks(2, option=["skip_all_reduce_unused_params", "batched_grad_copy"])
def test_options_of_speed_change_no_gradient(ranks, option):
    model, plain = ranks.wrap(net(), **{option: True}), ranks.wrap(net())
    for one in (model, plain):
        one(ranks.integers(3, 6)).sum().backward()
    assert_same_grads(model, plain)
    assert getattr(model, option) is True


# ---- optimizers ---------------------------------------------------------------------


@on_ranks(1, 2, when=["before", "after"])
def test_optimizers_in_backward_step_by_averages(ranks, when):
    """Against ordinary steps: on a CPU torch's own fail, for want of an accelerator."""
    module, plain = net(), ranks.wrap_by_torch(net())
    model = ranks.wrap(module) if when == "after" else None
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    model = model or ranks.wrap(module)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        for one in (model, plain):
            one(ranks.integers(3, 6, key=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(a.data, b.data, "a parameter")


@on_ranks(2)
def test_optimizers_in_backward_wait_while_gradients_accumulate(ranks):
    module = net()
    before = [p.clone() for p in module.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    model = ranks.wrap(module)
    with model.no_sync():
        model(ranks.integers(3, 6)).sum().backward()
    for p, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is not None


@on_ranks(2)
def test_a_part_of_the_parameters_may_step_in_backward(ranks):
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, [module[0].weight], {"lr": 0.5})
    model = ranks.wrap(module)
    model(ranks.integers(3, 6)).sum().backward()
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None
    ranks.assert_same([module[0].weight], "a weight")


@on_ranks(2)
def test_a_fused_optimizer_steps_as_in_torch(ranks):
    both = pair(ranks, net())
    for model in both:
        model._register_fused_optim(torch.optim.SGD, 0.5)
        for step in range(2):
            model(ranks.integers(3, 6, key=step)).sum().backward()
            model.zero_grad()
    for a, b in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert_equal(a.data, b.data, "a parameter")
    with pytest.raises(RuntimeError, match="can only be called once"):
        both[0]._register_fused_optim(torch.optim.SGD, 0.5)


@on_ranks(2)
def test_a_sharded_optimizer_steps_as_with_torch(ranks):
    both = pair(ranks, net())
    optimizers = [
        ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=ranks.group, lr=0.5
        )
        for model in both
    ]
    for step in range(3):
        for model, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            model(ranks.integers(3, 6, key=step)).sum().backward()
            optimizer.step()
    for a, b in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert_equal(a.data, b.data, "a parameter")


@on_ranks(1, 2)
def test_an_averaged_model_follows_the_wrapper(ranks):
    ends = []
    for wrap in (ranks.ours, TorchDDP):  # in the default group, or they do not copy
        model = wrap(net())
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for step in range(2):
            optimizer.zero_grad()
            model(ranks.integers(3, 6, key=step)).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
        averaged(ranks.integers(3, 6))
        ends.append(averaged.state_dict())
    assert list(ends[0]) == list(ends[1])
    for name, value in ends[0].items():
        assert_equal(value, ends[1][name], name)


# ---- groups and checkpoints ---------------------------------------------------------


@on_ranks(3)
def test_ranks_of_a_smaller_group_train_on_among_themselves(ranks):
    model = ranks.wrap(net())
    model(ranks.integers(3, 6)).sum().backward()
    ranks.assert_same(grads_of(model), "gradients")
    smaller = dist.new_group([0, 1])
    if ranks.rank == 2:
        model._update_process_group(smaller)
        return
    model._update_process_group(smaller)
    assert model.process_group is smaller
    model.zero_grad()
    model(ranks.integers(3, 6)).sum().backward()
    wholes = [None, None]
    dist.all_gather_object(wholes, grads_of(model), group=smaller)
    plain = net()
    plain(ranks.integers(3, 6)).sum().backward()
    own = [None, None]
    dist.all_gather_object(own, grads_of(plain), group=smaller)
    for a, b, *parts in zip(*wholes, *own, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, (parts[0] + parts[1]) / 2)


@on_ranks(2)
def test_distributed_checkpoints_save_and_load(ranks):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    model = ranks.wrap(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(ranks.integers(3, 6)).sum().backward()
    optimizer.step()
    state = get_model_state_dict(model)
    assert list(state) == list(model.module.state_dict())
    folder = ranks.all(tempfile.mkdtemp())[0]
    states = dict(
        zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)
    )
    dcp.save(states, checkpoint_id=folder, process_group=ranks.group)

    other = ranks.wrap(net())
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.5)
    states = dict(
        zip(("model", "optimizer"), get_state_dict(other, other_optimizer), strict=True)
    )
    dcp.load(states, checkpoint_id=folder, process_group=ranks.group)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_equal(a.data, b.data, "a parameter")
    set_model_state_dict(other, state)


@on_ranks(1, 2, strict=[False, True])
def test_a_compiled_wrapper_compiles_as_many_graphs_as_that_of_torch(ranks, strict):
    graphs = {"mine": [], "theirs": []}
    mine = ranks.wrap(Chain(), strict=strict)
    theirs = ranks.wrap_by_torch(Chain())
    for model, seen in zip((mine, theirs), graphs.values(), strict=True):
        torch._dynamo.reset()

        def count(graph, _, seen=seen):
            seen.append(len(graph.graph.nodes))
            return graph.forward

        compiled = torch.compile(model, backend=count)
        for _ in range(14):  # ten of them are sampled for the logging data
            model.zero_grad()
            compiled(torch.ones(1, 600)).sum().backward()
    assert len(graphs["mine"]) > 0
    assert graphs["mine"] == graphs["theirs"], "none of the wrapper's own code"


# ---- subclasses ---------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_subclass_may_forward_names_to_its_module(ranks):
    class Forwarding(ranks.ours):
        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    module = net()
    module.mine = 5
    model = Forwarding(module, process_group=ranks.group, static_graph=True)
    model(ranks.integers(3, 6)).sum().backward()
    assert model.mine == 5
    assert not hasattr(model, "nonsense")
    data = model._get_ddp_logging_data()
    assert data["world_size"] == ranks.n


@on_ranks(2)
def test_a_subclass_may_run_the_module_in_its_own_way(ranks):
    """As mmcv's wrapper does."""

    class Own(ranks.ours):
        def _run_ddp_forward(self, *inputs, **kwargs):
            self.n_runs = getattr(self, "n_runs", 0) + 1
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

    model, plain = Own(net(), process_group=ranks.group), ranks.wrap(net())
    for one, factor in ((model, 1), (plain, 2)):
        (factor * one(ranks.integers(3, 6))).sum().backward()
    assert model.n_runs == 1
    assert_same_grads(model, plain)


@on_ranks(2)
def test_a_rank_may_train_on_alone_and_come_back(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.n)][ranks.rank]
    model, plain = ranks.wrap(net()), net()
    x = ranks.integers(3, 6)
    plain(x).sum().backward()
    own = grads_of(plain)
    for group, is_alone in ((None, False), (alone, True), (dist.group.WORLD, False)):
        if group is not None:
            model._update_process_group(group)
        model.zero_grad()
        model(x).sum().backward()
        parts = [None] * ranks.n
        dist.all_gather_object(parts, own)
        for i, gradient in enumerate(grads_of(model)):
            mean = sum(part[i] for part in parts) / ranks.n
            assert torch.equal(gradient, own[i] if is_alone else mean)


@on_ranks(2)
def test_a_rank_that_is_alone_accumulates_for_its_optimizers_in_backward(ranks):
    alone = [dist.new_group([rank]) for rank in range(ranks.n)][ranks.rank]
    module = net()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    model = DistributedDataParallel(module, process_group=alone)
    before = [p.detach().clone() for p in module.parameters()]
    with model.no_sync():
        model(ranks.integers(3, 6)).sum().backward()
    assert all(map(torch.equal, module.parameters(), before))
    assert all(p.grad is not None for p in module.parameters())
    model(ranks.integers(3, 6)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert not torch.equal(next(module.parameters()), before[0])


@on_ranks(2)
def test_buffers_come_with_a_backward_although_a_forward_has_raised(ranks):
    module = Counting(ranks.rank)
    model = ranks.wrap(module)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 7))
    module.seen.fill_(float(ranks.rank + 5))
    model(X).sum().backward()
    assert module.seen.item() == 5.0


@on_ranks(2)
def test_an_evaluation_in_another_thread_leaves_a_forward_its_own(ranks):
    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            if torch.is_grad_enabled():
                thread = threading.Thread(target=evaluate)
                thread.start()
                is_inside.wait()
                y = self.layer(x)
                others.append(thread)
                return y
            is_inside.set()
            may_leave.wait()
            return self.layer(x)

    def evaluate():
        with torch.no_grad():
            model(X)

    is_inside, may_leave, others = threading.Event(), threading.Event(), []
    model = ranks.wrap(Waits())
    with model.no_sync():
        y = model(X * (ranks.rank + 1))
    may_leave.set()
    model(X)
    for thread in others:
        thread.join()
    y.sum().backward()  # of a forward that was not to be synchronised
    assert torch.equal(model.module.layer.weight.grad, X * (ranks.rank + 1))
