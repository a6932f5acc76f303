"""A stranger who reaches the store of a job, or a port of its process group.

Everything that ranks read from one another is a typed message: see
``paceline._messages``.  Other bytes are one error, and never run code.
"""

import json
import os
import pickle
import random
import struct
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import _messages
from paceline._compat import torch_groups
from paceline._ddp import greeting, host_links, job_secret, peers, placement, rendezvous
from paceline._errors import MismatchError, PeerError
from support.ranks import run_ranks, values
from torch import nn

FIRST = tuple[peers.Host, job_secret.Share, greeting.Greeting]


class Code:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def envelope(text, version=_messages.FORMAT, more=0):
    head = struct.pack("!8sHQ", b"paceline", version, len(text) + more)
    return head + text


def forged(path):
    """Return messages of strangers, by name."""
    whole = _messages.pack(["a", {"b": b"c"}])
    return {
        "a pickle": pickle.dumps(Code(path)),
        "a pickle in the envelope": envelope(pickle.dumps(Code(path))),
        "nothing": b"",
        "JSON of an earlier version": b'{"boot": "x", "pid": 1}',
        "random bytes": random.Random(0).randbytes(500),
        "a cut message": whole[:-1],
        "a message with more bytes": whole + b" ",
        "a huge length": envelope(b"[]", more=1 << 62),
        "another version": envelope(b"[]", version=7),
        "bytes that are not ASCII": envelope(b'"\xff"'),
        "deep nesting": envelope(b"[" * 100_000 + b"]" * 100_000),
        "some nesting": envelope(b"[" * 20 + b"]" * 20),
        "a huge number": envelope(b"9" * 100_000),
        "bytes that are no base64": envelope(b'{"": "%"}'),
        "bytes of another type": envelope(b'{"": [1]}'),
        "a list": envelope(b"[1, 2]"),
        "a dict": envelope(b'{"pid": []}'),
        "a string": envelope(b'"rank 1"'),
        "none": envelope(b"null"),
    }


NAMES = list(forged(""))


# ---- what a message may be ----------------------------------------------------------


def share():
    return job_secret.Share(bytes(32), b"", "")


def first_message():
    """Return the values of a rank's first message."""
    failure = _messages.Failure("ValueError", "words", "a traceback")
    here = placement.Placement("cuda:0", "a GPU", 22809, "a host", True)
    greets = greeting.Greeting("digest", {"strict": "False"}, failure, here, "host:1")
    return peers.Host.here(), share(), greets


@pytest.mark.parametrize("name", NAMES)
def test_what_strangers_send_is_one_error_that_names_the_sender(name, tmp_path):
    path = str(tmp_path / "code")
    words = "another version" if name == "another version" else "damaged or forged"
    for kind in (FIRST, rendezvous._Offer, tuple[int, str], bytes):
        with pytest.raises(PeerError, match=f"^rank 0: rank 1 .*{words}") as caught:
            _messages.unpack(forged(path)[name], kind, "rank 0: rank 1")
        assert caught.value.rank == 1
        assert len(str(caught.value)) < 500
    assert not os.path.exists(path)


def places(value, path=()):
    """Yield the path of each part of parsed JSON."""
    yield path
    parts = enumerate(value) if isinstance(value, list) else ()
    parts = value.items() if isinstance(value, dict) else parts
    for key, part in parts:
        yield from places(part, (*path, key))


def replaced(text, path, part):
    root = {"": json.loads(text)}
    owner, key = root, ""
    for step in path:
        owner, key = owner[key], step
    owner[key] = part
    return json.dumps(root[""]).encode()


def test_a_part_of_another_type_is_an_error_or_harmless():
    whole = first_message()
    text = _messages.pack(whole)[18:]
    assert _messages.unpack(envelope(text), FIRST, "") == whole
    n_refused = 0
    for path in places(json.loads(text)):
        for part in (
            None,
            True,
            -1,
            1 << 70,
            0.5,
            "x",
            "\udc80",
            [],
            [[]],
            {},
            {"": 1},
        ):
            forgery = envelope(replaced(text, path, part))
            try:
                host, other, greets = _messages.unpack(forgery, FIRST, "rank 0: rank 1")
            except PeerError:
                n_refused += 1
                continue
            # What was accepted has the types that later code relies on.
            assert type(host.pid) is int
            assert 0 <= host.pid < 1 << 31
            assert type(other.noise) is bytes
            assert all(type(value) is str for value in greets.options.values())
            for text_of in (repr(host), repr(greets)):
                assert text_of
    assert n_refused > 200


