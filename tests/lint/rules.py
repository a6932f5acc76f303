"""The rules of this project that no other tool checks.

Run from anywhere: ``python tests/lint/rules.py [root]``.  It prints
``path:line: rule: what is wrong`` and exits with 1 if there is anything to print.

If a rule makes a piece of code worse, lift it on the line, with the reason::

    _exit(1); /* lint: no-exit - a forked child that must not run our handlers */

Functions of C are found by their form: `{` and `}` are alone in the first column, which
clang-format guarantees.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import dependence
import words as phrases

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = {".c": 1000, ".h": 1000, ".py": 500, ".pyi": 500}
MIN_TEST_WORDS = 3
BUDGET = "tests/lint/budget.toml"

# rule: pattern, the only file that may contain it, message
CALLS = {
    "no-getenv": (
        r"\b(secure_)?getenv\s*\(",
        "core/config.c",
        "only core/config.c reads the environment",
    ),
    "no-print": (
        r"\b(v?printf|puts|putchar|perror)\s*\("
        r"|\b(v?fprintf|fputs|fputc|fwrite|putc)\s*\([^;]*\b(stdout|stderr)\b"
        r"|\b(v?dprintf|write)\s*\(\s*([12]|STDOUT_FILENO|STDERR_FILENO)\s*,",
        "core/log.c",
        "only core/log.c prints",
    ),
    "no-exit": (
        r"(?<![\w.>])(exit|_exit|_Exit|quick_exit|abort)\s*\(",
        None,
        "a library neither exits nor aborts",
    ),
}

# Findings of a file: (line, rule, message).
Found = Iterator[tuple[int, str, str]]
COMMENT = r"//[^\n]*|/\*.*?\*/"
LITERAL = r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'"


def blank(text: str, *, literals: bool = True) -> str:
    """Replace comments, and also strings, by spaces; lines keep their numbers."""

    def spaces(match: re.Match[str]) -> str:
        if match[0][0] != "/" and not literals:
            return match[0]
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(f"{COMMENT}|{LITERAL}", spaces, text, flags=re.DOTALL)


def line_of(text: str, position: int) -> int:
    """Return the line number, from 1, of a position of the text."""
    return text.count("\n", 0, position) + 1


def check_file_size(path: str, text: str) -> Found:
    n_lines, most = text.count("\n"), MAX_FILE_LINES[Path(path).suffix]
    if n_lines > most:
        yield 1, "file-size", f"{n_lines} lines, {most} allowed"


def check_function_size(path: str, text: str) -> Found:
    """A C function has at most 60 lines, from its first line to its closing brace."""
    lines = blank(text).splitlines()
    opened = None
    for at, line in enumerate(lines):
        if line.rstrip() == "{":
            opened = at
            while opened > 0 and re.search(r"[\w,)*]\s*$", lines[opened - 1]):
                if lines[opened - 1].startswith("#"):
                    break
                opened -= 1
        elif line.rstrip() == "}" and opened is not None:
            n_lines = at - opened + 1
            if n_lines > MAX_FUNCTION_LINES:
                words = f"{n_lines} lines, {MAX_FUNCTION_LINES} allowed"
                yield opened + 1, "function-size", words
            opened = None


def check_calls(path: str, text: str) -> Found:
    """Some calls are allowed in only one file, or in none."""
    code = blank(text)
    for rule, (pattern, home, words) in CALLS.items():
        if path != home:
            for match in re.finditer(pattern, code):
                yield line_of(code, match.start()), rule, words


def check_includes(path: str, text: str) -> Found:
    yield from dependence.check_includes(path, blank(text, literals=False))


def check_lock(path: str, text: str) -> Found:
    """Functions that Python calls by a table of the file take the lock first."""
    code = blank(text, literals=False)
    table = (
        r'\{\s*"\w*",\s*(?:\(\w+\)\s*)*(?:\(void \(\*\)\(void\)\))?(\w+)(?:,\s*(\w+))?'
    )
    slot = r"\{Py_(?:tp_(?:call|new|iter|iternext|repr)|[ns]q_\w+|mp_\w+),\s*(\w+)\}"
    names = {n for found in re.findall(table, code) for n in found}
    names.update(re.findall(slot, code))
    for found in re.finditer(r"^[^\n]*\b(\w+)\([^;{}]*\)\n\{\n", code, re.MULTILINE):
        body = code[found.end() : code.index("\n}", found.end() - 1)]
        if found[1] in names and not body.lstrip().startswith("PLI_ENTER("):
            line = line_of(text, found.start())
            yield line, "lock", f"{found[1]} is called by Python: PLI_ENTER comes first"


def check_test_names(path: str, text: str) -> Found:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            words = node.name.removeprefix("test_").split("_")
            if len(words) < MIN_TEST_WORDS:
                yield node.lineno, "test-name", f"{node.name} is not a sentence"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(node: ast.AST) -> list[str]:
    """Return the dotted names of an import; [] for any other node."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def names_of_torch(tree: ast.AST) -> set[str]:
    """Return the names that the imports of a file bind to torch or to parts of it."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.asname or "torch")
        elif any(name.split(".")[0] == "torch" for name in imported(node)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def dotted(node: ast.AST) -> str:
    """Return the name in `a.b.c` or `getattr(a.b, "c", ...)`; "" for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    if isinstance(node, ast.Call) and len(node.args) > 1:
        owner, name = dotted(node.args[0]), node.args[1]
        is_asked = dotted(node.func) in ("getattr", "hasattr")
        if is_asked and owner and isinstance(name, ast.Constant):
            return f"{owner}.{name.value}"
    return ""


