"""Features of drawn programs: parts of a model, and changes between calls.

A feature is the text of a part of a script: the code outside the class (`outside`), in
``__init__`` and in ``forward``, and statements that change it between two calls, where
`m` is the model.  Some pass an argument, ``given['g$']``: `make` makes it for `n` rows,
and `seen` says what is compared after the call.  ``$`` stands for the number of the
feature in its program, so that one may be drawn twice.  Values are small integers and
halves: all sums are exact.

A forward changes things by assignment, or always to the same value: a replica shares
lists and globals with the others, as in torch.  No feature depends on the identity of a
module (a registry whose keys are modules): replicas are other objects, in torch too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """The text of a part of a program; `changes` are made between its calls."""

    init: str = ""
    forward: str = ""
    changes: tuple[str, ...] = ()
    outside: str = ""
    methods: str = ""
    make: str = ""
    seen: str = ""


LAYERS = {
    "linear": Feature(
        "self.a$ = linear($)",
        "x = self.a$(x)",
        (
            "m.a$.weight.data.add_(1)",
            "memory(m.a$.bias)[1] += 2",
            "m.a$.weight.requires_grad_(not m.a$.weight.requires_grad)",
            "m.a$.weight = nn.Parameter(m.a$.weight.detach() - 1)",
            "m.a$ = linear($ + 50)",
            "m.a$.forward = types.MethodType(lambda self, x: x * 2, m.a$)",
            "m.a$.__dict__.pop('forward', None)",
            "m.a$.bias = None",
            "m.a$ = nn.Sequential(m.a$, nn.ReLU())",
            "m.a$ = nn.Identity()",
            "m.a$.requires_grad_(False)",
            "m.a$.scale = 3",
            "m.a$.weight.data = torch._neg_view(m.a$.weight.data)",
            "m.a$.weight.data = m.a$.weight.data.clone()",
            "m.a$.weight.data = m.a$.weight.data.t()",
            "with torch.no_grad(): m.a$.weight.set_(ints(16, 3).view(4, 4))",
            "nn.init.constant_(m.a$.bias, 2)",
            "torch._foreach_lerp_([m.a$.weight.data], [m.a$.weight.data * 3], 1.0)",
            "nn.utils.vector_to_parameters(ints(20, 3), m.a$.parameters())",
            "m.a$.weight.grad = None",
            "hooks.append(m.a$.register_forward_hook(lambda mod, i, o: o * 2))",
            "hooks.append(m.a$.register_forward_pre_hook(lambda mod, i: (i[0] + 1,)))",
            "hooks.append(m.a$.weight.register_hook(lambda g: g * 2))",
            "[h.remove() for h in hooks]; hooks.clear()",
        ),
        outside="hooks = []",
    ),
    "convolution": Feature(
        "self.c$ = exact(nn.Conv1d(1, 1, 3, padding=1), $)",
        "x = self.c$(x.unsqueeze(1)).squeeze(1)",
        ("m.c$.weight.data[0, 0, 0] = 2", "m.c$.padding_mode = 'circular'"),
    ),
    "norm in eval": Feature(
        "self.n$ = exact(nn.BatchNorm1d(4, eps=0.0), $).eval(); "
        "self.n$.running_var.fill_(4)",
        "x = self.n$.eval()(x)",
        (
            "m.n$.running_mean.add_(2)",
            "m.n$.running_mean.data[1] = 3",
            "m.n$.running_var.fill_(16)",
        ),
    ),
    "dropout of nothing": Feature(
        "self.d$ = nn.Dropout(0.0)", "x = self.d$(x)", ("m.d$.inplace = True",)
    ),
    "shared layer": Feature(
        "self.s$ = linear($); self.t$ = self.s$; self.register_module('none$', None)",
        "x = self.s$(x) - self.t$(x).relu() * (1 + (self.s$ is self.t$))",
        ("m.t$ = linear($ + 9)", "m.t$.weight = m.s$.weight", "m.t$.bias.data.neg_()"),
    ),
    "tied weights": Feature(
        "self.s$ = linear($); self.t$ = linear($); self.t$.weight = self.s$.weight",
        "x = self.s$(x) - self.t$(x).relu()",
        ("m.t$.weight = nn.Parameter(m.s$.weight.detach() + 1)",),
    ),
    "parts made by forward": Feature(
        "self.a$ = linear($); self.kind$ = nn.ReLU",
        "self.f$ = self.kind$(); self.g$ = nn.Sequential(self.a$, self.f$); "
        "x = self.g$(x)",
        (
            "m.kind$ = nn.Identity",
            "m.a$ = linear($ + 5)",
            "m.a$.weight.data.add_(1)",
            "m.a$.bias = nn.Parameter(m.a$.bias.detach() - 1)",
        ),
    ),
    "lists of layers": Feature(
        "self.l$ = nn.ModuleList([linear($), linear($ + 1)]); "
        "self.k$ = nn.ModuleDict({'a': linear($ + 2)})",
        "for layer in [*self.l$, *self.k$.values()]: x = layer(x) + x",
        (
            "m.l$.append(nn.Identity())",
            "m.l$.insert(0, linear(6))",
            "del m.l$[0]",
            "m.k$['b'] = linear(3)",
            "m.l$[0] = linear(5)",
            "m.k$.clear()",
            "m.k$.pop('a')",
        ),
    ),
    "lists of parameters": Feature(
        "self.q$ = nn.ParameterList([ints(4, $), ints(4, $ + 1)]); "
        "self.r$ = nn.ParameterDict({'a': nn.Parameter(ints(4, $ + 2))})",
        "for p in [*self.q$, *self.r$.values()]: x = x + p",
        (
            "m.q$.append(nn.Parameter(ints(4, 9)))",
            "m.q$[0] = nn.Parameter(ints(4, 8))",
            "m.r$['b'] = nn.Parameter(ints(4, 7))",
            "del m.r$['a']",
            "m.q$[0].data.mul_(2)",
        ),
    ),
    "parameters of one memory": Feature(
        "self.e$ = nn.Parameter(ints(4, $)); self.f$ = nn.Parameter(self.e$.data)",
        "x = x + self.e$ - 2 * self.f$",
        ("m.e$.data.add_(1)",),
    ),
    "frozen parameter": Feature(
        "self.z$ = nn.Parameter(ints(4, $), requires_grad=False)",
        "x = x + self.z$",
        (
            "m.z$.add_(1)",
            "m.z$.requires_grad_()",
            "m.register_buffer('z$', m._parameters.pop('z$').data)",
            "m.z$ = None",
            "del m.z$; m.z$ = ints(4, 5)",
            "m.z$.data[::2] += 1",
        ),
    ),
    "flat weights": Feature(
        "self.a$ = linear($); parts = list(self.a$.parameters()); "
        "self.f$ = [nn.utils.parameters_to_vector(parts).detach()]; "
        "nn.utils.vector_to_parameters(self.f$[0], parts); "
        "self.v$ = self.a$.weight.data[0]; "
        "self.register_buffer('w$', self.a$.weight.data[1]); self.u$ = self.w$[1:3]",
        "x = self.a$(x) + self.v$ + self.w$ + self.u$.sum()",
        ("m.f$[0].mul_(2)", "m.a$.weight.data.add_(1)", "m.v$.add_(1)", "m.u$.add_(1)"),
    ),
    "followed layer": Feature(
        "self.q$ = linear($); self.e$ = linear($ + 1).requires_grad_(False); "
        "self.way$ = 'in place'; self.pairs$ = [[self.q$, self.e$]]",
        "[self.follow$(*pair) for pair in self.pairs$]; "
        "x = self.q$(x) + self.e$(x.detach())",
        ("m.way$ = 'by data'", "m.way$ = 'inside data'", "m.way$ = 'by numpy'"),
        methods="""
    def follow$(self, query, key):
        for q, k in zip(query.parameters(), key.parameters()):
            new = (2 * k - q).detach().clamp(-8, 8)
            if self.way$ == "by data":
                k.data = new
            elif self.way$ == "inside data":
                k.data.copy_(new)
            elif self.way$ == "by numpy":
                memory(k)[:] = memory(new)
            else:
                with torch.no_grad():
                    k.copy_(new)
