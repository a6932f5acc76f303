"""Allowed dependences between folders of csrc/ and packages of python/paceline.

``rules.py`` runs these checks with its own.  Both tables list, for a folder, the others
that it may include or import.  A folder that is in no table is an error.
"""

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator

Found = Iterator[tuple[int, str, str]]

_BASE = {"include", "core"}
_COMM = _BASE | {"backend", "ipc", "comm"}
_CORE = _COMM | {"nccl", "reducer", "replicas"}
C_FOLDERS: dict[str, set[str]] = {
    "include": set(),
    "core": {"include"},
    "backend": _BASE,
    "ipc": _BASE,
    "comm": _BASE | {"backend", "ipc"},
    "nccl": _COMM,
    "reducer": _COMM,
    "replicas": _BASE | {"backend"},
    "python": _CORE,
    "python/ddp": _CORE | {"python"},
    "python/dp": _CORE | {"python"},
}
# Files with separate rules, instead of those of their folder.
C_FILES: dict[str, set[str]] = {
    "core/status": {"include"},
    "python/module": _CORE | {"python", "python/ddp", "python/dp"},
}

_LEAVES = {"_native", "_environment", "_cgroup", "_cloudpickle", "_errors", "_waiting"}
_TOOLS = {"_gpu", "_files", "_checksum", "_checkpoint", "_recorder", "_values"}
_TOOLS |= {"_messages"}
_LOW = _LEAVES | {"_compat"} | _TOOLS
PACKAGES: dict[str, set[str]] = {
    "_native": {"_errors"},
    "_errors": set(),
    "_environment": {"_native"},
    "_cgroup": set(),
    "_waiting": set(),
    "_cloudpickle": set(),
    "_compat": _LEAVES,
    **dict.fromkeys(sorted(_TOOLS), _LOW),
    "_dp": _LOW,
    "_ddp": _LOW,
    "_launch": _LOW,
    "_install": {"", "_dp", *_LOW},
    "_cli": {"", "_install", *_LOW},
    "__main__": {"_cli"},
    "callbacks": set(),
    "data": _LOW,
    "": {"callbacks", "data", "_ddp", "_dp", "_install", "_launch", *_LOW},
}


# ---- C ------------------------------------------------------------------------------


def includes(code: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the quote and the name of each #include of a text."""
    pattern = r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]'
    for match in re.finditer(pattern, code, flags=re.MULTILINE):
        yield code.count("\n", 0, match.start()) + 1, match[1], match[2]


def target_of(path: str, include: str) -> str:
    """Return the path under csrc/ of #include "include" in a file there."""
    folder = path.rpartition("/")[0]
    return include if "/" in include else f"{folder}/{include}"


def check_includes(path: str, code: str) -> Found:
    """A file of csrc/ includes only from its own folder and from allowed ones."""
    folder = path.rpartition("/")[0]
    allowed = C_FILES.get(path.rpartition(".")[0], C_FOLDERS.get(folder))
    if allowed is None:
        yield 1, "layers", f"{folder}/ is in no table: see tests/lint/dependence.py"
        return
    own = path.rpartition(".")[0]
    for line, quote, name in includes(code):
        if name == "Python.h" and not path.startswith("python/"):
            yield line, "layers", "only csrc/python may include Python.h"
        if quote != '"':
            continue
        target = target_of(path, name)
        home = target.rpartition("/")[0]
        if "./" in name or home not in C_FOLDERS:
            yield line, "layers", f'"{name}": give its path from csrc/ or in its folder'
        elif target.rpartition(".")[0] == own:
            continue
        elif home not in allowed and (home != folder or own in C_FILES):
            yield line, "layers", f"{own if own in C_FILES else folder} includes {home}"


# ---- Python -------------------------------------------------------------------------


def package_of(module: str) -> str:
    """Return the row of the table that a module of paceline belongs to."""
    names = [name for name in PACKAGES if name and f"{module}.".startswith(f"{name}.")]
    return max(names, key=len, default="")


def module_of(path: str) -> str:
    """Return the module's name below paceline; "" is paceline itself."""
    name = path.rpartition(".")[0].replace("/", ".")
    return name.removesuffix("__init__").rstrip(".")


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name, below paceline, of each import of a text.

    This includes imports under ``if TYPE_CHECKING:``.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "paceline" or name.startswith("paceline."):
                yield node.lineno, name.removeprefix("paceline").lstrip(".")


def check_imports(path: str, text: str) -> Found:
    """A module imports only from its own package and from allowed ones."""
    if not path.endswith(".py"):
        return
    package = package_of(module_of(path))
    for line, name in imports(text):
        target = package_of(name)
        if target != package and target not in PACKAGES[package]:
            words = f"{package or 'paceline'} imports {target or 'paceline'}"
            yield line, "packages", words


# ---- cycles -------------------------------------------------------------------------


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return a cycle of a graph, if there is one."""
    others = {name: targets - {name} for name, targets in edges.items()}
    try:
        graphlib.TopologicalSorter(others).prepare()
    except graphlib.CycleError as error:
        return [sorted(set(error.args[1]))]
    return []


def include_circles(texts: dict[str, str]) -> list[list[str]]:
    """Return a cycle of includes among files of csrc/, given by path."""
    edges = {
        path: {target_of(path, n) for _, quote, n in includes(text) if quote == '"'}
        for path, text in texts.items()
    }
    return circles(edges)


def import_circles(texts: dict[str, str]) -> list[list[str]]:
    """Return a cycle of imports among modules of paceline, given by path.

    Imports for type hints count too: types of a module are a dependence.
    """
    modules = {module_of(path): text for path, text in texts.items()}

    def known(names: Iterable[str]) -> set[str]:
        found = set()
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                found.add(name)
        return found

    edges = {
        name: known(each for _, each in imports(text)) - {name}
        for name, text in modules.items()
        if name and not text.startswith("#")
    }
    return circles(edges)
