"""``paceline doctor``: what this machine has, what is wrong with it, and what to do.

A check has two halves: one looks at the machine and returns what it read, the other
judges the readings and touches nothing.  ``table.py`` lists the checks in the order in
which they are printed; those that may crash or hang run in a process of their own.
"""
