"""Which of torch's own tests run with our class, how, and with what verdict.

Every test of `DistributedTest._DistTestBase` that makes a DistributedDataParallel, or
has it in its name, stands here once; `torch_suite.py` runs them.
"""

from __future__ import annotations

import ast
import inspect
import re

# By how they run: tests, and how many wrappers each makes in a rank.  As they are: they
# need no GPU.
PLAIN = {
    "test_DistributedDataParallelCPU": 1,
    "test_DistributedDataParallelCPU_grad_is_view": 1,
    "test_DistributedDataParallel_requires_grad": 1,
    "test_accumulate_gradients_no_sync": 1,
    "test_accumulate_gradients_no_sync_allreduce_hook": 1,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": 1,
    "test_accumulate_gradients_no_sync_grad_is_view": 1,
    "test_ddp_create_graph": 1,
    "test_ddp_logging_data_cpu": 2,
    "test_grads_same_across_ranks_with_no_sync": 1,
}

# With PACELINE_STRICT=1: they want one of torch's refusals.
STRICT = {"test_static_graph_api_cpu": 1}

# With the CPU in the GPU's place: see `cpu_shim.py`.
ADAPTED = {
    "test_DistributedDataParallel_with_amp_and_grad_is_view": 2,
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger": 1,
    "test_ddp_apply_optim_in_backward": 16,
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": 8,
    "test_ddp_apply_optim_in_backward_ignored_params": 2,
    "test_ddp_broadcast_buffer": 1,
    "test_ddp_broadcast_buffer_via_hook": 2,
    "test_ddp_broadcast_buffers_deprecation_warning": 6,
    "test_ddp_bucket_cap_mb_list": 2,
    "test_ddp_buffer_hook_allreduce": 4,
    "test_ddp_buffer_hook_allreduce_return_future": 4,
    "test_ddp_build_debug_param_to_name_mapping": 3,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": 1,
    "test_ddp_comm_hook_logging": 9,
    "test_ddp_compile_static_graph": 2,
    "test_ddp_device_mesh_initialization": 3,
    "test_ddp_forward_backward_hook": 1,
    "test_ddp_grad_div_uneven_inputs": 1,
    "test_ddp_hook_parity_allreduce": 2,
    "test_ddp_hook_parity_allreduce_process_group": 2,
    "test_ddp_hook_parity_post_localSGD": 6,
    "test_ddp_hook_parity_powerSGD": 4,
    "test_ddp_ignore_params_arg": 8,
    "test_ddp_inference": 2,
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false": 1,
    "test_ddp_join_model_equivalence": 1,
    "test_ddp_join_respects_forward_sync_buffers_false": 1,
    "test_ddp_model_diff_num_params_across_ranks": 1,
    "test_ddp_model_diff_shape_across_ranks": 1,
    "test_ddp_namedtuple": 1,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": 1,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": 1,
    "test_ddp_native_mixed_precision_ignored_params": 1,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": 1,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": 1,
    "test_ddp_new_tensor_in_fwd": 2,
    "test_ddp_new_tensor_in_fwd_static_graph": 2,
    "test_ddp_python_error_logged": 1,
    "test_ddp_remove_autograd_hooks": 2,
    "test_ddp_returns_tensor_with_no_grad": 4,
    "test_ddp_shared_grad_acc_unused_params": 2,
    "test_ddp_sink_noclone": 1,
    "test_ddp_static_graph_nested_types": 2,
    "test_ddp_sync_module_states": 1,
    "test_ddp_uneven_input_exception": 1,
    "test_ddp_uneven_input_join_disable": 1,
    "test_ddp_uneven_inputs": 126,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": 2,
    "test_ddp_zero_output_features": 1,
    "test_detect_ddp_is_actually_static": 3,
    "test_different_graph_across_ranks": 2,
    "test_get_data_parallel_params": 1,
    "test_post_localSGD_optimizer_parity": 2,
    "test_post_localSGD_optimizer_parity_grad_is_view": 2,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd": 2,
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view": 2,
    "test_post_localSGD_optimizer_step_reload": 1,
    "test_skip_all_reduce_unused_parameters": 2,
    "test_stateless_api_with_ddp": 1,
    "test_static_graph_multi_forward": 1,
    "test_undefined_grad_parity_unused_parameters": 1,
    "test_verify_model_across_rank_with_logger": 1,
    "test_verify_model_across_rank_without_logger": 1,
}

