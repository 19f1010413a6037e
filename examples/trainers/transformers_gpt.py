"""Trains a small GPT-2 to count, with the Trainer of Transformers. Nothing is downloaded.

    paceline run -n 2 examples/trainers/transformers_gpt.py

The line before `trainer.train()` is the one that uses Paceline.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from paceline.integrations.accelerate import use_paceline


class Counting(Dataset[dict[str, Any]]):
    """Sequences of consecutive numbers."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class NotesWrapper(TrainerCallback):
    """Keeps the module name of the class that wraps the model."""

    wrapper = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called when the model is already wrapped."""
        self.wrapper = type(self.trainer.model_wrapped).__module__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--report", type=Path, help="folder for the losses of each rank")
    args = parser.parse_args()

    set_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    notes = NotesWrapper()
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Counting(), callbacks=[notes]
    )
    notes.trainer = trainer
    use_paceline(trainer.accelerator)
    trainer.train()

    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, wrapped by {notes.wrapper}")
    if args.report:
        report = {"losses": losses, "wrapper": notes.wrapper}
        (args.report / f"{trainer.args.process_index}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
