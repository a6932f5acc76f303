"""Runs an action as soon as torch is imported, and costs nothing until then.

``paceline.pth`` begins it in each Python that starts with ``PACELINE_INSTALL=1``.  Most
of them never import torch, so this file imports nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _ImportHook:
    """A finder that uses the other finders, and adds the action to torch's loader."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """A module's own loader, followed by the action."""

    def __init__(self, loader: Any, hook: _ImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._hook in sys.meta_path:  # end() may have removed it meanwhile
            sys.meta_path.remove(self._hook)
            self._hook.action()


def begin(action: Callable[[], None]) -> None:
    """Call `action` once, right after torch is imported; later calls change nothing."""
    if not is_on():
        sys.meta_path.insert(0, _ImportHook(action))


def is_on() -> bool:
    """Tell whether a hook waits for the import of torch."""
    return any(isinstance(finder, _ImportHook) for finder in sys.meta_path)


def end() -> None:
    """Remove the hook."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _ImportHook)]


def begin_install() -> None:
    """Install once torch is imported; a failure is a line, and the program goes on."""

    def install() -> None:
        try:
            import paceline

            paceline.install()
        except Exception as error:
            if sys.stderr:  # else print() would take sys.stdout
                words = "paceline: PACELINE_INSTALL=1 has no effect:"
                print(words, repr(error), file=sys.stderr)

    if "torch" in sys.modules:  # another .pth file has imported it
        install()
    else:
        begin(install)
