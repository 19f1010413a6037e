"""Adds operations between a forward and its backward, or between two steps, to generated programs.

They use a separate random generator, so that a seed makes the same rest of the program as without them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from tests.differential.programs import Op, Program, is_weighted, numbered

VALUES = (0.5, 1.0, 1.5, 2.0)


def write_buffers(program: Program, rng: random.Random, *, may_differ: bool = True) -> None:
    """Write a buffer between steps: the same on all ranks; on some ranks only; or other values on each."""
    layers = program["models"][0]["layers"]
    layers.insert(rng.randint(0, len(layers)), {"kind": "factor"})
    ranks = program["ranks"]
    is_apart = rng.random() < 0.5 and may_differ
    # After a backward that raises, or a forward without a backward, the ranks' statistics differ; the
    # reference does not model a broadcast.
    ops_of_some = [(op["op"], op.get("how")) for _, op in numbered(program["ops"])]
    may_part = any(name == "try" or (name, how) == ("evaluate", "train") for name, how in ops_of_some)
    if is_apart and rng.random() < 0.5 and not may_part:
        program.setdefault("options", {})["forward_sync_buffers"] = True
    kind = rng.choice(["alone", "alone", "each"])
    writer = rng.choice([0, 0, ranks - 1])
    ops: list[Op] = []
    for place, op in enumerate(program["ops"]):
        is_between = not ops or ops[-1]["op"] in ("step", "wrap", "optimizer")
        if is_between and op["op"] not in ("step", "wrap", "optimizer") and rng.random() < 0.6:
            values: list[float | None] | float = rng.choice(VALUES)
            # A rank that has no batch uses no value that it has written.
            user = next((each for each in program["ops"][place:] if each["op"] in ("forward", "iterate")), op)
            if is_apart and 0 not in user.get("counts", ()):
                drawn = [rng.choice(VALUES) for _ in range(ranks)]
                values = [v if kind == "each" or rank == writer else None for rank, v in enumerate(drawn)]
            ops.append({"op": "write", "values": values, "how": rng.choice(["put", "anew", "data"])})
        ops.append(op)
    program["ops"] = ops


def are_apart(op: Op) -> bool:
    """True if the ranks' values may differ after this op."""
    values = op.get("values")
    return op["op"] == "write" and isinstance(values, list) and len(set(values)) > 1


def compare_inputs(program: Program, *, first: list[dict[str, Any]], is_wrapped_again: bool) -> None:
    """Make inputs need gradients, and compare those.

    Args:
        first: Layers to put before all others of the first model. With batches of one row, a parameter of
            these may get its gradient in the memory of the input's.
        is_wrapped_again: Whether another wrapper has the parameters of the first model, too.
    """
    for _, op in numbered(program["ops"]):
        if op["op"] == "forward":
            op["input"] = True
            if first:
                op["batch"] = 1
    program["models"][0]["layers"][:0] = first
    if is_wrapped_again:
        place = next(place for place, op in enumerate(program["ops"]) if op["op"] == "wrap") + 1
        program["ops"].insert(place, {"op": "wrap", "keep": True})
    if any(op["op"] == "freeze" for _, op in numbered(program["ops"])):
        # In a model that is frozen entirely no backward is averaged, although the input needs a gradient.
        for model in program["models"]:
            model["layers"].append({"kind": "linear"})


def set_flags(ops: list[Op], rng: random.Random) -> None:
    """Set require_backward_grad_sync between forward and backward, instead of no_sync() around one."""
    for before, op in itertools.pairwise(ops):
        is_pair = before["op"] == "forward" and op["op"] == "backward" and "of" not in op
        if not is_pair or "to" in before or before.get("no_sync") or rng.random() < 0.3:
            continue
        if op.pop("no_sync", False):
            op["flag"] = False
        elif not op.get("retain"):
            before["flag"], op["flag"] = rng.random() < 0.3, True


