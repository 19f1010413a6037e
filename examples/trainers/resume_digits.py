"""Stops in the middle of an epoch and resumes from a checkpoint, with the same result as without a stop.

    paceline run -n 2 examples/trainers/resume_digits.py

The StatefulDataLoader of torchdata keeps the position in the data, torch.distributed.checkpoint saves it with
model and optimizer, and torchmetrics combines the accuracy of all ranks. The lines that use Paceline are
marked with (1).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import MulticlassAccuracy

import paceline.torch
from paceline.data import DistributedSampler


class Training:
    """A model, its optimizer, the data and the metric."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        sampler = DistributedSampler(data)  # (1)
        self.loader = StatefulDataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
        self.model = paceline.torch.DistributedDataParallel(model)  # (1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.accuracy = MulticlassAccuracy(10)
        self.losses: list[float] = []

    def train(self, most: int | None = None) -> None:
        """Train to the end of the epoch, or for `most` batches."""
        for number, (images, labels) in enumerate(self.loader, 1):
            scores = self.model(images)
            loss = nn.functional.cross_entropy(scores, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.accuracy.update(scores.detach(), labels)
            self.losses.append(loss.item())
            if number == most:
                break

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint; the position in the data is this rank's own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        place = self.loader.state_dict()
        return {"model": model, "optimizer": optimizer, f"place of rank {dist.get_rank()}": place}

    def load(self, folder: Path) -> None:
        """Load the state from a checkpoint. Collective."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.loader.load_state_dict(state[f"place of rank {dist.get_rank()}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stop", type=int, default=10, help="number of batches of an epoch before the stop")
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    whole = Training()
    whole.train()

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    first = Training()
    first.train(args.stop)
    dcp.save(first.state(), checkpoint_id=folders[0])
    second = Training()
    second.load(Path(folders[0]))
    second.train()

    losses = first.losses + second.losses
    accuracy = whole.accuracy.compute()  # of all ranks, so all call it
    if dist.get_rank() == 0:
        same = "as" if losses == whole.losses else "not as"
        print(f"{len(losses)} batches with a stop after {args.stop}, {same} without; accuracy {accuracy:.3f}")
    if args.report:
        report = {"losses": losses, "whole": whole.losses, "wrapper": type(whole.model).__module__}
        (args.report / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
