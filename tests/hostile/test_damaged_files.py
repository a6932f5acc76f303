"""A checkpoint that was damaged in any way is an error, never wrong content."""

import collections
import os
import pickle
import random
import zipfile
import zlib

import paceline
import pytest
import torch

STATE = {
    "model": {"weight": torch.arange(900.0), "bias": torch.ones(60, dtype=torch.half)},
    "epoch": 3,
}


def flip(draw, text):
    at = draw.randrange(len(text))
    text[at] ^= 1 << draw.randrange(8)


def flip_near_the_end(draw, text):
    at = len(text) - 1 - draw.randrange(200)
    text[at] ^= draw.randrange(1, 256)


def cut(draw, text):
    del text[draw.randrange(len(text)) :]


def cut_a_little(draw, text):
    del text[-draw.randrange(1, 200) :]


def append(draw, text):
    text += draw.choice((bytes, draw.randbytes))(draw.randrange(1, 101))


def zero(draw, text):
    at = draw.randrange(len(text))
    text[at : at + 512] = bytes(len(text[at : at + 512]))


def overwrite(draw, text):
    at = draw.randrange(len(text))
    text[at : at + 64] = draw.randbytes(len(text[at : at + 64]))


def swap(draw, text):
    """Exchange two pages, as a lost or misplaced write does."""
    at, to = draw.sample(range(len(text) // 512), 2)
    page = slice(at * 512, at * 512 + 512), slice(to * 512, to * 512 + 512)
    text[page[0]], text[page[1]] = text[page[1]], text[page[0]]


def insert(draw, text):
    at = draw.randrange(len(text))
    text[at:at] = draw.randbytes(draw.randrange(1, 65))


DAMAGES = [
    *(flip, flip_near_the_end, cut, cut_a_little, append, zero, overwrite, swap),
    insert,
]


def damaged_files(whole, n_of_each, seed):
    """Yield the names of damages and a file that has them, one damage or two."""
    draw = random.Random(seed)
    for first in DAMAGES:
        # The second damage may hide the first: think of a flip and an added byte.
        for second in (None, append, draw.choice(DAMAGES)):
            for _ in range(n_of_each):
                text = bytearray(whole)
                for damage in filter(None, (first, second)):
                    if text:
                        damage(draw, text)
                names = " and ".join(d.__name__ for d in (first, second) if d)
                if text != whole:
                    yield names, bytes(text)


def damaged_bytes_at_the_end(whole):
    for n in range(1, 201):
        text = bytearray(whole)
        text[-n] ^= 1 << n % 8
        yield f"flip of byte -{n}", bytes(text)


def outcome(path, text):
    """Return what a load does; if bytes changed, only "refused" is right."""
    path.write_bytes(text)
    try:
        loaded = paceline.load(path)
    except RuntimeError as error:
        return "refused" if "is damaged: " in str(error) else "another error"
    except Exception:
        return "another error"
    return "loaded" if digest(loaded) == digest(STATE) else "loaded, and wrong"


def digest(state):
    parts = [str(state.get("epoch")), str(list(state))]
    for tensor in state.get("model", {}).values():
        parts.append(str((tensor.dtype, tensor.tolist())))
    return parts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.pt"


@pytest.mark.parametrize(
    ("n_of_each", "seed"), [(8, 1), pytest.param(45, 2, marks=pytest.mark.long)]
)
def test_a_damaged_file_is_refused(path, n_of_each, seed):
    paceline.save(STATE, path)
    whole = path.read_bytes()
    assert outcome(path, whole) == "loaded"
    found = collections.Counter()
    for damages in (
        damaged_files(whole, n_of_each, seed),
        damaged_bytes_at_the_end(whole),
    ):
        found.update((outcome(path, text), names) for names, text in damages)
    assert found.total() > 27 * n_of_each
    assert {key: n for key, n in found.items() if key[0] != "refused"} == {}


@pytest.mark.parametrize(
    ("save", "change"),
    [
        (paceline.save, lambda text: b"\x80" + text[1:]),
        (paceline.save, lambda text: text[:-23]),
        (torch.save, lambda text: text[: len(text) // 2]),
        (torch.save, lambda text: text[:-1] + b"\1"),
        (torch.save, lambda text: text + b"\0"),
        (torch.save, lambda text: text[:-2] + b"\1\0" + b"x"),
    ],
)
def test_an_end_or_a_beginning_that_torch_does_not_write_is_refused(path, save, change):
    save(STATE, path)
    assert outcome(path, change(path.read_bytes())) == "refused"


# ---- files without a checksum -------------------------------------------------------


def without_comment(path):
    whole = path.read_bytes()
    at = whole.rindex(b"PK\x05\x06") + 20
    path.write_bytes(whole[:at] + b"\0\0")


def repack(path, how):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, text in members.items():
            archive.writestr(name, text)


def pack_anew(path):
    repack(path, zipfile.ZIP_STORED)


def compress(path):
    repack(path, zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize("remove", [without_comment, pack_anew, compress])
def test_a_file_of_ours_without_its_checksum_is_refused(path, remove):
    paceline.save(STATE, path)
    remove(path)
    assert digest(torch.load(path)) == digest(STATE)
    with pytest.raises(RuntimeError, match=r"model\.pt is damaged: .* its checksum"):
        paceline.load(path)


def test_a_load_logs_that_a_file_has_no_checksum(path, caplog):
    caplog.set_level("INFO", "paceline")
    paceline.save(STATE, path)
    paceline.load(path)
    assert caplog.messages == []
    ours = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    for is_zip in (True, False):
        # A file inside a tensor has the mark and the checksum; the outer file does not.
        state = {"file": ours}
        torch.save(state, path, _use_new_zipfile_serialization=is_zip)
        paceline.load(path)
        (message,) = caplog.messages
        assert message.startswith(f"{path} has no checksum: ")
        caplog.clear()
    with path.open("rb") as file:
        paceline.load(file)
    assert len(caplog.messages) == 1


def test_files_without_the_mark_are_read_by_their_checksum(path):
    """Earlier versions wrote the same comment, and no mark."""
    torch.save(STATE, path)
    text = path.read_bytes()[:-2] + (23).to_bytes(2, "little")
    comment = f"paceline crc32 {zlib.crc32(text):08x}".encode()
    assert outcome(path, text + comment) == "loaded"
    flipped = text.replace(b"epoch", b"epocj")
    assert outcome(path, flipped + comment) == "refused"


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_torch_reads_files_that_have_the_mark(path, weights_only, is_mapped):
    paceline.save(STATE, path)
    loaded = torch.load(path, weights_only=weights_only, mmap=is_mapped)
    assert digest(loaded) == digest(STATE)
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
        assert archive.read(name).endswith(pickle.dumps("paceline", 2))
        assert archive.testzip() is None


def test_a_pipe_in_place_of_a_file_does_not_stop_a_load(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match="seekable"):
        paceline.load(path)
