"""The examples that need PEFT and gymnasium train as with torch's DDP."""

from __future__ import annotations

import sys

from tests.pages.recorded_examples import (
    EXAMPLES,
    assert_first_gradients_close,
    assert_same_bits,
    beside_own_ddp,
    recorded,
)

LORA = ["--epochs", "3", "--samples", "320"]
PPO = ["--iterations", "10"]


def test_lora_trains_as_with_torchs_ddp_and_as_one_process_with_the_whole_batch(tmp_path):
    ours, own = beside_own_ddp(sys.executable, "lora.py", tmp_path, LORA)
    alone = recorded(sys.executable, EXAMPLES / "lora.py", tmp_path / "alone", LORA, num_ranks=1)
    assert_same_bits(ours, own)
    assert_first_gradients_close(ours, alone, num_steps=3 * 320 // 40)
    losses = ours.values("loss")
    assert losses[-1] < losses[0], ours.printed


def test_ppo_learns_and_gets_the_same_bits_as_with_torchs_ddp(tmp_path):
    ours, own = beside_own_ddp(sys.executable, "ppo.py", tmp_path, PPO)
    assert_same_bits(ours, own)
    first, last = ours.values("mean return")
    assert last > first, ours.printed
