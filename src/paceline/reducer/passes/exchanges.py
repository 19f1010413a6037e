"""The weights of gradients that cross ranks inside a model, in the backward of a layer that sums over ranks.

The reducer weighs a rank's gradients after backward: the mean is sum(w_r * g_r) / sum(w_r). A gradient that
has crossed ranks before that would have the weight of the rank on which it arrived, instead of that of the
rank whose loss it comes from. So during a backward the gradients on rank r are in units of 1 / w_r: what
leaves the rank is multiplied by w_r, and what arrives is divided by it. Then w_r * g_r is exactly rank r's
part of the gradient of the weighted sum of all losses. Where every weight is 1 nothing is computed.

Layers that are not ours exchange without weights, and are refused. They are found in the graph of a backward:
a function that somebody has written in Python is one of them if the code of its backward, or what that calls
nearby, names a collective.

Imports its neighbours, `errors` and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, final

from paceline.errors import ConfigError
from paceline.reducer.passes.micro_batches import SCALE_THE_LOSS, MicroBatchWeights, living

_COLLECTIVES = frozenset(
    (
        *("all_gather", "all_gather_into_tensor", "all_gather_tensor", "all_reduce", "all_reduce_coalesced"),
        *("all_to_all", "all_to_all_single", "alltoall", "batch_isend_irecv", "reduce_scatter"),
        *("reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"),
    )
)
# Other things have these names, too.
_COLLECTIVES_OF_A_MODULE = frozenset(("broadcast", "reduce", "scatter", "gather", "send", "recv", "isend"))
_MODULES = frozenset(("dist", "distributed", "c10d"))
_DEPTH = 3


@final
class ExchangeWeight:
    """The weight of the gradients that one call of a layer exchanges in backward.

    Args:
        what: The layer, for errors.
        owner: The weights of the wrapped model in whose forward the layer was called; None: in none.
        upstream: The node of the framework's graph that made the layer's input; None: there is none.
    """

    __slots__ = ("_found", "_owner", "_upstream", "_what")

    def __init__(self, what: str, owner: MicroBatchWeights | None, upstream: object) -> None:
        self._what = what
        self._owner = owner
        self._upstream = upstream
        self._found: list[MicroBatchWeights] = []

    def now(self) -> float:
        """The weight in the backward under way; 1 where no model was ever given one."""
        if not living.is_any_used:
            return 1.0
        self._found = []
        everyone = living.all()
        weights = {each.current for each in everyone}
        if weights <= {1.0} or not everyone[0].is_in_backward():
            return 1.0
        if self._owner is not None and len(weights) == 1:
            self._found = [self._owner]
            return self._owner.current
        self._found = found = [each for each in everyone if self._concerns(each)]
        if not found:
            return 1.0
        weight = found[0].current if self._owner is None else self._owner.current
        weights = {each.current for each in found}
        if len(weights) > 1:
            self._refuse(
                f"{self._what} exchanges gradients for wrapped models that have other weights.",
                seen=f"weights {', '.join(f'{each:g}' for each in sorted(weights))} in one backward",
                likely="weight= or weight() of one of several wrapped models in the same backward",
                hint=f"give all of them the same weight; or {SCALE_THE_LOSS}",
            )
        return weight

    def refuse_lost(self, rows: str) -> None:
        """Refuse this backward: the rank has weight 0, so the part of the gradient is lost that comes
        from other ranks' losses through its samples.

        Args:
            rows: What the rank has put in, in words.
        """
        self._refuse(
            f"{self._what}: a rank whose gradients weigh 0 has samples in the batch of all ranks.",
            seen=f"weight 0, and {rows}",
            expected="a weight above 0, or an empty batch",
            likely="a batch in which every sample or token is masked",
            hint=f"leave such samples out of the batch, which may be empty; or {SCALE_THE_LOSS}",
        )

    def _concerns(self, weights: MicroBatchWeights) -> bool:
        """Whether these gradients flow on to parameters of that model, or belong to its backward."""
        if weights is self._owner or weights.reaches(self._upstream):
            return True
        return self._owner is None and weights.is_weighing  # recomputed within a backward of that model

    def _refuse(self, summary: str, **rows: str) -> None:
        for each in self._found:
            each.refuse(ConfigError(summary, **rows))


def _as_it_is(node: Any) -> Any:
    return node


def nodes_from(roots: Iterable[Any], key: Callable[[Any], Hashable] = _as_it_is) -> Iterator[Any]:
    """All nodes of a framework's graph that a backward from these comes to, once each, near ones first.

    Args:
        roots: Nodes, or None.
        key: What tells a node from others.
    """
    pending = [root for root in roots if root is not None]
    seen = {key(root) for root in pending}
    for node in pending:  # which grows
        yield node
        for following in node.next_functions:
            following = following[0] if isinstance(following, tuple) else following  # with torch, a pair
            if following is not None and (known := key(following)) not in seen:
                seen.add(known)
                pending.append(following)


def names_a_collective(function: object, depth: int = _DEPTH) -> bool:
    """Whether the code of a function names one, or that of functions and classes of its module that it names.

    Args:
        depth: How many calls are followed.
    """
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    names = _names_in(function.__code__)
    if names & _COLLECTIVES or (names & _COLLECTIVES_OF_A_MODULE and names & _MODULES):
        return True
    values = [function.__globals__.get(name) for name in names] if depth else []
    # Of a class it is apply() that is called, of a function of autograd's.
    called = [getattr(each, "forward", None) if isinstance(each, type) else each for each in values]
    return any(names_a_collective(each, depth - 1) for each in called)


def runs_a_backward(function: object) -> bool:
    """Whether the code of a function names one: a graph that it makes itself runs there."""
    return isinstance(function, FunctionType) and "backward" in _names_in(function.__code__)


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)
