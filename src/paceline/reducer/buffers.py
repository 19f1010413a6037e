"""Buffers that are averaged, broadcast or left alone after each backward, or on demand, in any framework.

They are synchronised at the end of backward, so that a forward waits for no other rank. A buffer that the
user's program writes between two steps therefore differs between ranks in the next forward, unless all ranks
write the same values. `BufferWrites` detects such writes, the end of backward reports them, and
`BufferSync.check_writes` raises on every rank if the values differ.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

from paceline import _core
from paceline.errors import ReplicasDifferError, format_ranks, warn
from paceline.reducer.backward_errors import shorten
from paceline.reducer.buffer_policy import BufferPolicies
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import FrameworkOps

_all_writes: weakref.WeakSet[BufferWrites] = weakref.WeakSet()  # of all models of this process

_NONE: frozenset[str] = frozenset()
_GONE = 0
"""In place of a hash: the model no longer has this buffer."""


class BufferOptions(Protocol):
    @property
    def buffers(self) -> Mapping[str, str]: ...
    @property
    def broadcast_buffers(self) -> bool: ...
    @property
    def syncs_forward(self) -> bool: ...


class WrittenBuffers(Protocol):
    places: Mapping[str, Any]

    def end(self) -> Mapping[str, int]: ...


class BufferedModel(Protocol):
    buffers: dict[str, Any]

    def current_buffers(self) -> dict[str, Any]:
        """The buffers that the model has now; modules may replace theirs."""
        ...

    def buffer_slots(self) -> list[tuple[str, dict[str, Any]]]:
        """For each module, its name followed by a dot, and the dictionary of its buffers."""
        ...

    def snapshot(self, slots: list[dict[str, Any]]) -> _core.BufferSnapshot: ...

    def find_new_buffers(self) -> None: ...

    def is_unread(self, name: str) -> bool:
        """Whether forward does not read this buffer now, because it is a running statistic being trained."""
        ...

    def is_estimate(self, name: str) -> bool:
        """Whether this buffer holds an estimate that each forward refines, so that any rank's value will do.

        An example is the power iteration of a spectral norm: each forward that reads the weight writes it.
        """
        ...

    def written_buffers(
        self, buffers: Mapping[str, Any], changing: Iterable[str], *, through_pointers: bool
    ) -> WrittenBuffers | None:
        """Prepare writes to buffers so that autograd notices changed values, and raises if it had saved them.

        Args:
            buffers: All buffers that will be written to, by name.
            changing: Names of those whose values may change on this rank.
            through_pointers: Whether they are written to by address, which the framework does not notice.

        Returns:
            None if they can be written to as they are.
        """
        ...


class BufferHook(Protocol):
    def before_forward(self, buffers: dict[str, Any]) -> None: ...
    def after_forward(self, buffers: dict[str, Any]) -> None: ...

    def end_backward(self) -> None: ...


class BufferWrites:
    """Detects what the user's program writes to buffers between forwards, on this rank.

    Writes by forward itself, and by the synchronisation of buffers, do not count.

    Attributes:
        found: Names of the buffers that were written to since the last synchronisation. Each has the hashes
            of its values at the beginning of the forwards that first used what was written; estimates have
            none.
        unread: The same for running statistics that this rank trained and did not read. Another rank, which
            evaluates, may have read them.
        by_forward: Names of those of the `watched` buffers that forwards have written to since.
    """

    def __init__(
        self,
        tensors: BufferedModel,
        names: Callable[[], set[str]],
        ops: FrameworkOps[Any],
        *,
        world_size: int,
    ) -> None:
        self.found: dict[str, list[int]] = {}
        self.unread: dict[str, list[int]] = {}
        self.by_forward: set[str] = set()
        self._watched: Set[str] = _NONE
        self._tensors = tensors
        self._names = names
        self._ops = ops
        self.world_size = world_size
        # Written, and not yet used by a forward that is trained, each with its hash at the beginning of the
        # first forward since. A forward that is not trained, or of another model, may write the buffer
        # itself.
        self._unused: dict[str, int | None] = {}
        self._doubtful: list[str] = []
        self._left_alone: set[str] = set()
        self._others: list[weakref.ref[BufferWrites]] = []
        self._take_slots()
        _all_writes.add(self)
        for each in _all_writes:
            each._find_others()

    def _take_slots(self) -> None:
        slots = self._tensors.buffer_slots()
        self._held = {id(held) for _, held in slots}
        self._prefixes = [prefix for prefix, _ in slots]
        self._buffers = self._tensors.buffers
        self._snapshot = self._tensors.snapshot([held for _, held in slots])

    def _find_others(self) -> None:
        """Find the wrapped models that share modules with this one: writes by their forwards do not count."""
        others = [each for each in _all_writes if each is not self and each.shares(self._held)]
        self._others = [weakref.ref(each) for each in others]

    def shares(self, held: Set[int]) -> bool:
        """Whether this model has modules whose dictionaries of buffers have these identities."""
        return not self._held.isdisjoint(held)

    def _changed(self) -> set[str]:
        return {f"{self._prefixes[number]}{key}" for number, key in self._snapshot.changed()}

    def watch_forwards(self, names: Set[str]) -> None:
        """Find out which of these buffers forwards write to from now on."""
        self._watched = names
        self.by_forward.clear()

    def begin_forward(self, *, is_trained: bool, after_local_backward: bool) -> None:
        self.collect()
        if self._unused:
            if is_trained:
                self._note_values(after_local_backward=after_local_backward)
            else:
                self._keep_values(self._unused)
        for find in self._others:
            if (other := find()) is not None and other._unused:
                other._keep_values(other._unused)

    def collect(self) -> None:
        self._collect()
        for find in self._others:
            if (other := find()) is not None:
                other._collect()

    def _collect(self) -> None:
        if self._buffers is not self._tensors.buffers:
            self._note_new_modules()
        elif changed := self._snapshot.changed():
            self._unused |= dict.fromkeys(f"{self._prefixes[number]}{key}" for number, key in changed)
            new = self._unused.keys() - self._buffers.keys() - self._left_alone
            if new:  # registered after wrapping, or a buffer that is left alone
                self._tensors.find_new_buffers()
                self._take_slots()
                self._left_alone |= new - self._buffers.keys()
            if self._watched:
                self._snapshot.note()  # so that what has changed after the forward was written by it

    def _note_new_modules(self) -> None:
        before = self._buffers
        changed = self._changed()
        self._take_slots()
        now = self._tensors.buffers
        changed |= {name for name, buffer in now.items() if before.get(name) is not buffer}
        self._unused |= dict.fromkeys(changed)

    def names(self) -> list[str]:
        names, is_unread = self._names(), self._tensors.is_unread
        return sorted(name for name in self._unused if name in names and not is_unread(name))

    def _keep_values(self, written: Iterable[str]) -> None:
        names = self._names()
        self._unused |= self.hashes(n for n in written if n in names and self._unused[n] is None)

    def _note_values(self, *, after_local_backward: bool) -> None:
        written = self.names()
        estimates = [name for name in written if self._tensors.is_estimate(name)]
        compared = [name for name in written if name not in estimates]
        unread = [name for name in self._unused if name not in written]
        self._keep_values([*compared, *unread])
        for name in estimates:
            self.found.setdefault(name, [])
        for name in compared:
            if (value := self._unused[name]) is not None:
                self.found.setdefault(name, []).append(value)
        for name in unread:
            if (value := self._unused[name]) is not None:
                self.unread.setdefault(name, []).append(value)
        self._unused.clear()
        if after_local_backward:
            self._snapshot.note()
            self._doubtful = written

    def end_forward(self) -> None:
        if self._doubtful:
            for name in self._changed().intersection(self._doubtful):
                self.found.pop(name, None)  # this forward writes it, so a recomputed one has, too
            self._doubtful = []
        self._note()

    def end_backward(self) -> None:
        self._snapshot.note()

    def _note(self) -> None:
        self._note_forward()
        for find in self._others:
            if (other := find()) is not None:
                other._note_forward()

    def _note_forward(self) -> None:
        if self._watched:
            self.by_forward |= self._changed() & self._watched
        self._snapshot.note()

    def begin_sync(self) -> None:
        """Detect writes before a synchronisation writes to buffers itself.

        The synchronisation settles the program's writes to known buffers, so only new buffers matter; but
        other models that share modules with this one need all of them.
        """
        if self._others or not self._snapshot.holds_same():
            self.collect()

    def end_sync(self, *names: Collection[str]) -> None:
        if self._buffers is not self._tensors.buffers:
            self._take_slots()
        self._snapshot.note(whole=True)
        if self.found or self.unread or self._unused:
            others = self._names().difference(*names)
            self.found = {name: values for name, values in self.found.items() if name in others}
            self.unread = {name: values for name, values in self.unread.items() if name in others}
            self._unused = {name: value for name, value in self._unused.items() if name in others}
        self.by_forward.difference_update(*names)
        if self._others:
            models = [other for find in self._others if (other := find()) is not None]
            _settle(models, self._tensors, set().union(*names), self.world_size)

    def settle(self, synced: Collection[tuple[int, str]]) -> None:
        """Forget writes to buffers that another model has made equal on all ranks.

        Args:
            synced: For each of them, the identity of the dictionary that holds it, and its key.
        """
        self._collect()
        self._snapshot.note()
        for prefix, slot in self._tensors.buffer_slots():
            for key in slot:
                if (id(slot), key) in synced:
                    self._unused.pop(f"{prefix}{key}", None)
                    self.found.pop(f"{prefix}{key}", None)
                    self.unread.pop(f"{prefix}{key}", None)
                    self.by_forward.discard(f"{prefix}{key}")

    def hashes(self, names: Iterable[str]) -> dict[str, int]:
        names, now = list(names), self._tensors.current_buffers()
        held = {name: now[name] for name in names if name in now}
        found = {entry.name: entry.hash for entry in self._ops.hash_model({}, held, None)}
        whole = {name: found.get(name, _GONE) for name in names}
        for name in names:  # a buffer that consists of several tensors
            parts = [str(value) for part, value in found.items() if part.startswith(f"{name}.")]
            if parts and name not in found:
                whole[name] = _core.hash_bytes(",".join(parts).encode())
        return whole


def settle_after_wrapping(tensors: BufferedModel, world_size: int) -> None:
    """Do not count the broadcast of this model's buffers as a write to those of other wrapped models."""
    held = {id(held) for _, held in tensors.buffer_slots()}
    _settle([each for each in _all_writes if each.shares(held)], tensors, tensors.buffers, world_size)


