"""The memory of replicas on GPUs: its blocks, their lifetime, their cost.

Parameters and buffers of a replica lie in blocks that each forward updates.  Tensors
that graphs have saved, or that users keep, are views of those blocks.
"""

import copy
import gc
import weakref
from types import SimpleNamespace

import paceline
import pytest
import torch
from paceline._compat import torch_modes
from paceline._dp import segments
from paceline._dp.segments import HeldBlocks
from programs import Made, X, buffer, grown, module, parameter
from programs.held import GivesNone
from replicas import (
    Parent,
    Twin,
    Wrap,
    assert_close,
    assert_same,
    assert_same_grads,
    grow,
    integers,
    linear,
    loss_of,
    penalty_on,
    resident_bytes,
    smooth_net,
    step,
    without_collector,
)
from support import devices, fake_gpus
from support.waiting import once_collected
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def norm_net():
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    return nn.Sequential(*layers).double()


@pytest.fixture(params=[(2, ()), (3, ("peers=0",))], ids=["2", "3"])
def n_gpus(request):
    """Return the number of GPUs, with or without peer access."""
    n_gpus, options = request.param
    with fake_gpus.several(n_gpus, *options):
        yield n_gpus


@pytest.fixture
def wrap(n_gpus):
    """Return a function that wraps a module for all GPUs."""
    return lambda made, _=2, **options: Wrap(is_gpu=True)(made, n_gpus, **options)


def replicated(ours):
    return ours._engine_for(ours.device_ids)._replicated


def blocks_of(ours):
    segments_ = replicated(ours)._layout.segments
    return [b for segment in segments_ for b in segment.blocks if b is not None]


# ---- blocks -------------------------------------------------------------------------


def test_a_loop_uses_the_same_blocks_in_all_steps(wrap):
    ours, seen = wrap(norm_net()), set()
    for is_training in (True, False):
        ours.train(is_training)
        for _ in range(10):
            with torch.set_grad_enabled(is_training):
                loss = ours(X).square().sum()
            if is_training:
                loss.backward()
                grow(ours, 0.9)
            seen |= set(map(id, blocks_of(ours)))
    assert len(seen) == len(blocks_of(ours))


def test_a_block_is_given_back_with_the_graph_that_held_it(wrap):
    ours = wrap(smooth_net())
    first = ours(X)
    (block, *_) = blocks_of(ours)
    second = ours(X)
    (other, *_) = blocks_of(ours)
    assert other is not block
    loss_of(first + second).backward()
    ours(X)
    assert blocks_of(ours)[0] is other


def test_a_tensor_that_a_forward_keeps_stays_as_it_is(wrap, n_gpus):
    kept = []

    def keeps(m, x):
        kept.append(m.layer.weight.detach())
        return m.layer(x)

    ours = wrap(module(keeps, layer=linear()))
    with torch.no_grad():
        ours(X)
        expected = kept[0].clone()
        ours.module.layer.weight.mul_(2)
        ours(X)
    for tensor in kept[1:n_gpus]:  # replica 0's is the weight itself
        assert_close(tensor, expected)
    for tensor in kept[n_gpus:]:
        assert_close(tensor, ours.module.layer.weight.detach())


@pytest.mark.parametrize("is_old", [False, True], ids=["young", "old"])
def test_replicas_in_circles_do_not_take_ever_more_memory(wrap, monkeypatch, is_old):
    """Only the garbage collector frees them."""
    made = module(lambda m, x: m.circle[0].inner(x), inner=smooth_net())
    made.circle = [made]
    ours, kept, collect = wrap(made), [], gc.collect
    if is_old:  # they outlived collections, so a collection of the young frees none
        old = {"collect": lambda generation: generation == 2 and collect()}
        monkeypatch.setattr(segments, "gc", SimpleNamespace(**old))
    with without_collector(), torch.no_grad():
        for _ in range(20):
            ours(X)
            kept += [StorageWeakRef(b.untyped_storage()) for b in blocks_of(ours)]
            n_blocks = len({ref.cdata for ref in kept if not ref.expired()})
            assert n_blocks <= 8 * len(blocks_of(ours))


