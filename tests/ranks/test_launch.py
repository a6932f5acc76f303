"""`paceline.launch()`: results, failures, prints, and leaks."""

import ctypes
import errno
import functools
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import _cgroup, _environment
from paceline._launch import launch as launch_module
from paceline._launch import payloads, processes, ranks
from paceline._launch.messages import Call, Failure
from support.prints import without_gloo
from support.processes import held_beyond, holdings, is_running, wait_until_gone
from support.threads import in_threads
from torch import nn

pytestmark = pytest.mark.usefixtures("forked_workers")

OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
LONG_SECONDS = 60.0


# Functions of this module are pickled by reference, and ranks import the module.
# Functions inside tests are pickled by value, like those of a notebook's cell.


def rank_and(*values, **more):
    return (dist.get_rank(), *values, more)


# ---- results ------------------------------------------------------------------------


def test_results_come_in_the_order_of_ranks_with_the_arguments():
    assert paceline.launch(rank_and, 3, "a", 1, key=[2]) == [
        (rank, "a", 1, {"key": [2]}) for rank in range(3)
    ]
    call = functools.partial(rank_and, n=1, timeout=2)
    assert paceline.launch(call, 1) == [(0, {"n": 1, "timeout": 2})]


def test_ranks_have_joined_a_world_and_know_it():
    def look():
        world = paceline.init()
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        variables = {name: os.environ[name] for name in OWN}
        n_threads = (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
        return os.getpid(), world, float(total), variables, n_threads, sys.path

    found = paceline.launch(look, 2)
    assert len({pid for pid, *_ in found} | {os.getpid()}) == 3
    for rank, (_, world, total, variables, n_threads, path) in enumerate(found):
        device = torch.device("cpu")
        assert world == paceline.World(rank, 2, rank, device, "environment")
        assert total == 1.0
        assert list(variables.values()) == [str(rank), "2", str(rank), "2", "127.0.0.1"]
        assert n_threads[0] == int(n_threads[1]) >= 1
        assert path == sys.path
    assert not dist.is_initialized()


def test_a_rank_resembles_its_caller(monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "true")  # would bind ranks to equal cores

    def look():
        names = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "HOME")
        variables = [os.environ.get(name) for name in names]
        interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        flags = (sys.flags.isolated, sys.flags.dev_mode)
        here = (sys.path, sys.argv, os.getcwd(), variables, interrupt, flags)
        return here, sys.stdin.read(), os.environ.get("OMP_PROC_BIND")

    mine, _, _ = paceline.launch(look, 1)[0]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO())
        assert mine == look()[0]
    assert paceline.launch(look, 1)[0][1:] == ("", None)


@pytest.mark.parametrize(
    ("n_cores", "quota", "n", "expected"),
    [
        (8, None, 2, 4),
        (7, None, 3, 2),
        (2, None, 2, 1),
        (2, None, 3, 1),
        (8, 4.0, 2, 2),
        (8, 0.5, 1, 1),
        (4, 64.0, 1, 4),
    ],
)
def test_ranks_have_equal_shares_of_the_cores(monkeypatch, n_cores, quota, n, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_cores)))
    monkeypatch.setattr(_cgroup, "cpu_quota", lambda: quota)
    assert _cgroup.threads_of_each(n) == expected


def test_ranks_agree_on_the_name_of_their_start():
    first, second = paceline.launch(_environment.start, 2)
    assert first == second
    assert first.startswith("paceline/init/")


def test_a_class_made_here_is_trained_with_averaged_gradients():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1, bias=False)

        def forward(self, x):
            return self.linear(x)

    def train(net, data):
        model = paceline.DistributedDataParallel(net)
        model(data[dist.get_rank() :: 2]).sum().backward()
        return net, net.get_parameter("linear.weight").grad

    data = torch.arange(12.0).reshape(4, 3)
    sent = Net()
    for net, gradient in paceline.launch(train, 2, sent, data):
        assert type(net) is Net
        assert torch.equal(net.linear.weight, sent.linear.weight)
        assert torch.equal(gradient, data.sum(0, keepdim=True) / 2)


