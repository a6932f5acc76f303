"""What goes in, by kind of number and of memory: arrays, dtypes, layouts, sequences."""

import numpy as np
import pytest
import torch
from replicas import (
    Twin,
    assert_close,
    assert_same,
    integer_weights,
    integers,
    loss_of,
    net,
    reals,
)
from torch import nn
from torch.nn.utils import rnn

# ---- arrays -------------------------------------------------------------------------


class Arrays(nn.Module):
    """Takes an array, returns one, and learns."""

    def __init__(self):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2))

    def forward(self, batch):
        array = batch["array"]
        out = self.linear(torch.from_numpy(array))
        return out, array * 2, out.detach().numpy(), type(array).__name__


def test_arrays_are_split_and_come_back_as_arrays(wrap):
    twin = Twin(wrap, Arrays())
    batch = {"array": integers(7, 3).numpy()}
    twin.step(lambda model: loss_of(model(batch)[0]))
    theirs, mine = twin.run(lambda model: model(batch))
    assert_same(mine, theirs)
    assert isinstance(mine[1], np.ndarray)
    assert mine[3] == "ndarray"


class Echo(nn.Module):
    """Returns what it was given, beside what it learns from it."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.linear = integer_weights(nn.Linear(3, 2), dtype=dtype)

    def forward(self, x):
        if isinstance(x, np.ndarray):
            return self.linear(torch.from_numpy(x.astype(np.float64))), x, str(x.dtype)
        return self.linear(x.to(self.linear.weight.dtype)), x, str(x.dtype)


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "int8", "int16", "int32", "int64", "bool"]
)
def test_arrays_keep_their_type_of_number(wrap, dtype):
    array = integers(7, 3).numpy().astype(dtype)
    twin = Twin(wrap, Echo())
    theirs, mine = twin.run(lambda model: model(array))
    assert_same(mine, theirs)


def test_strided_arrays_are_split_along_their_rows(wrap):
    array = np.asfortranarray(integers(14, 6).numpy())[::2, ::2]
    twin = Twin(wrap, Echo())
    theirs, mine = twin.run(lambda model: model(array))
    assert_same(mine, theirs)


# ---- dtypes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ],
    ids=str,
)
def test_inputs_of_any_dtype_arrive_as_they_are(wrap, dtype):
    twin = Twin(wrap, Echo())
    x = integers(7, 3).to(dtype)
    mine = twin.compare(lambda model, x: model(x), x)
    assert mine[2] == str(dtype)
    twin.step(lambda model, x: loss_of(model(x)[0]), x)
    if dtype.is_floating_point:
        twin.step(lambda model, x: loss_of(model(x)[0]), x.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_parameters_of_sixteen_bits_get_exact_gradients(wrap, dtype):
    twin = Twin(wrap, Echo(dtype))
    x = integers(7, 3, dtype=dtype, low=-1, high=1).requires_grad_()
    twin.step(lambda model, x: model(x)[0].sum(), x)


class Complex(nn.Module):
    """A complex layer, and a phase that is real."""

    def __init__(self):
        super().__init__()
        weight = torch.complex(integers(3, 2), integers(3, 2, seed=1))
        self.weight = nn.Parameter(weight)
        self.scale = nn.Parameter(integers(2, seed=2))

    def forward(self, z):
        return (z @ self.weight) * self.scale


def test_complex_tensors_and_parameters_work(wrap):
    twin = Twin(wrap, Complex())
    z = torch.complex(integers(7, 3), integers(7, 3, seed=3)).requires_grad_()
    twin.compare(lambda model, z: model(z), z)
    twin.step(lambda model, z: (model(z) * model(z).conj()).real.sum(), z)


def test_a_conjugated_input_is_taken_as_what_it_means(wrap):
    twin = Twin(wrap, Complex())
    z = torch.complex(integers(7, 3), integers(7, 3, seed=3))
    twin.compare(lambda model, z: model(z.conj()), z)


# ---- memory -------------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = integer_weights(nn.Conv2d(3, 4, 3, padding=1))

    def forward(self, x):
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        return self.conv(x), is_last, x.is_contiguous()


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_images_keep_their_memory_format(wrap, last):
    twin = Twin(wrap, Convolution())
    form = torch.channels_last if last else torch.contiguous_format
    x = integers(7, 3, 5, 6).to(memory_format=form)
    twin.step(lambda model, x: loss_of(model(x)[0]), x.requires_grad_())
    theirs, mine = twin.run(lambda model, x: model(x), x)
    assert mine[1:] == (last, not last)
    assert mine[0].is_contiguous(memory_format=form)
    assert theirs[0].is_contiguous(memory_format=form)


VIEWS = {
    "transposed": lambda x: x.T,
    "every second row": lambda x: x.T.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:, :1].T.expand(7, 3),
    "flipped": lambda x: x.T.flip(0),
    "with an offset": lambda x: torch.cat([x, x], 1).T[7:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_any_strides_are_split_by_rows(wrap, view):
    twin = Twin(wrap, net())
    x = integers(3, 7).requires_grad_()
    twin.compare(lambda model, x: model(view(x)), x)
    twin.step(lambda model, x: loss_of(model(view(x))), x)


# ---- sequences ----------------------------------------------------------------------


class Tagger(nn.Module):
    """Packs inside forward, as users do whose lengths are an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True).double()
        self.out = nn.Linear(8, 2).double()

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        states, (h, _) = self.lstm(packed)
        padded, sizes = rnn.pad_packed_sequence(
            states, batch_first=True, total_length=x.shape[1]
        )
        return self.out(padded), h.transpose(0, 1), sizes


LENGTHS = torch.tensor([2, 5, 3, 1, 2, 4, 1])  # the longest is in the first half


def test_recurrent_nets_pack_their_own_rows(wrap):
    twin = Twin(wrap, Tagger())
    x = reals(7, 5, 3).requires_grad_()
    twin.compare(lambda model, x: model(x, LENGTHS), x, exact=False)

    def loss(model, x):
        tags, h, _ = model(x, LENGTHS)
        return loss_of(tags) + loss_of(h)

    twin.step(loss, x, exact=False)


class Reader(nn.Module):
    """Takes a sequence that its user has packed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4).double()

    def forward(self, packed):
        _, (h, _) = self.lstm(packed)
        return h[-1], str(packed.batch_sizes.tolist())


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "unsorted"])
def test_packed_sequences_are_split_by_rows(wrap, is_sorted):
    lengths = LENGTHS.sort(descending=True).values if is_sorted else LENGTHS

    def packed(x):
        return rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=is_sorted
        )

    twin = Twin(wrap, Reader())
    x = reals(7, 5, 3).requires_grad_()
    theirs, mine = twin.run(lambda model, x: model(packed(x)), x)
    assert_close(mine[0], theirs[0], exact=False)
    # Sequences that still run at each time, in rows 0 to 3 and in rows 4 to 6.
    by_time = [(lengths > t).long() for t in range(5)]
    halves = [[int(part.sum()) for part in (a[:4], a[4:])] for a in by_time]
    columns = zip(*halves, strict=True)
    assert list(mine[1]) == [str([n for n in column if n]) for column in columns]
    twin.step(lambda model, x: loss_of(model(packed(x))[0]), x, exact=False)
