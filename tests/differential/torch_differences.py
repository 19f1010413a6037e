"""The known differences of torch's own DDP from the reference, by features of a program.

`--every-mode` runs it beside Paceline. A difference that a row here names is counted, and is no finding: each
row describes torch's behaviour. A difference without a row is a finding, of the reference or of this table.
"""

from __future__ import annotations

from tests.differential.differences import (
    A_FORWARD_INSIDE,
    A_FORWARD_OUTSIDE,
    A_SECOND_BACKWARD,
    orders_of,
    until,
)
from tests.differential.programs import Op, Program, is_weighted, numbered
from tests.differential.torch_refusals import features_of

KNOWN: list[tuple[str, str]] = [
    # a feature of the program up to the op at which values differ, and its effect in torch's DDP
    ("an error of the program's own", "after an exception ranks are in different backward passes"),
    (A_SECOND_BACKWARD, "a second backward is not averaged"),
    (A_FORWARD_OUTSIDE, "no_sync() counts for the forward, not for the backward"),
    (A_FORWARD_INSIDE, "the next backward is averaged, whatever forward it is of"),
    ("op direct", "gradients that are returned are not averaged"),
    ("a flag", "the flag counts when forward runs"),
    ("op freeze", "what is frozen or unfrozen after wrapping is not noticed, and nothing is averaged"),
    ("op replace", "a layer that is replaced after wrapping is not averaged"),
    ("op convert", "after a conversion of the model nothing is averaged"),
    ("op swap dtype", "a parameter that is converted is not averaged"),
    ("op ftz", "each rank adds with floats of its own"),
    ("layer borrow", "a layer of two models is averaged by both"),
    ("layer checkpoint reentrant", "a gradient that comes in two parts is averaged with one of them"),
    ("gradients that share memory", "a mean that is written to one of them is in the other one, too"),
    ("buffers between two forwards", "buffers are rank 0's from the next forward on, not from a mean on"),
    ("a loss near the largest number", "a sum of finite gradients overflows in silence"),
]


def incumbents_of(program: Program) -> list[str]:
    """The modes in which torch's own DDP runs it: none if it uses features that only Paceline has."""
    features = features_of(program, "")
    if is_weighted(program):
        return []
    for _, op in numbered(program["ops"]):
        if (op["op"] == "iterate" and op.get("how") != "join") or "nest" in op:
            return []
        if op["op"] == "forward" and "ranks" in op and "layer buffer" in features:
            return []  # each forward of torch's broadcasts buffers, and waits for the other ranks
    # To torch, a parameter that is frozen after wrapping is unused.
    return ["torch unused" if features & {"layer gate", "op freeze"} else "torch"]


def known_difference(program: Program, at: str) -> str | None:
    """The reason why torch's DDP may differ from the reference at this op; None: no row has one.

    Args:
        program: The program that it ran.
        at: Label of the op; empty: unknown.
    """
    before = until(program, at)
    has = features_of(before, "") | orders_of(before) | _joint_features_of(before)
    return next((why for feature, why in KNOWN if feature in has), None)


def _joint_features_of(program: Program) -> set[str]:
    """Features that arise from two others together."""
    ops = [op for _, op in numbered(program["ops"])]
    layers = features_of(program, "")
    found: set[str] = set()
    if "layer add" in layers and ("layer gate" in layers or any(map(_keeps_or_writes, ops))):
        found.add("gradients that share memory")
    if layers & {"layer buffer", "layer factor"} and any(map(_parts_forward, ops)):
        found.add("buffers between two forwards")
    if any("flag" in op for op in ops):
        found.add("a flag")
    if any(op.get("scale", 0.0) > 1e30 for op in ops):
        found.add("a loss near the largest number")
    return found


def _keeps_or_writes(op: Op) -> bool:
    """True if gradients stay in place for the next backward, or are modified in place."""
    if op["op"] == "zero_grad":
        return not op.get("none", True)
    if op["op"] == "hook":
        return op.get("kind", "post clamp_") in ("post scale", "post clamp_")
    return op["op"] in ("scale_grads", "clip") or (op["op"] == "backward" and bool(op.get("no_sync")))


def _parts_forward(op: Op) -> bool:
    """True if a forward's buffers affect another forward before its own mean comes."""
    is_apart = op["op"] == "forward" and (op.get("no_sync") or op.get("to", "loss") != "loss")
    return bool(is_apart) or op["op"] in ("evaluate", "iterate")
