"""Reductions and element types, with the core's numbers for them."""

from __future__ import annotations

from enum import IntEnum

from paceline import _core
from paceline.arguments import Arguments


class ReduceOp(IntEnum):
    """How elements are combined over ranks, in a fixed binary tree over rank order.

    SUM: integers wrap, bool is "or". MEAN: floating types only; weighted if ranks give weights. MIN and MAX:
    NaN wins. PRODUCT: bool is "and".
    """

    SUM = _core.REDUCE_OPS["sum"]
    MEAN = _core.REDUCE_OPS["mean"]
    MIN = _core.REDUCE_OPS["min"]
    MAX = _core.REDUCE_OPS["max"]
    PRODUCT = _core.REDUCE_OPS["product"]


DTYPE_NUMBERS = _core.DTYPES
DTYPE_NAMES = {number: name for name, number in DTYPE_NUMBERS.items()}
FLOATING_DTYPES = frozenset({"float32", "float64", "float16", "bfloat16"})


_BY_NAME: dict[ReduceOp | str, ReduceOp] = {
    spelling: op for op in ReduceOp for spelling in (op, op.name, op.name.lower())
}


def parse_op(op: ReduceOp | str, what: str) -> ReduceOp:
    """A ReduceOp from itself or from its name; `what` is the call that got it, for errors."""
    try:
        return _BY_NAME[op]
    except (KeyError, TypeError):
        is_type = not isinstance(op, str)
        names = ", ".join(repr(each.name.lower()) for each in ReduceOp)
        raise Arguments(what).refuse(
            "op", op, names, 'op="sum" or op=ReduceOp.SUM', is_type=is_type
        ) from None
