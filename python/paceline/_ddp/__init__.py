"""DistributedDataParallel: one training step over the ranks of a process group.

::

    distributed    the wrapper: torch's constructor, pickles; its methods are in
                   forward, comm_hooks, join and torch_surface
      session        what it has behind them: world, reducer, model, options
        rendezvous     from a process group to a world of ranks (peers: who is alive)
        model_spec     what the ranks' models must agree on (placement: where they are)
      csrc/python/ddp, csrc/reducer: gradients are averaged there

Public names are in ``paceline`` itself.
"""
