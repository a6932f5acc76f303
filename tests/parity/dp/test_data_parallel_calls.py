"""Calls: where replicas run, what they call, threads, forks, and warnings."""

import os
import signal
import sys
import threading
import warnings
import weakref
from itertools import pairwise

import paceline
import pytest
import torch
from paceline._dp import threads
from programs import X, buffer, module
from programs.ways import Leading
from replicas import (
    ON_EACH,
    Twin,
    accumulate,
    assert_same,
    assert_same_grads,
    grads_of,
    integers,
    linear,
    loss_of,
    net,
    step,
)
from support.ranks import run_ranks, values
from support.threads import in_threads
from support.waiting import once_collected
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# ---- where replicas run, and what they call ------------------------------------------


@ON_EACH
def test_replicas_on_the_cpu_run_in_the_callers_thread_with_all_of_torchs(wrap):
    """On GPUs, and without a GIL, only the first one does."""

    def place(m, x):
        return threading.get_ident(), torch.get_num_threads()

    ours, ident = wrap(module(place), 3), threading.get_ident()
    torch.set_num_threads(2)
    try:
        for _ in range(3 if threads.has_gil() else 1):
            idents, n_threads = ours(torch.zeros(7, 3))
            assert idents[0] == ident
            assert wrap.is_gpu or (idents, n_threads) == ([ident] * 3, [2] * 3)
    finally:
        torch.set_num_threads(1)


def test_replicas_may_be_made_by_the_module(wrap):
    class Replicating(nn.Linear):
        def _replicate_for_data_parallel(self):
            replica = super()._replicate_for_data_parallel()
            replica.mine = True
            return replica

        def forward(self, x):
            flags = hasattr(self, "mine"), hasattr(self, "_is_replica")
            return torch.tensor([flags] * len(x))

    flags = wrap(Replicating(3, 2).double())(X)
    assert flags.tolist() == [[False, False]] * 4 + [[True, False]] * 3


@pytest.mark.parametrize("way", ["weak reference", "partial"])
def test_partials_and_weak_references_lead_to_the_replica(wrap, way):
    ours = wrap(Leading(way), 3)
    ours(X)
    assert ours.module.last.num_batches_tracked == 1


HOOKS = (
    "forward_hook",
    "forward_pre_hook",
    "full_backward_hook",
    "full_backward_pre_hook",
)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_parts_run_in_every_replica(wrap, kind):
    twin = Twin(wrap, net())
    register, rows = getattr(twin.inner[2], f"register_{kind}"), []
    for _ in range(2):  # before the first call, and after one
        handle = register(lambda m, seen, *_: rows.append(len(seen[0])))
        twin.step(step, X.clone().requires_grad_())
        assert sorted(rows) == [3, 4]
        handle.remove()
        rows.clear()
        twin.step(step, X)
        assert not rows


@ON_EACH
def test_hooks_on_saved_tensors_round_a_call_change_nothing(wrap):
    """On the CPU they apply to all replicas, on GPUs to replica 0 alone."""
    twin = Twin(wrap, net())
    packed = dict.fromkeys(twin.models, 0)

    def loss(model, x):
        def count(tensor):
            packed[model] += 1
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda t: t)
        with torch.autograd.graph.save_on_cpu(), hooks:
            out = model(x)
        return loss_of(out)

    twin.step(loss, X.clone().requires_grad_())
    n_plain, n_ours = packed.values()
    assert n_ours == n_plain * (1 if wrap.is_gpu else 2)


@ON_EACH
def test_a_list_grows_by_as_many_entries_in_each_call(wrap):
    def remembers(m, x):
        m.losses.append(x.detach().sum())
        return m.layer(x)

    ours, sizes = wrap(module(remembers, layer=linear(), losses=[])), [0]
    for _ in range(4):
        ours(X)
        sizes.append(len(ours.module.losses))
    assert len({after - before for before, after in pairwise(sizes)}) == 1


@ON_EACH
def test_one_tensor_as_two_arguments_is_two_elsewhere(wrap):
    def writes_the_first(m, written, read):
        written.zero_()
        return read + m.layer(written)

    x, ours = integers(5, 3), wrap(module(writes_the_first, layer=linear()))
    x = x.to(wrap.device())
    ours(x, x.clone())  # the first forward explores the model
    before = x.fill_(7).clone()
    is_zeroed = torch.arange(5, device=x.device) < (3 if wrap.is_gpu else 5)
    after = torch.where(is_zeroed[:, None], 0.0, before)
    assert torch.equal(ours(x, x), ours.module(after[:1] * 0, after))
    assert torch.equal(x, after)


