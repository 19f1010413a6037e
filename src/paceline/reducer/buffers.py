"""Buffers that are averaged, broadcast or left alone after each pass, or on demand, in any framework.

Imports only the standard library and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from paceline.reducer.buffer_policy import BufferPolicies
from paceline.reducer.link import Link


class BufferedModel(Protocol):
    """A model with buffers.

    Attributes:
        buffers: By name; another object where the model has others than before.
    """

    buffers: dict[str, Any]

    def current_buffers(self) -> dict[str, Any]:
        """Those that the model has now: modules may replace theirs."""
        ...


class WrittenBuffers(Protocol):
    """Buffers that are about to be written to.

    Attributes:
        places: What to write to, by name.
    """

    places: Mapping[str, Any]

    def end(self) -> None:
        """They have been written to."""
        ...


@runtime_checkable
class NoticingModel(BufferedModel, Protocol):
    """A model whose autograd raises if a buffer that it has saved for backward gets other values."""

    def written_buffers(
        self, buffers: Mapping[str, Any], changing: Iterable[str], *, through_pointers: bool
    ) -> WrittenBuffers | None:
        """Let autograd know of the buffers that get other values, and of no other.

        Args:
            buffers: All that will be written to, by name.
            changing: Names of those whose values may become others on this rank.
            through_pointers: Whether they are written to by address, of which the framework knows nothing.

        Returns:
            None if they can be written to as they are.
        """
        ...


class BufferHook(Protocol):
    """A user's hook that keeps buffers in step."""

    def before_forward(self, buffers: dict[str, Any]) -> None: ...
    def after_forward(self, buffers: dict[str, Any]) -> None: ...

    def end_pass(self) -> None:
        """Wait for what it has begun."""
        ...


class BufferSync:
    """Keeps the buffers of one model in step.

    Args:
        tensors: The model's.
        link: Between the ranks that train it.
        patterns: Policies by name pattern, as those of file names; the first match counts.
        broadcasts: Whether buffers that no pattern matches are broadcast after each pass.
        average: Replaces buffers of floating-point numbers by their means over some ranks. Collective.

    Attributes:
        hook: Does it instead, where a user has registered one.
    """

    def __init__(
        self,
        tensors: BufferedModel,
        link: Link[Any],
        patterns: Mapping[str, str],
        broadcasts: bool,
        average: Callable[[Link[Any], Sequence[Any], Sequence[int]], None],
    ) -> None:
        self.hook: BufferHook | None = None
        self._tensors = tensors
        self._noticing = tensors if isinstance(tensors, NoticingModel) else None
        self._link = link
        self._patterns = patterns
        self._broadcasts = broadcasts
        self._average = average
        self._take_names()

    def _take_names(self) -> None:
        self._buffers = self._tensors.buffers
        self._policies_then = BufferPolicies(self._buffers, self._patterns, self._broadcasts)

    @property
    def _policies(self) -> BufferPolicies:
        if self._tensors.buffers is not self._buffers:  # the model has changed
            self._take_names()
        return self._policies_then

    @property
    def is_needed(self) -> bool:
        """Whether any buffer changes after a pass."""
        is_known = self._tensors.buffers is self._buffers
        return (self._policies_then if is_known else self._policies).is_needed

    @property
    def in_step(self) -> set[str]:
        """Names of those that are the same on all ranks after a pass; of a user's hook nobody knows."""
        return set() if self.hook is not None else self._policies.in_step

    def end_pass(self, active: Sequence[int]) -> None:
        """The means are in place, for ranks of which these had data. Collective, if `is_needed`."""
        if self.hook is not None:
            self.hook.end_pass()
        elif self.is_needed:
            self.sync(active, on_demand=False)

    def sync(self, active: Sequence[int], *, on_demand: bool) -> None:
        """Bring the buffers in step. Collective.

        Args:
            active: Ranks whose values count; the first is the one that broadcasts.
            on_demand: Include buffers that are left alone after a pass, but for those that a pattern says
                to leave alone.
        """
        now: Mapping[str, Any] = self._tensors.current_buffers()
        chosen, averages = self._policies.broadcast(on_demand=on_demand), self._policies.averaged
        written = None
        if self._noticing is not None:
            changing = averages if self._link.rank == active[0] else chosen | averages
            is_memory = self._link.path == "memory"
            written = self._noticing.written_buffers(now, changing, through_pointers=is_memory)
        if written is not None:
            now = written.places
        copied = [buffer for name, buffer in now.items() if name in chosen]
        averaged = [buffer for name, buffer in now.items() if name in averages]
        # Counters and other integers have no mean.
        copied += [buffer for buffer in averaged if not buffer.is_floating_point()]
        self._link.broadcast(copied, active[0])
        if averaged:
            self._average(self._link, [buffer for buffer in averaged if buffer.is_floating_point()], active)
        if written is not None:
            written.end()
