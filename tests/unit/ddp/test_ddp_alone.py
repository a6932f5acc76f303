"""A wrapper in a world of one rank: the class itself, without peers."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from types import SimpleNamespace

import paceline
import pytest
import torch
import torch.distributed as dist
from paceline import DistributedDataParallel
from support.prints import without_gloo
from support.programs import run_python
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

pytestmark = pytest.mark.usefixtures("alone")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.last(self.drop(self.norm(self.first(x)))) * scale


def pair():
    """Return a wrapper, and a plain copy of the model that it wraps."""
    torch.manual_seed(0)
    plain = Net()
    return DistributedDataParallel(copy.deepcopy(plain)), plain


# ---- as the plain module ------------------------------------------------------------


def test_training_and_evaluation_give_the_bits_of_the_plain_module():
    wrapper, plain = pair()
    ends = []
    for model in (wrapper, plain):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3), scale=2.0).square().sum().backward()
            optimizer.step()
        state = [t.flatten().double() for t in model.state_dict().values()]
        ends.append(torch.cat([*state, model.eval()(torch.ones(5, 3)).flatten()]))
    assert torch.equal(*ends)


def test_no_sync_accumulates_and_restores_what_was():
    wrapper = DistributedDataParallel(nn.Linear(2, 1))
    x = torch.ones(1, 2)
    with wrapper.no_sync():
        assert not wrapper.require_backward_grad_sync
        with wrapper.no_sync():
            wrapper(x).sum().backward()
        assert not wrapper.require_backward_grad_sync
    with pytest.raises(KeyError), wrapper.no_sync():
        raise KeyError
    assert wrapper.require_backward_grad_sync is True
    wrapper(x).sum().backward()
    assert wrapper.module.weight.grad.tolist() == [[2.0, 2.0]]


def test_the_output_is_the_modules_own_object():
    class Odd(nn.Linear):
        def forward(self, x):
            self.out = {"a": [super().forward(x)]}
            return self.out

    wrapper = DistributedDataParallel(Odd(1, 1))
    assert wrapper(torch.ones(1)) is wrapper.module.out


# ---- state --------------------------------------------------------------------------


def test_states_have_the_keys_of_torch_and_each_others_load():
    wrapper, plain = pair()
    theirs = TorchDDP(plain).state_dict()
    state = wrapper.state_dict()
    assert (
        list(state) == list(theirs) == ["module." + key for key in plain.state_dict()]
    )
    assert list(state._metadata) == list(theirs._metadata)
    wrapper.load_state_dict(theirs)
    destination = {}
    assert wrapper.state_dict(destination=destination, prefix="x.") is destination
    assert list(destination) == ["x." + key for key in state]


@pytest.mark.parametrize("with_prefix", [True, False])
def test_a_wrong_state_names_its_missing_and_unexpected_keys(with_prefix):
    wrapper = DistributedDataParallel(nn.Linear(1, 1))
    prefix = "module." if with_prefix else ""
    state = {prefix + "weight": torch.ones(1, 1)}
    with pytest.raises(RuntimeError, match=f"Missing.*{prefix}bias"):
        wrapper.load_state_dict(state)
    result = wrapper.load_state_dict(state, strict=False)
    assert result.missing_keys == [prefix + "bias"]


def test_a_wrapper_that_was_saved_on_a_gpu_moves_no_inputs_on_the_cpu():
    wrapper, _ = pair()
    wrapper.device_ids, wrapper.output_device, wrapper._moves_inputs = [0], 0, True
    loaded = pickle.loads(pickle.dumps(wrapper)).eval()  # as with map_location="cpu"
    assert (loaded.device_ids, loaded.output_device) == (None, None)
    assert loaded(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_is_a_wrapper_of_its_own(clone):
    wrapper = DistributedDataParallel(Net(), bucket_cap_mb=3)
    wrapper.require_backward_grad_sync = False
    wrapper.mine = 5
    twin = clone(wrapper)
    assert (twin.mine, twin.bucket_bytes_cap) == (5, 3 << 20)
    assert type(twin) is DistributedDataParallel
    assert twin.module is not wrapper.module
    assert twin.process_group is wrapper.process_group
    for mine, theirs in zip(twin.parameters(), wrapper.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    twin(torch.ones(2, 3)).sum().backward()
    assert twin.module.last.weight.grad is not None
    assert wrapper.module.last.weight.grad is None
    assert twin.require_backward_grad_sync is True  # as in copies by torch


FRESH = """
import pickle, sys, tempfile
import torch
import torch.distributed as dist
file = tempfile.NamedTemporaryFile()
dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
loaded = pickle.load(open(sys.argv[1], "rb"))
for name in ("hooked", "dp"):
    loaded[name](torch.ones(2, 2)).sum().backward()
    print(name, all(p.grad is not None for p in loaded[name].parameters()))