def test_garbage_is_collected_only_for_blocks_that_stay_in_use(wrap, monkeypatch):
    collected = []
    monkeypatch.setattr(segments.gc, "collect", lambda *g: collected.append(*g))
    for model in (wrap(norm_net()), wrap(nn.ReLU())):
        for _ in range(5):
            model(X).square().sum()
    assert not collected
    held, blocks = HeldBlocks(), [torch.ones(1) for _ in range(5)]
    for block in blocks:
        held.add(block)
    for most, expected in ((2, [1, 2]), (2, [1, 2]), (1, [1, 2, 1, 2])):
        held.limit(most)
        assert collected == expected


def test_memory_is_taken_once_and_a_tensor_alone_has_its_size(wrap, n_gpus):
    ours = wrap(nn.Linear(3, 5, bias=False))
    ours(torch.ones(7, 3)).sum().backward()
    group, layout = ours._engine_for(ours.device_ids).group, replicated(ours)._layout
    assert group.ring(layout.segment_bytes) is group.ring(layout.segment_bytes)
    assert group.sums(1)[-1] is group.sums(1)[-1]
    rooms = list(group.rooms)
    ours(torch.ones(7, 3)).sum().backward()
    assert list(map(id, group.rooms)) == list(map(id, rooms))
    assert (rooms[-1] is None) == (n_gpus == 2)  # a single row is not added up
    (segment,) = layout.segments
    assert segment.n_bytes == 3 * 5 * 4


# ---- lifetimes ----------------------------------------------------------------------


def test_what_a_replica_had_is_ordinary_and_goes_with_the_call(wrap, n_gpus):
    seen = []

    def looks(m, x):
        for tensor in (m.layer.weight, m.odd):
            assert not tensor.is_inference()
            seen.append(weakref.ref(tensor))
        return m.layer(x)

    made = module(looks, layer=linear(), odd=buffer(integers(3, 3).to_sparse()))
    ours = wrap(made)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            ours(X)
        assert len(seen) == 2 * n_gpus
        assert once_collected(  # two are the module's own
            lambda: sum(each() is not None for each in seen) == 2
        )
        seen.clear()


def test_parameters_of_a_functional_call_are_let_go(wrap):
    parent = Parent(wrap(linear()))
    given = {name: p * 2 for name, p in parent.named_parameters()}
    kept = [weakref.ref(tensor) for tensor in given.values()]
    functional_call(parent, given, (X,)).sum().backward()
    del given
    assert once_collected(lambda: all(reference() is None for reference in kept))


def test_tensors_for_parameters_that_a_forward_hands_out_stay_as_they_are(wrap):
    found = []

    class Shows(paceline.DataParallel):
        def gather(self, outputs, output_device):
            found.append(outputs[1])
            return super().gather(outputs, output_device)

    held = {"weight": parameter(integers(3, 3))}
    parent = Parent(wrap(Made(lambda m, x: m.weight, held), kind=Shows))
    given = {name: p.detach() * 0.5 for name, p in parent.named_parameters()}
    with torch.no_grad():
        functional_call(parent, given, (X,))
        (shown,) = found
        expected = shown.clone()
        for tensor in given.values():
            tensor.data.mul_(2)
        functional_call(parent, given, (X,))
    assert_same(shown, expected)


