"""A training that is saved and resumed equals an uninterrupted one bit for bit."""

import os
import random

import numpy as np
import paceline
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

WRAPS = {
    "bare": lambda model: model,
    "ranks": paceline.DistributedDataParallel,
    "torch's": nn.DataParallel,
}


def make(wrap="bare", seed=0, p=0.5):
    """Return the objects of a training, by name."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20)
    return {"model": WRAPS[wrap](model), "optimizer": optimizer, "scheduler": scheduler}


def train(training, n_steps):
    for _ in range(n_steps):
        noise = np.random.randn(6, 4) + random.random() + random.gauss(0, 1)
        training["optimizer"].zero_grad()
        output = training["model"](torch.tensor(noise, dtype=torch.float32))
        output.square().mean().backward()
        training["optimizer"].step()
        training["scheduler"].step()


def seed_all(seed):
    for set_seed in (torch.manual_seed, np.random.seed, random.seed):
        set_seed(seed)


def result_of(training):
    states = {name: part.state_dict() for name, part in training.items()}
    text = str({k.removeprefix("module."): v for k, v in states["model"].items()})
    return text, str(states["optimizer"]["state"]), str(states["scheduler"])


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "training.pt")


@pytest.mark.parametrize("prefix", ["keep", "strip"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_training_goes_on_to_the_bit(alone, path, prefix, wrap):
    seed_all(1)
    unbroken = make()
    train(unbroken, 8)
    seed_all(1)
    first = make(wrap)
    train(first, 3)
    paceline.save({**first, "epoch": 3}, path, prefix=prefix, rng=True)
    keys = torch.load(path)["model"]
    is_kept = wrap != "bare" and prefix == "keep"
    assert all(key.startswith("module.") == is_kept for key in keys)
    for wrap_again in WRAPS:
        seed_all(3)
        resumed = make(wrap_again, seed=2)
        assert paceline.load(path, rng=True, **resumed) == {"epoch": 3}
        train(resumed, 5)
        assert result_of(resumed) == result_of(unbroken)


def train_in_epochs(training, path, stop_at=None):
    """Train for two epochs, from the file if there is one; stop after a step."""
    data = torch.randn(13, 4, generator=torch.Generator().manual_seed(4))
    sampler = paceline.data.BatchSampler(data, 2)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=training.pop("w"))
    parts = {**training, "sampler": sampler}
    step = 0
    if os.path.exists(path):
        step = paceline.load(path, rng=True, **parts)["step"]
    for _ in range(sampler.epoch, 2):
        for x in loader:
            training["optimizer"].zero_grad()
            training["model"](x).square().mean().backward()
            training["optimizer"].step()
            step += 1
            if step == stop_at:
                paceline.save({**parts, "step": step}, path, rng=True)
                return None
    return result_of(training)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_training_goes_on_in_the_middle_of_an_epoch_to_the_bit(path, n_workers):
    def begin():
        seed_all(1)
        return {**make(), "w": n_workers}

    unbroken = train_in_epochs(begin(), "")
    for stop_at in (3, 7, 9):  # an epoch has 7 steps
        assert train_in_epochs(begin(), path, stop_at) is None
        seed_all(stop_at)
        resumed = train_in_epochs({**make(seed=2), "w": n_workers}, path)
        assert resumed == unbroken, stop_at
        os.remove(path)


# ---- ranks --------------------------------------------------------------------------


def break_off_and_resume(path):
    """Return this rank's result without and with an interruption."""
    results = []
    for is_broken in (False, True):
        seed_all(dist.get_rank())
        training = make("ranks")
        seed_all(dist.get_rank())
        train(training, 3)
        if is_broken:
            paceline.save({**training, "step": 3}, path, rng=True)
            dist.barrier()
            training = make("ranks", seed=7)
            seed_all(7)
            assert paceline.load(path, rng=True, **training) == {"step": 3}
        train(training, 3)
        results.append(result_of(training))
    return results


def test_each_rank_goes_on_with_its_own_random_numbers(path):
    for unbroken, resumed in paceline.launch(break_off_and_resume, 2, path):
        assert resumed == unbroken
    states = torch.load(path)["rng"]
    assert states[0]["python"] != states[1]["python"]


def begin_as_rank(path):
    """Take the first steps, on the same rows as the other rank."""
    seed_all(5)
    training = make("ranks")
    seed_all(5)
    train(training, 2)
    paceline.save({**training, "step": 2}, path, rng=True)


def finish_as_rank(path):
    """Take the last steps; rank 1 has no state in the file and copies rank 0's."""
    training = make("ranks")
    paceline.load(path, rng=True, **training)
    states = [(torch.get_rng_state(), np.random.get_state(), random.getstate())]
    dist.broadcast_object_list(states)
    setters = (torch.set_rng_state, np.random.set_state, random.setstate)
    for set_state, state in zip(setters, states[0], strict=True):
        set_state(state)
    train(training, 2)
    return result_of(training)


