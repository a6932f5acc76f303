"""What holds on the CPU holds on GPUs: the same tests, on a fake of CUDA."""

from gpus import again
from support.fake_gpus import environment  # noqa: F401  # for the ranks

ALL = {}

again(
    "test_gradients",
    globals(),
    ("test_steps_on_exact_data_give_the_bits_of_torch", (2,), ALL),
    ("test_steps_on_three_ranks_agree_with_torch_to_rounding", (3,), ALL),
    ("test_random_gradients_have_the_same_bits_on_every_rank", (3,), {"cap": [0.013]}),
    ("test_every_type_is_averaged_exactly", (2,), ALL),
    ("test_types_may_be_mixed_in_one_model", (2,), ALL),
    ("test_a_gradient_keeps_the_strides_that_torch_would_give_it", (2,), ALL),
    ("test_a_channels_last_model_trains_as_the_plain_one", (2,), ALL),
    ("test_a_gradient_that_arrives_in_other_strides_is_averaged", (2,), ALL),
    ("test_an_expanded_gradient_is_averaged", (2,), ALL),
    (
        "test_parameters_without_elements_and_without_dimensions_are_averaged",
        (2,),
        ALL,
    ),
    ("test_a_model_of_a_thousand_parameters_is_averaged", (2,), ALL),
    ("test_infinite_and_missing_numbers_reach_every_rank", (2,), ALL),
    ("test_gradients_are_reset_in_either_way", (2,), ALL),
    ("test_backwards_add_up_without_a_reset", (2,), ALL),
    ("test_a_gradient_of_the_users_own_is_added_to", (2,), ALL),
    ("test_a_gradient_in_other_strides_of_the_users_own_is_added_to", (2,), ALL),
    ("test_the_object_of_a_gradient_survives_accumulation", (2,), ALL),
)
again(
    "test_accumulation",
    globals(),
    ("test_no_sync_accumulates_and_the_next_backward_averages_all", (2,), ALL),
    ("test_synchronisation_switched_by_hand_is_no_sync", (2,), ALL),
    (
        "test_parameters_used_only_in_micro_steps_are_synchronised_by_the_next",
        (2,),
        ALL,
    ),
    (
        "test_parameters_used_in_one_ranks_micro_steps_alone_are_synchronised",
        (2,),
        ALL,
    ),
    ("test_parameters_may_be_unused", (2,), ALL),
    (
        "test_a_gradient_that_nobody_used_is_the_same_object_with_the_same_values",
        (2,),
        ALL,
    ),
    ("test_ranks_own_gradients_of_what_nobody_used_are_left_alone", (2,), ALL),
    ("test_a_parameter_that_becomes_used_late_is_averaged", (2,), ALL),
    ("test_kept_gradients_survive_the_next_backwards", (2,), ALL),
    ("test_kept_gradients_are_not_changed_by_the_peers", (2,), ALL),
    ("test_kept_gradients_can_be_added_and_put_back", (2,), ALL),
    ("test_swapped_gradients_are_told_apart", (2,), ALL),
    (
        "test_one_tensor_as_the_gradient_of_two_parameters_is_added_to_by_both",
        (2,),
        ALL,
    ),
    ("test_gradients_live_on_after_the_wrapper", (2,), ALL),
    ("test_a_module_may_be_wrapped_again", (2,), ALL),
    ("test_two_forwards_before_one_backward", (2,), ALL),
    ("test_two_losses_of_one_output_go_backward_apart", (2,), ALL),
    ("test_a_second_backward_through_a_retained_graph", (2,), ALL),
    ("test_a_forward_that_is_never_gone_back_through_is_forgotten", (2,), ALL),
    (
        "test_gradients_by_autograd_grad_are_local_and_leave_the_wrapper_usable",
        (2,),
        ALL,
    ),
    ("test_backward_towards_some_inputs_averages_those", (2,), ALL),
    ("test_two_wrappers_go_backward_together_and_in_any_order", (2,), ALL),
    (
        "test_an_exception_in_a_backward_of_every_rank_leaves_the_wrapper_usable",
        (2,),
        ALL,
    ),
    (
        "test_a_rank_that_is_late_hears_of_the_failure_at_that_step",
        (2,),
        ALL,
    ),
    ("test_copies_of_a_wrapper_are_averaged_on_their_own", (2,), ALL),
)
again(
    "test_models",
    globals(),
    ("test_a_weight_used_by_two_layers_is_averaged_once", (2,), ALL),
    ("test_a_layer_used_twice_is_averaged_once", (2,), ALL),
    ("test_frozen_parameters_have_no_gradient", (2,), ALL),
    ("test_ignored_parameters_stay_local", (2,), ALL),
    ("test_parameters_and_buffers_are_those_of_rank_0_if_asked_for", (3,), ALL),
    ("test_statistics_of_batch_norm_are_those_of_torch", (2, 3), ALL),
    ("test_buffers_arrive_where_they_are_used", (2,), ALL),
    ("test_buffers_stay_local_if_asked_for", (2,), ALL),
    ("test_two_forwards_through_batch_norm_before_one_backward", (2,), ALL),
    ("test_replaced_buffers_are_found", (2,), ALL),
    ("test_evaluation_on_one_rank_alone_waits_for_nobody", (2,), ALL),
    ("test_gradients_flow_to_the_inputs", (2,), ALL),
    ("test_every_block_may_be_checkpointed", (2,), ALL),
    ("test_a_block_may_be_used_more_often_from_step_to_step", (2,), ALL),
    ("test_accumulation_with_checkpointing", (2,), ALL),
    ("test_the_wrapper_itself_may_be_checkpointed", (2,), ALL),
    ("test_expanded_parameters_and_buffers_are_taken_from_rank_0", (2,), ALL),
)
again(
    "test_loops",
    globals(),
    ("test_recorded_backwards_give_the_same_values_and_second_gradients", (2,), ALL),
    ("test_training_under_autocast", (2,), ALL),
    ("test_hooks_of_the_user_on_tensors_see_local_gradients", (2,), ALL),
    ("test_the_norm_for_clipping_is_that_of_the_averaged_gradients", (2,), ALL),
    ("test_several_optimizers_share_a_model", (2,), ALL),
    ("test_foreach_and_fused_optimizers_take_the_gradients", (2,), ALL),
)
again(
    "test_comm_hooks",
    globals(),
    (
        "test_a_hook_of_torch_gives_its_bits",
        (2,),
        {"name": ["allreduce", "fp16", "PowerSGD"]},
    ),
    ("test_a_builtin_hook_gives_the_bits_of_torch", (2,), ALL),
    ("test_a_copy_keeps_the_hook_and_has_a_state_of_its_own", (2,), ALL),
    ("test_a_model_that_is_changed_keeps_its_hook", (2,), ALL),
)
again(
    "test_join",
    globals(),
    (
        "test_uneven_batches_train_as_in_torch",
        (2,),
        {"counts": ["one more each", "rank 0 has none"]},
    ),
    ("test_means_over_active_ranks_are_those_of_torch", (2,), ALL),
    ("test_batch_norm_ends_with_the_statistics_of_torch", (2,), ALL),
)
again(
    "test_join_failures",
    globals(),
    ("test_early_termination_raises_everywhere_in_the_words_of_torch", (2,), ALL),
)
again(
    "test_state",
    globals(),
    ("test_what_was_loaded_is_what_is_evaluated", (2,), ALL),
    ("test_training_goes_on_after_loading", (2,), ALL),
    ("test_a_copy_of_a_trained_wrapper_trains_on", (2,), ALL),
    ("test_a_model_may_change_between_steps", (2,), ALL),
    ("test_what_was_accumulated_before_a_change_is_still_averaged", (2,), ALL),
    ("test_a_change_on_one_rank_alone_is_an_error_on_both", (2,), ALL),
)
again(
    "test_surface",
    globals(),
    ("test_a_forward_made_of_its_parts_gives_the_gradients_of_torch", (2,), ALL),
    ("test_a_rank_may_train_on_alone_and_come_back", (2,), ALL),
)
again(
    "test_surface_training",
    globals(),
    ("test_synchronisation_of_buffers_may_be_switched_off_and_on", (2,), ALL),
    ("test_delayed_gradients_come_out_averaged", (2,), ALL),
    ("test_optimizers_in_backward_step_by_averages", (2,), ALL),
)
again(
    "test_bad_input",
    globals(),
    ("test_an_option_that_differs_is_named_on_every_rank", (2,), ALL),
    ("test_groups_of_some_ranks_are_averaged_apart", (4,), ALL),
    ("test_different_numbers_of_backwards_are_an_error_that_says_so", (2,), ALL),
)
again(
    "test_random_programs",
    globals(),
    (
        "test_random_loops_on_two_ranks_are_those_of_the_plain_module",
        (2,),
        {"seed": range(6)},
    ),
)
