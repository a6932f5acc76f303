"""The behaviour that torch's own tests of DataParallel pin, on CPU replicas."""

import inspect
import io
import warnings

import paceline
import pytest
import torch
from programs import module
from replicas import Twin, assert_same, integers, net, reals, smooth_net, step
from support.copies import saved_and_loaded
from torch import nn

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]


def bare(module=None, **options):
    """Return a wrapper; tests use only its methods for subclasses."""
    return paceline.DataParallel(module or net(), TWO, **options)


def scattered(ours, *args):
    """Return the first argument of each replica."""
    return [args[0] for args in ours.scatter(args, {}, TWO)[0]]


# ---- scatter and gather -------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_scatter_and_gather_are_differentiable_twice(dim):
    ours = bare(dim=dim)
    whole = reals(4, 6).requires_grad_()
    parts = [reals(2, 3).requires_grad_(), reals(2, 3, seed=1).requires_grad_()]

    def scatter(x):
        return tuple(scattered(ours, x))

    def gather(*xs):
        return ours.gather(list(xs), CPU)

    for function, inputs in ((scatter, [whole]), (gather, parts)):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)
    assert torch.equal(torch.cat(scatter(whole), dim), whole)
    assert torch.equal(gather(*parts), torch.cat(parts, dim))


def test_parts_of_a_batch_share_its_memory():
    x = integers(5, 2)
    for part in scattered(bare(), x):
        part.zero_()
    assert not x.any()


def test_parts_of_other_memory_formats_are_joined():
    x = integers(5, 4, 3, 3)
    parts = [x[:3].to(memory_format=torch.channels_last), x[3:]]
    assert torch.equal(bare().gather(parts, CPU), x)


# ---- replicate and parallel_apply ---------------------------------------------------


def test_replicas_compute_the_same_and_have_tensors_of_their_own():
    layers = nn.Linear(3, 2), nn.BatchNorm1d(2)
    ours = bare(nn.Sequential(*layers).double().eval())
    first, second = ours.replicate(ours.module, TWO)
    assert first is ours.module
    assert not hasattr(second, "_is_replica")  # torch's have no parameters()
    assert all(isinstance(p, nn.Parameter) for p in second.parameters())
    x = integers(4, 3)
    for replica in (first, second, *map(saved_and_loaded, (first, second))):
        assert torch.equal(replica(x), first(x))
    for named in (nn.Module.named_parameters, nn.Module.named_buffers):
        theirs = dict(named(second))
        assert_same(theirs, dict(named(first)))
        for name, tensor in named(first):
            assert tensor.data_ptr() != theirs[name].data_ptr()
    second(x).sum().backward()
    assert all(p.grad is not None for p in first.parameters())
    assert ours.replicate(ours.module, []) == []


@pytest.mark.parametrize("as_tuples", [False, True])
def test_parallel_apply_takes_tuples_and_bare_tensors(as_tuples):
    x = integers(4, 3)
    inputs = [(x,), (x + 1,)] if as_tuples else [x, x + 1]
    ours = bare()
    outputs = ours.parallel_apply([net(), net(1)], inputs, None)
    again = ours.parallel_apply([net(), net(1)], inputs, [None, {}])
    assert_same(outputs, [net()(x), net(1)(x + 1)])
    assert_same(again, outputs)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_parallel_apply_runs_in_the_autocast_of_the_caller(is_enabled):
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    x = torch.ones(4, 3)
    ours = bare()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
        outputs = [ours.parallel_apply(layers, [x, x], None) for _ in range(3)]
    expected = torch.bfloat16 if is_enabled else torch.float32
    assert {one.dtype for pair in outputs for one in pair} == {expected}


def raises_a_key(m, x):
    raise KeyError("a key")


def test_parallel_apply_raises_what_a_replica_raises():
    x = integers(4, 3)
    with pytest.raises(KeyError) as caught:
        bare().parallel_apply([net(), module(raises_a_key)], [x, x], None)
    with pytest.raises(ValueError, match=r"got 3 replicas, .* has 2 devices"):
        bare().parallel_apply([net()] * 3, [x] * 3, None)
    words = str(caught.value)
    assert words.startswith("Caught KeyError in replica 1 on device cpu.\nOriginal")
    assert "raise KeyError" in words


@pytest.mark.parametrize("kwargs", [[{}], [{}] * 3])
def test_parallel_apply_drops_no_replica(kwargs):
    x = integers(4, 3)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        bare().parallel_apply([net(), net()], [x, x], kwargs)


def test_gradients_may_be_zeroed_in_forward(wrap):
    """Replica 0 does it; each other replica warns that it has no effect."""

    def zeroing(m, x):
        m.layers.zero_grad()
        return m.layers(x)

    twin = Twin(wrap, module(zeroing, layers=net()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(2):
            twin.step(step, integers(7, 3, seed=seed))
    said = [str(w.message) for w in caught if "zero_grad" in str(w.message)]
    assert said
    assert all("has no effect" in words for words in said)


def test_a_parameter_that_has_gone_elsewhere_is_refused():
    ours, x = bare(), integers(7, 3)
    ours(x)
    ours.module[2].to("meta")
    for call in (ours, lambda x: paceline.data_parallel(ours.module, x, TWO)):
        with pytest.raises(RuntimeError, match="found one of them on device: meta"):
            call(x)


def test_functional_call_refuses_the_wrapper():
    with pytest.raises(RuntimeError, match="The stateless API can't be used with nn"):
        torch.func.functional_call(bare(), {}, (integers(7, 3),))


@pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="torch < 2.7")
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_wrapper_is_the_module(strict):
    theirs, x = nn.DataParallel(smooth_net()), reals(5, 3)
    for ours in (bare(theirs.module), paceline.DataParallel(theirs.module)):
        programs = [torch.export.export(w, (x,), strict=strict) for w in (ours, theirs)]
        assert len({str(program.graph) for program in programs}) == 1
        assert torch.equal(*(program.module()(x) for program in programs))


def test_the_exporter_of_onnx_says_to_unwrap_the_module():
    ours = bare(smooth_net())
    has_two = "dynamo" in inspect.signature(torch.onnx.export).parameters
    options = {"dynamo": False} if has_two else {}
    with pytest.raises(ValueError, match="DataParallel is not supported by ONNX"):
        torch.onnx.export(ours, (reals(4, 3),), io.BytesIO(), **options)
