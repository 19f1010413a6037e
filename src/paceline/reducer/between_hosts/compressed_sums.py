"""The formats of sums in messages between hosts: plain values, or codes of fewer bytes.

The encoding error of a shard stays on the rank that sends it, and is added to the next sums. The errors of a
backward that was not good, and those of parameters that no rank used, are left as they were before it.

Words: *shard*, *part* and *piece* as in the package docstring; the *error* of a shard is what its codes have
not delivered yet, per unit of weight, so that it does not grow when the weights of ranks change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.reducer.between_hosts.routes import Route
from paceline.reducer.compression import BF16, EIGHT_BIT, FP16, TOP_K
from paceline.reducer.error_feedback import Elements, Floats, KeptError
from paceline.reducer.plan import Plan, pieces_of

ENCODINGS = {"bf16": BF16, "fp16": FP16, "int8": EIGHT_BIT, "topk": TOP_K}
"""The values of `compress_between_hosts`, and their numbers in the core (cpp/compression)."""

_SMALLEST_WEIGHT = 2.0**-126  # its inverse is still finite in float32

_Piece: TypeAlias = tuple[int, KeptError, slice, Elements]
"""Some elements of a parameter: the round in which this rank sends their sums, the object that keeps their
error, the elements, and their place in that object."""


class SumFormat(Protocol):
    """The format of sums in messages. `weight` is the total weight of the sums: of a host, or of all."""

    def nbytes(self, bucket: int, count: int) -> int: ...

    def room(self, phase: int, bucket: int, payload: int) -> int:
        """The address to which sums are written before `write` puts them into a message; for one piece."""
        ...

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        """Write the sums of a piece, which are in `room`, into a message."""
        ...

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        """The address of the sums of a message, as all hosts read them; valid until `row` is used again."""
        ...


class PlainSums:
    def __init__(self, itemsizes: Sequence[int]) -> None:
        self._itemsizes = itemsizes

    def nbytes(self, bucket: int, count: int) -> int:
        return count * self._itemsizes[bucket]

    def room(self, phase: int, bucket: int, payload: int) -> int:
        return payload

    def write(self, phase: int, bucket: int, elements: range, payload: int, weight: float) -> None:
        """Nothing to do, because `room` is in the message."""

    def read(self, bucket: int, count: int, payload: int, weight: float, row: int) -> int:
        return payload


class CodedSums:
    """A `SumFormat` of codes, with error feedback; sums of float64 are not encoded."""

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
        # The errors of each shard, and of the part whose sums over all hosts this rank sends.
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

        A value may now be sent by another rank of the host, and the sum over all hosts by another owner. So
        the error of such a sum becomes an error of this host's shard, as if all ranks had the same weight.
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

        The error of sums over all hosts is scaled to count as one of this host's sums.
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
        """Use the errors of the last backward, which was good: the sums encoded in it are delivered.

        Without this call the next backward begins with the same errors as this one.
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
        if weight < _SMALLEST_WEIGHT:  # no rank reads codes without a weight
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