def _settle(
    models: Iterable[BufferWrites], tensors: BufferedModel, names: Collection[str], world_size: int
) -> None:
    synced = {
        (id(held), key)
        for prefix, held in tensors.buffer_slots()
        for key in held
        if f"{prefix}{key}" in names
    }
    for each in models:
        # Buffers that are equal on some ranks of another model may differ on the others.
        if world_size >= each.world_size:
            each.settle(synced)


class BufferSync:
    """Synchronises the buffers of one model over the ranks."""

    def __init__(
        self,
        tensors: BufferedModel,
        communicator: Communicator[Any],
        options: BufferOptions,
        ops: FrameworkOps[Any],
    ) -> None:
        self.hook: BufferHook | None = None
        self.writes: BufferWrites | None = None
        self._tensors = tensors
        self._communicator = communicator
        self._patterns = options.buffers
        self._broadcasts = options.broadcast_buffers
        self._ops = ops
        self.is_alone = communicator.world_size == 1
        self._in_forward = options.syncs_forward and not self.is_alone
        self._has_warned = self._is_forward_synced = False
        self._were_statistics_read = False  # by an evaluation with gradients, since the last synchronisation
        # Whether any forward since the last backward was in training mode (None: there was none), and the
        # same for the backward before.
        self._is_in_training: bool | None = None
        self._was_in_training = True
        self._syncs_next: Set[str] = _NONE
        self._synced_writes: list[str] = []  # written to before the forward that then synchronised them
        # Hashes of the values after the last synchronisation, as far as known.
        self._left: Mapping[str, int] = {}
        self._prepared: _Prepared | None = None
        self._take_names()

    def watch(self) -> None:
        broadcasts = self._broadcasts or "broadcast" in self._patterns.values()
        if not broadcasts or self.is_alone:
            return
        self.writes = BufferWrites(
            self._tensors,
            lambda: self._policies.broadcast(on_demand=False),
            self._ops,
            world_size=self._communicator.world_size,
        )
        is_unread = self._tensors.is_unread
        self._left = self.writes.hashes(name for name in self._policies.after_pass if not is_unread(name))

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
        is_known = self._tensors.buffers is self._buffers
        return (self._policies_then if is_known else self._policies).is_needed

    @property
    def in_step(self) -> set[str]:
        """Names of buffers that are equal on all ranks after a backward; empty with a user's hook."""
        return set() if self.hook is not None else self._policies.in_step

    def begin_forward(self, *, is_trained: bool, is_training: bool, after_local_backward: bool) -> None:
        """Detect writes since the last forward. Collective if buffers are broadcast in forward."""
        if self.hook is not None:
            return
        if is_training:
            self._is_in_training = True
            self.sync_forward()
        elif is_trained and self._is_in_training is None:
            self._is_in_training = False
        if self.writes is not None:
            self._keep_read_statistics(is_trained=is_trained, is_training=is_training)
            self.writes.begin_forward(is_trained=is_trained, after_local_backward=after_local_backward)

    def _keep_read_statistics(self, *, is_trained: bool, is_training: bool) -> None:
        """Keep hashes of running statistics that an evaluation has read, before training changes them."""
        if is_trained and not is_training:
            self._were_statistics_read = True
        elif is_training and self._were_statistics_read and self.writes is not None:
            self._were_statistics_read = False
            known, is_unread = self._left, self._tensors.is_unread
            names = [name for name in self._policies.after_pass if name not in known and is_unread(name)]
            self._left = {**known, **self.writes.hashes(names)}

    def sync_forward(self) -> None:
        """Broadcast rank 0's buffers once before the next backward, if necessary. Collective if so.

        With `in_forward` these are all broadcast buffers. Otherwise they are those that only some ranks wrote
        in the last step without changing a value, because a schedule may write other values next time. No
        others are, because the forward of another model may have just written to them on each rank. Those
        that it has written to on some rank are not broadcast either.
        """
        if self._is_forward_synced:
            return
        self._is_forward_synced = True
        chosen, self._syncs_next = self._syncs_next, _NONE
        if self.hook is not None or not (self._in_forward or chosen):
            return
        if self.writes is not None:
            self.writes.collect()  # which finds buffers that were registered since
        after_pass = self._policies.after_pass
        chosen = after_pass if self._in_forward else self._not_by_forward(chosen & after_pass)
        if self.writes is not None and not self._in_forward:
            self._synced_writes = [name for name in self.writes.names() if name in chosen]
        if chosen:
            self._sync(range(self._communicator.world_size), chosen, _NONE)

    def _not_by_forward(self, names: Set[str]) -> Set[str]:
        """Those of the buffers that no forward has written to, on any rank, since backward. Collective."""
        written = set() if self.writes is None else self.writes.by_forward & names
        self._watch_forwards(_NONE)
        return set(names).difference(*self._gather(sorted(written)))

    def _watch_forwards(self, names: Set[str]) -> None:
        if self.writes is not None:
            self.writes.watch_forwards(names)

    def sync_without_forward(self) -> None:
        self._is_in_training = None  # forget an evaluation since the last backward
        if self._was_in_training:
            self.sync_forward()

    @property
    def has_writes(self) -> bool:
        """Whether the end of backward must report that this rank's program has written to buffers."""
        return self.writes is not None and bool(self.writes.found or self._synced_writes)

    def end_forward(self) -> None:
        if self.writes is not None:
            self.writes.end_forward()

    def give_up_backward(self) -> None:
        self._is_forward_synced = False
        self._syncs_next = _NONE
        self._watch_forwards(_NONE)
        self._synced_writes = []
        if self.writes is not None:
            self.writes.end_backward()

    def note_own_writes(self) -> None:
        """Do not count the buffer writes so far as writes of the program."""
        if self.writes is not None:
            self.writes.end_backward()

    def end_backward(self, active: Sequence[int]) -> None:
        self._is_forward_synced = False
        if self._is_in_training is not None:
            self._was_in_training, self._is_in_training = self._is_in_training, None
        if not active:
            return
        if self.hook is not None:
            self.hook.end_backward()
        elif self.is_needed and not self.is_alone:
            self.sync(active, on_demand=False)

    def check_writes(self, active: Sequence[int], where: str) -> None:
        """Compare what the ranks have written to buffers since the last synchronisation. Collective.

        Equal values written by all ranks are right: a schedule that each rank computes, or a checkpoint that
        each loads. So is a write that leaves the value unchanged.

        Args:
            active: Ranks that had data.
            where: Which step this is, for the error.

        Raises:
            ReplicasDifferError: Names the buffers and the ranks that have written to them.
        """
        found, unread = ({}, {}) if self.writes is None else (self.writes.found, self.writes.unread)
        reported: list[tuple[dict[str, list[int]], dict[str, list[int]], list[str]]]
        reported = self._gather((found, unread, self._synced_writes))
        self._synced_writes = []
        names = sorted({name for rank in active for name in reported[rank][0]})
        rows = [
            {n: row.get(n, others.get(n, [])) for n in names if n in row or n in others}
            for row, others, _ in reported
        ]
        if self._ops.refuses_writes and not self._in_forward:
            before_forward = _not_on_all([reported[rank][2] for rank in active])
            self._syncs_next = before_forward | _not_on_all([rows[rank] for rank in active])
            self._watch_forwards(self._syncs_next)
        differing = [n for n in names if len({tuple(rows[rank].get(n, ())) for rank in active}) > 1]
        if not differing:
            return
        now = {} if self.writes is None else self.writes.hashes(differing)
        left = {name: self._left[name] for name in differing if name in self._left}
        is_unread = self._tensors.is_unread
        unused = [name for name in differing if name not in left and is_unread(name)]
        known: list[tuple[dict[str, int], dict[str, int], list[str]]] = self._gather((now, left, unused))
        writers = {}
        for name in differing:
            used = {value for rank in active for value in rows[rank].get(name, ())}
            if {known[rank][0][name] for rank in active} == used and len(used) == 1:
                continue  # all have the written value; some got it undetected, for example by a broadcast
            # The other ranks have used the value of the last synchronisation, which forward may have changed
            # since, or nothing, if these are running statistics that they only trained. If a rank does not
            # know that value, another rank does, or the rank still has it.
            known_value = next((row[name] for _, row, _ in known if name in row), None)
            for rank in active:
                has, knows, unused = known[rank]
                if name not in rows[rank] and name not in unused:
                    used.add(knows.get(name, has[name] if known_value is None else known_value))
            if len(used) > 1:
                writers[name] = tuple(rank for rank in active if name in rows[rank])
        if not writers:
            return
        if self._ops.refuses_writes:
            where += "; the gradients of this backward are not to be used, on any rank"
            raise _written_apart(writers, self._communicator.world_size, where)
        if not self._has_warned:
            where += "; the buffers of rank 0 are now on every rank"
            error = _written_apart(writers, self._communicator.world_size, where)
            self._has_warned = True
            warn(f"{error}\n  (reported once)")

    def _gather(self, value: object) -> list[Any]:
        return [json.loads(row) for row in self._communicator.all_gather(json.dumps(value).encode())]

    def sync(self, active: Sequence[int], *, on_demand: bool) -> None:
        """Synchronise the buffers by their policies. Collective."""
        self._sync(active, self._policies.broadcast(on_demand=on_demand), self._policies.averaged)

    def take_over(self, root: int) -> None:
        """Give every rank all buffers of the rank `root`, whatever their policies. Collective."""
        self._sync([root], set(self._tensors.current_buffers()), _NONE)

    def _sync(self, active: Sequence[int], chosen: Set[str], averages_of: Set[str]) -> None:
        if self.is_alone:
            return
        if self.writes is not None:
            self.writes.begin_sync()
        now: Mapping[str, Any] = self._tensors.current_buffers()
        changing = averages_of if self._communicator.rank == active[0] else chosen | averages_of
        is_memory = self._communicator.path == "memory"
        written = self._tensors.written_buffers(now, changing, through_pointers=is_memory)
        if written is not None:
            now = written.places
        prepared = self._prepared
        if prepared is None or not prepared.is_for(now, chosen, averages_of):
            prepared = self._prepared = _Prepared(now, chosen, averages_of, self._communicator)
        prepared.broadcast(active[0])
        if prepared.averaged:
            self._ops.average_buffers(self._communicator, prepared.averaged, active)
        self._were_statistics_read = False
        self._left = {name: value for name, value in self._left.items() if name not in chosen}
        if written is not None:
            self._left |= written.end()
        if self.writes is not None:
            self.writes.end_sync(chosen, averages_of)


