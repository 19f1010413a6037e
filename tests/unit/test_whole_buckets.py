"""Buckets of whole parameters: they tile each section without gaps, whatever the sizes and caps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.reducer.plan import ParameterSpec
from paceline.reducer.whole_buckets import plan_whole_buckets

SPECS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "float64"])), max_size=12)


@given(SPECS, st.lists(st.integers(1, 200), min_size=1, max_size=3))
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
