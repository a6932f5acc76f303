"""Models of the kinds that people write, modules of other makes, and odd ones."""

from collections import OrderedDict

import paceline
import torch
import torch.nn.functional as F
from replicas import (
    F64,
    Parent,
    accumulate,
    bare,
    beside,
    grow,
    integers,
    linear,
    loss_of,
    net,
    reals,
    smooth_net,
    step,
)
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from programs import Made, X, grown, module, steps, trains, uses

# ---- modules of other makes ---------------------------------------------------------


def holder(inner, again=None):
    return Parent(nn.Sequential(linear(), inner, *([inner] if again else [])))


def exported():
    shapes = ({0: torch.export.Dim("rows")},)
    return torch.export.export(net(), (X,), dynamic_shapes=shapes).module()


def compiled_in_place():
    made = Parent(linear())
    made.compile(backend="eager")
    made.inner.compile(backend="eager")
    return made


trains(
    {
        "a script": lambda: torch.jit.script(net()),
        "a script inside": lambda: holder(torch.jit.script(linear())),
        "a shared script": lambda: holder(torch.jit.script(linear()), True),
        "a trace": lambda: torch.jit.trace(net(), X),
        "a trace inside": lambda: holder(torch.jit.trace(linear(), X)),
        "compiled": lambda: torch.compile(net(), backend="eager"),
        "compiled inside": lambda: holder(torch.compile(linear(), backend="eager")),
        "compiled in place": compiled_in_place,
        "a graph": lambda: torch.fx.symbolic_trace(holder(linear())),
        "exported": exported,
    },
    needs_grad=False,
    evaluates=False,
    n=3,
)


def compile_in_place(model):
    model.compile(backend="eager")
    return model


def compile_module_later(model):
    model(X)
    compile_in_place(bare(model))
    return model


COMPILES = {
    "round": lambda model: torch.compile(model, backend="eager"),
    "in place": compile_in_place,
    "the module later": compile_module_later,
    "with operations round it": lambda model: torch.compile(
        lambda x: model(x * 1) + 0, backend="eager"
    ),
}


@uses(net, COMPILES)
def a_compiled_wrapper_trains_as_the_plain_module(model, compiles):
    torch._dynamo.reset()
    accumulate(compiles(model))


# ---- models -------------------------------------------------------------------------


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2).double()


def convolutions():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()
    return nn.Sequential(
        *layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ).double()


def attention():
    def forward(m, x):
        return torch.cat(m.attention(x, x, x), 2)

    return module(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True))


MAKES = {
    "transformer": (transformer, (7, 5, 8)),
    "convolutions": (convolutions, (7, 2, 4, 4)),
    "attention": (lambda: attention().double(), (7, 5, 8)),
}

for name, (make, shape) in MAKES.items():
    trains(
        {f"a_model[{name}]": make},
        steps(
            nn.Module.eval,
            x=lambda seed, s=shape: (reals(*s, seed=seed),),
            descends=False,
        ),
        exact=False,
    )


def tokens(seed, rows=5, length=6):
    return integers(rows, length, seed=seed, low=1, high=10, dtype=torch.int64)


def encoder():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return module(lambda m, x: F.normalize(m.layers(x), dim=1), layers=layers).double()


def read(m, x, state=None):
    """Return words and a hidden state, with the batch in front."""
    if state is not None:
        state = tuple(s.transpose(0, 1).contiguous() for s in state)
    y, state = m.cell(m.words(x), state)
    return m.out(y), tuple(s.transpose(0, 1) for s in state)


def language():
    words, out = nn.Embedding(11, 8), nn.Linear(8, 11)
    out.weight = words.weight
    cell = nn.LSTM(8, 8, 2, batch_first=True)
    return module(read, words=words, out=out, cell=cell).double()


