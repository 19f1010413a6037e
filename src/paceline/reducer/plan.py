"""Lays gradients out in memory and cuts them into buckets: a pure function of the parameters.

Words: the *gradient buffer* is one flat memory that holds every gradient of a model; a *section* is the part
of it with one device and one dtype; a *bucket* is a range of bytes of one section that is reduced at once; a
*segment* is SEGMENT_ELEMENTS elements of one parameter, counted from its start.

Parameters lie in the gradient buffer one after another, in the order in which backward computes their
gradients, and buckets are ranges of it. So a large parameter spans several buckets and is still one
contiguous view. Buckets split a parameter only between segments, so that statistics summed segment by segment
do not depend on the bucket size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from paceline import _core
from paceline.errors import ConfigError

_Sliceable = TypeVar("_Sliceable", bound=Any)  # a flat tensor of any framework

SEGMENT_ELEMENTS = _core.SEGMENT_ELEMENTS
ALIGNMENT_BYTES = _core.ALIGNMENT_BYTES
"""A cache line. No two parameters share one, so vector loads at the start of a parameter are aligned."""


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of a parameter that a plan uses. `dtype` and `device` are only compared."""

    name: str
    numel: int
    dtype: str
    itemsize: int
    device: str

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Section:
    """The part of the gradient buffer that holds one dtype on one device."""

    begin_byte: int
    end_byte: int
    dtype: str
    itemsize: int
    device: str


@dataclass(frozen=True)
class Bucket:
    """A range of bytes of the gradient buffer; `parameters` are the indices of those with elements in it."""

    begin_byte: int
    end_byte: int
    section: int
    parameters: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.end_byte - self.begin_byte


@dataclass(frozen=True)
class Plan:
    """The gradient buffer and buckets of a model.

    Attributes:
        parameters: As given; everywhere in Paceline, a parameter's index is its index here.
        order: Parameter indices in the order in which their gradients are expected.
        offsets: First byte of each parameter in the gradient buffer, by index.
        buffer_bytes: Size of the gradient buffer; a multiple of 64.
        sections: Tile the gradient buffer.
        buckets: Tile the gradient buffer too; listed in the order in which they are expected to be complete.
    """

    parameters: tuple[ParameterSpec, ...]
    order: tuple[int, ...]
    offsets: tuple[int, ...]
    buffer_bytes: int
    sections: tuple[Section, ...]
    buckets: tuple[Bucket, ...]


def plan_buckets(
    parameters: Sequence[ParameterSpec],
    *,
    bucket_cap_bytes: int,
    first_bucket_bytes: int,
    order: Sequence[int] | None = None,
    caps_bytes: Sequence[int] = (),
) -> Plan:
    """Lay the gradients out in a gradient buffer and cut it into buckets.

    A parameter that fits under the cap is never split. A larger one is cut into pieces of the size of the
    cap, rounded down to whole segments. A bucket exceeds its cap only if a single segment does.

    Args:
        parameters: In registration order.
        bucket_cap_bytes: Largest size of a bucket.
        first_bucket_bytes: Largest size of the first bucket of each section: small, so that reducing
            starts early in the backward pass.
        order: Parameter indices in the order in which backward computes their gradients; None: the reverse
            of registration, which is right for a model whose layers run in the order of their creation.
        caps_bytes: Used in place of both if not empty: the largest sizes of the first bucket of each section,
            of the second, and so on; the last one is for all others.

    Raises:
        ConfigError: A cap is not positive, or `order` is not a permutation.

    Example:
        Two float32 parameters of 10 elements and a cap of 1 MiB: offsets (64, 0), one bucket of 128 bytes.
    """
    caps = tuple(caps_bytes) or (min(first_bucket_bytes, bucket_cap_bytes), bucket_cap_bytes)
    if min(caps) < 1:
        raise ConfigError(
            "A bucket must hold at least one byte.",
            got=f"bucket_cap_bytes={bucket_cap_bytes}, first_bucket_bytes={first_bucket_bytes}"
            + (f", caps_bytes={tuple(caps_bytes)}" if caps_bytes else ""),
        )
    specs = tuple(parameters)
    expected = tuple(order) if order is not None else tuple(reversed(range(len(specs))))
    if sorted(expected) != list(range(len(specs))):
        raise ConfigError(
            "The order of the gradients does not list every parameter once.",
            expected=f"a permutation of 0 ... {len(specs) - 1}",
            got=str(expected),
        )
    offsets, sections = _lay_out(specs, expected)
    buckets = [
        bucket
        for number, members in enumerate(_members(specs, expected))
        for bucket in _cut(number, members, specs, offsets, caps)
    ]
    position = {index: place for place, index in enumerate(expected)}
    buckets.sort(key=lambda bucket: (max(position[index] for index in bucket.parameters), bucket.begin_byte))
    buffer_bytes = sections[-1].end_byte if sections else 0
    return Plan(specs, expected, offsets, buffer_bytes, sections, tuple(buckets))


