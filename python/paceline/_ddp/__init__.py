"""DistributedDataParallel: one training step over the ranks of a process group.

::

    distributed      the wrapper: torch's constructor, pickles, join
      torch_surface    its other methods, and torch's private names
        forward          before and after the module's forward
        join             uneven inputs
        torch_reducer    ``model.reducer`` and ``model.logger``
      session          what is behind them: world, reducer, model, hook, log
        forward_pass     from the outputs of a forward to their backward
        comm_hooks       averages by the user's hooks
        greeting         what ranks tell one another first, and must agree on
        rendezvous       from a process group to a world of ranks (peers: which live;
                         job_secret: the key of their handshakes)
        model_spec       what models must agree on (placement: their devices)
      csrc/python/ddp, csrc/reducer: where gradients are averaged

Public names are in ``paceline`` itself.
"""
