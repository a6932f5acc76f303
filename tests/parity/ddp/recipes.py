"""Training recipes as users write them, for test_recipes.py.

A recipe is a generator.  It builds its models from a seed, wraps them with the function
that it receives, trains, and yields after each step the tensors to compare.  torch's
class can run the recipes in `ON_TORCH` too, and is the reference for them.
"""

import contextlib
import copy
import inspect
import warnings

import paceline
import torch
from support.threads import in_threads
from torch import nn
from torch.optim import swa_utils

N_STEPS = 3


def tensors_of(*things):
    """Return the parameters and gradients of modules, and tensors unchanged."""
    found = []
    for thing in things:
        if isinstance(thing, nn.Module):
            found += [p.detach() for p in thing.parameters()]
            found += [p.grad for p in thing.parameters()]
        else:
            found.append(thing)
    return found


class Run:
    """The argument of a recipe: a function that wraps, and the rank's own data."""

    def __init__(self, ranks, wrap):
        self.ranks, self.rank, self.wrap = ranks, ranks.rank, wrap
        self.is_torch = wrap == ranks.wrap_by_torch

    def normal(self, *shape, key=0):
        return torch.randn(shape, generator=self.ranks.generator(key, shape))

    def wrap_copyable(self, module, **options):
        """Wrap over the default group: other wrappers cannot be copied."""
        by_torch = nn.parallel.DistributedDataParallel
        wrap = by_torch if self.is_torch else paceline.DistributedDataParallel
        return wrap(module, **options)


def mlp(n_in=6, n_out=2, width=130):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.Tanh(), nn.Linear(width, 70), nn.Linear(70, n_out)
    )


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def trained(run, model, optimizer, shape=(4, 6), loss=None):
    """Take the steps of a plain loop; yield the tensors to compare."""
    loss = loss or (lambda x: model(x).square().mean())
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss(run.normal(*shape, key=step)).backward()
        optimizer.step()
        yield tensors_of(model)


# ---- methods of training -------------------------------------------------------------


def projected_conflicting_gradients(run):
    model = run.wrap(mlp(n_out=3))
    optimizer = sgd(model)
    for step in range(N_STEPS):
        x = run.normal(4, 6, key=step)
        tasks = []
        for task in range(3):
            optimizer.zero_grad()
            model(x)[:, task].square().mean().backward()
            tasks.append([p.grad for p in model.parameters()])
        for p, *rows in zip(model.parameters(), *tasks, strict=True):
            merged = torch.zeros_like(p)
            for i, row in enumerate(rows):
                row = row.clone()
                for other in rows[:i] + rows[i + 1 :]:
                    dot = (row * other).sum()
                    if dot < 0:
                        row -= dot / other.square().sum() * other
                merged += row
            p.grad = merged
        optimizer.step()
        yield tensors_of(model)


