"""A folder for ``PYTHONPATH``: what is here reaches the children of a program.

See ``paceline._install``.  Nothing imports it as a package.
"""
