"""Whole recipes as users write them, by paceline and by torch, compared bit by bit.

recipes.py has them.  What torch's class cannot do, or does wrong, is compared with the
bare module on one rank, which sees every rank's data: small integers there, so that
sums are exact.  Two ranks: a mean of two is rounded once, by either library.
"""

import contextlib
import copy
import io
import shutil

import paceline
import torch
import torch.distributed as dist
from cases import (
    FailsInBackward,
    assert_equal,
    integer_weights,
    on_ranks,
    skip_without_complex,
)
from recipes import ON_TORCH, Run
from torch import nn


@on_ranks(2, recipe=[*ON_TORCH])
def test_a_recipe_gives_the_bits_of_torch(ranks, recipe):
    if "complex" in recipe:
        skip_without_complex()
    runs = []
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        torch.manual_seed(1)
        steps = [
            [None if tensor is None else tensor.clone() for tensor in found]
            for found in ON_TORCH[recipe](Run(ranks, wrap))
        ]
        runs.append(steps)
    assert runs[0]
    for step, (mine, theirs) in enumerate(zip(*runs, strict=True)):
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(*pair, f"tensor {i} of step {step}")


# ---- what torch cannot do, or does wrong ---------------------------------------------


class Both:
    """A wrapped model, and the bare one that sees all ranks' data, in one process."""

    def __init__(self, ranks, module, **options):
        self.ranks = ranks
        self.whole = copy.deepcopy(module)
        self.ours = ranks.wrap(module, **options)

    def models(self):
        """Return the bare modules: what is done to one is to be done to the other."""
        return self.whole, self.ours.module

    def zero(self, set_to_none=True):
        for model in (self.whole, self.ours):
            model.zero_grad(set_to_none)

    def whole_loss(self, loss, *keys):
        """Return the mean over ranks of what `loss(model, data)` is for their data."""
        rows = [[_data(rank, key) for key in keys] for rank in range(self.ranks.n)]
        return sum(loss(self.whole, *row) for row in rows) / self.ranks.n

    def own_loss(self, loss, *keys):
        return loss(self.ours, *[_data(self.ranks.rank, key) for key in keys])

    def step(self, loss, *keys):
        self.whole_loss(loss, *keys).backward()
        self.own_loss(loss, *keys).backward()
        self.check(keys)

    def check(self, what):
        theirs = dict(self.whole.named_parameters())
        for name, p in self.ours.module.named_parameters():
            assert_equal(p.grad, theirs[name].grad, f"{what}: the gradient of {name}")


def _data(rank, key):
    """Return a rank's small integers, which every rank can make."""
    seed = hash((rank, key)) if isinstance(key, int) else len(key) + rank
    generator = torch.Generator().manual_seed(seed % 2**31)
    return torch.randint(-3, 4, (3, 6), generator=generator).float()


def exact():
    layers = nn.Linear(6, 130), nn.Hardtanh(-9, 9), nn.Linear(130, 90), nn.Linear(90, 2)
    return integer_weights(nn.Sequential(*layers), -1, 2)


def sum_of(model, x):
    dtype = next(model.parameters()).dtype
    return model(x.to(dtype)).sum()


@on_ranks(2)
def test_the_module_inside_may_be_replaced_as_a_whole(ranks):
    both = Both(ranks, exact())
    both.step(sum_of, 0)
    both.whole = integer_weights(nn.Sequential(nn.Linear(6, 120), nn.Linear(120, 1)))
    both.ours.module = copy.deepcopy(both.whole)
    for step in range(2):
        both.zero()
        both.step(sum_of, step)


@on_ranks(2)
def test_a_model_frozen_as_a_whole_runs_and_is_trained_again(ranks):
    """And is not wrapped anew for it: this happens in every step of some loops."""
    both = Both(ranks, exact())
    world = both.ours._session.world
    for step in range(3):
        both.zero()
        both.ours.requires_grad_(False)
        x = _data(ranks.rank, step).requires_grad_()
        both.ours(x).sum().backward()
        assert x.grad is not None
        both.ours.requires_grad_(True)
        both.step(sum_of, step)
    assert both.ours._session.world is world


# ---- which backwards are synchronised ------------------------------------------------