@ON_EACH
def test_the_number_of_replicas_may_change_between_calls(wrap):
    twin = Twin(wrap, net())
    for n in (2, 3):
        names = wrap.devices(n)
        twin.ours.device_ids = names if wrap.is_gpu else [*map(torch.device, names)]
        twin.step(step, X)


def test_gradients_cleared_between_inner_backwards_are_warned_of(wrap):
    """The other replicas' gradients add up: they cannot clear the module's."""

    def descends(m, x):
        for _ in range(3):
            m.layer.weight.grad = None
            m.layer(x).square().sum().backward()
        return m.layer(x)

    ours = wrap(module(descends, layer=linear()))
    with pytest.warns(UserWarning, match=r"p\.grad = None has no effect"):
        ours(X)


def test_replica_0_of_a_script_shares_its_storage(wrap):
    script = torch.jit.script(net())
    before = [p.data_ptr() for p in script.parameters()]
    ours = wrap(script)
    with torch.no_grad():
        first, second = ours.replicate(script, ours.device_ids)
        assert [p.data_ptr() for p in first.parameters()] == before
        assert torch.equal(second(X), script(X))


def test_a_full_graph_of_a_wrapper_is_refused_by_the_compiler(wrap):
    torch._dynamo.reset()
    model = wrap(net())
    model(X)  # the first call decides what dynamo may not trace
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_in_replicas"):
        compiled(X)


@ON_EACH
def test_a_graph_outlives_its_wrapper(wrap):
    twin = Twin(wrap, net())
    losses = [step(twin.ours, integers(7, 3, seed=seed)) for seed in range(3)]
    losses.pop(0).backward()
    gone = weakref.ref(twin.ours)
    del twin.ours
    assert once_collected(lambda: gone() is None)
    for loss in losses:
        loss.backward()
    accumulate(twin.plain, 3)
    assert_same_grads(twin.inner, twin.plain)
    for each in (twin.inner, twin.plain):  # training goes on
        torch.optim.SGD(each.parameters(), lr=0.5).step()
        step(each, X.to(each[0].weight.device)).backward()
    assert_same_grads(twin.inner, twin.plain)
    gone = weakref.ref(twin.inner), weakref.ref(twin.inner[0].weight)
    del each, twin, loss, losses
    assert once_collected(lambda: gone[0]() is gone[1]() is None)


# ---- threads, forks, process groups -------------------------------------------------


def sets_a_buffer(m, x):
    m.seen = x.detach().sum(0)
    return m.layer(x)


def sets_a_part(m, x):
    m.part = nn.ReLU()
    return m.part(m.layer(x))


WRITERS = {
    "a new part": lambda: module(sets_a_part, layer=linear(), part=nn.ReLU()),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(),
    "a new buffer": lambda: module(
        sets_a_buffer, layer=linear(), seen=buffer(X.sum(0))
    ),
    "a new buffer in a new replica": lambda: module(
        sets_a_buffer, layer=linear(), seen=buffer(X.sum(0)), layers=[linear()]
    ),
}