""",
    ),
    "thawed tensors": Feature(
        "self.z$ = nn.Parameter(ints(4, $), requires_grad=False); self.is_on$ = True; "
        "self.register_buffer('c$', ints(4, $ + 1))",
        "[t.requires_grad_() for t in (self.z$, self.c$) if self.is_on$]; "
        "x = x + self.z$ - self.c$",
        ("m.is_on$ = False; m.z$.requires_grad_(False)", "m.is_on$ = True"),
    ),
    "child class": Feature(
        "self.o$ = Child$()",
        "x = self.o$(x)",
        (
            "m.o$.factor = 3",
            "Child$.gain = 4",
            "Child$.forward = lambda self, x: x - self.gain",
            "m.o$.more = linear(2)",
            "m.o$ = Child$()",
            "m.o$.__class__ = Heir$",
            "Child$.bend = staticmethod(lambda x: x * 3)",
            "del m.o$.w",
        ),
        outside="""
class Child$(nn.Module):
    gain = 2
    def __init__(self):
        super().__init__()
        self.factor = 1
        self.w = nn.Parameter(ints(4, $))
    @staticmethod
    def bend(x):
        return x + 1
    def forward(self, x):
        if hasattr(self, "more"):
            x = self.more(x)
        return self.bend(x) * self.gain * self.factor + getattr(self, "w", 0)

