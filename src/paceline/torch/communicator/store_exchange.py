"""torch's stores: that of a process group, as a `KeyStore`, and as an `Exchange` before a group exists."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.errors import RendezvousError, format_ranks, warn
from paceline.rendezvous.secret import find_secret
from paceline.rendezvous.signatures import LOSSLESS, ForeignValueError, Signatures

_HEADER_BYTES = 4
_CLOCK_SLACK_S = 0.05  # stores count milliseconds and may time out a little before the deadline


class StoreExchange:
    """All-gather of bytes over a `torch.distributed.Store`, before any process group exists.

    Raises:
        ConfigError: The secret of the job cannot be read.

    Example:
        Rank 0 passes b"a" and rank 1 passes b"bc"; both get [b"a", b"bc"].
    """

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str, scope: str = "") -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._signatures = Signatures(find_secret().key, scope)
        # A store may outlive a group, and the keys of an earlier group would look like ranks that have
        # already arrived. So each rank counts its groups. torchrun's agent keeps one store over all restarts,
        # in which a rank that died early would stay one group behind the others. So each attempt has its own
        # keys; within an attempt, the death of one rank ends all.
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
        """Return the payloads of all ranks, by rank. Collective; blocks at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._round += 1
        key = self._key(self._round, self._rank)
        value = self._signatures.sign(key, self._world_size.to_bytes(_HEADER_BYTES, "little") + payload)
        try:
            # Bytes are stored unchanged; torch's stub knows only str.
            self._store.set(key, value)  # type: ignore[arg-type]
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
        try:
            value = self._signatures.read(key, value)
        except ForeignValueError as error:
            raise self._foreign(peer, error) from None
        peers_world_size = int.from_bytes(value[:_HEADER_BYTES], "little")
        if peers_world_size != self._world_size:
            raise self._disagreement(peer, peers_world_size)
        return value[_HEADER_BYTES:]

    def _forget(self, round_number: int) -> None:
        if round_number < 1:
            return
        with contextlib.suppress(RuntimeError):  # some stores cannot delete keys; the bytes stay
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

    def _foreign(self, peer: int, error: ForeignValueError) -> RendezvousError:
        return RendezvousError(
            f"What torch's store holds for rank {peer} of {self._world_size} is not of a rank of this job.",
            where=f"rank {self._rank}, forming a group through torch's store, round {self._round}",
            seen=f"the process that wrote it {error.reason}" if error.reason else str(error),
            likely="PACELINE_SECRET_FILE or PACELINE_SECRET differs between ranks; or an unknown peer, or "
            "another version of Paceline, writes there",
            hint="give all ranks the same secret, and keep MASTER_PORT from unknown peers",
            rank=self._rank,
            peer=peer,
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


class FrameworkKeyStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def write(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def read(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode(errors=LOSSLESS) if self._store.check([key]) else None


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store through which a group was formed, in any torch; None: it was formed without one."""
    try:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
        return store
    except (AttributeError, KeyError):  # another torch, or a group that torch did not create
        pass
    try:
        return group.get_group_store()  # torch 2.6 lacks it
    except (AttributeError, RuntimeError):
        return None


def is_default_store_served_by_rank() -> bool:
    """Whether the default group's store lives in the process of its rank 0."""
    store = store_of(dist.group.WORLD) if dist.group.WORLD is not None else None
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def warn_of_shared_store(backend: str, rank: int, environ: Mapping[str, str] | None = None) -> None:
    """Warn on rank 0 if torchrun may restart ranks that use Gloo, and all attempts share its agent's store.

    Restarted ranks then find the addresses of the previous attempt in the store: with torch 2.13, two of four
    restarts ended in `connectFullMesh failed`, with torch's own DistributedDataParallel as well. Remove this
    when torch gives each attempt its own keys.
    """
    environ = os.environ if environ is None else environ
    restarts_left = _number(environ, "TORCHELASTIC_MAX_RESTARTS") - _number(
        environ, "TORCHELASTIC_RESTART_COUNT"
    )
    is_shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if "gloo" not in backend or rank != 0 or restarts_left <= 0 or not is_shared:
        return
    warn(
        "torchrun may not bring this job back after a failure: the ranks that it restarts look for the dead "
        "ones' Gloo addresses in the store that its agent keeps, and half of such restarts fail with "
        "`connectFullMesh failed`. That is torch's fault. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
        'environment of torchrun; or use the backend "paceline", which has keys of its own for each attempt.'
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
