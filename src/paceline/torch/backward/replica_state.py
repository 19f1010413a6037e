"""Hashes of a model and an optimizer, to compare them between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline import _core
from paceline.reducer.backward.drift import places_to_sample
from paceline.reducer.replica_check import Entry, flattened, hash_of_plain
from paceline.torch.backward.gradient_hooks import HAS_EXCHANGE_API
from paceline.torch.model.inner_tensors import inner_tensors, is_plain

Named = tuple[str, str, torch.Tensor]
"""Kind, name and value."""


def make_notes(parameters: Sequence[torch.Tensor]) -> _core.IterationNotes:
    """Notes of writes to three of them, but for those through .data; and of a few bytes of some."""
    counted = [parameters[0], parameters[len(parameters) // 2], parameters[-1]]
    sizes = [p.nbytes if p.is_cpu and is_plain(p) and p.is_contiguous() else 0 for p in parameters]
    places = [(parameters[index], begin, size) for index, begin, size in places_to_sample(sizes)]
    begins, lengths = [begin for _, begin, _ in places], [size for _, _, size in places]
    if HAS_EXCHANGE_API:
        return _core.IterationNotes(counted, "_version", [p for p, _, _ in places], begins, lengths)

    def take_sample() -> int:
        pointers = []
        for parameter, begin, size in places:
            if not parameter.is_cpu or not parameter.is_contiguous() or parameter.nbytes < begin + size:
                return 0
            pointers.append(parameter.data_ptr() + begin)
        return _core.sample_all(pointers, lengths)

    return _core.IterationNotes(lambda: sum(parameter._version for parameter in counted), take_sample)


def hash_model(
    parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], optimizer: Any
) -> list[Entry]:
    """The hash of each tensor, and of what an optimizer holds.

    Args:
        parameters: By name.
        buffers: By name.
        optimizer: With `param_groups` and `state` as torch's; None: there is none.
    """
    named: list[Named] = [("parameter", name, p) for name, p in parameters.items()]
    named += [("buffer", name, buffer) for name, buffer in buffers.items()]
    plain: list[Entry] = []
    if optimizer is not None:
        for name, value in _held_by(optimizer, {id(p): name for name, p in parameters.items()}):
            if isinstance(value, torch.Tensor):
                named.append(("optimizer", name, value))
            elif (hashed := hash_of_plain(value)) is not None:
                plain.append(Entry("optimizer", name, hashed))
    return [*_hash_tensors(named), *plain]


def _hash_tensors(named: Iterable[Named]) -> Iterator[Entry]:
    names, pointers, sizes, kept = [], [], [], []
    for kind, name, tensor in named:
        for part_name, part in inner_tensors(name, tensor):
            if part.is_meta or (part is not tensor and not part.numel()):
                continue
            whole = part.detach().cpu().contiguous()
            kept.append(whole)  # until they are hashed
            names.append((kind, part_name))
            pointers.append(whole.data_ptr())
            sizes.append(whole.nbytes)
    hashes = _core.hash_all(pointers, sizes)
    return (Entry(kind, name, value) for (kind, name), value in zip(names, hashes, strict=True))


def _held_by(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """What an optimizer holds for each parameter and each group of them."""
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield from flattened(f"group {number}", options)
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {number}.params.{place}")
            yield from flattened(name, optimizer.state.get(parameter, {}))
