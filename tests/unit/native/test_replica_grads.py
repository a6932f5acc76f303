"""ReplicaGrads: gradients that replicas leave in shared memory."""

import gc
import weakref

import pytest
import torch
from paceline import _native
from paceline._compat import torch_core
from support.leaks import assert_leaves_nothing
from torch import nn

torch_core.attach()

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]

SIXTEEN_BITS = [
    (torch.float16, 2048.0),  # from here on, neighbours are 2 apart
    (torch.bfloat16, 256.0),
]


# ---- ReplicaGrads -------------------------------------------------------------------


def make_slots(params, n_rows=1, like=None):
    """Return slots and their memory, of which every number is wrong at first."""
    memory = [
        [torch.full_like(x.detach(), 77) for x in (like or params)]
        for _ in range(n_rows)
    ]
    return _native.ReplicaGrads(params, memory), memory


def hooked_row(params):
    """Return slots of one row that are the parameters' hooks, and their memory."""
    slots, memory = make_slots(params)
    for parameter, hook in zip(params, slots.hooks(0), strict=True):
        parameter.register_post_accumulate_grad_hook(hook)
    return slots, memory[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hook_moves_the_gradient_into_its_slot(dtype):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2))]
    slots, row = hooked_row(params)
    slots.open()
    (params[0] * 5).sum().abs().backward()
    assert row[0].tolist() == [5] * 3
    assert params[0].grad is None
    assert slots.sweep()[0] == b"\1\0"
    assert row[1].tolist() == [77.0] * 2  # nobody has touched it


def test_open_slots_are_overwritten_and_others_added_to():
    w = nn.Parameter(torch.ones(2))
    slots, (slot,) = hooked_row([w])
    slots.open()
    assert slots.sweep()[0] == b"\0"
    (w * 3).sum().backward()
    (w * 4).sum().backward()  # the same backward, as checkpointing makes it
    assert slot.tolist() == [7.0, 7.0]
    assert slots.sweep()[0] == b"\1"
    slots.open()
    assert slots.sweep()[0] == b"\0"
    (w * 2).sum().backward()
    assert slot.tolist() == [2.0, 2.0]


def test_hooks_that_are_shut_leave_the_gradient_where_it_is():
    w = nn.Parameter(torch.ones(2))
    slots, (slot,) = hooked_row([w])
    slots.shut(True)
    (w * 3).sum().backward()
    assert slot.tolist() == [77.0, 77.0]  # nobody has touched it
    ((index, gradient),) = slots.fallbacks()
    assert (index, gradient.tolist(), w.grad) == (0, [3.0, 3.0], None)
    slots.shut(False)
    slots.open()
    (w * 4).sum().backward()
    assert slot.tolist() == [4.0, 4.0]


def test_a_gradient_that_fires_twice_in_one_backward_is_summed():
    from torch.utils.checkpoint import checkpoint

    w = nn.Parameter(torch.tensor([2.0, 3.0]))
    slots, (slot,) = hooked_row([w])
    slots.open()
    x = torch.ones(2, requires_grad=True)
    first = checkpoint(lambda x: x * w, x, use_reentrant=True)
    second = checkpoint(lambda x: x * w, first, use_reentrant=True)
    second.sum().backward()
    assert slot.tolist() == [4.0, 6.0]
    assert w.grad is None


def test_a_gradient_of_other_strides_is_put_as_what_it_means():
    w = nn.Parameter(torch.zeros(2, 3))
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    w.grad = torch.arange(6.0).view(3, 2).t()
    hook(w)
    assert slot.tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    w.grad = torch.ones(2, 1).expand(2, 3)
    hook(w)  # added: strides are other ones again
    assert slot.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert slots.sweep()[0] == b"\1"


def test_slots_of_other_strides_than_rows_hold_gradients():
    w = nn.Parameter(torch.zeros(2, 3).t())
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    w.grad = torch.arange(6.0).view(2, 3).t()
    hook(w)
    assert slot.stride() == (1, 3)
    assert slot.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_what_no_slot_can_hold_is_a_stray():
    table = nn.Parameter(torch.ones(4, 2))
    other = nn.Parameter(torch.ones(2))
    slots, row = hooked_row([table, other])
    slots.open()
    rows = nn.functional.embedding(torch.tensor([1, 1]), table, sparse=True)
    (rows.sum() + other.sum()).backward()
    assert slots.sweep()[0] == b"\0\1"
    assert table.grad.is_sparse
    ((index, gradient),) = slots.fallbacks()
    assert index == 0
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    assert table.grad is None
    assert slots.fallbacks() == []
    assert row[0].unique().tolist() == [77.0]


def test_gradients_of_another_dtype_are_fallbacks():
    w = nn.Parameter(torch.ones(2), requires_grad=False)
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    w.data = w.data.double()  # converted since
    w.grad = torch.ones(2, dtype=torch.float64)
    hook(w)
    ((index, gradient),) = slots.fallbacks()
    assert (index, gradient.dtype, gradient.tolist()) == (0, torch.float64, [1.0] * 2)
    assert slot.tolist() == [77.0] * 2


