"""Differences of a framework's own wrapper that depend on the order of forwards and backwards.

Independent of the framework; torch_differences.py and paddle_differences.py have the tables.
"""

from __future__ import annotations

from tests.differential.programs import Program, numbered

A_SECOND_BACKWARD = "a backward without a forward of its own"
A_FORWARD_OUTSIDE = "a forward outside of no_sync(), and its backward inside"
A_FORWARD_INSIDE = "a forward in no_sync(), whose backward comes before that of one outside"


def until(program: Program, at: str) -> Program:
    """The program up to the op of its outermost list that contains the op of this label.

    Args:
        program: The program that ran.
        at: The label, as records have it ("3.1#2 model 0"). For an unknown label: the whole program.
    """
    number = at.partition(" ")[0].partition("#")[0].partition(".")[0]
    return {**program, "ops": program["ops"][: int(number) + 1]} if number else program


def orders_of(program: Program) -> set[str]:
    """The features that follow from the order of ops alone: the three names above."""
    found: set[str] = set()
    models: dict[str, int] = {}  # of each loss
    is_local: dict[str, bool] = {}
    is_prepared: dict[int, bool] = {}  # for the next backward, by a synchronised forward
    for _, op in numbered(program["ops"]):
        if op["op"] == "forward":
            name, model = op.get("to", "loss"), op.get("model", 0)
            models[name], is_local[name] = model, bool(op.get("no_sync"))
            is_prepared[model] = is_prepared.get(model, False) or not is_local[name]
        elif op["op"] == "backward":
            syncing = [name for name in op.get("of", ["loss"]) if not is_local.get(name, False)]
            if syncing and op.get("no_sync"):
                found.add(A_FORWARD_OUTSIDE)
            if not syncing and any(is_prepared.get(models.get(name, 0)) for name in op.get("of", ["loss"])):
                found.add(A_FORWARD_INSIDE)
            used = {models.get(name, 0) for name in syncing}
            if not all(is_prepared.get(model, False) for model in used):
                found.add(A_SECOND_BACKWARD)
            is_prepared.update(dict.fromkeys(used, False))
    return found
