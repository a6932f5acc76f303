"""DataParallel without its engines: arguments, attributes, state, what it says."""

import collections
import copy
import gc
import inspect
import io
import logging
import pickle
import weakref
from contextlib import nullcontext

import paceline
import pytest
import torch
from paceline import DataParallel, _environment, _gpu
from paceline._compat import torch_core
from paceline._dp import engines, marker
from paceline._replicas import devices
from paceline._replicas.errors import UnsupportedModelError
from torch import nn

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.last(self.norm(self.first(x))) * scale


class Same(nn.Module):
    """Gives back what it was given."""

    def forward(self, *args, **kwargs):
        return (args, kwargs) if kwargs else args


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv(_environment.CPU_REPLICAS, raising=False)


# ---- arguments ----------------------------------------------------------------------


def test_the_signature_begins_with_that_of_torch():
    ours = list(inspect.signature(DataParallel).parameters.values())
    theirs = list(inspect.signature(nn.DataParallel).parameters.values())
    assert [(p.name, p.default) for p in ours[:4]] == [
        (p.name, p.default) for p in theirs
    ]
    assert (ours[4].name, ours[4].kind) == ("engine", inspect.Parameter.KEYWORD_ONLY)


def test_methods_have_the_signatures_of_torch():
    for name in ("scatter", "replicate", "parallel_apply", "gather"):
        ours = inspect.signature(getattr(DataParallel, name)).parameters
        assert list(ours) == list(
            inspect.signature(getattr(nn.DataParallel, name)).parameters
        )
    ours = inspect.signature(paceline.data_parallel).parameters
    theirs = inspect.signature(nn.parallel.data_parallel).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in theirs.values()
    ]


def test_attributes_are_those_of_torch():
    module = nn.Linear(1, 1)
    wrapper = DataParallel(module, TWO, dim=1)
    assert isinstance(wrapper, nn.DataParallel)
    assert wrapper.module is module
    assert wrapper.device_ids == [CPU, CPU]
    assert (wrapper.output_device, wrapper.src_device_obj) == (CPU, CPU)
    assert wrapper.dim == 1


@pytest.mark.parametrize(
    "device_ids", [["cpu", "cpu:0"], (CPU, "cpu"), [CPU] * 2, iter(["cpu", "cpu"])]
)
def test_devices_may_be_given_in_any_form(device_ids):
    assert DataParallel(nn.Linear(1, 1), device_ids).device_ids == [CPU, CPU]


def test_one_replica_is_the_default_on_any_machine_and_says_so():
    wrapper = DataParallel(nn.Linear(1, 1))
    assert wrapper.device_ids == []  # as torch has it without an accelerator
    assert wrapper.engine == "none"
    assert "device_ids is None" in wrapper.engine_reason


def test_the_environment_gives_the_number_of_replicas(monkeypatch):
    monkeypatch.setenv(_environment.CPU_REPLICAS, "3")
    assert DataParallel(nn.Linear(1, 1)).device_ids == [CPU] * 3
    assert DataParallel(nn.Linear(1, 1), TWO).device_ids == [CPU] * 2
    monkeypatch.setenv(_environment.CPU_REPLICAS, "1")
    wrapper = DataParallel(nn.Linear(1, 1))
    assert wrapper.device_ids == []
    assert "PACELINE_CPU_REPLICAS is 1" in wrapper.engine_reason


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5"])
def test_a_bad_number_in_the_environment_is_an_error(monkeypatch, word):
    monkeypatch.setenv(_environment.CPU_REPLICAS, word)
    with pytest.raises(ValueError, match=f"PACELINE_CPU_REPLICAS is '{word}'"):
        DataParallel(nn.Linear(1, 1))


@pytest.mark.parametrize("module", [None, 3, nn.Linear, [nn.Linear(1, 1)]])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(TypeError, match=r"give a torch\.nn\.Module"):
        DataParallel(module)


@pytest.mark.parametrize("dim", [None, "0", 1.0, True])
def test_a_dim_that_is_no_integer_is_refused(dim):
    with pytest.raises(TypeError, match="dim is"):
        DataParallel(nn.Linear(1, 1), TWO, dim=dim)


