"""Trains on two ranks with the Trainer of Transformers, with torch's DDP and with Paceline's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from paceline.integrations.accelerate import use_paceline


class Sequences(Dataset[dict[str, Any]]):
    """Consecutive numbers; each sample starts at another one."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (torch.arange(12) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


class Wrapper(TrainerCallback):
    """Records the module of the class in which the Trainer wraps the model."""

    module = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped by then."""
        self.module = type(self.trainer.model_wrapped).__module__


def train(is_ours: bool, folder: Path, **options: Any) -> dict[str, Any]:
    set_seed(3)
    config = GPT2Config(
        vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **options,
    )
    callback = Wrapper()
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Sequences(),
        eval_dataset=Sequences(),
        callbacks=[callback],
    )
    callback.trainer = trainer
    if is_ours:
        use_paceline(trainer.accelerator)
    trainer.train()
    logs = trainer.state.log_history
    return {
        "losses": [log["loss"] for log in logs if "loss" in log],
        "norms": [float(log["grad_norm"]) for log in logs if "grad_norm" in log],
        "evaluation": trainer.evaluate()["eval_loss"],
        "wrapper": callback.module,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    found = {
        "plain": [train(ours, folder) for ours in (False, True)],
        "accumulated": [
            train(ours, folder, gradient_accumulation_steps=2, gradient_checkpointing=True)
            for ours in (False, True)
        ],
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
