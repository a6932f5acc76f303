"""Worker processes: started, watched and ended.  Nothing here knows of models.

``group.py`` is the caller's handle, ``spawn.py`` the command line and the environment
of a worker, ``main.py`` what a worker runs.
"""