@on_ranks(2, order=["synchronised first", "synchronised last"])
def test_each_forward_says_for_itself_whether_its_backward_is_synchronised(
    ranks, order
):
    both = Both(ranks, exact())
    for step in range(3):
        both.zero(set_to_none=step != 1)
        if order == "synchronised first":
            out = both.own_loss(sum_of, 2 * step)
            with both.ours.no_sync():
                both.own_loss(sum_of, "never gone back through")
        else:
            with both.ours.no_sync():
                local = both.own_loss(sum_of, 2 * step + 1)
            out = both.own_loss(sum_of, 2 * step)
        both.whole_loss(sum_of, 2 * step).backward()
        if order == "synchronised last":
            local.backward()
            first = [p.grad.clone() for p in both.ours.parameters()]
            for p in both.ours.parameters():
                p.grad = None
            assert not torch.equal(*ranks.all(first[0])), "what was local is averaged"
        out.backward()
        both.check(step) if order == "synchronised first" or step != 1 else both.zero()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
        self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.body(x)
        return self.a(hidden), self.b(hidden)


@on_ranks(2)
def test_a_forward_of_two_outputs_awaits_its_backward_once(ranks):
    """Rank 0's statistics must not overwrite what the other forward has saved."""
    torch.manual_seed(0)
    model = ranks.wrap(TwoHeads())
    for step in range(3):
        model.zero_grad()
        x, y = torch.randn(2, 6, 6, generator=ranks.generator(step)) + ranks.rank
        first, second = model(x), model(y)
        (first[0].sum() + first[1].square().sum()).backward()
        (second[0].sum() + second[1].square().sum()).backward()
        ranks.assert_same([p.grad for p in model.parameters()], f"step {step}")


# ---- compilers -----------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager"] + ["inductor"] * bool(shutil.which("g++"))


@on_ranks(2, backend=BACKENDS, what=["module", "wrapper", "method compile"])
def test_a_compiled_model_gives_the_gradients_of_the_whole_batch(ranks, backend, what):
    torch._dynamo.reset()
    module = exact()
    both = Both(ranks, module)
    if what == "module":
        both.ours = ranks.wrap(torch.compile(module, backend=backend))
    elif what == "method compile":
        both.ours.compile(backend=backend)
    else:
        both.ours = torch.compile(both.ours, backend=backend)
    for step in range(3):
        both.zero()
        both.whole_loss(sum_of, step).backward()
        both.own_loss(sum_of, step).backward()
        rows = zip(both.whole.parameters(), both.ours.parameters(), strict=True)
        for theirs, mine in rows:
            assert_equal(mine.grad, theirs.grad, f"step {step}")


# ---- exceptions that a rank catches --------------------------------------------------


@on_ranks(2, where=["forward", "backward"])
def test_a_rank_out_of_memory_in_a_micro_step_retries_alone(ranks, where):
    """Nothing was to be synchronised yet: nobody else need hear of it."""
    model = ranks.wrap(exact())
    whole = copy.deepcopy(model.module)
    for step in range(3):
        model.zero_grad()
        whole.zero_grad()
        x = _data(ranks.rank, step)
        with model.no_sync():
            if ranks.rank == 1:
                with contextlib.suppress(MemoryError):
                    out = model(x)
                    if where == "forward":
                        raise MemoryError
                    error = MemoryError("no room for a gradient")
                    FailsInBackward.apply(out, error).sum().backward()
                model.zero_grad()
            for half in x.split(2):  # a smaller batch at a time
                model(half).sum().backward()
        model(x).sum().backward()
        (sum(whole(_data(rank, step)).sum() for rank in range(ranks.n)) * 2).backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert_equal(p.grad, q.grad / ranks.n, f"step {step}")


@on_ranks(2)
def test_ranks_that_skip_a_batch_together_go_on_with_the_next(ranks):
    model = ranks.wrap(exact())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    caught, fuse = [], []

    def explode(gradient):
        if fuse:
            raise MemoryError(fuse.pop())

    model.module[2].weight.register_hook(explode)
    for step in range(6):
        optimizer.zero_grad()
        if (step, ranks.rank) in ((1, 1), (3, 0)):
            fuse.append("no room")
        try:
            model(_data(ranks.rank, step)).sum().backward()
        except (MemoryError, paceline.PeerError) as error:
            caught.append((step, type(error).__name__))
            continue
        optimizer.step()
    kinds = ["PeerError", "MemoryError"]
    assert caught == list(zip((1, 3), kinds[:: -1 if ranks.rank else 1], strict=True))
    ranks.assert_same(list(model.parameters()), "parameters")


# ---- copies --------------------------------------------------------------------------


