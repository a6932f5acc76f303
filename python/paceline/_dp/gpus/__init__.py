"""Replicas on several GPUs of one process.

::

    engine       one forward: a thread a device, in the ordinary graph
    parameters   what each device has of the model, and the way of its gradients
    segments     which tensors travel together, and where they lie
    transfers    arguments to the devices, outputs back
    group        the devices, and their streams

Who runs a replica (a thread, by ``engine``) knows nothing of how tensors move
(``group``, over ``csrc/replicas``).  All order is on the devices, by events: no host
waits for a device in a forward or a backward.
"""
