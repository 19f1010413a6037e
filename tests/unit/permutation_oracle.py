"""An oracle for the permutation of cpp/data/permutation.h: Python integers, one place at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

ROUNDS = 8
LONGEST_TABLE = 4096
BITS_32 = 2**32 - 1
BITS_64 = 2**64 - 1


def permutation(length: int, key: int, places: list[int]) -> list[int]:
    """The values at `places`."""
    if length <= LONGEST_TABLE:
        table = shuffled_table(length, key)
        return [table[place] for place in places]
    return [index_at(place, length, key) for place in places]


def split_mix(state: int) -> Iterator[int]:
    while True:
        state = (state + 0x9E3779B97F4A7C15) & BITS_64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & BITS_64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & BITS_64
        yield z ^ z >> 31


def shuffled_table(length: int, key: int) -> list[int]:
    """Fisher and Yates, from the last entry down."""
    random = split_mix(key)
    table = list(range(length))
    for left in range(length, 1, -1):
        product = (next(random) >> 32) * left
        while product & BITS_32 < 2**32 % left:
            product = (next(random) >> 32) * left
        other = product >> 32
        table[left - 1], table[other] = table[other], table[left - 1]
    return table


def index_at(place: int, length: int, key: int) -> int:
    rows = isqrt(length - 1) + 1
    columns = -(-length // rows)
    random = split_mix(key)
    keys = [next(random) for _ in range(ROUNDS)]
    while True:
        left, right = divmod(place, columns)
        for number, round_key in enumerate(keys):
            if number % 2 == 0:
                left = (left + digit_hash(right, round_key, rows)) % rows
            else:
                right = (right + digit_hash(left, round_key, columns)) % columns
        place = left * columns + right
        if place < length:
            return place


def digit_hash(digit: int, key: int, bound: int) -> int:
    h = digit ^ (key & BITS_32)
    h ^= h >> 16
    h = h * 0x85EBCA6B & BITS_32
    h ^= h >> 13 ^ key >> 32
    h = h * 0xC2B2AE35 & BITS_32
    h ^= h >> 16
    return h * bound >> 32
