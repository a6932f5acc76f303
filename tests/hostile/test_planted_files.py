"""What other users put beside a checkpoint neither stops nor redirects a save.

The attacker is another user who may write to the folder: one like /tmp, where only
owners may remove a file, or one that a group shares.
"""

import contextlib
import errno
import os
import shutil
import signal
import stat
import tempfile
from pathlib import Path

import paceline
import pytest
import torch
from paceline import _files

VICTIM, ATTACKER = 54321, 54322
STATE = {"weight": torch.arange(6.0)}
STICKY, SHARED = 0o1777, 0o777


@pytest.fixture(params=[STICKY, SHARED], ids=["sticky", "shared"])
def folder(request):
    """A folder that both users may write to; pytest's own are closed to them."""
    if os.geteuid() != 0:
        pytest.skip("other users need root")
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(request.param)
    yield path
    shutil.rmtree(path)


def as_user(user, call, *args):
    """Run a call in a child of another user; return "done", its error or its signal."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            signal.alarm(20)  # a save that hangs ends here
            call(*args)
            os.write(writer, b"done")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"killed by {signal.Signals(-status).name}"


def save(path):
    # The child's copies of torch's threads are gone: it must not start to compute.
    torch.set_num_threads(1)
    paceline.save(STATE, path)


def is_saved(path):
    return torch.equal(paceline.load(path)["weight"], STATE["weight"])


# ---- names of temporary files -------------------------------------------------------


def part_of(path, end="0123456789abcdef"):
    return path.with_name(f"{_files._prefix_of(path.name)}{end}.part")


def pipe(path):
    os.mkfifo(path)
    path.chmod(0o666)


def other_file(path):
    path.write_bytes(b"other")
    path.chmod(0o666)


def link_to_pipe(path):
    pipe(path.with_name("pipe"))
    path.symlink_to("pipe")


def link_to_own_file(path):
    path.symlink_to("victims")


def broken_link(path):
    path.symlink_to("nowhere")


def loop(path):
    path.symlink_to(path.name)


PLANTED = [
    *(pipe, other_file, link_to_pipe, link_to_own_file, broken_link, loop),
    Path.mkdir,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_has_the_name_of_a_temporary_file_is_left_alone(folder, plant):
    path = folder / "model.pt"
    as_user(VICTIM, (folder / "victims").write_bytes, b"precious")
    assert as_user(ATTACKER, plant, part_of(path)) == "done"
    before = sorted(os.listdir(folder))
    for _ in range(2):
        assert as_user(VICTIM, save, path) == "done"
        assert is_saved(path)
        assert sorted(os.listdir(folder)) == sorted([*before, "model.pt"])
    assert (folder / "victims").read_bytes() == b"precious"
    assert path.stat().st_uid == VICTIM


def test_left_over_files_of_the_user_alone_are_removed(folder):
    path = folder / "model.pt"
    for user, end in ((VICTIM, "a" * 16), (ATTACKER, "b" * 16), (VICTIM, "c" * 16)):
        as_user(user, other_file, part_of(path, end))
    as_user(VICTIM, pipe, part_of(path, "d" * 16))
    reader = os.open(part_of(path, "d" * 16), os.O_RDONLY | os.O_NONBLOCK)
    assert as_user(VICTIM, save, path) == "done"
    os.close(reader)
    left = {part_of(path, "b" * 16), part_of(path, "d" * 16), path}
    assert set(folder.iterdir()) == left


def test_nobody_else_can_open_a_file_before_it_has_the_mode_of_the_old_one(folder):
    path, seen = folder / "model.pt", []

    def look(file):
        (part,) = folder.glob(".*.part")
        seen.append(stat.S_IMODE(part.stat().st_mode))
        file.write(b"new")

    def replace(mode):
        path.write_bytes(b"old")
        path.chmod(mode)
        _files.write_whole(path, look)
        assert (seen.pop(), stat.S_IMODE(path.stat().st_mode)) == (0o600, mode & 0o777)

    for mode in (0o600, 0o640, 0o666, 0o4755, 0o2775):
        assert as_user(VICTIM, replace, mode) == "done"


# ---- links in place of the target ---------------------------------------------------


def kernel_follows(path):
    """Tell whether this user may follow a link here: see proc_sys_fs(5)."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))