def freeze_around(ops: list[Op], rng: random.Random) -> None:
    """Freeze a parameter on all ranks next to a forward or a backward, and unfreeze it next to a later one.

    Before it there may be a forward with gradients whose backward never comes: in evaluation, on all ranks or
    on one, or in training.
    """
    places = [place for place, op in enumerate(ops) if op["op"] in ("forward", "backward")]
    first = rng.choice(places)
    param = rng.randint(0, 6)
    last = rng.choice([place for place in (*places, len(ops)) if place >= first])
    ops.insert(last, {"op": "freeze", "param": param, "on": True})
    ops.insert(first, {"op": "freeze", "param": param})
    alone = rng.choice(["evaluated", "evaluated", "trained", ""])
    if alone == "evaluated":
        where = {"ranks": [0]} if rng.random() < 0.3 else {}
        ops.insert(first, {"op": "evaluate", "how": "grad", **where})
    elif alone == "trained":
        ops.insert(first, {"op": "forward", "to": "lost", "batch": 2, "data": 800 + len(ops)})


def freeze_gated(program: Program, rng: random.Random, *, modes: Sequence[str], clearing: str) -> bool:
    """Freeze parameters twice, some in layers that only one rank uses, and clear gradients less often.

    The gradients that these have when they are frozen come from one rank, from all, or from none. In some
    programs a rank has added to them alone, in a backward that the others do not make.

    Not if ranks run out of data or a backward raises: the remaining gradients then differ, and those of
    frozen parameters are not averaged. Nor if tensors are exchanged, nor under weights, because a backward
    that only one rank makes would need a weight.

    Args:
        modes: Those of them that allow unused parameters.
        clearing: The name of the op that clears gradients.

    Returns:
        Whether the program was suitable.
    """
    ops: list[Op] = program["ops"]
    names = {op["op"] for _, op in numbered(ops)}
    if names & {"iterate", "try", "swap", "replace", "convert", "weight"} or "forward" not in names:
        return False
    if program.get("options", {}).get("forward_sync_buffers"):  # the reference does not model a broadcast
        return False
    layers = program["models"][0]["layers"]
    count = rng.randint(0, len(layers))
    user = rng.randrange(program["ranks"])
    gate = {"kind": "gate", "ranks": [user], "layers": [*layers[:count], {"kind": "add"}]}
    # In a model that is frozen entirely no backward is averaged.
    program["models"][0]["layers"] = [gate, *layers[count:], {"kind": "linear"}]
    program["modes"] = rng.sample(modes, 2)
    ops[:] = [op for op in ops if op["op"] != clearing or rng.random() < 0.4]
    for _ in range(2):
        freeze_around(ops, rng)
    # With several models, the next backward might be another model's, which does not average this one's
    # gradients.
    if rng.random() < 0.5 and len(program["models"]) == 1:
        place = rng.choice([place for place, op in enumerate(ops) if op["op"] == "forward"])
        alone = {"ranks": [rng.choice([user, rng.randrange(program["ranks"])])], "no_sync": True}
        ops[place:place] = [
            {"op": "forward", "to": "own", "batch": 2, "data": 700 + len(ops), **alone},
            {"op": "backward", "of": ["own"], **alone},
        ]
    return True


def vary_weighted(program: Program, rng: random.Random, *, clipping: str) -> None:
    """In programs with weights: keep gradients for the next step, freeze one of them, and clip one.

    Not if a backward raises: the reference does not know the gradients that this leaves. Nor if a parameter
    gets another shape, to which an old gradient cannot be added.

    Args:
        clipping: The kind of hook that clips. It is registered after Paceline's own hook, which applies the
            weight.
    """
    ops: list[Op] = program["ops"]
    names = {op["op"] for _, op in numbered(ops)}
    first = next((place for place, op in enumerate(ops) if op["op"] == "step"), None)
    if "weight" not in names or names & {"try", "swap"} or first is None:
        return
    # A model that is frozen entirely has no backward.
    program["models"][0]["layers"].append({"kind": "linear"})
    clearing = [place for place, op in enumerate(ops) if place > first and op["op"] in ("zero_grad", "clear")]
    if clearing:
        # Prefer a step of several micro-batches: its second micro-batch scales the gradients of the first.
        several = [place for place in clearing if any(op.get("no_sync") for op in ops[place : place + 5])]
        place = rng.choice(several or clearing)
        ops[place : place + 1] = [{"op": "freeze", "param": rng.randint(0, 6)}] if rng.random() < 0.8 else []
    forwards = [place for place, op in enumerate(ops) if place > first and op["op"] == "forward"]
    if forwards:
        hook = {"op": "hook", "kind": clipping, "param": rng.randint(0, 6)}
        ops.insert(rng.choice(forwards), hook)


