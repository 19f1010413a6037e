"""Finds functions in Paddle's graph that exchange gradients between ranks when backward comes to them.

Imports paddle and `reducer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle

from paceline.reducer.passes.exchanges import names_a_collective, nodes_from, runs_a_backward
from paceline.reducer.passes.micro_batches import MicroBatchWeights

_OF_PYTHON = "GradNodePyLayer_"
_OF_PADDLE = ("SyncBatchNorm",)


class _Forwards:
    """The forwards of this process.

    Attributes:
        weights: The wrapped model whose forward runs has these; the innermost one.
    """

    weights: MicroBatchWeights | None = None


forwards = _Forwards()


def address_of(node: Any) -> int:
    """Where the node is: each look at it makes another object in Python."""
    address: int = node.node_ptr()
    return address


def find_exchanges(roots: Sequence[Any], found: list[str]) -> bool:
    """See `MicroBatchWeights._find_exchanges`. Recompute runs backwards within others."""
    has_inner_backwards = False
    functions = _functions_by_node()
    for node in nodes_from(roots, address_of):
        name = node.name()
        is_exchange = any(part in name for part in _OF_PADDLE)
        for function in functions.get(name, ()):  # a node tells no more than the name
            has_inner_backwards |= runs_a_backward(function.backward)
            if not function.__module__.startswith("paceline.") and names_a_collective(function.backward):
                is_exchange, name = True, f"{function.__module__}.{function.__qualname__}"
        if is_exchange and name not in found:
            found.append(name)
    return has_inner_backwards


def _functions_by_node() -> dict[str, list[type[paddle.autograd.PyLayer]]]:
    """All that are written in Python, by the name of their node."""
    found: dict[str, list[type[paddle.autograd.PyLayer]]] = {}
    pending: list[type[paddle.autograd.PyLayer]] = [paddle.autograd.PyLayer]
    for function in pending:  # which grows
        pending += function.__subclasses__()
        found.setdefault(_OF_PYTHON + function.__name__, []).append(function)
    return found
