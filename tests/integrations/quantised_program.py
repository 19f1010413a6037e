"""Low-rank adapters over quantised weights: on two ranks, and in one process with the whole batch."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from paceline.torch import DistributedDataParallel as OURS

STEPS, ROWS, WIDTH = 6, 16, 256
Wrap = Callable[[nn.Module], nn.Module]


class Adapted(nn.Module):
    """A frozen base, and a low-rank adapter beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.base(rows) + self.adapter(rows)).square().mean()
        return loss


class Nf4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH) / 16), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = linear_nf4(rows, self.weight)
        return found


def int8() -> nn.Module:
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    quantize_(base, Int8WeightOnlyConfig())
    return base


class Language(nn.Module):
    """A small language model of Transformers, quantised by torchao, with adapters of PEFT."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=50,
        )
        model = transformers.LlamaForCausalLM(config)
        quantize_(model, Int8WeightOnlyConfig())
        adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        self.model = peft.get_peft_model(model, adapters)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=rows, labels=rows).loss
        return loss


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchao_nf4": lambda: Adapted(Nf4()),
    "torchao_int8": lambda: Adapted(int8()),
    "peft_over_int8": Language,
}


def batch(name: str) -> torch.Tensor:
    if name.startswith("peft"):
        return torch.arange(ROWS * 8).reshape(ROWS, 8) % 50
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(name: str, wrap: Wrap | None) -> list[float]:
    """Train, and return the losses of the whole batch."""
    torch.manual_seed(5)
    model = MODELS[name]()
    wrapped = model if wrap is None else wrap(model)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    rows = batch(name)
    if wrap is not None:
        rows = rows.chunk(2)[dist.get_rank()]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(rows)
        loss.backward()
        optimizer.step()
        loss = loss.detach().clone()
        if wrap is not None:
            dist.all_reduce(loss)
            loss /= 2
        losses.append(loss.item())
    return losses


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        name: {
            "alone": train(name, None),
            "memory": train(name, lambda model: OURS(model, check_replicas_every=2)),
            "group": train(name, lambda model: OURS(model, reduce_through="group")),
        }
        for name in MODELS
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
