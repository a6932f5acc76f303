"""DataParallel: replicas of one model in one process.

::

    data_parallel    the wrapper: torch's arguments, and what a subclass overrides
      engine           one forward: replicas in order on the CPU, on threads on GPUs
        originals        the module beside replicas that run in order
        threads          with what torch keeps a thread (thread_state)
        rng, generators  random numbers, and where they come from
      parameters       what each device has of the model
        segments         which tensors travel together, and where they lie
        gradients        their way back; inner_backwards: inside a forward
        replicate        replicas of a module, which shells keeps
      transfers        arguments to the devices, outputs back
        group            the devices, and their streams, over csrc/replicas; the CPU
    devices          of replicas, as the user names them
    marker           arguments that are not to be split

All order is on the devices, by events: no host waits for a device in a forward or a
backward.  Public names are in ``paceline`` itself.
"""