@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "no file"])
@pytest.mark.parametrize("owner", [VICTIM, ATTACKER])
def test_a_link_is_followed_if_the_kernel_follows_it(folder, owner, is_there):
    """Whatever ``fs.protected_symlinks`` is here."""
    link, target, probe = (
        folder / "latest",
        folder / "in" / "model.pt",
        folder / "probe",
    )
    target.parent.mkdir()
    os.chown(target.parent, VICTIM, VICTIM)
    if is_there:
        as_user(VICTIM, target.write_bytes, b"precious")
    assert as_user(owner, link.symlink_to, "in/model.pt") == "done"
    assert as_user(owner, probe.symlink_to, "in/probed") == "done"
    expected = as_user(VICTIM, kernel_follows, probe)
    result = as_user(VICTIM, save, link)
    assert result.partition(":")[0] == expected.partition(":")[0]
    if result == "done":
        assert is_saved(target)
    elif is_there:
        assert target.read_bytes() == b"precious"
    else:
        assert not target.exists()
    assert link.is_symlink()
    assert not list(folder.rglob("*.part"))


def test_a_link_that_the_kernel_refuses_is_refused(tmp_path, monkeypatch):
    """Simulates ``fs.protected_symlinks=1``, which holds for the whole machine."""
    link, target = tmp_path / "latest", tmp_path / "model.pt"
    link.symlink_to("model.pt")
    opened = os.open

    def open_as_kernel(path, flags, *args, **options):
        if Path(path).name == "latest" and not flags & os.O_NOFOLLOW:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_as_kernel)
    for text in (None, b"precious"):
        if text:
            target.write_bytes(text)
        with pytest.raises(PermissionError, match="latest"):
            paceline.save(STATE, link)
    assert target.read_bytes() == b"precious"
    assert sorted(os.listdir(tmp_path)) == ["latest", "model.pt"]


def chain(folder):
    (folder / "b").symlink_to(folder / "c")
    (folder / "c").symlink_to("far/d")
    (folder / "far/d").symlink_to("../model.pt")
    return "b"


def folder_link(folder):
    (folder / "here").symlink_to(".")
    (folder / "here/latest").symlink_to("here/here/model.pt")
    return "here/latest"


LINKS = {
    "chain": (chain, None),
    "through a link to a folder": (folder_link, None),
    "loop": (lambda folder: loop(folder / "b") or "b", "Too many levels"),
    "to a folder": (lambda f: (f / "b").symlink_to("far") or "b", "Is a directory"),
    "into no folder": (lambda f: (f / "b").symlink_to("no/b") or "b", "No such file"),
}


@pytest.mark.parametrize("is_there", [True, False], ids=["a file", "no file"])
@pytest.mark.parametrize("name", LINKS)
def test_links_lead_where_the_kernel_says(tmp_path, name, is_there):
    make, words = LINKS[name]
    (tmp_path / "far").mkdir()
    target = tmp_path / "model.pt"
    if is_there:
        target.write_bytes(b"old")
        target.chmod(0o640)
    path = tmp_path / make(tmp_path)
    files = sorted(tmp_path.rglob("*"))
    if words:
        with pytest.raises(OSError, match=words):
            paceline.save(STATE, path)
    else:
        paceline.save(STATE, path)
        assert is_saved(target)
        assert stat.S_IMODE(target.stat().st_mode) == (0o640 if is_there else 0o644)
    assert sorted({*tmp_path.rglob("*")} | {target}) == sorted({*files, target})


def test_a_failed_save_to_a_missing_target_leaves_nothing(tmp_path):
    (tmp_path / "latest").symlink_to("model.pt")

    def fail(file):
        assert not (tmp_path / "model.pt").exists()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        _files.write_whole(tmp_path / "latest", fail)
    assert os.listdir(tmp_path) == ["latest"]


# ---- changes during a save ----------------------------------------------------------


