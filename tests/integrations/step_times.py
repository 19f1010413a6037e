"""Measures the time per step of trainers with torch's DDP and with Paceline's class, round by round.

paceline run -n 2 -m tests.integrations.step_times --rounds 5 --markdown benchmarks/results

The models and data are those of examples/trainers. Every round trains a new model with each class, in the
same processes. A third variant wraps the model in a class that does not average: the remaining time is the
trainer's and the model's own, which no wrapper can save. Losses are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import partial
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from transformers import Trainer as HubTrainer

import paceline.torch
from benchmarks.report import Machine, Report
from examples.trainers.transformers_gpt import Counting
from paceline.replace_class import Pair, Replacement

# The first steps of each turn don't count: in them buckets are rebuilt, and memory is touched first.
WARM = 12

Turn = tuple[list[float], list[float]]  # losses, and when each step ended


class Alone(TorchDDP):
    """A wrapper that does not average."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self.static_graph = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return nullcontext()

    def _get_ddp_logging_data(self) -> dict[str, Any]:  # Lightning calls it at the end
        return {}


@contextmanager
def ours() -> Iterator[None]:
    with redirect_stderr(StringIO()):  # otherwise each turn prints what it replaced
        replaced = paceline.torch.replace_ddp()
    with replaced:
        yield


@contextmanager
def alone() -> Iterator[None]:
    pair = Pair("torch.nn.parallel.DistributedDataParallel", TorchDDP, Alone)
    with Replacement([pair]):
        yield


WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "paceline": ours,
    "alone": alone,
}


def digits(batches: int) -> DataLoader[Any]:
    """Batches of 32 for each rank, as many as there are steps."""
    images, labels = load_digits(return_X_y=True)
    rows = np.resize(np.arange(1792), batches * 64)
    inputs = torch.tensor(images[rows] / 16, dtype=torch.float32)
    return DataLoader(TensorDataset(inputs, torch.tensor(labels[rows])), batch_size=32, shuffle=True)


def network(depth: int) -> nn.Module:
    """The model of the examples, with further layers of the same kind."""
    further = (
        layer
        for _ in range(depth)
        for layer in (nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU())
    )
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), *further, nn.Linear(32, 10))


