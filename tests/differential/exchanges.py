"""Generated programs whose models exchange gradients, compared with one process for the whole batch.

make fuzz WHAT=exchanges FRAMEWORK=paddle SEEDS=0:200

The fuzzer of one backward (the rest of this folder) runs its reference one rank after the other, so no
forward of it may need other ranks. Here every model has norms over all ranks, or a loss that gathers their
outputs. Ranks have batches of different sizes, some empty. Steps have micro-batches, and weights that are
given in several ways. Norms are recomputed, lie outside of the wrapper or in the second of two. Inputs need a
gradient on some ranks only. A layer exchanges without weights in some steps, and not at all in others, in a
graph with the same number of nodes. The second of two models is frozen in some steps, so that its forward is
given no weight. In float64, after each step, gradients must equal those of one process, or every rank must
have refused a step that the documentation says is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.differential.driver import Check, main
from tests.differential.pool import Run, World
from tests.differential.programs import Program
from tests.differential.records import Lost

FRAMEWORKS = ("torch", "paddle")
WIDTH = 3
DEADLINE_S = 60.0
TIMEOUT_S = 20.0
HOWS = ("around all", "around backward", "before forward", "after forward")
Outcome = tuple[str, Any]
"""("gradients", one array or None for each parameter), or ("refused", the error)."""


def generate(seed: int, framework: str) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3])
    layers = [{"kind": "linear"}] if rng.random() < 0.8 else []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(["linear", "norm", "norm", "tanh"])
        layers.append({"kind": kind})
        if kind == "norm":
            layers[-1] |= {
                "affine": rng.random() < 0.7,
                "recomputed": rng.choice([None, None, "", "reentrant"]),
            }
    gathers = rng.random() < 0.2
    if not gathers and not any(layer["kind"] == "norm" for layer in layers):
        layers.append({"kind": "norm", "affine": True, "recomputed": None})
    if layers[0]["kind"] == "linear" and rng.random() < 0.25:  # no layer before it needs a gradient
        layers.insert(rng.randint(1, len(layers)), {"kind": "mix"})
    layers.append({"kind": "linear"})
    outside = []
    if rng.random() < 0.25:  # its gradients would not be averaged, so it has no parameters
        outside = [{"kind": "norm", "affine": False, "recomputed": None}, {"kind": "tanh"}]
    program: Program = {"seed": seed, "ranks": ranks, "layers": layers, "outside": outside}
    program["path"] = rng.choice(["memory", "group"]) if framework == "torch" else "memory"
    program["cut"] = rng.randint(1, len(layers) - 1) if rng.random() < 0.2 and len(layers) > 1 else None
    if program["cut"] and not _has_parameters(layers[: program["cut"]]):
        program["cut"] = None
    program["by_function"] = rng.random() < 0.2
    program["steps"] = [_step(rng, program, framework, gathers) for _ in range(rng.randint(1, 4))]
    # From another generator, so that a seed makes the same program as before models were frozen.
    freezing = random.Random(f"freezing {seed}")
    if program["cut"] and program["by_function"] and freezing.random() < 0.7:
        for step in program["steps"]:
            step["freezes"] = freezing.random() < 0.5
    return program


def _has_parameters(layers: list[dict[str, Any]]) -> bool:
    return any(layer["kind"] == "linear" or layer.get("affine") for layer in layers)


def _is_recomputed(layers: list[dict[str, Any]]) -> bool:
    return any(layer.get("recomputed") is not None for layer in layers)


def _mixes(layers: list[dict[str, Any]]) -> bool:
    return any(layer["kind"] == "mix" for layer in layers)


def _step(rng: random.Random, program: Program, framework: str, gathers: bool) -> dict[str, Any]:
    ranks = program["ranks"]
    layers = program["layers"]
    has_second_order = not _is_recomputed(layers) and not _mixes(layers)
    loss = "gather" if gathers and rng.random() < 0.7 else "plain"
    if framework == "torch" and loss == "plain" and has_second_order and rng.random() < 0.2:
        loss = "penalty"
    is_weighted = program["by_function"] or rng.random() < 0.7
    micros = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        sizes = [rng.choice([0, 1, 2, 3, 5]) for _ in range(ranks)]
        if loss == "gather":
            sizes = [rng.randint(1, 3)] * ranks
        sizes[rng.randrange(ranks)] = max(sizes) if loss == "gather" else 4
        weights = None
        if is_weighted:
            weights = [float(size) for size in sizes]
            if rng.random() < 0.2:
                weights = [rng.choice([0.3, 7.0])] * ranks
            elif rng.random() < 0.6:
                weights = [rng.choice([0.25, 1.0, 1.0, 3.0]) if size else 0.0 for size in sizes]
            if rng.random() < 0.1:
                weights[rng.randrange(ranks)] = 0.0
        micros.append({"sizes": sizes, "weights": weights})
    needs = [rng.random() < 0.5 for _ in range(ranks)]
    if loss == "penalty" or any(layer.get("recomputed") for layer in program["layers"]):
        needs = [True] * ranks  # reentrant recomputation needs it
    if framework == "paddle" and any(0 in micro["sizes"] for micro in micros):
        needs = [True] * ranks  # Paddle's own Linear fails if an empty input needs no gradient
    mixes = _mixes(layers) and rng.random() < 0.5
    return {"loss": loss, "mixes": mixes, "given": rng.choice(HOWS), "needs": needs, "micros": micros}


def expected_refusal(program: Program, step: dict[str, Any]) -> list[str]:
    """Texts of the errors of which every rank must raise one in this step; empty: none."""
    expected = []
    given = [micro["weights"] for micro in step["micros"] if micro["weights"] is not None]
    if (step["loss"] == "gather" or step["mixes"]) and any(len(set(weights)) > 1 for weights in given):
        expected.append("exchanges gradients between ranks")
    layers = [*program["layers"], *program["outside"]]
    # The backward of a norm exchanges only if the gradient of its input is needed.
    exchanging = [
        n
        for n, layer in enumerate(layers)
        if layer["kind"] == "norm" and (_has_parameters(layers[:n]) or any(step["needs"]))
    ]
    for micro in step["micros"] if exchanging else []:
        for rank, size in enumerate(micro["sizes"]):
            weights = micro["weights"]
            if weights is None or not size or weights[rank] != 0.0:
                continue
            if any(weight and rows for weight, rows in zip(weights, micro["sizes"])):
                expected.append("gradients weigh 0")
    return expected


def coefficients(step: dict[str, Any], ranks: int) -> list[list[float]]:
    """The factor of each loss in the gradient, by micro-batch and rank."""
    given = [micro["weights"] for micro in step["micros"]]
    if given[0] is None:  # micro-batches are added up, and the sum is averaged over ranks
        return [[1.0 / ranks] * ranks for _ in given]
    total = sum(map(sum, given))
    return [[weight / total if total else 0.0 for weight in weights] for weights in given]


def values(program: Program) -> list[np.ndarray[Any, Any]]:
    """Initial parameters: a matrix and a bias of each linear layer, a scale and a shift of each norm."""
    numbers = np.random.default_rng(program["seed"])
    found: list[np.ndarray[Any, Any]] = []
    for layer in program["layers"]:
        if layer["kind"] == "linear":
            found += [numbers.standard_normal((WIDTH, WIDTH)), numbers.standard_normal(WIDTH)]
        elif layer.get("affine"):
            found += [1 + 0.3 * numbers.standard_normal(WIDTH), numbers.standard_normal(WIDTH)]
    return found


def batch(program: Program, step: int, micro: int) -> list[np.ndarray[Any, Any]]:
    """The batches of all ranks."""
    sizes = program["steps"][step]["micros"][micro]["sizes"]
    numbers = np.random.default_rng([program["seed"], step, micro])
    return np.split(numbers.standard_normal((sum(sizes), WIDTH)), np.cumsum(sizes)[:-1])


def framework_of(name: str) -> Any:
    """The module that makes and runs models with this framework: `exchanges_torch` or `exchanges_paddle`."""
    return importlib.import_module(f"tests.differential.exchanges_{name}")


def make_rank(framework: str) -> Any:
    def make(rank: int, world_size: int, job: str, folder: Path) -> Run:
        warnings.simplefilter("ignore")
        os.environ.update(TMPDIR=str(folder))
        subject = framework_of(framework).Rank(rank, world_size, job, folder)

        def run(program: Program, options: dict[str, Any]) -> Any:
            return RunResult(subject.run(program))

        return run

    return make


def make_reference(framework: str) -> Any:
    def make(rank: int, world_size: int, job: str, folder: Path) -> Run:
        warnings.simplefilter("ignore")

        def run(program: Program, options: dict[str, Any]) -> Any:
            return RunResult(framework_of(framework).reference(program))

        return run

    return make


class RunResult:
    """The outcomes of one run, in the form that a worker returns."""

    raised = None

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes

    def errors(self) -> list[Any]:
        return []


class Session:
    """Runs programs of one framework."""

    def __init__(self, framework: str) -> None:
        self._framework = framework
        self._worlds: dict[int, World] = {}
        self._reference = World(make_reference(framework), 1, DEADLINE_S)

    def close(self) -> None:
        for world in (self._reference, *self._worlds.values()):
            world.close()

    def check(self, program: Program) -> str:
        """The differences, in words; empty: none."""
        size = program["ranks"]
        world = self._worlds.setdefault(size, World(make_rank(self._framework), size, DEADLINE_S))
        answers: list[Any] = world.run(program, {})
        (reference,) = self._reference.run(program, {})
        for rank, answer in enumerate([*answers, reference]):
            if isinstance(answer, Lost):
                world.close()
                return f"rank {rank}: {answer}"
        for number, step in enumerate(program["steps"]):
            refusals = expected_refusal(program, step)
            for rank, answer in enumerate(answers):
                if text := _difference(answer.outcomes[number], reference.outcomes[number], refusals):
                    return f"step {number}, rank {rank}: {text}"
        return ""


def _difference(found: Outcome, expected: Outcome, refusals: list[str]) -> str:
    if refusals or found[0] == "refused":
        is_right = found[0] == "refused" and any(words in found[1] for words in refusals)
        return "" if is_right else f"{found[0]} {found[1] if found[0] == 'refused' else ''}, not {refusals}"
    # A bias before a norm has no gradient: its computed gradient is a difference of large numbers.
    largest = max(np.abs(right).max() for right in expected[1])
    for index, (value, right) in enumerate(zip(found[1], expected[1], strict=True)):
        if not np.allclose(value, right, rtol=1e-6, atol=1e-8 * (1 + largest)):
            return f"gradient {index} differs by {np.abs(value - right).max():.3g}"
    return ""


def show(program: Program) -> str:
    rows = [f"{key}: {value}" for key, value in program.items() if key != "steps"]
    return "\n".join([*rows, *(f"step {number}: {step}" for number, step in enumerate(program["steps"]))])


@contextlib.contextmanager
def checking(framework: str) -> Iterator[Check]:
    """A check whose ranks live from one program to the next."""
    framework_of(framework)  # before any rank is forked
    session = Session(framework)
    try:
        yield session.check
    finally:
        session.close()


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
