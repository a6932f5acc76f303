"""The start-up hook of a process whose parent has called ``paceline.install()``.

Python imports it as ``sitecustomize``, because this folder is first in ``PYTHONPATH``.
It removes the folder from ``sys.path``, hooks into the import of torch, and then
imports the ``sitecustomize`` that Python would have found without it, if any.

Any version of Python may run it, so it uses only syntax that all of them accept.  It
imports nothing of paceline, because most processes never import torch.
"""

import os
import sys


def _install():  # type: ignore[no-untyped-def] # for any Python
    """Install paceline, if this interpreter has it."""
    try:
        from paceline._install import rebind
    except ImportError:
        return
    rebind.install_in_child()


if __name__ == "sitecustomize":
    _here = os.path.dirname(os.path.realpath(__file__))
    for _entry in list(sys.path):
        if _entry.endswith("startup") and os.path.realpath(_entry) == _here:
            sys.path.remove(_entry)
            sys.path_importer_cache.pop(_entry, None)
    if sys.version_info >= (3, 10):  # noqa: UP036 (older ones may run this, too)
        import importlib.util

        _spec = importlib.util.spec_from_file_location(
            "_paceline_import_hook",
            os.path.join(os.path.dirname(_here), "import_hook.py"),
        )
        if _spec is not None and _spec.loader is not None:
            _hook = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(_hook)
            _hook.begin(_install)
    # This raises what Python would have met without us: no module of that name, or an
    # error of that module.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
