"""EvaluationSampler: every sample once, and the predictions gathered in the data set's order.

Each rank gets a contiguous part of the data set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Sized
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from paceline.arguments import Arguments
from paceline.data.rank import find_rank
from paceline.data.sampler_arguments import length_of
from paceline.errors import ConfigError, MismatchError, format_ranks

Array = npt.NDArray[Any]


class Gathers(Protocol):
    def all_gather(self, array: Array) -> Array: ...


class EvaluationSampler:
    """Iterates over this rank's contiguous part of the data set, in order: no sample twice, none left out.

    Pass it as `sampler=` to a `DataLoader`. The sizes of the parts differ by one sample at most, so ranks may
    have unequally many batches, and some none. So evaluate the module inside a DistributedDataParallel, which
    makes no collective calls.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None: that of torch.distributed, if initialised, else the launcher's.
        rank: The rank of this process; None: as above.

    Raises:
        ConfigError: The rank or the number of ranks is missing or out of range.

    Example:
        With two ranks and 5 samples, rank 0 iterates over 0, 1, 2 and rank 1 over 3, 4.
    """

    def __init__(self, dataset: Sized, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.num_replicas, self.rank = find_rank(type(self).__name__, num_replicas, rank)
        self._length = length_of(type(self).__name__, dataset)

    def part(self, rank: int) -> range:
        """The indices of a rank."""
        each, rest = divmod(self._length, self.num_replicas)
        start = rank * each + min(rank, rest)
        return range(start, start + each + (rank < rest))

    def __len__(self) -> int:
        """Number of this rank's samples."""
        return len(self.part(self.rank))

    def __iter__(self) -> Iterator[int]:
        """This rank's indices, in order."""
        return iter(self.part(self.rank))

    def gather(
        self, rows: Array | Sequence[Array], group: Gathers | None = None, *, root: int | None = None
    ) -> Array | None:
        """Collect one row per sample from all ranks, in the order of the data set.

        Collective: every rank must call it, even without samples; blocks until all have.

        Args:
            rows: One row for each sample of this rank, in the sampler's order: an array of shape
                `(len(sampler), ...)`, or the arrays of the batches. Anything that numpy can read, such as a
                CPU tensor without gradient. A rank without samples may pass an empty list.
            group: The group over which the rows are gathered; None: the default group of torch.distributed.
            root: The only rank that gets the result; None: all ranks get it.

        Returns:
            Shape `(len(dataset), ...)`; None on ranks other than `root`.

        Raises:
            MismatchError: A rank has more or fewer rows than samples, or rows of another shape or type. Every
                rank raises, with the ranks in the message.
            ConfigError: There is no group, or it has another number of ranks. Or `rows` or `root` of a rank
                are not usable: every rank raises, and the others quote that rank's error.

        Example:
            With two ranks and 3 samples, rank 0 passes [[1], [2]] and rank 1 [[3]]; both get [[1], [2], [3]].
        """
        check = Arguments("gather")
        if group is not None and not hasattr(group, "all_gather"):
            hint = "leave group out for torch.distributed's default group; paceline.init() makes a Group"
            raise check.refuse("group", group, "a paceline.Group", hint, is_type=True)
        mine, refused = np.empty((0,)), None
        try:
            if root is not None:
                root = check.whole("root", root, least=0, most=self.num_replicas - 1)
            mine = _joined(rows)
        except ConfigError as error:  # raised after it was sent to the other ranks, which wait
            refused = error
        try:
            group = _TorchGroup() if group is None else group
        except ConfigError as error:
            raise refused or error from None
        kind = self._agree(mine, group, refused)
        if kind is None:
            return np.empty((0, *mine.shape[1:]), mine.dtype) if root in (None, self.rank) else None
        dtype, shape = kind
        most = len(self.part(0))
        padded = np.zeros((most, *shape), dtype)
        if len(mine):
            padded[: len(mine)] = mine
        # As bytes, because a group may not support every type.
        gathered = group.all_gather(padded.reshape(-1).view(np.uint8))
        if root is not None and self.rank != root:
            return None
        stacked = gathered.reshape(-1).view(dtype).reshape(self.num_replicas, most, *shape)
        return np.concatenate([stacked[rank, : len(self.part(rank))] for rank in range(self.num_replicas)])

    def _agree(
        self, mine: Array, group: Gathers, refused: ConfigError | None
    ) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
        """Type and shape of a row; None if no rank has one. Raises on all ranks if they do not match."""
        facts = _describe(mine)
        if refused is not None:
            facts[0] = _REFUSED
        gathered = group.all_gather(facts)
        if len(gathered) != self.num_replicas:
            raise ConfigError(
                "gather: the group has another number of ranks than the sampler.",
                expected=_ranks(self.num_replicas),
                got=_ranks(len(gathered)),
                hint="make the sampler with the group's size and rank, or pass the group it was made for",
            )
        counts = gathered[:, 0].tolist()
        if _REFUSED in counts:
            _raise_refused([rank for rank, count in enumerate(counts) if count == _REFUSED], refused, group)
        wrong = {rank: n for rank, n in enumerate(counts) if n != len(self.part(rank))}
        if wrong:
            raise MismatchError(
                f"gather: {format_ranks(wrong)} of {self.num_replicas} passed another number of rows than "
                "it has samples.",
                expected=", ".join(f"rank {rank}: {len(self.part(rank))}" for rank in wrong),
                got=", ".join(f"rank {rank}: {count}" for rank, count in wrong.items()),
                likely="a loader with drop_last=True, or another sampler",
                ranks=tuple(wrong),
            )
        kinds = {tuple(row[1:].tolist()): rank for rank, row in enumerate(gathered) if row[0]}
        if any(kind[0] == 0 for kind in kinds):
            ranks = [rank for kind, rank in kinds.items() if kind[0] == 0]
            raise MismatchError(f"gather: the rows of {format_ranks(ranks)} are no numbers.", ranks=(*ranks,))
        if len(kinds) > 1:
            spelled = [f"rank {rank}: {_spell(kind)}" for kind, rank in kinds.items()]
            raise MismatchError("gather: ranks have rows of different shape or type.", got=", ".join(spelled))
        return _kind_of(next(iter(kinds))) if kinds else None