def test_an_unknown_engine_is_refused():
    with pytest.raises(ValueError, match="engine is 'fibre': give one of auto, "):
        DataParallel(nn.Linear(1, 1), TWO, engine="fibre")


@pytest.mark.parametrize("device_ids", ["cpu", 2, CPU, [None], ["gpu"], [1.5]])
def test_device_ids_that_are_no_list_of_devices_are_refused(device_ids):
    with pytest.raises(TypeError, match="device"):
        DataParallel(nn.Linear(1, 1), device_ids)


def test_devices_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="give the CPU only, or GPUs only"):
        DataParallel(nn.Linear(1, 1), ["cpu", 0])


@pytest.mark.parametrize("device_ids", [[0, 1], ["cuda:0", "cuda:1"], [0], []])
def test_gpus_that_are_not_there_give_a_plain_call_as_in_torch(monkeypatch, device_ids):
    monkeypatch.setattr(torch_core, "has_accelerator", lambda: False)
    module = Same()
    wrapper = DataParallel(module, device_ids, output_device=0)
    assert (wrapper.device_ids, wrapper.engine) == ([], "none")
    assert repr(device_ids) in wrapper.engine_reason
    assert wrapper(3) == (3,)


def test_gpus_are_refused_where_there_are_some(monkeypatch):
    monkeypatch.setattr(torch_core, "has_accelerator", lambda: True)
    monkeypatch.setattr(_gpu.machine, "why_unusable", lambda: "torch is for others")
    with pytest.raises(NotImplementedError, match=r"\[0, 1\], and torch is for others"):
        DataParallel(nn.Linear(1, 1), [0, 1])


def test_an_output_device_other_than_the_cpu_is_refused():
    for device in ("cpu", CPU, -1, None):
        assert DataParallel(nn.Linear(1, 1), TWO, device).output_device == CPU
    with pytest.raises(ValueError, match="output_device is 0"):
        DataParallel(nn.Linear(1, 1), TWO, 0)


class Elsewhere(nn.Linear):
    """As if it were on a GPU."""

    def named_parameters(self, *args, **kwargs):
        fake = collections.namedtuple("Fake", "device")(torch.device("cuda", 0))
        return iter([("weight", fake)])


def test_a_module_on_a_gpu_is_refused():
    with pytest.raises(NotImplementedError, match="'weight' is on device cuda:0"):
        DataParallel(Elsewhere(1, 1))


def test_moving_the_wrapper_to_a_gpu_is_refused_rather_than_run_alone():
    wrapper = DataParallel(nn.Linear(1, 1))
    wrapper.double()
    wrapper.module.__class__ = Elsewhere
    with pytest.raises(NotImplementedError, match="move the module by"):
        wrapper.float()


# ---- which engine -------------------------------------------------------------------


def test_auto_takes_threads_where_processes_cannot_be_and_logs_one_line(caplog):
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "paceline"):
        wrapper = DataParallel(module, TWO)
    assert wrapper.engine == "thread"
    assert "'0' (Linear) has hooks" in wrapper.engine_reason
    (record,) = caplog.records
    assert record.name == "paceline"
    assert wrapper.engine_reason in record.getMessage()


def test_auto_takes_threads_for_methods_that_only_they_call():
    class Mine(DataParallel):
        def replicate(self, module, device_ids):
            return super().replicate(module, device_ids)

    wrapper = Mine(nn.Linear(1, 1), TWO)
    assert wrapper.engine == "thread"
    assert "Mine has a replicate() of its own" in wrapper.engine_reason


def test_the_engine_that_was_asked_for_is_taken():
    wrapper = DataParallel(nn.Linear(1, 1), TWO, engine="thread")
    assert wrapper.engine == "thread"
    assert wrapper.engine_reason == "engine='thread' was given"
    assert DataParallel(nn.Linear(1, 1), engine="thread").engine == "none"


