"""torch.compile inside and around the wrapper trains as without it; the wrapper's forward is not traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.errors import ConfigError
from paceline.torch import DistributedDataParallel
from tests.harness import ranks
from tests.multiprocess.ddp_models import share, train, two_layers


class Layers(nn.Module):  # torch compiles its own nn.Sequential only if it is inlined
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = two_layers(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


# Importing the compiler takes a minute on a busy machine.
@ranks(2, group="gloo", deadline_s=300)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_compiled_before_and_after_wrapping(rank: int) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile_(function: Any) -> Any:
        torch._dynamo.reset()
        graphs.clear()
        return torch.compile(function, backend=counted)

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    own = share(x, rank, 2)
    alone = Layers()
    train(alone, x)

    def check(model: nn.Module, num_graphs: int) -> None:
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert_close(ours, expected)
        assert len(graphs) == num_graphs, [graph.code for graph in graphs]

    inside = DistributedDataParallel(compile_(Layers()))
    train(inside, own)
    check(inside, 1)

    ddp = DistributedDataParallel(Layers())
    train(compile_(ddp), own)
    check(ddp, 1)  # the graph of the module alone

    # Each layer exceeds torch's first bucket of 1 MiB: one graph per bucket, as with torch's own wrapper.
    ddp = DistributedDataParallel(Layers(140_000), bucket_cap_mb=0.1)
    compile_(ddp)(own)
    assert len(graphs) == 2

    model = Layers()
    ddp = DistributedDataParallel(model)

    def step(part: torch.Tensor) -> None:
        (ddp(part) ** 2).mean().backward()

    compiled = compile_(step)
    for number in range(3):
        model.zero_grad()
        compiled(own + 0.1 * number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    check(model, len(graphs))

    placed = copy.deepcopy(ddp)
    placed.compile(backend=counted)
    placed.module.load_state_dict(Layers().state_dict())
    train(placed, own)
    check(placed, len(graphs))


@ranks(2, group="gloo", deadline_s=300)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_compiled_autograd_is_refused(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step is refused in forward, before anything is compiled; a backward alone, in that backward."""
    from torch._dynamo import compiled_autograd

    x = torch.full((2, 4), 1.0 + rank)
    model = two_layers()
    ddp = DistributedDataParallel(model)
    refused = pytest.raises(ConfigError, match=r"compiled_autograd = True")

    def step(part: torch.Tensor) -> None:
        ddp(part).sum().backward()

    with monkeypatch.context() as changed:
        changed.setattr(torch._dynamo.config, "compiled_autograd", True)
        with refused:
            torch.compile(step, backend="eager")(x)
    torch._dynamo.reset()
    loss = ddp(x).sum()
    with refused, compiled_autograd._enable(lambda graph: graph):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    train(ddp, x)


@ranks(2, group="gloo")
def test_torch_finds_the_wrapper_whose_forward_runs(rank: int) -> None:
    found: list[nn.Module | None] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(TorchDDP._get_active_ddp_module())
            return super().forward(x)

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("by its user")

    x = torch.ones(2, 4)
    ours, torchs = DistributedDataParallel(Looks(4, 2)), TorchDDP(Looks(4, 2))
    for model in (ours, torchs, ours, torchs):  # torch's writes to the variable in which both are found
        model(x).sum().backward()
    assert found == [ours, torchs, ours, torchs]
    with pytest.raises(ValueError, match="by its user"):
        DistributedDataParallel(Fails(4, 2))(x)
    assert TorchDDP._get_active_ddp_module() is None
