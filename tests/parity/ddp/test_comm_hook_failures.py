"""If a communication hook fails, every rank raises one clear error, and none hangs.

test_comm_hooks.py tests hooks that succeed.
"""

import os
import signal
import threading

import paceline
import pytest
import torch
import torch.distributed as dist
from cases import as_torch, integer_weights, net, on_ranks
from hook_cases import reduced
from support.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def doubled(state, bucket):
    return done(bucket.buffer() * 2)


def backward(ranks, model, key=0):
    model(ranks.integers(2, 6, key=key)).sum().backward()


def outcome_of(ranks, model, key=0):
    """Run backward; return the error's (type, message), or None."""
    try:
        backward(ranks, model, key)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# ---- hooks that cannot be registered ------------------------------------------------


def bad_bucket(state, bucket: int):
    return done(bucket)


def bad_return(state, bucket: dist.GradBucket) -> int:
    return 1


REFUSED = {
    "no callable": (1, TypeError),
    "bucket is annotated as something else": (bad_bucket, ValueError),
    "what it returns is annotated as something else": (bad_return, ValueError),
}


@as_torch(what=[*REFUSED])
def test_what_is_no_hook_is_refused_in_the_words_of_torch(ranks, wrap, what):
    hook, kind = REFUSED[what]
    model = wrap(net())
    with pytest.raises(kind) as caught:
        model.register_comm_hook(None, hook)
    yield str(caught.value)
    model.register_comm_hook(None, doubled)  # nothing was registered
    backward(ranks, model)


def register(model, kind):
    if kind == "python":
        model.register_comm_hook(None, doubled)
    else:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


@on_ranks(
    kinds=[("python", "ALLREDUCE"), ("FP16_COMPRESS", "python"), ("ALLREDUCE",) * 2]
)
def test_a_second_hook_of_either_kind_is_refused_in_the_words_of_torch(ranks, kinds):
    (first, second), words = kinds, []
    for wrap in (ranks.wrap, ranks.wrap_by_torch):
        model = wrap(net())
        register(model, first)
        with pytest.raises(RuntimeError, match="can only be called once") as caught:
            register(model, second)
        words.append(str(caught.value).splitlines()[0])
    assert words[0].startswith(words[1]), words


def test_what_is_no_builtin_hook_is_a_type_error(ranks):
    model = ranks.wrap(net())
    with pytest.raises(TypeError, match="'FP16_COMPRESS'"):
        model._register_builtin_comm_hook("FP16_COMPRESS")


def test_a_hook_cannot_come_while_a_step_is_under_way(ranks):
    model = ranks.wrap(net())
    caught = []

    def register_late(grad):
        try:
            model.register_comm_hook(None, doubled)
        except RuntimeError as error:
            caught.append(str(error))

    next(iter(model.parameters())).register_hook(register_late)
    backward(ranks, model)
    assert len(caught) == 1
    assert "during a step" in caught[0]
    backward(ranks, model, 1)
    ranks.assert_same([p.grad for p in model.parameters()], "gradients")


def test_a_hook_on_one_rank_alone_is_an_error_on_both(ranks):
    model = ranks.wrap(net())
    backward(ranks, model)
    if ranks.rank == 0:
        model.register_comm_hook(ranks.group, doubled)
    rows = ranks.all(outcome_of(ranks, model, 1))
    assert all(row is not None for row in rows), rows
    assert {row[0] for row in rows} <= {"MismatchError", "PeerError"}
    assert "MismatchError" in {row[0] for row in rows}


# ---- what a hook returns ------------------------------------------------------------


def raising_future(state, bucket):
    return done(1).then(lambda fut: {}["missing"])


GIVEN_BACK = {
    "None": (lambda state, bucket: None, "must return a torch.futures.Future"),
    "a tensor": (
        lambda state, bucket: bucket.buffer(),
        "must return a torch.futures.Future object, but got torch.Tensor.",
    ),
    "too many elements": (
        lambda state, bucket: done(torch.zeros(3)),
        r"shape (3,) for a bucket of",
    ),
    "no elements": (lambda state, bucket: done(torch.zeros(0)), "shape (0,)"),
    "a future of None": (lambda state, bucket: done(None), "but holds NoneType"),
    "a future of two": (
        lambda state, bucket: done([bucket.buffer(), bucket.buffer()]),
        "but holds list",
    ),
    "a future that raises": (raising_future, "missing"),
}


