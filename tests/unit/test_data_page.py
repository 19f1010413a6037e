"""Every argument that docs/data.md names is one of a sampler, and some test of samplers passes it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import paceline.data
from tests.unit import documented_tests

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
OF_LOADERS = {"batch_size"}  # and of samplers, too


def in_code_blocks() -> set[tuple[str, str]]:
    """Names of samplers, with the arguments that the page's programs pass to them by name."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    calls = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    return {
        (call.func.id, keyword.arg)
        for call in calls
        if isinstance(call.func, ast.Name) and hasattr(paceline.data, call.func.id)
        for keyword in call.keywords
    }


def in_sentences() -> set[str]:
    """Arguments in the text and its tables: `pad=False`."""
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    return {name for code in re.findall(r"`([^`]+)`", prose) for name in re.findall(r"\b([a-z_]+)=", code)}


def parameters_of(name: str) -> set[str]:
    """Those of the constructor and of the public methods."""
    kind = getattr(paceline.data, name)
    methods = [kind, *(member for key, member in vars(kind).items() if not key.startswith("_"))]
    return {
        parameter for each in methods if callable(each) for parameter in inspect.signature(each).parameters
    }


def passed_by_tests() -> set[str]:
    found = set()
    for path in documented_tests.TESTS.rglob("test_*sampler*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg is not None:
                found.add(node.arg)
            elif isinstance(node, ast.Dict):
                found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return found


def test_the_arguments_in_programs_are_those_of_the_sampler() -> None:
    found = in_code_blocks()
    assert len(found) > 5
    assert all(argument in parameters_of(name) for name, argument in found), found


def test_the_arguments_in_sentences_are_those_of_some_sampler_and_tested() -> None:
    found = in_sentences()
    assert {"pad", "reshuffle"} <= found
    known = set.union(*(parameters_of(name) for name in paceline.data.__all__))
    assert found <= known
    assert found | {argument for _, argument in in_code_blocks()} <= passed_by_tests() | OF_LOADERS
