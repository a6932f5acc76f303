"""`paceline.data.BatchSampler`: each row once an epoch, on any ranks."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import random

import paceline
import pytest
import torch
from paceline.data import BatchSampler
from support.waiting import once_collected
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

DRAWN = [range(60), pytest.param(range(60, 460), marks=pytest.mark.long)]
WORKERS = [(0, False), (2, False), (2, True)]


@pytest.fixture(scope="module", autouse=True)
def workers_end():
    """Free loaders that failed, with their workers, which pytest's exit would leave."""
    before = set(multiprocessing.active_children())
    yield
    assert once_collected(lambda: set(multiprocessing.active_children()) <= before)


def orders(n_rows, shuffle, seed):
    """Yield the rows of each epoch, in the order of torch's sampler."""
    torchs = DistributedSampler(range(n_rows), 1, 0, shuffle=shuffle, seed=seed)
    for epoch in itertools.count():
        torchs.set_epoch(epoch)
        yield from torchs


@pytest.mark.parametrize("seeds", DRAWN)
def test_each_row_comes_once_an_epoch_whatever_ranks_go_on_from_wherever(seeds):
    for seed in seeds:
        check_drawn_restarts(seed)


def check_drawn_restarts(seed):
    rng = random.Random(seed)
    n_rows = rng.randint(7, 60)
    order = {"shuffle": rng.random() < 0.7, "seed": rng.randrange(3)}
    found, state, last = [], None, -1
    for _ in range(rng.randint(1, 8)):  # restarts
        size, batch_size = rng.randint(1, 7), rng.randint(1, 9)
        places = [{"rank": rank, "world_size": size} for rank in range(size)]
        samplers = [
            BatchSampler(range(n_rows), batch_size, **order, **p) for p in places
        ]
        for sampler in samplers if state is not None else []:
            sampler.load_state_dict(state)
        for _ in range(rng.randint(0, 3)):  # epochs
            epoch, passes = samplers[0].epoch, [iter(each) for each in samplers]
            assert epoch - last in (0, 1)
            n_steps = rng.choice([rng.randint(0, 20), 100])
            for parts in itertools.islice(zip(*passes, strict=True), n_steps):
                sizes = [len(part) for part in parts]
                assert min(sizes) >= 1
                assert max(sizes) - min(sizes) <= 1
                assert sum(sizes) < size * (batch_size + 1)
                scales = [n * size / sum(sizes) for n in sizes]
                assert [each.scale for each in samplers] == scales
                found += itertools.chain(*parts)
            last = epoch
            if n_steps < 100:
                break  # unless it is resumed, the next pass begins anew
        state, *others = (sampler.state_dict() for sampler in samplers)
        assert all(other == state for other in others)
    assert found == list(itertools.islice(orders(n_rows, **order), len(found))), seed


@pytest.mark.parametrize(("n_workers", "persistent"), WORKERS)
def test_a_loop_over_a_loader_counts_what_it_takes_and_not_what_workers_read(
    n_workers, persistent
):
    rows = torch.arange(11)

    def start(state=None):
        sampler = BatchSampler(rows, 2)
        if state is not None:
            sampler.load_state_dict(state)
        options = {"num_workers": n_workers, "persistent_workers": persistent}
        return sampler, DataLoader(rows, batch_sampler=sampler, **options)

    sampler, loader = start()
    epochs, states, rests = [], [], []
    for _ in range(3):
        epochs.append([])
        for n, batch in enumerate(loader):
            assert sampler.state_dict(taken=n + 1) == sampler.state_dict()
            epochs[-1] += batch.tolist()
            states.append(sampler.state_dict())
            rests.append(len(epochs[-1]))
        assert sorted(epochs[-1]) == rows.tolist()
    assert epochs[0] != epochs[1] != epochs[2]
    assert (sampler.epoch, len(loader), len(states)) == (3, 6, 18)
    for n in (0, 4, 8, 11):  # 11: the end of the second epoch
        again, loader = start(states[n])
        here = n // 6 + (n == 11)
        assert again.epoch == here
        taken = torch.cat(list(loader)).tolist()
        assert taken == (epochs[here][rests[n] :] if n < 11 else epochs[here])
    next(iter(loader))  # takes one batch, like a loop that ends early
    again_from = again.epoch
    for _ in loader:
        assert again.epoch == again_from
        break
    assert len(torch.cat(list(loader))) == len(rows)
    assert again.epoch == again_from + 1


