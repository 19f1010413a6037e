"""Examples for torch and Paddle train as with the framework's own wrapper, and as one process."""

from __future__ import annotations

import pytest

from tests.harness import needs_paddle
from tests.harness.warm import warm_python
from tests.pages.recorded_examples import (
    EXAMPLES,
    assert_first_gradients_close,
    assert_same_bits,
    beside_own_ddp,
    recorded,
)

pytest.importorskip("torch")

RESNET = ["--epochs", "3", "--samples", "240", "--batch-size", "24"]
GPT = ["--steps", "22", "--batch-size", "4", "--width", "16"]
GAN = ["--epochs", "4", "--samples", "512"]

FRAMEWORKS = ["torch", pytest.param("paddle", marks=needs_paddle)]


def of(framework: str, name: str) -> str:
    return name if framework == "torch" else f"{framework}_{name}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_resnet_gets_the_same_bits_as_with_the_frameworks_own_wrapper(framework, tmp_path):
    ours, own = beside_own_ddp(warm_python(framework), of(framework, "resnet.py"), tmp_path, RESNET)
    assert_same_bits(ours, own)
    losses = ours.values("loss")
    assert losses[-1] < losses[0], ours.printed


def test_a_gan_gets_the_same_bits_as_with_torchs_ddp(tmp_path):
    ours, own = beside_own_ddp(warm_python("torch"), "gan.py", tmp_path, GAN)
    assert_same_bits(ours, own)
    errors = ours.values("mean image off by")
    assert errors[-1] < errors[0], ours.printed


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_gpt_with_weights_trains_as_one_process_with_the_whole_batch(framework, tmp_path):
    """And as the script with the framework's own wrapper, which scales each loss by hand."""
    python, name = warm_python(framework), of(framework, "gpt.py")
    ours, own = beside_own_ddp(python, name, tmp_path, GPT)
    alone = recorded(python, EXAMPLES / name, tmp_path / "alone", GPT, num_ranks=1)
    assert_same_bits(ours)
    assert_first_gradients_close(ours, alone, num_steps=22)
    assert_first_gradients_close(ours, own, num_steps=22)
    losses = ours.values("loss")
    assert losses[-1] < losses[0], ours.printed
