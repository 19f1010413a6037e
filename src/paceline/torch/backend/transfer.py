"""send and recv of tensors between two ranks.

May import torch, the core's types, and its neighbours in this folder. The core starts a transfer without
blocking and moves all of them on in every wait, so that messages need no thread of their own. Between two
ranks messages arrive in the order of sending; a tag is compared, not searched for.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import Work

from paceline.collectives.call_queue import CallQueue
from paceline.torch.backend.staging import as_input, as_output, write_back

if TYPE_CHECKING:
    from paceline._core import HostGroup

_NO_TIMEOUT = timedelta(0)
_NAP_S = 0.0001


class Mailbox:
    """The messages of one rank of a group.

    Args:
        queue: Of the group; while it is busy, its thread is the one that waits in the core.
    """

    def __init__(self, core: HostGroup, queue: CallQueue) -> None:
        self.core = core
        self.queue = queue
        # The core reads and writes this memory until a transfer is over, even when the caller has dropped
        # the Work.
        self._under_way: list[TransferWork] = []

    def send(self, tensor: torch.Tensor, destination: int, tag: int, timeout_s: float) -> TransferWork:
        buffer = as_input(tensor)
        transfer = self.core.start_send(buffer.data_ptr(), buffer.nbytes, destination, tag)
        return self._track(TransferWork(self, transfer, buffer, None, self.core.rank, timeout_s))

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> TransferWork:
        buffer = as_output(tensor)
        transfer = self.core.start_receive(buffer.data_ptr(), buffer.nbytes, source, tag)
        return self._track(TransferWork(self, transfer, buffer, tensor, source, timeout_s))

    def _track(self, work: TransferWork) -> TransferWork:
        self._under_way = [other for other in self._under_way if not other.is_completed()]
        self._under_way.append(work)
        return work


class TransferWork(Work):
    """One message under way.

    Args:
        transfer: Its number in the core.
        buffer: Contiguous memory that its bytes are read from or written to.
        target: The caller's tensor of a receive.
        source: The sending rank.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        transfer: int,
        buffer: torch.Tensor,
        target: torch.Tensor | None,
        source: int,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._transfer = transfer
        self._buffer = buffer
        self._target = target
        self._source = source
        self._timeout_s = timeout_s
        self._is_over = False
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if not self._is_over:
            seconds = timeout.total_seconds()
            self._finish(seconds if seconds > 0 else self._timeout_s)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        if not self._is_over and self._mailbox.core.test(self._transfer):
            self._finish(self._timeout_s)
        return self._is_over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._buffer if self._target is None else self._target]

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def _finish(self, timeout_s: float) -> None:
        core = self._mailbox.core
        try:
            # One thread at a time waits in the core, and it moves all messages on. A collective of the queue
            # may wait for a rank that waits for what this rank does after this message.
            while not self._mailbox.queue.is_empty() and not core.test(self._transfer):
                time.sleep(_NAP_S)
            core.wait(self._transfer, timeout_s)
            if self._target is not None:
                write_back(self._buffer, self._target)
        except Exception as error:
            self._error = error
        self._is_over = True
