"""Hashes of memory, against an independent implementation of the XXH64 specification."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import _core

PRIMES = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)


def rotated(value: int, bits: int) -> int:
    value %= 1 << 64
    return (value << bits | value >> (64 - bits)) % (1 << 64)


def xxh64(data: bytes) -> int:
    """The steps of https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, with the seed 0."""
    p1, p2, p3, p4, p5 = PRIMES

    def round_(lane: int, word: int) -> int:
        return rotated(lane + word * p2, 31) * p1

    def word(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    at = 0
    if len(data) < 32:
        hash_ = p5
    else:
        lanes = [p1 + p2, p2, 0, -p1]
        while at + 32 <= len(data):
            lanes = [round_(lane, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        hash_ = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            hash_ = ((hash_ ^ round_(0, lane)) * p1 + p4) % (1 << 64)
    hash_ += len(data)
    while at + 8 <= len(data):
        hash_ = rotated(hash_ % (1 << 64) ^ round_(0, word(at, 8)) % (1 << 64), 27) * p1 + p4
        at += 8
    if at + 4 <= len(data):
        hash_ = rotated(hash_ % (1 << 64) ^ word(at, 4) * p1 % (1 << 64), 23) * p2 + p3
        at += 4
    for byte in data[at:]:
        hash_ = rotated(hash_ % (1 << 64) ^ byte * p5 % (1 << 64), 11) * p1
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        hash_ %= 1 << 64
        hash_ = (hash_ ^ hash_ >> shift) * prime
    return hash_ % (1 << 64)


def test_known_values() -> None:
    assert _core.hash_bytes(b"") == 0xEF46DB3751D8E999  # published with the algorithm
    assert _core.hash_bytes(b"abc") == 0x44BC2CF5AD770999


@pytest.mark.parametrize("nbytes", [*range(72), 255, 256, 257, 100_003])
def test_any_length_and_alignment(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, dtype=np.uint8)[3:]
    assert _core.hash_all([data.ctypes.data], [nbytes]) == [xxh64(data.tobytes())]
    assert _core.hash_bytes(data.tobytes()) == xxh64(data.tobytes())


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000, 100_000])
def test_samples_see_what_changes_every_element(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    small = np.ones(3, np.float32)

    def sample() -> int:
        return _core.sample_all([values.ctypes.data, small.ctypes.data], [values.nbytes, small.nbytes])

    before = sample()
    assert sample() == before
    for changed in (values * np.float32(1.0001), -values):
        kept, values[:] = values.copy(), changed
        assert sample() != before
        values[:] = kept
    for place in (0, -1):
        kept, values[place] = values[place], 7
        assert sample() != before
        values[place] = kept
        assert sample() == before
    small[1] = 2
    assert sample() != before


def test_nothing_is_read_beyond_the_end() -> None:
    for nbytes in (256, 257, 300, 16384, 16385, 16447, 16448, 33000):
        whole = np.zeros(nbytes + 128, np.uint8)
        at = whole.ctypes.data + 64
        before = _core.sample_all([at], [nbytes])
        whole[:64] = whole[-64:] = 1
        assert _core.sample_all([at], [nbytes]) == before
