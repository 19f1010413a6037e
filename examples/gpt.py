"""Trains a small GPT on the source code of Python's standard library, whose paragraphs differ in length.

    paceline run -n 2 examples/gpt.py
    torchrun --nproc-per-node 2 examples/gpt.py

The loss is a mean over tokens, and the batches of two ranks have different numbers of them. With `weight()`,
the gradient is the same as that of one process with the whole batch. What differs from the script for
torch's DDP:

    - from torch.nn.parallel import DistributedDataParallel as DDP
    + from paceline.torch import DistributedDataParallel as DDP

    -         all_tokens = tokens.clone()
    -         dist.all_reduce(all_tokens)
    -         (loss * tokens * world_size / all_tokens).backward()
    +         with model.weight(tokens):
    +             loss.backward()
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from paceline.torch import DistributedDataParallel as DDP

CONTEXT = 128  # tokens that the model sees at most
END = 0  # the token after a text; the others are its bytes


def read_texts(count):
    """Return paragraphs of code, each a sequence of at most CONTEXT + 1 tokens."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        paragraphs = [paragraph.strip(b"\n") for paragraph in path.read_bytes().split(b"\n\n")]
        texts += [torch.tensor([*text[:CONTEXT], END]) for text in paragraphs if len(text) > 20]
    return texts[:count]


def collate(texts):
    """The target of each token is the one that follows it; -100 marks padding."""
    inputs = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)
    return inputs, targets


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="texts of all ranks together")
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    texts = read_texts(args.steps * args.batch_size)
    sampler = DistributedSampler(texts)
    loader = DataLoader(texts, args.batch_size // world_size, sampler=sampler, collate_fn=collate)
    model = DDP(GPT(args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        tokens = (targets != -100).sum()
        optimizer.zero_grad()
        with model.weight(tokens):
            loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}  tokens {tokens}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
