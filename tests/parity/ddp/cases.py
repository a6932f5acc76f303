"""Run many small tests on ranks, in a few processes.

    def test_this_is_so(ranks):
        twin = Twin(ranks, nn.Linear(3, 2))
        twin.step(lambda model: model(torch.ones(1, 3)).sum())

is a test on two ranks.  `@on_ranks(2, 4, cap=[0.01, 25])` makes it a test for each
number of ranks and for each `cap`, which becomes an argument.

    @as_torch(cap=[0.01, 25])
    def test_that_is_so(ranks, wrap, cap):
        model = wrap(nn.Linear(3, 2), bucket_cap_mb=cap)
        model(torch.ones(1, 3)).sum().backward()
        yield grads_of(model)

runs with torch's class and then with ours; both must yield the same bits.

Starting processes is slow.  So all selected tests of a file for N ranks run in one go,
in the same N processes.  Each test has a separate process group, so an error in one
does not affect the others.  If a rank fails, its peers wait for at most `PEER_SECONDS`.
If a file defines `environment()`, its ranks get the variables which that returns.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import os
import random
import sys
import traceback
import zlib
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline._compat import torch_core
from paceline._ddp import peers
from support.ranks import run_ranks, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

PINNED = (2, 13)  # the oldest torch whose class must run all programs
PEER_SECONDS = 10.0
BATCH_SECONDS = float(os.environ.get("BATCH_SECONDS", "480"))
SKIPPED = "skipped on every rank: "
# There forwards after the first of a step keep their buffers.
ON_HOSTS = "TEST_RANKS_PER_HOST" in os.environ

# Set by tests/gpu/check_rows.py, which runs cases on a GPU.
backend = None
on_torchs_device = contextlib.nullcontext  # a context for torch's class

_results = {}  # (module, n_ranks): {case: description of the failure, or None}


# ---- in the test --------------------------------------------------------------------


def on_ranks(*n_ranks, **axes):
    """Run a test for each number of ranks, by default 2, and each value of the axes."""

    def decorate(body):
        body.n_ranks, body.axes = n_ranks or (2,), axes
        return body

    return decorate


def on_gpus_too(*n_ranks, **axes):
    """Also run a test on GPUs, with some of its values of the axes."""

    def decorate(body):
        body.on_gpus = n_ranks or (2,), {**getattr(body, "axes", {}), **axes}
        return body

    return decorate


def as_torch(*n_ranks, **axes):
    """Run a program with torch's class and with ours; both must yield the same."""

    def decorate(program):
        @functools.wraps(program)
        def body(ranks, *point):
            compare_with_torch(ranks, program, *point)

        signature = inspect.signature(program)
        taken = [p for name, p in signature.parameters.items() if name != "wrap"]
        body.__signature__ = signature.replace(parameters=taken)
        return on_ranks(*n_ranks, **axes)(body)

    return decorate


def parametrize(metafunc):
    """Generate a function's tests, for conftest.py."""
    body = metafunc.function
    axes = getattr(body, "axes", {})
    rows = list(itertools.product(getattr(body, "n_ranks", (2,)), *axes.values()))
    ids = [
        "-".join([f"{n} ranks", *map("{}={}".format, axes, map(_name_of, point))])
        for n, *point in rows
    ]
    metafunc.parametrize(["ranks", *axes], rows, ids=ids)


def _name_of(value):
    """Return a name for a value that is the same in every process."""
    return getattr(value, "__name__", value)


def run_test(item):
    """Run a test, for conftest.py, with all of its file for the same rank count."""
    n, case = _case_of(item)
    key = item.module.__name__, n
    name = case[0], *map(str, case[1:])
    if name not in _results.get(key, {}):
        _results[key] = _run(item.session, item.module.__name__, n)
    words = _results[key][name]
    if words is not None and words.startswith(SKIPPED):
        pytest.skip(words.removeprefix(SKIPPED))
    if words is not None:
        pytest.fail(words, pytrace=False)


def _case_of(item):
    """Return a test's number of ranks, and its name with its values of the axes."""
    point = dict(item.callspec.params)
    return point.pop("ranks"), (item.originalname, *point.values())


def _run(session, module, n):
    """Run all selected cases of a file for n ranks; return the failures."""
    placed = [
        _case_of(item)
        for item in session.items
        if item.module.__name__ == module and "ranks" in item.fixturenames
    ]
    selected = [case for n_ranks, case in placed if n_ranks == n]
    environment = getattr(sys.modules[module], "environment", dict)
    outcomes = run_ranks(
        run_cases,
        n,
        module,
        selected,
        timeout=BATCH_SECONDS,
        rendezvous="tcp",  # a file store polls only every 10 ms
        group_timeout=BATCH_SECONDS,
        env={"PACELINE_TIMEOUT": str(PEER_SECONDS), **environment()},
    )
    if not all(outcome.is_ok for outcome in outcomes):
        words = [f"rank {o.rank}: {o.exitcode} {o.error}\n{o.output}" for o in outcomes]
        return {(c[0], *map(str, c[1:])): "\n".join(words) for c in selected}
    rows = zip(*values(outcomes), strict=True)
    return {
        (case[0], *map(str, case[1:])): _words_of(row)
        for case, row in zip(selected, rows, strict=True)
    }