class Heir$(Child$):
    def forward(self, x):
        return super().forward(x) + 1
""",
    ),
}

_FACTOR = "x = x + {}"

STATE = {
    "number": Feature(
        "self.k$ = 2",
        "x = x * self.k$; self.k$ = 3 - self.k$",
        ("m.k$ = 3", "m.k$ = True", "m.k$ = torch.tensor(2.0).double()", "m.k$ *= -1"),
    ),
    "counter": Feature(
        "self.k$ = 0", "self.k$ += 1; x = x + self.k$", ("m.k$ = 5", "m.k$ = 0.5")
    ),
    "array": Feature(
        "self.y$ = np.arange(4.0)",
        _FACTOR.format("form(torch.from_numpy(self.y$.copy()).to(x.device))"),
        (
            "m.y$.shape = (1, 4)",
            "m.y$.dtype = np.int64",
            "m.y$[1] = 7",
            "m.y$ = m.y$[::-1]",
            "m.y$ = np.ones((1, 4))",
            "m.y$.sort()",
        ),
    ),
    "tensor": Feature(
        "self.t$ = ints(4, $)",
        _FACTOR.format("form(self.t$)"),
        (
            "m.t$.data = m.t$.data.view(torch.int64)",
            "m.t$.requires_grad_()",
            "m.t$.add_(1)",
            "m.t$.data[2] = 5",
            "memory(m.t$)[0] = 4",
            "m.t$.data = m.t$.data.view(1, 4)",
            "m.t$ = m.t$.long()",
            "m.t$ = ints(8, $)[::2]",
            "m.t$ = ints(8, $)[::2]; m.t$.data[3] = 9",
            "m.t$.data += 1",
            "m.t$ = nn.Parameter(ints(4, 3))",
        ),
    ),
    "tensors in containers": Feature(
        "self.t$ = [ints(4, $), [ints(4, $ + 1)]]",
        _FACTOR.format("form(self.t$[0]) - self.t$[1][0]"),
        (
            "m.t$[0] = ints(4, 9)",
            "m.t$[1] = (m.t$[0], None)",
            "m.t$[1][0].add_(1)",
            "m.t$[0].data[2] = 5",
            "m.t$ = tuple(m.t$)",
            "m.t$ = {0: ints(4, 3), 1: {0: ints(4, 6)}}",
            "m.t$ = collections.OrderedDict({0: ints(4, 6), 1: [ints(4, 3)]})",
            "m.t$ = [ints(4, 5).requires_grad_(), [nn.Parameter(ints(4, 6))]]",
            "m.t$ = nn.ParameterList([ints(4, 2), ints(1, 4)])",
        ),
    ),
    "views": Feature(
        "self.t$ = ints(8, $); self.u$ = self.t$[::2]",
        _FACTOR.format("form(self.u$) + self.t$[:4]"),
        ("m.u$.data.add_(1)", "m.t$.add_(1)", "m.t$ = m.t$.clone()"),
    ),
    "buffer": Feature(
        "self.register_buffer('b$', ints(4, $))",
        "x = x + form(self.b$)",
        (
            "m.b$.data = m.b$.data.view(2, 2).t().reshape(4)",
            "m.b$.requires_grad_()",
            "m.b$.add_(1)",
            "m.b$.data[1] = 3",
            "m.b$ = ints(4, 8)",
            "m.b$ = m.b$ > 0",
            "m.b$ = m.b$ > 0; m.b$.data = m.b$.data.view(torch.uint8)",
            "m.b$.data = m.b$.data.view(torch.int64)",
            "m.b$ = m.b$.to(torch.uint8)",
            "m.b$ = m.b$.reshape(1, 4)",
            "del m.b$; m.b$ = ints(4, 6)",
            "m.b$ = None; m.b$ = ints(4, 2)",
            "m.register_parameter('b$', nn.Parameter(m._buffers.pop('b$')))",
        ),
    ),
    "buffer written by forward": Feature(
        "self.register_buffer('b$', ints(4, $))",
        "x = x + self.b$.clone(); self.b$.add_(1)",
        ("m.b$.zero_()", "m.b$ = m.b$ * 2"),
    ),
    "buffer of any layout": Feature(
        "self.register_buffer('b$', torch.ones(3))",
        "x = x + self.b$.double().sum()",
        (
            "m.b$ = torch.ones(4, 6)[:, :3]",
            "m.b$ += 3",
            "m.b$ = torch.ones(1, 3).expand(2, 3)",
            "m.b$ = torch.ones(4, 3)[::2]",
            "m.b$ = torch.ones(4, 3)[:, 1]",
            "m.b$ = torch.arange(12.0).view(3, 4).t()[::2]",
            "m.b$ = torch.arange(12.0).view(3, 4).t()",
            "m.b$.mul_(3)",
            "m.b$ = torch.ones(2, dtype=torch.uint16)",
        ),
    ),
    "buffer of two owners": Feature(
        "self.x$ = nn.Module(); self.x$.register_buffer('t', ints(4, $)); "
        "self.y$ = nn.Module(); self.y$.register_buffer('t', self.x$.t)",
        "x = x * self.x$.t + self.y$.t * (1 + (self.x$.t is self.y$.t))",
        (
            "m.y$.t = ints(4, 5)",
            "m.y$.t.add_(1)",
            "m.x$.t = ints(4, 6)",
            "m.x$.t.add_(1)",
            "m.x$.t = ints(4, 7)",
            "m.x$.t = m.y$.t",
        ),
    ),
    "buffer counted in any way": Feature(
        "self.register_buffer('b$', torch.zeros(1).double()); self.way$ = 'data'",
        "self.count$(); x = x + self.b$.clone()",
        ("m.way$ = 'swap'", "m.way$ = 'copy'", "m.b$.data.zero_()"),
        methods="""
    def count$(self):
        if self.way$ == "data":
            self.b$.data.add_(1)
        elif self.way$ == "swap":
            self._buffers.update(b$=self.b$.clone().add_(1))
        else:
            self.b$.copy_(torch.full((1,), float(self.b$) + 1))