@on_ranks(what=[*GIVEN_BACK])
def test_what_a_hook_may_not_give_back_is_an_error_out_of_backward(ranks, what):
    hook, words = GIVEN_BACK[what]
    model = ranks.wrap(net())
    model.register_comm_hook(None, hook)
    backward_failed = outcome_of(ranks, model)
    assert backward_failed is not None
    kind, said = backward_failed
    if kind != "PeerError":  # the error of the rank that raises first
        assert kind in ("RuntimeError", "KeyError")
        assert words in said
    assert "PeerError" not in {
        row and row[0] for row in ranks.all(backward_failed)
    } or (words in said)
    if what == "a tensor":  # torch crashes over None
        theirs = ranks.wrap_by_torch(net())
        theirs.register_comm_hook(None, hook)
        assert words.removesuffix(".") in outcome_of(ranks, theirs)[1]


@on_ranks(peer=["does the same", "raises"])
def test_a_hook_without_a_future_is_refused_on_its_own_rank(ranks, peer):
    """Also if the other rank has failed before this rank's backward is over."""
    store = dist.distributed_c10d._get_default_store()
    called, failed = f"called: {peer}", f"failed: {peer}"

    def hook(state, bucket):
        if not state:  # in the first step, all hooks run at the end of backward
            return doubled(state, bucket)
        if ranks.rank == 1:
            store.set(called, "1")
            return None
        store.wait([called])
        return {}["mine"] if peer == "raises" else None

    model = ranks.wrap(net(6, 6, 6), bucket_cap_mb=1e-4)
    is_second = []
    model.register_comm_hook(is_second, hook)
    backward(ranks, model)
    is_second.append(True)
    if ranks.rank == 1 and peer == "raises":
        model.module[0].weight.register_hook(lambda _: store.wait([failed]))
    kind, words = outcome_of(ranks, model)
    store.set(failed, "1")
    if ranks.rank == 0 and peer == "raises":
        assert kind == "KeyError"
    else:
        assert words.startswith("DDP communication hook's callback must return")


def test_a_future_may_hold_a_list_of_one_or_another_shape_or_dtype(ranks):
    def hook(state, bucket):
        values = [
            [bucket.buffer() * 2],
            (bucket.buffer() * 2).reshape(1, -1),
            (bucket.buffer() * 2).double(),
            torch.stack([bucket.buffer() * 2, bucket.buffer()], 1)[:, 0],
        ]
        return done(values[state["step"]])

    state = {"step": 0}
    module = net()
    model = ranks.wrap(module)
    model.register_comm_hook(state, hook)
    for step in range(4):
        state["step"] = step
        model.zero_grad()
        backward(ranks, model)
        kept = [p.grad.clone() for p in module.parameters()]
        model.zero_grad()
        with model.no_sync():
            backward(ranks, model)
        for p, twice in zip(module.parameters(), kept, strict=True):
            assert torch.equal(twice, 2 * p.grad)


# ---- what a hook raises -------------------------------------------------------------


WHERE = ["before its collective", "after its collective", "in its future", "at once"]


@on_ranks(3, where=WHERE, first=[True, False])
def test_an_error_of_one_ranks_hook_is_told_to_its_peers(ranks, where, first):
    """In the first step, which runs all hooks at its end, and in a later one."""
    is_odd = ranks.rank == 1
    armed = [first]

    def hook(state, bucket):
        if not (is_odd and armed[0]):
            return reduced(state, bucket)
        if where == "at once":
            return done(None)
        if where == "before its collective":
            raise KeyError("mine")
        future = reduced(state, bucket)
        if where == "after its collective":
            future.wait()
            raise KeyError("mine")
        return future.then(lambda fut: {}["mine"])

    model = ranks.wrap(net(6, 150, 70, 2), bucket_cap_mb=0.01)
    model.register_comm_hook(ranks.group, hook)
    if not first:
        backward(ranks, model)
        backward(ranks, model, 1)
        armed[0] = True
    # Over the default group: the case's own group has collectives in flight.
    rows = ranks.all(outcome_of(ranks, model, 2), by=dist.group.WORLD)
    for rank, row in enumerate(rows):
        assert row is not None, rows
        if rank != 1:
            assert row[0] == "PeerError", rows
            assert "rank 1" in row[1]
            assert "NoneType" in row[1] if where == "at once" else "mine" in row[1]
    expected = "RuntimeError" if where in ("at once", "in its future") else "KeyError"
    assert rows[1][0] in (expected, "KeyError")


def test_an_error_between_two_collectives_of_one_rank_leaves_no_peer_waiting(ranks):
    """The peer's future waits for a collective that will never be issued."""

    def hook(state, bucket):
        def second(future):
            if ranks.rank == 1:
                raise KeyError("mine")
            total = future.value()[0]
            state.allreduce([total]).wait()
            return total

        future = state.allreduce([bucket.buffer()]).get_future()
        answer = torch.futures.Future()

        def work():
            future.wait()
            try:
                answer.set_result(second(future))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        return answer

    model = ranks.wrap(net())
    model.register_comm_hook(ranks.group, hook)
    rows = ranks.all(outcome_of(ranks, model), by=dist.group.WORLD)
    assert rows[0][0] == "PeerError", rows
    assert "mine" in rows[0][1]
    assert "mine" in rows[1][1]