def _not_on_all(names: Sequence[Iterable[str]]) -> frozenset[str]:
    each = [frozenset(some) for some in names]
    return frozenset().union(*each) - each[0].intersection(*each)


class _Prepared:
    """A synchronisation of certain buffers, prepared once and reused while they stay in the same memory."""

    def __init__(
        self,
        places: Mapping[str, Any],
        chosen: Collection[str],
        averages_of: Collection[str],
        communicator: Communicator[Any],
    ) -> None:
        self._for = places, chosen, averages_of
        averaged = [buffer for name, buffer in places.items() if name in averages_of]
        # Integers, such as counters, have no mean and are broadcast.
        copied = [buffer for name, buffer in places.items() if name in chosen]
        copied += [buffer for buffer in averaged if not buffer.is_floating_point()]
        self.broadcast = communicator.prepare_broadcast(copied)
        self.averaged = [buffer for buffer in averaged if buffer.is_floating_point()]

    def is_for(self, *of: Collection[str]) -> bool:
        return all(known is each for known, each in zip(self._for, of, strict=True))


def _written_apart(
    writers: Mapping[str, tuple[int, ...]], world_size: int, where: str
) -> ReplicasDifferError:
    ranks = tuple(sorted({rank for who in writers.values() for rank in who}))
    names = list(writers)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, who in writers.items():
        groups.setdefault(who, []).append(name)
    which = f"{format_ranks(ranks)} of {world_size}"
    if len(ranks) == world_size:
        which = f"all {world_size} ranks, with different values"
    return ReplicasDifferError(
        f"Buffer '{shorten(names)}' was written between two steps on {which}: the ranks have used different "
        "values in this step.",
        where=where,
        seen="\n".join(f"written on {format_ranks(who)}: {shorten(each)}" for who, each in groups.items()),
        expected="the same values on every rank: buffers are synchronised at the end of backward, not in "
        "forward, which waits for no other rank",
        likely="a schedule, a mask or a checkpoint that some ranks alone set or load, or that is random on "
        "each; or a module of the model that some ranks alone have run in training mode, and that writes it",
        hint="forward_sync_buffers=True broadcasts rank 0's buffers at the start of training forwards, as "
        "torch's own class does; or call sync_buffers() on every rank after the write; or write the same on "
        f'every rank. If training does not read it (a cache): buffers={{{names[0]!r}: "local"}} lets each '
        "rank keep its own",
        ranks=ranks,
        differing=dict(writers),
    )
