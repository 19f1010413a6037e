"""Hashes of a model and an optimizer, to compare them between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paddle

from paceline import _core
from paceline.paddle.model.parameters import nbytes
from paceline.reducer.backward.drift import places_to_sample
from paceline.reducer.replica_check import Entry, flattened, hash_of_plain


def make_sampler(parameters: Sequence[paddle.Tensor]) -> Callable[[], int]:
    """A function that hashes a few bytes of them: microseconds. 0: they can't be read, or have changed."""
    sizes = [nbytes(p) if p.place.is_cpu_place() and p.is_contiguous() else 0 for p in parameters]
    places = [(parameters[index], begin, size) for index, begin, size in places_to_sample(sizes)]
    lengths = [size for _, _, size in places]

    def take() -> int:
        if not all(p.place.is_cpu_place() and nbytes(p) >= begin + size for p, begin, size in places):
            return 0
        return _core.sample_all([p.data_ptr() + begin for p, begin, _ in places], lengths)

    return take


def hash_model(
    parameters: Mapping[str, paddle.Tensor], buffers: Mapping[str, paddle.Tensor], optimizer: Any
) -> list[Entry]:
    """The hash of each tensor, and of what an optimizer holds; None: there is none."""
    named = [("parameter", name, p) for name, p in parameters.items()]
    named += [("buffer", name, buffer) for name, buffer in buffers.items()]
    plain = []
    if optimizer is not None:
        for name, value in _held_by(optimizer, {p.name: name for name, p in parameters.items()}):
            if isinstance(value, paddle.Tensor):
                named.append(("optimizer", name, value))
            elif (hashed := hash_of_plain(value)) is not None:
                plain.append(Entry("optimizer", name, hashed))
    whole = [(value if value.place.is_cpu_place() else value.cpu()).contiguous() for _, _, value in named]
    hashes = _core.hash_all([each.data_ptr() for each in whole], [nbytes(each) for each in whole])
    return [*(Entry(kind, name, value) for (kind, name, _), value in zip(named, hashes, strict=True)), *plain]


def _held_by(optimizer: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """What an optimizer holds; Paddle's name of a parameter is the beginning of those of its state."""
    yield "learning rate", float(optimizer.get_lr())
    for key, value in flattened("", optimizer.state_dict()):
        key = key.removeprefix(".")
        owner = max((own for own in names if f".{key}".find(f".{own}") >= 0), key=len, default=None)
        yield key if owner is None else key.replace(owner, names[owner], 1), value