class Flaky(Dataset):
    """A data set with a row that cannot be read."""

    def __len__(self):
        return 11

    def __getitem__(self, row):
        if row == 5:
            raise OSError("row 5")
        return row


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("n_more", [0, 1, 9])
def test_a_batch_that_cannot_be_read_counts_once_the_loop_goes_on(n_workers, n_more):
    sampler, again = (BatchSampler(range(11), 2, shuffle=False) for _ in range(2))
    loader = DataLoader(Flaky(), batch_sampler=sampler, num_workers=n_workers)
    batches = iter(loader)
    found = [*next(batches).tolist(), *next(batches).tolist()]
    with pytest.raises(OSError, match="row 5"):
        next(batches)
    found += [4, 5] if n_more else []  # the rows that the loop skips
    found += itertools.chain(
        *map(torch.Tensor.tolist, itertools.islice(batches, n_more))
    )
    state = pickle.loads(pickle.dumps(sampler)).state_dict()
    del batches
    assert state == sampler.state_dict()
    again.load_state_dict(state)
    assert (again.epoch, sampler.epoch) == (n_more == 9, n_more == 9)
    rest = itertools.chain(*again) if n_more < 9 else []
    assert [*found, *rest] == list(range(11))


def test_the_states_that_torchdatas_loader_takes_are_those_of_what_it_was_given():
    sampler, again = BatchSampler(range(11), 2), BatchSampler(range(11), 2)
    list(sampler)
    batches = iter(sampler)
    given = [next(batches) for _ in range(3)]
    states = sampler.state_dict(taken=1), batches.state_dict()  # the first lags behind
    again.load_state_dict(states[0])
    rest = iter(again)
    rest.load_state_dict(states[1])
    assert sorted(itertools.chain(*given, *rest)) == list(range(11))
    assert again.epoch == 2


def test_two_loops_at_once_have_all_rows_each_if_they_go_on_together():
    sampler = BatchSampler(range(7), 2)
    first, second = iter(sampler), iter(sampler)
    for each in zip(*zip(first, second, strict=True), strict=True):
        assert sorted(itertools.chain(*each)) == list(range(7))
    assert sampler.epoch == 1


@pytest.mark.parametrize("n_workers", [0, 2])
@pytest.mark.parametrize("at", range(3))
def test_a_look_at_a_batch_within_a_loop_never_leaves_a_wrong_count(n_workers, at):
    sampler = BatchSampler(range(7), 2)
    loader = DataLoader(torch.arange(7), batch_sampler=sampler, num_workers=n_workers)
    raises = pytest.raises(RuntimeError, match="own")
    with raises if at == 2 else contextlib.nullcontext():
        for n, _ in enumerate(loader):
            assert sampler.state_dict() == sampler.state_dict(taken=n + 1)
            if n == at:
                next(iter(loader))
    assert sampler.epoch == (at < 2)


def test_epochs_can_be_set_as_with_torchs_samplers():
    sampler = BatchSampler(range(9), 4)
    epochs = []
    for epoch in (0, 1, 1, 5):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[1] == epochs[2]
    assert epochs[0] != epochs[1] != epochs[3]
    assert sampler.epoch == 6
    next(batches := iter(sampler))
    sampler.set_epoch(6)  # the current one
    assert sampler.state_dict()["taken"] == 4
    other = BatchSampler(range(9), 4, seed=7)
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match=r"goes on in epoch 6: .*sampler\.epoch"):
        other.set_epoch(5)
    other.set_epoch(6)
    assert list(other) == list(batches)


class Stream(IterableDataset):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(range(8))


class Unsized:
    pass


