"""The measurement in one rank, for either framework: every variant of averaging in turn, round by round."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMPRESSED = ("bf16", "fp16", "int8", "topk")
"""Values of compress_between_hosts; the variants are otherwise like `hosts`."""
ALONE = "alone"
"""The model without any wrapper: the time of a step without averaging."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element of the parameters, by their dtype."""
NUM_LAYERS = 4


@dataclass(frozen=True)
class Arguments:
    """The command line of a rank.

    Attributes:
        nbytes: The approximate bytes of the model's parameters.
        rounds: How often each variant is measured.
        steps: The number of backwards of one measurement.
        ways: The variants of averaging, by name.
        dtype: The dtype of the parameters.
    """

    nbytes: int
    rounds: int
    steps: int
    ways: list[str]
    dtype: str

    @classmethod
    def given(cls) -> Arguments:
        nbytes, rounds, steps, ways, dtype = sys.argv[1:6]
        return cls(int(nbytes), int(rounds), int(steps), ways.split(","), dtype)


def width_of(nbytes: int, dtype: str = "float32") -> int:
    """The width of each square layer of a model of about `nbytes`."""
    return max(4, round((nbytes / ITEM_BYTES[dtype] / NUM_LAYERS) ** 0.5))


def measure(
    arguments: Arguments,
    models: Mapping[str, Any],
    backward: Callable[[Any], None],
    barrier: Callable[[], None],
    slowest: Callable[[float], float],
) -> dict[str, Any]:
    """For each round: seconds of a backward on the slowest rank, and bytes that this host sent in it.

    Args:
        models: The wrapped model of each variant, by name.
        backward: Runs one backward of a model.
        barrier: Waits for all ranks.
        slowest: Returns the maximum over all ranks.
    """
    seconds: dict[str, list[float]] = {way: [] for way in models}
    sent_bytes: dict[str, list[float]] = {way: [] for way in models}
    for _ in range(arguments.rounds):
        for way, model in models.items():
            backward(model)
            barrier()
            before, started = sent(), time.perf_counter()
            for _ in range(arguments.steps):
                backward(model)
            took = time.perf_counter() - started
            barrier()
            sent_bytes[way].append((sent() - before) / arguments.steps)
            seconds[way].append(slowest(took) / arguments.steps)
    return {"seconds": seconds, "sent_bytes": sent_bytes}


def sent() -> int:
    """Bytes that this host has sent over its link so far."""
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())


def report(facts: Mapping[str, Any]) -> None:
    """Write the results to the file RESULT, for the process that started the ranks."""
    with open(os.environ["RESULT"], "w") as file:
        json.dump(facts, file)
