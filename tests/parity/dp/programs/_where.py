"""Which rows cannot run on some devices, and which make tensors on the CPU."""

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

NEW_TENSORS_ON_THE_CPU = (
    "a trace",
    "a trace inside",
    "exported",
    "packed_sequences_are_joined_within_a_tuple",
    "packed_sequences_are_split_by_rows",
)

NOT_ON_ONE_REAL_GPU = {
    "it draws other random numbers than the CPU": (
        "pruning_ends_with_the_weights_that_are_left",
        "weights_computed_later[old spectral_norm]",
        "weights_computed_later[pruned twice]",
        "weights_computed_later[spectral_norm]",
    ),
    "outputs are on the second GPU": (
        "a_checkpoint_round_the_wrapper_with_several_outputs[1, early]",
        "a_checkpoint_round_the_wrapper_with_several_outputs[1, late]",
    ),
}


def _is_among(name: str, names: tuple[str, ...]) -> bool:
    return name in names or name.partition("[")[0] in names


def is_on_the_cpu_alone(name: str) -> bool:
    """Tell whether a row cannot run on GPUs."""
    return any(_is_among(name, names) for names in ON_THE_CPU_ALONE.values())


def makes_on_the_cpu(name: str) -> bool:
    """Tell whether a row on GPUs makes tensors that must be on the CPU."""
    return _is_among(name, NEW_TENSORS_ON_THE_CPU)


def runs_on_one_real_gpu(name: str) -> bool:
    """Tell whether a row can run with replicas that share a real GPU."""
    return not any(name in names for names in NOT_ON_ONE_REAL_GPU.values())
