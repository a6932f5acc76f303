"""Deal the rows of a data set to ranks: each row once an epoch, on one of the ranks.

One ``iter()`` of the sampler makes a pass, which counts the batches that it was asked
for.  A DataLoader with workers asks for some batches ahead, and then for one more each
time that its loop takes one.  So the count gives the batch that the loop is at.  The
DataLoader's own count shows whether the loop has received that batch.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from paceline._compat import torch_core, torch_groups


class BatchSampler(Sampler[list[int]]):
    """Deal the rows of a data set to ranks in batches, without padding or dropping.

    Give it to a `DataLoader` as `batch_sampler`.  The last batch of an epoch is divided
    as evenly as possible.  If it has fewer rows than ranks, it is joined to the batch
    before.  So each row comes once an epoch, and all ranks take equally many steps.

    A batch is taken when the loop over the `DataLoader` receives it.  A batch that
    fails to load is not, unless the loop continues after the error.  When all batches
    are taken, the epoch advances.  If a loop ends early, the next restarts the epoch.

    Parameters
    ----------
    dataset : Sized
        The data set that the `DataLoader` reads.  Its length is read once.
    batch_size : int
        Rows per batch and rank.
    shuffle : bool, default True
        Whether each epoch has its own order, like torch's `DistributedSampler`.
    seed : int, default 0
        The seed of the orders.  All arguments but `rank` must be equal on all ranks.
    rank, world_size : int, optional
        By default those of torch's process group when a pass begins, or one process.

    Raises
    ------
    TypeError, ValueError
        If the data set has no length or a number is wrong.  When a pass begins, if the
        data set has fewer rows than ranks, or ``WORLD_SIZE`` is set without a group.

    Examples
    --------
    >>> from paceline.data import BatchSampler
    >>> for rank in range(2):
    ...     sampler = BatchSampler(range(7), 2, shuffle=False, rank=rank, world_size=2)
    ...     print(list(sampler), sampler.scale)
    [[0, 1], [4]] 0.6666666666666666
    [[2, 3], [5, 6]] 1.3333333333333333
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader):
            words = "give its data set: BatchSampler(loader.dataset, batch_size)"
            raise TypeError(f"dataset is a DataLoader: {words}")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            words = f"dataset is a {type(dataset).__name__}, which has no len()"
            raise TypeError(f"{words}: for streams use MosaicML Streaming")
        self.batch_size = _integer("batch_size", batch_size, 1)
        self._n_rows = len(dataset)
        self._shuffle, self._seed = bool(shuffle), _integer("seed", seed)
        self._place: tuple[int, int] | None = None
        if rank is not None or world_size is not None:
            size = _integer("world_size", world_size, 1)
            self._place = _integer("rank", rank, 0, size - 1), size
        # Where a pass begins: epoch, rows taken from it, rows carried into it.
        self._begin: tuple[int, int, list[int]] = (0, 0, [])
        self._pass: _Pass | None = None
        self._is_loaded = False
        # Of torch, where a pass goes on in the middle of an epoch: a DataLoader draws a
        # seed as it begins, which an uninterrupted loop does not.
        self._random: torch.Tensor | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return _Pass(self, *torch_core.read_by_loader(sys._getframe(1)))

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return _count_batches(self._n_rows, self.batch_size, self._find_place()[1])

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: a loop over epochs begins there."""
        epoch, n_taken, carried = self._position()
        return epoch + (len(carried) + self._n_rows - n_taken < self._find_place()[1])

    @property
    def scale(self) -> float:
        """The factor for a mean loss: this rank's rows over the mean rows of ranks."""
        if self._pass is None or self._pass.n_taken == 0:
            raise RuntimeError("scale needs a batch, but none has been taken")
        return self._pass.part_of(self._pass.n_taken - 1)[2]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it is current; the epoch of a loaded state must be."""
        if _integer("epoch", epoch) == self.epoch:
            return
        if self._is_loaded:
            words = f"epoch is {epoch}, but the state goes on in epoch {self.epoch}"
            raise ValueError(f"{words}: for epoch in range(sampler.epoch, n_epochs)")
        self._begin, self._pass = (operator.index(epoch), 0, []), None

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, equal on all ranks: save it on one.

        If something between the `DataLoader` and your loop reads ahead, give as `taken`
        how many batches of this pass your loop has received.
        """
        epoch, n_rows, carried = self._position(taken)
        order = {"n_rows": self._n_rows, "shuffle": self._shuffle, "seed": self._seed}
        return {"epoch": epoch, "taken": n_rows, "carried": [*carried], **order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in its order, with any number of ranks and batch size.

        If fewer rows of the epoch are left than there are ranks now, they come with the
        first batch of the next epoch.  Raise ValueError if the state is for other data.
        """
        n_rows = self._n_rows
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ValueError("state is not what BatchSampler.state_dict() returns")
        if state["n_rows"] != n_rows:
            raise ValueError(f"state is for {state['n_rows']} rows, not for {n_rows}")
        carried = [_integer("carried", row, 0, n_rows - 1) for row in state["carried"]]
        taken = _integer("taken", state["taken"], 0, n_rows + len(carried))
        epoch, seed = _integer("epoch", state["epoch"]), _integer("seed", state["seed"])
        self._begin = (epoch, taken, carried)
        self._shuffle, self._seed = bool(state["shuffle"]), seed
        self._pass, self._is_loaded = None, True

    def _start(self, begun: _Pass) -> tuple[torch.Tensor, int, int]:
        """Begin a pass; return the rows of all ranks, the rank and the world size."""
        rank, size = self._find_place()
        if self._pass is not None and self._pass.n_taken == self._pass.n_batches:
            self._begin = self._position()
        if len(rows := self._rows()) < size:
            self._begin = (self._begin[0] + 1, 0, rows.tolist())
            rows = self._rows()
        if self._pass is not None:
            self._pass._loader = {}  # it refers back to that pass
        if self._is_loaded and self._begin[1] > 0:
            self._random = torch.get_rng_state()
        self._pass, self._is_loaded = begun, False
        return rows, rank, size

    def _find_place(self) -> tuple[int, int]:
        """Return the rank and the world size."""
        rank, size = self._place or torch_groups.rank_and_size()
        if self._n_rows < size:
            raise ValueError(f"dataset has only {self._n_rows} rows for {size} ranks")
        return rank, size

    def _position(self, taken: int | None = None) -> tuple[int, int, list[int]]:
        """Return `_begin` advanced by the batches that the loop has taken."""
        epoch, n_rows, carried = self._begin
        if self._pass is None:
            _integer("taken", taken or 0, 0, 0)
        else:
            n = self._pass.n_taken if taken is None else taken
            n_rows += self._pass.end_of(_integer("taken", n, 0, self._pass.n_batches))
        is_end = n_rows == len(carried) + self._n_rows
        return (epoch + 1, 0, []) if is_end else (epoch, n_rows, carried)

    def _rows(self) -> torch.Tensor:
        epoch, n_taken, carried = self._begin
        rows = torch.arange(self._n_rows, device="cpu")
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed + epoch) % 2**63)
            rows = torch.randperm(self._n_rows, generator=generator, device="cpu")
        return torch.cat([torch.tensor(carried, device="cpu").to(rows), rows])[n_taken:]


class _Pass(Iterator[list[int]]):
    """One rank's parts of the batches, with a count of the batches taken."""

    def __init__(
        self, sampler: BatchSampler, n_ahead: int, loader: dict[str, Any]
    ) -> None:
        self._sampler, self._n_ahead, self._loader = sampler, n_ahead, loader
        self._n_given: int | None = None  # batches its loop had, when last asked
        self._deal()

    def __getstate__(self) -> dict[str, Any]:  # queues of workers do not pickle
        given = {"_num_yielded": self._loader.get("_num_yielded", -1)}
        return {**vars(self), "_loader": given}

    def _deal(self) -> None:
        self._rows, self._rank, self._size = self._sampler._start(self)
        self._n_asked, size = 0, self._sampler.batch_size
        self._n_global = size * self._size
        self.n_batches = _count_batches(len(self._rows), size, self._size)

    def state_dict(self) -> dict[str, Any]:  # torchdata calls it
        return self._sampler.state_dict(min(self._n_asked, self.n_batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._deal()

    def __next__(self) -> list[int]:
        if (state := self._sampler._random) is not None:
            self._sampler._random = None
            torch.set_rng_state(state)
        counted = self._sampler._pass
        if counted is not None and abs(counted.n_taken - self.n_taken) > 1:
            words = "another loop over this sampler began before this one ended"
            raise RuntimeError(f"{words}: give each loop its own BatchSampler")
        if counted is not None and self.n_taken < self.n_batches:
            self._sampler._pass = self  # the last pass asked gives scale and state
        self._n_asked += 1
        self._n_given = self._loader.get("_num_yielded")
        if self._n_asked > self.n_batches:
            raise StopIteration
        begin, end, _ = self.part_of(self._n_asked - 1)
        return [*self._rows[begin:end].tolist()]

    @property
    def n_taken(self) -> int:
        is_last_failed: bool = self._n_given == self._loader.get("_num_yielded", -1)
        n_taken = self._n_asked - self._n_ahead - is_last_failed
        return min(max(n_taken, 0), self.n_batches)

    def end_of(self, n: int) -> int:
        """Return the number of rows of the first n batches, over all ranks."""
        return len(self._rows) if n == self.n_batches else n * self._n_global

    def part_of(self, n: int) -> tuple[int, int, float]:
        """Return the begin and end of this rank's part of batch n, and its scale."""
        begin, n_rows = self.end_of(n), self.end_of(n + 1) - self.end_of(n)
        first, end = (n_rows * r // self._size for r in (self._rank, self._rank + 1))
        return begin + first, begin + end, (end - first) * self._size / n_rows


def _count_batches(n_rows: int, batch_size: int, n_ranks: int) -> int:
    """Count the batches; left-over rows make one if each rank gets a row."""
    n_whole, n_rest = divmod(n_rows, batch_size * n_ranks)
    return n_whole + (n_rest >= n_ranks)


def _integer(name: str, value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: give an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}: give an integer from {least} to {most}")
    return number
