"""What holds on the CPU holds on GPUs: the same tests, on simulated CUDA and NCCL.

What `tests/gpu/check_*.py` say of gradients, models and failures is not repeated here.
"""

from gpus import again
from support.fake_gpus import environment  # noqa: F401  # for the ranks

HERE = globals()

again(
    "test_gradients",
    HERE,
    """
    test_a_gradient_keeps_the_strides_that_torch_would_give_it
    test_a_gradient_that_arrives_in_other_strides_is_averaged
    test_an_expanded_gradient_is_averaged
    test_parameters_without_elements_and_without_dimensions_are_averaged
    test_a_gradient_of_the_users_own_is_added_to
    test_a_gradient_in_other_strides_of_the_users_own_is_added_to
    test_the_object_of_a_gradient_survives_accumulation
    """,
    ("test_random_gradients_have_the_same_bits_on_every_rank", (3,), {"cap": [0.013]}),
)
again(
    "test_accumulation",
    HERE,
    """
    test_synchronisation_switched_by_hand_is_no_sync
    test_parameters_used_only_in_micro_steps_are_synchronised_by_the_next
    test_parameters_used_in_one_ranks_micro_steps_alone_are_synchronised
    test_a_gradient_that_nobody_used_is_the_same_object_with_the_same_values
    test_ranks_own_gradients_of_what_nobody_used_are_left_alone
    test_a_parameter_that_becomes_used_late_is_averaged
    test_kept_gradients_are_not_changed_by_the_peers
    test_kept_gradients_can_be_added_and_put_back
    test_swapped_gradients_are_told_apart
    test_one_tensor_as_the_gradient_of_two_parameters_is_added_to_by_both
    test_gradients_live_on_after_the_wrapper
    test_a_module_may_be_wrapped_again
    test_two_forwards_before_one_backward
    test_two_losses_of_one_output_go_backward_apart
    test_a_second_backward_through_a_retained_graph
    test_a_forward_that_is_never_gone_back_through_is_forgotten
    test_gradients_by_autograd_grad_are_local_and_leave_the_wrapper_usable
    test_backward_towards_some_inputs_averages_those
    test_an_exception_in_a_backward_of_every_rank_leaves_the_wrapper_usable
    test_a_rank_that_is_late_hears_of_the_failure_at_that_step
    """,
)
again(
    "test_models",
    HERE,
    """
    test_a_weight_used_by_two_layers_is_averaged_once
    test_a_layer_used_twice_is_averaged_once
    test_frozen_parameters_have_no_gradient
    test_ignored_parameters_stay_local
    test_buffers_arrive_where_they_are_used
    test_buffers_stay_local_if_asked_for
    test_two_forwards_through_batch_norm_before_one_backward
    test_replaced_buffers_are_found
    test_evaluation_on_one_rank_alone_waits_for_nobody
    test_gradients_flow_to_the_inputs
    test_a_block_may_be_used_more_often_from_step_to_step
    test_accumulation_with_checkpointing
    test_the_wrapper_itself_may_be_checkpointed
    test_expanded_parameters_and_buffers_are_taken_from_rank_0
    """,
    ("test_parameters_and_buffers_are_those_of_rank_0_if_asked_for", (3,), {}),
    ("test_statistics_of_batch_norm_are_those_of_torch", (2, 3), {}),
)
again(
    "test_loops",
    HERE,
    """
    test_recorded_backwards_give_the_same_values_and_second_gradients
    test_hooks_of_the_user_on_tensors_see_local_gradients
    test_the_norm_for_clipping_is_that_of_the_averaged_gradients
    test_several_optimizers_share_a_model
    test_foreach_and_fused_optimizers_take_the_gradients
    """,
)
again(
    "test_comm_hooks",
    HERE,
    """
    test_a_builtin_hook_gives_the_bits_of_torch
    test_a_copy_keeps_the_hook_and_has_a_state_of_its_own
    test_a_model_that_is_changed_keeps_its_hook
    """,
    ("test_a_hook_of_torch_gives_its_bits", (2,), {"name": ["allreduce", "PowerSGD"]}),
)
again(
    "test_join",
    HERE,
    """
    test_means_over_active_ranks_are_those_of_torch
    test_batch_norm_ends_with_the_statistics_of_torch
    """,
    (
        "test_uneven_batches_train_as_in_torch",
        (2,),
        {"counts": ["one more each", "rank 0 has none"]},
    ),
)
again(
    "test_join_failures",
    HERE,
    "test_early_termination_raises_everywhere_in_the_words_of_torch",
)
again(
    "test_state",
    HERE,
    """
    test_what_was_loaded_is_what_is_evaluated
    test_a_model_may_change_between_steps
    test_what_was_accumulated_before_a_change_is_still_averaged
    test_a_change_on_one_rank_alone_is_an_error_on_both
    """,
)
again(
    "test_surface",
    HERE,
    """
    test_a_forward_made_of_its_parts_gives_the_gradients_of_torch
    test_a_rank_may_train_on_alone_and_come_back
    """,
)
again(
    "test_surface_training",
    HERE,
    """
    test_synchronisation_of_buffers_may_be_switched_off_and_on
    test_delayed_gradients_come_out_averaged
    test_optimizers_in_backward_step_by_averages
    """,
)
again(
    "test_bad_input",
    HERE,
    """
    test_an_option_that_differs_is_named_on_every_rank
    test_different_numbers_of_backwards_are_an_error_that_says_so
    """,
    ("test_groups_of_some_ranks_are_averaged_apart", (4,), {}),
)
again(
    "test_random_programs",
    HERE,
    "",
    (
        "test_random_loops_on_two_ranks_are_those_of_the_plain_module",
        (2,),
        {"seed": range(6)},
    ),
)
