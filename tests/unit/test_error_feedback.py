"""The error that encoding keeps from one backward to the next, against sums in float64; no processes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from paceline import _core
from paceline.reducer.compression import BF16, EIGHT_BIT, FP16, TOP_K
from paceline.reducer.error_feedback import KeptError

COUNT = 900
PIECES = [(0, 512), (512, 900)]
PARAMETERS = [(0, 130), (130, 137), (137, 700), (700, 900)]
each_encoding = pytest.mark.parametrize(
    "encoding", [FP16, BF16, EIGHT_BIT, TOP_K], ids=["fp16", "bf16", "8 bit", "top k"]
)


class Sender:
    """One rank that sends all chunks of each backward; the received values are in float64."""

    def __init__(self, encoding: int) -> None:
        self.error, self._encoding = KeptError(COUNT), encoding

    def send(self, values: np.ndarray, weight: float = 1.0) -> np.ndarray:
        arrived = np.zeros(COUNT)
        for start, stop in PIECES:
            if not weight:
                self.error.wait((start, stop))
                continue
            piece = (values[start:stop] * np.float32(weight)).astype(np.float32)
            codes = np.zeros(_core.encoded_bytes(self._encoding, stop - start), np.uint8)
            self.error.encode(self._encoding, piece.ctypes.data, weight, (start, stop), codes.ctypes.data)
            mean = np.zeros(stop - start, np.float32)
            _core.decode_mean(self._encoding, [codes.ctypes.data], [1.0], stop - start, mean.ctypes.data)
            arrived[start:stop] = mean
        return arrived

    def kept(self) -> np.ndarray:
        return self.error.current((0, COUNT)).astype(np.float64)


def gradient(rng: np.random.Generator, unused: list[int], size: float = 1.0) -> np.ndarray:
    values = (rng.standard_normal(COUNT) * size).astype(np.float32)
    for number in unused:
        values[slice(*PARAMETERS[number])] = 0
    return values


@each_encoding
@pytest.mark.parametrize("seed", range(4))
def test_what_arrived_and_what_is_kept_are_the_gradients_of_good_backwards(encoding: int, seed: int) -> None:
    """In any order of backwards that are good, void, or without weight, and of unused parameters."""
    rng, sender = np.random.default_rng(seed), Sender(encoding)
    arrived, exact = np.zeros(COUNT), np.zeros(COUNT)
    for _ in range(60):
        unused = [number for number in range(len(PARAMETERS)) if rng.random() < 0.4]
        is_good = rng.random() < 0.7
        values = gradient(rng, unused, 1.0 if is_good else 1e4)
        if not is_good and rng.random() < 0.5:
            values[rng.integers(COUNT)] = np.inf
        zeros = rng.random() < 0.2  # used by another host, and zeros here
        values = values * 0 if zeros and is_good else values
        weight = float(rng.choice([1.0, 3.0, 0.25, 0.0]))
        sent = sender.send(values, weight)
        if is_good:
            sender.error.adopt([PARAMETERS[number] for number in unused])
            for number, place in enumerate(PARAMETERS):
                if number not in unused:
                    arrived[slice(*place)] += sent[slice(*place)]
                    exact[slice(*place)] += values[slice(*place)] if weight else 0
        assert_allclose(arrived + sender.kept(), exact, rtol=0, atol=2e-4)


@each_encoding
def test_a_backward_of_no_use_changes_no_bit(encoding: int) -> None:
    ends = []
    for is_disturbed in (False, True):
        rng, sender = np.random.default_rng(5), Sender(encoding)
        for step in range(8):
            values = gradient(rng, [1] if step % 3 else [])
            if is_disturbed and step % 3 == 1:
                sender.send(np.full(COUNT, 3e4, np.float32))
                sender.send(np.full(COUNT, np.nan, np.float32))
            ends.append(sender.send(values))
            sender.error.adopt([PARAMETERS[1]] if step % 3 else [])
        ends.append(sender.kept())
    half = len(ends) // 2
    for undisturbed, disturbed in zip(ends[:half], ends[half:], strict=True):
        assert_array_equal(undisturbed, disturbed)


@each_encoding
def test_the_error_of_a_frozen_parameter_waits_and_takes_no_place_of_others(encoding: int) -> None:
    """Elements of two parameters share blocks; those of the frozen one have large errors."""
    rng, sender = np.random.default_rng(2), Sender(encoding)
    frozen, trained = slice(*PARAMETERS[0]), slice(*PARAMETERS[1])  # in one block of 256
    large = gradient(rng, [1, 2, 3], 1e6)
    sender.send(large)
    sender.error.adopt([PARAMETERS[number] for number in (1, 2, 3)])
    before = sender.kept()[frozen]
    assert np.abs(before).max() > 100
    small, arrived = gradient(rng, [0, 2, 3]), np.zeros(COUNT)
    for _ in range(40):
        arrived += sender.send(small)
        sender.error.adopt([PARAMETERS[number] for number in (0, 2, 3)])
        assert_array_equal(sender.kept()[frozen], before)
    first = arrived[trained] + sender.kept()[trained]
    assert_allclose(first, 40.0 * small[trained], rtol=1e-5, atol=1e-3)
    # The first of these backwards did not know yet that no rank would use the other one.
    assert np.abs(sender.kept()[trained]).max() < 4 * np.abs(small).max()
    total = np.zeros(COUNT)
    for _ in range(40):  # it is trained again, with only the kept error
        tiny = np.zeros(COUNT, np.float32)
        tiny[frozen] = 1e-3
        total += sender.send(tiny)
        sender.error.adopt()
    assert_allclose((total + sender.kept())[frozen], before + 0.04, rtol=1e-5, atol=1e-2)
    assert np.abs(total[frozen]).max() > 100
