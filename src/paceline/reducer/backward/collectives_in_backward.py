"""The weights of gradients that cross ranks inside a model, in the backward of a layer that sums over ranks.

The reducer weighs a rank's gradients after backward: the mean is sum(w_r * g_r) / sum(w_r). A gradient that
has crossed ranks before that would get the weight of the rank on which it arrives, instead of that of the
rank whose loss it comes from. So during a backward the gradients on rank r are in units of 1 / w_r: what
leaves the rank is multiplied by w_r, and what arrives is divided by it. Then w_r * g_r is exactly rank r's
part of the gradient of the weighted sum of all losses. If every weight is 1, nothing is computed.

Layers of other libraries exchange gradients without weights, which is right only if all ranks have the same
weight. They are found by the node types in the graph of a weighted backward: a function written in Python is
one of them if the code of its backward, or code that it calls, names a collective.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, final

from paceline.errors import ConfigError
from paceline.reducer.backward.micro_batch_weights import SCALE_THE_LOSS, MicroBatchWeights, living

# How names of collectives begin: all_gather_into_tensor, Allreduce, _reduce_scatter_base.
_COLLECTIVES = ("allgather", "allreduce", "alltoall", "reducescatter", "batchisendirecv")
# Other functions have these names too, so they count only together with one of the modules.
_COLLECTIVES_OF_A_MODULE = frozenset(("broadcast", "reduce", "scatter", "gather", "send", "recv", "isend"))
_MODULES = frozenset(("dist", "distributed", "c10d"))
# Code of these libraries exchanges nothing by itself, except in modules named `distributed`.
_HARMLESS = ("torch", "paddle", "numpy")
_PLAIN = ("builtins", "numpy")
_DEPTH = 3  # how many calls are followed


@final
class ExchangeWeight:
    __slots__ = ("_found", "_owner", "_upstream", "_what")

    def __init__(self, what: str, owner: MicroBatchWeights | None, upstream: object) -> None:
        self._what = what
        self._owner = owner
        self._upstream = upstream
        self._found: list[MicroBatchWeights] = []

    def now(self) -> float:
        """The weight in the backward under way; 1 if no model was ever given one."""
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

    def sum(
        self,
        gradient: Any,
        sum_over_ranks: Callable[[Any], Any],
        zeros_like: Callable[[Any], Any],
        rows: str,
        row: int | None = None,
    ) -> Any:
        """The sum of all ranks' gradients, each times its rank's weight, in units of this rank's weight."""
        weight = self.now()
        if weight != 1.0:
            # Zeros instead of a product: 0 * NaN would be NaN.
            gradient = gradient * weight if weight else zeros_like(gradient)
        total = sum_over_ranks(gradient)
        own = total if row is None else total[row]
        if weight == 0.0 and rows and bool(own.any()):
            self._refuse_lost(rows)
        return own / weight if weight not in (0.0, 1.0) else own

    def _refuse_lost(self, rows: str) -> None:
        """Refuse this backward: this rank has weight 0, so the part of the gradient is lost that comes from
        other ranks' losses through its samples.
        """
        self._refuse(
            f"{self._what}: a rank whose gradients weigh 0 has samples in the batch of all ranks.",
            seen=f"weight 0, and {rows}",
            expected="a weight above 0, or an empty batch",
            likely="a batch in which every sample or token is masked",
            hint=f"leave such samples out of the batch, which may be empty; or {SCALE_THE_LOSS}",
        )

    def _concerns(self, weights: MicroBatchWeights) -> bool:
        """Whether these gradients reach parameters of that model, or belong to its backward."""
        if weights is self._owner or weights.reaches(self._upstream):
            return True
        return self._owner is None and weights.is_weighing  # recomputed within a backward of that model

    def _refuse(self, summary: str, **rows: str) -> None:
        for each in self._found:
            each.refuse(ConfigError(summary, **rows))


def _as_it_is(node: Any) -> Any:
    return node


def nodes_from(roots: Iterable[Any], key: Callable[[Any], Hashable] = _as_it_is) -> Iterator[Any]:
    """Each node of the graph that a backward from these roots reaches, once, in breadth-first order."""
    pending = [root for root in roots if root is not None]
    seen = {key(root) for root in pending}
    for node in pending:  # grows while it is iterated
        yield node
        for following in node.next_functions:
            following = following[0] if isinstance(following, tuple) else following  # torch has pairs
            if following is not None and (known := key(following)) not in seen:
                seen.add(known)
                pending.append(following)


def names_one(name: str) -> bool:
    """Whether a name is that of a collective, whatever its module."""
    return name.replace("_", "").lower().startswith(_COLLECTIVES)


def _nothing_else(names: set[str]) -> Iterable[object]:
    return ()


def names_a_collective(
    function: object, called: Callable[[set[str]], Iterable[object]] = _nothing_else
) -> bool:
    """Whether the code of a function, or of functions and classes that it calls, names a collective.

    Called functions are looked up by the names in its code: in its module, in its closure, and in the objects
    found there.
    """
    level, seen = [_unwrapped(function)], set()
    for _ in range(_DEPTH + 1):
        following: list[object] = []
        for each in level:
            if not isinstance(each, FunctionType) or each in seen:
                continue
            seen.add(each)
            names = _names_in(each.__code__)
            values = [*map(each.__globals__.get, names), *enclosed_by(each)]
            if any(map(names_one, names)) or (
                names & _COLLECTIVES_OF_A_MODULE and _names_c10d(names, values)
            ):
                return True
            inner = [value for value in values if _is_entered(value)]
            following += values
            following += [inspect.getattr_static(value, name, None) for value in inner for name in names]
            following += called(names)
        level = [each for each in map(_unwrapped, following) if _is_followed(each)]
    return False


def _names_c10d(names: set[str], values: Iterable[object]) -> bool:
    modules = {value.__name__.rpartition(".")[2] for value in values if isinstance(value, ModuleType)}
    return not _MODULES.isdisjoint(names | modules)


def _unwrapped(value: object) -> object:
    if isinstance(value, type):  # an autograd function: calling its apply() runs `forward`
        value = inspect.getattr_static(value, "forward", None)
    while isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(value) if isinstance(value, FunctionType) else value


def _is_followed(value: object) -> bool:
    return isinstance(value, FunctionType) and not _is_harmless(value.__module__)


def _is_entered(value: object) -> bool:
    if isinstance(value, ModuleType):
        return not _is_harmless(value.__name__)
    return not isinstance(value, (type, FunctionType)) and type(value).__module__ not in _PLAIN


def _is_harmless(module: str | None) -> bool:
    module = module or ""
    return module.partition(".")[0] in _HARMLESS and "distributed" not in module


def enclosed_by(function: FunctionType) -> list[object]:
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*inner)