def test_an_evaluation_within_one_autocast_does_not_grow(wrap):
    model, x = wrap(nn.Linear(1000, 1000)), torch.ones(8, 1000)
    with torch.no_grad(), torch.autocast(devices.KIND, dtype=torch.bfloat16):
        for _ in range(3):
            model(x)
        before = resident_bytes()
        for _ in range(30):
            model(x)
        assert resident_bytes() - before < 60e6  # casts would take 120 MB


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_parameter_alone_in_its_segment_may_get_no_gradient(
    wrap, monkeypatch, create_graph
):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 10)

    def forward(m, x):
        return m.last(GivesNone.apply(x, m.table[0, :3]))

    plain = module(forward, table=parameter(integers(64, 64)), last=linear(2))
    found = []
    for model in (plain, wrap(copy.deepcopy(plain))):
        ways = {"create_graph": create_graph, "allow_unused": True}
        weights = list(model.parameters())
        table, *rest = torch.autograd.grad(step(model, X), weights, **ways)
        assert table is None
        found.append([grad.detach() for grad in rest])
    assert_same(found[1], found[0], exact=False)


# ---- tensors of other kinds, and a device without memory -----------------------------


def test_tensors_that_no_block_can_hold_travel_by_themselves(wrap, n_gpus):
    seen = []

    def forward(m, i):
        mine = m.rows.weight, m.gap, m.mask._values()
        seen.append([tensor.data_ptr() for tensor in mine])
        return m.rows(i) @ m.gap.t() + (m.mask @ m.gap[:3].t()).sum()

    plain = module(
        forward,
        rows=nn.Embedding(9, 3, sparse=True).double(),
        mask=buffer(torch.eye(3).to_sparse().double()),
        gap=parameter(integers(4, 6)[:, ::2]),
    )
    ours = wrap(copy.deepcopy(plain))
    for model in (ours, plain):
        step(model, torch.arange(7)).backward()
    for of_one_tensor in zip(*seen[:n_gpus], strict=True):  # each replica has its own
        assert len(set(of_one_tensor)) == n_gpus
    assert_same_grads(ours, plain, exact=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16])
def test_each_gpu_has_its_rows_of_an_input(wrap, n_gpus, dtype):
    seen = []

    def sees(m, x):
        seen.append(x.data_ptr())
        return x.to(torch.int64).sum(1)

    x = integers(6, 3).abs().to("gpu:0", dtype)
    assert torch.equal(wrap(Made(sees, {}))(x), x.to(torch.int64).sum(1))
    here = range(x.data_ptr(), x.data_ptr() + x.nbytes)
    assert [place in here for place in seen].count(True) == 1
    assert len(seen) == n_gpus


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_table_that_a_forward_keeps_is_on_each_gpu_in_the_next(wrap, n_gpus, kind):
    seen = []

    def forward(m, x):
        if m.table is None:
            m.table = torch.arange(1.0, 4.0, device=x.device if kind == "gpu" else kind)
        seen.append(m.table)
        return m.layer(x) * m.table.to(x.device)

    ours = wrap(module(forward, layer=linear(), table=None))
    expected, table = ours(X), ours.module.table
    seen.clear()
    assert_same(ours(X), expected)
    n_kept = 1 if kind == "gpu" else n_gpus  # tensors outside the GPUs stay there
    assert [kept is table for kept in seen].count(True) == n_kept
    assert all(torch.equal(kept.cpu(), table.cpu()) for kept in seen)
    assert len(seen) == n_gpus
    assert ours.module.table is table


def run(model, x, way):
    if way == "evaluate":
        with torch.no_grad():
            return model(x)
    return (
        penalty_on(model, grown(x)) if way == "two orders" else step(model, x)
    ).backward()


