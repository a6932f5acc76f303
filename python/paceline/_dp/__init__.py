"""DataParallel: replicas of one model in one process.

::

    data_parallel    the wrapper: torch's arguments, and methods to override
      engine           one forward: replicas in order on the CPU, on threads on GPUs
        originals        guards the module while replicas run in order
        threads          threads of replicas, with torch's thread state (thread_state)
        rng              random numbers and their generators
      parameters       copies of the model on each device
        segments         which tensors travel together, and where they lie
        gradients        sums of gradients; backwards inside a forward
        replicate        makes replicas of a module, which shells keeps
      transfers        arguments to the devices, outputs back
        group            devices and their streams, over csrc/replicas; or the CPU
    devices          devices of replicas, as the user names them
    marker           arguments that must not be split

Events order all work on the devices: the host waits for no device in a forward or a
backward, except to read what decides how a batch is split (docs/gpus.md).  Public names
are in ``paceline`` itself.
"""
