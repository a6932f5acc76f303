"""What the tests of a model's state share."""

from array import array
from collections import OrderedDict, deque

import torch
from paceline._compat import torch_core
from paceline._dp.process import imports, pickling, snapshot, snapshot_load
from paceline._dp.process.shared_model import SharedModel
from torch import nn

torch_core.attach()


class Slotted:
    """Has no dictionary."""

    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


class Model(nn.Module):
    """Has attributes of many kinds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(2))
        self.rate = 0.5
        self.log = list(range(1000))
        self.options = {"rate": 0.5, "name": "some words", "deep": [{}]}
        self.table = torch.zeros(3)
        self.queue = deque([1, 2], 2)
        self.numbers = array("d", [1, 2])
        self.names = {"a", "b"}
        self.ordered = OrderedDict(a=1, b=2)
        self.slotted = Slotted(1)
        self.pair = ([1], [2])


def share(net, previous=None):
    """Share a module; its replica has imported what this process has."""
    model = SharedModel(net, 1, pickling.ScriptGlobals(), previous)
    model.imported.compare(imports.digests_of(model.imported.entries))
    return model


class Follower:
    """A replica of a shared model, built in this process."""

    def __init__(self, model):
        self.model = model
        self.known = {
            ("parameter", i): nn.Parameter(p.detach().clone(), p.requires_grad)
            for i, p in enumerate(model.module.parameters())
        }
        owners = list(snapshot.owners_of_buffers(model.module))
        self.known.update(
            (("buffer", i), owner[name].clone())
            for i, (owner, name) in enumerate(owners)
        )
        skeleton = model.describe(0).skeleton
        self.net = snapshot_load.load_skeleton(skeleton, self.known)[0]

    def follow(self):
        """Receive what has changed; return the names of the attributes concerned."""
        update = self.model.changes()
        assert update is not None
        payload = update.get("attributes", b"")
        snapshot_load.load_attributes(payload, self.known)
        return names_in(payload, self.known)


def names_in(payload, known):
    """Return the attributes that are in a payload, of the module itself by name."""
    found = [value[:2] for value in pickling.load_stream(payload, known)]
    return sorted(name if i == 0 else f"{i}.{name}" for i, name in found)


def forward(shared, change):
    shared.state.forget_before()
    change(shared.module)
    shared.forward_ends()


class Opaque(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.held = held
