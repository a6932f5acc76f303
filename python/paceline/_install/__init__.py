"""Binds torch's names to Paceline's classes, in this process and its children.

``rebind.py`` binds the names, ``functions.py`` has functions for some of them,
``import_hook.py`` waits for the import of torch, and ``paceline.pth`` in the folder
``site-packages`` starts that in processes with ``PACELINE_INSTALL=1``.
"""
