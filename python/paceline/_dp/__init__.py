"""DataParallel: replicas of one model in one process.

::

    data_parallel    the wrapper: torch's arguments, and what a subclass overrides
      cpu_engine       replicas on the CPU, in order on the caller's thread
      cpu_copies       what they have of the model
      gpus/            replicas on GPUs, each on a thread
        replicate        replicas of a module: shells round copies of its tensors
        rng              their random numbers
        nesting          whether this thread runs a replica
    devices          of replicas, as the user names them
    marker           arguments that are not to be split

Public names are in ``paceline`` itself.
"""
