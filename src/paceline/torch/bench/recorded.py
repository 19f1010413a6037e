"""Training steps with and without a recording, in one process: two processes differ by more than it costs.

Imports its neighbours, bench, `tracing` and torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.bench.on_numpy import time_calls
from paceline.torch.bench.step import Step, digest_of
from paceline.tracing.recording import batches, optimizer_steps, recording
from paceline.tracing.ring_file import FLIGHT_RECORDS, TRACE_RECORDS

_NEVER_NS = 1 << 60


class RecordedStep(Step):
    """A rank that records nothing ("off"), as each job ("flight"), or as with --trace ("trace")."""

    def digests(self, ways: list[str]) -> dict[str, str]:
        """The digest of the gradients of the same pass, made in each of these ways."""
        found = {}
        for way in ways:
            with self._recorded(way):
                self._backward()
            found[way] = digest_of([p.grad for p in self._module.parameters() if p.grad is not None])
        return found

    def time_in(self, way: str, iterations: int) -> float:
        """Seconds for `iterations` steps, after one that brings the ranks together."""
        with self._recorded(way):
            step = self._fetch_and_step if way == "trace" else self._step
            step()  # the first pass of a recording writes totals, which `time_totals` measures
            recording.next_sample_ns = time.monotonic_ns() + _NEVER_NS
            return time_calls(step, iterations)

    def time_totals(self, iterations: int) -> float:
        """Seconds for writing what is written once in a second, in the mean."""
        with self._recorded("flight"):
            return time_calls(lambda: recording.sample(recording.next_sample_ns), iterations) / iterations

    def _fetch_and_step(self) -> None:
        """A step whose batch is noted, as that of a data loader."""
        self._batches.begin()
        self._batches.end()
        self._step()

    @contextlib.contextmanager
    def _recorded(self, way: str) -> Iterator[None]:
        if recording.note is None:  # there is always one, so that none of the samples has it made
            recording.start(None, self._rank, self._world_size, FLIGHT_RECORDS)
        if way == "off":
            with recording.paused():
                yield
            return
        if way == "flight":
            yield
            return
        end = recording.enlarge(self._rank, self._world_size, TRACE_RECORDS)
        steps, self._batches = optimizer_steps(), batches()
        handles = [
            register_optimizer_step_pre_hook(steps.begin),
            register_optimizer_step_post_hook(steps.end),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            end()