def plan_whole_buckets(
    parameters: Sequence[ParameterSpec], *, caps_bytes: Sequence[int], order: Sequence[int] | None = None
) -> Plan:
    """Lay the gradients out without gaps and cut only between parameters, for hooks that read buckets.

    A hook on buckets (for example compression) gets the gradients of whole parameters and one flat buffer of
    exactly these. So no large parameter is cut and no small one padded, and a bucket may exceed its cap by
    one parameter, as in torch. Each bucket is a section with its own memory, because some hooks lengthen a
    buffer for a while (batched PowerSGD).

    Args:
        parameters: In registration order.
        caps_bytes: A bucket is full when it holds this many bytes. The first figure is for the first bucket
            of each device and dtype, and so on; the last figure is for all others.
        order: Parameter indices in the order in which backward computes their gradients; None: the reverse
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
            end = _aligned(end)
    position = {index: place for place, index in enumerate(expected)}
    buckets.sort(key=lambda bucket: max(position[index] for index in bucket.parameters))
    return Plan(specs, expected, tuple(offsets), end, tuple(sections), tuple(buckets))


class BucketCaps(Protocol):
    """The largest sizes of buckets, in the form of both wrappers' configs.

    Attributes:
        first_bucket_bytes: The largest size of the first bucket.
        bucket_cap_bytes: The largest size of all others.
        bucket_caps_bytes: The largest sizes of the first, the second, ...; used in place of both, if not
            empty.
    """

    @property
    def first_bucket_bytes(self) -> int: ...
    @property
    def bucket_cap_bytes(self) -> int: ...
    @property
    def bucket_caps_bytes(self) -> Sequence[int]: ...


class CappedBuckets:
    def __init__(self, caps: BucketCaps, most: int) -> None:
        self.first_bucket_bytes = min(caps.first_bucket_bytes, most)
        self.bucket_cap_bytes = min(caps.bucket_cap_bytes, most)
        self.bucket_caps_bytes = tuple(min(cap, most) for cap in caps.bucket_caps_bytes)


def plan_gradients(
    parameters: Sequence[ParameterSpec], caps: BucketCaps, order: Sequence[int] | None, *, whole: bool
) -> Plan:
    """The plan of a model's gradients, with whole parameters in each bucket or not."""
    first, others, all_caps = caps.first_bucket_bytes, caps.bucket_cap_bytes, caps.bucket_caps_bytes
    if whole:
        return plan_whole_buckets(parameters, caps_bytes=all_caps or (first, others), order=order)
    return plan_buckets(
        parameters, bucket_cap_bytes=others, first_bucket_bytes=first, order=order, caps_bytes=all_caps
    )


def has_one_order(plan: Plan) -> bool:
    """Whether the order of gradients makes no difference, because each kind of parameter has one bucket."""
    return len(plan.buckets) <= len({(section.dtype, section.device) for section in plan.sections})


def complete_order(seen: Iterable[int], count: int) -> tuple[int, ...]:
    """The observed order of gradients, then the parameters that it lacks, in reverse registration order."""
    shown = list(dict.fromkeys(seen))
    missing = set(range(count)).difference(shown)
    return (*shown, *sorted(missing, reverse=True))


