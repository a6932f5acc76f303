"""Mutants that change nothing that a program could see, each with the reason."""

from mutants import all_mutants

# Operators and a reason, followed by the places that it applies to: a file, a function,
# a piece of its text.
REASONS = """
other stream: the host waits for each copy, and for the operation between them, and
nothing else touches the memory that is tried
    csrc/nccl/gpu_comm_trial.c fill pli_cuda_write(
    csrc/nccl/gpu_comm_trial.c check pli_cuda_read(

other stream, side stream: moves at once are of the CPU, which has no streams
    csrc/reducer/reducer_deliver.c move_in ops->copy(
    csrc/reducer/reducer_deliver.c move_in ops->add(
    csrc/reducer/reducer_deliver.c stream_in ops->copy(
    csrc/reducer/reducer_deliver.c pl_reducer_mark_ready stream_in(
    csrc/reducer/reducer_deliver.c pl_reducer_mark_ready move_in(
    csrc/reducer/reducer_finish.c pl_reducer_mark_unused ops->copy(

other stream, side stream: what is marked unused is packed at the step's close alone, on
that very stream; one more stream is only waited for in vain
    csrc/reducer/reducer_finish.c pl_reducer_mark_unused pli_reducer_defer(

other stream, side stream: one mean alone is that of a sparse gradient, which the CPU
has
    csrc/reducer/reducer_finish.c pl_reducer_rescale_mean ops->scale(

side stream: a bucket may be packed on any stream: it comes behind those of its
gradients, and they behind it; only time is lost
    csrc/reducer/reducer_deliver.c pli_reducer_post_ready pack(
    csrc/reducer/reducer_deliver.c count_ready pli_reducer_post_ready(
    csrc/reducer/reducer_deliver.c pl_reducer_mark_ready count_ready(
    csrc/reducer/reducer_finish.c close_step pli_reducer_post_ready(

drop order, other stream, side stream: the memory that is tried is new, and no stream
has anything to do with it yet
    csrc/reducer/reducer.c pl_reducer_prepare pli_reducer_record_side(

other stream: after a failure the host waits for the side streams of all members before
    csrc/replicas/device_group.c end_call end_call_on(

boundary: a copy of no moves does nothing
    csrc/replicas/device_group.c pack i < segment->n_moves

boundary: of two that are equal either is the least
    csrc/replicas/device_group.c least a < b
    csrc/reducer/step.c pl_step_count_grads n < UINT8_MAX
    csrc/reducer/step_forwards.c byte_of n < UINT8_MAX
    csrc/python/dp/scatter.c scatter self->n_replicas < self->n_rows
    csrc/python/dp/scatter.c scatter n < 1

boundary: the member behind the last one never adds
    csrc/replicas/device_group.c pli_gradient_sum_end k < self->n_members

boundary: what is read behind the end is not used
    csrc/python/dp/tree.c pli_leaf_shape d < dl.ndim
    csrc/python/dp/scatter.c cut_packed j < PyTuple_GET_SIZE(part)
    csrc/replicas/device_group.c pack j < n

drop call: a gradient whose layout is not known is copied: only time is lost
    csrc/reducer/step_grads.c write_late self->grads->read(

never: streams that are the current ones already are made so again: only time is lost
    python/paceline/_dp/group.py Streams.on group.native.streams() == self.numbers

drop statement: what looks alike is compared, and fetched where it is not
    python/paceline/_dp/parameters.py ModelCopies._send self._layout = None

always: a new parameter that is a buffer, too, takes the place of one, and is sent
    python/paceline/_dp/segments.py Layout._take_buffers not segment.is_parameter

always: None is in no tensor's place
    python/paceline/_dp/segments.py Layout._take_buffers b is not None

never: its gradients are put aside from their block as they come: only room is lost
    python/paceline/_dp/segments.py Layout.__init__ of.sparse

"""


def _places() -> list[tuple[str, str, str, list[str], str]]:
    """Return the path, function, piece of text, operators and reason of each place."""
    found = []
    for block in REASONS.strip().split("\n\n"):
        words, *lines = block.split("\n    ")
        operators, _, reason = words.replace("\n", " ").partition(": ")
        for line in lines:
            path, function, piece = line.split(maxsplit=2)
            found.append((path, function, piece, operators.split(", "), reason))
    return found


PLACES = _places()


def equivalents() -> dict[str, str]:
    """Return the reason of each equivalent mutant, by its name."""
    return {
        mutant.name: reason
        for mutant in all_mutants()
        for path, function, piece, operators, reason in PLACES
        if (mutant.path, mutant.function) == (path, function)
        and mutant.operator in operators
        and piece in mutant.text
    }
