"""``paceline top`` and ``paceline trace``: what running jobs have recorded.

``summary.py`` computes numbers from recorded steps, ``table.py`` shows them with rich,
``events.py`` makes a trace of them; ``top.py`` and ``trace.py`` are the commands.
They only read files; no job waits for them.
"""
