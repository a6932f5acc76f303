"""A module's plain state as its replicas follow it, on both sides, in one process."""

import gc
import pickle
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from model_states import Follower, Opaque, Slotted, forward, share
from paceline import _native
from paceline._dp.process.outbox import Outbox
from torch import nn


class Node:
    """Holds itself."""

    def __init__(self):
        self.circle = [self]
        self.tensor = torch.zeros(4)


# ---- what is sent -------------------------------------------------------------------


def test_nothing_is_sent_where_nothing_has_changed(shared):
    assert shared.changes() == {}
    shared.state.forget_before()
    shared.forward_ends()
    assert shared.changes() == {}
    with torch.no_grad():
        shared.module.layer.weight.fill_(2)  # it lies in shared memory
    shared.module.count.add_(3)  # copied before each forward
    assert shared.changes() == {}


def test_a_value_that_is_equal_is_no_change(shared):
    net = shared.module
    again = pickle.loads(pickle.dumps({"rate": 0.5, "name": "some words"}))
    net.options.update(again)
    net.rate = again["rate"]
    net.layer.training = bool(1)
    net.table.data.zero_()
    assert shared.changes() == {}


CHANGES = {
    "number": (lambda m: setattr(m, "rate", 0.25), "rate"),
    "list": (lambda m: m.log.append(1), "log"),
    "dict": (lambda m: m.options.update(rate=0.25), "options"),
    "list in a dict": (lambda m: m.options["deep"].append({}), "options"),
    "dict in a list": (lambda m: m.options["deep"][0].update(a=1), "options"),
    "tensor": (lambda m: m.table.add_(1), "table"),
    "by data": (lambda m: m.table.data.add_(1), "table"),
    "other tensor": (lambda m: setattr(m, "table", torch.ones(3)), "table"),
    "deque": (lambda m: m.queue.append(3), "queue"),
    "numbers": (lambda m: m.numbers.append(3), "numbers"),
    "one number": (lambda m: m.numbers.__setitem__(0, 3), "numbers"),
    "set": (lambda m: m.names.add("c"), "names"),
    "order": (lambda m: m.ordered.move_to_end("a"), "ordered"),
    "slot": (lambda m: setattr(m.slotted, "gain", 2), "slotted"),
    "list in a tuple": (lambda m: m.pair[1].append(3), "pair"),
    "new": (lambda m: setattr(m, "new", {}), "new"),
    "mode": (lambda m: m.layer.eval(), "1.training"),
    "of a part": (lambda m: setattr(m.layer, "tag", [1]), "1.tag"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_sent_once(follower, change, name):
    change(follower.model.module)
    assert name in follower.follow()
    assert follower.model.changes() == {}
    assert plain_state(follower.net) == plain_state(follower.model.module)


LINKED = ("tensor", "by data", "other tensor", "deque", "order", "slot")


"""Changes of what is pickled with an empty tuple, of which there is only one."""


@pytest.mark.parametrize("what", sorted(CHANGES.keys() - set(LINKED)))
def test_what_shares_nothing_is_sent_alone(follower, what):
    change, name = CHANGES[what]
    change(follower.model.module)
    assert follower.follow() == [name]


@pytest.mark.parametrize("what", LINKED)
def test_what_is_pickled_with_an_empty_tuple_is_sent_alone(follower, what):
    change, name = CHANGES[what]
    change(follower.model.module)
    assert follower.follow() == [name]


def test_a_part_with_a_pickle_of_its_own_leaves_attributes_to_travel_alone():
    net = Opaque(deque([1]))
    net.lstm = nn.LSTM(1, 1)
    model = share(net)
    net.held.append(2)
    assert list(model.changes()) == ["attributes"]


def plain_state(net):
    """Return what two modules have alike where their attributes are alike."""
    return [
        {
            name: plain(value)
            for name, value in vars(part).items()
            if not name.startswith("_")
        }
        for part in net.modules()
    ]


def plain(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return value.gain if isinstance(value, Slotted) else value


def test_a_deleted_attribute_is_deleted(follower):
    del follower.model.module.log
    del follower.model.module.layer.in_features
    assert follower.follow() == ["1.in_features", "log"]
    assert not hasattr(follower.net, "log")
    assert not hasattr(follower.net.layer, "in_features")
    assert follower.model.changes() == {}


def test_a_change_is_seen_again_after_it_was_sent(follower):
    options = follower.model.module.options
    for step in range(3):
        options["deep"] = [{"step": step}]
        assert follower.follow() == ["options"]
        options["deep"][0]["more"] = step
        assert follower.follow() == ["options"]
        assert follower.net.options == options
    follower.model.module.options = {"new": [1]}
    assert follower.follow() == ["options"]
    options["deep"].append(1)  # it belongs to the model no longer
    assert follower.follow() == []


# ---- what attributes share ----------------------------------------------------------


class Sharing(nn.Module):
    """Two parts have attributes that share a list, which other attributes do not."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 1), nn.Linear(1, 1)
        common = [1]
        self.left.log = {"common": common}
        self.right.log = [common, self.left, self.right.weight]
        self.right.alone = [2]


def check_sharing(net):
    assert net.left.log["common"] is net.right.log[0]
    assert net.right.log[1] is net.left
    assert net.right.log[2] is net.right.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.left.log["common"].append(2),
        lambda net: net.left.log.update(a=1),
        lambda net: net.right.log.append(1),
    ],
    ids=["what is shared", "one holder", "the other holder"],
)
def test_what_two_parts_share_stays_one_object(change):
    follower = Follower(share(Sharing()))
    check_sharing(follower.net)
    change(follower.model.module)
    assert follower.follow() == ["1.log", "2.log"]
    check_sharing(follower.net)
    assert follower.net.left.log == follower.model.module.left.log
    assert follower.follow() == []
    follower.model.module.right.alone.append(3)
    assert follower.follow() == ["2.alone"]
    check_sharing(follower.net)


def test_what_comes_to_be_shared_is_one_object():
    follower = Follower(share(Sharing()))
    net = follower.model.module
    net.late = net.right.alone
    follower.follow()
    assert follower.net.late is follower.net.right.alone
    net.late.append(7)
    follower.follow()
    assert follower.net.late is follower.net.right.alone
    assert follower.net.late == [2, 7]


def test_an_object_that_holds_itself_arrives_so():
    follower = Follower(share(Opaque(None)))
    follower.model.module.held = Node()
    assert follower.follow() == ["held"]
    node = follower.net.held
    assert node.circle[0] is node
    follower.model.module.held.circle.append(1)
    assert follower.follow() == ["held"]
    assert follower.net.held.circle[0] is follower.net.held
    assert follower.net.held is not node


# ---- what forward changes -----------------------------------------------------------


def test_what_forward_has_changed_is_not_sent(shared):
    def change(net):
        net.log.append(1)
        net.options["deep"] = [{}]
        net.kept = net.layer(torch.ones(1, 2))
        net.rate += 1
        net.table.add_(1)

    for _ in range(3):
        forward(shared, change)
        assert shared.changes() == {}


def test_what_forward_has_deleted_is_not_sent(shared):
    forward(shared, lambda net: delattr(net, "log"))
    assert shared.changes() == {}


def test_a_change_inside_what_forward_has_made_is_sent_by_its_holder(shared):
    follower = Follower(shared)
    net = shared.module
    forward(shared, lambda net: setattr(net, "state", {"inner": [1]}))
    assert shared.changes() == {}
    for value in (2, 3):
        net.state["inner"].append(value)
        assert follower.follow() == ["state"]
        assert follower.net.state == net.state


def test_what_forward_makes_anew_each_time_is_not_kept(shared):
    gone = []
    for _ in range(300):
        forward(shared, lambda net: setattr(net, "node", Node()))
        gone.append(weakref.ref(shared.module.node))
    shared.state.forget_before()  # it forgets what was before the last
    gc.collect()
    assert sum(node() is not None for node in gone) == 1
    assert shared.changes() == {}


def test_what_forward_makes_anew_in_a_model_with_an_empty_part_is_not_kept():
    shared = share(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    gone = []
    for _ in range(300):
        forward(shared, lambda net: setattr(net, "node", Node()))
        gone.append(weakref.ref(shared.module.node))
        assert shared.changes() == {}
    shared.state.forget_before()
    gc.collect()
    assert sum(node() is not None for node in gone) == 1


def test_what_was_before_a_forward_is_known_until_the_next(shared):
    log = shared.module.log
    forward(shared, lambda net: (setattr(net, "rate", 7), setattr(net, "log", [])))
    ((part, before),) = shared.state.before()
    assert (part, before["rate"]) == (0, 0.5)
    assert before["log"] is log
    shared.state.forget_before()
    assert shared.state.before() == []


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "late", nn.Parameter(torch.ones(1))),
        lambda net: net.add_module("late", nn.Linear(1, 1)),
    ],
    ids=["parameter", "part"],
)
def test_a_forward_that_changes_the_structure_has_the_model_sent_anew(shared, change):
    with pytest.raises(RuntimeError, match="Model has changed its parameters or mod"):
        forward(shared, change)
    assert shared.changes() is None


# ---- arrays -------------------------------------------------------------------------


def test_arrays_travel_and_are_followed():
    follower = Follower(share(Opaque(np.arange(3.0))))
    assert follower.net.held.tolist() == [0, 1, 2]
    follower.model.module.held[:] = [0, 1, 2]
    assert follower.follow() == []
    follower.model.module.held.fill(7)
    assert follower.follow() == ["held"]
    assert follower.net.held.tolist() == [7, 7, 7]
    forward(follower.model, lambda net: net.held.fill(8))
    assert follower.follow() == []


def test_arrays_with_gaps_travel_and_are_followed():
    grid = np.zeros((4, 6))
    follower = Follower(share(Opaque(grid[:, ::2])))
    grid[0, 1] = 1  # in a gap
    assert follower.follow() == []
    grid[0, 2] = 1
    assert follower.follow() == ["held"]
    assert follower.net.held.tolist() == grid[:, ::2].tolist()


# ---- what replicas have still to receive --------------------------------------------


ONE = torch.ones(1)


def tree_of(value):
    return _native.flatten(value)[0]


def send(outbox, k, tree):
    payload = outbox.payload_for(k, tree)
    outbox.mark_sent(k)
    return payload


def numbers(payload):
    return [update["number"] for update in payload.get("updates", ())]


def test_updates_are_numbered_and_sent_once():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({"a": 1})
    outbox.add({"a": 2})
    for k in range(2):
        payload = send(outbox, k, tree)
        assert numbers(payload) == [1, 2]
        assert [update["a"] for update in payload["updates"]] == [1, 2]
        outbox.mark_received(k)
        assert send(outbox, k, tree) == {}
        outbox.mark_received(k)
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [3]


def test_a_replica_that_had_no_part_receives_all_later():
    outbox, tree = Outbox(2), tree_of([1])
    for _ in range(3):
        outbox.add({})
        assert len(numbers(send(outbox, 0, tree))) == 1
        outbox.mark_received(0)
    assert numbers(send(outbox, 1, tree)) == [1, 2, 3]


def test_what_is_in_doubt_is_sent_again_in_order():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({})
    for k in range(2):
        send(outbox, k, tree)
    outbox.mark_received(0)
    outbox.trees = [tree, tree]
    outbox.resend([1])
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [2]
    payload = send(outbox, 1, tree)
    assert numbers(payload) == [1, 2]
    assert payload["tree"] == tree  # the replica may have another still
    assert outbox.trees == [tree, None]
    outbox.resend([1])
    assert numbers(send(outbox, 1, tree)) == [1, 2]


def test_a_tree_of_inputs_is_sent_where_it_is_another():
    outbox, one, other = Outbox(1), tree_of([ONE]), tree_of({"a": ONE})
    again = tree_of([ONE + 1])
    found = [send(outbox, 0, tree) for tree in (one, again, other, one)]
    assert found == [{"tree": one}, {}, {"tree": other}, {"tree": one}]


def test_calls_are_to_be_dropped_until_all_have_received_that():
    outbox, tree = Outbox(2), tree_of([1])
    outbox.add({"dropped": [4, 5]})
    outbox.add({})
    assert set(outbox.dropped()) == {4, 5}
    send(outbox, 0, tree)
    outbox.mark_received(0)
    send(outbox, 1, tree)
    assert outbox.dropped() == [4, 5]
    outbox.mark_received(1)
    assert outbox.dropped() == []


def test_new_replicas_have_received_nothing():
    outbox, tree = Outbox(1), tree_of([1])
    outbox.add({"dropped": [1]})
    send(outbox, 0, tree)
    outbox.clear()
    assert outbox.dropped() == []
    assert outbox.modes is None
    assert send(outbox, 0, tree) == {"tree": tree}
    outbox.add({})
    assert numbers(send(outbox, 0, tree)) == [2]  # numbers go on
