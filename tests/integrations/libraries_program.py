"""Two ranks use libraries that accept a wrapped model, with torch's DDP and with Paceline's."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchmetrics
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import paceline.torch
from paceline.data import DistributedSampler

Wrap = Callable[[nn.Module], nn.Module]


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=made)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=made))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> float:
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def batches() -> list[Any]:
    """This rank's inputs and targets, in batches of 4 samples."""
    inputs, targets = data()[dist.get_rank() :: 2]
    return list(zip(inputs.contiguous().split(4), targets.contiguous().split(4)))


def checkpoint(wrap: Wrap, folder: Path) -> dict[str, Any]:
    """Train, save, and train on; then load the checkpoint into a new model, and train the same steps."""
    model = wrap(network())
    optimizer = adam(model)
    losses = [step(model, optimizer, *batch) for batch in batches()]
    weights, moments = get_state_dict(model, optimizer)
    place = folder / f"checkpoint-{type(model).__module__}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=place)
    ahead = [step(model, optimizer, *batch) for batch in batches()]

    again = wrap(network())
    second = adam(again)
    weights, moments = get_state_dict(again, second)
    names = sorted(weights)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=place)
    set_state_dict(again, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {
        "losses": losses + ahead,
        "resumed": [step(again, second, *batch) for batch in batches()],
        "names": names,
    }


def metric(wrap: Wrap, folder: Path) -> dict[str, Any]:
    """A metric over both ranks, updated after each step."""
    model = wrap(network())
    optimizer = adam(model)
    error = torchmetrics.MeanSquaredError()
    losses, errors = [], []
    for _ in range(3):
        for inputs, targets in batches():
            losses.append(step(model, optimizer, inputs, targets))
            with torch.no_grad():
                error.update(model(inputs), targets)
        errors.append(error.compute().item())
        error.reset()
    return {"losses": losses, "metric": errors}


def loader(wrap: Wrap, folder: Path) -> dict[str, Any]:
    """Train a whole epoch; then stop within an epoch, and continue with a new loader in the same place."""
    sampler = DistributedSampler(data(), num_replicas=2, rank=dist.get_rank(), seed=5)
    model = wrap(network())
    optimizer = adam(model)

    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(data(), batch_size=4, sampler=sampler)

    whole = [step(model, optimizer, *batch) for batch in make()]
    model = wrap(network())
    optimizer = adam(model)
    sampler = DistributedSampler(data(), num_replicas=2, rank=dist.get_rank(), seed=5)
    first, losses = make(), []
    for number, batch in enumerate(first):
        losses.append(step(model, optimizer, *batch))
        if number == 4:
            break
    state = first.state_dict()
    sampler = DistributedSampler(data(), num_replicas=2, rank=dist.get_rank(), seed=5)
    second = make()
    second.load_state_dict(state)
    losses += [step(model, optimizer, *batch) for batch in second]
    return {"losses": losses, "whole": whole}


def engine(wrap: Wrap, folder: Path) -> dict[str, Any]:
    """Ignite's engines and metrics, around a model that is wrapped already."""
    model = wrap(network())
    optimizer = adam(model)
    trainer = create_supervised_trainer(model, optimizer, nn.MSELoss())
    evaluator = create_supervised_evaluator(model, metrics={"error": MeanSquaredError()})
    losses: list[float] = []
    errors: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(_: Any) -> None:
        evaluator.run(batches())
        errors.append(evaluator.state.metrics["error"])

    trainer.run(batches(), max_epochs=3)
    return {"losses": losses, "metric": errors}


def replaced_if(wrap: Wrap) -> Any:
    """`replace_ddp`, if the variant is Paceline's."""
    is_ours = wrap is paceline.torch.DistributedDataParallel
    return paceline.torch.replace_ddp() if is_ours else nullcontext()


def auto_model(wrap: Wrap, folder: Path) -> dict[str, Any]:
    """Ignite itself wraps the model: under `replace_ddp`, in Paceline's class."""
    with replaced_if(wrap):
        model = idist.auto_model(network())
    optimizer = adam(model)
    losses = [step(model, optimizer, *batch) for batch in batches()]
    return {"losses": losses, "wrapper": type(model).__module__}


CASES = {
    "checkpoint": checkpoint,
    "metric": metric,
    "loader": loader,
    "engine": engine,
    "auto_model": auto_model,
}


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    wrappers: tuple[Wrap, ...] = (TorchDDP, paceline.torch.DistributedDataParallel)
    found = {name: [run(wrap, folder) for wrap in wrappers] for name, run in CASES.items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