def test_ranks_and_one_process_take_over_from_each_other(path):
    """Both ranks use the rows of the single process: the mean is its gradient."""
    seed_all(5)
    unbroken = make()
    seed_all(5)
    train(unbroken, 6)
    paceline.launch(begin_as_rank, 2, path)
    resumed = make(seed=9)
    with pytest.warns(UserWarning, match=r"states of 2 rank\(s\), and 1 load it"):
        assert paceline.load(path, rng=True, **resumed) == {"step": 2}
    train(resumed, 2)
    paceline.save({**resumed, "step": 4}, path, rng=True)
    assert paceline.launch(finish_as_rank, 2, path) == [result_of(unbroken)] * 2


def test_the_gpus_that_are_there_get_their_states(path, monkeypatch):
    states = [torch.full((16,), 4 * n, dtype=torch.uint8) for n in range(3)]
    put = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, i: put.update({i: s}))
    paceline.save({}, path, rng=True)
    assert paceline.load(path, rng=True) == {}
    assert [put[i].tolist() for i in put] == [s.tolist() for s in states[:2]]


GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.fixture
def numpys_generator():
    before = np.random.get_bit_generator()
    yield np.random.set_bit_generator
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_of_numpy_goes_on(path, numpys_generator, name):
    numpys_generator(getattr(np.random, name)(5))
    random.gauss(0, 1)
    np.random.randn(3)  # keeps a second value for the next call
    paceline.save({}, path, rng=True)
    unbroken = np.random.randn(9).tolist(), random.gauss(0, 1), random.random()
    seed_all(3)
    paceline.load(path, rng=True)
    resumed = np.random.randn(9).tolist(), random.gauss(0, 1), random.random()
    assert resumed == unbroken


def words_at(*places):
    """Return torch's state with other 32-bit numbers at some places."""
    state = torch.get_rng_state().view(torch.int32).clone()
    for place, value in places:
        state[place] = value
    return state.view(torch.uint8)


LEFT, SEEDED, NEXT = 2, 3, 4
NUMBERS = list(range(624))
PYTHONS = (3, (*NUMBERS, 624), None)
# A place in a rank's states, and wrong values there.
WRONG_STATES = {
    (): [None, 5, "text", [], torch.zeros(3)],
    ("torch",): [
        *(None, 7, [1, 2], torch.zeros(5056), torch.zeros(5056, dtype=torch.uint8)),
        *(torch.get_rng_state()[:-1], torch.get_rng_state().repeat(2)),
        *(words_at((LEFT, 624), (NEXT, 624)), words_at((LEFT, 0), (NEXT, 625))),
        *(words_at((LEFT, -1)), words_at((SEEDED, 0)), words_at((NEXT + 1, 1))),
    ],
    ("cuda",): [
        *(None, 5, torch.zeros(16, dtype=torch.uint8), [None], [[0] * 16]),
        *([torch.zeros(16)], [torch.zeros(15, dtype=torch.uint8)]),
        [torch.full((16,), 1, dtype=torch.uint8)],
    ],
    ("numpy",): [None, (), "MT19937", {}, ("MT19937", NUMBERS, 624, 0, 0.0)],
    ("numpy", "bit_generator"): [None, "PCG64", "mt19937", 5],
    ("numpy", "state"): [None, NUMBERS, {}, {"key": NUMBERS}],
    ("numpy", "state", "pos"): [*(625, 10**6, 2**31 - 1, 2**40, -1, -5), None, 1.5],
    ("numpy", "state", "key"): [
        *(None, 5, [], NUMBERS[1:], [*NUMBERS, 1], [*NUMBERS[1:], 2**32]),
        *([*NUMBERS[1:], -1], [*NUMBERS[1:], "1"], [*NUMBERS[1:], 1.5], "1" * 624),
        *(torch.zeros(624), dict(enumerate(NUMBERS)), [NUMBERS] * 624),
    ],
    ("numpy", "has_gauss"): [2, -1, 2**40, None, "yes"],
    ("numpy", "gauss"): [None, "1", [1.0], float("nan")],
    ("python",): [
        *(None, 5, (), (3,), [*PYTHONS], (2, *PYTHONS[1:]), ("3", *PYTHONS[1:])),
        *((3, tuple(NUMBERS), None), (3, [*NUMBERS, 624], None), (3, None, None)),
        *((3, (*NUMBERS, 625), None), (3, (*NUMBERS, -1), None)),
        *((3, (*NUMBERS, 2**40), None), (3, (*NUMBERS[1:], 2**32, 624), None)),
        *((3, (*NUMBERS[1:], -1, 624), None), (3, (*NUMBERS[1:], 1.5, 624), None)),
        *((*PYTHONS[:2], "1"), (*PYTHONS[:2], 1), (*PYTHONS[:2], [1.0])),
    ],
}


def replaced(states, place, value):
    if not place:
        return value
    return {**states, place[0]: replaced(states[place[0]], place[1:], value)}


