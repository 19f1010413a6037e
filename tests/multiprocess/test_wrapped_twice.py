"""torch's wrappers around Paceline's, and the reverse, are refused on every rank, before any gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DataParallel, DistributedDataParallel
from tests.harness import kept_ranks


class Both(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@kept_ranks(2, group="gloo")
def test_torchs_wrapper_around_pacelines_is_refused_when_it_is_made(rank: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match="averaged twice") as caught:  # as accelerator.prepare(model) does
        TorchDDP(ddp)
    assert "accelerator.prepare(optimizer, loader)" in str(caught.value)
    assert not hasattr(ddp, "_ddp_params_and_buffers_to_ignore")
    (ddp(torch.ones(1, 2)).sum() * (1 + rank)).backward()
    assert_close(ddp.module.bias.grad, torch.tensor([1.5]))


@kept_ranks(2, group="gloo")
def test_torchs_wrapper_around_a_model_with_pacelines_in_it_is_refused_in_forward(rank: int) -> None:
    for used_before in (False, True):
        inner = DistributedDataParallel(nn.Linear(2, 2))
        if used_before:
            inner(torch.ones(1, 2)).sum().backward()
        outer = TorchDDP(Both(inner))
        with torch.no_grad():
            outer(torch.ones(1, 2))  # no gradients, so nothing is averaged
        with pytest.raises(ConfigError, match=r"torch\.nn\.parallel\.DistributedDataParallel is around"):
            outer(torch.ones(1, 2))


@kept_ranks(2, group="gloo")
def test_torchs_replicate_is_refused_too(rank: int) -> None:
    from torch.distributed._composable import replicate

    inner = nn.Linear(2, 2)
    for outer in (replicate(Both(DistributedDataParallel(inner))), replicate(DistributedDataParallel(inner))):
        with pytest.raises(ConfigError, match=r"replicate\(\) is around"):
            outer(torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"wrapped already, by torch's replicate\(\)"):
        DistributedDataParallel(replicate(nn.Linear(2, 2)))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise LookupError


@kept_ranks(2, group="gloo")
def test_a_failed_forward_of_replicate_does_not_affect_later_forwards(rank: int) -> None:
    """torch still names it as the wrapper whose forward runs."""
    from torch.distributed._composable import replicate

    inner = DistributedDataParallel(nn.Linear(2, 1))
    for outer, error in ((replicate(Both(inner)), ConfigError), (replicate(Failing()), LookupError)):
        with pytest.raises(error):
            outer(torch.ones(1, 2))
        inner.zero_grad()
        (inner(torch.ones(1, 2)).sum() * (1 + rank)).backward()
        assert_close(inner.module.bias.grad, torch.tensor([1.5]))
        if torch.__version__ >= "2.11":  # since then it names that wrapper, so each forward of ours can look
            with pytest.raises(ConfigError, match=r"replicate\(\) is around"):
                replicate(Both(inner))(torch.ones(1, 2))


@kept_ranks(2, group="gloo")
def test_a_model_that_torch_has_wrapped_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"wrapped already, by torch.*around the whole model"):
        DistributedDataParallel(TorchDDP(nn.Linear(2, 1)))
    with pytest.raises(ConfigError, match=r"wrapped already, by torch.*at 'first'"):
        DistributedDataParallel(Both(TorchDDP(nn.Linear(2, 2))))


@kept_ranks(2, group="gloo")
def test_two_wrappers_of_paceline_average_once(rank: int) -> None:
    net = nn.Linear(2, 1)
    ddp = DistributedDataParallel(DistributedDataParallel(net))
    for _ in range(3):
        net.zero_grad()
        (ddp(torch.ones(1, 2)).sum() * (1 + rank)).backward()
        assert_close(net.bias.grad, torch.tensor([1.5]))


@kept_ranks(2, group="gloo")
def test_data_parallel_cannot_copy_pacelines_wrapper(rank: int) -> None:
    both = DataParallel(Both(DistributedDataParallel(nn.Linear(2, 2))), device_ids=["cpu", "cpu"])
    with pytest.raises(ConfigError, match="cannot replicate"):
        both(torch.ones(4, 2))


@kept_ranks(2, group="gloo")
def test_pacelines_wrapper_may_be_around_data_parallel(rank: int) -> None:
    net = nn.Linear(2, 1)
    ddp = DistributedDataParallel(DataParallel(net, device_ids=["cpu", "cpu"]))
    ddp(torch.full((2, 2), 1.0 + rank)).sum().backward()
    assert_close(net.weight.grad, torch.full((1, 2), 3.0))