def _words_of(row):
    if all(words is not None and words.startswith(SKIPPED) for words in row):
        return row[0]
    failed = [f"---- rank {rank}\n{words}" for rank, words in enumerate(row) if words]
    # Sort ranks that lost a peer after the rank that failed first.
    failed.sort(key=lambda words: "PeerError" in words or "PeerTimeoutError" in words)
    return "\n".join(failed) or None


# ---- on the ranks -------------------------------------------------------------------


def run_cases(rank, n_ranks, module, cases):
    bodies = importlib.import_module(module)
    store = dist.distributed_c10d._get_default_store()
    return [
        run_case(rank, n_ranks, store, number, getattr(bodies, name), point)
        for number, (name, *point) in enumerate(cases)
    ]


def run_case(rank, n_ranks, store, number, body, point):
    """Run a case; return a description of its failure, or None."""
    print(f"case {body.__name__} {point}", file=sys.stderr, flush=True)
    group = None
    try:
        group = dist.new_group(timeout=timedelta(seconds=PEER_SECONDS), backend=backend)
        torch.manual_seed(number)
        body(Ranks(rank, n_ranks, group), *point)
        words = None
    except pytest.skip.Exception as skip:
        words = f"{SKIPPED}{skip}"
    except BaseException:
        words = traceback.format_exc()
    torch.set_default_dtype(torch.float32)
    store.set(f"case/{number}/{rank}", "")
    ends = [f"case/{number}/{each}" for each in range(n_ranks)]
    with contextlib.suppress(RuntimeError):  # if a peer never arrives, continue
        store.wait(ends, timedelta(seconds=5 * PEER_SECONDS))
    # Its thread wakes up 100 times a second.  Before 2.8 torch may stand still here, as
    # torch_groups.end_all() says.
    if group is not None and torch_core.version() >= (2, 8):
        dist.destroy_process_group(group)
    return words


@functools.cache
def gloo_takes_complex():
    """Tell whether torch's DistributedDataParallel takes complex numbers here."""
    alone = dist.ProcessGroupGloo(
        dist.HashStore(), 0, 1, timedelta(seconds=PEER_SECONDS)
    )
    try:
        alone.broadcast([torch.zeros(1, dtype=torch.complex64)]).wait()
    except RuntimeError:
        return False
    return True


def skip_without_complex():
    """Skip the case if torch's DistributedDataParallel takes no complex numbers."""
    if not gloo_takes_complex():
        pytest.skip(f"Gloo of torch {torch.__version__} takes no complex numbers")


def has_argument(name):
    """Tell whether torch's DistributedDataParallel has an argument."""
    theirs = torch.nn.parallel.DistributedDataParallel
    return name in inspect.signature(theirs).parameters


def skip_without_argument(name):
    """Skip the case if torch's DistributedDataParallel has no such argument."""
    if not has_argument(name):
        pytest.skip(f"DistributedDataParallel of torch {torch.__version__}: no {name}")


def skip_with_bf16_hook(ranks):
    """Skip the case if torch's DistributedDataParallel takes the bf16 hook."""
    try:
        ranks.wrap_by_torch(nn.Linear(1, 1)).register_comm_hook(
            None, default_hooks.bf16_compress_hook
        )
    except TypeError:
        return
    pytest.skip(f"torch {torch.__version__}, built for a GPU, takes the bf16 hook")


class Ranks:
    """The ranks of a case, as one of them sees them."""

    def __init__(self, rank, n, group):
        self.rank, self.n, self.group = rank, n, group

    ours = paceline.DistributedDataParallel

    def wrap(self, module, **options):
        return paceline.DistributedDataParallel(
            module, process_group=self.group, **options
        )

    def wrap_by_torch(self, module, **options):
        return torch.nn.parallel.DistributedDataParallel(
            module, process_group=self.group, **options
        )

    def alone(self):
        """Return a group of only this rank; every rank must call this."""
        return [dist.new_group([rank]) for rank in range(self.n)][self.rank]

    def all(self, thing, by=None):
        """Gather `thing` of every rank, by rank; over the group `by` if given."""
        things = [None] * self.n
        dist.all_gather_object(things, thing, group=by or self.group)
        return things

    def assert_same(self, tensors, what):
        """Check that all ranks have the same bits."""
        for other in self.all([bits(t) for t in tensors]):
            assert other == [bits(t) for t in tensors], f"ranks differ in {what}"

    def generator(self, *key):
        """Return a generator that is seeded by the rank and the key."""
        seed = zlib.crc32(repr((self.rank, *key)).encode())
        return torch.Generator(torch.empty(0).device).manual_seed(seed)

    def integers(self, *shape, dtype=torch.float32, key=0):
        """Return this rank's small integers: sums of them are exact in any dtype."""
        drawn = torch.randint(-4, 5, shape, generator=self.generator(key, shape))
        return drawn.to(dtype)


