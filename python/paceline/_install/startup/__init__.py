"""A folder for ``PYTHONPATH``: the children of a program run its ``sitecustomize``.

See ``paceline._install.rebind``.  Nothing imports it as a package.
"""