def test_changed_bytes_are_an_error_or_another_message_of_the_type():
    draw = random.Random(7)
    whole = _messages.pack(first_message())
    for _ in range(3000):
        changed = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(changed))
            changed[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
        try:
            parts = _messages.unpack(bytes(changed), FIRST, "rank 0: rank 1")
        except PeerError:
            continue
        assert [type(part) for part in parts] == [
            peers.Host,
            job_secret.Share,
            greeting.Greeting,
        ]


@pytest.mark.parametrize(
    "address", [("a host", 5000), ("127.0.0.1", 0), ("127.0.0.1", 1 << 16), ("::1",)]
)
def test_an_address_that_cannot_be_is_an_error(address):
    bad = _messages.pack([[address]])
    with pytest.raises(PeerError, match="damaged or forged"):
        _messages.unpack(bad, host_links.Offer, "rank 0: rank 1")


def test_several_messages_with_wrong_lengths_are_an_error():
    whole = _messages.join([b"ab", b"", b"c"])
    assert _messages.split(whole, 3, "") == [b"ab", b"", b"c"]
    huge = struct.pack("!3Q", 1 << 63, 1 << 63, 3) + b"abc"
    for bad in (whole[:-1], whole + b"d", whole[:20], b"", huge, pickle.dumps([b"ab"])):
        with pytest.raises(PeerError, match=r"^rank 1: rank 0 .* forged"):
            _messages.split(bad, 3, "rank 1: rank 0")


def test_an_exception_of_a_type_that_is_not_in_the_table_is_a_runtime_error():
    kinds = [
        KeyError,
        SystemExit,
        type("system", (Exception,), {}),
        OSError,
        ValueError,
    ]
    made = [_messages.Failure.of(kind("words")).exception(1) for kind in kinds]
    assert [type(error) for error in made] == [*[RuntimeError] * 3, OSError, ValueError]
    assert str(made[2]) == "rank 1: system: words"
    assert str(made[4]) == "rank 1: words"
    assert "The traceback of rank 1" in made[0].__notes__[0]


def test_an_exception_of_a_type_with_a_base_in_the_table_is_of_the_base():
    bad_bytes = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "words")
    for error, base in (
        (FileNotFoundError(2, "words", "file"), OSError),
        (bad_bytes, ValueError),
        (type("Mine", (TypeError,), {})("words"), TypeError),
    ):
        made = _messages.Failure.of(error).exception(1)
        assert type(made) is base
        assert str(made) == f"rank 1: {type(error).__name__}: {error}"


# ---- every key that ranks read ------------------------------------------------------


@pytest.fixture
def store(monkeypatch):
    found = dist.HashStore()
    monkeypatch.setattr(torch_groups, "group_store", lambda group: found)
    monkeypatch.setattr(torch_groups, "group_name", lambda group: "a group")
    monkeypatch.setattr(peers.dist, "PrefixStore", lambda prefix, store: store)
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["host/1", "gone", "message/0/1", "messages/0"])
def test_a_key_that_a_stranger_wrote_is_one_error(key, name, store, tmp_path):
    path = str(tmp_path / "code")
    rank = 1 if key == "messages/0" else 0
    ranks = peers.Peers(None, rank, 2, 5.0)
    store.set(key, forged(path)[name])

    def exchange():
        rows = ranks.all_gather(_messages.pack((peers.Host.here(), "")), 5.0)
        ranks.read(rows[1 - rank], tuple[peers.Host, str], 1 - rank)

    with pytest.raises(PeerError, match=r"forged|another version"):
        exchange()
    assert not os.path.exists(path)


# ---- running ranks ------------------------------------------------------------------


ON_THE_STORE = ("a pickle", "a huge length", "another version", "a dict")


def meet_a_stranger(rank, _, path):
    """Wrap models on rank 0; a stranger on the store answers in rank 1's place."""
    group = dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=30))
    if rank == 0:
        said = []
        for _ in ON_THE_STORE:
            with pytest.raises(PeerError) as caught:
                wrap(group)
            said.append(str(caught.value))
        return said
    # The store knows no users: a stranger has to guess the names of keys alone.
    store, name = torch_groups.group_store(group), torch_groups.group_name(group)
    for number, what in enumerate(ON_THE_STORE):
        meeting = dist.PrefixStore(f"paceline/{name}/0/{number}", store)
        meeting.wait(["host/0"])
        meeting.set("message/0/1", forged(path)[what])
    return None


def test_a_stranger_on_the_store_runs_no_code_in_a_rank(tmp_path):
    path = str(tmp_path / "code")
    said, _ = values(run_ranks(meet_a_stranger, 2, path, rendezvous="tcp"))
    assert not os.path.exists(path)
    for words in said:
        assert words.startswith("rank 0: rank 1 ")
        assert "forged" in words or "another version" in words


