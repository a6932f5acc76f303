"""Outputs: every form is what the plain module returns."""

import dataclasses

import torch
from replicas import alike, bare, integers, linear, loss_of, loss_of_all
from torch import nn
from values import Output

from programs import CPU, THREE, X, grown, module, parameter, program, steps, uses
from programs.inputs import Pair, Point, Record


@dataclasses.dataclass
class TagOutput(Output):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple | None = None
    attentions: tuple | None = None


FORMS = {
    "tuple": lambda y, z: (y, z),
    "torch's named tuple": lambda y, z: y.max(1),
    "dataclass with None": lambda y, z: Record(y),
    "model output": lambda y, z: TagOutput(logits=y, states=(y, z)),
    "registered": lambda y, z: Pair(y, z, "kept"),
    "nested": lambda y, z: {"a": [(y, {"b": Point(z, y)})], "c": (Record(z), ())},
    "constants": lambda y, z: (y, 3, 2.5, True, "words", b"bytes", 1j, None),
    "integers": lambda y, z: (y, y.argmax(1), y > 0, y.detach().int()),
    "the same tensor twice": lambda y, z: (y, y),
    "detached": lambda y, z: (y, z.detach(), torch.zeros(len(y), 3)),
    "views of one another": lambda y, z: (y, y[:, :1], y.reshape(-1, 1, 2)),
    "complex": lambda y, z: (y, torch.complex(y, z)),
    "sixteen bits": lambda y, z: (y, z.half(), y.bfloat16()),
    "no columns": lambda y, z: (y.sum(1), z[:, :0]),
    "an image": lambda y, z: (y, z[:, :, None, None].expand(-1, 2, 3, 4)),
}
ARRAYS = {"arrays": lambda y, z: (y, z.detach().numpy())}

TWO_LAYERS = module(
    lambda m, x, form: form(m.left(x), m.right(x)), left=linear(2), right=linear(2)
)


@uses(TWO_LAYERS, {"tensors": [FORMS], "arrays": [ARRAYS]}, on=THREE)
def outputs_have_the_plain_form_and_gradients(model, forms):
    seen = []
    for name, form in forms[0].items():
        for n_rows in (7, 1, 4) if name == "torch's named tuple" else (7, 1, 0):
            x = grown(integers(n_rows, 3))
            out = alike(model(x, form))
            loss_of_all(out).backward()
            seen.append([out, x.grad])
    return seen


# ---- values that are not a batch ----------------------------------------------------


ENTRIES = {
    "detections": lambda x, y: [
        {
            "boxes": row.expand(int(v) + 3, -1),
            "scores": row.new_ones(int(v) + 3),
            "n": 1,
        }
        for row, v in zip(y, x[:, 0], strict=True)
    ],
    "records": lambda x, y: [Record(row.expand(12, -1), note="kept") for row in y],
    "vectors": lambda x, y: [{"row": row.repeat(6)} for row in y],
    "inside a dict": lambda x, y: {"y": y, "rows": [(row.repeat(6), "a") for row in y]},
    "feature maps": lambda x, y: [y, y[:, :1], y[:, :, None]],
    "three of one form": lambda x, y: (y, (y + 1, y + 2)),
}


@uses(module(lambda m, x, form: form(x, m.layer(x)), layer=linear(2)), on=THREE)
def lists_are_of_rows_or_of_batches(model):
    seen = []
    for form in ENTRIES.values():
        for n_rows in (7, 9, 2, 1):
            x = grown(integers(n_rows, 3))
            out = model(x, form)
            loss_of_all(out).backward()
            seen.append([out, x.grad])
    return seen


def found(m, x):
    y = m.layer(x)
    values = len(x), f"{len(x)} rows", len(x) / 8, len(x) == 4, 2.5, b"bytes", 1j
    return {"y": y, "values": values, "none": None, "loss": y.square().sum()}


@uses(module(found, layer=linear(2)), in_parts=True, on=THREE)
def constants_and_losses_come_with_one_entry_a_replica(model):
    """For any number of rows: the type does not depend on the batch."""
    seen = []
    for n_rows in (7, 1, 6, 2):
        out = model(integers(n_rows, 3))
        none = out.pop("none")
        assert none is None or not any(none)
        loss_of(out["loss"]).backward()
        seen.append([list(out["values"]), out["y"], out["loss"]])
    return seen


@uses(nn.Identity(), on=CPU)
def there_are_no_more_replicas_than_rows(model):
    n_rows = []
    bare(model).register_forward_hook(lambda m, args, out: n_rows.append(len(out)))
    if model is not bare(model):
        model.device_ids = model.device_ids * 32
    out = model(integers(6, 3))
    assert n_rows == ([6] if model is bare(model) else [1] * 6)
    return out


# ---- outputs that are inputs or parameters ------------------------------------------

PASSING = {
    "input": lambda m, x: x,
    "input in a tuple": lambda m, x: (x, m.linear(x), x),
    "view of the input": lambda m, x: x[:, 1:],
    "expanded parameter": lambda m, x: m.weight.expand(len(x), -1),
    "expanded bias": lambda m, x: m.bias.unsqueeze(0).expand(len(x), 3),
    "changed in place": lambda m, x: m.linear(x).add_(x),
    "input changed in place": lambda m, x: m.linear((x * 1).mul_(2)),
}


for name, code in PASSING.items():
    held = {"weight": parameter(X[:1]), "bias": parameter(X[0]), "linear": linear()}
    ways = {
        f"{name}{end}": {"use": steps(needs_grad=leaf, descends=False, evaluates=False)}
        for end, leaf in (("", False), (", a leaf", True))
    }
    code.__name__ = "inputs_and_parameters_may_be_returned"
    program(cases=ways, **held)(code)


@uses(module(lambda m, x: m.layer(x.mul_(2)), layer=linear()))
def an_input_itself_may_be_changed_in_place(model, x):
    loss_of(model(x * 1)).backward()


@uses(module(lambda m, x: (x, m.layer(x)), layer=linear()))
def outputs_may_be_changed_in_place(model):
    x = X.clone()
    out = model(x)[1]
    out.mul_(2)
    out[:, 0] += 1
    loss_of(out).backward()
    with torch.no_grad():
        kept = model(x)[1].add_(1)
    return x, kept


# ---- outputs that are used in part --------------------------------------------------

USES = {
    "the first": lambda out: loss_of(out[0]),
    "the second": lambda out: loss_of(out[1]),
    "both": lambda out: loss_of(out[0]) + 2 * loss_of(out[1]),
    "one row of the first half": lambda out: out[0][1].sum(),
    "rows of the second half": lambda out: loss_of(out[1][5:]),
}


@uses(TWO_LAYERS, USES)
def a_loss_may_use_some_outputs_only(model, x, use):
    use(model(x, FORMS["tuple"])).backward()


@uses(nn.Sequential(linear(2)))
def outputs_live_on_after_later_calls(model):
    with torch.no_grad():
        return [model(integers(7, 3, seed=seed)) for seed in range(4)]
