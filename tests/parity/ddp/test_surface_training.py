"""Ignored tensors, buffers, options, optimizers and checkpoints, as in torch."""

import tempfile

import pytest
import torch
from cases import (
    as_torch,
    assert_equal,
    assert_same_grads,
    net,
    on_gpus_too,
    on_ranks,
    skip_without_argument,
    step_of,
)
from surface_cases import Chain, Counting, X
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

# ---- ignored parameters and buffers -------------------------------------------------


class Shares(nn.Module):
    """Has its own tensors, and a weight and a buffer under two names."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.rand(2))
        self.register_buffer("mark", torch.rand(2))
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.a.register_buffer("kept", torch.rand(2))
        self.b.register_buffer("same", self.a.kept)

    def forward(self, x):
        self.mark += x[0]
        self.a.kept += x[0]
        return self.b(self.a(x).square()) * self.own + self.mark + self.b.same


class Hides:
    """Lists only some of its tensors."""

    def named_parameters(self, *args, **options):
        return self.shown(super().named_parameters(*args, **options))

    def named_buffers(self, *args, **options):
        return self.shown(super().named_buffers(*args, **options))

    def shown(self, rows):
        hidden = "own", "mark", "a.bias", "bias", "a.kept", "kept"
        return [(name, tensor) for name, tensor in rows if name not in hidden]


IGNORED = {
    "a name each": ["a.bias", "mark"],
    "the first of two names": ["a.weight", "a.kept"],
    "the second of two names": ["b.weight", "b.same"],
    "of the module itself": ["own", "mark"],
    "of the module itself, with a dot": [".own", ".mark"],
    "hidden by the module": [],
    "hidden by a part": [],
}


@on_gpus_too(what=["a name each"])
@as_torch(what=[*IGNORED])
def test_which_tensors_take_part_is_as_in_torch(ranks, wrap, what):
    torch.manual_seed(ranks.rank)
    module = Shares()
    if what == "hidden by the module":
        module.__class__ = type("Top", (Hides, Shares), {})
    if what == "hidden by a part":
        module.a.__class__ = type("Part", (Hides, nn.Linear), {})
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, IGNORED[what])
    model = wrap(module)
    tensors = [module.own, module.a.weight, module.a.bias, module.b.bias]
    for key in range(3):
        yield [*tensors, module.mark, module.a.kept, module.b.same]
        step_of(model, ranks.integers(3, 2, key=key))
        yield [t.grad for t in tensors]
    yield [sorted(model.parameters_to_ignore), len(model._module_parameters)]
    if what == "a name each":
        own = [module.a.bias, module.a.bias.grad, module.mark]
        assert not any(torch.equal(*ranks.all(tensor.data)) for tensor in own)


@as_torch(sync=["broadcast_buffers", "forward_sync_buffers", "init_sync"])
def test_buffers_come_from_rank_0_at_the_start_as_in_torch(ranks, wrap, sync):
    skip_without_argument(sync)
    yield wrap(Counting(ranks.rank + 1), **{sync: False}).module.seen


# ---- buffers ------------------------------------------------------------------------


@on_gpus_too()
def test_synchronisation_of_buffers_may_be_switched_off_and_on(ranks):
    model = ranks.wrap(Counting(0))
    seen, x = [], torch.ones(X.shape)
    for value in (False, True):
        model.broadcast_buffers = value
        assert model.forward_sync_buffers is model.will_sync_module_buffers() is value
        out = model(x)
        model.module.seen.fill_(ranks.rank + 5)
        out.sum().backward()
        model(x)
        seen.append(model.module.seen.item())
    assert seen == [5.0 + ranks.rank, 5.0]


@as_torch()
def test_forward_sync_is_required_by_steps_that_synchronise(ranks, wrap):
    model = wrap(Counting(0))
    model(X).sum().backward()
    yield model.require_forward_param_sync
    with torch.no_grad():
        model(X)
    yield model.require_forward_param_sync
    model(X).sum().backward()
    with model.no_sync():
        model(X)
    yield model.require_forward_param_sync


# ---- other constructor arguments ----------------------------------------------------


@on_gpus_too()
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
            step_of(one, ranks.integers(3, 6, key=step))
        assert_same_grads(model, plain)
    assert model.parameters_to_ignore == {name for name, _ in named}
    assert len(model._module_parameters) == 3


# ---- optimizers ---------------------------------------------------------------------


@on_gpus_too()
@on_ranks(when=["before", "after"], n_stepped=[1, 6])
def test_optimizers_in_backward_step_by_averages(ranks, when, n_stepped):
    """Compare with ordinary steps: torch's own need an accelerator and fail on CPUs."""
    module, plain = net(), ranks.wrap_by_torch(net())
    model = ranks.wrap(module) if when == "after" else None
    stepped = [*module.parameters()][:n_stepped]
    _apply_optimizer_in_backward(torch.optim.SGD, stepped, {"lr": 0.5})
    model = model or ranks.wrap(module)
    optimizer = torch.optim.SGD([*plain.parameters()][:n_stepped], lr=0.5)
    for step in range(3):
        for one in (model, plain):
            one(ranks.integers(3, 6, key=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in stepped)
        assert_same_grads(model, plain, step)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equal(a.data, b.data, "a parameter")


@on_ranks(group=["all ranks", "each rank alone"])
def test_optimizers_in_backward_wait_while_gradients_accumulate(ranks, group):
    if group == "each rank alone":
        ranks.group = ranks.alone()
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    model = ranks.wrap(module)
    with model.no_sync():
        model(ranks.integers(3, 6)).sum().backward()
    assert all(map(torch.equal, module.parameters(), before))
    assert all(p.grad is not None for p in module.parameters())
    model(ranks.integers(3, 6)).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert not torch.equal(module[0].weight, before[0])


@as_torch()
def test_a_fused_optimizer_steps_as_in_torch(ranks, wrap):
    model = wrap(net())
    model._register_fused_optim(torch.optim.SGD, 0.5)
    for step in range(2):
        model(ranks.integers(3, 6, key=step)).sum().backward()
        model.zero_grad()
    yield [*model.parameters()]
    if wrap == ranks.wrap:
        with pytest.raises(RuntimeError, match="can only be called once"):
            model._register_fused_optim(torch.optim.SGD, 0.5)


# ---- groups and checkpoints ---------------------------------------------------------


def test_distributed_checkpoints_save_and_load(ranks):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    folder, found = ranks.all(tempfile.mkdtemp())[0], []
    options = {"checkpoint_id": folder, "process_group": ranks.group}
    for act in (checkpoint.save, checkpoint.load):
        model = ranks.wrap(net())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        if act is checkpoint.save:
            model(ranks.integers(3, 6)).sum().backward()
            optimizer.step()
        states = dict(enumerate(get_state_dict(model, optimizer)))
        assert list(states[0]) == list(model.module.state_dict())
        act(states, **options)
        state = {"model_state_dict": states[0], "optim_state_dict": states[1]}
        set_state_dict(model, optimizer, **state)
        found.append([*model.parameters()])
    for saved, loaded in zip(*found, strict=True):
        assert_equal(loaded.data, saved.data, "a parameter")


@as_torch(strict=[False, True], what=["wrapper", "module"])
def test_what_is_compiled_is_split_at_buckets_into_the_graphs_of_torch(
    ranks, wrap, strict, what
):
    torch._dynamo.reset()
    seen = []

    def count(graph, _):
        if len(graph.graph.nodes) > 2:
            seen.append(len(graph.graph.nodes))
        return graph.forward

    options = {"strict": strict} if wrap == ranks.wrap else {}
    if what == "wrapper":
        model = torch.compile(wrap(Chain(), bucket_cap_mb=1, **options), backend=count)
    else:
        module = torch.compile(Chain(), backend=count)
        model = wrap(module, bucket_cap_mb=1, **options)
    for _ in range(14):  # the logging data sample ten of them
        step_of(model, torch.ones(1, 600))
    assert len(seen) > 1
    yield seen  # none of it is code of the wrapper