def test_a_group_made_by_the_user_may_follow_the_first():
    def make_again():
        dist.destroy_process_group()
        store = dist.PrefixStore("again", dist.TCPStore(*address(), is_master=False))
        dist.init_process_group(
            "gloo", store=store, rank=int(os.environ["RANK"]), world_size=2
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    def address():
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    assert paceline.launch(make_again, 2) == [2.0, 2.0]


def test_a_rank_may_return_long_before_the_others():
    def wait_for_the_first():
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return dist.get_rank()

    assert paceline.launch(wait_for_the_first, 2) == [0, 1]


def test_exit_with_success_is_a_result_of_none():
    assert paceline.launch(sys.exit, 2, 0) == [None, None]


def test_results_may_be_large_and_of_any_kind():
    def make():
        shared = torch.arange(300_000)
        return {"f": lambda x: x + 1, "views": (shared, shared[5:]), "none": None}

    (made,) = paceline.launch(make, 1)
    assert made["f"](1) == 2
    whole, part = made["views"]
    part[0] = -1
    assert whole[5] == -1


# ---- failures -----------------------------------------------------------------------


class Detailed(Exception):
    def __init__(self, what, *, code):
        super().__init__(what)
        self.code = code


def test_the_rank_that_raised_is_named_with_its_own_exception():
    class Own(Exception):
        pass

    def fail(make):
        if dist.get_rank() == 1:
            raise make()
        dist.barrier()

    for make in (lambda: Own("mine"), lambda: Detailed("odd", code=7)):
        error = make()
        with pytest.raises(paceline.RankError) as caught:
            paceline.launch(fail, 2, make)
        assert caught.value.rank == 1
        cause = caught.value.__cause__
        assert type(cause) is type(error)
        assert vars(cause) == vars(error)
        text = str(caught.value)
        assert text.startswith(f"rank 1 of 2 raised {type(error).__name__}.\nOriginal ")
        assert f'File "{__file__}", line ' in text
        assert "in fail" in text
        assert "/_launch/" not in text  # no frames of Paceline


def test_a_rank_error_pickles_with_its_rank():
    error = pickle.loads(pickle.dumps(paceline.RankError("words", 3)))
    assert (str(error), error.rank, error.results) == ("words", 3, {})


def test_other_exits_are_failures():
    with pytest.raises(paceline.RankError, match="raised SystemExit"):
        paceline.launch(sys.exit, 1, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((os._exit, 1, 7), "ended by itself with status 7"),
        ((signal.raise_signal, 1, signal.SIGKILL), r"was killed by SIGKILL \(the ker"),
        ((os.abort, 1), "was killed by SIGABRT"),
        ((ctypes.string_at, 1, 0), "was killed by SIGSEGV"),
        ((signal.raise_signal, 1, signal.SIGUSR1), "was killed by SIGUSR1"),
        ((signal.raise_signal, 1, 40), "was killed by signal 40"),
    ],
)
def test_the_end_of_a_rank_is_told(call, words):
    expected = rf"^rank 0 of 1 ended early: rank 0 \(process \d+\) {words}.* before it "
    with pytest.raises(paceline.RankError, match=expected + "answered"):
        paceline.launch(*call)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("/bin/false", paceline.RankError, "ended by itself with status 1 before"),
        ("/no/such/python", FileNotFoundError, "/no/such/python"),
        ("", RuntimeError, "ranks need a Python interpreter"),
    ],
)
def test_an_interpreter_that_does_not_start_leaves_nothing(
    monkeypatch, path, kind, words
):
    monkeypatch.setattr(processes, "subprocess", subprocess)  # without the fork server
    monkeypatch.setattr(processes.spawn, "get_executable", lambda: path)
    before = holdings()
    with pytest.raises(kind, match=words):
        paceline.launch(rank_and, 2)
    assert held_beyond(before, LONG_SECONDS) == []


