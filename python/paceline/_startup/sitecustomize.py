"""The start-up hook of a process whose parent has called ``paceline.install()``.

Python imports it as ``sitecustomize``, since this folder is first in ``PYTHONPATH``.
It takes the folder out of ``sys.path``, has torch watched for, and gives its place to
the ``sitecustomize`` that would have been found without it, or to none.

It may be met by any Python, so it speaks the language of all of them; and it imports
nothing of paceline, for most processes never import torch.
"""

import os
import sys

if __name__ == "sitecustomize":
    _here = os.path.dirname(os.path.realpath(__file__))
    for _entry in list(sys.path):
        if _entry.endswith("_startup") and os.path.realpath(_entry) == _here:
            sys.path.remove(_entry)
            sys.path_importer_cache.pop(_entry, None)
    if sys.version_info >= (3, 10):  # noqa: UP036 (this is met by others, too)
        import importlib.util

        _spec = importlib.util.spec_from_file_location(
            "_paceline_watch", os.path.join(os.path.dirname(_here), "_watch.py")
        )
        if _spec is not None and _spec.loader is not None:
            _watch = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(_watch)
            _watch.begin(_watch.install_in_child)
    # Whatever this raises is what Python would have met without us: no module of that
    # name, or that module's own failure.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
