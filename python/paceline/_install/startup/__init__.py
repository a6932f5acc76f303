"""A folder for ``PYTHONPATH``: what is here reaches the children of a program.

See ``paceline._install.rebind``.  Nothing imports it as a package.
"""
