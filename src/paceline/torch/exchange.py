"""Torch's own means of communication as a rendezvous `Exchange`: a process group, or a store.

May import torch, the standard library, `errors`, `rendezvous.exchange` and `roll_call`. Its one idea:
whatever the user has initialised already connects the ranks, so Paceline opens no second port to form its
group. Payloads are plain bytes; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.errors import RendezvousError, format_ranks
from paceline.torch.roll_call import Missing, RollCall, say_where

_LONGEST_NAP_S = 0.002
_HEADER_BYTES = 4
_CLOCK_SLACK_S = 0.05  # stores count milliseconds and may give up a little before the deadline


class ProcessGroupExchange:
    """All-gather of bytes over any initialised torch process group: gloo, mpi, nccl or ours.

    Args:
        process_group: The group whose ranks take part; None: the default group.

    Example:
        Rank 0 passes b"a" and rank 1 passes b"bc"; both get [b"a", b"bc"].
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            raise RendezvousError(
                "torch.distributed has no process group yet.",
                likely="torch.distributed.init_process_group() was not called, or failed",
                hint='call torch.distributed.init_process_group("gloo") first, or start with `paceline run`',
            )
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        if self._rank < 0:
            raise RendezvousError(
                "This process is not a member of the given process group.",
                got=f"rank {dist.get_rank()} of the default group",
                hint="pass a group that this rank belongs to",
            )
        self._device = _transport_device(self._group)
        say_where(self._group, self._rank)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`.

        Raises:
            RendezvousError: The group failed, or some rank was late; names those that do not answer.
        """
        deadline = time.monotonic() + timeout_s
        own_size = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        sizes = [int(size) for size in self._gather_tensors(own_size, deadline, timeout_s)]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self._gather_tensors(padded.to(self._device), deadline, timeout_s)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _gather_tensors(self, own: torch.Tensor, deadline: float, timeout_s: float) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self._world_size)]
        with RollCall(self._group, self._rank, self._world_size) as roll:
            try:
                work = dist.all_gather(rows, own, group=self._group, async_op=True)
                # Polled, because Work.wait(timeout) is ignored by some backends and aborts others.
                nap_s = 0.00002
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise self._late(timeout_s, roll.missing())
                    if roll.is_called():
                        raise self._failed("another rank has noticed it", roll.missing())
                    time.sleep(nap_s)
                    nap_s = min(nap_s * 2, _LONGEST_NAP_S)
                work.wait()
            except RendezvousError:
                raise
            except RuntimeError as error:
                raise self._failed(str(error), roll.missing()) from error
        return rows

    def _late(self, timeout_s: float, missing: list[Missing]) -> RendezvousError:
        return RendezvousError(
            f"Rank {self._rank} of {self._world_size} gave up forming a group after {timeout_s:.1f} s.",
            where=f"all_gather over torch's {dist.get_backend(self._group)} process group",
            seen=_told(missing) or "the all_gather did not complete; nobody tells which rank is missing",
            likely="a rank died or was stopped before this point, or took another branch and forms no group",
            hint="every rank of the process group must make this call; look at the other ranks' output",
            missing=tuple(each.rank for each in missing),
        )

    def _failed(self, reason: str, missing: list[Missing]) -> RendezvousError:
        return RendezvousError(
            f"Rank {self._rank} of {self._world_size} could not form a group.",
            where=f"all_gather over torch's {dist.get_backend(self._group)} process group",
            seen="\n".join(filter(None, (_told(missing), reason))),
            likely="another rank died or raised",
            hint="look at the output of the rank that is named"
            if missing
            else "look at the other ranks' output; the first to fail tells the reason",
            missing=tuple(each.rank for each in missing),
        )


class StoreExchange:
    """All-gather of bytes over a `torch.distributed.Store`, before any process group exists.

    Args:
        store: Shared by all ranks.
        rank: Of this process in the group that is being formed.
        world_size: Of that group; ranks that disagree about it raise.
        prefix: Keeps this group's keys apart from others'. The same on all ranks.

    Example:
        Rank 0 passes b"a" and rank 1 passes b"bc"; both get [b"a", b"bc"].
    """

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        # A store may outlive a group, and keys of an earlier group would be taken for a rank that is already
        # there. torchrun's agent keeps one store over all its restarts, in which a rank that had died early
        # would count one group less than the others for ever: so each attempt has keys of its own, and within
        # an attempt, where a death ends them all, each rank counts its groups.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        generation = store.add(f"{prefix}/{attempt}/generation/{rank}", 1)
        self._prefix = f"{prefix}/{attempt}/{generation}"
        self._round = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def all_gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`.

        Raises:
            RendezvousError: A rank did not hand in its payload in time (named), ranks disagree on the
                world size, or the store broke.
        """
        deadline = time.monotonic() + timeout_s
        self._round += 1
        header = self._world_size.to_bytes(_HEADER_BYTES, "little")
        try:
            # Bytes arrive as they are; torch's stub knows only str.
            self._store.set(self._key(self._round, self._rank), header + payload)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._broken(error) from error
        payloads = [self._fetch(peer, deadline, timeout_s) for peer in range(self._world_size)]
        self._forget(self._round - 1)
        return payloads

    def _key(self, round_number: int, rank: int) -> str:
        return f"{self._prefix}/{round_number}/{rank}"

    def _fetch(self, peer: int, deadline: float, timeout_s: float) -> bytes:
        key = self._key(self._round, peer)
        remaining_s = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait([key], timedelta(seconds=remaining_s))
            value = self._store.get(key)
        except RuntimeError as error:
            if time.monotonic() < deadline - _CLOCK_SLACK_S:
                raise self._broken(error) from error
            raise self._late(timeout_s) from None
        peers_world_size = int.from_bytes(value[:_HEADER_BYTES], "little")
        if peers_world_size != self._world_size:
            raise self._disagreement(peer, peers_world_size)
        return value[_HEADER_BYTES:]

    def _forget(self, round_number: int) -> None:
        """Delete this rank's key of a round that everybody has read: all have written a later one."""
        if round_number < 1:
            return
        with contextlib.suppress(RuntimeError):  # a store may lack deletion; some bytes stay until it ends
            self._store.delete_key(self._key(round_number, self._rank))

    def _missing(self) -> list[int]:
        ranks = range(self._world_size)
        return [rank for rank in ranks if not self._store.check([self._key(self._round, rank)])]

    def _late(self, timeout_s: float) -> RendezvousError:
        try:
            missing = self._missing()
        except RuntimeError as error:
            return self._broken(error)
        arrived = [rank for rank in range(self._world_size) if rank not in missing]
        return RendezvousError(
            f"Rank {self._rank} of {self._world_size} gave up waiting for {format_ranks(missing)} "
            f"after {timeout_s:.1f} s.",
            where=f"forming a group through torch's store, round {self._round}",
            seen=f"{format_ranks(arrived)} arrived; nothing came from {format_ranks(missing)}",
            likely="these processes were not started, died, or have other settings of rank and world size",
            hint="look at their output; `timeout` of init_process_group gives them longer",
            rank=self._rank,
            missing=tuple(missing),
        )

    def _broken(self, error: RuntimeError) -> RendezvousError:
        return RendezvousError(
            f"Rank {self._rank} of {self._world_size} lost torch's store.",
            where=f"forming a group, round {self._round}",
            seen=str(error),
            likely="the process that holds the store (rank 0, or torchrun's agent) has ended",
            hint="look at that process's output first",
            rank=self._rank,
        )

    def _disagreement(self, peer: int, peers_world_size: int) -> RendezvousError:
        return RendezvousError(
            f"Ranks {self._rank} and {peer} disagree about the world size.",
            where="forming a group through torch's store",
            expected=f"{self._world_size} ranks (rank {self._rank})",
            got=f"{peers_world_size} ranks (rank {peer})",
            likely="WORLD_SIZE differs between the processes, or two jobs share one address",
            hint="give every process the same WORLD_SIZE, and every job its own MASTER_PORT",
            rank=self._rank,
        )


def _told(missing: list[Missing]) -> str:
    return "; ".join(f"rank {each.rank} {each.state}" for each in missing)


def _transport_device(group: dist.ProcessGroup) -> torch.device:
    """The CPU where the group serves it, else the current device of the kind that it serves."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = min(kinds)
    return torch.device(kind, torch.accelerator.current_device_index())
