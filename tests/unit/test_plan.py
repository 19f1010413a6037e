"""The plan: every byte in exactly one bucket, every parameter one aligned range, caps kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.reducer.plan import (
    ALIGNMENT_BYTES,
    SEGMENT_ELEMENTS,
    BucketLayout,
    ParameterSpec,
    Plan,
    bucket_layout,
    complete_order,
    plan_buckets,
    plan_whole_buckets,
)

MIB = 1 << 20
ITEMSIZES = {"float32": 4, "float16": 2, "float64": 8}


def spec(numel: int, dtype: str = "float32", device: str = "cpu", name: str = "p") -> ParameterSpec:
    return ParameterSpec(name, numel, dtype, ITEMSIZES[dtype], device)


specs = st.lists(
    st.builds(
        spec,
        st.one_of(st.integers(0, 100), st.integers(0, 5 * SEGMENT_ELEMENTS)),
        st.sampled_from(sorted(ITEMSIZES)),
        st.sampled_from(["cpu", "cuda:0"]),
    ),
    max_size=12,
)
caps = st.one_of(st.integers(1, 4096), st.integers(1, 4 * MIB))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int]:
    parameters = draw(specs)
    cap = draw(caps)
    order = draw(st.one_of(st.none(), st.permutations(range(len(parameters)))))
    plan = plan_buckets(parameters, bucket_cap_bytes=cap, first_bucket_bytes=draw(caps), order=order)
    return plan, cap


def place(plan: Plan, index: int) -> range:
    return range(plan.offsets[index], plan.offsets[index] + plan.parameters[index].nbytes)


def parameters_lie_apart_aligned_and_inside(plan: Plan, cap: int) -> None:
    places = sorted((place(plan, i) for i in range(len(plan.parameters))), key=lambda p: (p.start, p.stop))
    assert all(p.start % ALIGNMENT_BYTES == 0 and p.stop <= plan.buffer_bytes for p in places)
    assert all(a.stop <= b.start for a, b in pairwise(places))


def buckets_and_sections_tile_the_buffer(plan: Plan, cap: int) -> None:
    for ranges in (plan.buckets, plan.sections):
        ordered = sorted(ranges, key=lambda part: (part.begin_byte, part.end_byte))
        edges = [0, *(part.end_byte for part in ordered)]
        assert [part.begin_byte for part in ordered] == edges[:-1]
        assert edges[-1] == plan.buffer_bytes


def a_bucket_lists_exactly_the_parameters_in_it(plan: Plan, cap: int) -> None:
    for bucket in plan.buckets:
        section = plan.sections[bucket.section]
        overlapping = {
            index
            for index in range(len(plan.parameters))
            if place(plan, index).start < bucket.end_byte
            and place(plan, index).stop > bucket.begin_byte
            and plan.parameters[index].numel
        }
        assert set(bucket.parameters) == overlapping
        assert section.begin_byte <= bucket.begin_byte < bucket.end_byte <= section.end_byte
        kinds = {(plan.parameters[i].dtype, plan.parameters[i].device) for i in bucket.parameters}
        assert kinds == {(section.dtype, section.device)}


def a_bucket_exceeds_its_cap_only_by_alignment_or_by_one_block(plan: Plan, cap: int) -> None:
    for bucket in plan.buckets:
        segment_bytes = SEGMENT_ELEMENTS * plan.sections[bucket.section].itemsize
        assert bucket.nbytes < cap + ALIGNMENT_BYTES or bucket.nbytes <= segment_bytes


def parameters_are_split_only_between_blocks_and_only_when_too_large(plan: Plan, cap: int) -> None:
    for bucket in plan.buckets:
        for index in bucket.parameters:
            inside = bucket.end_byte - plan.offsets[index]
            if inside < plan.parameters[index].nbytes:
                assert inside % (SEGMENT_ELEMENTS * plan.parameters[index].itemsize) == 0
                assert plan.parameters[index].nbytes > cap or bucket is first_of_section(plan, bucket.section)


def first_of_section(plan: Plan, section: int) -> object:
    return min((b for b in plan.buckets if b.section == section), key=lambda bucket: bucket.begin_byte)


def buckets_are_listed_as_they_become_complete(plan: Plan, cap: int) -> None:
    last = [max(plan.order.index(i) for i in bucket.parameters) for bucket in plan.buckets]
    assert last == sorted(last)


@given(plans())
def test_any_parameters_are_planned(planned: tuple[Plan, int]) -> None:
    for check in (
        parameters_lie_apart_aligned_and_inside,
        buckets_and_sections_tile_the_buffer,
        a_bucket_lists_exactly_the_parameters_in_it,
        a_bucket_exceeds_its_cap_only_by_alignment_or_by_one_block,
        parameters_are_split_only_between_blocks_and_only_when_too_large,
        buckets_are_listed_as_they_become_complete,
    ):
        check(*planned)


def test_default_order_is_reverse_registration() -> None:
    plan = plan_buckets([spec(10), spec(10)], bucket_cap_bytes=MIB, first_bucket_bytes=MIB)
    assert plan.offsets == (64, 0)
    assert [(b.begin_byte, b.end_byte) for b in plan.buckets] == [(0, 128)]


def test_given_order_is_the_buffer_order() -> None:
    plan = plan_buckets(
        [spec(16), spec(16), spec(16)], bucket_cap_bytes=64, first_bucket_bytes=64, order=[1, 2, 0]
    )
    assert plan.offsets == (128, 0, 64)
    assert [bucket.parameters for bucket in plan.buckets] == [(1,), (2,), (0,)]


def test_first_bucket_is_small_and_a_large_parameter_spreads() -> None:
    plan = plan_buckets([spec(10 * MIB // 4)], bucket_cap_bytes=4 * MIB, first_bucket_bytes=MIB)
    assert [bucket.nbytes // MIB for bucket in plan.buckets] == [1, 4, 4, 1]


def test_no_parameter_is_an_empty_plan() -> None:
    plan = plan_buckets([], bucket_cap_bytes=1, first_bucket_bytes=1)
    assert (plan.buffer_bytes, plan.buckets, plan.sections) == (0, (), ())


@pytest.mark.parametrize("order", [[0, 0], [0], [0, 1, 2], [1, 2]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ConfigError, match="every parameter once"):
        plan_buckets([spec(1), spec(1)], bucket_cap_bytes=1, first_bucket_bytes=1, order=order)


@pytest.mark.parametrize(("cap", "first"), [(0, 1), (1, 0), (-5, 1)])
def test_caps_must_be_positive(cap: int, first: int) -> None:
    with pytest.raises(ConfigError, match="at least one byte"):
        plan_buckets([spec(1)], bucket_cap_bytes=cap, first_bucket_bytes=first)


def test_complete_order_appends_what_was_not_seen() -> None:
    assert complete_order([3, 1, 3], 5) == (3, 1, 4, 2, 0)


# --- buckets of whole parameters: they tile each section without gaps, whatever the sizes and caps ---

WHOLE = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64"])), max_size=12)


@given(WHOLE, st.lists(st.integers(1, 200), min_size=1, max_size=3))
def test_buckets_tile_sections_and_are_no_longer_than_they_must_be(
    sizes: list[tuple[int, str]], caps: list[int]
) -> None:
    widths = {"float32": 4, "float64": 8}
    specs = [ParameterSpec(str(i), n, dtype, widths[dtype], "cpu") for i, (n, dtype) in enumerate(sizes)]
    plan = plan_whole_buckets(specs, caps_bytes=caps)
    for bucket in plan.buckets:
        section = plan.sections[bucket.section]
        assert (bucket.begin_byte, bucket.end_byte) == (section.begin_byte, section.end_byte)
        assert bucket.nbytes == sum(specs[index].nbytes for index in bucket.parameters)
        assert bucket.nbytes - specs[bucket.parameters[-1]].nbytes < max(caps) or bucket.nbytes == 0
        place = bucket.begin_byte
        for index in bucket.parameters:
            assert plan.offsets[index] == place and specs[index].dtype == section.dtype
            place += specs[index].nbytes
    for before, after in zip(plan.sections, plan.sections[1:]):
        assert before.end_byte <= after.begin_byte and after.begin_byte % after.itemsize == 0
        if (before.dtype, before.device) == (after.dtype, after.device):
            assert before.end_byte - before.begin_byte >= min(caps)
    placed = [index for bucket in plan.buckets for index in bucket.parameters]
    assert len(placed) == len(set(placed))
    assert set(placed) >= {index for index, spec in enumerate(specs) if spec.numel}


def test_a_cap_must_be_positive() -> None:
    for caps in ([], [0]):
        with pytest.raises(ConfigError, match="at least one byte"):
            plan_whole_buckets([], caps_bytes=caps)


def test_the_layout_names_what_lies_in_each_bucket():
    large = 2 * SEGMENT_ELEMENTS
    parameters = [spec(large + 5, name="large"), spec(0, name="empty"), spec(3, "float16", name="half")]
    plan = plan_buckets(parameters, bucket_cap_bytes=SEGMENT_ELEMENTS * 4, first_bucket_bytes=MIB)
    piece = SEGMENT_ELEMENTS * 4
    assert bucket_layout(plan) == (
        BucketLayout(("half",), (6,), 64, "float16", "cpu"),
        BucketLayout(("large",), (piece,), piece, "float32", "cpu"),
        BucketLayout(("large",), (piece,), piece, "float32", "cpu"),
        BucketLayout(("large",), (20,), 64, "float32", "cpu"),
    )


@given(st.lists(st.builds(spec, st.integers(0, 3 * SEGMENT_ELEMENTS)), max_size=8), caps)
def test_the_layout_holds_each_byte_of_each_gradient_once(parameters, cap):
    parameters = [replace(each, name=str(i)) for i, each in enumerate(parameters)]
    plans = (
        plan_buckets(parameters, bucket_cap_bytes=cap, first_bucket_bytes=cap),
        plan_whole_buckets(parameters, caps_bytes=[cap]),
    )
    for plan in plans:
        held = dict.fromkeys((p.name for p in parameters), 0)
        for bucket in bucket_layout(plan):
            assert 0 < sum(bucket.sizes_bytes) <= bucket.nbytes
            for name, size in zip(bucket.parameters, bucket.sizes_bytes, strict=True):
                held[name] += size
        assert held == {p.name: p.nbytes for p in parameters}
