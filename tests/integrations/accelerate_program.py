"""The training of two ranks with Accelerate: each case with torch's DDP and with Paceline's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType, GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import ConfigError
from paceline.integrations.accelerate import use_paceline


def data(size: int = 96) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 6, generator=made)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=made))


def train(is_ours: bool, *, accumulate: int = 1, is_clipped: bool = False, **options: Any) -> dict[str, Any]:
    set_seed(3)
    plugin = GradientAccumulationPlugin(num_steps=accumulate)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options)
    if is_ours:
        use_paceline(accelerator)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data(), batch_size=8, shuffle=True)
    )
    losses = []
    for _ in range(4):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                accelerator.backward(loss)
                if is_clipped and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    unwrapped = accelerator.unwrap_model(model)
    return {
        "losses": losses,
        "wrapper": type(model).__module__,
        "unwrapped": type(unwrapped).__name__,
        "again": accelerator.prepare(model) is model,
        "state": sorted(accelerator.get_state_dict(model)),
    }


def late_trigger(is_ours: bool) -> dict[str, Any]:
    """Train with forwards under no_sync, whose backwards average because of trigger_sync_in_backward."""
    set_seed(3)
    accelerator = Accelerator(cpu=True)
    if is_ours:
        use_paceline(accelerator)
    model = accelerator.prepare(nn.Linear(6, 2))
    inputs, targets = data()[accelerator.process_index :: 2]
    losses = []
    for _ in range(8):
        with accelerator.no_sync(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return {"losses": losses, "wrapper": type(model).__module__}


def refused() -> list[str]:
    """The errors of wrong calls of use_paceline, as text."""
    late = Accelerator(cpu=True)
    late.prepare(nn.Linear(2, 2))
    return [
        refusal(late),
        refusal(Accelerator(cpu=True), non_finite="raise"),
        refusal("accelerator"),
        refusal(use_paceline(Accelerator(cpu=True))),
    ]


def refusal(accelerator: Any, **arguments: Any) -> str:
    try:
        use_paceline(accelerator, **arguments)
    except ConfigError as error:
        return str(error)
    return "nothing"


def main() -> None:
    fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16, bucket_cap_mb=1)
    found: dict[str, Any] = {
        "automatic": [train(ours) for ours in (False, True)],
        "accumulated": [train(ours, accumulate=3, is_clipped=True) for ours in (False, True)],
        "hook": [train(ours, kwargs_handlers=[fp16]) for ours in (False, True)],
        "triggered late": [late_trigger(ours) for ours in (False, True)],
        "refused": refused(),
    }
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
