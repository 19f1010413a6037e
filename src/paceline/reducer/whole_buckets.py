"""Buckets for hooks that look into them: whole parameters, one right after the other. A pure function.

A hook on buckets (compression, say) gets the gradients of whole parameters and one flat buffer of exactly
them. `plan_buckets` cuts large parameters and pads small ones; here neither happens, so a bucket may exceed
its cap by one parameter, as in torch. Each bucket is a section, memory of its own: there are hooks that
lengthen a buffer for a while (batched PowerSGD).

Imports only the standard library, `errors` and `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ConfigError
from paceline.reducer.plan import ALIGNMENT_BYTES, Bucket, ParameterSpec, Plan, Section


def plan_whole_buckets(
    parameters: Sequence[ParameterSpec], *, caps_bytes: Sequence[int], order: Sequence[int] | None = None
) -> Plan:
    """Lay the gradients out without gaps and cut between parameters only.

    Args:
        parameters: In registration order.
        caps_bytes: A bucket is full once it holds this much: the first bucket of each kind the first
            figure, and so on; the last figure counts for all others.
        order: Parameter indices in the order in which backward makes their gradients; None: the reverse
            of registration.

    Raises:
        ConfigError: There is no cap, or one is not positive.

    Example:
        Float32 parameters of 10, 10 and 1 elements and caps of 41 bytes: buckets of 11 and 10 elements.
    """
    if not caps_bytes or min(caps_bytes) < 1:
        raise ConfigError("A bucket must hold at least one byte.", got=f"caps_bytes={tuple(caps_bytes)}")
    specs = tuple(parameters)
    expected = tuple(order) if order is not None else tuple(reversed(range(len(specs))))
    kinds: dict[tuple[str, str], list[int]] = {}
    for index in expected:
        kinds.setdefault((specs[index].device, specs[index].dtype), []).append(index)
    offsets = [0] * len(specs)
    sections: list[Section] = []
    buckets: list[Bucket] = []
    end = 0
    for members in kinds.values():
        for group in _fill(members, specs, caps_bytes):
            begin = end
            for index in group:
                offsets[index] = end
                end += specs[index].nbytes
            if end > begin:
                buckets.append(Bucket(begin, end, len(sections), tuple(group)))
            first = specs[group[0]]
            sections.append(Section(begin, end, first.dtype, first.itemsize, first.device))
            end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    position = {index: place for place, index in enumerate(expected)}
    buckets.sort(key=lambda bucket: max(position[index] for index in bucket.parameters))
    return Plan(specs, expected, tuple(offsets), end, tuple(sections), tuple(buckets))


def _fill(members: list[int], specs: tuple[ParameterSpec, ...], caps_bytes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    held = 0
    for index in members:
        if held >= caps_bytes[min(len(groups), len(caps_bytes)) - 1]:
            groups.append([])
            held = 0
        groups[-1].append(index)
        held += specs[index].nbytes
    return groups