def check_torch(path: str, text: str) -> Found:
    """Only _compat/ uses private or version-dependent names of torch."""
    if path.startswith("_compat/") or not path.endswith(".py"):
        return
    tree = ast.parse(text)
    known = names_of_torch(tree)
    for node in ast.walk(tree):
        chains = [name for name in imported(node) if name.split(".")[0] == "torch"]
        if (name := dotted(node)).split(".")[0] in known:
            chains.append(name)
        for chain in chains:
            *owners, last = chain.split(".")
            # If the owner in a use is private, the use itself is found separately.
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            if is_private(last) or (is_import and any(map(is_private, owners))):
                yield node.lineno, "torch-private", f"{chain} belongs into _compat/"
            elif chain.startswith("torch.version") or last == "__version__":
                yield node.lineno, "torch-version", "ask for the feature, in _compat/"


PICKLING = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
# launch() pickles over pipes that its own processes inherit.
MAY_PICKLE = ("_launch/", "_cloudpickle.py")


def check_pickles(path: str, text: str) -> Found:
    """No rank unpickles what another process sends: see _messages.py."""
    if path.startswith(MAY_PICKLE) or not path.endswith(".py"):
        return
    tree = ast.parse(text)
    known = names_of_torch(tree)
    for node in ast.walk(tree):
        chains = imported(node)
        if (name := dotted(node)).split(".")[0] in known:
            chains.append(name)
        for chain in chains:
            first, *_, last = [*chain.split("."), chain]
            is_collective = re.search(r"_object(_list)?$", last) is not None
            if first in PICKLING or (first in known | {"torch"} and is_collective):
                yield node.lineno, "pickle", f"{chain}: send by paceline._messages"
        if isinstance(node, ast.Call) and "weights_only=False" in {
            ast.unparse(word) for word in node.keywords
        }:
            yield node.lineno, "pickle", "weights_only=False runs code of a file"


def allowed(line: str, rule: str) -> bool:
    """Tell whether the line lifts the rule and gives a reason."""
    return re.search(rf"(/\*|//|#) lint: {rule} - \w", line) is not None


Check = Callable[[str, str], Found]
TABLE: list[tuple[str, str, list[Check]]] = [
    (
        "csrc",
        "**/*.[ch]",
        [check_file_size, check_function_size, check_calls, check_includes],
    ),
    ("csrc/python", "**/*.c", [check_lock]),
    (
        "python/paceline",
        "**/*.py*",
        [check_file_size, check_torch, check_pickles, dependence.check_imports],
    ),
    ("tests", "**/test_*.py", [check_test_names]),
    *((".", glob, [phrases.check]) for glob in phrases.FILES.split()),
]


def texts(root: Path, glob: str) -> dict[str, str]:
    return {p.relative_to(root).as_posix(): p.read_text() for p in root.glob(glob)}


def find_circles(root: Path) -> Iterator[str]:
    for part in dependence.include_circles(texts(root / "csrc", "**/*.[ch]")):
        yield f"csrc: circle: {' '.join(part)}"
    for part in dependence.import_circles(texts(root / "python/paceline", "**/*.py")):
        yield f"python/paceline: circle: {' '.join(part)}"


def find_overruns(root: Path) -> Iterator[str]:
    """Compare the lines of each folder of the product with ``budget.toml``."""
    text = (root / BUDGET).read_text() if (root / BUDGET).exists() else ""
    rows = re.findall(r'^"(.+)" = (\d+)$', text, re.MULTILINE)
    budget = {name: int(most) for name, most in rows}
    lines = dict.fromkeys(budget, 0)
    for path in [*root.glob("csrc/**/*.*"), *root.glob("python/**/*.py*")]:
        if budget and path.is_file() and path.suffix != ".pyc":
            parts = path.relative_to(root).parts[:-1]
            # A package counts as one folder, except for the halves of the binding.
            name = "/".join(parts[: 3 if parts[0] == "python" else None])
            lines[name] = lines.get(name, 0) + path.read_text().count("\n")
    for name, n in lines.items():
        if n > (most := budget.get(name, 0)):
            yield f"{BUDGET}: {name} has {n} lines, {n - most} more than its budget"


def run(root: Path) -> list[str]:
    """Return the findings under a root, one per line."""
    wrong = [*find_circles(root), *find_overruns(root)]
    for folder, glob, checks in TABLE:
        for path in sorted((root / folder).glob(glob)):
            if path.suffix == ".pyc":
                continue
            text = path.read_text()
            lines = text.splitlines() or [""]
            for check in checks:
                inner = path.relative_to(root / folder).as_posix()
                for line, rule, words in check(inner, text):
                    if not allowed(lines[line - 1], rule):
                        name = path.relative_to(root)
                        wrong.append(f"{name}:{line}: {rule}: {words}")
    return wrong


if __name__ == "__main__":
    default = Path(__file__).parents[2]
    problems = run(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    print("\n".join(problems) or "rules: nothing to say")
    sys.exit(bool(problems))
