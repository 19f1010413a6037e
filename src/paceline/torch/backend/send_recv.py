"""send and recv of tensors between two ranks.

The core starts a transfer without blocking. Every wait in the core makes progress on all transfers, so
messages need no thread of their own. Messages between two ranks arrive in the order of sending. A receive
compares its tag with that of the next message; it does not search for a message with its tag.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import Work

from paceline.collectives.call_queue import CallQueue
from paceline.errors import ConfigError
from paceline.torch.backend.staging import as_input, as_output, write_back

if TYPE_CHECKING:
    from paceline._core import HostGroup

_NO_TIMEOUT = timedelta(0)
_NAP_S = 0.0001


class Mailbox:
    def __init__(self, core: HostGroup, queue: CallQueue) -> None:
        self.core = core
        self.queue = queue
        # Keeps the buffers alive: the core reads and writes them until the transfer is over, even when the
        # caller has dropped the Work.
        self._under_way: list[TransferWork] = []

    def send(self, tensor: torch.Tensor, destination: int, tag: int, timeout_s: float) -> TransferWork:
        buffer = as_input(tensor)
        transfer = self.core.start_send(buffer.data_ptr(), buffer.nbytes, destination, tag)
        return self._track(TransferWork(self, transfer, buffer, None, self.core.rank, timeout_s))

    def receive(self, tensor: torch.Tensor, source: int, tag: int, timeout_s: float) -> TransferWork:
        buffer = as_output(tensor)
        transfer = self.core.start_receive(buffer.data_ptr(), buffer.nbytes, source, tag)
        return self._track(TransferWork(self, transfer, buffer, tensor, source, timeout_s))

    def until_idle_or(self, is_done: Callable[[], bool]) -> None:
        """Block until no collective is in the queue, or until `is_done()`.

        Only one thread at a time waits in the core, and it makes progress on all messages. A queued
        collective may wait for a rank that waits for what this rank does after a message, so this function
        also returns when the message is done.
        """
        while not self.queue.is_empty() and not is_done():
            time.sleep(_NAP_S)

    def _track(self, work: TransferWork) -> TransferWork:
        self._under_way = [other for other in self._under_way if not other.is_completed()]
        self._under_way.append(work)
        return work


class TransferWork(Work):
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
            self._mailbox.until_idle_or(lambda: core.test(self._transfer))
            core.wait(self._transfer, timeout_s)
            if self._target is not None:
                write_back(self._buffer, self._target)
        except Exception as error:
            self._error = error
        self._is_over = True


class AnySourceWork(Work):
    """A receive of the next message with its tag, from any rank.

    The source is determined in `wait()` or `is_completed()`. Ranks with a waiting message are served in turn.
    A message for which a receive with a source was started goes to that receive.
    """

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, tag: int, timeout_s: float) -> None:
        super().__init__()
        as_output(tensor)  # raises for an unsuitable tensor now, and not when the message arrives
        self._mailbox = mailbox
        self._tensor = tensor
        self._tag = tag
        self._timeout_s = timeout_s
        self._receive: TransferWork | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + (seconds if seconds > 0 else self._timeout_s)
        if self._receive is None:
            core, tag = self._mailbox.core, self._tag
            self._mailbox.until_idle_or(lambda: core.source_of_waiting(tag) >= 0)
            while not self._begin():  # another thread of this rank may take the message that was found
                core.wait_for_source(tag, max(deadline - time.monotonic(), 0.0))
        return self._begun().wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))

    def is_completed(self) -> bool:
        return self._begin() and self._begun().is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self._begun().is_success()

    def exception(self) -> BaseException | None:
        return None if self._receive is None else self._receive.exception()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return [self._tensor]

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The rank that sent the message, which must have arrived."""
        return self._begun().source_rank()

    _source_rank = source_rank

    def _begin(self) -> bool:
        if self._receive is None:
            source = self._mailbox.core.source_of_waiting(self._tag)
            if source < 0:
                return False
            self._receive = self._mailbox.receive(self._tensor, source, self._tag, self._timeout_s)
        return True

    def _begun(self) -> TransferWork:
        if self._receive is None:
            raise ConfigError(
                "The source of a message was asked for before the message had come.",
                where=f"recv without a source, tag {self._tag}",
                hint="call wait() first",
            )
        return self._receive
