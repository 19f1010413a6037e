"""What a framework's own wrapper may do otherwise depends on the order of forwards and backwards.

Knows no framework; torch_differences.py and paddle_differences.py have the tables.
"""

from __future__ import annotations

from tests.differential.programs import Program, numbered

A_SECOND_BACKWARD = "a backward without a forward of its own"
A_FORWARD_OUTSIDE = "a forward outside of no_sync(), and its backward inside"
A_FORWARD_INSIDE = "a forward in no_sync(), whose backward comes before that of one outside"


def until(program: Program, at: str) -> Program:
    """The program as far as the op of its outermost list in which the op of this label is.

    Args:
        program: That ran.
        at: The label, as records have it ("3.1#2 model 0"); empty: that of no op, so the whole program.
    """
    number = at.partition(" ")[0].partition("#")[0].partition(".")[0]
    return {**program, "ops": program["ops"][: int(number) + 1]} if number else program


def orders_of(program: Program) -> set[str]:
    """What only the order of ops tells: the three names above."""
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