def gpt() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def digits_by_hand(steps: int) -> Turn:
    """The loop of torch's tutorials."""
    set_seed(0)
    model = nn.parallel.DistributedDataParallel(network(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = digits(steps).dataset
    sampler = DistributedSampler(data)
    losses, ends = [], []
    for batch, targets in DataLoader(data, batch_size=32, sampler=sampler):
        loss = nn.functional.cross_entropy(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return losses, ends


def gpt_by_hand(steps: int) -> Turn:
    """Train with the DDP arguments and the optimizer of Transformers' Trainer."""
    set_seed(0)
    model = nn.parallel.DistributedDataParallel(gpt(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    data = Counting()
    rank = torch.distributed.get_rank()
    batches = [data[(16 * step + 8 * rank + row) % len(data)] for step in range(steps) for row in range(8)]
    losses, ends = [], []
    for batch in DataLoader(batches, batch_size=8):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return losses, ends


def with_accelerate(steps: int, depth: int = 0) -> Turn:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model = network(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, digits(steps))
    losses, ends = [], []
    for batch, targets in loader:
        loss = nn.functional.cross_entropy(model(batch), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
    return losses, ends


class Digits(LightningModule):
    """The example's model, with more layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model = network(depth)
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Ends(Callback):
    """Records when each step of Lightning ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def with_lightning(steps: int, depth: int = 0) -> Turn:
    seed_everything(0, verbose=False)
    model, ends = Digits(depth), Ends()
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[ends],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, digits(steps))
    return model.losses, ends.ends


class StepEnds(TrainerCallback):
    """Records when each step of Transformers ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class Classifier(nn.Module):
    """The network of the examples, with the arguments and the result that Transformers' Trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(0)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_transformers(
    steps: int, make_model: Callable[[], nn.Module], make_data: Callable[[int], Any], **options: Any
) -> Turn:
    set_seed(0)
    ends, losses, model = StepEnds(), [], make_model()
    # The Trainer's own log of losses communicates with the other ranks.
    model.register_forward_hook(lambda *arguments: losses.append(arguments[-1]["loss"].item()))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=steps,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **options,
        )
        HubTrainer(model=model, args=arguments, train_dataset=make_data(steps), callbacks=[ends]).train()
    return losses, ends.ends


def digits_by_name(steps: int) -> list[dict[str, torch.Tensor]]:
    return [{"inputs": image, "labels": label} for image, label in digits(steps).dataset]


LIBRARIES = ("accelerate", "lightning", "transformers")
TASKS: dict[str, Callable[[int], Turn]] = {
    "Accelerate, digits": with_accelerate,
    "Lightning, digits": with_lightning,
    "Accelerate, digits, 8 layers more": partial(with_accelerate, depth=8),
    "Lightning, digits, 8 layers more": partial(with_lightning, depth=8),
    "Transformers, digits": partial(
        with_transformers,
        make_model=Classifier,
        make_data=digits_by_name,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
    ),
    "Transformers, GPT-2 of 2 layers": partial(
        with_transformers,
        make_model=gpt,
        make_data=lambda steps: Counting(),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
    ),
    "no trainer, digits": digits_by_hand,
    "no trainer, GPT-2 of 2 layers": gpt_by_hand,
}


def one_turn(train: Callable[[int], Turn], way: str, steps: int) -> tuple[list[float], float]:
    """Train once; return the losses, and the median milliseconds of the steps that count."""
    with WAYS[way]():
        losses, ends = train(steps)
    assert len(losses) == len(ends) == steps, (len(losses), len(ends))
    return losses, 1e3 * statistics.median(np.diff(ends[WARM:]))


def check(name: str, theirs: Sequence[float], ours: Sequence[float]) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=name)
    half = len(ours) // 2
    assert np.mean(ours[half:]) < np.mean(ours[:half]), name


def spell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=112)
    parser.add_argument("--only", default="", help="only tasks whose name begins with this")
    parser.add_argument("--markdown", type=Path, help="folder for the table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rows = []
    for name, train in TASKS.items():
        if not name.startswith(args.only):
            continue
        check(name, one_turn(train, "torch", 28)[0], one_turn(train, "paceline", 28)[0])
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                times[way].append(one_turn(train, way, args.steps)[1])
        gain = [a / b for a, b in zip(times["torch"], times["paceline"])]
        most = [a / b for a, b in zip(times["torch"], times["alone"])]
        rows.append([name, *map(spell, times.values()), spell(gain), spell(most)])
        if os.environ["RANK"] == "0":
            print(" | ".join(rows[-1]), flush=True)
    if os.environ["RANK"] == "0":
        versions = ", ".join(f"{package} {metadata.version(package)}" for package in LIBRARIES)
        report = Report(
            theme="trainers",
            title="Time per step of trainers, with torch's DDP and with `--replace-ddp`",
            command="paceline run -n 2 -m tests.integrations.step_times "
            f"--rounds {args.rounds} --steps {args.steps}",
            machine=replace(Machine.here(), cores=os.cpu_count() or 1),  # a rank is bound to one core
            columns=[
                "trainer",
                "torch's DDP, ms",
                "Paceline, ms",
                "no averaging, ms",
                "torch / Paceline",
                "torch / no averaging",
            ],
            rows=rows,
            notes=[
                f"{versions}. Two ranks, the models of examples/trainers, losses equal to rounding. Each "
                "round trains with each class anew; a round's figure is the median over its steps, and the "
                "table's the median over rounds, with the smallest and the largest. With a class that "
                "averages nothing, the trainer's and the model's own time is left: the last column is the "
                "most that any wrapper can reach."
            ],
        )
        report.show()
        if args.markdown:
            report.write_markdown(args.markdown)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