""",
    ),
    "buffers made anew by forward": Feature(
        "self.register_buffer('b$', ints(1, $)); self.register_buffer('d$', ints(1))",
        "self.b$ = self.b$ + 1; self.d$ = 2 * self.b$; x = x + self.d$[0]",
        ("m.d$ = m.b$", "m.b$ = ints(3, 4)", "m.b$.add_(1)"),
    ),
    "buffer replaced by forward": Feature(
        "self.w$ = nn.Parameter(ints(4, $)); self.register_buffer('b$', ints(4, 1))",
        "x = x * (self.w$ * self.b$) % 9; self.b$ = self.b$ + 1",
        ("m.b$.add_(1)",),
    ),
    "buffer assigned by forward": Feature(
        "self.register_buffer('b$', ints(4, $), persistent=False)",
        "x = x + self.b$; self.b$ = self.b$ + 1",
        ("m.b$.zero_()", "m.b$ = m.b$ * 2"),
    ),
    "cache": Feature(
        "self.h$ = None; self.n$ = {}",
        "self.h$ = ints(4, $) if self.h$ is None else self.h$; "
        "self.n$.setdefault('key', 3); x = x + self.h$ + self.n$['key']",
        ("m.h$ = None", "m.n$.clear()", "m.n$['key'] = 1", "m.h$.add_(2)"),
    ),
    "history": Feature(
        "self.h$ = ()",
        "self.h$ = (*self.h$, len(self.h$)); x = x + sum(self.h$)",
        ("m.h$ = ()", "m.h$ = (7,)"),
    ),
    "parameter written by forward": Feature(
        "self.w$ = nn.Parameter(ints(4, $)); self.e$ = nn.Parameter(ints(4, $))",
        "x = x + self.w$ + self.follow$()",
        ("m.w$.data.add_(1)", "m.e$.data.zero_()"),
        methods="""
    def follow$(self):
        with torch.no_grad():
            self.e$.mul_(2).sub_(self.w$)
            self.e$.clamp_(-8, 8)
        return self.e$.detach().clone()
