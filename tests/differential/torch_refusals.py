"""Refusals: errors that Paceline's documentation promises, by features of a program.

A program that ended in an error on all ranks is fine if a row here names the error and the program has the
row's feature. If not, torch's own DDP runs it, and if that trains, it is listed as a refusal to look at.
"""

from __future__ import annotations

from typing import Any

from tests.differential.between import are_apart
from tests.differential.programs import Program, numbered

EXPECTED: list[tuple[str, tuple[str, ...], str]] = [
    # a feature, the errors that it may end in, and the place in the documentation
    ("an error of the program's own", ("*",), "the docs: all ranks raise if one has raised"),
    ("op swap grown", ("ConfigError",), "another shape after wrapping; torch raises, too"),
    ("op swap shrunk", ("ConfigError",), "the same"),
    ("op swap dtype", ("ConfigError", "RuntimeError"), "conversions after wrapping"),
    ("op convert", ("ConfigError",), "conversions after wrapping"),
    ("a layer of a converted model in another one", ("RuntimeError",), "torch multiplies no two dtypes"),
    ("op freeze", ("ConfigError",), "unfrozen after wrapping"),
    ("op freeze, a forward of some ranks", ("UnusedParameterError",), "unused on some ranks only"),
    (
        "op freeze, layer checkpoint",
        ("CheckpointError",),
        "torch: a block that is run again saves other tensors with other parameters frozen",
    ),
    ("op replace", ("ConfigError", "UnusedParameterError"), "parameters must not be replaced afterwards"),
    ("layer gate", ("UnusedParameterError", "GraphChangedError"), "unused parameters without the option"),
    ("mode static", ("GraphChangedError", "UnusedParameterError"), "a promise that the program breaks"),
    ("layer checkpoint reentrant", ("GraphChangedError",), "a gradient in two parts; torch raises, too"),
    ("two forwards", ("GraphChangedError", "SkippedPassError"), "gradients that come again"),
    ("op skipped", ("SkippedPassError",), "forwards without a backward, not on all ranks"),
    ("nonfinite", ("NonFiniteGradientError",), 'nonfinite="raise"'),
    ("nest", ("ConfigError", "RuntimeError"), "wrappers within wrappers"),
    ("mode scatter", ("ConfigError", "MismatchError"), "docs/sharded-optimizer.md: what reads a part raises"),
    ("a write of other values", ("ReplicasDifferError",), "buffers that some ranks alone have written"),
    ("op direct", ("RuntimeWarning",), "a step with gradients that were not averaged"),
    ("op iterate join", ("ConfigError",), "join() needs a process group of torch"),
]


def expected_refusal(program: Program, mode: str, error: str) -> str | None:
    """The reason why this program may end in this error in this mode; None: no row has one."""
    has = features_of(program, mode)
    for feature, errors, why in EXPECTED:
        if feature in has and (error in errors or "*" in errors):
            return why
    return None


def features_of(program: Program, mode: str) -> set[str]:
    """The features by which this table and `torch_differences.py` classify programs."""
    found: set[str] = set()
    forwards = 0
    for _, op in numbered(program["ops"]):
        found.add("op " + " ".join(str(op[key]) for key in ("op", "how") if key in op))
        found.add(f"op {op['op']}")
        if are_apart(op):
            found.add("a write of other values")
        if op["op"] in ("raise", "trap"):
            found.add("an error of the program's own")
        if op["op"] == "forward":
            forwards += 1
            if op.get("to") == "lost":
                found.add("op skipped")
            if op.get("to", "loss") != "loss":
                found.add("two forwards")
            if "ranks" in op:
                found.add("a forward of some ranks")
        if "nest" in op:
            found.add("nest")
    if "static" in mode.split():
        found.add("mode static")
    if mode.startswith("scatter"):
        found.add("mode scatter")
    if program.get("options", {}).get("nonfinite") == "raise":
        found.add("nonfinite")
    for model in program["models"]:
        found.update(_layers(model["layers"]))
    if {"op freeze", "a forward of some ranks"} <= found:
        found.add("op freeze, a forward of some ranks")
    if {"op freeze", "layer checkpoint"} <= found:
        found.add("op freeze, layer checkpoint")
    if {"op convert", "layer borrow"} <= found:
        found.add("a layer of a converted model in another one")
    return found


def _layers(layers: list[dict[str, Any]]) -> set[str]:
    found: set[str] = set()
    for layer in layers:
        found.add(f"layer {layer['kind']}")
        if layer.get("reentrant"):
            found.add("layer checkpoint reentrant")
        found |= _layers(layer.get("layers", []))
    return found
