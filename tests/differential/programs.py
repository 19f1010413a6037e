"""Programs as data: how they are walked, numbered and shown. Independent of the framework.

A program is a dict that JSON can hold: `ranks`, `models` (each with `layers`, which may hold `layers`), and
`ops`, each a dict with its name under "op"; `body` and `otherwise` hold more of them. Every missing value has
a default, and references to missing objects are skipped. So any subset of a program is a program too, which
makes shrinking simple.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Program = dict[str, Any]
Op = dict[str, Any]

NESTED = ("body", "otherwise")


def numbered(ops: list[Op], prefix: str = "") -> Iterator[tuple[str, Op]]:
    """Every op with its label ("3", or "3.1" within the op 3), in the order in which they are written."""
    for position, op in enumerate(ops):
        label = f"{prefix}{position}"
        yield label, op
        yield from numbered(nested(op), f"{label}.")


def nested(op: Op) -> list[Op]:
    """The ops within an op: its body's, then those that run instead of the rest if the body raises."""
    return [inner for key in NESTED for inner in op.get(key, ())]


def is_weighted(program: Program) -> bool:
    """True if it gives weights to backwards, or to forwards."""
    return bool(program.get("weighs")) or any(op["op"] == "weight" for _, op in numbered(program["ops"]))


def features(program: Program) -> list[str]:
    """The features of a program, for the table: its ops and its layers, with the options that matter."""
    found = set()
    for _, op in numbered(program["ops"]):
        found.add("op " + " ".join(str(op[key]) for key in ("op", "how", "kind", "place") if key in op))
        found.update(f"with {key}" for key in ("retain", "no_sync", "amp", "lag") if op.get(key))
    for model in program["models"]:
        found.update("layer " + name for name in _kinds(model["layers"]))
    if len(program["models"]) > 1:
        found.add("several models")
    if program.get("weighs"):
        found.add("weights of forwards")
    found.add(f"{program.get('ranks', 2)} ranks")
    return sorted(found)


def _kinds(layers: list[dict[str, Any]]) -> Iterator[str]:
    for layer in layers:
        yield " ".join(str(layer[key]) for key in ("kind", "view", "reentrant") if key in layer)
        yield from _kinds(layer.get("layers", []))


def show(program: Program) -> str:
    """The program, as text that reads like Python; the numbers at the left are those of reports."""
    head = {key: value for key, value in program.items() if key not in ("models", "ops")}
    lines = [", ".join(f"{key}={value!r}" for key, value in head.items())]
    for number, model in enumerate(program["models"]):
        rest = {key: value for key, value in model.items() if key != "layers"}
        lines.append(f"model {number}" + (f" ({_arguments(rest)})" if rest else "") + ":")
        lines.extend(_show_layers(model["layers"], 1))
    lines.extend(_show_ops(program["ops"], "", 0))
    return "\n".join(lines)


def _show_layers(layers: list[dict[str, Any]], depth: int) -> Iterator[str]:
    for layer in layers:
        rest = {key: value for key, value in layer.items() if key not in ("kind", "layers")}
        colon = ":" if "layers" in layer else ""
        yield f"      {'    ' * depth}{layer.get('kind')}({_arguments(rest)}){colon}"
        yield from _show_layers(layer.get("layers", []), depth + 1)


def _show_ops(ops: list[Op], prefix: str, depth: int) -> Iterator[str]:
    for position, op in enumerate(ops):
        label = f"{prefix}{position}"
        rest = {key: value for key, value in op.items() if key not in ("op", *NESTED)}
        colon = ":" if any(key in op for key in NESTED) else ""
        yield f"{label:<7} {'    ' * depth}{op['op']}({_arguments(rest)}){colon}"
        inner = list(_show_ops(nested(op), f"{label}.", depth + 1))
        if op.get("otherwise"):
            inner.insert(_lines(op.get("body", [])), f"{'':<7} {'    ' * depth}otherwise:")
        yield from inner


def _lines(ops: list[Op]) -> int:
    return sum(1 for _ in _show_ops(ops, "", 0))


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())
