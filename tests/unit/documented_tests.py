"""What a test that a page of the documentation names does with a name: read from its source text."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@functools.cache
def definitions(path: Path) -> dict[str, Definition]:
    """Functions, classes and constants of a module, by name."""
    found: dict[str, Definition] = {}
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = node
    return found


@functools.cache
def tests() -> dict[str, list[Path]]:
    """The files of each test, by its name."""
    found: dict[str, list[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in definitions(path):
            if name.startswith("test_"):
                found.setdefault(name, []).append(path)
    return found


def passes(test: str, argument: str, framework: str, wrappers: Mapping[str, Sequence[str]]) -> bool:
    """Whether the test, or what it calls of its own file, passes an argument of this name.

    By keyword, as a key of options that are passed on, or by its place to one of the wrappers.

    Args:
        test: Its name; of several tests of one name, one must.
        argument: Its name.
        framework: "torch" or "paddle": tests of the other one do not count.
        wrappers: Names of classes, and their arguments in order.
    """
    return any(
        (isinstance(node, ast.keyword) and node.arg == argument)
        or (isinstance(node, ast.Dict) and any(_is_text(key, argument) for key in node.keys))
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and argument in wrappers.get(node.func.id, ())[: len(node.args)]
        )
        for node in _source_of(test, framework)
    )


def _is_text(node: ast.AST | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def _is_of(path: Path, framework: str) -> bool:
    if path.stem.startswith("test_conformance"):
        return True
    return path.stem.startswith("test_paddle_") == (framework == "paddle")


def _source_of(test: str, framework: str) -> Iterator[ast.AST]:
    """Of the test, its parameters and all that it reaches in its own file."""
    for path in tests().get(test, ()):
        if not _is_of(path, framework):
            continue
        known, seen, waiting = definitions(path), set(), [test]
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for node in ast.walk(known[name]):
                yield node
                if isinstance(node, ast.Name) and node.id in known:
                    waiting.append(node.id)
