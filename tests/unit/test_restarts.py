"""The ranks that get the warning about torchrun's shared store."""

from __future__ import annotations

import warnings

import pytest

from paceline.torch.communicator.store_exchange import warn_of_shared_store

TORCHRUN = {
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_the_cure_is_named(backend):
    with pytest.warns(RuntimeWarning, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        warn_of_shared_store(backend, 0, TORCHRUN)


@pytest.mark.parametrize(
    ("backend", "rank", "changed"),
    [
        ("paceline", 0, {}),
        ("gloo", 1, {}),
        ("gloo", 0, {"TORCHELASTIC_MAX_RESTARTS": "0"}),
        ("gloo", 0, {"TORCHELASTIC_RESTART_COUNT": "3"}),  # the last attempt
        ("gloo", 0, {"TORCHELASTIC_USE_AGENT_STORE": "False"}),  # as the cure leaves it
    ],
)
def test_other_ranks_are_not_warned(backend, rank, changed):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_store(backend, rank, TORCHRUN | changed)
        warn_of_shared_store(backend, rank, {})  # no torchrun