@pytest.mark.parametrize("place", WRONG_STATES, ids=".".join)
def test_a_wrong_random_state_is_refused_before_anything_is_set(path, place):
    """It is one rank's of two: the other rank refuses the file too."""
    paceline.save({"model": nn.Linear(2, 1)}, path, rng=True)
    saved, model = torch.load(path), nn.Linear(2, 1)
    (right,) = saved["rng"]
    before = (str(model.state_dict()), str(states_here()))
    for wrong in WRONG_STATES[place]:
        state = replaced(right, place, wrong)
        torch.save({**saved, "rng": [right, state]}, path)
        named = f"'{place[0]}'" if place else "'torch'"
        with pytest.raises(ValueError, match=rf"training\.pt: rng\[1\]\[{named}\] is "):
            paceline.load(path, rng=True, model=model)
        assert (str(model.state_dict()), str(states_here())) == before
    torch.save({**saved, "rng": [right, right]}, path)
    with pytest.warns(UserWarning, match="states of 2"):
        paceline.load(path, rng=True, model=model)


def states_here():
    of_numpy = np.random.get_state()
    return [torch.get_rng_state().tolist(), of_numpy[1].tolist(), of_numpy[2:]] + [
        random.getstate()
    ]


@pytest.mark.parametrize("name", GENERATORS[1:])
def test_wrong_states_of_numpys_other_generators_are_refused(
    path, numpys_generator, name
):
    numpys_generator(getattr(np.random, name)(5))
    paceline.save({}, path, rng=True)
    (right,) = torch.load(path)["rng"]
    wrongs = [("has_uint32", 2), ("uinteger", 2**32), ("uinteger", -1)]
    wrongs += [("buffer_pos", 5), ("buffer_pos", -1), ("buffer", [1, 2, 3])]
    wrongs += [("state", {}), ("bit_generator", "MT19937")]
    for field, value in wrongs:
        if field in right["numpy"]:
            state = replaced(right, ("numpy", field), value)
            torch.save({"rng": [state]}, path)
            with pytest.raises(ValueError, match=r"rng\[0\]\['numpy'\] is "):
                paceline.load(path, rng=True)


# ---- objects that do not fit the file -----------------------------------------------


def test_lists_of_objects_are_put_back_by_their_places(path):
    saved = [nn.Linear(2, 1), (make()["optimizer"], nn.Linear(1, 1))]
    paceline.save(saved[1][0], path)
    assert sorted(paceline.load(path)) == ["param_groups", "state"]
    paceline.save({"parts": saved, "epoch": 1}, path)
    parts = [nn.Linear(2, 1), (make()["optimizer"], nn.Linear(1, 1))]
    assert paceline.load(path, parts=parts) == {"epoch": 1}
    assert torch.equal(parts[0].weight, saved[0].weight)
    assert torch.equal(parts[1][1].weight, saved[1][1].weight)


OPTIMIZER = torch.optim.SGD([torch.zeros(1)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: paceline.load(p, scaler=1), r"no 'scaler': .*'epoch'\]"),
        (lambda p: paceline.load(p, rng=True), "no 'rng'"),
        (lambda p: paceline.load(p, epoch=3), "epoch=int does not fit"),
        (lambda p: paceline.load(p, model=[]), "model=list does not fit"),
        (lambda p: paceline.load(p, epoch=[nn.Linear(2, 1)]), "epoch=list does not"),
        (lambda p: paceline.load(p, epoch=OPTIMIZER), "epoch=SGD does not fit"),
        (lambda p: paceline.load(p, model=OPTIMIZER), "model=SGD does not fit"),
        (lambda p: paceline.load(p, nn.Linear(2, 1), epoch=3), "name the model"),
        (lambda p: paceline.load(p, nn.Linear(2, 1)), r"\(path, model=model"),
        (lambda p: paceline.save([], p, rng=True), "needs a dict"),
        (lambda p: paceline.save({"rng": 1}, p, rng=True), "the key 'rng'"),
    ],
)
def test_what_does_not_fit_the_file_is_one_error(path, call, words):
    paceline.save({"model": nn.Linear(2, 1), "epoch": 3}, path)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        call(path)
    assert paceline.load(path)["epoch"] == 3


ARRANGEMENTS = {
    "alone": lambda training, other: {**training, "optimizer": other},
    "behind one that fits": lambda training, other: {**training, "other": other},
    "in a list": lambda training, other: {"parts": [*training.values(), other]},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_an_optimizer_that_does_not_fit_leaves_all_as_it_was(path, arrangement):
    arrange = ARRANGEMENTS[arrangement]
    saved, training = make(seed=1), make(seed=2)
    train(saved, 1)
    paceline.save(arrange(saved, saved["optimizer"]), path)
    before = result_of(training)
    with pytest.raises(ValueError, match="parameter group"):
        paceline.load(path, **arrange(training, OPTIMIZER))
    assert result_of(training) == before
