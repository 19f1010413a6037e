"""One rank's calls over a framework's process group, each with a deadline.

A process group reports a broken connection, or nothing at all, but not which rank it has lost. So these waits
end at the deadline, ask the peer monitor meanwhile, and name the lost rank if it is known.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from paceline.health.peer_monitor import PeerMonitor
from paceline.health.store_check import Work
from paceline.reducer.host_reports import GroupReports, Reports
from paceline.reducer.plan import Plan
from paceline.reducer.process_group_waits import ProcessGroupWaits, Rows

if TYPE_CHECKING:
    from paceline.reducer.comm_hooks import CommHook, HookedBuckets
    from paceline.reducer.communicator import ReductionOptions
    from paceline.reducer.gradient_buffer import GradientBuffer
    from paceline.reducer.process_group import Transport

_Tensor = TypeVar("_Tensor")
_Begun = TypeVar("_Begun")
_Calls = TypeVar("_Calls", bound="ProcessGroupCalls[Any]")


class ProcessGroupCalls(ABC, Generic[_Tensor]):
    def __init__(self, group: Any, rank: int, world_size: int, waits: ProcessGroupWaits) -> None:
        self.group = group
        self.rank, self.world_size = rank, world_size
        self.waits = waits
        self.reports: Callable[[], Reports] = lambda: GroupReports(self.begin_gather)

    @property
    def peer_monitor(self) -> PeerMonitor | None:
        return self.waits.peer_monitor

    @peer_monitor.setter
    def peer_monitor(self, peer_monitor: PeerMonitor | None) -> None:
        self.waits.peer_monitor = peer_monitor

    def but(self: _Calls, *, plan: Plan | None = None, timeout_s: float | None = None) -> _Calls:
        """A copy for the buckets of a plan, or with another deadline."""
        calls = copy.copy(self)
        calls.waits = self.waits.but(plan=plan, timeout_s=timeout_s)
        return calls

    @abstractmethod
    def prepare_broadcast(self, tensors: Sequence[_Tensor]) -> Callable[[int], None]: ...

    @abstractmethod
    def sum(self, tensor: _Tensor, timeout_s: float | None = None) -> None: ...

    @abstractmethod
    def begin_gather(self, array: np.ndarray[Any, Any]) -> tuple[Work, Rows]:
        """Begin to gather the arrays of all ranks, of equal shape and dtype. Collective; does not block."""

    @abstractmethod
    def make_transport(
        self,
        gradient_buffer: GradientBuffer[_Tensor],
        options: ReductionOptions,
        hook: HookedBuckets[_Tensor] | None = None,
    ) -> Transport[_Tensor]:
        """The transport that sums the buckets over the group, or gives them to a hook. Collective."""

    @abstractmethod
    def make_hooked(
        self,
        hook: CommHook,
        gradient_buffer: GradientBuffer[_Tensor],
        parameters: Sequence[_Tensor],
        process_group: Any,
    ) -> HookedBuckets[_Tensor]: ...

    def begin(self, start: Callable[[], _Begun], what: int | str) -> _Begun:
        try:
            return start()
        except RuntimeError as error:
            raise self.waits.failed(error, what) from error

    def wait(self, call: Work, what: int | str, *, on_host: bool = True) -> None:
        """Block until a call is over, at most until the deadline."""
        if on_host:
            self.waits.poll(call.is_completed, what)
        try:
            call.wait()
        except RuntimeError as error:
            raise self.waits.failed(error, what) from error

    def gather(self, array: np.ndarray[Any, Any], what: str = "an exchange of facts") -> np.ndarray[Any, Any]:
        """Arrays of all ranks, by rank, of equal shape and dtype. Collective."""
        if not array.size:
            return np.empty((self.world_size, *array.shape), array.dtype)
        call, rows = self.begin(lambda: self.begin_gather(array), what)
        self.wait(call, what)
        return rows()