def bits(tensor):
    """Return a tensor's dtype, shape and bytes for comparison; None stays None."""
    if tensor is None:
        return None
    data = tensor.detach().contiguous().cpu()
    if data.is_complex():
        data = torch.view_as_real(data)
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        data.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def grads_of(model):
    """Return copies of a model's gradients; None for a missing one."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(mine, theirs, what):
    """Check that bits, dtype and layout are equal, or that both are None."""
    if (mine is None) != (theirs is None):
        raise AssertionError(f"{what}: {mine} and {theirs}")
    if mine is not None and mine.is_sparse:
        for fact in ("layout", "shape"):
            assert getattr(mine, fact) == getattr(theirs, fact), f"{what}: {fact}"
        assert mine.is_coalesced() == theirs.is_coalesced(), what
        mine, theirs = mine.coalesce(), theirs.coalesce()
        assert mine.indices().tolist() == theirs.indices().tolist(), f"{what}: rows"
        mine, theirs = mine.values(), theirs.values()
    if mine is None or bits(mine + 0) == bits(theirs + 0):  # -0 and 0 are equal
        return
    assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype} and {theirs.dtype}"
    assert mine.shape == theirs.shape, f"{what}: {mine.shape} and {theirs.shape}"
    where = torch.nonzero(mine.cpu() != theirs.cpu())
    place = tuple(where[0].tolist()) if len(where) else "nan"
    raise AssertionError(
        f"{what}: {len(where)} of {mine.numel()} differ, the first at {place}: "
        f"{mine.flatten()[:8].tolist()}... and {theirs.flatten()[:8].tolist()}..."
    )


def step_of(model, *inputs):
    """Take a step; return its gradients."""
    model.zero_grad()
    model(*inputs).sum().backward()
    return grads_of(model)


def assert_same_grads(mine, theirs, what="now"):
    """Check that two models have gradients of the same bits."""
    rows = zip(mine.named_parameters(), theirs.parameters(), strict=True)
    for (name, p), other in rows:
        assert_equal(p.grad, other.grad, f"{what}: the gradient of {name}")


def compare_with_torch(ranks, program, *point):
    """Run a program with both classes; check that they yield the same.

    Skips the case if the class of an older torch raises.
    """

    def run(wrap):
        torch.manual_seed(1)
        return [_kept(found) for found in program(ranks, wrap, *point)]

    try:
        with on_torchs_device():
            expected = run(ranks.wrap_by_torch)
    except Exception as error:
        if torch_core.version() >= PINNED:
            raise
        pytest.skip(f"the class of torch {torch.__version__} raises {error!r:.80}")
    for i, (theirs, mine) in enumerate(zip(expected, run(ranks.wrap), strict=True)):
        _assert_alike(mine, theirs, f"yielded {i}")


def _kept(found):
    if isinstance(found, torch.Tensor):
        return found.detach().clone()
    return [_kept(each) for each in found] if isinstance(found, list) else found


def _assert_alike(mine, theirs, what):
    if isinstance(mine, list):
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            _assert_alike(*pair, f"{what}, {i}")
    elif isinstance(mine, torch.Tensor) or mine is None:
        assert_equal(mine, theirs, what)
    else:
        assert mine == theirs, f"{what}: {mine} and {theirs}"


def drawn_seeds(ranks, n):
    """Return `n` seeds, the same on every rank; FUZZ_SEED=12 begins with seed 12."""
    drawn = int(os.environ.get("FUZZ_SEED", random.randrange(1 << 30)))
    first = ranks.all(drawn)[0]
    print(f"FUZZ_SEED={first}", flush=True)
    return range(first, first + n)


def run_drawn(ranks, n, run):
    """Run a program for each of `n` drawn seeds; an error names its seed."""
    for seed in drawn_seeds(ranks, n):
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={seed}") from error


def mean_over(rows):
    """Return the mean over ranks, summed in rank order; None counts as zeros."""
    there = [row for row in rows if row is not None]
    if not there:
        return None
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    total = torch.zeros_like(there[0], dtype=wide.get(there[0].dtype, there[0].dtype))
    for row in there:
        total = total + row
    return (total / len(rows)).to(there[0].dtype)


def integer_weights(module, low=-2, high=3):
    """Set all parameters to small integers, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            real = torch.view_as_real(p) if p.is_complex() else p
            options = {"generator": generator, "device": "cpu"}
            drawn = torch.randint(low, high, real.shape, **options)
            real.copy_(drawn)
    return module


