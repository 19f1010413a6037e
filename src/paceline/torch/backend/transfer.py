"""send and recv of tensors between two ranks.

The core starts a
transfer without blocking and moves all of them on in every wait, so that messages need no thread of their
own. Between two ranks messages arrive in the order of sending; a tag is compared, not searched for.
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

    def until_idle_or(self, is_done: Callable[[], bool]) -> None:
        """Block until no collective is in the queue, or until `is_done`.

        One thread at a time waits in the core, and it moves all messages on. A collective of the queue may
        wait for a rank that waits for what this rank does after a message.
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
    """A receive of the next message with its tag, whichever rank sends it.

    The source is found when somebody waits, or asks whether the message has come. Ranks that have sent one
    take turns; messages for which a receive with a source was started belong to that one.
    """

    def __init__(self, mailbox: Mailbox, tensor: torch.Tensor, tag: int, timeout_s: float) -> None:
        super().__init__()
        as_output(tensor)  # what cannot be received is told here, and not when the message has come
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
        """The rank whose message it was; the message must have come."""
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
