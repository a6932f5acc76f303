"""DistributedDataParallel: one training step over the ranks of a process group.

::

    distributed      the wrapper: torch's constructor, pickles, join
      torch_surface    its other methods, and torch's private names
        forward          before and after the module's forward
        join             uneven inputs
        torch_reducer    ``model.reducer`` and ``model.logger``
      session          what it has behind them: world, reducer, model, hook, log
        forward_pass     from the outputs of a forward to their backward
        comm_hooks       the user's own averages
        rendezvous       from a process group to a world of ranks (peers: who is alive)
        model_spec       what models must agree on (placement: where they are)
      csrc/python/ddp, csrc/reducer: gradients are averaged there

Public names are in ``paceline`` itself.
"""
