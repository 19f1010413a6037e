"""Finds non-finite gradients on a device, without waiting for the device in each backward.

Before a bucket is summed, two device calls reduce it to far fewer numbers, its traces. The norm of all traces
is one number for the backward. It is copied to host memory, and read at the end of a later backward, when the
copy has long arrived. With nonfinite="raise", the end of each backward waits for it. Only if the norm is not
finite are the traces read, which show which parameters are to blame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

_MOST_UNDER_WAY = 4
"""The most backwards whose norms may be outstanding. A host that is further ahead of the device waits."""
_CHUNK = 512
"""Elements of a bucket that have one norm in the traces."""

Piece = tuple[int, torch.Tensor]
"""The index of a parameter, and its elements within a bucket."""


class HostCopy:
    """A copy of one number from a device to pinned host memory."""

    def __init__(self, number: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
        self._event = torch.Event(number.device)

    def begin(self, number: torch.Tensor) -> None:
        self._host.copy_(number, non_blocking=True)
        self._event.record()

    def is_done(self) -> bool:
        return bool(self._event.query())

    def read(self) -> float:
        self._event.synchronize()
        return float(self._host.item())


class _Look:
    """The check of one bucket: two device calls, whatever the number of its parameters.

    The first call writes the norm of each chunk of `_CHUNK` elements. The second copies the elements of the
    chunks that are not within one parameter, so that each parameter to blame can be found.
    """

    def __init__(self, flat: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self._flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
        scale = self._flat.numel() // max(1, flat.numel())
        count = self._flat.numel() // _CHUNK
        self._chunks = self._flat[: count * _CHUNK].view(count, _CHUNK) if count else None
        self._pieces: list[tuple[int, int, int]] = []  # first element, end, index of the parameter
        is_apart = np.ones(count, bool)
        for param, piece in pieces:
            begin = int(piece.storage_offset() - flat.storage_offset()) * scale
            end = begin + piece.numel() * scale
            self._pieces.append((begin, end, param))
            is_apart[-(-begin // _CHUNK) : end // _CHUNK] = False
        apart = np.flatnonzero(is_apart)[:, None] * _CHUNK + np.arange(_CHUNK)
        tail = np.arange(count * _CHUNK, self._flat.numel())
        self._apart = np.concatenate([apart.ravel(), tail])
        self._is_apart, self._count = is_apart, count
        self._index = torch.from_numpy(self._apart).to(flat.device)
        self.size = count + len(self._apart)

    @property
    def like(self) -> torch.Tensor:
        return self._flat

    def parts(self, traces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return traces[: self._count], traces[self._count :]

    def leave(self, norms: torch.Tensor, copies: torch.Tensor) -> None:
        if self._chunks is not None:
            torch.linalg.vector_norm(self._chunks, math.inf, dim=1, out=norms)
        if len(self._apart):
            torch.index_select(self._flat, 0, self._index, out=copies)

    def blame(self, traces: torch.Tensor) -> set[int]:
        """The parameters whose elements are not finite. Waits for the device."""
        bad = torch.isfinite(traces).logical_not().cpu().numpy()
        chunks = np.flatnonzero(bad[: self._count] & ~self._is_apart) * _CHUNK
        found = np.sort(np.concatenate([chunks, self._apart[bad[self._count :]]]))
        return {
            param
            for begin, end, param in self._pieces
            if np.searchsorted(found, begin) < np.searchsorted(found, end)
        }


class _Traces:
    """The traces of the buckets of one device and dtype in one backward.

    Traces that no bucket has written are finite: memory that has held other values is not used again.
    """

    def __init__(self, size: int, like: torch.Tensor) -> None:
        self.elements = like.new_zeros(size)
        self._norm = like.new_zeros(())
        self.copy: HostCopy | None = None

    def measure(self) -> torch.Tensor:
        """The infinity norm of the traces: exact, and not finite if any trace is not; a NaN makes it NaN."""
        torch.linalg.vector_norm(self.elements, math.inf, out=self._norm)
        return self._norm


class _Backward:
    """Memory for the traces of one backward, and its views, which later backwards use again."""

    def __init__(
        self,
        looks: Sequence[_Look],
        places: Sequence[tuple[int, slice]],
        sizes: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        self.kinds = [_Traces(*each) for each in sizes]
        self.parts = [
            look.parts(self.kinds[kind].elements[place]) if look.size else None
            for look, (kind, place) in zip(looks, places)
        ]


class FiniteChecks:
    """Checks one rank's gradients on devices.

    Args:
        buckets: Each bucket, and the parameters' elements in it.
        waits: Report each backward at its end, which waits for the device. Otherwise only the first backward
            is reported at its end, and others one backward or more later.
        copy: Makes a `HostCopy` for numbers like its argument.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[torch.Tensor, Sequence[Piece]]],
        *,
        waits: bool,
        copy: Callable[[torch.Tensor], HostCopy] = HostCopy,
    ) -> None:
        self.waits = waits
        self._make_copy = copy
        self._buckets = buckets
        self._is_first = True
        self._looks: list[_Look] = []
        self._places: list[tuple[int, slice]] = []  # of each bucket: its kind, and where its traces lie
        self._sizes: list[tuple[int, torch.Tensor]] = []  # of each kind, which is one device and dtype
        self._now: _Backward | None = None
        self._under_way: deque[_Backward] = deque()
        self._free: list[_Backward] = []

    @property
    def is_late(self) -> bool:
        """Whether `take()` returns the results of earlier backwards."""
        return not (self.waits or self._is_first)

    def look(self, bucket: int) -> None:
        if not self._looks:
            self._lay_out()
        if self._now is None:
            self._now = self._free.pop() if self._free else _Backward(self._looks, self._places, self._sizes)
        if (parts := self._now.parts[bucket]) is not None:
            self._looks[bucket].leave(*parts)

    def take(self) -> list[int]:
        """Parameters with non-finite gradients in backwards whose results arrived since the last call."""
        found: set[int] = set()
        now, self._now = self._now, None
        if now is not None and self.is_late:
            for kind in now.kinds:
                norm = kind.measure()
                kind.copy = kind.copy or self._make_copy(norm)
                kind.copy.begin(norm)
            self._under_way.append(now)
        elif now is not None:
            found |= self._blame(now, [float(kind.measure().item()) for kind in now.kinds])
        while self._under_way:
            copies = [kind.copy for kind in self._under_way[0].kinds if kind.copy is not None]
            if not all(copy.is_done() for copy in copies) and len(self._under_way) <= _MOST_UNDER_WAY:
                break
            found |= self._blame(self._under_way.popleft(), [copy.read() for copy in copies])
        self._is_first = False
        return sorted(found)

    def _lay_out(self) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], int] = {}
        self._looks = [_Look(*bucket) for bucket in self._buckets]
        for look in self._looks:
            if not look.size:
                self._places.append((0, slice(0)))
                continue
            kind = kinds.setdefault((look.like.device, look.like.dtype), len(kinds))
            if kind == len(self._sizes):
                self._sizes.append((0, look.like))
            begin = self._sizes[kind][0]
            self._places.append((kind, slice(begin, begin + look.size)))
            self._sizes[kind] = (begin + look.size, look.like)

    def _blame(self, backward: _Backward, norms: Sequence[float]) -> set[int]:
        bad = [not math.isfinite(norm) for norm in norms]
        if not any(bad):
            self._free.append(backward)
            return set()
        found: set[int] = set()
        for look, (kind, place) in zip(self._looks, self._places):
            if look.size and bad[kind]:
                found |= look.blame(backward.kinds[kind].elements[place])
        return found