def pieces_of(plan: Plan, number: int) -> list[tuple[int, int, int]]:
    """(parameter, its first element there, the one after its last) for each parameter in a bucket, where
    elements count from the beginning of the section.
    """
    bucket = plan.buckets[number]
    section = plan.sections[bucket.section]
    pieces = []
    for index in bucket.parameters:
        begin = max(bucket.begin_byte, plan.offsets[index])
        end = min(bucket.end_byte, plan.offsets[index] + plan.parameters[index].nbytes)
        first, last = ((byte - section.begin_byte) // section.itemsize for byte in (begin, end))
        pieces.append((index, first, last))
    return pieces


def bucket_in(plan: Plan, sections: Sequence[_Sliceable], number: int) -> _Sliceable:
    bucket = plan.buckets[number]
    section = plan.sections[bucket.section]
    first, last = (
        (byte - section.begin_byte) // section.itemsize for byte in (bucket.begin_byte, bucket.end_byte)
    )
    elements: _Sliceable = sections[bucket.section][first:last]
    return elements


def pieces_in(plan: Plan, sections: Sequence[_Sliceable], number: int) -> list[tuple[int, _Sliceable]]:
    memory = sections[plan.buckets[number].section]
    return [(index, memory[first:last]) for index, first, last in pieces_of(plan, number) if last > first]


@dataclass(frozen=True)
class BucketLayout:
    """One bucket of a wrapped model: gradients that are averaged together.

    Attributes:
        parameters: Names of the parameters in it, in the order in which their gradients are expected. A
            parameter larger than a bucket is in several.
        sizes_bytes: For each of them, the bytes of its gradient in this bucket.
        nbytes: Size of the bucket: the sum of `sizes_bytes` and the gaps that align each gradient to a
            multiple of 64 bytes.
        dtype: Element type in which the gradients are averaged, for example "float32".
        device: Where the bucket lies, for example "cpu".
    """

    parameters: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    nbytes: int
    dtype: str
    device: str


def bucket_layout(plan: Plan) -> tuple[BucketLayout, ...]:
    """The buckets of a plan, in the order in which they are expected to be complete."""
    layouts = []
    for number, bucket in enumerate(plan.buckets):
        section = plan.sections[bucket.section]
        pieces = [
            (plan.parameters[index].name, last - first)
            for index, first, last in pieces_of(plan, number)
            if last > first
        ]
        layouts.append(
            BucketLayout(
                tuple(name for name, _ in pieces),
                tuple(elements * section.itemsize for _, elements in pieces),
                bucket.nbytes,
                section.dtype,
                section.device,
            )
        )
    return tuple(layouts)


def _members(specs: tuple[ParameterSpec, ...], order: tuple[int, ...]) -> list[list[int]]:
    sections: dict[tuple[str, str], list[int]] = {}
    for index in order:
        sections.setdefault((specs[index].device, specs[index].dtype), []).append(index)
    return list(sections.values())


def _lay_out(
    specs: tuple[ParameterSpec, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Section, ...]]:
    offsets = [0] * len(specs)
    sections = []
    end = 0
    for members in _members(specs, order):
        begin = end
        for index in members:
            offsets[index] = end
            end = _aligned(end + specs[index].nbytes)
        first = specs[members[0]]
        sections.append(Section(begin, end, first.dtype, first.itemsize, first.device))
    return tuple(offsets), tuple(sections)


def _cut(
    section: int,
    members: list[int],
    specs: tuple[ParameterSpec, ...],
    offsets: tuple[int, ...],
    caps: tuple[int, ...],
) -> list[Bucket]:
    """Cut one section into buckets that tile it; a gap between parameters belongs to the one before it."""
    buckets: list[Bucket] = []
    inside: list[int] = []
    begin = end = offsets[members[0]]

    def close() -> None:
        nonlocal begin, inside
        if end > begin:
            buckets.append(Bucket(begin, end, section, tuple(inside)))
        begin, inside = end, []

    for index in members:
        last_byte = offsets[index] + specs[index].nbytes
        while end < last_byte:
            limit = caps[min(len(buckets), len(caps) - 1)]
            if end > begin and last_byte - begin > limit:
                close()
                continue
            inside.append(index)
            if last_byte - begin <= limit:
                end = _aligned(last_byte)
            else:
                segment_bytes = SEGMENT_ELEMENTS * specs[index].itemsize
                end = min(begin + max(1, limit // segment_bytes) * segment_bytes, _aligned(last_byte))
                close()
    close()
    return buckets


def _aligned(byte: int) -> int:
    return -(-byte // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
