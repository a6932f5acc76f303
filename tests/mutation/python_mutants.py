"""Places where the Python code can be broken, one at a time.

- *always*, *never*: a condition, or the result of a predicate, is a constant;
- *drop operand*: one of the operands of `and` or `or` is left out;
- *blind entry*: one of the values that are compared with earlier ones is left out;
- *drop statement*: a call for its effect is not made, or an attribute is not set;
- *drop with*: the context of a block (streams, a mode, a mark) is left out.
"""

import ast
from collections.abc import Iterator

from mutant import Edit, Mutant, Place, mutants_at

# Values of these functions and names are compared with earlier values.
COMPARED = {"stamp", "_form", "_forms_now", "_counts", "_ids_of", "key"}

TELLING = {"all", "any", "bool", "isinstance"}

ON = '__import__("paceline_mutants").on(@)'

Found = tuple[str, ast.expr | ast.stmt, str]  # operator, node, replacement


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it, except f-strings, which have no positions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _is_condition(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in TELLING
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, (ast.Compare, ast.BoolOp))


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the conditions of a node, if it has any."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def _conditions(function: ast.AST) -> list[ast.expr]:
    """Return the conditions of a function, without those inside of others."""
    found: dict[ast.expr, None] = {}

    def visit(node: ast.AST) -> None:
        for test in _tests(node):
            found[test] = None
        if isinstance(node, ast.expr) and _is_condition(node):
            found[node] = None
            if not isinstance(node, ast.Call):
                return
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.JoinedStr):
                visit(child)

    visit(function)
    return list(found)


def _of_conditions(function: ast.AST) -> Iterator[Found]:
    for condition in _conditions(function):
        yield "always", condition, "True"
        yield "never", condition, "False"
    for node in _walk(function):
        if isinstance(node, ast.BoolOp):
            neutral = str(isinstance(node.op, ast.And))
            for operand in node.values:
                yield "drop operand", operand, neutral


def _entries(value: ast.expr | None) -> Iterator[ast.expr]:
    if isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        value = value.elt
        yield value
    if isinstance(value, (ast.Tuple, ast.List)):
        for entry in value.elts:
            yield entry.value if isinstance(entry, ast.Starred) else entry


def _of_comparisons(function: ast.AST, name: str) -> Iterator[Found]:
    for node in _walk(function):
        value = None
        if isinstance(node, ast.Return) and name in COMPARED:
            value = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value if node.targets[0].id in COMPARED else None
        for entry in _entries(value):
            is_many = isinstance(entry, ast.Call) and ast.unparse(entry)[:3] == "map"
            yield "blind entry", entry, "()" if is_many else "None"


def _of_statements(function: ast.AST) -> Iterator[Found]:
    for node in _walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "drop statement", node, "pass"
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, (ast.Name, ast.Tuple)):
                yield "drop statement", node, "pass"
        elif isinstance(node, ast.With):
            for item in node.items:
                if item.optional_vars is None:
                    yield (
                        "drop with",
                        item.context_expr,
                        "__import__('contextlib').nullcontext()",
                    )
                    break


def _places(source: str) -> Iterator[Place]:
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for function, name in _functions(ast.parse(source)):
        found = [
            *_of_conditions(function),
            *_of_comparisons(function, name.split(".")[-1]),
        ]
        if function.name != "__init__":  # a missing attribute always fails
            found += _of_statements(function)
        for operator, node, replacement in found:
            start = begins[node.lineno - 1] + node.col_offset
            end = begins[node.end_lineno - 1] + node.end_col_offset
            edit: Edit = (start, end, f"({replacement} if {ON} else (", "))")
            if operator == "drop statement":
                edit = (start, end, f"if not {ON}: ", "")
            yield name, operator, start, end, source[start:end], (edit,)


def mutants_of(path: str, source: str) -> list[Mutant]:
    assert source.isascii(), path  # columns of `ast` count bytes
    return mutants_at(path, source, _places(source))


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield inner, f"{node.name}.{inner.name}"
