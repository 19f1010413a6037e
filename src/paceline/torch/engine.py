"""Buckets through the process group that the user has: Gloo, NCCL, MPI, or ours.

A `paceline.reducer.engine.Transport`: the arena is ordinary tensors on the parameters' own devices, and a
bucket is one asynchronous `torch.distributed.all_reduce` of a flat range of it.
"""

from __future__ import annotations

import math
import time
import warnings

import torch
import torch.distributed as dist

from paceline.errors import CollectiveError, DeadlineError, PeerLostError
from paceline.reducer.report import shorten
from paceline.torch.arena import Arena
from paceline.torch.peers import ProcessGroupPeers

_SHORTEST_NAP_S = 0.00002
_LONGEST_NAP_S = 0.001
_SIGNS_OF_A_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "roken pipe",
    "onnection closed",
    "onnection refused",
)


class ProcessGroupTransport:
    """One rank's arena, and the process group that sums ranges of it.

    Args:
        arena: Of this rank.
        peers: The process group.
        checks_finite: Look at every gradient before it is reduced, to tell whose holds an infinity or a NaN.
    """

    def __init__(self, arena: Arena, peers: ProcessGroupPeers, *, checks_finite: bool) -> None:
        self.rank = peers.rank
        self.world_size = peers.world_size
        self._arena = arena
        self._peers = peers
        self._group = peers.process_group
        self._checks_finite = checks_finite
        self._buckets = [arena.bucket(number) for number in range(len(arena.plan.buckets))]
        self._pieces = [_pieces(arena, number) for number in range(len(arena.plan.buckets))]
        self._norms: list[tuple[int, torch.Tensor]] = []
        self._nonfinite: set[int] = set()
        kinds = {device.type for device in self._group._device_types}
        self._status_device = torch.device("cpu") if "cpu" in kinds else arena.sections[0].device

    def launch(self, bucket: int, scale: float) -> BucketWork:
        flat = self._buckets[bucket]
        if self._checks_finite and scale:
            self._note_nonfinite(bucket, flat)
        if scale == 0.0:
            flat.zero_()
        elif scale != 1.0:
            flat.mul_(scale)
        try:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._worded(error, bucket) from error
        return BucketWork(self, work, bucket)

    def rescale(self, factor: float) -> None:
        for section in self._arena.sections:
            section.mul_(factor)

    def clear(self, param: int) -> None:
        self._arena.views[param].zero_()

    def take_nonfinite(self) -> list[int]:
        self._nonfinite.update(param for param, norm in self._norms if not math.isfinite(norm.item()))
        found = sorted(self._nonfinite)
        self._norms.clear()
        self._nonfinite.clear()
        return found

    def squared_norm(self) -> float:
        sections = [as_real(section) for section in self._arena.sections]
        return sum(float(section.double().square().sum()) for section in sections)

    def all_gather(self, payload: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._status_device)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        try:
            work = dist.all_gather(rows, own, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._worded(error, None) from error
        self.wait(work, None)
        return [row.cpu().numpy().tobytes() for row in rows]

    def wait(self, work: dist.Work, bucket: int | None) -> None:
        """Block until the work on a bucket (None: on the status) is done, at most until the deadline.

        Raises:
            DeadlineError: It was not done in time.
            PeerLostError: The process group lost a connection.
            CollectiveError: It failed otherwise.
        """
        if self._status_device.type == "cpu":
            self._poll(work, bucket)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._worded(error, bucket) from error

    def _worded(self, error: RuntimeError, bucket: int | None) -> CollectiveError:
        """The process group's error, with where it happened. Which rank, a process group does not tell."""
        text = str(error)
        is_lost = any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
        return (PeerLostError if is_lost else CollectiveError)(
            f"Rank {self.rank} of {self.world_size} could not average gradients.",
            where=self._where(bucket),
            seen=text,
            likely="another rank died or raised" if is_lost else "",
            hint="the first rank to fail tells the reason; look at the other ranks' output",
        )

    def _where(self, bucket: int | None) -> str:
        if bucket is None:
            what = "the status of all ranks at the end of backward"
        else:
            part = self._arena.plan.buckets[bucket]
            names = shorten([self._arena.plan.parameters[index].name for index in part.parameters])
            dtype = self._arena.plan.sections[part.section].dtype
            what = f"bucket {bucket} ({part.nbytes / 2**20:.1f} MiB, {dtype}: {names})"
        return f"{what}, over torch's {dist.get_backend(self._group)} process group"

    def _note_nonfinite(self, bucket: int, flat: torch.Tensor) -> None:
        pieces = self._pieces[bucket]
        if flat.device.type != "cpu":
            # To look at the values now would wait for the device; an infinity norm is exact and can wait.
            norms = torch._foreach_norm([piece for _, piece in pieces], math.inf)
            self._norms += zip((param for param, _ in pieces), norms)
            return
        # A finite sum proves that all is finite; another may be an overflow, so look at each element then.
        flat = as_real(flat)
        if not math.isfinite(flat.sum(dtype=_wide(flat.dtype)).item()):
            self._nonfinite.update(param for param, piece in pieces if not torch.isfinite(piece).all())

    def _poll(self, work: dist.Work, bucket: int | None) -> None:
        """Polled, because Work.wait(timeout) is ignored by some backends and ends the group in others."""
        started = time.monotonic()
        nap_s = _SHORTEST_NAP_S
        warns_at_s = self._peers.warn_after_s
        while not work.is_completed():
            waited_s = time.monotonic() - started
            if waited_s > self._peers.timeout_s:
                raise self._late(bucket)
            if waited_s > warns_at_s:
                warnings.warn(
                    f"rank {self.rank} of {self.world_size} has waited {waited_s:.0f} s for some rank: "
                    f"{self._where(bucket)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                warns_at_s = math.inf
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _late(self, bucket: int | None) -> DeadlineError:
        return DeadlineError(
            f"Rank {self.rank} of {self.world_size} gave up waiting for the others' gradients after "
            f"{self._peers.timeout_s:.1f} s.",
            where=self._where(bucket),
            seen="the all_reduce did not complete; the process group does not tell which rank is missing",
            likely="a rank skipped this backward, is stuck in its data loader, or died",
            hint="look at the other ranks' output; `timeout_s` gives them longer",
        )


class BucketWork:
    """A bucket on its way through the process group."""

    def __init__(self, transport: ProcessGroupTransport, work: dist.Work, bucket: int) -> None:
        self._transport = transport
        self._work = work
        self._bucket = bucket

    def wait(self) -> None:
        self._transport.wait(self._work, self._bucket)


def _pieces(arena: Arena, number: int) -> list[tuple[int, torch.Tensor]]:
    """What lies in a bucket: (parameter index, its elements there)."""
    plan = arena.plan
    bucket = plan.buckets[number]
    section = plan.sections[bucket.section]
    pieces = []
    for index in bucket.parameters:
        begin = max(bucket.begin_byte, plan.offsets[index])
        end = min(bucket.end_byte, plan.offsets[index] + plan.parameters[index].nbytes)
        first, last = ((byte - section.begin_byte) // section.itemsize for byte in (begin, end))
        pieces.append((index, arena.sections[bucket.section][first:last]))
    return pieces


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as pairs of real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
