"""``paceline bench``: which wrapper, ranks and threads are fastest on this machine.

``command.py`` starts a world for each number of ranks, in which the contestants of
``steps.py`` take turns; it prints one table and the advice.  ``models.py`` has the
models; ``tests/bench`` times them too.
"""