class Refusing:
    """An engine of processes to which the model turns out not to travel."""

    name = "process"
    n_replicas = 0
    lock = nullcontext()

    def __init__(self, at_once):
        if at_once:
            raise UnsupportedModelError("it is not to be pickled")

    def run(self, call, scattered):
        raise UnsupportedModelError("it is not to be pickled")

    def finish(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("at_once", [True, False], ids=["when made", "when run"])
def test_auto_falls_back_to_threads_where_the_model_does_not_travel(
    monkeypatch, caplog, at_once
):
    real = engines.make
    monkeypatch.setattr(
        engines,
        "make",
        lambda name, module, n_replicas: (
            Refusing(at_once) if name == "process" else real(name, module, n_replicas)
        ),
    )
    module = nn.Linear(1, 1)
    x = torch.ones(4, 1)
    with DataParallel(module, TWO) as wrapper:
        assert wrapper.engine == "process"
        assert torch.equal(wrapper(x), module(x))
        assert (wrapper.engine, wrapper.engine_reason) == (
            "thread",
            "it is not to be pickled",
        )
        assert "it is not to be pickled" in caplog.text
        assert torch.equal(wrapper(x), module(x))
    with (
        DataParallel(module, TWO, engine="process") as wrapper,
        pytest.raises(UnsupportedModelError),
    ):
        wrapper(x)


def test_replicas_that_are_added_later_get_an_engine():
    with DataParallel(nn.Linear(1, 1), ["cpu"], engine="thread") as wrapper:
        wrapper(torch.ones(2, 1))
        wrapper.device_ids = [CPU, CPU]
        assert wrapper(torch.ones(2, 1)).shape == (2, 1)
        assert wrapper.engine == "thread"
        wrapper.device_ids = []
        assert wrapper.engine == "none"


# ---- one replica is the module ------------------------------------------------------


@pytest.mark.parametrize("device_ids", [None, [], ["cpu"]])
def test_one_replica_gives_the_modules_own_object(device_ids):
    wrapper = DataParallel(Same(), device_ids)
    x, odd = torch.ones(2), object()
    args, kwargs = wrapper(x, [odd], flag=odd)
    assert args[0] is x
    assert args[1][0] is odd
    assert kwargs["flag"] is odd
    assert wrapper() == ()


def test_one_replica_trains_with_the_bits_of_the_plain_module():
    plain = Net()
    ends = []
    for model in (DataParallel(copy.deepcopy(plain)), plain):
        optimizer = torch.optim.Adam(model.parameters())
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3), scale=2.0).square().sum().backward()
            optimizer.step()
        ends.append([t.clone() for t in model.state_dict().values()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("device_ids", [None, ["cpu"]])
def test_marks_are_taken_off_for_one_replica(device_ids):
    wrapper = DataParallel(Same(), device_ids)
    x = torch.ones(2)
    marked = paceline.replicate(x)
    assert wrapper(marked)[0] is x
    assert wrapper({"a": [(1, marked)]})[0]["a"][0][1] is x
    assert wrapper(y=[marked])[1]["y"][0] is x


def test_what_the_module_raises_comes_through_one_replica_unchanged():
    class Bad(nn.Linear):
        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        DataParallel(Bad(1, 1))(torch.ones(1))
    assert caught.value.args == ("mine",)


def test_a_scatter_of_ones_own_is_called_for_one_device_as_in_torch():
    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return (("scattered",),), ({"n": len(device_ids)},)

    assert Mine(Same(), ["cpu"])(1) == (("scattered",), {"n": 1})
    assert Mine(Same())(1) == (1,)


def test_profilers_see_the_forward_by_the_name_of_torch():
    wrapper = DataParallel(nn.Linear(1, 1))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        wrapper(torch.ones(1, 1))
    assert "DataParallel.forward" in {event.key for event in profile.key_averages()}


# ---- methods, called directly and overridden ----------------------------------------


def test_scatter_called_directly_gives_the_arguments_of_each_replica():
    wrapper = DataParallel(Same(), TWO)
    args, kwargs = wrapper.scatter((torch.arange(3), "a"), {"k": 1}, TWO)
    assert [a[0].tolist() for a in args] == [[0, 1], [2]]
    assert [a[1] for a in args] == ["a", "a"]
    assert kwargs == ({"k": 1}, {"k": 1})
    assert wrapper.scatter((), {}, TWO) == ((), ())
    args, kwargs = wrapper.scatter((torch.arange(3),), None, ["cpu"] * 5)
    assert [a[0].tolist() for a in args] == [[0], [1], [2]]


def test_replicate_called_directly_gives_replicas_with_the_same_parameters():
    wrapper = DataParallel(Net(), TWO)
    first, second = wrapper.replicate(wrapper.module, TWO)
    assert first is wrapper.module
    # Nobody knows yet what a forward writes.
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert not any(mine is theirs for mine, theirs in pairs)
    with DataParallel(wrapper.module, TWO, engine="thread") as threads:
        threads(torch.randn(4, 3))
    first, second = wrapper.replicate(wrapper.module, TWO)
    assert second is not first
    assert second._is_replica
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)
    assert wrapper.replicate(wrapper.module, []) == []


def test_parallel_apply_called_directly_runs_each_replica():
    with DataParallel(Same(), TWO) as wrapper:
        replicas = wrapper.replicate(wrapper.module, TWO)
        assert wrapper.parallel_apply(replicas, [(1,), [2]], None) == [(1,), (2,)]
        outputs = wrapper.parallel_apply(replicas, [1, 2], [{"a": 3}, {}])
        assert outputs == [((1,), {"a": 3}), (2,)]


def test_gather_called_directly_joins_the_outputs():
    wrapper = DataParallel(Same(), TWO, dim=1)
    parts = [torch.ones(2, 1), torch.zeros(2, 2)]
    assert wrapper.gather(parts, CPU).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert wrapper.gather([{"a": parts[0]}], CPU)["a"] is parts[0]


class Recording(DataParallel):
    """Overrides every method, and notes what it was given."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def scatter(self, inputs, kwargs, device_ids):
        self.calls.append(("scatter", device_ids))
        return super().scatter(inputs, kwargs, device_ids)

    def replicate(self, module, device_ids):
        self.calls.append(("replicate", device_ids))
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas, inputs, kwargs):
        self.calls.append(("parallel_apply", len(replicas), len(inputs), len(kwargs)))
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs, output_device):
        self.calls.append(("gather", len(outputs), output_device))
        return super().gather(outputs, output_device)


def test_overridden_methods_are_called_in_the_order_of_torch():
    with Recording(nn.Linear(1, 1), ["cpu"] * 3) as wrapper:
        x = torch.arange(2.0).reshape(2, 1)
        assert torch.equal(wrapper(x), wrapper.module(x))
        assert wrapper.calls == [
            ("scatter", [CPU] * 3),
            ("replicate", [CPU] * 2),
            ("parallel_apply", 2, 2, 2),
            ("gather", 2, CPU),
        ]


@pytest.mark.parametrize("name", ["scatter", "replicate", "parallel_apply", "gather"])
def test_each_method_may_be_overridden_alone(name):
    mine = type("Mine", (DataParallel,), {name: getattr(Recording, name)})
    # super() in it names Recording, so the methods are put beside their base.
    called = []

    def method(self, *args):
        called.append(name)
        return getattr(DataParallel, name)(self, *args)

    setattr(mine, name, method)
    with mine(nn.Linear(1, 1), TWO, engine="thread") as wrapper:
        x = torch.arange(5.0).reshape(5, 1)
        for _ in range(3):
            assert torch.equal(wrapper(x), wrapper.module(x))
    assert called == [name] * 3


def test_a_method_may_be_replaced_on_one_object():
    with DataParallel(nn.Linear(1, 1), TWO, engine="thread") as wrapper:
        wrapper.gather = lambda outputs, output_device: len(outputs)
        assert wrapper(torch.ones(4, 1)) == 2


def test_gather_is_overridden_for_a_batch_of_one_row_too():
    class Mine(DataParallel):
        def gather(self, outputs, output_device):
            return len(outputs)

    with Mine(nn.Linear(1, 1), TWO, engine="thread") as wrapper:
        assert wrapper(torch.ones(1, 1)) == 1


def test_a_scatter_that_gives_nothing_calls_the_module_once_as_in_torch():
    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return (), ()

    with Mine(Same(), TWO, engine="thread") as wrapper:
        assert wrapper(1, 2) == ()


def test_a_scatter_whose_lists_disagree_is_an_error():
    class Mine(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return ((1,), (2,)), ({},)

    with (
        Mine(Same(), TWO, engine="thread") as wrapper,
        pytest.raises(ValueError, match="gave 2 replicas arguments, and 1 keyword"),
    ):
        wrapper(1)


# ---- state --------------------------------------------------------------------------


def test_keys_of_the_state_have_the_prefix_of_torch():
    plain = Net()
    ours = DataParallel(copy.deepcopy(plain), TWO).state_dict()
    theirs = nn.DataParallel(plain).state_dict()
    assert list(ours) == list(theirs)
    assert list(ours._metadata) == list(theirs._metadata)


@pytest.mark.parametrize("with_prefix", [True, False])
def test_states_load_with_the_prefix_and_without_it(with_prefix):
    wrapper, other = DataParallel(Net(), TWO), DataParallel(Net(), TWO)
    state = other.state_dict() if with_prefix else other.module.state_dict()
    result = wrapper.load_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    pairs = zip(wrapper.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_a_state_of_another_model_is_refused_with_the_words_of_torch():
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        DataParallel(Net(), TWO).load_state_dict({"other": torch.ones(1)})


def through_pickle(wrapper):
    return pickle.loads(pickle.dumps(wrapper))


def through_file(wrapper):
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_file])
def test_copies_are_wrappers_with_engines_of_their_own(duplicate):
    with DataParallel(Net().eval(), TWO, dim=0, engine="thread") as wrapper:
        x = torch.ones(4, 3)
        expected = wrapper(x)
        other = duplicate(wrapper)
        assert type(other) is DataParallel
        assert (other.device_ids, other.dim, other.engine) == ([CPU] * 2, 0, "thread")
        assert other._engine is None
        assert torch.equal(other(x), expected)
        assert other._engine is not wrapper._engine
        other(x).sum().backward()
        assert wrapper.module.first.weight.grad is None
        other.close()


def test_train_and_eval_reach_the_module_and_return_the_wrapper():
    wrapper = DataParallel(Net(), TWO)
    assert wrapper.eval() is wrapper
    assert not any(part.training for part in wrapper.modules())
    assert wrapper.train() is wrapper


def test_closing_may_be_done_twice_and_the_wrapper_be_used_again():
    wrapper = DataParallel(nn.Linear(1, 1), TWO, engine="thread")
    wrapper.close()
    x = torch.ones(4, 1)
    for _ in range(2):
        for _ in range(2):
            assert torch.equal(wrapper(x), wrapper.module(x))
        wrapper.close()
        wrapper.close()
    with wrapper as entered:
        assert entered is wrapper
        wrapper(x)
    assert wrapper._engine is None


def test_a_wrapper_dies_with_its_last_reference():
    wrapper = DataParallel(nn.Linear(1, 1), TWO, engine="thread")
    for _ in range(2):
        wrapper(torch.ones(2, 1)).sum().backward()
    gone = weakref.ref(wrapper)
    gc.disable()
    try:
        del wrapper
        assert gone() is None  # by its count of references, without a collection
    finally:
        gc.enable()


# ---- replicate, data_parallel, check ------------------------------------------------


def test_marked_arguments_go_whole_to_each_replica():
    class Add(nn.Module):
        def forward(self, x, table):
            return x + table["shift"].sum()

    with DataParallel(Add(), TWO, engine="thread") as wrapper:
        table = {"shift": torch.arange(3)}
        output = wrapper(torch.zeros(5, 1), paceline.replicate(table))
        assert output.tolist() == [[3.0]] * 5
        output = wrapper(
            torch.zeros(5, 1), {"shift": paceline.replicate(torch.arange(3))}
        )
        assert output.tolist() == [[3.0]] * 5


def test_marks_are_found_wherever_they_may_stand():
    mark = paceline.replicate(1)
    pair = collections.namedtuple("Pair", "a b")
    for value in (mark, [mark], (0, [mark]), {"a": (mark,)}, pair(0, [mark])):
        assert marker.has_mark(value)
    for value in (1, torch.ones(1), [1, "a", (None,)], {"a": {}}, object(), pair(0, 1)):
        assert not marker.has_mark(value)


@pytest.mark.parametrize("inputs", [torch.ones(3, 2), (torch.ones(3, 2),)])
def test_data_parallel_is_the_function_to_the_class(inputs):
    module = nn.Linear(2, 1)
    expected = module(torch.ones(3, 2))
    assert torch.equal(paceline.data_parallel(module, inputs, TWO), expected)
    assert torch.equal(paceline.data_parallel(module, inputs), expected)
    named = {"input": torch.ones(3, 2)}
    output = paceline.data_parallel(module, None, TWO, module_kwargs=named)
    assert torch.equal(output, expected)


def test_data_parallel_gives_gradients_after_its_threads_have_ended():
    module = nn.Linear(2, 1)
    paceline.data_parallel(module, torch.ones(4, 2), TWO).sum().backward()
    assert module.weight.grad.tolist() == [[4.0, 4.0]]


def test_data_parallel_without_inputs_calls_the_module_once():
    assert paceline.data_parallel(Same(), None, TWO) == ()
    assert paceline.data_parallel(Same(), (), TWO) == ()


def test_check_agrees_with_itself_on_a_model_of_rows():
    model = Net().eval()
    before = copy.deepcopy(model.state_dict())
    report = paceline.check(model, torch.randn(5, 3), engine="thread")
    assert report.ok
    assert report
    assert (report.engine, report.n_replicas) == ("thread", 2)
    names = [row.name for row in report.rows]
    assert names[1:] == [f"grad {name}" for name, _ in model.named_parameters()]
    assert "\nall agree\n" in str(report)
    assert all(p.grad is None for p in model.parameters())
    assert all(
        torch.equal(mine, before[key]) for key, mine in model.state_dict().items()
    )


def test_check_leaves_the_random_numbers_as_they_are():
    before = torch.get_rng_state()
    paceline.check(nn.Dropout(0.5), torch.ones(4, 3), engine="thread")
    assert torch.equal(before, torch.get_rng_state())


def test_check_shows_what_replicas_compute_otherwise():
    report = paceline.check(Net(), torch.arange(12.0).reshape(4, 3), engine="thread")
    assert not report.ok
    assert "DIFFERS" in str(report)
    assert "note: BatchNorm in training mode" in str(report)


def test_check_says_that_random_numbers_differ():
    report = paceline.check(nn.Dropout(0.5), torch.ones(64, 9), engine="thread")
    assert any("draws random numbers" in note for note in report.notes)


def test_check_takes_arguments_and_losses_in_any_form():
    class Loss(nn.Linear):
        def forward(self, x, scale, *, mean):
            rows = super().forward(x).sum(1) * scale
            return {"loss": rows.mean() if mean else rows, "n": 3}

    model, x = Loss(2, 2).double(), torch.ones(4, 2).double()
    report = paceline.check(
        model,
        {"x": x, "scale": paceline.replicate(torch.tensor(2.0)), "mean": True},
        engine="thread",
    )
    assert report.ok
    assert "mean of replicas" in report.rows[0].name
    report = paceline.check(
        nn.Bilinear(2, 2, 1), (x.float(), x.float()), loss=torch.sum, replicas=3
    )
    assert report.ok


def test_check_finds_outputs_that_are_not_of_the_batch():
    class Sum(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(0)

    report = paceline.check(Sum(1, 1), torch.ones(4, 1), engine="thread")
    assert not report.ok
    assert "[1] torch.float32" in str(report)


def test_check_refuses_a_number_of_replicas_below_one():
    with pytest.raises(ValueError, match="replicas is 0"):
        paceline.check(nn.Linear(1, 1), torch.ones(1, 1), replicas=0)


def test_check_unwraps_a_wrapper_first():
    assert paceline.check(DataParallel(nn.Linear(1, 1), TWO), torch.ones(4, 1)).ok


def test_devices_are_read_the_same_way_everywhere():
    assert devices.read(TWO, None)[0] == [CPU, CPU]