# Both.
ADAPTED_STRICT = {
    "test_ddp_control_flow_different_across_ranks": 6,
    "test_ddp_control_flow_same_across_ranks": 6,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": 3,
    "test_ddp_multiple_nested_unused_params_error": 3,
    "test_ddp_unused_params_rebuild_buckets_exception": 3,
    "test_invalid_static_graph": 1,
    "test_output_unused_in_loss_dict_module": 2,
    "test_output_unused_in_loss_tuple_module": 2,
}

_TRAFFIC = (
    2,
    r"line \d+, in _test_ddp_profiling",
    "it counts Gloo's all-reduces and torch's search for unused parameters in a "
    "profile: gradients travel through shared memory, and nothing is searched",
)
# What ours does not do: how many wrappers, what a failure must show, and why.  All run
# adapted.
DIFFERS = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        1,
        r"TypeError: _compute_bucket_assignment_by_size\(\): incompatible",
        "hands `model.logger` to a function of torch that wants torch's C++ object",
    ),
    "test_ddp_profiling_autograd_profiler": _TRAFFIC,
    "test_ddp_profiling_torch_profiler": _TRAFFIC,
}

# In an older torch two of those that pass ask for more.
OLDER = {
    "test_ddp_model_diff_shape_across_ranks": (
        r'"appears not to match" does not match "DDP expects same model across all ',
        "wants torch's words for other shapes, not those for other models",
    ),
    "test_verify_model_across_rank_with_logger": (
        r"TypeError: _verify_params_across_processes\(\): incompatible",
        "hands `model.logger` to a function of torch that wants torch's C++ object",
    ),
}

_SYNC_BATCH_NORM = [
    "test_DistributedDataParallel_SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
    "test_DistributedDataParallel_SyncBatchNorm_half",
    "test_sync_bn_logged",
]
# Those that torch's own class does not pass here either.
NOT_RUN = {
    **dict.fromkeys(
        _SYNC_BATCH_NORM, "needs a GPU: SyncBatchNorm has no kernels for the CPU"
    ),
    "test_DistributedDataParallel": "torch skips it on Linux; its own class fails it "
    "on the CPU (parameters differ from the plain model's)",
    "test_DistributedDataParallel_non_default_stream": "needs a GPU: its streams",
    "test_ddp_device": "needs a GPU: compares the number of each tensor's device",
    "test_ddp_has_finalized": "torch skips it everywhere; wants NCCL's time-out",
    "test_ddp_hook_pickling_powerSGD": "torch skips it everywhere; it loads its own "
    "pickle with `weights_only`, which refuses it",
    "test_ddp_logging_data_gpu": "needs a GPU: reads its number in the logging data",
    "test_ddp_profiling_execution_trace": "torch skips it everywhere; wants NCCL",
    "test_ddp_sync_bn_training_vs_eval": "torch skips it everywhere; "
    "SyncBatchNorm has no kernels for the CPU",
    "test_dump_DDP_relevant_env_vars": "makes no DistributedDataParallel",
}


RUN = {
    **dict.fromkeys(PLAIN, "plain"),
    **dict.fromkeys(STRICT, "strict"),
    **dict.fromkeys(ADAPTED, "adapted"),
    **dict.fromkeys(ADAPTED_STRICT, "adapted, strict"),
}

# How many wrappers each makes in a rank, as seen with torch's own class, which passes
# them all.  It is seen again for a few of them, and for all by hand.
BUILT = {**PLAIN, **STRICT, **ADAPTED, **ADAPTED_STRICT}
BUILT |= {test: n_built for test, (n_built, *_) in DIFFERS.items()}


def candidates(source: str) -> set[str]:
    """Return the tests in torch's file that are about DistributedDataParallel.

    Parameters
    ----------
    source : str
        The text of `distributed_test.py`.
    """
    top = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "DistributedTest"
    )
    base = next(node for node in top.body if isinstance(node, ast.ClassDef))
    lines = source.splitlines()
    texts = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in base.body
        if isinstance(node, ast.FunctionDef)
    }
    makers = {
        name for name, text in texts.items() if "DistributedDataParallel(" in text
    }
    while more := {
        name
        for name, text in texts.items()
        if name not in makers and makers.intersection(re.findall(r"self\.(\w+)", text))
    }:
        makers |= more
    named = {name for name in texts if "ddp" in name.lower()}
    return {name for name in makers | named if name.startswith("test_")}


def source_of_torch() -> str:
    """Return the text of the installed torch's file of tests, without importing it."""
    import torch.testing

    folder = inspect.getfile(torch.testing).rpartition("/")[0]
    path = f"{folder}/_internal/distributed/distributed_test.py"
    with open(path, encoding="utf-8") as file:
        return file.read()
