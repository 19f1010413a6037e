"""Finds functions in autograd's graph that exchange gradients between ranks when backward comes to them.

Imports torch and `reducer`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from paceline.reducer.passes.exchanges import names_a_collective, nodes_from, runs_a_backward

_IN_COMPILED_CODE = ("c10d_functional", "AllGatherIntoTensor", "ReduceScatterTensor", "AllToAllSingle")
_OTHERS = ("paceline.", "torch._functorch.", "torch._dynamo.", "torch._inductor.")


def find_exchanges(roots: Sequence[Any], found: list[str]) -> bool:
    """See `MicroBatchWeights._find_exchanges`. Reentrant checkpointing runs backwards within others."""
    has_inner_backwards = False
    for node in nodes_from(roots):
        function, name = getattr(node, "_forward_cls", None), node.name()
        is_exchange = any(part in name for part in _IN_COMPILED_CODE)
        if function is not None and not function.__module__.startswith(_OTHERS):
            has_inner_backwards |= runs_a_backward(function.backward)
            if _exchanges(function):
                is_exchange, name = True, f"{function.__module__}.{function.__qualname__}"
        if is_exchange and name not in found:
            found.append(name)
    return has_inner_backwards


@functools.lru_cache(maxsize=1000)
def _exchanges(function: type[torch.autograd.Function]) -> bool:
    if function.__module__.startswith("torch.distributed.nn."):
        return True
    return names_a_collective(function.backward) or names_a_collective(function.vjp)