_WEIGHTS = (0.5, 1.0, 2.0, 5.0)


def weigh_forwards(program: Program, rng: random.Random) -> None:
    """In programs with weights: pass most weights with forwards, some of which get no backward.

    The result of such a forward is dropped or kept. All ranks make it in training, and one may in evaluation.
    If two models have a parameter in common, all forwards of a rank that get a backward have the same weight.
    """
    ops: list[Op] = program["ops"]
    borrows = any(layer["kind"] == "borrow" for model in program["models"] for layer in model["layers"])
    if not is_weighted(program) or rng.random() < 0.3:
        return
    program["weighs"] = True
    same = [rng.choice(_WEIGHTS) for _ in range(program["ranks"])] if borrows else None
    program["ops"] = _weighing(ops, program["ranks"], rng, same)


def _weighing(ops: list[Op], ranks: int, rng: random.Random, same: list[float] | None) -> list[Op]:
    made: list[Op] = []
    for op in ops:
        if op["op"] == "weight":  # the weight of the forward before it
            made[-1]["weight"] = op["values"] if same is None else same
            continue
        op = {**op}
        if op["op"] == "forward":
            op["weight"] = [rng.choice(_WEIGHTS) for _ in range(ranks)] if same is None else same
        for part in ("body", "otherwise"):
            if part in op:
                op[part] = _weighing(op[part], ranks, rng, same)
        # Not in a `try`: an error in a forward must be raised in one that the reference knows.
        made.append(op)
    if not any(op["op"] in ("trap", "raise") for op in made):
        made = [each for op in made for each in _with_lost(op, ranks, rng)]
    return made


def _with_lost(op: Op, ranks: int, rng: random.Random) -> list[Op]:
    """A forward, perhaps next to another one that gets no backward."""
    if op["op"] != "forward" or rng.random() < 0.6:
        return [op]
    lost: Op = {**op, "op": "lost", "data": op["data"] + 500, "keep": rng.random() < 0.5}
    lost["how"] = rng.choice(["train", "eval"])
    lost["weight"] = [rng.choice(_WEIGHTS) for _ in range(ranks)]
    for name in ("to", "no_sync", "flag", "input", "nan", "scale"):
        lost.pop(name, None)
    if lost["how"] == "eval" and rng.random() < 0.4:
        lost["ranks"] = [rng.randrange(ranks)]
    return [op, lost] if rng.random() < 0.5 else [lost, op]


def step_directly(ops: list[Op], rng: random.Random) -> None:
    """Add a step with gradients that a framework call returns, instead of those of a backward.

    Not if the model is wrapped anew before its next forward, which would have reported it: then the ranks
    have the same parameters again, but different optimizer states.
    """
    steps = [place for place, op in enumerate(ops) if op["op"] == "step" and "model" not in op]
    # Prefer a place before uneven data: join() calls collectives before the forward that would report it.
    uneven = [place for place in steps if any(op["op"] == "iterate" for op in ops[place + 1 : place + 4])]
    place = rng.choice(uneven or steps) + 1
    if next((op["op"] for op in ops[place:] if op["op"] in ("forward", "wrap")), "") == "wrap":
        return
    ops[place:place] = [{"op": "forward", "batch": 2, "data": 900 + len(ops)}, {"op": "direct"}]