@pytest.fixture
def _switches():
    """Let threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switches")
@pytest.mark.parametrize("kind", WRITERS)
@ON_EACH
def test_training_in_several_threads_is_no_error_and_keeps_outputs_apart(wrap, kind):
    """Replica 0 writes to the module while another call looks at it."""
    made = WRITERS[kind]()
    ours = wrap(made)
    batches = [integers(8, 3, seed=seed).to(wrap.device()) for seed in range(4)]
    halves = [[made(half) for half in x.chunk(2)] for x in batches]

    def count_wrong(i):
        expected = torch.cat(halves[i])
        return sum(not torch.allclose(ours(batches[i]), expected) for _ in range(40))

    assert in_threads(count_wrong) == [0] * 4


@pytest.mark.parametrize("kind", ["in parallel", "one replica"])
@ON_EACH
def test_an_earlier_call_may_write_while_replicas_run_in_order(wrap, kind):
    begun, may_write, has_written = (threading.Event() for _ in range(3))

    def writes(m, x, which=None):
        if which == "early" and m is ours.module:
            begun.set()
            assert may_write.wait(60)
            m.seen += 1
            has_written.set()
        elif which == "late" and m is not ours.module:
            may_write.set()
            assert has_written.wait(60)
        return m.layer(x)

    ours = wrap(module(writes, layer=linear(), seen=buffer(torch.zeros(1))))
    expected = ours(X).detach()  # now calls run in parallel, if they may
    n_rows = {"in parallel": 7, "one replica": 1}[kind]
    thread = threading.Thread(target=ours, args=(X[:n_rows], "early"))
    thread.start()
    assert begun.wait(60)
    with torch.no_grad():  # the first such call runs in order
        assert_same(ours(X, "late"), expected)
    thread.join()
    assert ours.module.seen == 1


@ON_EACH
def test_a_child_forked_during_a_forward_may_use_the_wrapper_or_is_told(wrap):
    begins, ends = threading.Event(), threading.Event()

    def waits(m, x):
        if x[0, 0] == 99:
            begins.set()
            ends.wait(60)
        return m.layer(x)

    ours = wrap(module(waits, layer=linear()))
    expected, held = ours(X), X.clone()
    held[0, 0] = 99
    thread = threading.Thread(target=ours, args=(held,))
    thread.start()
    begins.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        is_right = False
        try:
            if wrap.is_gpu:  # CUDA cannot be used in a forked process
                with pytest.raises(RuntimeError, match="called in a forked process"):
                    ours(X)
                is_right = True
            else:
                is_right = torch.equal(ours(X), expected)
        finally:
            os._exit(0 if is_right else 1)
    status = os.waitpid(child, 0)[1]
    ends.set()
    thread.join()
    assert status == 0
    assert torch.equal(ours(X), expected)


def train_inside_ddp(rank, _):
    """Return gradients of two steps: of the plain module, and of the wrapped one."""
    inner = net()
    models = net(), paceline.DataParallel(inner, ["cpu"] * 2)
    wrapped = [DistributedDataParallel(nn.Sequential(model)) for model in models]
    grads = []
    for model in wrapped:
        for _ in range(2):
            step(model, integers(7, 3, seed=rank)).backward()
            grads.append(grads_of(model))
    return grads[:2], grads[2:]


def test_gradients_inside_ddp_of_torch_are_those_of_all_replicas():
    for plain, ours in values(run_ranks(train_inside_ddp, 2)):
        assert_same(ours, plain)


# ---- devices and wrappers -----------------------------------------------------------


def messages_of(caught):
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.parametrize("device_ids", [[0, 1], ["cuda:0", "cuda:1"], (1, 0), [0]])
def test_gpus_that_are_not_there_are_warned_of_once(monkeypatch, device_ids):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS", raising=False)
    made = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = paceline.DataParallel(made, device_ids, output_device=0)
        for _ in range(2):
            assert torch.equal(ours(X), made(X))
    (words,) = messages_of(caught)
    told = f"{list(device_ids)!r}, and there is no GPU: the module is called plainly"
    assert told in words
    assert ours.device_ids == []


def test_no_word_is_said_where_no_gpu_was_named(monkeypatch):
    monkeypatch.delenv("PACELINE_CPU_REPLICAS", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = paceline.DataParallel(net())
        ours(X)
        paceline.DataParallel(net(), ["cpu"])(X)
    assert ours.device_ids == []  # as in torch without an accelerator


@pytest.fixture
def _one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "DataParallel": lambda m: paceline.DataParallel(m, ["cpu"] * 2),
    "DistributedDataParallel": paceline.DistributedDataParallel,
}


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("outer", WRAPPERS)
@pytest.mark.parametrize("inner", WRAPPERS)
def test_a_wrapper_in_a_wrapper_is_warned_of_once(outer, inner):
    plain, made = net(), net()
    wrapped = WRAPPERS[inner](made)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = WRAPPERS[outer](wrapped)
        for model in (plain, ours):
            step(model, X).backward()
    words = [w for w in messages_of(caught) if "module is a" in w]
    assert words == [
        f"{outer}(module): module is a {inner} already, and one wrapper is enough; "
        "give the module inside it, module.module"
    ]
    assert_same_grads(made, plain)


FORMS = {
    "no devices": ({}, [0, 1]),
    "all GPUs, counted": ({"device_ids": range(torch.cuda.device_count())}, [0, 1]),
    "three GPUs": ({"device_ids": range(3), "output_device": 1}, [0, 1, 2]),
    "names": ({"device_ids": ["cuda:1", "cuda:0"], "output_device": "cuda"}, [1, 0]),
    "one GPU": ({"device_ids": [torch.device("cuda")], "output_device": 0}, [0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_cpu_replicas_stand_for_gpus(monkeypatch, form):
    monkeypatch.setenv("PACELINE_CPU_REPLICAS", "2")
    options, ids = FORMS[form]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twin = Twin(lambda made, _: paceline.DataParallel(made, **options), net())
    assert twin.ours.device_ids == ids
    assert torch.device(f"cuda:{twin.ours.device_ids[0]}").index == ids[0]
    assert twin.ours.output_device == torch.device("cpu")
    n_rows = []
    twin.inner[0].register_forward_hook(lambda m, args, out: n_rows.append(len(out)))
    twin.step(step, X.clone().requires_grad_())
    assert n_rows == {1: [7], 2: [4, 3], 3: [3, 2, 2]}[len(ids)]
