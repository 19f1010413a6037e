"""Warns of optimizer steps with gradients from torch.autograd.grad(), which are not averaged."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from paceline.errors import warn


class DirectGradients:
    """Detects optimizer steps with gradients from autograd.grad(), instead of a backward.

    autograd.grad() averages nothing and ends no backward, so each rank detects such a step by itself: between
    two forwards, gradients of the parameters were returned and parameters were written, but no backward ran.
    There is no warning if the program has called collectives of its own in between, which may have averaged
    the gradients.
    """

    def __init__(self, writes: Callable[[], int], where: str, *, is_alone: bool) -> None:
        self._writes, self._where = writes, where
        self.returned: tuple[int, int] | None = None
        self._is_over = is_alone  # or has warned

    def note_call(self, *, has_backwards: bool) -> None:
        """Called when autograd.grad() returns gradients of parameters."""
        if self._is_over or self.returned is not None:
            return
        writes = self._writes()
        if writes or not has_backwards:
            self.returned = writes, _collectives()

    def forget(self) -> None:
        self.returned = None

    def check(self) -> None:
        assert self.returned is not None
        writes, collectives = self.returned
        if self._writes() == writes:
            return
        self.returned = None
        if _collectives() != collectives:
            return
        self._is_over = True
        warn(
            "Gradients of the wrapped model were returned by torch.autograd.grad(), which averages nothing, "
            "and then its parameters were written: the ranks are likely to have different ones now.\n"
            f"  where    {self._where}, the forward after that step\n"
            "  likely   a step with gradients of this rank alone\n"
            "  hint     call backward() on the loss, which averages them; or average what is returned before "
            "the step. check_replicas() compares the ranks\n  (reported once)"
        )


def _collectives() -> int:
    if not dist.is_initialized():
        return 0
    try:
        groups = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # another torch, or a backend that does not count
        return 0