"""


def test_pickles_train_in_a_process_that_has_made_no_wrapper(alone, tmp_path):
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(alone, default_hooks.allreduce_hook)
    wrapped = paceline.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    data = tmp_path / "wrappers.pkl"
    data.write_bytes(pickle.dumps({"hooked": hooked, "dp": wrapped}))
    done = run_python(FRESH, data, check=False)
    told = without_gloo(done.stdout)
    assert told.split("\n")[:2] == ["hooked True", "dp True"], done.stderr


def test_a_wrapper_of_another_group_does_not_pickle_in_the_words_of_torch():
    group = dist.new_group([0])
    wrapper = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    with pytest.raises(
        RuntimeError, match="DDP Pickling/Unpickling are only supported"
    ):
        pickle.dumps(wrapper)


# ---- the class ----------------------------------------------------------------------


def test_it_is_an_instance_of_the_class_of_torch_and_of_module():
    wrapper = DistributedDataParallel(nn.Linear(1, 1))
    assert isinstance(wrapper, TorchDDP)
    assert isinstance(wrapper, nn.Module)
    assert isinstance(wrapper, dist.algorithms.join.Joinable)
    assert not isinstance(wrapper, nn.DataParallel)
    plain = Net()
    assert repr(DistributedDataParallel(plain)) == repr(TorchDDP(plain))


def test_its_constructor_takes_the_arguments_of_torch_in_the_order_of_torch():
    mine = inspect.signature(DistributedDataParallel).parameters
    theirs = inspect.signature(TorchDDP).parameters
    missing = set(theirs) - set(mine)
    assert missing == set()
    common = [name for name in mine if name in theirs]
    assert common == list(theirs)
    if "forward_sync_buffers" not in theirs:  # with it, the other defaults to None
        common.remove("broadcast_buffers")
    for name in common:
        assert mine[name].default == theirs[name].default, name


ATTRIBUTES = """
dim device_ids output_device device device_type process_group broadcast_buffers
find_unused_parameters gradient_as_bucket_view static_graph require_backward_grad_sync
require_forward_param_sync parameters_to_ignore bucket_bytes_cap join_device
join_process_group _distributed_rank
"""


def test_it_has_the_attributes_of_torch_that_users_read():
    wrapper = DistributedDataParallel(Net(), bucket_cap_mb=2)
    theirs = TorchDDP(Net(), bucket_cap_mb=2)
    for name in ATTRIBUTES.split():
        assert getattr(wrapper, name) == getattr(theirs, name), name
    assert len(wrapper.modules_buffers) == len(theirs.modules_buffers)
    assert len(wrapper._module_parameters) == len(theirs._module_parameters)


def test_the_attributes_of_the_module_are_not_those_of_the_wrapper():
    wrapper = DistributedDataParallel(Net())
    with pytest.raises(AttributeError, match=r"'DistributedDataParallel'.*'first'"):
        wrapper.first  # noqa: B018


@pytest.mark.parametrize("is_known_to_its_module", [False, True])
def test_a_wrapper_that_is_dropped_goes_and_leaves_the_bare_module(
    is_known_to_its_module,
):
    net = Net()
    wrapper = DistributedDataParallel(net, strict=True)
    wrapper(torch.ones(2, 3)).sum().backward()
    reducer, gone = wrapper.reducer, weakref.ref(wrapper)
    gc.disable()
    try:
        if is_known_to_its_module:
            object.__setattr__(net, "wrapper", wrapper)
            del wrapper, net
            gc.collect()
        else:
            del wrapper
            net(torch.ones(2, 3)).sum().backward()
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="is gone"):
        reducer._rebuild_buckets()


# ---- arguments ----------------------------------------------------------------------


NOT_NEEDED = {
    "dim": [1],
    "device_ids": [None, []],
    "find_unused_parameters": [True],
    "gradient_as_bucket_view": [True],
    "static_graph": [True],
    "skip_all_reduce_unused_params": [True],
    "batched_grad_copy": [True],
    "init_sync": [False],
    "broadcast_buffers": [False],
    "forward_sync_buffers": [False],
    "bucket_cap_mb": [25, 0.001],
    "mixed_precision": [None, MixedPrecision(torch.bfloat16)],
    "accumulate_in_fp32": [False],
    "bucket_cap_mb_list": [None, [1, 2]],
    "strict": [True, False],
}


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_an_argument_that_is_not_needed_is_accepted(name):
    for value in NOT_NEEDED[name]:
        wrapper = DistributedDataParallel(nn.Linear(1, 1), **{name: value})
        wrapper(torch.ones(1)).backward()


NO_SIZES = [0, -1, -0.5, 1e-9, float("nan"), float("inf")]
OF_ANOTHER_TYPE = [  # name, value, words of the message
    ("process_group", "gloo", "'gloo'"),
    ("process_group", 3, "3"),
    ("device_mesh", "cpu", "'cpu'"),
    ("bucket_cap_mb", "large", "'large'"),
    ("bucket_cap_mb", [25], r"\[25\]"),
    ("bucket_cap_mb_list", 25, "25"),
    ("bucket_cap_mb_list", [1, None], "None"),
    ("strict", "no", "'no'"),
    ("mixed_precision", "any", "'any'"),
    ("mixed_precision", _MixedPrecision(torch.int8), r"int8, .*"),
    ("mixed_precision", torch.bfloat16, r"torch\.bfloat16"),
]
FLAGS = [
    MixedPrecision(keep_low_precision_grads=True),
    MixedPrecision(cast_root_forward_inputs=False),
    SimpleNamespace(**vars(_MixedPrecision()), cast_forward_inputs=False),
]
OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER
NO_GRADIENT = "any parameter that requires a gradient"
REFUSED = [
    *((n, v, TypeError, f"^{n} is .*{bad}: give ") for n, v, bad in OF_ANOTHER_TYPE),
    *(("bucket_cap_mb", n, ValueError, f"bucket_cap_mb is {n}") for n in NO_SIZES),
    *(("module", m, TypeError, "module is ") for m in (None, 3, [nn.Linear(1, 1)])),
    ("process_group", OUTSIDE, ValueError, "process_group does not have this rank"),
    ("module", nn.ReLU(), RuntimeError, NO_GRADIENT),
    ("accumulate_in_fp32", True, NotImplementedError, "is gone: give mixed_precision="),
    *(("mixed_precision", c, NotImplementedError, "always cast, ") for c in FLAGS),
]


@pytest.mark.parametrize(("name", "value", "kind", "words"), REFUSED)
def test_an_argument_that_is_refused_is_named_with_its_value(name, value, kind, words):
    with pytest.raises(kind, match=words):
        DistributedDataParallel(**{"module": nn.Linear(1, 1), name: value})


BROADCAST = {"broadcast_buffers": False}
WARNED = [
    ({"check_reduction": True}, "`check_reduction` argument"),
    (BROADCAST, "`broadcast_buffers` is depr"),
    ({**BROADCAST, "forward_sync_buffers": True}, "Both `broadcast_buffers` and"),
]


@pytest.mark.parametrize(("given", "words"), WARNED)
def test_an_argument_of_the_past_is_warned_of_as_in_torch(given, words):
    of_2_13 = isinstance(getattr(TorchDDP, "broadcast_buffers", None), property)
    for wrap in (DistributedDataParallel, TorchDDP):
        if of_2_13 or "broadcast_buffers" not in given:
            with pytest.warns(FutureWarning, match=words) as seen:
                wrap(nn.Linear(1, 1), **given)
            assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("broadcast", "forward", "result"),
    [
        (None, None, True),
        (False, None, False),
        (None, False, False),
        (True, True, True),
    ],
)
def test_either_name_says_whether_buffers_are_synchronised(broadcast, forward, result):
    wrapper = DistributedDataParallel(
        nn.BatchNorm1d(1), broadcast_buffers=broadcast, forward_sync_buffers=forward
    )
    assert wrapper.broadcast_buffers is result
    assert wrapper.forward_sync_buffers is result
    assert wrapper.will_sync_module_buffers() is result


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_ids": [0, 1]}, "only be None or contain a single element"),
        ({"device_ids": [0]}, "device_ids and output_device arguments"),
        ({"output_device": 1}, "device_ids and output_device arguments"),
        ({"output_device": "cpu"}, "device_ids and output_device arguments"),
    ],
    ids=str,
)
def test_device_arguments_on_the_cpu_are_refused_in_the_words_of_torch(given, words):
    for wrap in (TorchDDP, DistributedDataParallel):
        with pytest.raises(ValueError, match=words):
            wrap(nn.Linear(1, 1), **given)


def test_a_rank_that_is_alone_trains_a_sparse_embedding():
    model = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    model(torch.tensor([1, 3, 1])).sum().backward()
    assert model.module.weight.grad.layout == torch.sparse_coo
    assert model.module.weight.grad.to_dense().sum(1).tolist() == [0, 4, 0, 2]


# ---- against new versions of torch --------------------------------------------------

INHERITED = {
    "made by the class": """
        __abstractmethods__ __annotate_func__ __annotations__ _abc_impl""",
    "set on torch's class, where dynamo looks": "_active_ddp_module",
    "reads that": "_get_active_ddp_module",
    "called by torch's constructor alone, which is not run": """
        _build_debug_param_to_name_mapping _build_params_for_reducer _ddp_init_helper
        _delayed_all_reduce_hook _get_parameters _module_wait_for_copy_hook
        _passing_sync_batchnorm_handle _register_accum_grad_hook
        _register_delay_all_reduce_hook _root_copy_hook""",
    "called by torch's forward alone, which is not run": """
        _inside_ddp_forward _lazy_init _clear_grad_buffer _setup_in_backward_optimizers
        _should_disable_cpp_reducer""",
    "called by torch's join alone, which is not run": """
        _check_and_sync_module_buffers _check_global_requires_backward_grad_sync
        _match_all_reduce_for_bwd_pass _match_unused_params_allreduce
        _sync_final_model""",
    "called with mixed_precision alone, which needs none of it": """
        _fire_reducer_autograd_hook""",
    "called by torch's __getstate__, which is replaced": "_check_default_group",
    "called by torch's finalize_backward, which is replaced": """
        _check_manual_backward_finalization_supported""",
    "depends on its arguments, or on attributes that are set, alone": """
        _find_common_rank _check_sync_bufs_post_fwd _check_sync_bufs_pre_fwd
        _assign_modules_buffers _check_comm_hook _distributed_rank
        _get_data_parallel_params _set_params_and_buffers_to_ignore_for_model gather
        join_device join_process_group scatter to_kwargs train""",
    "calls the buffers' hook, or broadcasts over the process group": """
        _sync_buffers _sync_module_buffers _default_broadcast_coalesced
        _distributed_broadcast_coalesced""",
    "asks self.reducer or self.logger, which paceline._ddp.torch_reducer answers": """
        _log_and_throw _get_ddp_logging_data _set_ddp_runtime_logging_sample_rate
        _remove_autograd_hooks _check_reducer_finalized _set_sparse_metadata
        _update_process_group""",
    "registers a communication hook": "_register_fused_optim",
    "sets what nothing reads: outputs are never cloned": "_set_ddp_sink_clone",
}


def replaced():
    """Return the names that our class, or its bases below torch's class, define."""
    kinds = DistributedDataParallel.__mro__
    return {name for kind in kinds[: kinds.index(TorchDDP)] for name in vars(kind)}


