"""Replicas in worker processes.

::

    caller                                      worker
    engine    a forward                         replica    does what is asked
    backward  a backward; autograd has its nodes
    model_sync  what workers have of the model
      shared_model  the model; model_memory, snapshot,     snapshot_load
                    imports: what it consists of
      workers       the processes; outbox: what they have yet to receive
    messages  what is said, both ways           messages
    pickling  how it is said                    pickling
"""