def test_a_step_that_one_rank_fails_is_a_step_of_nobody(ranks):
    """Also if the other rank's hook had finished by then."""
    state = {"fails": False}

    def hook(state, bucket):
        if state["fails"] and ranks.rank == 1:
            return done(bucket.buffer()).then(lambda fut: {}["mine"])
        return doubled(state, bucket)

    model = ranks.wrap(net())
    model.register_comm_hook(state, hook)
    for round in range(3):
        state["fails"] = True
        row = outcome_of(ranks, model, round)
        assert row is not None
        assert ("PeerError" in row[0]) == (ranks.rank == 0)
        state["fails"] = False
        model.zero_grad()
        assert outcome_of(ranks, model, round) is None
        assert outcome_of(ranks, model, round) is None


def test_after_a_collective_that_some_ranks_began_no_step_pairs_with_it(ranks):
    """Gloo would pair the next step's collective with the one that a rank left out."""
    state = {"fails": True}

    def hook(given, bucket):
        if given["fails"] and ranks.rank == 1:
            dist.barrier()
            raise KeyError("mine")
        future = reduced(ranks.group, bucket)
        if given["fails"]:
            dist.barrier()  # rank 1 fails after this rank has begun its collective
        return future

    model = ranks.wrap(net())
    model.register_comm_hook(state, hook)
    first = ranks.all(outcome_of(ranks, model), by=dist.group.WORLD)
    state["fails"] = False
    second = ranks.all(outcome_of(ranks, model), by=dist.group.WORLD)
    assert [row[0] for row in first] == ["PeerError", "KeyError"]
    assert second[0][0] == "RuntimeError", second
    assert "make a new process group for the hook" in second[0][1]
    assert second[1][0] == "PeerError", second


def die_in_the_hook(rank, n_ranks, when):
    def hook(state, bucket):
        if rank == 1:
            die = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL))
            die.start() if when == "after it" else die.function(*die.args)
        if when == "in a collective":
            return reduced(dist.group.WORLD, bucket)
        return torch.futures.Future()  # only rank 1 would have completed it

    model = paceline.DistributedDataParallel(integer_weights(nn.Linear(6, 2)))
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize("when", ["in a collective", "in a hook", "after it"])
def test_a_rank_that_dies_in_its_hook_leaves_no_peer_waiting(when):
    outcomes = run_ranks(die_in_the_hook, 3, when, timeout=30)
    assert outcomes[1].exitcode == -9
    for rank in (0, 2):
        error = outcomes[rank].error
        assert error is not None
        if when != "in a collective" or error.kind != "RuntimeError":  # not Gloo's
            assert error.kind == "PeerError"
            assert "rank 1" in error.message


def interrupt_a_hook(rank, n_ranks):
    def hook(state, bucket):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return torch.futures.Future()

    model = paceline.DistributedDataParallel(integer_weights(nn.Linear(6, 2)))
    model.register_comm_hook(None, hook)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 6)).sum().backward()
    return "interrupted"


def test_a_wait_for_a_hook_can_be_interrupted():
    (outcome,) = run_ranks(interrupt_a_hook, 1, timeout=30)
    assert outcome.value == "interrupted", outcome


# ---- gradients that come late -------------------------------------------------------


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.n_uses = 1
        integer_weights(self)

    def forward(self, x):
        for _ in range(self.n_uses):
            x = checkpoint(self.body, x, use_reentrant=True)
        return self.head(x)


def test_a_gradient_behind_its_bucket_is_an_error_on_every_rank(ranks):
    model = ranks.wrap(Shared(), bucket_cap_mb=0.0001)
    model.register_comm_hook(ranks.group, reduced)

    def step(key):
        x = ranks.integers(2, 6, key=key).requires_grad_()
        model(x).sum().backward()

    step(0)
    step(1)
    if ranks.rank == 1:
        model.module.n_uses = 2
    try:
        step(2)
    except RuntimeError as error:
        words = str(error)
    else:
        words = ""
    assert words.startswith("Expected to mark a variable ready only once."), words
    assert "communication hook" in words


def test_a_gradient_that_comes_twice_in_every_step_is_not_late(ranks):
    module = Shared()
    module.n_uses = 2
    model = ranks.wrap(module)
    model.register_comm_hook(ranks.group, reduced)
    for step in range(3):
        model.zero_grad()
        x = ranks.integers(2, 6, key=step).requires_grad_()
        model(x).sum().backward()
        ranks.assert_same([p.grad for p in model.parameters()], "gradients")
        assert model.module.body.weight.grad is not None
