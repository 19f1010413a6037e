"""The known differences of Paddle's own DataParallel from the reference, by features of a program.

See torch_differences.py.
"""

from __future__ import annotations

from tests.differential.differences import (
    A_FORWARD_INSIDE,
    A_FORWARD_OUTSIDE,
    A_SECOND_BACKWARD,
    orders_of,
    until,
)
from tests.differential.paddle_refusals import features_of
from tests.differential.paddle_subjects import PADDLE
from tests.differential.programs import Program, features, is_weighted, numbered

KNOWN: list[tuple[str, str]] = [
    # a feature of the program up to the op at which values differ, and its effect in Paddle's wrapper
    ("an error of the program's own", "after an exception ranks are in different backward passes"),
    (A_SECOND_BACKWARD, "a second backward is not averaged"),
    (A_FORWARD_OUTSIDE, "no_sync() counts for the forward, not for the backward"),
    (A_FORWARD_INSIDE, "the next backward is averaged, whatever forward it is of"),
    ("op freeze", "what is frozen or unfrozen after wrapping is not noticed"),
    ("op replace", "a layer that is replaced after wrapping is not averaged"),
    ("op swap dtype", "a value of another type after wrapping is not noticed"),
    ("op swap grown", "a value of another shape after wrapping is not noticed"),
    ("op swap shrunk", "a value of another shape after wrapping is not noticed"),
    ("layer add t", "a gradient whose strides are not its parameter's is not averaged"),
    ("layer recompute True", "a backward with reentrant recomputation is not averaged"),
    *(
        (f"op hook end {kind}", "a hook after accumulation gets the mean")
        for kind in ("clip", "scale", "set")
    ),
    ("layer borrow", "a layer of two models is averaged by both"),
    ("layer buffer", "buffers are broadcast once, when the model is wrapped"),
    ("a write of other values", "each rank goes on with its own buffers"),
    ("layer norm", "running statistics are broadcast once, when the model is wrapped"),
]


def incumbents_of(program: Program) -> list[str]:
    """The mode in which Paddle's own wrapper runs it: none if it uses features that only Paceline has."""
    iterates = any(op["op"] == "iterate" for _, op in numbered(program["ops"]))
    return [] if iterates or is_weighted(program) else [PADDLE]


def known_difference(program: Program, at: str) -> str | None:
    """The reason why Paddle's wrapper may differ from the reference at this op; None: no row has one.

    Args:
        program: The program that it ran.
        at: Label of the op; empty: unknown.
    """
    before = until(program, at)
    has = features_of(before) | orders_of(before) | set(features(before))
    return next((why for feature, why in KNOWN if feature in has), None)