""",
    ),
    "nested": Feature(
        "self.v$ = {'scales': [1, 2], 'deep': ({'x': 1}, 5)}; "
        "self.n$ = types.SimpleNamespace(gain=1); self.i$ = [linear($)]",
        "w, b = (p.to(x.device) for p in self.i$[0].parameters()); "
        "x = (x @ w + b) * sum(self.v$['scales']) + self.n$.gain; "
        "x = x * self.v$['deep'][0]['x']",
        (
            "m.v$['scales'][1] = 9",
            "m.v$['scales'].append(4)",
            "m.v$['deep'][0].update(x=5)",
            "m.n$.gain = 4",
            "m.i$[0].weight.data.add_(1)",
            "m.i$[0].requires_grad_(False)",
        ),
    ),
    "complex": Feature(
        "self.j$ = nn.Parameter(torch.tensor([1 + 2j, 3j, 1, 2]).cdouble()); "
        "self.register_buffer('p$', torch.tensor([1 + 2j, 3j, 1, 2]))",
        "x = x + (self.j$ * 1j).real.double() + self.p$.resolve_conj().imag.double()",
        (
            "m.p$ = m.p$.conj()",
            "m.p$.data = m.p$.data.conj()",
            "m.j$.data = m.j$.data.conj()",
        ),
    ),
    "generator": Feature(
        "self.g$ = torch.Generator(); self.f$ = np.random.default_rng($)",
        "x = x + torch.rand(4, generator=self.g$.manual_seed($ + 1), device='cpu')"
        ".gt(0.5).to(x.device)",
        ("m.g$ = torch.Generator()", "m.f$ = None"),
    ),
}

CODE = {
    "method": Feature(
        methods="""
    two$ = 2
    def help$(self, x):
        return x + self.two$
    @property
    def four$(self):
        return 4
    @classmethod
    def three$(cls, x):
        return x * cls.two$
