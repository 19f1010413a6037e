"""Finds functions in Paddle's graph that exchange gradients between ranks when backward comes to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import paddle

from paceline.paddle import internals
from paceline.reducer.backward.exchanges import names_a_collective, names_one, nodes_from
from paceline.reducer.backward.micro_batches import MicroBatchWeights

if TYPE_CHECKING:
    from paceline.reducer.backward.backward_sync import BackwardSync

_OF_PYTHON = "GradNodePyLayer_"
_OF_PADDLE = "SyncBatchNorm"
_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class _Forwards:
    """The forwards of this process.

    Attributes:
        backward_sync: Those of the wrapped model whose forward runs; the innermost one. None: none runs.
    """

    backward_sync: BackwardSync[Any] | None = None

    @property
    def weights(self) -> MicroBatchWeights | None:
        return None if self.backward_sync is None else self.backward_sync.micro_batches


forwards = _Forwards()


def address_of(node: Any) -> int:
    """Each look at a node makes another object in Python."""
    address: int = node.node_ptr()
    return address


def find_exchanges(roots: Sequence[paddle.Tensor]) -> list[str]:
    """A node costs Python 2 us. So the graph is searched only if it may hold what is looked for: on the CPU
    that is a function written in Python, because Paddle's own operators exchange on devices only.
    """
    names = {
        _OF_PYTHON + function.__name__: f"{function.__module__}.{function.__qualname__}"
        for function in _functions()
        if _exchanges(function) and internals.may_be_in_a_graph(function)
    }
    if not names and all(tensor.place.is_cpu_place() for tensor in roots):
        return []
    found: dict[str, None] = {}
    for node in nodes_from(map(internals.grad_node, roots), address_of):
        name = node.name()  # a node tells no more
        if name in names:
            found[names[name]] = None
        elif not name.startswith(_OF_PYTHON) and (_OF_PADDLE in name or names_one(name)):
            found[name] = None
    return list(found)


def _functions() -> Iterator[type[paddle.autograd.PyLayer]]:
    pending: list[type[paddle.autograd.PyLayer]] = [paddle.autograd.PyLayer]
    for function in pending:  # which grows
        pending += function.__subclasses__()
        yield function


def _exchanges(function: type[paddle.autograd.PyLayer]) -> bool:
    known = _known.get(function)
    if known is None:
        is_ours = function.__module__.startswith("paceline.")
        known = _known[function] = not is_ours and names_a_collective(getattr(function, "backward", None))
    return known
