"""`_core.pyi` describes the core for type checkers; here it is compared with the built core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import _core
from paceline.collectives.failures import Reason
from paceline.collectives.ops import ReduceOp
from paceline.launch.plan import MAX_NPROCS
from paceline.reducer.reducer_interface import Outcome

ROOT = Path(__file__).resolve().parents[2]
STUB = ast.parse((ROOT / "src" / "paceline" / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


@dataclass(frozen=True)
class Signature:
    """The facts that a caller has to know: number of positional arguments, names in order, optional ones."""

    num_unnamed: int
    names: tuple[str, ...]
    num_defaults: int


def signature_of(node: ast.FunctionDef) -> Signature:
    arguments = node.args
    names = [arg.arg for arg in (*arguments.args, *arguments.kwonlyargs)]
    return Signature(
        len(arguments.posonlyargs), tuple(names), len(arguments.defaults) + len(arguments.kw_defaults)
    )


def signatures_in(function: Any) -> list[Signature]:
    """The signatures that nanobind has bound, one per overload."""
    found = []
    overloads = function.__nb_signature__
    for text, _, _ in overloads:
        text = re.sub(r"\\\d+", "None", text)  # only the presence of a default is compared
        node = ast.parse(f"{text}: ...").body[0]
        # From another type, if that is given instead.
        is_conversion = len(overloads) > 1 and len(node.args.posonlyargs) == 2
        found += [] if is_conversion else [signature_of(node)]
    return found


def functions_in(body: list[ast.stmt]) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def values_in(body: list[ast.stmt]) -> set[str]:
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign)}


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def public(names: Iterator[str] | dict[str, Any] | list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_module_has_the_names_of_the_stub():
    assert public(dir(_core)) == values_in(STUB.body) | functions_in(STUB.body).keys() | CLASSES.keys()


@pytest.mark.parametrize("name", functions_in(STUB.body))
def test_a_function_has_the_arguments_of_the_stub(name):
    expected = [signature_of(node) for node in functions_in(STUB.body)[name]]
    assert signatures_in(getattr(_core, name)) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_names_of_the_stub(name):
    body = CLASSES[name].body
    assert public(vars(getattr(_core, name))) == public(functions_in(body)) | values_in(body)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_the_arguments_of_the_stub(name):
    bound = getattr(_core, name)
    wrong = []
    for method, nodes in functions_in(CLASSES[name].body).items():
        attribute = vars(bound)[method]
        if is_property(nodes[0]):
            assert isinstance(attribute, property), method
        elif method == "__init__" or not method.startswith("__"):  # others get Python's defaults
            got, expected = signatures_in(attribute), [signature_of(node) for node in nodes]
            wrong += [(method, got, expected)] if got != expected else []
    assert not wrong


def test_enumerations_have_the_core_s_members():
    assert {reason.name.lower(): int(reason) for reason in Reason} | {"none": 0} == _core.REASONS
    assert {op.name.lower(): int(op) for op in ReduceOp} == _core.REDUCE_OPS
    assert {flag.name.lower(): int(flag) for flag in Outcome if flag} == _core.OUTCOMES


@pytest.mark.parametrize(
    ("header", "enumeration", "exported"),
    [
        ("core/failure.h", "Reason", _core.REASONS),
        ("core/region_words.h", "CallKind", _core.CALL_KINDS),
        ("kernels/kernels.h", "DType", _core.DTYPES),
        ("kernels/kernels.h", "ReduceOp", _core.REDUCE_OPS),
        ("compression/compression.h", "Encoding", _core.ENCODINGS),
        ("core/isa.h", "Isa", _core.ISAS),
    ],
)
def test_all_of_an_enumeration_is_exported(header, enumeration, exported):
    text = (ROOT / "cpp" / header).read_text()
    body = re.search(rf"enum class {enumeration} [^{{]*{{(.*?)}};", text, re.DOTALL)[1]
    numbers = {name: int(number) for name, number in re.findall(r"\bk(\w+) = (\d+)", body)}
    assert {name.replace("_", ""): number for name, number in exported.items()} == {
        name.lower(): number for name, number in numbers.items()
    }


def test_the_launcher_knows_the_core_s_limit():
    assert MAX_NPROCS == _core.MAX_RANKS