_MOST_DIMS = 14
_REFUSED = -1  # in place of the number of rows: this rank's arguments are not usable
_MOST_TEXT_BYTES = 4000


def _raise_refused(failed: Sequence[int], own: ConfigError | None, group: Gathers) -> NoReturn:
    text = str(own or "").encode()[:_MOST_TEXT_BYTES].ljust(_MOST_TEXT_BYTES, b"\0")
    gathered = group.all_gather(np.frombuffer(text, np.uint8).copy())
    if own is not None:
        raise own
    texts = [gathered[rank].tobytes().rstrip(b"\0").decode(errors="ignore") for rank in failed]
    raise ConfigError(
        f"gather: {format_ranks(failed)} of {len(gathered)} could not hand in rows.",
        seen="\n".join(f"rank {rank}: {text}" for rank, text in zip(failed, texts)),
        hint=f"mend what {format_ranks(failed)} passed",
        ranks=tuple(failed),
    )


def _describe(rows: Array) -> npt.NDArray[np.int64]:
    shape = rows.shape[1:]
    if rows.dtype.kind not in "biufc" or len(shape) > _MOST_DIMS:
        return np.array([len(rows), *[0] * (_MOST_DIMS + 3)], np.int64)
    kind = [ord(rows.dtype.kind), rows.dtype.itemsize, len(shape), *shape]
    return np.array([len(rows), *kind, *[0] * (_MOST_DIMS - len(shape))], np.int64)


def _kind_of(facts: tuple[int, ...]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return np.dtype(f"{chr(facts[0])}{facts[1]}"), facts[3 : 3 + facts[2]]


def _spell(facts: tuple[int, ...]) -> str:
    dtype, shape = _kind_of(facts)
    return f"{dtype}, shape {shape}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _joined(rows: Array | Sequence[Array]) -> Array:
    expected = "an array with a row for each sample, or the arrays of the batches in a list"
    hint = "for a rank without samples: rows=[]"
    try:
        if isinstance(rows, (list, tuple)):
            arrays = [np.asarray(part) for part in rows]
            return np.concatenate(arrays) if arrays else np.empty((0,))
        array = np.asarray(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Arguments("gather").refuse("rows", rows, expected, hint, seen=str(error)) from None
    if array.ndim == 0:
        raise Arguments("gather").refuse("rows", rows, expected, hint)
    return array


class _TorchGroup:
    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        distributed = getattr(self._torch, "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "gather: there is no group to collect over.",
                expected="a paceline.Group, or an initialised torch.distributed",
                hint="sampler.gather(rows, group)",
            )

    def all_gather(self, array: Array) -> Array:
        mine = self._torch.from_numpy(np.ascontiguousarray(array))
        gathered = [self._torch.empty_like(mine) for _ in range(self._torch.distributed.get_world_size())]
        self._torch.distributed.all_gather(gathered, mine)
        return np.stack([part.numpy() for part in gathered])
