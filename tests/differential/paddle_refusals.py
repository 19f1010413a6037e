"""Refusals: errors that Paceline's documentation promises, by features of a program.

A program that ended in an error on all ranks is fine if a row here names the error and the program has the
row's feature. If not, Paddle's own wrapper runs it, and if that trains, it is listed as a refusal to look at.
"""

from __future__ import annotations

from typing import Any

from tests.differential.between import are_apart
from tests.differential.programs import Program, numbered

EXPECTED: list[tuple[str, tuple[str, ...], str]] = [
    # a feature, the errors that it may end in, and the place in the documentation
    ("an error of the program's own", ("*",), "the docs: all ranks raise if one has raised"),
    ("op swap grown", ("ConfigError",), "another shape after wrapping"),
    ("op swap shrunk", ("ConfigError",), "another shape after wrapping"),
    ("op swap dtype", ("*",), "conversions after wrapping; Paddle's own operations refuse most"),
    ("op freeze", ("ConfigError",), "parameters must not be unfrozen afterwards"),
    (
        "op freeze",
        ("UnusedParameterError",),
        "Paddle gives the shift of a batch normalisation no gradient while its scale is frozen",
    ),
    ("op replace", ("ConfigError", "UnusedParameterError"), "parameters must not be replaced afterwards"),
    ("layer gate", ("UnusedParameterError", "GraphChangedError"), "unused parameters without the option"),
    ("mode static", ("GraphChangedError", "UnusedParameterError"), "a promise that the program breaks"),
    ("layer recompute", ("GraphChangedError",), "a gradient in two parts"),
    ("two forwards", ("GraphChangedError", "SkippedPassError"), "gradients that come again"),
    (
        "layer norm",
        ("RuntimeError",),
        "two forwards before a backward: Paddle changes its statistics in place",
    ),
    ("op skipped", ("SkippedPassError",), "forwards without a backward, not on all ranks"),
    (
        "a backward of several models",
        ("MismatchError",),
        "of which ranks use other parameters, over a group; Paddle's own wrapper trains some of these",
    ),
    ("nonfinite", ("NonFiniteGradientError",), 'nonfinite="raise"'),
    ("a write of other values", ("RuntimeWarning",), "buffers that some ranks alone have written"),
]


def expected_refusal(program: Program, mode: str, error: str) -> str | None:
    """The reason why this program may end in this error in this mode; None: no row has one."""
    has = features_of(program) | ({"mode static"} if "static" in mode else set())
    for feature, errors, why in EXPECTED:
        if feature in has and (error in errors or "*" in errors):
            return why
    return None


def features_of(program: Program) -> set[str]:
    """The features by which this table and `paddle_differences.py` classify programs."""
    found: set[str] = set()
    for _, op in numbered(program["ops"]):
        found.add("op " + " ".join(str(op[key]) for key in ("op", "how") if key in op))
        found.add(f"op {op['op']}")
        if are_apart(op):
            found.add("a write of other values")
        if op["op"] in ("raise", "trap"):
            found.add("an error of the program's own")
        if len(op.get("of", ())) > 1:
            found.add("a backward of several models")
        if op["op"] == "forward" and op.get("to", "loss") != "loss":
            found.add("op skipped" if op["to"] == "lost" else "two forwards")
    if program.get("options", {}).get("nonfinite") == "raise":
        found.add("nonfinite")
    for model in program["models"]:
        found.update(_layers(model["layers"]))
    return found


def _layers(layers: list[dict[str, Any]]) -> set[str]:
    return {f"layer {layer['kind']}" for layer in layers}.union(
        *(_layers(layer.get("layers", [])) for layer in layers)
    )
