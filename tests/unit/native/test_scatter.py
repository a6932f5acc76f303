"""The arguments of a call, split by rows over replicas."""

import gc
import weakref
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from paceline import _native
from paceline._compat import torch_core
from paceline._compat.packed_sequence import Replicated
from support.leaks import assert_leaves_nothing
from torch.nn.parallel import scatter_gather
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    unpack_sequence,
)
from values import Pair, Wanting, chunk, rows, same

torch_core.attach()


def chunks(scattered):
    return [chunk(scattered, k) for k in range(len(scattered[1]))]


def test_rows_are_split_in_order_and_as_evenly_as_possible():
    for n_rows in range(40):
        for n in range(2, 9):
            x = rows(n_rows, 1)
            _, sizes, leaves = _native.scatter((x,), {}, n, 0)
            parts = x.tensor_split(max(1, min(n, n_rows)))
            assert sizes == tuple(map(len, parts))
            assert same([part for (part,) in leaves], list(parts))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_any_dimension_can_be_the_one_of_the_rows(dim):
    x = rows(4, 4, 4)
    array = x.numpy()
    scattered = _native.scatter((x,), {"a": array}, 3, dim)
    assert scattered[1] == (2, 1, 1)
    for k, expected in enumerate(torch.tensor_split(x, 3, dim)):
        args, kwargs = chunk(scattered, k)
        assert torch.equal(args[0], expected)
        assert np.array_equal(kwargs["a"], expected.numpy())


def test_a_negative_dimension_counts_from_the_end_of_each():
    scattered = _native.scatter((rows(3, 4), rows(2, 3, 4)), {}, 2, -1)
    a, b = scattered[2][1]
    assert (a.shape, b.shape) == ((3, 2), (2, 3, 2))


def test_where_one_replica_takes_part_it_is_given_the_arguments_themselves():
    table = rows(7, 3)
    for call in (((), {}), ((1, "a"), {"x": None}), ((torch.tensor(1.0),), {})):
        scattered = _native.scatter(*call, 4, 0)
        assert scattered[1] == (0,)
        assert same(chunk(scattered, 0), call)
    for n, x in ((1, rows(4)), (3, rows(1)), (3, 5)):  # and markers are removed
        (args, _) = chunk(_native.scatter((x, Replicated(table)), {}, n, 0), 0)
        assert args[0] is x
        assert args[1] is table
    call = ((rows(3), rows(2)), {"x": rows(1, 2)})  # any sizes and dimensions
    assert all(same(chunk(_native.scatter(*call, 1, k), 0), call) for k in (0, 1))


def test_a_part_is_a_view_that_autograd_knows():
    x = rows(5, 2).requires_grad_()
    scattered = _native.scatter((x,), {}, 2, 0)
    a, b = (args[0] for args, _ in chunks(scattered))
    assert a.data_ptr() == x.data_ptr()
    (a.sum() * 2 + b.sum() * 3).backward()
    assert x.grad[:, 0].tolist() == [2.0, 2.0, 2.0, 3.0, 3.0]
    assert not scattered[2][0][0].is_leaf
    with torch.no_grad():
        assert not _native.scatter((x,), {}, 2, 0)[2][0][0].requires_grad


def test_a_part_is_of_the_type_of_the_whole():
    class Named(torch.Tensor):
        pass

    array = np.ma.masked_equal(np.arange(4), 2)
    given = (array, rows(4).as_subclass(Named), torch.nn.Parameter(rows(4)))
    (part, named, parameter), _ = chunk(_native.scatter(given, {}, 2, 0), 1)
    assert isinstance(named, Named)
    assert named.tolist() == parameter.tolist() == [2.0, 3.0]
    assert isinstance(part, np.ma.MaskedArray)
    assert part.mask.tolist() == [True, False]
    assert np.shares_memory(part.data, array.data)


@pytest.mark.parametrize("n_rows", [0, 2, 5])
def test_batches_that_disagree_are_one_error(n_rows):
    mask = rows(n_rows)
    with pytest.raises(ValueError, match="args\\[0\\] has 3 rows") as caught:
        _native.scatter((rows(3, 2),), {"mask": [None, mask]}, 2, 0)
    words = str(caught.value)
    assert f"kwargs['mask'][1] has {len(mask)}" in words
    assert "paceline.replicate(x)" in words


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("sizes", [(5, 10), (12, 4, 8), (3, 3, 15), (2, 4), (7, 1)])
def test_several_rows_go_with_each_row_of_the_smallest(sizes, dim, n):
    xs = [rows(size * 2).reshape(size, 2) for size in sizes]
    xs = [x.T.contiguous() if dim else x for x in xs]
    with pytest.warns(UserWarning, match="paceline.replicate"):
        scattered = _native.scatter(
            (xs[0],), {"more": [x.numpy() for x in xs[1:]]}, n, dim
        )
    parts = [torch.tensor_split(x, min(n, min(sizes)), dim) for x in xs]
    fewest = sizes.index(min(sizes))
    assert scattered[1] == tuple(part.shape[dim] for part in parts[fewest])
    for k in range(len(scattered[1])):
        begin, end = sum(scattered[1][:k]), sum(scattered[1][: k + 1])
        for x, leaf, size in zip(xs, scattered[2][k], sizes, strict=True):
            i = size // min(sizes)
            of_k = x.narrow(dim, begin * i, (end - begin) * i)
            assert np.array_equal(leaf, of_k)


