"""The start-up hook of a process whose parent has called ``paceline.install()``.

Python imports it as ``sitecustomize``, since this folder is first in ``PYTHONPATH``.
It takes the folder out of ``sys.path``, hooks into the import of torch, and gives its
place to the ``sitecustomize`` that would have been found without it, or to none.

It may be met by any Python, so it speaks the language of all of them; and it imports
nothing of paceline, for most processes never import torch.
"""

import os
import sys


def _install():  # type: ignore[no-untyped-def] # of any Python
    """Install paceline, where this interpreter has it: another one may not."""
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
    if sys.version_info >= (3, 10):  # noqa: UP036 (this is met by others, too)
        import importlib.util

        _spec = importlib.util.spec_from_file_location(
            "_paceline_import_hook",
            os.path.join(os.path.dirname(_here), "import_hook.py"),
        )
        if _spec is not None and _spec.loader is not None:
            _hook = importlib.util.module_from_spec(_spec)
            _spec.loader.exec_module(_hook)
            _hook.begin(_install)
    # Whatever this raises is what Python would have met without us: no module of that
    # name, or that module's own failure.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
