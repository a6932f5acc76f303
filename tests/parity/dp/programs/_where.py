"""Which rows run on the CPU alone, and which have new tensors put on a device."""

ON_THE_CPU_ALONE = {
    "torch itself fails where a gradient of torch.func goes from device to device": (
        "transforms_of_a_forward_give_what_they_give_plainly[grad]",
        "transforms_of_a_forward_give_what_they_give_plainly[hessian]",
        "transforms_of_a_forward_give_what_they_give_plainly[jacrev]",
        "transforms_of_parameters_do_as_with_the_plain_module[by sample]",
        "transforms_of_parameters_do_as_with_the_plain_module[grad]",
        "transforms_of_parameters_do_as_with_the_plain_module[hessian]",
        "transforms_of_parameters_do_as_with_the_plain_module[jacrev]",
        "transforms_of_parameters_do_as_with_the_plain_module[vmap of grad]",
        "vmaps_may_go_over_a_backward",
    ),
    "NumPy reads the memory of the CPU alone": (
        "arrays_are_split_and_come_back_as_arrays",
        "the_form_of_outputs_may_change_from_call_to_call",
        "outputs_have_the_plain_form_and_gradients[arrays]",
        "trained_weights_are_clipped_by_what_the_rows_are[clip_by_numpy at once]",
        "trained_weights_are_clipped_by_what_the_rows_are[clip_by_numpy later]",
    ),
    "forward reaches what is on the first device alone, past the module": (
        "a_part_is_reached_past_the_module[leading_by_attribute]",
        "a_part_is_reached_past_the_module[leading_by_closure]",
        "a_trained_tensor_inside_an_argument_gets_its_gradient",
        "a_trained_tensor_that_is_no_parameter_gets_its_gradient[closure]",
        "a_trained_tensor_that_is_no_parameter_gets_its_gradient[default]",
        "a_trained_tensor_that_is_no_parameter_gets_its_gradient[hidden]",
    ),
    "torch has one cache of parametrizations for all replicas": (
        "parametrizations_may_be_cached_over_several_calls",
    ),
    "torch quantises on the CPU": ("a_quantised_module_runs_in_evaluation",),
}

NEW_TENSORS_ON_THE_CURRENT_DEVICE = (
    "a_batch_of_gradients_may_have_a_graph",
    "attributes_that_forward_sets_are_those_of_the_first_replica",
    "a_buffer_may_take_other_memory_or_less_of_its_own",
    "a_checkpoint_round_a_wrapper_in_a_wrapper",
    "a_largest_norm_may_come_after_wrapping[replace]",
    "a_trace_of_the_wrapper_computes_what_it_is_given",
    "a_trained_tensor_that_is_no_parameter_gets_its_gradient",
    "a_wrapper_may_stand_among_others",
    "an_output_may_have_a_sparse_gradient",
    "buffers_of_the_first_replica_survive",
    "constants_and_losses_come_with_one_entry_a_replica",
    "functional_calls_work_round_the_wrapper",
    "gradients_may_be_views_of_one_vector",
    "one_backward_may_go_through_two_wrappers_in_a_thread",
    "parameters_take_another_form_between_forward_and_backward",
    "tensors_for_parameters_belong_to_the_graphs_that_saved_them",
    "transforms_of_parameters_do_as_with_the_plain_module[vjp]",
    "wrappers_in_a_row_pass_graphs_on",
)


def _is_among(name: str, names: tuple[str, ...]) -> bool:
    return name in names or name.partition("[")[0] in names


def is_on_the_cpu_alone(name: str) -> bool:
    """Tell whether a row cannot run on GPUs."""
    return any(_is_among(name, names) for names in ON_THE_CPU_ALONE.values())


def leaves_devices_out(name: str) -> bool:
    """Tell whether a row makes tensors without a word on where they are to be."""
    return _is_among(name, NEW_TENSORS_ON_THE_CURRENT_DEVICE)