def stochastic_weight_averaging(run):
    module = nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130), nn.Linear(130, 2))
    model = run.wrap_copyable(module)
    average = swa_utils.AveragedModel(model)
    optimizer = sgd(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in trained(run, model, optimizer):
        average.update_parameters(model)
        scheduler.step()
        yield tensors_of(model, average)
    swa_utils.update_bn([run.normal(4, 6, key=i) for i in range(3)], average)
    # torch sends rank 0's statistics here too; paceline sends them only with gradients.
    yield [*average.buffers()] if run.rank == 0 else []


def adversarial_training(run):
    make, judge = run.wrap(mlp(6, 120)), run.wrap(mlp(120, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (make, judge)]
    for step in range(N_STEPS):
        x, real = run.normal(4, 6, key=step), run.normal(4, 120, key=step)
        optimizers[1].zero_grad()
        fake = make(x)
        loss = nn.functional.softplus(-judge(real)) + nn.functional.softplus(
            judge(fake.detach())
        )
        loss.mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        nn.functional.softplus(-judge(fake)).mean().backward()
        optimizers[0].step()
        yield tensors_of(make, judge)


def gradient_penalty(run):
    judge = run.wrap(mlp(6, 1))

    def loss(x):
        real, fake = x
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return judge(fake).mean() - judge(real).mean() + 10 * penalty

    optimizer = torch.optim.Adam(judge.parameters(), lr=0.01, betas=(0.0, 0.9))
    yield from trained(run, judge, optimizer, (2, 4, 6), loss)


def quasi_newton(run):
    model = run.wrap(nn.Linear(6, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for step in range(N_STEPS):
        x = run.normal(8, 6, key=step)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return run.ranks.all(loss.item())[0]  # all ranks must branch alike

        optimizer.step(closure)
        yield tensors_of(model)


def accumulation_with_clipping_and_a_scheduler(run):
    model = run.wrap(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    for step in range(N_STEPS):
        for micro in range(4):
            context = model.no_sync() if micro < 3 else contextlib.nullcontext()
            with context:
                (
                    model(run.normal(4, 6, key=(step, micro))).square().mean() / 4
                ).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        yield [norm, *tensors_of(model)]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step != 1)
        yield tensors_of(model)


def stateless_teacher(run):
    """Swap a teacher's weights into the wrapper itself for one forward."""
    model = run.wrap(mlp())
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    swapped = {f"module.{k}": p for k, p in teacher.named_parameters()}

    def loss(x):
        with torch.no_grad():
            target = torch.func.functional_call(model, swapped, (x,))
        return (model(x) - target).square().mean()

    yield from trained(run, model, sgd(model), loss=loss)


class Recurrent(nn.Module):
    def __init__(self, n_layers=2):
        super().__init__()
        self.lstm = nn.LSTM(6, 40, n_layers)
        self.head = nn.Linear(40, 2)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return self.head(out), state


def truncated_backpropagation_through_time(run):
    model = run.wrap(Recurrent())
    optimizer = sgd(model)
    state = None
    for step in range(N_STEPS):
        optimizer.zero_grad()
        out, state = model(run.normal(5, 3, 6, key=step), state)
        out.square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        state = tuple(part.detach() for part in state)
        yield tensors_of(model)


def meta_learning(run):
    """Take an inner step by autograd.grad, then the outer gradient through it."""
    model = run.wrap(mlp())

    def loss(data):
        x, y = data
        params = dict(model.module.named_parameters())
        inner = torch.func.functional_call(model.module, params, (x,))
        slopes = torch.autograd.grad(
            inner.square().mean(), params.values(), create_graph=True
        )
        rows = zip(params.items(), slopes, strict=True)
        fast = {name: p - 0.1 * slope for (name, p), slope in rows}
        outer = torch.func.functional_call(model.module, fast, (y,))
        # Use the wrapper too: torch averages only gradients of its forward.
        return outer.square().mean() + 0 * model(x).sum()

    yield from trained(run, model, sgd(model), (2, 4, 6), loss)


def optimizers_of_every_kind(run):
    for make in (
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adagrad(p, foreach=False),
        lambda p: torch.optim.RMSprop(p, foreach=True),
    ):
        torch.manual_seed(2)
        model = run.wrap(mlp())
        yield from trained(run, model, make(model.parameters()))


def scaled_losses(run):
    model = run.wrap(mlp())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for step in range(N_STEPS + 1):
        optimizer.zero_grad()
        x = run.normal(4, 6, key=step)
        if step == 1 and run.rank == 1:
            x[0, 0] = float("inf")
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        yield [p.detach() for p in model.parameters()]
        yield [torch.tensor(scaler.get_scale()), norm.isfinite()]


def autocast_to_bfloat16(run):
    model = run.wrap(nn.Sequential(nn.Conv1d(3, 40, 3), nn.Flatten(), mlp(160)))

    def loss(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return out.float().square().mean()

    yield from trained(run, model, sgd(model), (4, 3, 6), loss)


def a_backward_in_another_thread(run):
    model = run.wrap(mlp())
    optimizer = sgd(model)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss = model(run.normal(4, 6, key=step)).square().mean()
        in_threads(lambda _, loss=loss: loss.backward(), 1)
        optimizer.step()
        yield tensors_of(model)


# ---- parts of models -----------------------------------------------------------------


def spectral_normalisation(run):
    """The buffers of the power iteration change in each of two forwards."""
    parts = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 40))
    model = run.wrap(nn.Sequential(parts, nn.Tanh(), nn.Linear(40, 2)))

    def loss(x):
        return model(x[0]).mean() - model(x[1]).square().mean()

    yield from trained(run, model, sgd(model), (2, 4, 6), loss)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(48, 4, batch_first=True, add_bias_kv=True)
        self.norm, self.never = nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x):
        out, weights = self.attend(x, x, x, need_weights=True)
        return {"out": self.norm(out), "weights": weights}


def attention_with_unused_parts(run):
    model = run.wrap(Attention(), find_unused_parameters=True)

    def loss(x):
        return model(x)["out"].square().mean()

    yield from trained(run, model, sgd(model), (2, 5, 48), loss)


def five_hundred_tiny_parameters(run):
    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.randn(i % 3 + 1) for i in range(500))

        def forward(self, x):
            return torch.cat(list(self.parts)).sin().sum() * x.mean()

    model = run.wrap(Tiny())
    yield from trained(run, model, sgd(model, foreach=True))


def scripted_modules(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(
            nn.Sequential(nn.Linear(6, 130), nn.BatchNorm1d(130), nn.Linear(130, 2))
        )
    model = run.wrap(scripted)
    yield from trained(run, model, sgd(model))


def buffers_that_are_slices(run):
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.register_buffer("mask", torch.ones(8, 8).tril()[:6, :6])
            self.register_buffer("seen", torch.zeros(8, 8)[::2, 1::2])

        def forward(self, x):
            self.seen += x.detach().sum()
            return nn.functional.linear(x, self.weight * self.mask, self.bias)

    model = run.wrap(Masked())
    yield from trained(run, model, sgd(model))
    yield [model.module.seen] if run.rank == 0 else []


# ---- hooks ---------------------------------------------------------------------------


def hooks_on_modules_and_tensors(run):
    seen = []
    model = run.wrap(mlp())
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    model.register_forward_hook(lambda m, args, out: out * 2)
    part = model.module[2]
    part.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    part.register_full_backward_hook(lambda m, gi, go: (gi[0] + 1,))
    part.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    for found in trained(run, model, sgd(model)):
        yield [*found, *seen]
        seen.clear()


ON_TORCH = {
    name: each
    for name, each in list(globals().items())
    if inspect.isgeneratorfunction(each) and each is not trained
}