def test_a_hook_without_a_gradient_does_nothing():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    (hook,) = slots.hooks(0)
    slots.open()
    assert hook(w) is None
    assert slots.sweep()[0] == b"\0"
    assert slot.tolist() == [77.0] * 2


def test_a_hook_outlives_its_slots_and_leaves_gradients_alone():
    w = nn.Parameter(torch.ones(2))
    slots, memory = make_slots([w])
    (hook,) = slots.hooks(0)
    w.register_post_accumulate_grad_hook(hook)
    del slots, memory
    gc.collect()
    w.sum().backward()
    assert w.grad.tolist() == [1.0, 1.0]


def test_hooks_asked_for_twice_serve_the_same_slots():
    w = nn.Parameter(torch.ones(2))
    slots, ((slot,),) = make_slots([w])
    slots.open()
    for hook in (*slots.hooks(0), *slots.hooks(0)):
        w.grad = torch.full((2,), 2.0)
        hook(w)
    assert slot.tolist() == [4.0, 4.0]


def filled(values, dtype=torch.float32, shape=(3,)):
    """Return a parameter, its slots, and rows filled with one value each."""
    w = nn.Parameter(torch.zeros(shape, dtype=dtype))
    slots, memory = make_slots([w], len(values))
    for (slot,), value in zip(memory, values, strict=True):
        slot.fill_(value)
    return w, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("held", [None, 10.0])
def test_every_row_is_added_to_the_gradient(dtype, held):
    w, slots = filled([1, 2, 3, 4], dtype)
    if held is not None:
        w.grad = torch.full_like(w, held)
    before = w.grad
    slots.add((b"\1",) * 4)
    assert w.grad.tolist() == [10 + (held or 0)] * 3
    assert w.grad.dtype == dtype
    assert held is None or w.grad is before
    assert not w.grad.requires_grad


@pytest.mark.parametrize(
    ("masks", "total"),
    [
        ((b"\1", b"\1", b"\1"), 111.0),
        ((b"\1", b"\0", b"\1"), 101.0),
        ((b"\0", b"\1", b"\0"), 10.0),
        ((b"\1", b"\1"), 11.0),
        ((b"\0", b"\0", b"\0"), None),
        ((), None),
    ],
)
def test_masks_say_which_rows_count(masks, total):
    w, slots = filled([1, 10, 100])
    (taken,) = slots.take(masks)
    slots.add(masks)
    for gradient in (w.grad, taken):
        assert gradient is None if total is None else gradient.tolist() == [total] * 3
    w.grad = torch.ones(3)
    slots.add(masks)
    assert w.grad.tolist() == [1 + (total or 0)] * 3


def test_what_is_taken_is_a_new_tensor_each_time():
    w, slots = filled([1, 2])
    (first,) = slots.take((b"\1", b"\1"))
    (second,) = slots.take((b"\1", b"\1"))
    first.add_(100)
    assert second.tolist() == [3.0] * 3
    assert w.grad is None


@pytest.mark.parametrize(("dtype", "edge"), SIXTEEN_BITS)
def test_sixteen_bit_rows_are_summed_with_one_rounding(dtype, edge):
    w, slots = filled([edge, 1, 1], dtype)  # edge + 1 rounds back to edge
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [edge + 2] * 3
    w.grad = torch.full_like(w, edge)
    slots.add((b"\0", b"\1", b"\1"))
    assert w.grad.tolist() == [edge + 2] * 3


def test_rows_are_added_in_the_order_of_replicas():
    big = 2.0**24  # neighbours are 2 apart from here on
    _, slots = filled([1, 1, big])
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [big + 2] * 3
    _, slots = filled([big, 1, 1])
    (taken,) = slots.take((b"\1",) * 3)
    assert taken.tolist() == [big] * 3


def test_gradients_of_other_strides_are_added_to_in_place():
    w, slots = filled([1, 2], shape=(2, 3))
    w.grad = torch.ones(3, 2).t()
    before = w.grad
    slots.add((b"\1", b"\1"))
    assert w.grad is before
    assert w.grad.stride() == (1, 2)
    assert w.grad.tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("is_like", [True, False], ids=["by us", "by torch"])
def test_adding_in_place_counts_as_a_version(is_like):
    w, slots = filled([1], shape=(2, 3))
    w.grad = torch.ones(2, 3) if is_like else torch.ones(3, 2).t()
    before = w.grad._version
    slots.add((b"\1",))
    assert w.grad._version > before


def test_large_gradients_are_summed_to_the_last_element():
    n = 100_003
    w = nn.Parameter(torch.zeros(n))
    slots, memory = make_slots([w], 2)
    for (slot,) in memory:
        slot.copy_(torch.arange(n) % 7)
    slots.add((b"\1", b"\1"))
    assert torch.equal(w.grad, (torch.arange(n) % 7 * 2).float())


