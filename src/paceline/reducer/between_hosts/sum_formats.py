"""What a message between hosts holds of sums: the values as they are, or codes of fewer bytes.

The one idea: whoever sends codes goes on with what they decode to, as all others do, so every host adds the
same numbers. What encoding took from a share stays with the rank that sends it, and is added the next time.

Words: a *share*, a *part*, a *piece* as at the head of this folder; the *error* of a share is what its codes
have not delivered yet, per unit of weight, so that it does not grow when the weights of ranks change.

Imports numpy, the core, `collectives` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.reducer.between_hosts.routes import Route
from paceline.reducer.compression import BF16, EIGHT_BIT, FP16, TOP_K, Floats
from paceline.reducer.plan import Plan, pieces_of

ENCODINGS = {"bf16": BF16, "fp16": FP16, "int8": EIGHT_BIT, "topk": TOP_K}
"""What `compress_between_hosts` may be, and its number in the core (cpp/compression)."""

_SMALLEST_WEIGHT = 2.0**-126  # of which float32 still holds the inverse


class SumFormat(Protocol):
    """How sums stand in messages. `weight` is what the sums hold: of a host, or of all."""

    def nbytes(self, bucket: int, count: int) -> int:
        """Bytes of so many sums of a bucket."""
        ...

    def room(self, phase: int, bucket: int, payload: int) -> int:
        """The address where the sums are made that `write` puts into a message; good for one piece.

        Args:
            phase: The round. Each may be of another thread.
            bucket: In the plan.
            payload: The address behind the message's header.
        """
        ...

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        """Put the sums of a piece, which are in `room`, into a message.

        Args:
            phase: The round.
            bucket: In the plan.
            elements: A range of the bucket's elements, within this rank's share.
            payload: The address behind the message's header.
            weight: The weight of the ranks whose values are in the sums: those of a block in the first
                round, all ranks in the second.
        """
        ...

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        """The address of the sums of a message, as all hosts see them; good until `row` is used again."""
        ...


class PlainSums:
    """A `SumFormat` of the values themselves.

    Args:
        itemsizes: Bytes of an element of the sums of each bucket.
    """

    def __init__(self, itemsizes: Sequence[int]) -> None:
        self._itemsizes = itemsizes

    def nbytes(self, bucket: int, count: int) -> int:
        return count * self._itemsizes[bucket]

    def room(self, phase: int, bucket: int, payload: int) -> int:
        return payload

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        """They are there."""

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        return payload


class CodedSums:
    """A `SumFormat` of codes, with error feedback; sums of float64 go as they are.

    Making one is collective over the ranks of the host if errors are taken over.

    Args:
        encoding: Its number in the core.
        plan: The same on all ranks.
        routes: The way of this rank's share of each bucket; empty: it has no share, and sends nothing.
        itemsizes: Bytes of an element of the sums of each bucket.
        host: Number of this rank's host.
        host_sizes: How many ranks each host has.
    """

    def __init__(
        self,
        encoding: int,
        plan: Plan,
        routes: Sequence[Route],
        itemsizes: Sequence[int],
        host: int,
        host_sizes: Sequence[int],
    ) -> None:
        self._encoding = encoding
        self._plan, self._routes = plan, routes
        self._plain = PlainSums(itemsizes)
        self._hosts_per_own = sum(host_sizes) / host_sizes[host]
        self._is_coded = [itemsize == 4 for itemsize in itemsizes]
        # The error of a share, and that of the part whose sums over all hosts this rank sends.
        self._shares: list[Floats] = []
        self._parts: list[Floats] = []
        self._firsts: list[tuple[int, int]] = []
        for route, is_coded in zip(routes, self._is_coded):
            part = route.part_of(host)
            num_added = 0 if route.is_one_round else sum(map(len, part))
            self._shares.append(np.zeros(len(route.share) if is_coded else 0, np.float32))
            self._parts.append(np.zeros(num_added if is_coded else 0, np.float32))
            self._firsts.append((route.share.start, part[0].start))
        most = max((len(piece) for route in routes for part in route.parts for piece in part), default=0)
        self._pieces = self._by_parameter()
        self._rooms = np.empty((2, most), np.float32)
        self._rows = np.empty((len(host_sizes), most), np.float32)

    def take_over(self, before: CodedSums, group: _core.HostGroup) -> None:
        """Begin with the errors of another plan of the same parameters. Collective over `group`, the host.

        Which rank of the host sends a value may have changed. An error of sums over all hosts has another
        owner now, too: it becomes one of this host's share, as if all ranks weighed the same.
        """
        before._fold()
        for index, spec in enumerate(self._plan.parameters):
            if spec.itemsize > 4 or not spec.numel:
                continue
            whole = before.error_of(index)
            group.all_reduce(whole.ctypes.data, spec.numel, _core.DTYPES["float32"], ReduceOp.SUM)
            for elements, error in self._pieces.get(index, ()):
                error[:] = whole[elements]

    def kept(self) -> list[Floats]:
        """The errors of each parameter, with those of sums over all hosts, which become this host's.

        Example:
            A rank that sends all of a parameter of 3 elements, as it does of its shares: [array of 3 errors].
        """
        self._fold()
        return [self.error_of(index) for index in range(len(self._plan.parameters))]

    def keep(self, errors: Sequence[Floats]) -> None:
        """Begin with these errors, one array for each parameter; what others send is passed over."""
        for index, whole in enumerate(errors):
            for elements, error in self._pieces.get(index, ()):
                error[:] = whole[elements]

    def remember(self) -> Callable[[], None]:
        """Remember all errors; the result goes back to them: what was encoded since was for nothing."""
        before = [(error, error.copy()) for error in (*self._shares, *self._parts)]

        def go_back() -> None:
            for error, copied in before:
                error[:] = copied

        return go_back

    def error_of(self, index: int) -> Floats:
        """What this rank has not delivered yet of a parameter's sums; zeros where another rank sends them.

        That of sums over all hosts is left out.
        """
        whole: Floats = np.zeros(self._plan.parameters[index].numel, np.float32)
        for elements, error in self._pieces.get(index, ()):
            whole[elements] = error
        return whole

    def _fold(self) -> None:
        """Make the errors of sums over all hosts errors of this host's shares."""
        for share, part, (first, first_added) in zip(self._shares, self._parts, self._firsts):
            share[first_added - first :][: len(part)] += part * np.float32(self._hosts_per_own)
            part[:] = 0

    def _by_parameter(self) -> dict[int, list[tuple[slice, Floats]]]:
        """For each parameter, the elements whose sums this rank sends, and their errors."""
        found: dict[int, list[tuple[slice, Floats]]] = {}
        for number, (bucket, route, share) in enumerate(zip(self._plan.buckets, self._routes, self._shares)):
            section = self._plan.sections[bucket.section]
            begin = (bucket.begin_byte - section.begin_byte) // section.itemsize
            for index, first, last in pieces_of(self._plan, number) if len(share) else ():
                start = max(first, begin + route.share.start)
                stop = min(last, begin + route.share.stop)
                if start >= stop:
                    continue
                of_parameter = (self._plan.offsets[index] - section.begin_byte) // section.itemsize
                of_share = begin + route.share.start
                error = share[start - of_share : stop - of_share]
                found.setdefault(index, []).append((slice(start - of_parameter, stop - of_parameter), error))
        return found

    def nbytes(self, bucket: int, count: int) -> int:
        if not self._is_coded[bucket]:
            return self._plain.nbytes(bucket, count)
        return _core.encoded_bytes(self._encoding, count)

    def room(self, phase: int, bucket: int, payload: int) -> int:
        return int(self._rooms[phase].ctypes.data) if self._is_coded[bucket] else payload

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        # Nobody looks at codes without a weight; the error waits.
        if not self._is_coded[bucket] or not elements or weight < _SMALLEST_WEIGHT:
            return
        errors = (self._parts if phase else self._shares)[bucket]
        error = errors.ctypes.data + 4 * (elements.start - self._firsts[bucket][phase])
        room = self._rooms[phase].ctypes.data
        _core.encode(self._encoding, room, error, 1 / weight, len(elements), payload)

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        if not self._is_coded[bucket]:
            return payload
        address = int(self._rows[row].ctypes.data)
        counted = weight if weight >= _SMALLEST_WEIGHT else 0.0
        _core.decode_mean(self._encoding, [payload], [counted], count, address)
        return address