""",
        forward="x = self.three$(self.help$(x)) + self.four$",
        changes=(
            "Net.two$ = 3",
            "m.two$ = 4",
            "Net.help$ = lambda self, x: x - 1",
            "m.help$ = types.MethodType(lambda self, x: x * self.two$, m)",
            "Net.four$ = 1",
            "m.__dict__.pop('help$', None)",
        ),
    ),
    "mode": Feature(forward="x = x * (2 if self.training else 3)"),
    "in place": Feature(forward="x = x.clone().mul_(2).add_(1); x[:, 0] += 1"),
    "branch": Feature(
        init="self.i$ = True; self.u$ = linear($)",
        forward="x = self.u$(x) if self.i$ else x",
        changes=("m.i$ = not m.i$",),
    ),
    "extra": Feature(
        forward="x = self.extra$(x) if hasattr(self, 'extra$') else x",
        changes=(
            "m.extra$ = linear(4)",
            "m.add_module('extra$', nn.ReLU())",
            "m.extra$ = lambda x: x + 1",
            "m.__delattr__('extra$') if hasattr(m, 'extra$') else None",
        ),
    ),
}

_LIST = "given['g$'].extend(x[:, 0].tolist())"

INPUTS = {
    "list to fill": Feature(forward=_LIST, make="[]", seen="sorted(given['g$'])"),
    "dict to fill": Feature(
        forward="given['g$'].update({int(v): 'row' for v in x[:, 1] % 9})",
        make="{}",
        seen="sorted(given['g$'])",
    ),
    "log beside a tensor": Feature(
        forward="given['g$'][1]['log'].extend(x[:, 0].tolist()); "
        "x = x + given['g$'][0]",
        make="[table(n, $), {'log': collections.deque()}]",
        seen="sorted(given['g$'][1]['log']), given['g$'][0].grad",
    ),
    "linked dataclasses": Feature(
        forward="x = x + given['g$'].x - 2 * given['g$'].next.x; "
        "x = x * (1 + (given['g$'].next.next is given['g$']))",
        make="ring(table(n, $), table(n, $ + 1))",
        seen="given['g$'].x.grad, given['g$'].next.x.grad",
    ),
    "dataclasses in a list in itself": Feature(
        forward="x = x + given['g$'][0].x * (1 + (given['g$'][1] is given['g$']))",
        make="around([ring(table(n, $), table(n, $ + 1))])",
        seen="given['g$'][0].x.grad",
    ),
    "linked settings": Feature(
        forward="given['g$'].x.append(len(x)); x = x + len(given['g$'].next.x)",
        make="ring([], [1, 2])",
        seen="sum(given['g$'].x)",
    ),
    "rows for each row": Feature(
        forward="x = x + given['g$'].view(len(x), -1, 4).sum(1)",
        make="table(3 * n, $)",
        seen="given['g$'].grad",
    ),
    "rows for each of these": Feature(
        forward="x = x.repeat_interleave(2, 0) * given['g$'][0] + 1; "
        "x = (x * given['g$'][1][::3]).view(len(x) // 2, 2, 4).sum(1)",
        make="[table(2 * n, $), table(6 * n, $ + 1)]",
        seen="[t.grad for t in given['g$']]",
    ),
    "array of rows": Feature(
        forward="x = x + torch.from_numpy(given['g$'].reshape(len(x), -1))"
        ".to(x.device)[:, 1:5]",
        make="np.arange(10.0 * n).reshape(2 * n, 5) % 7",
    ),
}

ANYWHERE = (
    "m.eval()",
    "m.train()",
    "m.zero_grad(set_to_none=False)",
    "m.load_state_dict({k: v + ('var' not in k) for k, v in m.state_dict().items()})",
    "m.load_state_dict({k: v - ('var' not in k) for k, v in m.state_dict().items()}, "
    "assign=True)",
    "m.requires_grad_(False)",
    "m.requires_grad_(True)",
    "m.float().double()",
    "[p.data.neg_() for p in m.parameters()]",
    "m.register_buffer('late', ints(4, 1))",
    "m.late = ints(4, 2)",
    "m.apply(lambda part: setattr(part, 'touched', 1))",
    "m.forward = types.MethodType(lambda self, *a, **k: Net.forward(self, *a, **k), m)",
    "exec('import math\\nLATE = math.floor(2.5)', globals())",
    "Net.late_method = lambda self: 1",
    "m.share_memory()",
    "[setattr(p, 'grad', None) for p in m.parameters()]",
    "m.to(torch.float64)",
)

OUTPUTS = (
    "x",
    "x",
    "(x, [x + 1, None])",
    "{'x': x, 'more': (x * 2,)}",
    "collections.OrderedDict(x=x, none=None)",
    "Out(x=x, y=x.detach())",
    "Named(x, x.sum(1))",
    "[x, x]",
    "ring(x, x * 2)",
    "[(row.expand(9 + int(row[0]) % 3, -1),) for row in x]",
    "{'rows': [{'boxes': row.expand(9, -1), 'id': int(row[0])} for row in x]}",
)

HEAD = """
import collections, ctypes, dataclasses, enum, functools, types
import numpy as np
import torch
from torch import nn

Named = collections.namedtuple("Named", "x y")


@dataclasses.dataclass
class Out:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Link:
    x: object
    next: "Link | None" = None


def ring(x, y):
    first, second = Link(x), Link(y)
    first.next, second.next = second, first
    return first


def around(values):
    values.append(values)
    return values


def ints(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-2, 3, (n,), generator=generator, device="cpu")
    return made.double().to(torch.get_default_device())


def table(n, seed):
    return ints(4 * n, seed).view(n, 4).requires_grad_()


def memory(tensor):
    # What writes there, torch does not see.
    numbers = ctypes.c_double * tensor.numel()
    return np.ctypeslib.as_array(numbers.from_address(tensor.data_ptr()))


def exact(module, seed):
    module.double()
    with torch.no_grad():
        for number, p in enumerate(module.parameters()):
            p.copy_(ints(p.numel(), seed + 7 * number).reshape(p.shape))
    return module


def form(tensor):
    # A tensor with what it is like added to it.
    trained = tensor.requires_grad and torch.is_grad_enabled()
    like = tensor.dim() + 2 * trained + 4 * (tensor.dtype == torch.bool)
    return tensor % 1000 + like + 8 * (tensor.dtype == torch.float64)


def linear(seed):
    return exact(nn.Linear(4, 4), seed)
"""