@pytest.mark.parametrize("name", ["empty", "empty_like", "zeros"])
@pytest.mark.parametrize("way", ["train", "evaluate", "two orders"])
def test_a_device_without_memory_is_an_error_and_the_next_step_is_whole(
    wrap, monkeypatch, name, way
):
    """At each allocation in turn: on any device, in forward or in backward."""
    allocate, left = getattr(torch, name), [10**9]

    def scarce(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*args, **kwargs)

    twin, n_failed = Twin(wrap, smooth_net()), 0
    for k in range(1, 100):
        x = integers(7, 3, seed=k)
        with monkeypatch.context() as patched:
            patched.setattr(torch, name, scarce)
            left[0] = k
            try:
                run(twin.ours, x, way)
            except torch.OutOfMemoryError:
                n_failed += 1
            is_over = left[0] > 0
        for model in twin.models:
            with torch.no_grad():
                for p in model.parameters():
                    (p if k % 2 else p.data).mul_(1.25)
        twin.zero()
        twin.compare(lambda model, x: run(model, x, way), x, exact=False)
        twin.assert_same(exact=False)
        if is_over:
            break
    assert is_over
    assert n_failed > 0 or name != "empty"


# ---- hooks on saved tensors ---------------------------------------------------------
# They apply to replica 0 alone: a backward on several GPUs has a thread for each, and
# these threads would call the hooks in parallel.


class Nothing(TorchDispatchMode):
    """Sees each operation, and changes nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def draws():
    """Return a layer with random numbers of the CPU, so that replicas run in order."""

    def forward(m, x):
        return (m.layer(x).tanh() * torch.rand(len(x), 1).to(x)).square()

    return Made(forward, {"layer": linear()})


@pytest.mark.parametrize("mode", [Nothing, torch.enable_grad])
@pytest.mark.parametrize("make", [smooth_net, draws])
def test_hooks_on_saved_tensors_see_those_of_replica_0(wrap, n_gpus, make, mode):
    plain, ours = make(), wrap(make())
    rows = grown(X.tensor_split(n_gpus)[0])
    for _ in range(3):  # replicas run in order at first
        found = [], []
        for model, x, seen in zip((plain, ours), (rows, grown()), found, strict=True):
            torch.manual_seed(0)
            hooks = saved_tensors_hooks(
                lambda t, seen=seen: seen.append(t.clone()) or t, lambda t: t
            )
            with mode(), hooks:
                model(x)
                X.clone().requires_grad_().tanh()  # hooks are still on after the call
        assert found[0]
        assert_same(found[1], found[0])


@pytest.mark.parametrize("member", [0, 1])
def test_a_saved_tensor_changed_in_place_is_an_error_under_hooks(wrap, member):
    """Replica 0's goes to the hooks, whose result torch trusts."""
    if member and torch_modes._top_hooks is None:
        pytest.skip("this torch cannot be asked for hooks: others are put over them")
    kept = []

    def keeps(m, x):
        out = m.layer(x).tanh()
        kept.append(out)
        return out * 2

    ours = wrap(module(keeps, layer=linear()))
    for _ in range(2):
        kept.clear()
        with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
            out = ours(X)
        kept.sort(key=len, reverse=True)
        with torch.no_grad():
            kept[-1 if member else 0].add_(1)
        if member:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of(out).backward()
        else:
            loss_of(out).backward()


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_checkpoint_needs_no_random_numbers_of_other_gpus(
    wrap, n_gpus, is_checkpointed
):
    """As from generators of GPUs other than the first: replica 0 draws only zeros."""
    draws = {}

    def drifts(m, x):
        which = int(x[0, 0])
        draws[which] += which
        return (m.layer(x) * (1 + draws[which])).square()

    parts = X.clone().tensor_split(n_gpus)
    for k, part in enumerate(parts):
        part[:, 0] = k
    twin = Twin(wrap, module(drifts, layer=linear()))

    def by_parts(model, x):
        draws.update(dict.fromkeys(range(3), 0))
        if model is twin.plain:
            return loss_of(torch.cat([model(part) for part in x.tensor_split(n_gpus)]))
        if not is_checkpointed:
            return step(model, x)
        options = {"use_reentrant": False, "determinism_check": "none"}
        return loss_of(checkpoint(model, x, **options))

    for _ in range(3):
        twin.zero()
        twin.step(by_parts, torch.cat(parts))