def send_something_else(rank, _, backend, path):
    """Wrap a model, and average a number, while rank 1 sends what it should not."""
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=30))
    pack, all_gather = _messages.pack, _messages.all_gather
    code, said = pickle.dumps(Code(path)), []
    store = torch_groups.group_store(group)

    def send_a_huge_size(message, gather, who):
        """Raise after rank 0, which else might report this rank's own error."""
        gather(torch.tensor([1 << 40]))
        store.wait([f"raised/{len(said)}"])
        raise PeerError("it has sent a huge size")

    for what in ("a pickle", "a huge size"):
        if rank == 1 and what == "a pickle":
            _messages.pack = lambda v: code if is_exchanged(v) else pack(v)
        elif rank == 1:
            _messages.pack = pack
            _messages.all_gather = send_a_huge_size
        for call in (lambda: wrap(group), lambda: paceline.mean(1.0)):
            try:
                call()
            except Exception as error:
                if rank == 0:
                    store.set(f"raised/{len(said)}", "")
                said.append(f"{type(error).__name__}: {error}")
    _messages.all_gather = all_gather
    return said


def is_exchanged(value):
    """Tell a rank's part of an exchange from its last message, (rank, words)."""
    return isinstance(value, tuple) and not isinstance(value[0], int)


def wrap(group):
    return paceline.DistributedDataParallel(nn.Linear(2, 2), process_group=group)


def test_a_peer_of_the_process_group_runs_no_code_either(tmp_path):
    path = str(tmp_path / "code")
    said, _ = values(run_ranks(send_something_else, 2, "gloo", path))
    assert not os.path.exists(path)
    assert len(said) == 4
    for words in said:
        assert words.startswith(
            "PeerError: rank 0: rank 1 has sent a damaged or forged"
        )
    assert "1099511627776 bytes" in said[2]


# ---- the secret of the job ----------------------------------------------------------

GOOD, OTHER, SHORT = "x" * 16, "y" * 40, "short"


def wrap_with_secrets(rank, _, of_ranks, backend):
    os.environ.pop("PACELINE_SECRET", None)
    if of_ranks[rank] is not None:
        os.environ["PACELINE_SECRET"] = of_ranks[rank]
    keys, close = [], rendezvous.Meeting.close
    rendezvous.Meeting.close = lambda self: (keys.append(self._secret), close(self))
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=30))
    try:
        wrap(group)
    except (MismatchError, ValueError) as error:
        return type(error).__name__, str(error)
    return keys


@pytest.mark.parametrize("backend", ["gloo", "cuda:gloo"])
def test_ranks_agree_on_a_key_that_the_secret_is_part_of(backend):
    for secret in (None, GOOD):
        given = [secret] * 3, backend
        outcomes = values(run_ranks(wrap_with_secrets, 3, *given))
        assert len(outcomes[0][0]) == 32
        assert outcomes[1:] == [outcomes[0]] * 2


MIXED = [
    ((GOOD, GOOD, OTHER), "MismatchError", "rank 0 has one, rank 2 has another:"),
    ((GOOD, None, None), "MismatchError", "has one, rank 1 has none, rank 2 has none:"),
    ((None, GOOD, None), "MismatchError", "rank 0 has none, rank 1 has another:"),
    (
        (GOOD, SHORT, GOOD),
        "ValueError",
        "rank 1: PACELINE_SECRET has only 5 characters",
    ),
]


@pytest.mark.parametrize(("of_ranks", "kind", "words"), MIXED)
def test_secrets_that_differ_are_the_same_error_on_every_rank(of_ranks, kind, words):
    outcomes = values(run_ranks(wrap_with_secrets, 3, of_ranks, "gloo"))
    assert outcomes == [outcomes[0]] * 3
    assert outcomes[0][0] == kind
    assert words in outcomes[0][1]
    assert not any(secret and secret in outcomes[0][1] for secret in of_ranks)


def test_a_fingerprint_does_not_show_the_secret(monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", GOOD)
    packed = _messages.pack(job_secret.Share.own())
    for way in (bytes, bytes.hex):
        assert way(GOOD.encode()) not in (packed, packed.hex())
    first, second = job_secret.Share.own(), job_secret.Share.own()
    assert first.fingerprint == second.fingerprint
    assert first.noise != second.noise
    monkeypatch.setenv("PACELINE_SECRET", OTHER)
    assert job_secret.Share.own().fingerprint != first.fingerprint
    keys = {job_secret.key_of([job_secret.Share.own()]) for _ in range(3)}
    assert len(keys) == 3
