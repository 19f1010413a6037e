"""Trains a small GPT on the source code of Python's standard library, character by character.

Real text that every machine has. At the end it writes some Python of its own.

    paceline run -n 2 examples/gpt.py
    paceline run -n 2 examples/gpt.py --steps 3000 --sample 2000
    torchrun --nproc-per-node 2 examples/gpt.py --ddp torch
"""

from __future__ import annotations

import argparse
import math
import os
import string
import sysconfig
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from live import Live, waited_s
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.data import DistributedSampler

ALPHABET = string.printable[:-2]  # without vertical tab and form feed


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if args.batch % ranks:
        raise SystemExit(f"--batch {args.batch} can't be shared equally by {ranks} processes")

    text = read_text(args.characters)
    held_out = len(text) // 20
    train_data, test_data = Windows(text[:-held_out], args.context), Windows(text[-held_out:], args.context)
    sampler = DistributedSampler(train_data, num_replicas=ranks, rank=rank, seed=args.seed)
    loader = DataLoader(train_data, batch_size=args.batch // ranks, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(f"--characters {args.characters} are too few for a batch of {args.batch}")

    torch.manual_seed(args.seed)
    gpt = Gpt(args.context, args.width, args.layers)
    model = wrap(gpt, args.ddp) if dist.is_initialized() else gpt
    if rank == 0:
        size = sum(weights.numel() for weights in gpt.parameters())
        print(f"{len(text):,} characters, {size:,} parameters, {ranks} processes", flush=True)
    train(model, loader, sampler, args, rank)
    if rank == 0:
        print(f"bits per character on held-out text: {bits_per_character(gpt, test_data):.2f}")
        print(f"{'-' * 72}\n{write(gpt, 'def ', args.sample)}\n{'-' * 72}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, Tensor]],
    sampler: DistributedSampler,
    args: argparse.Namespace,
    rank: int,
) -> None:
    """Train for `args.steps`; every rank sees its share of each epoch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm_up = max(1, args.steps // 20)
    step = 0
    with Live("gpt", args.steps, is_shown=rank == 0) as live:
        for epoch in count():
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                for group in optimizer.param_groups:
                    group["lr"] = args.lr * min(1, (step + 1) / warm_up) * (1 - step / args.steps)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
                step += 1
                live.step(epoch + 1, loss.item(), samples=args.batch, waited_s=waited_s(model))
                if step == args.steps:
                    return


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into pieces; the target of each character is the one that follows it."""

    def __init__(self, text: str, context: int) -> None:
        codes = {character: code for code, character in enumerate(ALPHABET)}
        self._codes = torch.tensor([codes[character] for character in text])
        self._context = context

    def __len__(self) -> int:
        return (len(self._codes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self._codes[index * self._context : (index + 1) * self._context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """A transformer block: attention to earlier characters, then a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads=max(1, width // 32)) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.places[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_text(characters: int) -> str:
    """The first `characters` of the standard library's own modules, the same on every process."""
    pieces: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        piece = path.read_text(encoding="utf-8", errors="ignore")
        pieces.append("".join(character for character in piece if character in ALPHABET))
        size += len(pieces[-1])
        if size >= characters:
            break
    return "".join(pieces)[:characters]


def wrap(model: nn.Module, ddp: str) -> nn.Module:
    """Paceline's DistributedDataParallel, or torch's; the rest of the script is the same."""
    if ddp == "torch":
        from torch.nn.parallel import DistributedDataParallel as DDP
    else:
        from paceline.torch import DistributedDataParallel as DDP
    return DDP(model)


@torch.no_grad()
def bits_per_character(gpt: Gpt, data: Windows) -> float:
    """How well the next character is foreseen; choosing blindly would take 6.6 bits."""
    losses = [
        nn.functional.cross_entropy(gpt(inputs).flatten(0, 1), targets.flatten())
        for inputs, targets in DataLoader(data, batch_size=64, drop_last=len(data) >= 64)
    ]
    return torch.stack(losses).mean().item() / math.log(2)


@torch.no_grad()
def write(gpt: Gpt, start: str, length: int) -> str:
    """Let the model go on from `start`, one character after the other."""
    codes = torch.tensor([[ALPHABET.index(character) for character in start]])
    for _ in range(length):
        scores = gpt(codes[:, -gpt.context :])[:, -1] / 0.8  # a bit bolder than it has learned
        codes = torch.cat([codes, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    return "".join(ALPHABET[code] for code in codes[0].tolist())


def parse_arguments() -> argparse.Namespace:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--ddp", choices=("paceline", "torch"), default="paceline")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=24, help="samples of one step, all processes together")
    parser.add_argument("--context", type=int, default=96, help="characters that the model looks back")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much text to read")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sample", type=int, default=500, help="characters to write at the end")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