class Twin:
    """A wrapped model and a plain one that takes the same steps, averaged by hand."""

    def __init__(self, ranks, module, **options):
        self.ranks = ranks
        self.plain = module
        self.ours = ranks.wrap(copy.deepcopy(module), **options)

    def zero(self, set_to_none=True):
        self.plain.zero_grad(set_to_none=set_to_none)
        self.ours.zero_grad(set_to_none=set_to_none)

    def local(self, loss):
        """Run backward on both without averaging (on ours inside no_sync)."""
        loss(self.plain).backward()
        with self.ours.no_sync():
            loss(self.ours).backward()

    def step(self, loss, check=True, **options):
        """Run backward on both, average the plain model; check that they agree."""
        loss(self.plain).backward(**options)
        loss(self.ours).backward(**options)
        self.average()
        if check:
            self.check()

    def average(self):
        grads = {name: p.grad for name, p in self.plain.named_parameters()}
        rows = self.ranks.all(grads)
        for name, p in self.plain.named_parameters():
            mean = mean_over([row[name] for row in rows])
            if mean is not None:
                p.grad = mean

    def check(self):
        theirs = dict(self.plain.named_parameters())
        for name, p in self.ours.module.named_parameters():
            assert_equal(p.grad, theirs[name].grad, f"the gradient of {name}")


# ---- parts of a forward, of subclasses of the wrapper -------------------------------


def doubles(self, *inputs, **kwargs):
    return 2 * super(type(self), self)._run_ddp_forward(*inputs, **kwargs)


def adds_to_inputs(self, *inputs):
    (x, *more), kwargs = super(type(self), self)._pre_forward(*inputs)
    return (x + 1, *more), kwargs


def takes_inputs_as_they_are(self, *inputs, **kwargs):
    return inputs, kwargs


def triples(self, output):
    return 3 * super(type(self), self)._post_forward(output)


PARTS = {
    "run": {"_run_ddp_forward": doubles},  # as in mmcv's wrapper
    "before": {"_pre_forward": adds_to_inputs},
    "instead": {"_pre_forward": takes_inputs_as_they_are},
    "after": {"_post_forward": triples},
}


# ---- models ------------------------------------------------------------------------


class Branches(nn.Module):
    """Uses its second layer only if the caller says so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both=True):
        y = self.first(x)
        return self.second(y) if both else y


class Terms(nn.Module):
    """Sums its parameters times factors: a factor is the gradient, None leaves out."""

    def __init__(self, shapes, dtypes=(torch.float32,)):
        super().__init__()
        self.terms = nn.ParameterList(
            torch.zeros(shape, dtype=dtypes[i % len(dtypes)])
            for i, shape in enumerate(shapes)
        )

    def forward(self, factors):
        total = 0
        for p, f in zip(self.parameters(), factors, strict=True):
            if f is not None:
                term = (p * f).sum()
                term = term.real + 3 * term.imag if p.is_complex() else term
                total = total + term.double()
        return total


class Counting(nn.Module):
    """Has a buffer that identifies its rank and counts its writes."""

    def __init__(self, rank):
        super().__init__()
        self.linear = integer_weights(nn.Linear(4, 2))
        self.register_buffer("mark", torch.tensor([float(rank), 0.0]))
        self.rank, self.taken = rank, None

    def forward(self, x):
        self.taken = self.mark.clone()
        if self.training:
            self.mark.copy_(torch.tensor([float(self.rank), self.mark[1].item() + 1]))
        return self.linear(x).sum()


def net(*sizes):
    """Return a small network; the gradients of its first layers become views."""
    sizes = sizes or (6, 150, 70, 2)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return integer_weights(nn.Sequential(*layers[:-1]))


def train(twin, ranks, steps=3, loss=None, size=6, **options):
    """Train both models of a twin on each rank's own data; check each step."""
    loss = loss or (lambda out: out.sum())
    for step in range(steps):
        twin.zero()
        x = ranks.integers(3, size, key=step)
        twin.step(lambda model, x=x: loss(model(x)), **options)


class apart:
    """Within this context, each rank appears to run on a separate host."""

    def __enter__(self):
        self.before = peers.Host.shares_memory_with
        peers.Host.shares_memory_with = lambda host, other: host.pid == other.pid

    def __exit__(self, *error):
        peers.Host.shares_memory_with = self.before


def factors(ranks, model, key, used=None):
    """Return this rank's integers for used parameters, None for the others."""
    return [
        ranks.integers(*p.shape, dtype=p.dtype, key=(key, i))
        if used is None or i in used
        else None
        for i, p in enumerate(model.parameters())
    ]
