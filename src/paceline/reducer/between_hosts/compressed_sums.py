"""What a message between hosts holds of sums: the values as they are, or codes of fewer bytes.

What encoding took from a shard stays with the rank that sends it, and is added the next time; what it took in
a backward that was not good, or from a parameter that no rank used, is as if it had not been.

Words: a *shard*, a *part*, a *piece* as at the head of this folder; the *error* of a shard is what its codes
have not delivered yet, per unit of weight, so that it does not grow when the weights of ranks change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.reducer.between_hosts.routes import Route
from paceline.reducer.compression import BF16, EIGHT_BIT, FP16, TOP_K, Elements, Floats, KeptError
from paceline.reducer.plan import Plan, pieces_of

ENCODINGS = {"bf16": BF16, "fp16": FP16, "int8": EIGHT_BIT, "topk": TOP_K}
"""What `compress_between_hosts` may be, and its number in the core (cpp/compression)."""

_SMALLEST_WEIGHT = 2.0**-126  # of which float32 still holds the inverse

_Piece: TypeAlias = tuple[int, KeptError, slice, Elements]
"""Some elements of a parameter: the round in which this rank sends their sums, where their error is kept,
which ones they are, and their place there."""


class SumFormat(Protocol):
    """How sums stand in messages. `weight` is what the sums hold: of a host, or of all."""

    def nbytes(self, bucket: int, count: int) -> int: ...

    def room(self, phase: int, bucket: int, payload: int) -> int:
        """The address where the sums are made that `write` puts into a message; good for one piece."""
        ...

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        """Put the sums of a piece, which are in `room`, into a message."""
        ...

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        """The address of the sums of a message, as all hosts see them; good until `row` is used again."""
        ...


class PlainSums:
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
        # The error of each shard, and that of the part whose sums over all hosts this rank sends.
        self._errors: tuple[list[KeptError], list[KeptError]] = ([], [])
        self._firsts: list[tuple[int, int]] = []
        for route, is_coded in zip(routes, self._is_coded):
            part = route.part_of(host)
            num_added = 0 if route.is_one_round else sum(map(len, part))
            for kept, count in zip(self._errors, (len(route.shard), num_added)):
                kept.append(KeptError(count if is_coded else 0))
            self._firsts.append((route.shard.start, part[0].start))
        most = max((len(piece) for route in routes for part in route.parts for piece in part), default=0)
        self._pieces = self._by_parameter()
        self._rooms = np.empty((2, most), np.float32)
        self._rows = np.empty((len(host_sizes), most), np.float32)

    def take_over(self, before: CodedSums, group: _core.HostGroup) -> None:
        """Begin with the errors of another plan of the same parameters. Collective over `group`, the host.

        Which rank of the host sends a value may have changed. An error of sums over all hosts has another
        owner now, too: it becomes one of this host's shard, as if all ranks weighed the same.
        """
        for index, spec in enumerate(self._plan.parameters):
            if spec.itemsize > 4 or not spec.numel:
                continue
            whole = before.error_of(index)
            group.all_reduce(whole.ctypes.data, spec.numel, _core.DTYPES["float32"], ReduceOp.SUM)
            self._begin_with(index, whole)

    def kept(self) -> list[Floats]:
        return [self.error_of(index) for index in range(len(self._plan.parameters))]

    def error_of(self, index: int) -> Floats:
        """What this rank has not delivered yet of a parameter's sums; zeros where another rank sends them.

        That of sums over all hosts counts as one of this host's.
        """
        whole: Floats = np.zeros(self._plan.parameters[index].numel, np.float32)
        for phase, kept, elements, place in self._pieces.get(index, ()):
            error = kept.current(place)
            whole[elements] += error * np.float32(self._hosts_per_own) if phase else error
        return whole

    def keep(self, errors: Sequence[Floats]) -> None:
        for index, whole in enumerate(errors):
            self._begin_with(index, whole)

    def _begin_with(self, index: int, whole: Floats) -> None:
        for phase, kept, elements, place in self._pieces.get(index, ()):
            if phase == 0:
                kept.begin_with(place, whole[elements])

    def adopt(self, unused: Iterable[tuple[int, range]]) -> None:
        """The backward that has ended is good: what was encoded in it is delivered, and the rest is kept.

        Without this call the next backward begins with the errors that this one began with.
        """
        left_out: dict[KeptError, list[Elements]] = {}
        for index, without in unused:
            for _, kept, elements, (start, _) in self._pieces.get(index, ()):
                begin, end = max(elements.start, without.start), min(elements.stop, without.stop)
                if begin < end:
                    first = start - elements.start
                    left_out.setdefault(kept, []).append((first + begin, first + end))
        for errors in self._errors:
            for kept in errors:
                kept.adopt(left_out.get(kept, ()))

    def _by_parameter(self) -> dict[int, list[_Piece]]:
        found: dict[int, list[_Piece]] = {}
        for number, (bucket, firsts) in enumerate(zip(self._plan.buckets, self._firsts)):
            section = self._plan.sections[bucket.section]
            begin = (bucket.begin_byte - section.begin_byte) // section.itemsize
            for phase, first in enumerate(firsts):
                kept = self._errors[phase][number]
                begins_at = begin + first  # within the section
                for index, start, stop in pieces_of(self._plan, number) if len(kept) else ():
                    start, stop = max(start, begins_at), min(stop, begins_at + len(kept))
                    if start < stop:
                        own = (self._plan.offsets[index] - section.begin_byte) // section.itemsize
                        place = start - begins_at, stop - begins_at
                        piece = phase, kept, slice(start - own, stop - own), place
                        found.setdefault(index, []).append(piece)
        return found

    def nbytes(self, bucket: int, count: int) -> int:
        if not self._is_coded[bucket]:
            return self._plain.nbytes(bucket, count)
        return _core.encoded_bytes(self._encoding, count)

    def room(self, phase: int, bucket: int, payload: int) -> int:
        return int(self._rooms[phase].ctypes.data) if self._is_coded[bucket] else payload

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        if not self._is_coded[bucket] or not elements:
            return
        kept, first = self._errors[phase][bucket], self._firsts[bucket][phase]
        place = elements.start - first, elements.stop - first
        if weight < _SMALLEST_WEIGHT:  # no rank looks at codes without a weight
            kept.wait(place)
        else:
            kept.encode(self._encoding, self._rooms[phase].ctypes.data, weight, place, payload)

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        if not self._is_coded[bucket]:
            return payload
        address = int(self._rows[row].ctypes.data)
        counted = weight if weight >= _SMALLEST_WEIGHT else 0.0
        _core.decode_mean(self._encoding, [payload], [counted], count, address)
        return address
