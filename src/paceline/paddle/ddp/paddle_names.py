"""Attributes of paddle.DataParallel and of torch's class that other code reads from a wrapper.

Ours is a subclass that does not run Paddle's constructor, so all other attributes of Paddle's class are
hidden.
"""

# mypy: disable-error-code="misc"
# Paddle's class is Any to mypy

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import paddle
from paddle.distributed.parallel import DataParallel as PaddleDataParallel
from paddle.distributed.parallel import ParallelStrategy

from paceline.ddp.wrapped_model import hide_inherited
from paceline.paddle.backward.graphs import tensors_in

if TYPE_CHECKING:
    from paceline.paddle.backward.autograd import PaddleBackwardSync
    from paceline.paddle.communicator.find_peers import Peers
    from paceline.paddle.model.config import DataParallelConfig

_Class = TypeVar("_Class", bound=type)


class PaddleNames(PaddleDataParallel):
    """The attributes of `DataParallel` that exist for other libraries' code."""

    find_unused_parameters: bool
    var_dtype = paddle.Tensor
    _backward_sync: PaddleBackwardSync | None
    _peers: Peers | None
    _config: DataParallelConfig
    _arguments: dict[str, Any]

    @property
    def group(self) -> Any:
        """The group of the ranks, of paddle.distributed or a `paceline.Group`; in a single process, the
        argument.
        """
        return self._arguments["group"] if self._peers is None else self._peers.group

    @property
    def process_group(self) -> Any:
        """`group`, under torch's name."""
        return self.group

    @property
    def comm_buffer_size(self) -> int:
        """Largest size of a bucket, in bytes."""
        return self._config.bucket_cap_bytes

    @property
    def last_comm_buffer_size(self) -> int:
        """Largest size of the bucket that is averaged first, in bytes."""
        return self._config.first_bucket_bytes

    @property
    def grad_need_sync(self) -> bool:
        """True if the next forward begins a synchronised backward; see no_sync().

        If it is changed between a forward and its backward, it decides about that backward.
        """
        return self.require_backward_grad_sync

    @grad_need_sync.setter
    def grad_need_sync(self, is_syncing: bool) -> None:
        self.require_backward_grad_sync = is_syncing

    @property
    def _strategy(self) -> Any:
        if self._arguments["strategy"] is not None:
            return self._arguments["strategy"]
        strategy = ParallelStrategy()
        if self._peers is not None:
            strategy.nranks, strategy.local_rank = self._peers.world_size, self._peers.rank
        return strategy

    @property
    def _reducer(self) -> PaddleReducer:
        return PaddleReducer(self._backward_sync)


class PaddleReducer:
    def __init__(self, backward_sync: PaddleBackwardSync | None) -> None:
        self._backward_sync = backward_sync

    def prepare_for_backward(self, outputs: Sequence[paddle.Tensor]) -> None:
        """Synchronise the backward of these outputs, though their forward was in no_sync()."""
        if self._backward_sync is not None:
            self._backward_sync.sync_next_backward()
            self._backward_sync.watch(list(tensors_in(outputs)))


def hide_paddles_own(cls: _Class) -> _Class:
    hide_inherited(cls, PaddleDataParallel)
    return cls
