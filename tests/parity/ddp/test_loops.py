"""What training loops do on ranks: second orders, hooks, optimizers, compilers."""

import contextlib
import copy
import threading
import warnings

import paceline
import pytest
import torch
from cases import (
    Twin,
    assert_equal,
    integer_weights,
    mean_over,
    net,
    on_ranks,
    train,
)
from torch import nn

# ---- higher order, anomaly, autocast ------------------------------------------------


@on_ranks(2)
def test_recorded_backwards_give_the_same_values_and_second_gradients(ranks):
    twin = Twin(
        ranks, integer_weights(nn.Sequential(nn.Linear(150, 90), nn.Linear(90, 2)))
    )
    for step in range(3):
        twin.zero()
        x = ranks.integers(3, 150, key=step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twin.step(lambda model, x=x: model(x).sum(), create_graph=True)
    for model in (twin.plain, twin.ours):
        model.zero_grad(set_to_none=True)


@on_ranks(2)
def test_a_penalty_on_gradients_of_the_input_is_averaged(ranks):
    """Second order by `autograd.grad`, as in Wasserstein GANs: torch agrees."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 130), nn.Tanh(), nn.Linear(130, 1))
    ours, theirs = ranks.wrap(copy.deepcopy(module)), ranks.wrap_by_torch(module)
    for step in range(3):
        x = torch.randn(4, 6, generator=ranks.generator(step)).requires_grad_()
        for model in (ours, theirs):
            model.zero_grad()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (model(x).mean() + penalty).backward()
        for mine, p in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_equal(mine.grad, p.grad, f"step {step}")


@on_ranks(2)
def test_second_gradients_averaged_are_those_of_the_mean_loss(ranks):
    """Values are means, derivatives local.  Torch 2.13 itself raises here."""
    module = integer_weights(nn.Sequential(nn.Linear(150, 90), nn.Linear(90, 2)), 1, 3)
    rows = ranks.all(ranks.integers(3, 150))
    plain, ours = copy.deepcopy(module), ranks.wrap(module)

    def second(model, loss):
        params = list(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss.backward(create_graph=True)
        total = sum(p.grad.square().sum() for p in params)
        return torch.autograd.grad(total, params, allow_unused=True)

    expected = second(plain, sum(plain(x).sum() for x in rows) / ranks.n)
    mine = ranks.all(second(ours, ours(rows[ranks.rank]).sum()))
    for i, one in enumerate(expected):
        assert_equal(mean_over([row[i] for row in mine]), one, "a second gradient")


@on_ranks(2)
def test_a_graph_that_has_saved_a_local_gradient_does_not_go_backward(ranks):
    """The mean is written where the local gradient was: autograd finds out."""
    module = integer_weights(nn.Sequential(nn.Linear(150, 90), nn.Linear(90, 2)), 1, 3)
    model = ranks.wrap(module)
    totals = []
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: totals.append(p.grad.square().sum())
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(ranks.integers(3, 150)).sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(totals), module[0].weight)


@on_ranks(2)
def test_backwards_under_anomaly_detection(ranks):
    twin = Twin(ranks, net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            train(twin, ranks)


@on_ranks(2)
def test_training_under_autocast(ranks):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 100))
    twin = Twin(ranks, module)
    for step in range(3):
        x = torch.randn(5, 64, generator=ranks.generator(step))
        twin.zero()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = [model(x) for model in (twin.plain, twin.ours)]
        assert outs[1].dtype == torch.bfloat16
        for out in outs:
            out.float().square().mean().backward()
        twin.average()
        twin.check()


@on_ranks(2)
def test_a_grad_scaler_sees_averaged_gradients(ranks):
    model = ranks.wrap(nn.Linear(200, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 200, generator=ranks.generator(step))
        if step == 1 and ranks.rank == 1:
            x[0, 0] = float("inf")  # every rank must skip this step
        scaler.scale(model(x).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        ranks.assert_same(list(model.parameters()), f"step {step}")
    assert scaler.get_scale() == 4.0
    assert all(p.isfinite().all() for p in model.parameters())


# ---- hooks, optimizers --------------------------------------------------------------


@on_ranks(2)
def test_hooks_of_the_user_on_tensors_see_local_gradients(ranks):
    twin = Twin(ranks, net())
    logs = [], []
    for model, log in zip((twin.plain, twin.ours), logs, strict=True):
        for p in model.parameters():
            p.register_hook(lambda g, log=log: log.append(g.clone()))
            p.register_hook(lambda g: g * 2)
    train(twin, ranks)
    for mine, other in zip(*logs, strict=True):
        assert_equal(mine, other, "what a hook saw")


@on_ranks(2, when=["before wrapping", "after wrapping"])
def test_post_accumulate_hooks_of_the_user_see_a_gradient(ranks, when):
    module = net()
    seen = []

    def look(p):
        seen.append(None if p.grad is None else p.grad.clone())

    if when == "before wrapping":
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(look)
    plain = copy.deepcopy(module)
    twin = Twin(ranks, plain)
    if when == "before wrapping":
        twin.ours = ranks.wrap(module)
    else:
        for p in twin.ours.parameters():
            p.register_post_accumulate_grad_hook(look)
    x = ranks.integers(3, 6)
    for p in twin.plain.parameters():
        p._post_accumulate_grad_hooks = None
    for step in range(3):
        twin.zero(set_to_none=step != 1)
        seen.clear()
        twin.step(lambda model: model(x).sum())
        assert len(seen) == 6
        assert all(grad is not None for grad in seen)


@on_ranks(2)
def test_the_norm_for_clipping_is_that_of_the_averaged_gradients(ranks):
    twin = Twin(ranks, net())
    for step in range(3):
        x = ranks.integers(3, 6, key=step)
        twin.zero()
        twin.step(lambda model, x=x: model(x).sum())
        norms = [
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for model in (twin.plain, twin.ours)
        ]
        assert_equal(*norms, "the norm")
        twin.check()
        for model in (twin.plain, twin.ours):
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        twin.check()


def assert_same_parameters(twin, ranks):
    pairs = zip(twin.ours.parameters(), twin.plain.parameters(), strict=True)
    for mine, other in pairs:
        assert_equal(mine.data, other.data, "a parameter")
    ranks.assert_same(list(twin.ours.parameters()), "parameters")


@on_ranks(2, made=["before wrapping", "after wrapping"])
def test_several_optimizers_share_a_model(ranks, made):
    def optimizers(model):
        params = list(model.parameters())
        return [
            torch.optim.SGD(params[:2], lr=0.5, momentum=0.5),
            torch.optim.AdamW(params[2:], lr=0.01),
        ]

    module = net()
    plain = copy.deepcopy(module)
    sets = [optimizers(plain), optimizers(module)] if made == "before wrapping" else []
    twin = Twin.__new__(Twin)
    twin.ranks, twin.plain, twin.ours = ranks, plain, ranks.wrap(module)
    sets = sets or [optimizers(plain), optimizers(twin.ours)]
    for step in range(4):
        x = ranks.integers(3, 6, key=step)
        for one in sets[0] + sets[1]:
            one.zero_grad()
        twin.step(lambda model, x=x: model(x).sum())
        for one in sets[0] + sets[1]:
            one.step()
        assert_same_parameters(twin, ranks)


@on_ranks(2)
def test_foreach_and_fused_optimizers_take_the_gradients(ranks):
    for options in ({"foreach": True}, {"fused": True}):
        twin = Twin(ranks, net())
        pair = [
            torch.optim.Adam(model.parameters(), lr=0.01, **options)
            for model in (twin.plain, twin.ours)
        ]
        for step in range(3):
            x = ranks.integers(3, 6, key=step)
            twin.zero()
            twin.step(lambda model, x=x: model(x).sum())
            for one in pair:
                one.step()
            assert_same_parameters(twin, ranks)


@on_ranks(2)
def test_an_optimizer_that_calls_a_closure_again_and_again(ranks):
    torch.manual_seed(0)
    model = ranks.wrap(nn.Linear(100, 100))
    x = torch.randn(30, 100, generator=ranks.generator("x"))
    y = torch.randn(30, 100, generator=ranks.generator("y"))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        mean = mean_over(ranks.all(loss.detach()))
        losses.append(mean.item())
        return mean

    for _ in range(3):
        optimizer.step(closure)
        ranks.assert_same(list(model.parameters()), "parameters")
    assert losses[-1] < losses[0] / 2


# ---- compiled -----------------------------------------------------------------------


@on_ranks(2, what=["module before wrapping", "wrapper", "method compile"])
def test_a_compiled_model_trains_as_the_plain_one(ranks, what):
    torch._dynamo.reset()
    module = net(6, 130, 2)
    plain = copy.deepcopy(module)
    if what == "module before wrapping":
        ours = ranks.wrap(torch.compile(module, backend="eager"))
    elif what == "wrapper":
        ours = torch.compile(ranks.wrap(module), backend="eager")
    else:
        ours = ranks.wrap(module)
        ours.compile(backend="eager")
    for step in range(3):
        x = ranks.integers(3, 6, key=step)
        for model in (plain, ours):
            model.zero_grad()
            model(x).sum().backward()
        rows = ranks.all([p.grad for p in plain.parameters()])
        for i, p in enumerate(ours.parameters()):
            assert_equal(p.grad, mean_over([row[i] for row in rows]), f"step {step}")


def compiled_autograd(step=0):
    if step == 0:  # later ones may use what was compiled
        torch._dynamo.reset()
    compiler = torch.compile(backend="eager", dynamic=False)
    module = torch._dynamo.compiled_autograd
    enable = getattr(module, "_enable", None) or module.enable
    return enable(compiler)


@on_ranks(2, unused=["none", "by all", "by rank 1"])
def test_a_compiled_backward_is_averaged(ranks, unused):
    module = net(6, 130, 2)
    module[0].rare = nn.Linear(6, 130)
    twin = Twin(ranks, module)
    for step in range(3):
        twin.zero()
        x = ranks.integers(3, 6, key=step)
        uses_all = unused == "none" or (unused == "by rank 1" and ranks.rank == 0)

        def loss(model, x=x, uses_all=uses_all):
            bare = getattr(model, "module", model)
            return model(x).sum() + (bare[0].rare(x).sum() if uses_all else 0)

        loss(twin.plain).backward()
        with compiled_autograd(step):
            loss(twin.ours).backward()
        twin.average()
        twin.check()


@on_ranks(2)
def test_a_compiled_backward_that_fails_at_once_is_told_to_the_peers(ranks):
    def explode(_):
        raise ValueError("out of luck")

    model = ranks.wrap(net(6, 130, 2))
    for step in range(3):
        model.zero_grad()
        out = model(ranks.integers(3, 6))
        kind = ValueError if ranks.rank else paceline.PeerError
        fails = pytest.raises(kind, match="out of luck")
        if ranks.rank == 1 and step == 1:
            out.register_hook(explode)
        ranks.all(step)  # before it fails: else a peer may be told in its forward
        with fails if step == 1 else contextlib.nullcontext(), compiled_autograd(step):
            out.sum().backward()
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


@on_ranks(2)
def test_a_compiled_backward_whose_end_cannot_be_seen_is_an_error(ranks):
    """In another thread, with unused parameters: nothing can be called at its end."""
    module = net(6, 130, 2)
    module[0].rare = nn.Linear(6, 130)
    model = ranks.wrap(module)
    errors = []

    def run():
        try:
            for _ in range(3):
                out = model(ranks.integers(3, 6))
                with compiled_autograd():
                    out.sum().backward()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert isinstance(errors[0], paceline.PeerError) or "main thread" in str(errors[0])


@on_ranks(2)
def test_a_compiled_backward_that_fails_is_told_to_the_peers(ranks):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ranks.rank == 1 and step == 1:
                raise ValueError("out of luck")
            return gradient

    class Middle(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    first, *rest = net(6, 130, 2)
    first.rare = nn.Linear(6, 130)
    module = nn.Sequential(first, Middle(), *rest)
    model = ranks.wrap(module)
    for step in range(3):
        kind = ValueError if ranks.rank else paceline.PeerError
        fails = pytest.raises(kind, match="out of luck")
        with fails if step == 1 else contextlib.nullcontext(), compiled_autograd(step):
            model(ranks.integers(3, 6)).sum().backward()
    ranks.assert_same([p.grad for p in module[-1].parameters()], "gradients")


# ---- flags --------------------------------------------------------------------------

FLAGS = [
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
]


@on_ranks(2, flag=FLAGS)
def test_a_flag_that_is_not_needed_changes_nothing(ranks, flag):
    module = net()
    module[0].unused = nn.Linear(50, 200)
    twin = Twin(ranks, module, **{flag: True})
    train(twin, ranks)
    assert twin.ours.module[0].unused.weight.grad is None
