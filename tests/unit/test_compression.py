"""The compression of gradients against numpy, bit for bit, on each instruction set of this processor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from paceline import _core
from paceline.reducer.compression import BF16, Codes
from tests.unit.reduction_oracle import Array, DType, to_compute, to_stored
from tests.unit.test_kernels import instruction_sets

HALF, BFLOAT, BYTE, TOP = range(4)
BLOCK = 256
TOP_VALUES = 8
LARGEST = {
    HALF: 65504.0,
    BFLOAT: to_compute(DType.BFLOAT16, np.array([0x7F7F], np.uint16))[0],
    BYTE: 2.0**127,
    TOP: to_compute(DType.BFLOAT16, np.array([0x7F7F], np.uint16))[0],
}

STORED_AS = {HALF: DType.FLOAT16, BFLOAT: DType.BFLOAT16}

each_encoding = pytest.mark.parametrize(
    "encoding", [HALF, BFLOAT, BYTE, TOP], ids=["fp16", "bf16", "8 bit", "top k"]
)
each_of_all_values = pytest.mark.parametrize("encoding", [HALF, BFLOAT, BYTE], ids=["fp16", "bf16", "8 bit"])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflow and NaN


def whole_values(values: Array, error: Array, factor: float) -> Array:
    """The values to be sent: in float32, and within its range."""
    huge = np.float32(2.0**127)
    whole = np.clip(np.clip(values * np.float32(factor), -huge, huge) + error, -huge, huge)
    return np.where(np.isfinite(values), whole, np.where(np.isnan(values), np.float32(np.nan), values))


def expected_codes(encoding: int, whole: Array) -> bytes:
    largest = np.float32(LARGEST[encoding])
    sent = np.where(np.isfinite(whole), np.clip(whole, -largest, largest), whole)
    if encoding in STORED_AS:
        return to_stored(STORED_AS[encoding], sent).tobytes()
    block = expected_block if encoding == BYTE else expected_top_values
    return b"".join(block(sent[i : i + BLOCK]) for i in range(0, len(sent), BLOCK))


def expected_block(sent: Array) -> bytes:
    finite = np.isfinite(sent)
    scale = np.abs(np.where(finite, sent, 0)).max() / np.float32(127)
    scale = scale if scale >= np.finfo(np.float32).tiny else np.float32(0)
    inverse = np.float32(1) / scale if scale else np.float32(0)
    codes = np.rint(np.where(finite, sent, 0) * inverse)
    return np.float32(scale).tobytes() + np.where(finite, codes, -128).astype(np.int8).tobytes()


def expected_top_values(sent: Array) -> bytes:
    """The indices of the largest magnitudes, without 8 bits of the mantissa; the first of equal ones."""
    magnitude = (np.abs(sent).view(np.uint32) & 0x7FFFFFFF) >> 8
    largest = sorted(range(len(sent)), key=lambda place: (-int(magnitude[place]), place))[:TOP_VALUES]
    places = np.array(largest + [0] * (TOP_VALUES - len(largest)), np.uint8)
    values = np.zeros(TOP_VALUES, np.float32)
    values[: len(largest)] = sent[largest]
    if (~np.isfinite(sent)).sum() > TOP_VALUES:
        values[:], places[:] = np.nan, 0
    return to_stored(DType.BFLOAT16, values).tobytes() + places.tobytes()


def values_of_top(codes: bytes, count: int) -> Array:
    blocks = []
    for first in range(0, len(codes), 3 * TOP_VALUES):
        block = codes[first : first + 3 * TOP_VALUES]
        values = to_compute(DType.BFLOAT16, np.frombuffer(block[: 2 * TOP_VALUES], np.uint16))
        places = np.frombuffer(block[2 * TOP_VALUES :], np.uint8)
        is_lost = places[0] == places[1] and np.isnan(values[1])
        found = np.full(BLOCK, np.nan if is_lost else 0, np.float32)
        for place, value in zip(places, values):
            found[place] += value
        blocks.append(found)
    return np.concatenate([np.zeros(0, np.float32), *blocks])[:count]


def expected_values(encoding: int, codes: bytes, count: int) -> Array:
    if encoding == TOP:
        return values_of_top(codes, count)
    if encoding != BYTE:
        dtype = {HALF: np.float16, BFLOAT: np.uint16}[encoding]
        return to_compute(STORED_AS[encoding], np.frombuffer(codes, dtype))
    blocks = []
    for first in range(0, len(codes), BLOCK + 4):
        block = codes[first : first + BLOCK + 4]
        steps = np.frombuffer(block[4:], np.int8)
        scaled = steps.astype(np.float32) * np.frombuffer(block[:4], np.float32)
        blocks.append(np.where(steps == -128, np.float32(np.nan), scaled))
    return np.concatenate([np.zeros(0, np.float32), *blocks])


@dataclass
class Sent:
    """The results of one instruction set for values; the mean is that of several ranks with the same."""

    codes: bytes
    mean: bytes
    error: bytes


def send(encoding: int, values: Array, error: Array, factor: float, weights: list[float]) -> Sent:
    count = len(values)
    nbytes = _core.encoded_bytes(encoding, count)
    codes = np.full(nbytes + 8, 0x5A, np.uint8)
    before, kept = error.copy(), np.full_like(error, np.nan)
    addresses = values.ctypes.data, before.ctypes.data, kept.ctypes.data
    _core.encode(encoding, *addresses, factor, count, codes.ctypes.data)
    assert before.tobytes() == error.tobytes()
    mean = np.full(count + 2, 7, np.float32)
    _core.decode_mean(encoding, [codes.ctypes.data] * len(weights), weights, count, mean.ctypes.data)
    assert (codes[nbytes:] == 0x5A).all() and (mean[count:] == 7).all(), "written behind"
    return Sent(codes[:nbytes].tobytes(), mean[:count].tobytes(), kept.tobytes())


def assert_like_oracle(
    encoding: int, values: Array, error: Array, factor: float, weights: list[float]
) -> None:
    whole = whole_values(values, error, factor)
    codes = expected_codes(encoding, whole)
    decoded = expected_values(encoding, codes, len(values))
    total = np.zeros_like(values)
    for weight in weights:
        total = total + np.float32(weight) * decoded if weight else total
    mean = total / np.float32(len(weights))
    mean[np.isnan(mean)] = np.nan
    kept = np.where(np.isfinite(whole) & np.isfinite(decoded), whole - decoded, error)
    for name in instruction_sets():
        sent = send(encoding, values, error, factor, weights)
        assert sent.codes == codes, name
        assert_array_equal(np.frombuffer(sent.mean, np.uint32), mean.view(np.uint32), err_msg=name)
        assert_array_equal(np.frombuffer(sent.error, np.uint32), kept.view(np.uint32), err_msg=name)


@each_encoding
@pytest.mark.parametrize("count", [0, 1, 7, 8, 31, 255, 256, 257, 512, 1023, 2049])
def test_every_length(encoding: int, count: int) -> None:
    rng = np.random.default_rng(count)
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-9, 5, count)).astype(np.float32)
    error = (rng.standard_normal(count) * 1e-3).astype(np.float32)
    assert_like_oracle(encoding, values, error, 1.0, [1.0, 1.0, 1.0])
    assert_like_oracle(encoding, values, error, 0.7, [1.4, 0.0, 1.9])


EDGES = [0, 1, 0x7FFFFF, 0x800000, 0x33000000, 0x33000001, 0x387FE000, 0x477FEFFF, 0x477FF000, 0x7F7F8000]
EDGES += [0x7EFFFFFF, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
any_float = (st.sampled_from(EDGES) | st.integers(0, 2**31 - 1)).flatmap(
    lambda bits: st.sampled_from([bits, bits + 2**31])
)
finite_float = any_float.filter(lambda bits: bits % 2**31 < 0x7F800000)


def floats(bits: list[int], count: int) -> Array:
    return np.resize(np.array(bits, np.uint32), count).view(np.float32)


@each_encoding
@settings(max_examples=60)
@given(data=st.data())
def test_any_bits_are_sent_like_the_oracle(encoding: int, data: st.DataObject) -> None:
    count = data.draw(st.sampled_from([1, 17, 40, 300]), label="count")
    values = floats(data.draw(st.lists(any_float, min_size=1, max_size=20), label="values"), count)
    error = floats(data.draw(st.lists(finite_float, min_size=1, max_size=20), label="error"), count)
    factor = data.draw(st.sampled_from([1.0, 2.0, 0.3, 1e20]), label="factor")
    assert_like_oracle(encoding, values, error, factor, [0.3, 0.0, 1.0])


@each_of_all_values
def test_what_is_not_finite_arrives_so_and_alone(encoding: int) -> None:
    values = np.linspace(-3, 3, 600, dtype=np.float32)
    values[[5, 70, 400]] = np.inf, np.nan, -np.inf
    for name in instruction_sets():
        sent = send(encoding, values, np.zeros(600, np.float32), 1.0, [1.0])
        mean, error = (np.frombuffer(found, np.float32) for found in (sent.mean, sent.error))
        assert (np.isfinite(mean) == np.isfinite(values)).all(), name
        assert np.isfinite(error).all() and (error[[5, 70, 400]] == 0).all()
        finite = np.isfinite(values)
        assert_array_equal((mean + error)[finite], values[finite])  # small ones: without a rounding
        assert np.abs(error).max() <= 3 / 127 / 2 * 1.00001


def test_a_value_beyond_float16_stays_finite_and_its_rest_is_kept() -> None:
    values = np.array([1e5, -1e5], np.float32)
    sent = send(HALF, values, np.zeros(2, np.float32), 1.0, [1.0])
    assert np.frombuffer(sent.mean, np.float32).tolist() == [65504, -65504]
    assert np.frombuffer(sent.error, np.float32).tolist() == [34496, -34496]


def test_a_rank_without_weight_is_left_out_whatever_it_sent() -> None:
    for encoding in (HALF, BFLOAT, BYTE, TOP):
        lost = np.full(300, np.nan, np.float32)
        codes = np.zeros(_core.encoded_bytes(encoding, 300) + 4, np.uint8)
        _core.encode(encoding, lost.ctypes.data, 0, 0, 1.0, 300, codes.ctypes.data)
        _core.decode_mean(encoding, [codes.ctypes.data] * 2, [0.0, 0.0], 300, lost.ctypes.data)
        assert (lost == 0).all()


def test_of_each_block_the_largest_values_are_sent_and_the_rest_is_kept() -> None:
    values = np.arange(1, 601, dtype=np.float32) * np.where(np.arange(600) % 2, 1, -1).astype(np.float32)
    sent = send(TOP, values, np.zeros(600, np.float32), 1.0, [1.0])
    mean, error = (np.frombuffer(found, np.float32) for found in (sent.mean, sent.error))
    assert len(sent.codes) == 3 * 24
    assert np.flatnonzero(mean).tolist() == [*range(248, 256), *range(504, 512), *range(592, 600)]
    assert_array_equal(mean + error, values)


@pytest.mark.parametrize("num_lost", [1, 8, 9, 200])
def test_of_many_values_that_are_not_finite_none_is_hidden_by_the_others(num_lost: int) -> None:
    values = np.ones(512, np.float32)
    values[:num_lost] = np.inf
    for name in instruction_sets():
        sent = send(TOP, values, np.full(512, 0.5, np.float32), 1.0, [1.0])
        mean, error = (np.frombuffer(found, np.float32) for found in (sent.mean, sent.error))
        assert not np.isfinite(mean[:num_lost]).any(), name
        assert np.isfinite(mean[256:]).all() and np.isfinite(error).all(), name
        assert (error[:num_lost] == 0.5).all(), name


def test_wrong_calls_raise() -> None:
    with pytest.raises(ValueError, match="no such encoding"):
        _core.encoded_bytes(4, 1)
    with pytest.raises(ValueError, match="one entry per rank"):
        _core.decode_mean(BYTE, [0, 0], [1.0], 0, 0)


def test_an_error_that_is_kept_comes_along_whatever_buckets_come_and_go() -> None:
    """A bucket of one layout has the parameter of another, and then the first layout is used again."""
    codes = Codes(BF16, error_feedback=True)
    first, second, third = object(), object(), object()

    def send(bucket: int, parameters: list[object], value: float) -> None:
        """For each of two values per parameter; bfloat16 keeps the error below 2**-8 of it."""
        values = np.full(2 * len(parameters), value, np.float32)
        row = codes.rows(values.size, 1)[0]
        codes.encode(bucket, parameters, [2] * len(parameters), values.ctypes.data, 1.0, row)([])

    def kept(parameter: object) -> float:
        error = codes.error_of(parameter)
        assert error is not None and error[0] == error[1]
        return float(error[0])

    unit = 2.0**-12
    for bucket, parameter in enumerate((first, second, third)):
        send(bucket, [parameter], 1 + bucket * unit)
    assert [kept(each) for each in (first, second, third)] == [0, unit, 2 * unit]
    send(0, [third, second], 1 + unit)
    send(1, [first], 1.0)
    assert [kept(each) for each in (first, second, third)] == [0, 2 * unit, 3 * unit]
    for bucket, parameter in ((2, third), (1, second), (0, first)):
        send(bucket, [parameter], 1.0)
    assert [kept(each) for each in (first, second, third)] == [0, 2 * unit, 3 * unit]