@uses(language, {"detached": True, "whole graph": False}, exact=False)
def a_language_model_hands_its_state_on(model, is_detached):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(2):
        total, state = 0, None
        for window in tokens(seed).split(3, dim=1):
            y, state = model(window[:, :-1], state)
            if is_detached:
                state = tuple(s.detach() for s in state)
            total = total + F.cross_entropy(y.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return total


def translate(m, source, target, *, is_padding, causal):
    memory = m.both.encoder(m.words(source), src_key_padding_mask=is_padding)
    y = m.both.decoder(
        m.words(target), memory, tgt_mask=causal, memory_key_padding_mask=is_padding
    )
    return OrderedDict(logits=m.out(y), lengths=(source > 0).sum(1), memory=memory)


def translator():
    words, out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    out.weight = words.weight
    both = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return module(translate, words=words, out=out, both=both).double()


@uses(translator, exact=False)
def a_translator_takes_masks_and_returns_dicts(model):
    causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
    mask = causal if model is bare(model) else paceline.replicate(causal)
    source, target = tokens(0), tokens(50, length=4)
    source[:2, 4:] = 0
    out = model(source, target[:, :-1], is_padding=source == 0, causal=mask)
    loss = F.cross_entropy(out["logits"].flatten(0, 1), target[:, 1:].flatten())
    (loss + out["memory"].square().mean()).backward()
    return out


# ---- ways to train ------------------------------------------------------------------


@uses(encoder, exact=False)
def a_teacher_may_follow_its_student(model):
    """A mean teacher: weights are averaged in place between the steps."""
    teacher = beside(model, encoder().requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(3):
        x = reals(7, 6, seed=seed)
        with torch.no_grad():
            target = teacher(x + 0.1)
        optimizer.zero_grad()
        (model(x) - target).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_([*teacher.parameters()], [*model.parameters()], 0.5)
    return list(teacher.parameters())


@uses(encoder, exact=False)
def averages_of_weights_may_be_taken_of_the_wrapper(model):
    model(reals(7, 6))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = SWALR(optimizer, 0.02, anneal_epochs=2)
    for seed in range(3):
        optimizer.zero_grad()
        model(reals(7, 6, seed=seed)).sum().backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    return average(reals(7, 6)).detach()


@uses(encoder, exact=False)
def a_closure_may_be_called_several_times_a_step(model):
    x, y = reals(7, 6), reals(7, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    model.zero_grad()
    with torch.no_grad():  # sums in another order
        for p in model.parameters():
            p.copy_(p.round(decimals=6))


# ---- what is the same for every replica ---------------------------------------------


def counting(m, *, first=None, x, last=None):
    told = [t for t in (first, last) if t is not None]
    assert all(len(t) == 1 for t in told), "one row a replica"
    return m.layer(x) / sum(t.sum() for t in told)


@uses(module(counting, layer=linear()), [1, 2, 7])
def a_number_may_be_repeated_once_for_each_replica(model, n_rows):
    """As Hugging Face's Trainer does: torch's class splits each tensor by itself."""
    x, number, outs = integers(n_rows, 3), torch.tensor([5.0]), []
    n = len(getattr(model, "device_ids", "1"))
    for each in (number.expand(n), number.unsqueeze(0).expand(n, -1) / 1):
        outs += [model(x=x, last=each), model(first=each, x=x)]
        outs.append(model(first=each, x=x, last=each))
    return outs


# ---- odd ones -----------------------------------------------------------------------


class Marked(torch.Tensor):
    """A subclass with a meaning."""


@uses(module(lambda m, x: torch.full((len(x),), float(type(x) is Marked))))
def tensors_of_a_subclass_keep_their_type(model):
    return model(X.as_subclass(Marked))


@uses(smooth_net, exact=False)
def a_trace_of_the_wrapper_computes_what_it_is_given(model):
    model(reals(7, 3))
    traced = torch.jit.trace(model, reals(7, 3))
    before = traced(reals(9, 3, seed=5))
    grow(model)
    return before, traced(reals(9, 3, seed=5))


@uses(smooth_net, {"saved": False, "again": True}, exact=False)
def a_checkpoint_round_a_wrapper_in_a_wrapper(model, use_reentrant):
    """The inner wrapper calls its module plainly: it runs once, and again, whole."""
    n_rows = []
    bare(model).register_forward_pre_hook(lambda m, args: n_rows.append(len(args[0])))

    def forward(m, x):
        return checkpoint(m.inner, m.layer(x), use_reentrant=use_reentrant)

    outer = beside(model, Made(forward, {"layer": linear(), "inner": model}))
    n = len(getattr(model, "device_ids", "1"))
    step(outer, integers(6, 3)).backward()
    assert n_rows == [6 // n] * 2 * n


@uses(net)
def functional_calls_work_round_the_wrapper(model):
    outer, weight = Parent(model), grown(torch.full((4, 3), 2.0, **F64))
    model(X)
    name = next(name for name, _ in outer.named_parameters())
    out = torch.func.functional_call(outer, {name: weight}, (X,))
    loss_of(out).backward()
    assert next(bare(model).parameters()).grad is None
    step(outer, X).backward()
    return out, weight.grad
