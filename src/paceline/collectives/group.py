"""Group: the public class with collectives on numpy arrays between the ranks of one host."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import _core
from paceline.arguments import Arguments
from paceline.collectives import arrays
from paceline.collectives.arrays import (
    Array,
    address_of,
    check_blocks,
    checked_dtype,
    checked_shape,
    dtype_number,
    require_array,
    take_or_make,
)
from paceline.collectives.call_queue import CallQueue
from paceline.collectives.formation import form_core
from paceline.collectives.ops import ReduceOp, parse_op
from paceline.collectives.subgroup_exchange import SubgroupExchange
from paceline.collectives.work import TransferWork, Work, make_behind
from paceline.errors import ConfigError
from paceline.health import exit_reports

Seconds = float | timedelta | None
_EQUAL = 1.0  # the default weight


class Group:
    """A process group of ranks on one host.

    All ranks must call each collective, in the same order, with arrays of the same type and size. It blocks
    until it is done, or until the group's time-out, when it raises on every rank. If ranks make different
    calls, each gets a MismatchError with all of these calls, and the group stays usable. If a rank dies or
    raises, the others raise PeerLostError at once, and the group has ended.

    Arrays from `allocate` are reduced in place. Others are copied through the region.

    Args of all collectives:
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the group's default.
        async_op: Return a Work at once; its `wait()` returns what the call would have.

    Example:
        Rank 0 and rank 1 both run, under `paceline run -n 2`:

        >>> with paceline.init() as group:                           # doctest: +SKIP
        ...     total = np.full(3, group.rank + 1.0, np.float32)
        ...     group.all_reduce(total)                              # both now hold [3, 3, 3]
    """

    def __init__(self, core: _core.HostGroup) -> None:
        self._core = core  # takes addresses; the front ends, which are part of this package, use it
        self.rank: int = core.rank
        self.world_size: int = core.world_size
        self.name: str = core.name
        self._all_reduce_array = core.all_reduce_array
        self._queue = CallQueue(f"paceline-{core.name}")
        self._num_subgroups = 0
        self._orphans: list[TransferWork] = []  # messages under way whose Work was dropped

    def __repr__(self) -> str:
        state = "closed" if self._core.is_closed else "open"
        return f"<paceline.Group {self.name!r}: rank {self.rank} of {self.world_size}, {state}>"

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            exit_reports.announce_in(self._core, error)  # only in this group: the caller may catch the error
        self.close()

    def close(self) -> None:
        """Leave the group. Not collective; any rank that waits for this one from now on raises."""
        self._queue.close()
        self._core.close()

    # --- collectives ---

    def all_reduce(
        self,
        array: Array,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        weight: float = _EQUAL,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Work | None:
        """Replace `array` on every rank by the reduction over all ranks.

        The result has the same bits on all ranks and on every run: elements are summed over ranks in a
        fixed binary tree, 16-bit floats in float32.

        Args:
            array: Any shape, C-contiguous; float16, bfloat16 (ml_dtypes), float32, float64, int8 ... int64,
                uint8 or bool. Modified in place.
            op: A ReduceOp or its name.
            weight: Weight of this rank; used only with op="mean". The result is sum(w_r * x_r) / sum(w_r).

        Raises:
            ConfigError: The array, or another argument, is not usable.
            MismatchError: Ranks disagree on type, size, op or call order.
            PeerLostError, DeadlineError: A rank died or is late.

        Example:
            Rank 0 holds [1, 2] and rank 1 holds [3, 4]; after the call both hold [4, 6].

        Source: one pass in place over every rank's copy; see docs/design/core.md.
        """
        if type(op) is not ReduceOp:
            op = parse_op(op, "all_reduce")
        if weight is not _EQUAL and not (
            type(weight) is float and op is ReduceOp.MEAN and 0.0 <= weight < math.inf
        ):
            weight = _checked_weight(weight, op)
        limit_s = -1.0
        if timeout_s is not None:
            is_plain = type(timeout_s) is float and timeout_s >= 0.0
            limit_s = timeout_s if is_plain else _seconds(timeout_s, "all_reduce")  # type: ignore[assignment]
        # The fast path. Checks of the array in Python would take longer than a small call itself.
        if async_op is False and self._queue.newest is None:
            reduce_now = self._all_reduce_array  # a bound method is called faster from a local variable
            try:
                if reduce_now(array, op, weight, limit_s):
                    return None
            except TypeError:
                require_array(array, "all_reduce")  # for None the core's error does not name the argument
                raise
        pointer = address_of(array, "all_reduce")
        dtype = dtype_number(array, op, "all_reduce")
        args = (pointer, array.size, dtype, int(op), weight, limit_s)
        return self._make(async_op, array, self._core.all_reduce, *args)

    def reduce(
        self,
        array: Array,
        root: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        timeout_s: Seconds = None,
        async_op: bool = False,
    ) -> Work | None:
        """As `all_reduce`, but only `root` gets the result; the others' arrays stay as they are.

        Example:
            Rank 0 holds [1, 2] and rank 1 holds [3, 4]; after reduce(array, root=1) rank 1 holds [4, 6].
        """
        op = parse_op(op, "reduce")
        root = self._checked_rank(root, "reduce", "root")
        pointer, dtype = address_of(array, "reduce"), dtype_number(array, op, "reduce")
        args = (pointer, array.size, dtype, int(op), root, _seconds(timeout_s, "reduce"))
        return self._make(async_op, array, self._core.reduce, *args)

    def broadcast(
        self, array: Array, root: int = 0, *, timeout_s: Seconds = None, async_op: bool = False
    ) -> Work | None:
        """Replace `array` on every rank by that of `root`. Any type; the same number of bytes on all ranks.

        Example:
            Rank 0 holds [1, 2] and rank 1 holds [3, 4]; after broadcast(array, root=1) both hold [3, 4].
        """
        root = self._checked_rank(root, "broadcast", "root")
        pointer = address_of(array, "broadcast", is_written=self.rank != root)
        return self._make(
            async_op,
            array,
            self._core.broadcast,
            pointer,
            array.nbytes,
            root,
            _seconds(timeout_s, "broadcast"),
        )

    def all_gather(self, array: Array, out: Array | None = None, *, timeout_s: Seconds = None) -> Array:
        """Return every rank's `array`, stacked in rank order: shape `(world_size, *array.shape)`.

        Args:
            array: The same shape and type on all ranks.
            out: Where to put the result; None: a new array.

        Example:
            Rank 0 holds [1, 2] and rank 1 holds [3, 4]; both get [[1, 2], [3, 4]].
        """
        source = address_of(array, "all_gather", is_written=False)
        out = take_or_make(out, (self.world_size, *array.shape), array.dtype, "all_gather")
        target = address_of(out, "all_gather", "out")
        args = (source, target, array.nbytes, _seconds(timeout_s, "all_gather"))
        self._make(False, (array, out), self._core.all_gather, *args)
        return out

    def reduce_scatter(
        self,
        array: Array,
        out: Array | None = None,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        timeout_s: Seconds = None,
    ) -> Array:
        """Return the reduction over ranks of block `rank` of every rank's `array`.

        Args:
            array: Shape `(world_size, *block)`.
            out: Shape `block`; None: a new array.

        Example:
            Rank 0 holds [[1], [2]] and rank 1 holds [[3], [4]]; rank 0 gets [4], rank 1 gets [6].
        """
        op = parse_op(op, "reduce_scatter")
        check_blocks(array, self.world_size, "reduce_scatter")
        out = take_or_make(out, array.shape[1:], array.dtype, "reduce_scatter")
        source = address_of(array, "reduce_scatter", is_written=False)
        dtype = dtype_number(array, op, "reduce_scatter")
        target = address_of(out, "reduce_scatter", "out")
        args = (source, target, out.size, dtype, int(op), _seconds(timeout_s, "reduce_scatter"))
        self._make(False, (array, out), self._core.reduce_scatter, *args)
        return out

    def gather(self, array: Array, root: int = 0, *, timeout_s: Seconds = None) -> Array | None:
        """Return every rank's `array`, stacked in rank order, on `root`; None elsewhere.

        Example:
            Rank 0 holds [1, 2] and rank 1 holds [3, 4]; rank 0 gets [[1, 2], [3, 4]], rank 1 None.
        """
        root = self._checked_rank(root, "gather", "root")
        source = address_of(array, "gather", is_written=False)
        out = np.empty((self.world_size, *array.shape), array.dtype) if self.rank == root else None
        target = 0 if out is None else address_of(out, "gather", "out")
        args = (source, target, array.nbytes, root, _seconds(timeout_s, "gather"))
        self._make(False, (array, out), self._core.gather, *args)
        return out

    def scatter(self, array: Array | None, out: Array, root: int = 0, *, timeout_s: Seconds = None) -> None:
        """Give block r of `array` on `root` to rank r, in `out`.

        Args:
            array: Shape `(world_size, *out.shape)` on `root`; ignored elsewhere.

        Example:
            Rank 0 holds [[1, 2], [3, 4]]; rank 0's out becomes [1, 2], rank 1's [3, 4].
        """
        root = self._checked_rank(root, "scatter", "root")
        source, target = 0, address_of(out, "scatter", "out")
        if self.rank == root:
            source = address_of(array, "scatter", is_written=False)  # type: ignore[arg-type]
            assert array is not None
            if array.shape != (self.world_size, *out.shape) or array.dtype != out.dtype:
                raise ConfigError(
                    "scatter: the root's array does not fit.",
                    expected=f"shape {(self.world_size, *out.shape)}, {out.dtype}",
                    got=f"shape {array.shape}, {array.dtype}",
                    hint="np.stack of the blocks, in the order of the ranks",
                    argument="array",
                )
        args = (source, target, out.nbytes, root, _seconds(timeout_s, "scatter"))
        self._make(False, (array, out), self._core.scatter, *args)

    def all_to_all(self, array: Array, out: Array | None = None, *, timeout_s: Seconds = None) -> Array:
        """Give block r of `array` to rank r; return the blocks that the others gave, in rank order.

        Args:
            array: Shape `(world_size, *block)`.
            out: The same shape, and not `array` itself; None: a new array.

        Example:
            Rank 0 holds [[1], [2]] and rank 1 holds [[3], [4]]; rank 0 gets [[1], [3]], rank 1 [[2], [4]].
        """
        check_blocks(array, self.world_size, "all_to_all")
        out = take_or_make(out, array.shape, array.dtype, "all_to_all")
        sizes = [array.nbytes // self.world_size] * self.world_size
        source = address_of(array, "all_to_all", is_written=False)
        target = address_of(out, "all_to_all", "out")
        args = (source, sizes, target, sizes, _seconds(timeout_s, "all_to_all"))
        self._make(False, (array, out), self._core.all_to_all, *args)
        return out

    def barrier(self, *, timeout_s: Seconds = None) -> None:
        """Return once every rank has called it."""
        self._make(False, None, self._core.barrier, _seconds(timeout_s, "barrier"))

    # --- between two ranks ---

    def send(
        self, array: Array, dst: int, tag: int = 0, *, timeout_s: Seconds = None, async_op: bool = False
    ) -> TransferWork | None:
        """Send `array` to rank `dst`, which must `recv` as many bytes with the same tag, in the same order.

        Blocks until the array may be changed again. The other rank may not have received it by then.

        Example:
            Rank 0: group.send(array, dst=1). Rank 1: group.recv(array, src=0).
        """
        dst = self._checked_other(dst, "send", "dst")
        pointer = address_of(array, "send", is_written=False)
        limit_s, is_async = _seconds(timeout_s, "send"), _is_async(async_op)
        transfer = self._core.start_send(pointer, array.nbytes, dst, _checked_tag(tag, "send"))
        work = TransferWork(self._core, transfer, array, self._orphans)
        if is_async:
            return work
        work.wait_for(limit_s)
        return None

    def recv(
        self, array: Array, src: int, tag: int = 0, *, timeout_s: Seconds = None, async_op: bool = False
    ) -> TransferWork | None:
        """Receive into `array` what rank `src` sends. Blocks until it is there.

        Raises:
            MismatchError: The message has another size or tag; it is dropped.
        """
        src = self._checked_other(src, "recv", "src")
        pointer = address_of(array, "recv")
        limit_s, is_async = _seconds(timeout_s, "recv"), _is_async(async_op)
        transfer = self._core.start_receive(pointer, array.nbytes, src, _checked_tag(tag, "recv"))
        work = TransferWork(self._core, transfer, array, self._orphans)
        if is_async:
            return work
        work.wait_for(limit_s)
        return None

    # --- memory and sub-groups ---

    def allocate(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, *, timeout_s: Seconds = None
    ) -> Array:
        """Return a zeroed array in the memory that the ranks share. Collective.

        Each rank gets its own array; collectives work on it without copying. The memory is given back
        when the last view of it is gone. A forked child cannot read it; copy it before the fork.

        Raises:
            RegionError: At least one rank has not enough memory. Raised on every rank.
        """
        limit_s = _seconds(timeout_s, "allocate")
        dims, kind = checked_shape(shape), checked_dtype(dtype)
        self._drain(limit_s)
        return arrays.allocate(self._core, dims, kind, limit_s)

    def subgroup(self, ranks: Sequence[int], *, timeout_s: Seconds = None) -> Group | None:
        """Form a group of some of the ranks. Collective over the whole group.

        Args:
            ranks: The ranks of this group, the same on all of them; rank i of the new group is ranks[i].

        Returns:
            The new group; None on ranks that are not in it.

        Example:
            Four ranks call group.subgroup([0, 2]): rank 2 becomes rank 1 of the new group of two.
        """
        members = self._checked_members(ranks)
        limit_s = _seconds(timeout_s, "subgroup")
        self._num_subgroups += 1
        name = f"{self.name}/{self._num_subgroups}"
        if self.rank not in members:
            return None
        self._drain(limit_s)
        limit_s = self._core.timeout_s if limit_s < 0 else limit_s
        exchange = SubgroupExchange(self._core, members, self._orphans)
        return Group(form_core(exchange, name=name, timeout_s=limit_s))

    # --- inside ---

    def _make(self, async_op: bool, keep: object, call: Callable[..., None], *args: Any) -> Work | None:
        """Make a call now, or put it into the queue; a synchronous call waits for the queued ones."""
        is_async = _is_async(async_op)
        if not is_async and self._queue.is_empty():
            call(*args)
            return None
        self._core.check_usable()  # in a forked child no thread serves the queue
        if not is_async:
            *others, timeout_s = args
            make_behind(self._queue, self._core, functools.partial(call, *others), keep, timeout_s)
            return None
        work = Work(functools.partial(call, *args), keep)
        self._queue.submit(work)
        return work

    def _drain(self, limit_s: float) -> None:
        if not self._queue.is_empty():
            self._core.check_usable()
            make_behind(self._queue, self._core, lambda _: None, None, limit_s)

    def _checked_rank(self, rank: int, call: str, name: str) -> int:
        if type(rank) is int and 0 <= rank < self.world_size:
            return rank
        hint = f"a rank of group {self.name!r}"
        return Arguments(call).whole(name, rank, least=0, most=self.world_size - 1, hint=hint)

    def _checked_other(self, rank: int, call: str, name: str) -> int:
        rank = self._checked_rank(rank, call, name)
        if rank == self.rank:
            hint = "copy the array where a rank keeps it"
            raise Arguments(call).refuse(name, rank, "another rank than this one", hint)
        return rank

    def _checked_members(self, ranks: Sequence[int]) -> list[int]:
        try:
            members = [self._checked_rank(rank, "subgroup", "ranks") for rank in ranks]
        except (TypeError, ConfigError):
            members = []
        if not members or len(set(members)) != len(members):
            expected = f"different ranks of group {self.name!r}, 0 to {self.world_size - 1}, at least one"
            raise Arguments("subgroup").refuse("ranks", ranks, expected, "for example ranks=[0]")
        return members


def _is_async(async_op: object) -> bool:
    if async_op is True or async_op is False:
        return async_op
    return Arguments("Group").flag("async_op", async_op)


def _seconds(timeout_s: Seconds, call: str) -> float:
    """The time-out for the core, where -1 is the group's own."""
    if timeout_s is None:
        return -1.0
    if type(timeout_s) is float and timeout_s >= 0.0:  # `Arguments` would take longer than a small call
        return timeout_s
    return Arguments(call).seconds("timeout_s", timeout_s, may_be_zero=True)


def _checked_weight(weight: float, op: ReduceOp) -> float:
    check = Arguments("all_reduce")
    weight = check.number("weight", weight, least=0, hint="the number of this rank's samples, say")
    if weight != _EQUAL and op is not ReduceOp.MEAN:
        hint = 'op="mean"; or multiply the array'
        raise check.refuse("weight", weight, f"1 where op={op.name.lower()!r}: only a mean is weighted", hint)
    return weight


def _checked_tag(tag: int, call: str) -> int:
    return tag if tag == 0 else Arguments(call).whole("tag", tag, least=0, most=(1 << 64) - 1)