REFUSALS = [
    ((Stream(), 2), {}, TypeError, "dataset is a Stream.*Streaming"),
    ((Unsized(), 2), {}, TypeError, "dataset is a Unsized"),
    ((DataLoader(range(8)), 2), {}, TypeError, r"BatchSampler\(loader.dataset, batch_"),
    ((range(8), 0), {}, ValueError, "batch_size is 0: give an integer from 1"),
    ((range(8), 2.0), {}, TypeError, r"batch_size is 2\.0: give an integer"),
    ((range(8), 2), {"seed": -1}, ValueError, "seed is -1"),
    ((range(8), 2), {"seed": "a"}, TypeError, "seed is 'a'"),
    ((range(8), 2), {"rank": 0}, TypeError, "world_size is None"),
    ((range(8), 2), {"world_size": 2}, TypeError, "rank is None"),
    ((range(8), 2), {"rank": 2, "world_size": 2}, ValueError, "rank is 2"),
    (
        (range(3), 2),
        {"rank": 0, "world_size": 4},
        ValueError,
        "only 3 rows for 4 ranks",
    ),
    (([], 2), {}, ValueError, "0 rows for 1 ranks"),
]


@pytest.mark.parametrize(("args", "options", "kind", "words"), REFUSALS)
def test_what_cannot_be_dealt_out_is_one_error(args, options, kind, words):
    with pytest.raises(kind, match=words):
        iter(BatchSampler(*args, **options))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_rows": 9}, "9 rows, not for 8"),
        ({"taken": 9}, "taken is 9"),
        ({"carried": [8]}, "carried is 8"),
        ({"seed": -1}, "seed is -1"),
        ({"more": 1}, "not what BatchSampler"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change, words):
    sampler = BatchSampler(range(8), 2)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=words):
        sampler.load_state_dict({**before, "epoch": 3, **change})
    with pytest.raises(ValueError, match="taken is 1"):
        sampler.state_dict(taken=1)
    with pytest.raises(RuntimeError, match="none has been taken"):
        sampler.scale  # noqa: B018
    assert (sampler.state_dict(), sampler.epoch) == (before, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loader_that_gives_batches_in_another_order_is_refused():
    sampler = BatchSampler(range(8), 2)
    loader = DataLoader(range(8), batch_sampler=sampler, num_workers=2)
    loader.in_order = False  # an argument from torch 2.6 on
    with pytest.raises(ValueError, match="counts batches in order"):
        iter(loader)


def test_batches_are_not_taken_for_rows():
    for options in ({}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}):
        loader = DataLoader(range(8), sampler=BatchSampler(range(8), 2), **options)
        with pytest.raises(TypeError, match=r"DataLoader\(batch_sampler=sampler\)"):
            list(loader)


def test_batches_may_be_grouped_to_accumulate_gradients():
    groups = list(TorchBatchSampler(BatchSampler(range(8), 2, shuffle=False), 2, False))
    assert groups == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_rows_are_dealt_under_another_default_device():
    expected = list(BatchSampler(range(8), 2))
    with torch.device("meta"):
        sampler = BatchSampler(range(8), 2)
        assert list(sampler) == expected
        sampler.load_state_dict(sampler.state_dict())
        assert sorted(itertools.chain(*sampler)) == list(range(8))


class Averages(Dataset):
    """Averages in a worker, which inherits WORLD_SIZE but is not a rank."""

    def __len__(self):
        return 2

    def __getitem__(self, row):
        return paceline.mean(row + 1)


CALLS_OF_RANKS = {
    "batches": lambda path: list(BatchSampler(range(8), 2)),
    "mean": lambda path: paceline.mean(1),
    "save": lambda path: paceline.save({}, path),
    "save of random states": lambda path: paceline.save({"a": 1}, path, rng=True),
    "load of random states": lambda path: paceline.load(path, rng=True),
}


@pytest.mark.parametrize("name", CALLS_OF_RANKS)
def test_ranks_without_a_process_group_are_not_taken_for_one(
    monkeypatch, tmp_path, name
):
    call, path = CALLS_OF_RANKS[name], tmp_path / "a.pt"
    paceline.save({}, tmp_path / "a.pt", rng=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2.*no process group.*init"):
        call(path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    call(path)


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_worker_of_a_rank_is_no_rank(monkeypatch, how):
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(Averages(), num_workers=1, multiprocessing_context=how)
    assert [batch.item() for batch in loader] == [1, 2]
    list(BatchSampler(range(8), 2, rank=0, world_size=1))
