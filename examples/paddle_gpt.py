"""Trains a small GPT on the source code of Python's standard library, whose paragraphs differ in length.

    paceline run -n 2 examples/paddle_gpt.py
    python -m paddle.distributed.launch --nproc_per_node 2 examples/paddle_gpt.py

The loss is a mean over tokens, and the batches of two ranks have different numbers of them. With `weight()`,
the gradient is the same as that of one process with the whole batch. What differs from the script for
paddle.DataParallel:

    + from paceline.paddle import DataParallel

    - model = paddle.DataParallel(GPT(args.width))
    + model = DataParallel(GPT(args.width))

    -         all_tokens = tokens.clone()
    -         dist.all_reduce(all_tokens)
    -         (loss * tokens * world_size / all_tokens).backward()
    +         with model.weight(tokens):
    +             loss.backward()
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.io import DataLoader, DistributedBatchSampler

from paceline.paddle import DataParallel

CONTEXT = 128  # tokens that the model sees at most
END = 0  # the token after a text; the others are its bytes
PADDING = 255  # a byte that no text contains; if it were negative, Paddle's mean would count padding


def read_texts(count):
    """Return paragraphs of code, each a sequence of at most CONTEXT + 1 tokens."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        paragraphs = [paragraph.strip(b"\n") for paragraph in path.read_bytes().split(b"\n\n")]
        texts += [np.array([*text[:CONTEXT], END]) for text in paragraphs if len(text) > 20]
    return texts[:count]


def collate(texts):
    """The target of each token is the one that follows it."""
    length = max(len(text) for text in texts) - 1
    inputs, targets = np.zeros((len(texts), length), "int64"), np.full((len(texts), length), PADDING)
    for row, text in enumerate(texts):
        inputs[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
    return inputs, targets


class Block(nn.Layer):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape([batch, length, 3, self.heads, width // self.heads])
        attended = F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
        x = x + self.proj(attended.flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Layer):
    def __init__(self, width, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias_attr=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(paddle.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="texts of all ranks together")
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()

    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    paddle.seed(0)
    texts = read_texts(args.steps * args.batch_size)
    sampler = DistributedBatchSampler(texts, args.batch_size // world_size, shuffle=True)
    loader = DataLoader(texts, batch_sampler=sampler, collate_fn=collate)
    model = DataParallel(GPT(args.width))
    optimizer = paddle.optimizer.AdamW(2e-3, parameters=model.parameters())

    for step, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)
        tokens = (targets != PADDING).sum()
        with model.weight(tokens):
            loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}  tokens {int(tokens)}  loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