def test_a_folder_that_is_exchanged_during_a_save_is_not_looked_up_again(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()

    def exchange(file):
        (tmp_path / "mine").rename(tmp_path / "moved")
        (tmp_path / "mine").symlink_to("theirs")
        file.write(b"secret")

    _files.write_whole(tmp_path / "mine" / "model.pt", exchange)
    assert (tmp_path / "moved" / "model.pt").read_bytes() == b"secret"
    assert os.listdir(tmp_path / "theirs") == []


def test_a_link_planted_during_a_save_is_replaced_and_not_followed(tmp_path):
    path, other = tmp_path / "model.pt", tmp_path / "other"
    other.write_bytes(b"precious")

    def plant(file):
        path.symlink_to("other")
        file.write(b"new")

    _files.write_whole(path, plant)
    assert (path.read_bytes(), path.is_symlink()) == (b"new", False)
    assert other.read_bytes() == b"precious"


def test_a_link_whose_target_is_replaced_meanwhile_is_followed_again(
    tmp_path, monkeypatch
):
    """Another saver renames its file to the target after the kernel opened the old."""
    link, target = tmp_path / "latest", tmp_path / "model.pt"
    target.write_bytes(b"old")
    link.symlink_to("model.pt")
    fstat, n_left = os.fstat, [3]

    def replace_then_stat(descriptor):
        facts = fstat(descriptor)
        if n_left[0]:
            n_left[0] -= 1
            (tmp_path / "fresh").write_bytes(b"fresh")
            (tmp_path / "fresh").rename(target)
        return facts

    monkeypatch.setattr(os, "fstat", replace_then_stat)
    paceline.save(STATE, link)
    monkeypatch.undo()
    assert is_saved(target)
    assert sorted(os.listdir(tmp_path)) == ["latest", "model.pt"]


def test_savers_of_one_link_at_a_time_leave_one_whole_file(tmp_path):
    link = tmp_path / "latest"
    link.symlink_to("model.pt")
    children = []
    for _ in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            with contextlib.suppress(BaseException):
                for _ in range(30):
                    paceline.save(STATE, link)
                os._exit(0)
            os._exit(1)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert is_saved(link)
    assert sorted(os.listdir(tmp_path)) == ["latest", "model.pt"]


@pytest.mark.parametrize("kind", ["unlinked", "unnamed", "memfd"])
def test_a_file_without_a_name_is_refused(tmp_path, kind):
    """The kernel opens it, but no name leads to it."""
    if kind == "unlinked":
        descriptor = os.open(tmp_path / "gone", os.O_RDWR | os.O_CREAT)
        os.unlink(tmp_path / "gone")
    elif kind == "unnamed":
        descriptor = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
    else:
        descriptor = os.memfd_create("memory")
    with pytest.raises(FileNotFoundError, match="has no name"):
        paceline.save(STATE, f"/proc/self/fd/{descriptor}")
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


# ---- other file systems -------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_whose_owner_cannot_be_given_to_the_new_one_is_replaced(
    tmp_path, monkeypatch, number
):
    """As another user's file, an unknown user's in a container, and on some shares."""

    def refuse(*args):
        raise OSError(number, os.strerror(number))

    (tmp_path / "model.pt").write_bytes(b"old")
    monkeypatch.setattr(os, "fchown", refuse)
    paceline.save(STATE, tmp_path / "model.pt")
    assert is_saved(tmp_path / "model.pt")


# ---- pipes --------------------------------------------------------------------------


def test_a_pipe_without_a_reader_does_not_stop_a_save(folder):
    path = folder / "model.pt"
    as_user(ATTACKER, pipe, path)
    assert as_user(VICTIM, save, path).startswith(("OSError: ", "PermissionError: "))


def test_a_pipe_takes_more_than_it_can_hold(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    pid = os.fork()
    if pid == 0:
        with open(path, "rb") as file:
            (tmp_path / "copy").write_bytes(file.read())
        os._exit(0)
    state = {"weight": torch.ones(300_000)}
    while True:
        with contextlib.suppress(OSError):  # the reader is not there yet
            paceline.save(state, path)
            break
    os.waitpid(pid, 0)
    assert stat.S_ISFIFO(path.stat().st_mode), "the pipe stays"
    assert torch.equal(paceline.load(tmp_path / "copy")["weight"], state["weight"])
