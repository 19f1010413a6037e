"""Finds functions in Paddle's graph whose backward exchanges gradients between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import paddle

from paceline.paddle import internals
from paceline.reducer.backward.collectives_in_backward import names_a_collective, names_one, nodes_from
from paceline.reducer.backward.micro_batch_weights import MicroBatchWeights

if TYPE_CHECKING:
    from paceline.reducer.backward.backward_sync import BackwardSync

_OF_PYTHON = "GradNodePyLayer_"
_OF_PADDLE = "SyncBatchNorm"
_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


class _Forwards:
    """The forwards under way in this process.

    Attributes:
        backward_sync: That of the wrapped model whose forward runs, the innermost one. None: no forward runs.
    """

    backward_sync: BackwardSync[Any] | None = None

    @property
    def weights(self) -> MicroBatchWeights | None:
        return None if self.backward_sync is None else self.backward_sync.micro_batches


forwards = _Forwards()


def address_of(node: Any) -> int:
    """The address of a graph node. Its Python objects differ: each access makes a new one."""
    address: int = node.node_ptr()
    return address


def find_exchanges(roots: Sequence[paddle.Tensor]) -> list[str]:
    """The functions in the graph of these roots that exchange gradients, by name.

    Visiting a node costs 2 us in Python, so the graph is searched only if it may hold such a function. On the
    CPU only functions written in Python qualify, because Paddle's own operators exchange on devices only.
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
        name = node.name()  # all that a node shows
        if name in names:
            found[names[name]] = None
        elif not name.startswith(_OF_PYTHON) and (_OF_PADDLE in name or names_one(name)):
            found[name] = None
    return list(found)


def _functions() -> Iterator[type[paddle.autograd.PyLayer]]:
    pending: list[type[paddle.autograd.PyLayer]] = [paddle.autograd.PyLayer]
    for function in pending:  # grows during the loop
        pending += function.__subclasses__()
        yield function


def _exchanges(function: type[paddle.autograd.PyLayer]) -> bool:
    known = _known.get(function)
    if known is None:
        is_ours = function.__module__.startswith("paceline.")
        known = _known[function] = not is_ours and names_a_collective(getattr(function, "backward", None))
    return known