def test_every_method_of_torch_is_either_replaced_or_has_been_reviewed():
    reviewed = {name for names in INHERITED.values() for name in names.split()}
    unknown = set(vars(TorchDDP)) - replaced() - reviewed
    assert not unknown, f"torch {torch.__version__} has members that need a review"
    assert replaced() & reviewed <= set(INHERITED["made by the class"].split())


def test_the_graph_may_be_declared_static_with_the_warnings_of_torch():
    for wrap in (DistributedDataParallel, TorchDDP):
        wrapper = wrap(nn.Linear(1, 1))
        wrapper._set_static_graph()
        assert wrapper.static_graph is True
        with pytest.warns(UserWarning, match="no need to set it again"):
            wrapper._set_static_graph()
        with pytest.warns(UserWarning, match="will detect unused parameters"):
            wrap(nn.Linear(1, 1), find_unused_parameters=True, static_graph=True)


# ---- sampled steps ------------------------------------------------------------------


def test_a_rank_alone_measures_nothing():
    model = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    data = model._get_ddp_logging_data()
    assert data["iteration"] == 2
    assert data["backward_comm_time"] == data["backward_compute_time_end"] == 0
    assert data["can_set_static_graph"] == 0
    assert model.reducer.get_backward_stats() == [0, 0]
