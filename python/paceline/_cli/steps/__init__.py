"""``paceline top`` and ``paceline trace``: what running jobs have recorded.

``summary.py`` makes numbers of recorded steps, ``table.py`` shows them by rich,
``events.py`` makes a trace of them; ``top.py`` and ``trace.py`` are the commands.
Everything is read, from files that no process waits for.
"""
