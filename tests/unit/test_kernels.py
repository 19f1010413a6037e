"""The reduction kernels against a numpy oracle, bit for bit, on each instruction set of this processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import paceline.collectives.failures  # noqa: F401  # the core's failures become its exceptions
from paceline import _core
from tests.unit.reduction_oracle import (
    FLOATS,
    STORED,
    Array,
    DType,
    Op,
    expected_norm,
    expected_result,
    nonfinite_ranks,
    random_arrays,
    to_compute,
    to_stored,
)

SUPPORTED = [(dtype, op) for dtype in DType for op in Op if op != Op.MEAN or dtype in FLOATS]
COUNTS = (0, 1, 7, 15, 16, 17, 511, 512, 1023, 1024, 1025, 2049, 4099)  # around the edges of lanes and blocks
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def named(value: IntEnum) -> str:
    return value.name.lower()


each_type = pytest.mark.parametrize("dtype", DType, ids=named)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=named)
each_16_bit_float = pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=named)
each_reduction = pytest.mark.parametrize(("dtype", "op"), SUPPORTED, ids=named)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow and NaN


@dataclass
class Outcome:
    result: Array
    squared_norm: float
    nonfinite: set[int]


def call(
    dtype: DType, op: Op, inputs: list[Array], outputs: list[Array], weights: list[float] | None = None
) -> Outcome:
    norm, low, high = _core.reduce_arrays(
        int(dtype),
        int(op),
        [array.ctypes.data for array in inputs],
        [array.ctypes.data for array in outputs],
        len(inputs[0]),
        weights,
    )
    mask = low | high << 64
    return Outcome(outputs[0], norm, {rank for rank in range(128) if mask >> rank & 1})


def instruction_sets() -> Iterator[str]:
    """Switch the kernels to each set that this processor has."""
    try:
        for name, isa in _core.ISAS.items():
            if _core.set_isa(isa):
                yield name
    finally:
        assert _core.set_isa(_core.best_isa())


def reduce(dtype: DType, op: Op, arrays: list[Array], weights: list[float] | None = None) -> Outcome:
    """Reduce into a fresh array on each instruction set, and check that all are equal."""
    count = len(arrays[0])
    first: Outcome | None = None
    for name in instruction_sets():
        buffer = np.full(count + 8, 0x5A, STORED[dtype])
        outcome = call(dtype, op, arrays, [buffer[:count]], weights)
        assert_array_equal(buffer[count:], np.full(8, 0x5A, STORED[dtype]), err_msg=f"written behind, {name}")
        first = first or outcome
        assert_same_bits(dtype, outcome.result, first.result, name)
        assert_array_equal(outcome.squared_norm, first.squared_norm, err_msg=name)
        assert outcome.nonfinite == first.nonfinite, name
    assert first is not None
    return first


def assert_same_bits(dtype: DType, actual: Array, expected: Array, note: object = "") -> None:
    """Equal bits; any NaN may be expected, but the kernels give only the positive quiet one."""
    bits = BITS[STORED[dtype].itemsize]
    expected = expected.copy()
    if dtype in FLOATS and dtype != DType.BFLOAT16:
        expected[np.isnan(expected)] = np.nan
    assert_array_equal(actual.view(bits), expected.view(bits), err_msg=f"{dtype.name} {note}")


def assert_like_oracle(dtype: DType, op: Op, arrays: list[Array], weights: list[float] | None = None) -> None:
    expected = expected_result(dtype, op, arrays, weights)
    outcome = reduce(dtype, op, arrays, weights)
    note = f"{op.name} of {len(arrays)} x {len(arrays[0])}"
    assert_same_bits(dtype, outcome.result, expected, note)
    if dtype in FLOATS:
        assert_array_equal(outcome.squared_norm, expected_norm(dtype, expected), err_msg=note)
        assert outcome.nonfinite == nonfinite_ranks(dtype, arrays), note
    else:
        assert (outcome.squared_norm, outcome.nonfinite) == (0.0, set())


@each_reduction
def test_every_world_size_and_length(dtype: DType, op: Op) -> None:
    for num_ranks in range(1, 10):
        for count in COUNTS if num_ranks in (1, 2, 5) else (0, 1, 17, 1023, 1025):
            assert_like_oracle(dtype, op, random_arrays(dtype, num_ranks, count))


@each_type
def test_many_ranks(dtype: DType) -> None:
    arrays = random_arrays(dtype, 128, 1031)
    for num_ranks in (15, 16, 17, 21, 63, 64, 65, 127, 128):
        assert_like_oracle(dtype, Op.SUM, arrays[:num_ranks])


def test_order_of_additions_is_the_tree() -> None:
    # In float32, 1e8 swallows one or two 2.0 that are added to it, but not the sum of the last four ranks'.
    values = (1e8, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    arrays = [np.full(3, value, np.float32) for value in values]
    assert reduce(DType.FLOAT32, Op.SUM, arrays).result.tolist() == [100000008.0] * 3
    one_by_one = np.float32(1e8)
    for value in values[1:]:
        one_by_one += np.float32(value)
    assert one_by_one == 1e8


@each_float
def test_16_bit_values_are_rounded_once(dtype: DType) -> None:
    arrays = random_arrays(dtype, 7, 1000)
    rounded_each_time = arrays[0]
    for array in arrays[1:]:
        total = to_compute(dtype, rounded_each_time) + to_compute(dtype, array)
        rounded_each_time = to_stored(dtype, total)
    outcome = reduce(dtype, Op.SUM, arrays)
    assert not np.array_equal(outcome.result, rounded_each_time)
    assert_like_oracle(dtype, Op.SUM, arrays)


@each_16_bit_float
def test_every_16_bit_value_survives(dtype: DType) -> None:
    every = np.arange(65536, dtype=np.uint16).view(STORED[dtype])
    for op in Op:
        assert_like_oracle(dtype, op, [every])


@each_16_bit_float
def test_rounding_of_every_16_bit_value_and_its_half(dtype: DType) -> None:
    # Means of two neighbours are ties; sums of far ones round up and down, overflow, and are subnormal.
    every = np.arange(65536, dtype=np.uint16).view(STORED[dtype])
    neighbours = (np.arange(65536) + 1).astype(np.uint16).view(STORED[dtype])
    shuffled = np.random.default_rng(5).permutation(65536).astype(np.uint16).view(STORED[dtype])
    for op in (Op.SUM, Op.MEAN, Op.PRODUCT):
        assert_like_oracle(dtype, op, [every, neighbours])
        assert_like_oracle(dtype, op, [every, shuffled])


@each_float
@pytest.mark.parametrize(
    "weights",
    [
        [1.0, 1.0],
        [3.0, 0.0],
        [32.0, 17.0, 5.0],
        [0.1, 0.7, 0.0, 1.3, 2.0],
        [1.0, 2.0, 4.0, 8.0, 1.0, 16.0, 0.0, 32.0, 0.5],
        [0.0, 0.0, 0.0],
    ],
    ids=str,
)
def test_weighted_mean(dtype: DType, weights: list[float]) -> None:
    for count in (1, 17, 1025):
        assert_like_oracle(dtype, Op.MEAN, random_arrays(dtype, len(weights), count), weights)


@each_float
def test_weight_zero_leaves_a_rank_out_whatever_it_holds(dtype: DType) -> None:
    arrays = random_arrays(dtype, 3, 100)
    nan = to_stored(dtype, np.full(100, np.nan, np.float32))
    outcome = reduce(dtype, Op.MEAN, [arrays[0], nan, arrays[2]], [2.0, 0.0, 5.0])
    assert_same_bits(dtype, outcome.result, expected_result(dtype, Op.MEAN, arrays, [2.0, 0.0, 5.0]))
    assert outcome.nonfinite == set()

    outcome = reduce(dtype, Op.MEAN, [nan, nan, nan], [0.0, 0.0, 0.0])
    assert_same_bits(dtype, outcome.result, to_stored(dtype, np.zeros(100, np.float32)))


@each_float
def test_equal_weights_are_no_weights(dtype: DType) -> None:
    for num_ranks in (1, 2, 3, 5, 8):
        arrays = random_arrays(dtype, num_ranks, 333)
        plain = reduce(dtype, Op.MEAN, arrays)
        weighted = reduce(dtype, Op.MEAN, arrays, [1.0] * num_ranks)
        assert_same_bits(dtype, plain.result, weighted.result)
        assert plain.squared_norm == weighted.squared_norm


@each_reduction
def test_in_place_on_all_ranks(dtype: DType, op: Op) -> None:
    for num_ranks in (1, 2, 3, 4, 9):
        inputs = random_arrays(dtype, num_ranks, 2500)
        if dtype in FLOATS:
            inputs[-1][1234] = to_stored(dtype, np.array([np.inf], np.float32))[0]
        expected = expected_result(dtype, op, inputs)
        nonfinite = nonfinite_ranks(dtype, inputs) if dtype in FLOATS else set()
        for name in instruction_sets():
            arrays = [array.copy() for array in inputs]
            outcome = call(dtype, op, arrays, arrays)
            for array in arrays:
                assert_same_bits(dtype, array, expected, f"{op.name} {name}")
            assert outcome.nonfinite == nonfinite


@each_type
def test_arrays_aligned_to_their_elements_only(dtype: DType) -> None:
    for num_ranks in (1, 2, 3, 5):
        inputs = random_arrays(dtype, num_ranks, 1100)
        where = [slice(1 + rank, 1034 + rank) for rank in range(num_ranks)]
        expected = expected_result(dtype, Op.SUM, [row[part] for row, part in zip(inputs, where)])
        for name in instruction_sets():
            rows = [row.copy() for row in inputs]
            arrays = [row[part] for row, part in zip(rows, where)]
            call(dtype, Op.SUM, arrays, arrays)
            for row, untouched, part in zip(rows, inputs, where):
                assert_same_bits(dtype, row[part], expected, name)
                assert_same_bits(dtype, row[: part.start], untouched[: part.start], name)
                assert_same_bits(dtype, row[part.stop :], untouched[part.stop :], name)


def test_one_output_of_several_and_several_outputs_of_one() -> None:
    arrays = random_arrays(DType.FLOAT32, 3, 1500)
    expected = expected_result(DType.FLOAT32, Op.SUM, arrays)
    kept = [array.copy() for array in arrays]
    call(DType.FLOAT32, Op.SUM, arrays, [arrays[1]])
    assert_same_bits(DType.FLOAT32, arrays[1], expected)
    assert_array_equal(arrays[0], kept[0])
    assert_array_equal(arrays[2], kept[2])

    outputs = [np.empty(1500, np.float32) for _ in range(5)]
    call(DType.FLOAT32, Op.SUM, [kept[0]], outputs)
    for output in outputs:
        assert_same_bits(DType.FLOAT32, output, kept[0])


@pytest.mark.parametrize("op", Op, ids=named)
@each_float
def test_nonfinite_inputs_are_found_wherever_they_are(dtype: DType, op: Op) -> None:
    clean = random_arrays(dtype, 70, 3000)
    cases = [(0, np.inf, {0}), (15, -np.inf, {66}), (1024, np.nan, {3, 64, 69}), (2999, -np.inf, {69})]
    for position, bad, culprits in cases:
        arrays = list(clean)
        for rank in culprits:
            arrays[rank] = clean[rank].copy()
            arrays[rank][position] = to_stored(dtype, np.array([bad], np.float32))[0]
        assert reduce(dtype, op, arrays).nonfinite == culprits


def test_overflow_of_finite_inputs_blames_no_rank() -> None:
    largest = np.full(20, np.finfo(np.float32).max, np.float32)
    outcome = reduce(DType.FLOAT32, Op.SUM, [largest, largest])
    assert np.isinf(outcome.result).all()
    assert (outcome.squared_norm, outcome.nonfinite) == (np.inf, set())


@each_float
@pytest.mark.parametrize("factor", [2 / 3, 0.0, 1.0, 1e-3])
def test_an_array_is_scaled_like_the_oracle(dtype: DType, factor: float) -> None:
    for count in COUNTS:
        array = random_arrays(dtype, 1, count)[0]
        array[:1] = to_stored(dtype, np.array([np.nan if factor == 0 else 1], np.float32))
        values = to_compute(dtype, array)
        scaled = values * values.dtype.type(factor) if factor else np.zeros_like(values)
        for name in instruction_sets():
            buffer = np.append(array, array[:1])
            _core.scale_array(int(dtype), buffer.ctypes.data, count, factor)
            assert_same_bits(dtype, buffer[:count], to_stored(dtype, scaled), name)
            assert_same_bits(dtype, buffer[count:], array[:1], f"behind, {name}")


@each_float
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found_wherever_it_is(dtype: DType, value: float) -> None:
    for count in (*COUNTS, 4095, 4096, 4097, 9000):
        array = random_arrays(dtype, 1, count)[0]
        behind = np.append(array, to_stored(dtype, np.array([value], np.float32)))
        assert _core.is_finite(int(dtype), behind.ctypes.data, count)
        for at in {0, count // 2, count - 1} if count else ():
            changed = array.copy()
            changed[at : at + 1] = behind[count:]
            assert not _core.is_finite(int(dtype), changed.ctypes.data, count)


@each_float
def test_the_largest_and_the_smallest_values_are_finite(dtype: DType) -> None:
    bits = BITS[to_stored(dtype, np.zeros(1, np.float32)).itemsize]
    infinity = to_stored(dtype, np.array([np.inf], np.float32)).view(bits)
    edges = np.append(infinity - bits(1), np.array([0, 1], bits))
    assert _core.is_finite(int(dtype), edges.ctypes.data, len(edges))


def test_integers_are_not_scaled() -> None:
    with pytest.raises(ValueError, match="floating"):
        _core.scale_array(int(DType.INT32), 0, 0, 1.0)


def special_values(dtype: DType) -> st.SearchStrategy[int]:
    """Bits of a stored value: any, and more often the edges of the format."""
    width = 8 * STORED[dtype].itemsize
    edges = {0, 1, 2**width - 1, 2 ** (width - 1), 2 ** (width - 1) + 1, 2 ** (width - 1) - 1}
    if dtype in FLOATS:
        mantissa = {DType.FLOAT32: 23, DType.FLOAT64: 52, DType.FLOAT16: 10, DType.BFLOAT16: 7}[dtype]
        infinity = 2 ** (width - 1) - 2**mantissa
        smallest_normal = 2**mantissa
        for bits in (infinity, infinity - 1, infinity + 1, smallest_normal, smallest_normal - 1):
            edges |= {bits, bits + 2 ** (width - 1)}
    return st.sampled_from(sorted(edges)) | st.integers(0, 2**width - 1)


@each_reduction
@settings(max_examples=15)
@given(data=st.data())
def test_any_bits_are_reduced_like_the_oracle(data: st.DataObject, dtype: DType, op: Op) -> None:
    num_ranks = data.draw(st.integers(1, 9), label="num_ranks")
    count = data.draw(st.integers(1, 40), label="count")
    pattern = data.draw(st.lists(special_values(dtype), min_size=1, max_size=20), label="bits")
    bits = np.resize(np.array(pattern, BITS[STORED[dtype].itemsize]), (num_ranks, count))
    arrays = list(bits.view(STORED[dtype]))
    outcome = reduce(dtype, op, arrays)
    expected = expected_result(dtype, op, arrays)
    if op in (Op.MIN, Op.MAX):  # either of -0.0 and 0.0
        assert_array_equal(to_compute(dtype, outcome.result), to_compute(dtype, expected))
    else:
        assert_same_bits(dtype, outcome.result, expected)


def test_only_instruction_sets_of_this_processor_are_taken() -> None:
    available = list(instruction_sets())
    assert available[0] == "portable"
    assert ("avx512" in available) <= ("avx2" in available)
    assert _core.best_isa() == _core.ISAS[available[-1]]
    assert ("neon" in available) == (platform.machine() == "aarch64")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_every_instruction_set_that_the_kernel_names_is_run() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    has_avx2 = {"avx2", "f16c"} <= flags
    has_avx512 = has_avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags
    expected = ["portable"] + ["avx2"] * has_avx2 + ["avx512"] * has_avx512
    assert list(instruction_sets()) == expected


FROM_BEST = ("avx512", "avx2", "neon", "portable")


@pytest.mark.parametrize("name", FROM_BEST)
def test_environment_lowers_the_instruction_set(name: str) -> None:
    program = "from paceline import _core; print(_core.best_isa())"
    environment = os.environ | {"PACELINE_ISA": name}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    available = set(instruction_sets())
    best = next(each for each in FROM_BEST[FROM_BEST.index(name) :] if each in available)
    assert int(finished.stdout) == _core.ISAS[best]


def test_an_unknown_instruction_set_is_refused_by_name() -> None:
    program = """
        import paceline
        from paceline import _core
        from paceline.errors import ConfigError
        for attempt in (paceline.init, _core.best_isa):
            try:
                attempt()
            except ConfigError as error:
                print(error.seen or error.summary)
    """
    environment = os.environ | {"PACELINE_ISA": "avx3", "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert len(lines) == 2
    assert all("portable, avx2, avx512 or neon, not 'avx3'" in line for line in lines)
