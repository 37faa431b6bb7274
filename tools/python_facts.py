"""Facts about a Python file that the checks in tools/ use: its imports and its definitions.

Syntax trees are not kept: with one and a half million nodes alive, Python's garbage collector takes most of the time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_PLAIN = {"id", "attr", "arg", "ctx", "op", "ops", "module", "level", "type_comment"}


class Definition(NamedTuple):
    """A module, class or function without its body. docstring: "" if there is none."""

    kind: type[ast.AST]
    name: str
    line: int
    num_lines: int
    num_parameters: int
    is_kernel: bool
    docstring: str


class PythonFacts(NamedTuple):
    """The imports and definitions of a file, outer ones first.

    imports: (line, dotted module), including imports inside functions and under TYPE_CHECKING.
    runtime_imports: modules that are imported when the module runs, and imported names that may be modules.
    variables: (line, name) of the module's own assignments to a single name.
    """

    imports: list[tuple[int, str]]
    runtime_imports: set[str]
    definitions: list[Definition]
    variables: list[tuple[int, str]]


@cache
def python_facts(text: str) -> PythonFacts:
    """Return the facts about a file with this text."""
    tree = ast.parse(text)
    nodes = [*_statements(tree)]
    return PythonFacts(
        imports=[found for node in nodes for found in _imports(node)],
        runtime_imports={name for node in _statements(tree, typing=False) for name in _imported_names(node)},
        definitions=[
            _definition(node)
            for node in nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        variables=[*_variables(tree)],
    )


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except operators and contexts, in the order of `ast.walk` but in a third of its time."""
    nodes = [tree]
    for node in nodes:
        yield node
        for name in _parts(type(node)):
            child = getattr(node, name, None)
            if type(child) is list:
                nodes.extend([each for each in child if isinstance(each, ast.AST)])
            elif isinstance(child, ast.AST):
                nodes.append(child)


@cache
def _parts(kind: type[ast.AST]) -> tuple[str, ...]:
    """Return the fields of a node that may contain further nodes."""
    return () if kind is ast.Constant else tuple(name for name in kind._fields if name not in _PLAIN)


def _statements(tree: ast.Module, *, typing: bool = True) -> Iterator[ast.AST]:
    """Yield the module and its statements in the order of `ast.walk`.

    typing: include the statements under `if TYPE_CHECKING`.
    """
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if not typing and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        for name in _BLOCKS:
            nodes.extend(getattr(node, name, ()))


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            yield node.lineno, "." * node.level + (node.module or "")
        elif node.module in {"octavo", "octavo.backends"}:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        else:
            yield node.lineno, node.module or ""


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}{name}" for name in ("", *(f".{alias.name}" for alias in node.names)))


def _definition(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Definition:
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.Module):
        return Definition(ast.Module, "", 1, 0, 0, False, docstring)
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if isinstance(node, ast.ClassDef):
        return Definition(ast.ClassDef, node.name, node.lineno, num_lines, 0, False, docstring)
    num_parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
    is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
    return Definition(ast.FunctionDef, node.name, node.lineno, num_lines, num_parameters, is_kernel, docstring)


def _variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name):
            yield node.lineno, target.id
