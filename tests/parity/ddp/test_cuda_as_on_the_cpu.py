"""What holds on the CPU holds on GPUs: the same tests, on simulated CUDA and NCCL.

What `tests/gpu/check_*.py` say of gradients, models and failures is not repeated here.
"""

import os

from gpus import again
from support import fake_gpus

HERE = globals()


def environment():
    """Return what the ranks need; fewer loops are drawn than on the CPU."""
    return {**fake_gpus.environment(), "FUZZ": os.environ.get("FUZZ", "8")}


again(
    "test_gradients",
    HERE,
    """
    test_a_gradient_keeps_the_strides_that_torch_would_give_it
    test_a_gradient_that_arrives_in_other_strides_is_averaged
    test_an_expanded_gradient_is_averaged
    test_parameters_without_elements_and_without_dimensions_are_averaged
    test_a_gradient_of_the_users_own_is_added_to
    """,
    ("test_random_gradients_have_the_same_bits_on_every_rank", (3,), {"cap": [0.013]}),
)
again(
    "test_accumulation",
    HERE,
    """
    test_parameters_used_only_in_micro_steps_are_synchronised_by_the_next
    test_a_gradient_that_nobody_used_is_the_same_object_with_the_same_values
    test_ranks_own_gradients_of_what_nobody_used_are_left_alone
    test_kept_gradients_are_not_changed_by_the_peers
    test_swapped_gradients_are_told_apart
    test_one_tensor_as_the_gradient_of_two_parameters_is_added_to_by_both
    test_gradients_live_on_after_the_wrapper
    test_a_module_may_be_wrapped_again
    test_several_backwards_follow_the_forwards
    test_a_forward_that_is_never_gone_back_through_is_forgotten
    test_backward_towards_some_inputs_averages_those
    test_an_exception_in_a_backward_of_every_rank_leaves_the_wrapper_usable
    test_a_rank_that_is_late_hears_of_the_failure_at_that_step
    """,
    (
        "test_no_sync_accumulates_and_the_next_backward_averages_all",
        (2,),
        {"style": ["switched by hand"]},
    ),
    (
        "test_parameters_may_be_unused",
        (2,),
        {"use": ["the last ones from the fourth step on"], "set_to_none": [True]},
    ),
)
again(
    "test_local_gradients",
    HERE,
    "",
    (
        "test_gradients_kept_from_a_step_follow_those_to_come",
        (2,),
        {"first": [1], "zero": [True]},
    ),
)
again(
    "test_models",
    HERE,
    """
    test_a_weight_that_is_used_again_is_averaged_once
    test_buffers_arrive_where_they_are_used
    test_replaced_buffers_are_found
    test_a_block_may_be_used_more_often_from_step_to_step
    test_accumulation_with_checkpointing
    test_expanded_parameters_and_buffers_are_taken_from_rank_0
    """,
    ("test_parameters_and_buffers_are_those_of_rank_0_if_asked_for", (3,), {}),
    ("test_statistics_of_batch_norm_are_those_of_torch", (2, 3), {}),
)
again(
    "test_steps",
    HERE,
    """
    test_a_checkpointed_wrapper_takes_its_steps
    test_ranks_may_cut_their_batches_into_different_numbers_of_parts
    """,
)
again(
    "test_loops",
    HERE,
    "",
    ("test_backwards_of_this_kind_give_the_same_values", (2,), {"how": ["recorded"]}),
)
again(
    "test_recipes",
    HERE,
    "",
    (
        "test_a_recipe_gives_the_bits_of_torch",
        (2,),
        {
            "recipe": [
                "projected_conflicting_gradients",
                "adversarial_training",
                "accumulation_with_clipping_and_a_scheduler",
                "several_optimizers",
                "optimizers_of_every_kind",
                "hooks_on_modules_and_tensors",
            ]
        },
    ),
)
again(
    "test_sixteen",
    HERE,
    "",
    (
        "test_paceline_works_where",
        (2,),
        {
            "name": [
                "gradients_are_taken_by_autograd_grad",
                "two_forwards_come_before_one_backward",
                "rank_0_alone_evaluates",
            ]
        },
    ),
    (
        "test_paceline_raises_at_once_on_every_rank_where",
        (2,),
        {"name": ["rank_1_takes_a_step_fewer_and_drops_its_model"]},
    ),
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
    """,
    (
        "test_a_rank_that_alone_changes_what_travels_is_an_error_on_all",
        (2,),
        {"what": ["a parameter is replaced"], "whose": [1]},
    ),
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
    test_what_is_ignored_is_neither_copied_nor_averaged
    test_synchronisation_of_buffers_may_be_switched_off_and_on
    test_delayed_gradients_come_out_averaged
    test_optimizers_in_backward_step_by_averages
    """,
)
again(
    "test_bad_input",
    HERE,
    "test_an_option_that_differs_is_named_on_every_rank",
)
again(
    "test_process_groups",
    HERE,
    "",
    ("test_groups_of_some_ranks_are_averaged_apart", (4,), {}),
)
again(
    "test_differential_programs",
    HERE,
    "test_drawn_loops_are_those_of_the_plain_module",
)
