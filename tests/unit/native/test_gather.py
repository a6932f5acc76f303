"""Replicas' outputs, joined into the output of the module for the whole batch."""

import collections
import warnings

import numpy as np
import pytest
import torch
from paceline import _native
from paceline._compat import torch_core
from support.leaks import assert_leaves_nothing
from torch.nn.parallel import scatter_gather
from values import Attributed, Box, Classified, Frozen, Odd, Pair, Wanting, rows, same

torch_core.attach()

X = rows(5, 2)
A, B = X[:3], X[3:]


def gather(*outputs, sizes=(3, 2), dim=0):
    return _native.gather(list(outputs), sizes, dim)


# Outputs of a replica for its rows; for all rows they equal those of the module.
MAKERS = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "masked array": lambda x: np.ma.masked_equal(x.numpy(), 6),
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x],
    "list of a number a row": lambda x: [int(row[0]) for row in x],
    "nested": lambda x: {"a": [(x, None)], 3: {"b": x}},
    "namedtuple": lambda x: Pair(x, (x,)),
    "structseq": lambda x: torch.sort(x, dim=1),
    "ordered": lambda x: collections.OrderedDict(b=x, a=x),
    "default": lambda x: collections.defaultdict(list, a=x),
    "attributed": lambda x: Attributed(a=x),
    "keys in any order": lambda x: dict(
        sorted({"a": x, "b": x}.items(), reverse=x is B)
    ),
    "deque": lambda x: collections.deque([x, None]),
    "frozen": lambda x: Frozen(x, None),
    "model output": lambda x: Classified(logits=x, hidden_states=(x, x)),
    "registered": lambda x: Box(x, "label"),
    "empty": lambda x: ((), [], {}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_outputs_are_those_of_the_whole_batch_and_nothing_is_left(name):
    outputs = [MAKERS[name](A), MAKERS[name](B)]
    assert same(gather(*outputs), MAKERS[name](X))
    assert_leaves_nothing(lambda: gather(*outputs), *outputs, type(outputs[0]))


def test_one_output_is_joined_as_several_are():
    value = object()
    losses = torch.tensor(2.0), np.array(3)
    with pytest.warns(UserWarning, match="a scalar"):
        output = _native.gather([(A, value, None, *losses)], (3,), 0)
    assert output[0] is A
    assert output[1] == [value]
    assert output[2] is None
    assert [each.tolist() for each in output[3:]] == [[2.0], [3]]


def test_sparse_outputs_are_joined_by_torch():
    output = gather(torch.eye(4)[:3].to_sparse(), torch.eye(4)[3:].to_sparse())
    assert torch.equal(output.to_dense(), torch.eye(4))


def test_losses_become_a_vector_with_a_warning_once_a_call():
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    outputs = [{"a": loss, "b": loss, "c": np.array(3)} for loss in losses]
    words = r"forward returns a scalar, .* on each of 2 replicas: .*; write \.mean\(\)"
    with pytest.warns(UserWarning, match=words) as caught:
        value = gather(*outputs)
    assert [each.filename for each in caught] == [__file__]
    assert [each.tolist() for each in value.values()] == [[1, 2], [1, 2], [3, 3]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="a scalar"):
            gather(*losses)


def test_constants_are_not_compared():
    class Odd:
        def __eq__(self, other):
            raise KeyboardInterrupt

        __hash__ = None

    one, two = Odd(), Odd()
    first, second = gather(one, two)
    assert first is one
    assert second is two


WITH_LOSS, WITHOUT = Classified(loss=A, logits=A), Classified(logits=B)
OTHER = {"l": [rows(2, 3)]}
AT = r"output\['l'\]\[0\] has shape \(3, 2\) on replica 0 and \(2, 3\) on replica 1"
DIFFERENT = {
    "type": ((A,), (None,), TypeError, r"output\[0\] is of type .*Tensor .* None on"),
    "none": (None, 3.5, TypeError, "output is None on replica 0 and of type float"),
    "container": ([A], (B,), TypeError, "of type list on replica 0 and of type tuple"),
    "array": (A, B.numpy(), TypeError, "numpy.ndarray on replica 1"),
    "keys": ({"x": {"a": A}}, {"x": {"b": B}}, ValueError, r"output\['x'\] has the k"),
    "fewer": ({"a": A, "b": A}, {"a": B}, ValueError, r"\('a', 'b'\) on replica 0"),
    "output": (WITH_LOSS, WITHOUT, ValueError, r"\('logits',\) on replica 1"),
    "length": ((A, A), (B,), ValueError, "2 entries on replica 0 and 1 on replica 1"),
    "names": (Pair(A, A), tuple.__new__(Pair, (B,)), ValueError, "2 entries on repl"),
    "list": ([A], [B, B, B], ValueError, "override gather"),
    "context": (Box(A, 1), Box(B, 2), ValueError, "context 1 on replica 0 and 2"),
    "shape": ({"l": [A]}, OTHER, ValueError, AT),
    "dims": (A, rows(2), ValueError, r"\(3, 2\) on replica 0 and \(2,\) on replica 1"),
    "scalar": (A, torch.tensor(1.0), ValueError, r"and \(\) on replica 1"),
    "array shape": (A.numpy(), np.ones((2, 3)), ValueError, "pad them"),
    "odd": (Odd.of(1, 2, 3), Odd.of(4, 5), TypeError, "Odd.__new__ made a list"),
    "field": (Frozen(A), Frozen(B[:, 0]), ValueError, r"output\.x has shape"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_replicas_that_disagree_are_one_error_that_leaves_nothing(name):
    left, right, kind, words = DIFFERENT[name]
    with pytest.raises(kind, match=words):
        gather(left, right)

    def once():
        try:
            gather(left, right)
        except kind:
            return
        pytest.fail(f"no {kind.__name__}")

    assert_leaves_nothing(once, right, type(right))


@pytest.mark.parametrize(
    ("outputs", "dim", "words"),
    [
        ([], 0, "no output"),
        ([rows(3), rows(3)], 1, r"shape \(3,\) .* no dimension 1"),
        ([rows(1, 2), rows(1, 2), rows(1, 3)], 0, r"\(1, 3\) on replica 2"),
    ],
    ids=["none", "dimension", "third"],
)
def test_outputs_that_cannot_be_joined_are_an_error(outputs, dim, words):
    with pytest.raises(ValueError, match=words):
        gather(*outputs, sizes=(1,) * len(outputs), dim=dim)


LISTS_AS_IN_TORCH = {
    "tensors": lambda x: [x, x + 1],
    "none": lambda x: [None, None],
    "tensor and none": lambda x: [x, None],
    "tuples": lambda x: [(x, x + 1), (x,)],
    "dicts": lambda x: [{"boxes": x, "scores": x[:, 0]} for _ in range(2)],
    "lists": lambda x: [[x], [x, x]],
    "empty": lambda x: [],
    "feature maps": lambda x: [x, x[:, :1], x[:, :, None]],
    "losses": lambda x: [x.sum(), x.mean()],
    "vectors of the batch": lambda x: [x[:, 0], torch.arange(5)[:, None]],
}


@pytest.mark.filterwarnings("ignore")  # some are in doubt, see below
@pytest.mark.parametrize("name", LISTS_AS_IN_TORCH)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_lists_of_tensors_are_joined_as_by_torch(name, sizes, monkeypatch):
    def join(device, dim, *tensors):
        return torch.cat([t.reshape(-1) if t.ndim == 0 else t for t in tensors], dim)

    monkeypatch.setattr(scatter_gather.Gather, "apply", join)
    parts = rows(sum(sizes), 2).split(sizes)
    outputs = [LISTS_AS_IN_TORCH[name](part) for part in parts]
    assert same(gather(*outputs, sizes=sizes), scatter_gather.gather(outputs, 0))


def boxes(row, n):
    return row.expand(n, -1)


LISTS_OF_ROWS = {
    "vectors": lambda x: [(row,) for row in x],
    "arrays": lambda x: [{"row": row} for row in x.numpy()],
    "boxes in any number": lambda x: [boxes(r, int(r[0] / 2 + 2) % 4) for r in x],
    "dicts": lambda x: [{"boxes": boxes(row, 5), "id": int(row[0])} for row in x],
    "dataclasses": lambda x: [Pair(boxes(row, 5), None) for row in x],
    "masks": lambda x: [[torch.ones(6, int(row[0]) + 1, 2)] for row in x],
    "some in each": lambda x: [[boxes(row, 5)] * (int(row[0]) // 2 % 3) for row in x],
}


@pytest.mark.parametrize("name", LISTS_OF_ROWS)
@pytest.mark.parametrize("sizes", [(3, 3), (4, 4), (4, 3), (3, 2, 2), (2, 1), (1, 1)])
def test_lists_with_an_entry_for_each_row_are_those_of_the_batch(name, sizes):
    make, x = LISTS_OF_ROWS[name], rows(sum(sizes), 5)
    outputs = [{"rows": make(part)} for part in x.split(sizes)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(gather(*outputs, sizes=sizes), {"rows": make(x)})
        (alone,) = [gather({"rows": make(x)}, sizes=(len(x),))]
    assert same(alone, {"rows": make(x)})
    assert_leaves_nothing(lambda: gather(*outputs, sizes=sizes), *outputs)


DOUBTFUL = {
    "one of one": (lambda x: [x], (1, 1)),
    "boxes": (lambda x: [{"boxes": boxes(row, 2)} for row in x], (2, 2)),
    "heads": (lambda x: [x, x + 1, x + 2], (3, 3)),
    "losses": (lambda x: [x.mean()[None], x.square().mean()[None]], (2, 2)),
    "statistics": (lambda x: [x.mean(0), x.var(0), x.sum(0)], (3, 3)),
    "scales": (lambda x: [x.repeat_interleave(n, 0) for n in (4, 9)], (2, 2)),
    "vectors": (list, (3, 3)),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_list_in_doubt_is_joined_as_by_torch_with_a_warning(name):
    """It is as long as the replica has rows, and nothing tells rows from batches."""
    make, sizes = DOUBTFUL[name]
    outputs = [(make(part), "a") for part in rows(sum(sizes), 2).split(sizes)]
    words = r"gather: output\[0\] is a list as long .* return a tuple"
    with pytest.warns(UserWarning, match=words):
        joined = gather(*outputs, sizes=sizes)[0]
    assert len(joined) == sizes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            gather(*outputs, sizes=sizes)
        as_tuple = gather(*[tuple(make(p)) for p in rows(sum(sizes), 2).split(sizes)])
    assert len(as_tuple) == sizes[0]


def test_lists_of_entries_that_differ_are_joined_by_entry():
    maps = [[x, x[:, :1], x[:1]] for x in rows(6, 2).split(3)]  # as long as the rows
    joined = gather(*maps, sizes=(3, 3))
    assert [each.shape for each in joined] == [(6, 2), (6, 1), (2, 2)]


PLAIN = {
    "numbers": lambda x: [int(row[0]) for row in x],
    "strings": lambda x: [str(row) for row in x],
    "tuples": lambda x: [(int(row[0]), "word") for row in x],
    "dicts": lambda x: [{"id": int(row[0]), "box": None} for row in x],
    "lists": lambda x: [["token"] * (int(row[0]) % 3) + ["end"] for row in x],
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3, 2)])
def test_lists_of_plain_values_are_those_of_the_whole_batch(name, sizes):
    make, x = PLAIN[name], rows(sum(sizes), 2)
    outputs = [make(part) for part in x.split(sizes)]
    assert gather(*outputs, sizes=sizes) == make(x)
    assert gather(*outputs, sizes=()) == make(x)


def test_a_list_of_plain_values_that_is_not_by_row_is_an_error():
    strides = {"strides": [8, 16, 32]}
    with pytest.raises(ValueError, match=r"\['strides'\] has 3 entries for the 2 rows"):
        gather(strides, strides, sizes=(2, 2))
    assert gather((8, 16), (8, 32), sizes=(2, 2)) == ([8, 8], [16, 32])


def test_outputs_that_lead_back_to_themselves_are_joined():
    def output(x):
        first, second = Attributed(x=x), Wanting([x + 1], 1)
        first.rest, second.rest = [second, second], first
        second.x.append(first)
        return first

    outputs = [output(A), output(B)]
    joined = gather(*outputs)
    second = joined.rest[0]
    assert torch.equal(joined.x, X)
    assert torch.equal(second.x[0], X + 1)
    assert second.x[1] is joined
    assert joined.rest[1] is second

    def once():
        again = gather(*outputs)
        again.rest[0].x.clear()

    assert_leaves_nothing(once, *outputs, A, B)
    value = []
    value.append(value)
    again = gather(value, value, sizes=())
    assert again[0] is again
    inside = [A]
    inside.append((inside,))
    with pytest.raises(ValueError, match="a tuple contains itself"):
        gather(inside[1], inside[1])