def test_several_rows_for_each_row_are_a_warning_once():
    with pytest.warns(UserWarning, match="replicate") as caught:
        _native.scatter((rows(6), rows(2), rows(4)), {}, 2, 0)
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "args[0] has 3 rows for each row of the batch"
    ]


def test_several_packed_sequences_go_with_each_row():
    sequences = [rows(n, 2, start=9 * n) for n in (1, 3, 2, 4, 2, 1)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    with pytest.warns(
        UserWarning, match=r"args\[1\]\.data has 2 rows for each row of the batch"
    ):
        scattered = _native.scatter((rows(3), packed), {}, 2, 0)
    parts = [unpack_sequence(args[1]) for args, _ in chunks(scattered)]
    assert same(parts, [sequences[:4], sequences[4:]])


@pytest.mark.filterwarnings("ignore")
def test_a_number_for_each_replica_is_told_from_a_flag_for_each_row():
    number = torch.full((4, 1), 7.0)
    for n_rows in (2, 8, 9):  # the number is not one of several for each row
        scattered = _native.scatter((rows(n_rows), number), {}, 4, 0)
        assert {len(scattered[2][k][1]) for k in range(min(4, n_rows))} == {1}
    call = rows(2), number, rows(4)  # here it is
    scattered = _native.scatter(call, {}, 4, 0)
    assert [len(leaf) for leaf in scattered[2][1]] == [1, 2, 2]
    with pytest.raises(ValueError, match=r"args\[0\] has 6 rows .* args\[1\] has 4"):
        _native.scatter((rows(6), number, rows(4)), {}, 4, 0)


def test_a_leaf_without_the_dimension_is_named():
    with pytest.raises(ValueError, match=r"args\[1\]\.left has shape \(4,\)") as caught:
        _native.scatter((rows(2, 4), Pair(rows(4), 1)), {}, 2, 1)
    assert "paceline.replicate(x)" in str(caught.value)
    with pytest.raises(ValueError, match="no dimension -3"):
        _native.scatter((np.ones((2, 4)),), {}, 2, -3)
    with pytest.raises(ValueError, match="65 dimensions: at most 64"):
        _native.scatter((torch.ones([1] * 65),), {}, 2, 0)


ROWS = [rows(2), rows(3)]
ODD = [
    torch.eye(4).to_sparse(),
    torch.eye(4).to_sparse_csr(),
    torch.nested.nested_tensor(ROWS),
    torch.nested.nested_tensor(ROWS, layout=torch.jagged),
]


@pytest.mark.parametrize("x", ODD, ids=["coordinates", "csr", "nested", "jagged"])
def test_a_tensor_that_cannot_be_split_is_named(x):
    with pytest.raises(ValueError, match=r"kwargs\['x'\] is a sparse or nested"):
        _native.scatter((rows(4),), {"x": x}, 2, 0)
    assert chunk(_native.scatter((rows(4),), {"x": x}, 1, 0), 0)[1]["x"] is x
    assert chunk(_native.scatter((rows(4), Replicated(x)), {}, 2, 0), 1)[0][1] is x


def test_arguments_that_cannot_be_are_refused():
    for wrong in (([], {}, 2, 0), ((), [], 2, 0), ((), {}, 2), ((), {}, "2", 0)):
        with pytest.raises(TypeError):
            _native.scatter(*wrong)
    with pytest.raises(ValueError, match="over 0 replicas"):
        _native.scatter((), {}, 0, 0)


LENGTHS = [[3, 2, 2, 1], [1, 3, 2, 3, 1], [2], [1, 1], [5, 1, 4]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_packed_sequence_is_split_by_the_rows_of_its_batch(lengths, n):
    sequences = [rows(m, 2, start=10 * i) for i, m in enumerate(lengths)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    scattered = _native.scatter((packed,), {"y": rows(len(lengths))}, n, 0)
    found = []
    for args, kwargs in chunks(scattered):
        assert isinstance(args[0], PackedSequence)
        found += unpack_sequence(args[0])
        assert len(unpack_sequence(args[0])) == len(kwargs["y"])
    assert same(found, sequences)
    parts = [args[0] for args, _ in chunks(scattered)]
    assert same(_native.gather(parts, scattered[1], 0), packed)


def test_a_packed_sequence_that_was_sorted_stays_without_indices():
    padded = rows(3, 4, 2)
    packed = pack_padded_sequence(padded, [4, 2, 1], batch_first=True)
    scattered = _native.scatter((packed,), {}, 2, 0)
    parts = [part for (part,), _ in chunks(scattered)]
    for part in parts:
        assert (part.sorted_indices, part.unsorted_indices) == (None, None)
    assert [p.batch_sizes.tolist() for p in parts] == [[2, 2, 1, 1], [1]]
    ordered = packed._replace(sorted_indices=torch.arange(3))
    scattered = _native.scatter((ordered, rows(3)), {}, 2, 0)
    assert [x.tolist() for x in scattered[2][1][2:]] == [[0], [2.0]]


def test_no_number_on_a_device_is_read_to_split_what_needs_none():
    """As on a GPU, for which the host would wait; here there are no numbers at all."""
    number = torch.ones((), device="meta").expand(3)
    (args, _) = chunks(_native.scatter((rows(6), number), {}, 3, 0))[2]
    assert args[1].shape == (1,)
    padded = torch.empty(3, 4, 2, device="meta")
    packed = pack_padded_sequence(padded, torch.tensor([4, 2, 1]), batch_first=True)
    (args, _) = chunks(_native.scatter((packed,), {}, 2, 0))[0]
    assert args[0].batch_sizes.tolist() == [2, 2, 1, 1]


THINGS = [
    Wanting(["log"], 1),
    [],
    {},
    deque(),
    OrderedDict(),
    defaultdict(list),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_an_empty_container_is_one_object_for_all(thing):
    given = (rows(4), {"in": [thing]}, Replicated(thing), Replicated([rows(3), thing]))
    scattered = _native.scatter(given, {"a": thing}, 2, 0)
    for args, kwargs in chunks(scattered):
        found = args[1]["in"][0], args[2], args[3][1], kwargs["a"]
        assert all(one is thing for one in found)
    named = [
        kwargs for _, kwargs in chunks(_native.scatter((rows(4),), {"a": 1}, 2, 0))
    ]
    assert named[0] is not named[1]
    (args, _) = chunk(_native.scatter(given, {}, 1, 0), 0)
    assert args[1]["in"][0] is args[2] is args[3][1] is thing


BEGUN = [["begun"], {"seen": [1, "a"]}, deque([None]), OrderedDict(a=1)]


@pytest.mark.parametrize("thing", BEGUN, ids=lambda thing: type(thing).__name__)
def test_each_replica_has_its_own_of_a_container_with_entries(thing):
    """As with torch: what one writes to it must not be another's input."""
    scattered = _native.scatter((rows(4), thing, Replicated(thing)), {}, 2, 0)
    found = [each for args, _ in chunks(scattered) for each in args[1:]]
    assert found == [thing] * 4
    assert len({id(each) for each in [thing, *found]}) == 5


def test_a_dataclass_and_what_is_empty_are_one_object_for_all_as_in_torch():
    for thing in (THINGS[0], [], {}):
        assert all(part[0] is thing for part in scatter_gather.scatter([thing], [0, 1]))
    marked = Wanting([Replicated(2)], 1)
    (args, _) = chunk(_native.scatter((rows(4), marked), {}, 2, 0), 1)
    assert args[1].x == [2]


def test_a_packed_sequence_must_have_as_many_rows_as_the_others():
    packed = pack_sequence([rows(2), rows(1)])
    with pytest.raises(ValueError, match=r"args\[0\]\.data has 2 rows .* has 3"):
        _native.scatter((packed, rows(3)), {}, 2, 0)
    scattered = _native.scatter((Replicated(packed), rows(3)), {}, 2, 0)
    assert all(args[0].data is packed.data for args, _ in chunks(scattered))


def test_a_replica_split_further_finds_its_rows_again():
    x = rows(7, 2)
    outer = _native.scatter((x,), {}, 2, 0)
    inner = _native.scatter(*chunk(outer, 1), 2, 0)
    assert same(inner[2][1], [x[6:]])


def test_a_thousand_scatters_leave_nothing():
    x, array, table = rows(4, 2), np.arange(4), rows(3)
    packed = pack_sequence([rows(2)] * 4)
    kwargs = {"a": [array, Replicated(table)], "p": packed}

    def once():
        scattered = _native.scatter((x, "text"), kwargs, 2, 0)
        chunk(scattered, 0)
        assert len(scattered[2][1]) == len(scattered[2][0]) == 5

    assert_leaves_nothing(once, x, array, table, packed, kwargs, packed.data)


def test_a_thousand_scatters_that_fail_leave_nothing():
    x, y = rows(4, 2), {"a": rows(3)}

    def once():
        with pytest.raises(ValueError, match="rows"):
            _native.scatter((x,), y, 2, 0)

    assert_leaves_nothing(once, x, y, y["a"])


def test_arguments_in_a_cycle_with_their_scatter_are_collected():
    class Holder:
        pass

    holder = Holder()
    packed = pack_sequence([rows(2)])
    packed.data.holder = holder
    holder.scattered = _native.scatter((packed, holder), {}, 1, 0)
    gone = weakref.ref(holder)
    del holder, packed
    gc.collect()
    assert gone() is None
