"""Binds torch's names to Paceline's classes, in this process and its children.

``rebind.py`` binds the names, ``functions.py`` has functions for some of them,
``import_hook.py`` waits for the import of torch, and Python imports ``startup/`` when a
child process starts.
"""