@pytest.mark.parametrize("how", ["group", "model", "caught"])
def test_a_rank_that_is_killed_is_named_and_not_who_noticed(how):
    def die():
        model = paceline.DistributedDataParallel(nn.Linear(4, 1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        try:
            if how == "group":
                dist.barrier()
            else:
                for _ in range(2):
                    model(torch.ones(2, 4)).sum().backward()
        except Exception as error:
            if how == "caught":
                raise ValueError("the training has stopped") from error
            raise

    with pytest.raises(paceline.RankError, match="rank 1 of 2 ended early") as caught:
        paceline.launch(die, 2)
    assert caught.value.rank == 1


def outcomes(*given):
    """Return a `wait` that returns the given values in turn, then None."""
    left = list(given)
    waited = []

    def wait(seconds):
        waited.append(seconds)
        return left.pop(0) if left else None

    return wait, waited


NOTICED = (0, pickle.dumps(Failure(b"", is_consequence=True)))


def test_a_cause_that_comes_late_is_waited_for():
    wait, waited = outcomes((2, pickle.dumps(b"")), NOTICED, (1, "killed"))
    assert [each.rank for each in ranks._collect(4, wait)] == [2, 0, 1]
    assert waited == [None, None, ranks.CAUSE_SECONDS]


def test_a_consequence_without_a_cause_is_reported():
    wait, waited = outcomes(NOTICED)
    assert [each.rank for each in ranks._collect(3, wait)] == [0]
    assert waited == [None, ranks.CAUSE_SECONDS]


def test_who_waits_for_a_rank_that_has_returned_is_told():
    def leave():
        if dist.get_rank() == 1:
            dist.barrier()

    with pytest.raises(paceline.RankError, match="rank 1 of 2 raised"):
        paceline.launch(leave, 2)


def test_a_failure_ends_the_other_ranks_and_their_children(tmp_path):
    def fail():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (tmp_path / str(dist.get_rank())).write_text(f"{os.getpid()} {child.pid}")
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError("stop")
        time.sleep(600)

    with pytest.raises(paceline.RankError):
        paceline.launch(fail, 2)
    pids = [int(p) for k in "01" for p in (tmp_path / k).read_text().split()]
    assert len(pids) == 4
    assert wait_until_gone(pids, LONG_SECONDS) == []


def refuse(*args):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("lacks", [True, False])
def test_without_pidfds_and_memfds_results_failures_and_ends_are_the_same(
    monkeypatch, capsys, tmp_path, lacks
):
    for name in ("pidfd_open", "memfd_create"):
        if lacks:  # as in Pythons that were built on an early Linux
            monkeypatch.delattr(os, name)
        else:
            monkeypatch.setattr(os, name, refuse)
    before = holdings()
    assert paceline.launch(rank_and, 2, "a") == [(0, "a", {}), (1, "a", {})]
    with pytest.raises(paceline.RankError, match="killed by SIGKILL"):
        paceline.launch(signal.raise_signal, 2, signal.SIGKILL)
    paceline.launch(print, 1, "last words", end="")
    assert without_gloo(capsys.readouterr().out) == "last words\n"
    test_a_failure_ends_the_other_ranks_and_their_children(tmp_path)
    assert held_beyond(before, LONG_SECONDS) == []


# ---- objects that do not pickle, and wrong arguments --------------------------------


class Holder:
    def __init__(self):
        self.lock = threading.Lock()

    def method(self):
        pass


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def helper():
        lock.acquire()

    def outer():
        helper()

    for call, words in [
        ((rank_and, 1, 2, lock), r"^argument 1 of fn \(of type lock\) cannot be sent"),
        ((outer, 1), r"^variable 'lock', in variable 'helper', in fn \(of type lock\)"),
        ((Holder().method, 1), r"attribute 'lock', in the object of a method, in fn"),
        ((rank_and, 1, {"a": [lock]}), r"^item 0, in key 'a', in argument 0 of fn"),
        ((rank_and, 1, (x for x in "")), r"argument 0 of fn \(of type generator\)"),
    ]:
        with pytest.raises(TypeError, match=words):
            paceline.launch(*call)
    with pytest.raises(TypeError, match="argument 'key' of fn"):
        paceline.launch(rank_and, 1, key=lock)


class OnlyThere:
    """Can be unpickled in a rank alone, where there is a process group."""

    def __reduce__(self):
        return dist.get_world_size, ()


class EndsThere:
    def __reduce__(self):
        return sys.exit, ()


def with_a_variable_without_a_value():
    lock = threading.Lock()

    def inner():
        return later, lock

    return inner
    later = 1


LOST = {
    "an end": (EndsThere, r"what fn returned \(of type EndsThere\)"),
    "no value": (with_a_variable_without_a_value, r"what fn returned \(of type func"),
    "a lock": (threading.Lock, r"what fn returned \(of type lock\).*cannot pickle"),
    "a lock within": (
        lambda: {"a": [1, threading.Lock()]},
        r"item 1, in key 'a', in what fn returned \(of type lock\).*cannot pickle",
    ),
    "no group": (OnlyThere, r"what fn returned \(of type OnlyThere\).*process group"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_result_that_cannot_come_here_leaves_those_of_other_ranks(name):
    make, words = LOST[name]

    def act():
        if dist.get_rank() == 0:
            return make()
        time.sleep(0.5)
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="WORLD_SIZE is 2, but"):
            paceline.mean(1)
        return "kept"

    with pytest.raises(paceline.RankError, match=f"^rank 0 of 2: {words}") as caught:
        paceline.launch(act, 2)
    assert (caught.value.rank, caught.value.results) == (0, {1: "kept"})
    assert caught.value.__cause__ is not None


def test_a_rank_that_raised_counts_before_a_result_that_was_lost():
    def act():
        if dist.get_rank() == 0:
            return threading.Lock()
        time.sleep(0.5)
        raise ConnectionError("mine")

    with pytest.raises(paceline.RankError, match="rank 1 of 2 raised Connection"):
        paceline.launch(act, 2)


def test_a_wrapper_comes_as_its_module():
    def train():
        model = paceline.DistributedDataParallel(nn.Linear(4, 1))
        model(torch.ones(2, 4)).sum().backward()
        plain = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        return {"model": model, "both": (plain, plain.module)}, model.state_dict()

    for found, state in paceline.launch(train, 2):
        assert type(found["model"]) is type(found["both"][0]) is nn.Linear
        assert found["both"][0] is found["both"][1]
        assert torch.equal(found["model"].weight, state["module.weight"])


def test_what_ranks_cannot_import_is_their_failure(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def work(): pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    (tmp_path / "only_here.py").unlink()
    with pytest.raises(paceline.RankError, match="No module named 'only_here'"):
        paceline.launch(only_here.work, 2)


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        ((rank_and, 0), ValueError, "n is 0: at least one"),
        ((rank_and, -1), ValueError, "n is -1"),
        ((rank_and, "data"), TypeError, "n is of type str, but it is the"),
        ((rank_and, True), TypeError, "n is of type bool"),
        ((3, 2), TypeError, "fn is of type int"),
    ],
)
def test_wrong_arguments_are_errors(args, kind, words):
    with pytest.raises(kind, match=words):
        paceline.launch(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_backend_of_gpus_needs_gpus():
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        paceline.launch(rank_and, 1, backend="nccl")


def test_there_is_a_rank_for_each_gpu(monkeypatch):
    assert launch_module._count_ranks(None, "gloo") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launch_module._count_ranks(None, None) == 4
    assert launch_module._count_ranks(3, None) == 3
    assert launch_module._count_ranks(8, "gloo") == 8
    with pytest.raises(ValueError, match="n is 5, but torch sees 4 GPUs"):
        launch_module._count_ranks(5, None)


def test_a_timeout_is_that_of_the_group():
    def seconds():
        from paceline._compat import torch_groups

        return torch_groups.group_timeout_seconds(torch_groups.default_group())

    assert paceline.launch(seconds, 1, timeout=77) == [77.0]
    assert paceline.launch(seconds, 1, timeout=timedelta(minutes=2)) == [120.0]


# ---- places of the call -------------------------------------------------------------


def test_a_rank_cannot_launch_others():
    with pytest.raises(paceline.RankError, match=r"called in rank \d of 2") as caught:
        paceline.launch(paceline.launch, 2, rank_and)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_threads_may_launch_side_by_side():
    found = in_threads(lambda k: paceline.launch(rank_and, 2, k), 2)
    assert found == [[(0, k, {}), (1, k, {})] for k in range(2)]


def test_variables_of_another_launcher_do_not_reach_ranks(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "7")  # without the other variables

    def find():
        return os.environ["RANK"], dist.is_torchelastic_launched()

    assert paceline.launch(find, 1) == [("0", False)]


# ---- prints -------------------------------------------------------------------------


def test_prints_arrive_where_the_caller_prints(capsys):
    def speak():
        rank = dist.get_rank()
        for turn in range(2):
            dist.barrier()
            if turn == rank:
                print(f"one of {rank}\ntwo of {rank}")
                print(f"é of {rank}", file=sys.stderr)
                os.write(1, f"raw of {rank}\n".encode())
                print("no end", end="")

    paceline.launch(speak, 2)
    out, err = (without_gloo(text).splitlines() for text in capsys.readouterr())
    zero = [line for line in out if not line.startswith("[rank 1] ")]
    one = [line for line in out if line.startswith("[rank 1] ")]
    assert zero == ["one of 0", "two of 0", "raw of 0", "no end"]
    prefixed = [f"[rank 1] {line}" for line in ("one of 1", "two of 1", "raw of 1")]
    assert one == [*prefixed, "[rank 1] no end"]
    assert sorted(err) == ["[rank 1] é of 1", "é of 0"]


def test_prints_before_a_failure_arrive_before_it(capsys):
    def fail():
        print("last words")
        raise ValueError

    with pytest.raises(paceline.RankError):
        paceline.launch(fail, 1)
    assert without_gloo(capsys.readouterr().out) == "last words\n"


def test_ranks_that_print_much_are_not_stopped(capsys):
    def shout():
        for k in range(40_000):
            print(k, "x" * 40)
        print("y" * 3_000_000)

    paceline.launch(shout, 2)
    lines = without_gloo(capsys.readouterr().out).splitlines()
    zero = [line for line in lines if not line.startswith("[rank 1] ")]
    assert len(lines) - len(zero) >= 40_001
    assert zero[39_999] == "39999 " + "x" * 40
    assert sum(line.count("y") for line in lines) == 6_000_000


def test_a_progress_bar_of_the_first_rank_moves(capsys):
    read, write = os.pipe()
    os.set_blocking(read, False)
    pipe = processes._Output(read, "stdout", "")
    os.write(write, b"\r 10%|#")
    assert pipe.pump()
    os.write(write, b"   \r 20%|##")
    assert pipe.pump()
    assert capsys.readouterr().out == "\r 10%|#   \r"
    os.close(write)
    assert not pipe.pump()
    assert capsys.readouterr().out == " 20%|##\n"
    os.close(read)


# ---- leaks --------------------------------------------------------------------------


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError
    return os.environ["MASTER_PORT"]


def test_nothing_is_left_of_launches_that_return_and_that_fail():
    paceline.launch(fail_on, 1, -1)
    before = holdings()
    errors = []
    for rank in (-1, 1, -1, 0):
        try:
            (port, _) = paceline.launch(fail_on, 2, rank)
        except paceline.RankError as error:
            errors.append(error)  # keeps its frames alive
            continue
        with pytest.raises(ConnectionRefusedError), socket.socket() as probe:
            probe.connect(("127.0.0.1", int(port)))
    assert len(errors) == 2
    assert held_beyond(before, LONG_SECONDS) == []


def test_ranks_that_are_ended_while_they_start_leave_nothing():
    before, pids = holdings(), []
    call = Call(payloads.pack_call(print, ("too late",), {}), "gloo", None, {}, [""])
    for _ in range(8):
        group = processes.Processes()
        group.start(call, [{}, {}])
        pids += [each._popen.pid for each in group._processes]
        group.close()
    assert held_beyond(before) == []
    assert wait_until_gone(pids, 0.0) == []


def test_an_interrupt_ends_all_ranks_and_leaves_nothing(tmp_path):
    paceline.launch(fail_on, 1, -1)
    before = holdings()

    def hang():
        (tmp_path / str(dist.get_rank())).write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt():
        paths = [tmp_path / k for k in "01"]
        while not all(path.exists() and path.read_text() for path in paths):
            time.sleep(0.01)
        os.kill(os.getpid(), 2)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        paceline.launch(hang, 2)
    pids = [int((tmp_path / k).read_text()) for k in "01"]
    assert [pid for pid in pids if is_running(pid)] == []
    assert held_beyond(before, LONG_SECONDS) == []


def test_what_was_packed_is_unpacked_on_the_cpu():
    assert payloads.unpack(payloads.pack({"a": (1, None)})) == {"a": (1, None)}
    grown = torch.ones(2, requires_grad=True) * 2
    assert payloads.unpack(payloads.pack(grown)).requires_grad
