"""``paceline bench``: what wrappers, ranks, replicas and threads give on this machine.

``command.py`` starts a world for each number of ranks.  In it contestants take turns:
``all_reduce.py`` has the bare collective, ``steps.py`` whole training steps.
``report.py`` makes ratios, lines and the advice of what came out, ``tables.py`` prints
it, ``plot.py`` draws a picture.

The models, the statistics and the description of the machine serve ``tests/bench`` too.
"""