@on_ranks(2, how=["deepcopy", "torch.save"])
def test_rank_0_alone_copies_and_evaluates_a_wrapper(ranks, how):
    """The copy meets its peers only where it is trained."""
    model = paceline.DistributedDataParallel(exact())
    model(_data(ranks.rank, 0)).sum().backward()
    if ranks.rank == 0:
        best = copied(model, how).eval()
        with torch.no_grad():
            assert_equal(best(_data(0, 1)), model(_data(0, 1)), "the copy's output")
    dist.barrier(group=ranks.group)
    other = copied(model, how)
    for one in (model, other):
        one.zero_grad()
        one(_data(ranks.rank, 1)).sum().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad, "a gradient")


@on_ranks(2)
def test_a_copy_may_begin_in_no_sync_or_stay_frozen(ranks):
    model = paceline.DistributedDataParallel(exact())
    teacher = copy.deepcopy(model).requires_grad_(False)
    teacher(_data(0, ranks.rank))  # gradients are recorded, but there is nothing to
    other = copy.deepcopy(model)
    with other.no_sync():
        other(_data(ranks.rank, 0)).sum().backward()
    assert not torch.equal(*ranks.all(other.module[0].weight.grad))
    assert other.require_backward_grad_sync is True
    other(_data(ranks.rank, 1)).sum().backward()
    ranks.assert_same([p.grad for p in other.parameters()], "gradients")


@on_ranks(2)
def test_a_copy_called_with_other_tensors_meets_nobody(ranks):
    """torch.func.functional_call swaps parameters for tensors that are no leaves."""
    model = paceline.DistributedDataParallel(exact())
    other = copy.deepcopy(model)
    if ranks.rank == 0:
        twice = {name: 2 * p for name, p in other.named_parameters()}
        loss = torch.func.functional_call(other, twice, (_data(0, 0),)).sum()
        plain = copy.deepcopy(model.module)
        twice = {name: 2 * p for name, p in plain.named_parameters()}
        torch.func.functional_call(plain, twice, (_data(0, 0),)).sum().backward()
        loss.backward()
        for mine, own in zip(other.parameters(), plain.parameters(), strict=True):
            assert_equal(mine.grad, own.grad, "a gradient of rank 0's own")
    for one in (model, other):
        one.zero_grad()
        one(_data(ranks.rank, 1)).sum().backward()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad, "a gradient")


@on_ranks(2, width=[2, 300], is_run=[False, True])
def test_an_output_kept_from_before_a_change_disturbs_no_step(ranks, width, is_run):
    body = integer_weights(nn.Linear(width, width), -1, 2)
    both = Both(ranks, nn.Sequential(body, integer_weights(nn.Linear(width, 1))))
    xs = [torch.full((1, width), 2.0 * rank + 1) for rank in range(ranks.n)]
    kept = both.ours(xs[0]).sum()
    head = integer_weights(nn.Linear(width, 2))
    for module in both.models():
        module[1] = copy.deepcopy(head)
    for step in range(3):
        both.zero()
        (sum(both.whole(x).sum() for x in xs) / ranks.n).backward()
        both.ours(xs[ranks.rank]).sum().backward()
        both.check(step)
        if step == 0 and is_run:
            kept.backward()  # of what is there no more


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ---- what is refused, and surroundings -----------------------------------------------


@on_ranks(2)
def test_a_model_is_wrapped_while_another_device_is_the_default(ranks):
    module = exact()
    with torch.device("meta"):
        both = Both(ranks, module)
    both.step(sum_of, 0)


@on_ranks(2)
def test_counting_and_profiling_a_step_changes_nothing(ranks):
    from torch.utils.flop_counter import FlopCounterMode

    both = Both(ranks, exact())
    for step in range(2):
        both.zero()
        with FlopCounterMode(display=False), torch.profiler.profile():
            both.step(sum_of, step)


@on_ranks(2)
def test_transforms_of_functions_leave_the_wrapper_as_it_was(ranks):
    both = Both(ranks, exact())
    x = _data(ranks.rank, 0)
    params = {name: p.detach() for name, p in both.ours.named_parameters()}

    def loss(params, x):
        return torch.func.functional_call(both.ours, params, (x,)).sum()

    grads = torch.func.grad(loss)(params, x)
    rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    own = torch.autograd.grad(both.whole(x).sum(), list(both.whole.parameters()))
    for name, mine in zip(grads, own, strict=True):
        assert_equal(grads[name], mine, name)
        assert_equal(rows[name].sum(0), mine, name)
    assert_equal(
        torch.func.grad(lambda x: both.ours(x).sum())(x),
        torch.func.grad(lambda x: both.whole(x).sum())(x),
        "the slope by the input",
    )
    for step in range(2):
        both.zero()
        both.step(sum_of, step)
