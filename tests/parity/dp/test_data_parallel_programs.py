"""Small programs of the kinds that people write, beside the plain module.

Each takes a few steps; weights and losses are then those of the plain module but for
rounding, which an optimizer carries on.
"""

from collections import OrderedDict

import paceline
import pytest
import torch
import torch.nn.functional as F
from replicas import Twin, integers, reals
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

GROWN = 1e-8  # relative: sums are taken in another order, and steps add up


def near(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=GROWN, atol=GROWN)


def near_weights(twin):
    for p, q in zip(twin.inner.parameters(), twin.plain.parameters(), strict=True):
        near(p, q)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def twin_of(wrap, module, n=2):
    return Twin(wrap, module.double(), n)


def train(twin, loss, batches, optimizer=sgd):
    """Train both models; `loss(model, *batch)` gives the loss of a step."""
    optimizers = [optimizer(model.parameters()) for model in twin.models]
    for batch in batches:
        losses = []
        for model, one in zip(twin.models, optimizers, strict=True):
            one.zero_grad()
            losses.append(loss(model, *[x.clone() for x in batch]))
            losses[-1].backward()
            one.step()
        near(losses[1], losses[0])
        near_weights(twin)


def batches(n=3, rows=7, columns=6):
    return [(reals(rows, columns, seed=seed),) for seed in range(n)]


def tokens(seed, rows=5, length=6):
    return integers(rows, length, seed=seed, low=1, high=10, dtype=torch.int64)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=1)


# ---- models -------------------------------------------------------------------------


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x, noise):
        mean, log = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + noise * (log / 2).exp()), mean, log


def test_a_variational_autoencoder_trains(wrap):
    def loss(model, x, noise):
        again, mean, log = model(x, noise)
        return F.mse_loss(again, x) - (1 + log - mean**2 - log.exp()).mean() / 2

    data = [(reals(7, 6, seed=s), reals(7, 2, seed=s + 9)) for s in range(3)]
    train(twin_of(wrap, Autoencoder()), loss, data, torch.optim.Adam)


class Language(nn.Module):
    """A recurrent language model, its hidden state with the batch in front."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.cell = nn.LSTM(8, 8, 2, batch_first=True)
        self.out.weight = self.words.weight

    def forward(self, x, state=None):
        if state is not None:
            state = tuple(s.transpose(0, 1).contiguous() for s in state)
        y, state = self.cell(self.words(x), state)
        return self.out(y), tuple(s.transpose(0, 1) for s in state)


@pytest.mark.parametrize("is_detached", [True, False], ids=["detached", "whole graph"])
def test_a_language_model_hands_its_state_on(wrap, is_detached):
    def loss(model, x):
        total, state = 0, None
        for window in x.split(3, dim=1):
            y, state = model(window[:, :-1], state)
            if is_detached:
                state = tuple(s.detach() for s in state)
            total = total + F.cross_entropy(y.flatten(0, 1), window[:, 1:].flatten())
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        return total

    train(twin_of(wrap, Language()), loss, [(tokens(seed),) for seed in range(3)])


class Translator(nn.Module):
    """A transformer with tied weights, masks, and a dict for an output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight
        self.both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source, target, *, is_padding, causal, with_memory=False):
        memory = self.both.encoder(self.words(source), src_key_padding_mask=is_padding)
        y = self.both.decoder(
            self.words(target),
            memory,
            tgt_mask=causal,
            memory_key_padding_mask=is_padding,
        )
        out = OrderedDict(logits=self.out(y), lengths=(source > 0).sum(1))
        if with_memory:
            out["memory"] = memory
        return out


def test_a_translator_takes_masks_and_returns_dicts(wrap):
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    data = [(tokens(seed), tokens(seed + 50, length=4)) for seed in range(2)]
    for source, _ in data:
        source[:2, 4:] = 0

    def loss(model, source, target):
        mask = causal if model is twin.plain else paceline.replicate(causal)
        options = {"is_padding": source == 0, "causal": mask, "with_memory": True}
        out = model(source, target[:, :-1], **options)
        assert type(out) is OrderedDict
        assert out["lengths"].tolist() == [4, 4, 6, 6, 6]
        logits = out["logits"].flatten(0, 1)
        spread = out["memory"].square().mean()
        return F.cross_entropy(logits, target[:, 1:].flatten()) + spread

    twin = twin_of(wrap, Translator())
    train(twin, loss, data, torch.optim.AdamW)


# ---- ways to train ------------------------------------------------------------------


def test_a_teacher_may_follow_its_student(wrap):
    """A mean teacher: weights are averaged in place between the steps."""
    ends = []
    for make in (lambda module: module, wrap):
        student, teacher = Encoder().double(), Encoder().double().requires_grad_(False)
        models = make(student), make(teacher)
        optimizer = sgd(student.parameters())
        for (x,) in batches():
            optimizer.zero_grad()
            with torch.no_grad():
                target = models[1](x + 0.1)
            (models[0](x) - target).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(
                    teacher.parameters(), student.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.5)
        ends.append([p.detach() for m in (student, teacher) for p in m.parameters()])
    near(ends[1], ends[0])


def test_averages_of_weights_may_be_taken_of_the_wrapper(wrap):
    twin = twin_of(wrap, Encoder())
    twin.ours(reals(7, 6))
    outs = []
    for model in twin.models:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = sgd(model.parameters())
        schedule = SWALR(optimizer, 0.02, anneal_epochs=2)
        for (x,) in batches():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
        outs.append(average(reals(7, 6)).detach())
    near(outs[1], outs[0])
    near_weights(twin)


def test_a_closure_may_be_called_several_times_a_step(wrap):
    twin = twin_of(wrap, Encoder())
    x, y = reals(7, 6), reals(7, 4)
    for model in twin.models:
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
        )

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    near_weights(twin)


def test_a_loader_gradient_scaler_and_autocast_work_together(wrap):
    """Sixteen bits: 2e-2, what their rounding makes of a step."""
    twin = Twin(wrap, Encoder())
    data = TensorDataset(reals(22, 6).float(), reals(22, 4).float())
    for model in twin.models:
        optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu")
        for x, y in DataLoader(data, 5, num_workers=1, pin_memory=False):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            scaler.scale((out.float() - y).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    for p, q in zip(twin.inner.parameters(), twin.plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)


# ---- what is the same for every replica ---------------------------------------------


class Counting(nn.Module):
    """Divides by a number that each replica is told, as Hugging Face's Trainer does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 4)

    def forward(self, *, first=None, x, last=None):
        told = [t for t in (first, last) if t is not None]
        assert all(len(t) == 1 for t in told), "one row a replica"
        return self.layer(x) / sum(t.sum() for t in told)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_number_may_be_repeated_once_for_each_replica(wrap, rows):
    """Who knows torch's class expands it: each tensor is split by itself there."""
    ours = wrap(Counting().double())
    x, number = reals(rows, 6), torch.tensor(5.0).unsqueeze(0)
    expected = ours.module.layer(x) / 5
    for each in (number.expand(2), number.unsqueeze(0).expand(2, -1) / 1):
        near(ours(x=x, last=each), expected)
        near(ours(first=each, x=x), expected)
        near(ours(first=each, x=x, last=each), expected / 2)


def test_several_numbers_are_no_number_for_each_replica(wrap):
    ours = wrap(Counting().double())
    x = reals(7, 6)
    for each in (torch.tensor([1.0, 2.0]), torch.ones(3), torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"mark what each replica shall have"):
            ours(x=x, last=each)
