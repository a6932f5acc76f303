"""What every replica computes with, in a thread and in a process.

::

    call             what an engine is given for one forward
    errors           why replicas cannot run in processes, or have failed there
    nesting          whether this thread runs a replica
    devices          of replicas, as the user names them
    replicate        replicas of a module in one process
    rng, generators  random numbers, and which generators a model holds
    thread_state     what torch keeps a thread
"""