def test_parameters_without_elements_have_slots():
    w = nn.Parameter(torch.zeros(0, 2))
    slots, _ = hooked_row([w])
    slots.open()
    (w.sum() + torch.ones(1, requires_grad=True).sum()).backward()
    assert slots.sweep()[0] == b"\1"
    assert slots.take((b"\1",))[0].shape == (0, 2)
    slots.add((b"\1",))
    assert w.grad.shape == (0, 2)


def test_hooks_on_parameters_are_found():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    slots, _ = make_slots(params)
    assert slots.hooked() is None
    first = params[2].register_hook(lambda g: None)
    assert slots.hooked() == b"\0\0\1"
    second = params[0].register_post_accumulate_grad_hook(lambda p: None)
    assert slots.hooked() == b"\1\0\1"
    first.remove()
    assert slots.hooked() == b"\1\0\0"
    second.remove()
    assert slots.hooked() is None


class Whole:
    """A parameter and slots of two rows, for calls that are wrong."""

    def __init__(self):
        self.params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        self.slots, self.memory = make_slots(self.params, 2)

    def rebuilt(self, row, i, view):
        memory = [list(views) for views in self.memory]
        memory[row][i] = view
        return _native.ReplicaGrads(self.params, memory)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda w: _native.ReplicaGrads((), []), TypeError, "must be list"),
        (lambda w: _native.ReplicaGrads(w.params, ()), TypeError, "must be list"),
        (
            lambda w: _native.ReplicaGrads(w.params, []),
            ValueError,
            r"memory has 0 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.ReplicaGrads([], [[]] * 5000),
            ValueError,
            r"memory has 5000 rows: give 1 to \d+",
        ),
        (
            lambda w: _native.ReplicaGrads(w.params, [w.memory[0], ()]),
            ValueError,
            r"memory\[1\] is \(\): give a list of 2 views",
        ),
        (
            lambda w: _native.ReplicaGrads(w.params, [w.memory[0][:1]]),
            ValueError,
            r"memory\[0\] is \[.*\]: give a list of 2 views",
        ),
        (lambda w: w.rebuilt(0, 1, 5), TypeError, "a slot is no strided tensor"),
        (
            lambda w: w.rebuilt(1, 0, torch.zeros(2).double()),
            ValueError,
            r"memory\[1\]\[0\]: give dense views of one layout",
        ),
        (
            lambda w: w.rebuilt(0, 1, torch.zeros(6)[::2]),
            ValueError,
            r"memory\[0\]\[1\]: give dense views of one layout",
        ),
        (
            lambda w: w.slots.add((b"\1\1",) * 3),
            ValueError,
            "masks has 3 entries: there are 2 rows",
        ),
        (
            lambda w: w.slots.take((b"\1\1", b"\1")),
            ValueError,
            r"masks\[1\] is b'\\x01': give 2 bytes",
        ),
        (
            lambda w: w.slots.take((None,)),
            ValueError,
            r"masks\[0\] is None: give 2 bytes",
        ),
        (lambda w: w.slots.add([b"\1\1"]), TypeError, "give a tuple"),
        (lambda w: _native.ReplicaGradHook(), TypeError, "cannot create"),
    ],
    ids=[
        "no list",
        "no list of rows",
        "no rows",
        "many rows",
        "a row that is no list",
        "a short row",
        "no tensor",
        "another dtype",
        "holes",
        "more masks",
        "a short mask",
        "no mask",
        "masks in a list",
        "a hook",
    ],
)
def test_slots_say_what_they_cannot_take(call, kind, words):
    whole = Whole()
    with pytest.raises(kind, match=words):
        call(whole)
    assert [p.grad for p in whole.params] == [None, None]


def test_a_thousand_slots_leave_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    memory = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(2)]
    bad = [memory[0], [torch.zeros(3), torch.zeros(5)]]

    def once():
        slots = _native.ReplicaGrads(params, memory)
        hooks = slots.hooks(0)
        slots.open()
        for parameter, hook in zip(params, hooks, strict=True):
            parameter.grad = torch.ones_like(parameter)
            hook(parameter)
        assert slots.take((slots.sweep()[0],))[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        slots.add((b"\1\1", b"\1\0"))
        assert len(slots.fallbacks()) == 2
        assert slots.hooked() is None
        with pytest.raises(ValueError, match="layout"):
            _native.ReplicaGrads(params, bad)
        with pytest.raises(ValueError, match="masks"):
            slots.add((b"",))

    things = [
        *params,
        *memory,
        *memory[0],
        *memory[1],
        bad,
        _native.ReplicaGrads,
        _native.ReplicaGradHook,
    ]
    assert_leaves_nothing(once, *things)


def test_a_thousand_backwards_through_hooks_leave_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(400))]
    slots, row = hooked_row(params)

    def once():
        slots.open()
        sum((p * p).sum() for p in params).backward()
        assert slots.sweep()[0] == b"\1\1"

    assert_leaves_nothing(once, *params, *row, slots)
    assert [slot.unique().tolist() for slot in row] == [[2.0], [2.0]]


def test_slots_in_a_cycle_with_their_parameter_are_collected():
    w = nn.Parameter(torch.ones(2))
    w.slots, _ = hooked_row([w])
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None
