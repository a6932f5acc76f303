"""Paceline's classes under torch's names, here and in the processes started here.

``rebind.py`` puts the names, ``import_hook.py`` waits for torch to be imported, and
``startup/`` is what Python imports when a child process begins.
"""
