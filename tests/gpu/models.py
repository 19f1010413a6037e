"""The models of the bench of steps on a GPU, with their data, made anew from a seed wherever needed.

Imports torch, and not torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

FORMS = ("whole", "small", "tiny")


@dataclass(frozen=True)
class Task:
    """A model, its data and its loss, in one of three forms.

    "whole" is the real model. "small" has the same layers, but fewer, for a trial on a CPU. "tiny" has as
    many tensors as "whole", of a few elements each: a step takes little more than the host's time.

    Attributes:
        build: Makes the module in a form.
        batch: A batch from a generator, for a form.
        loss: Of the module's output and the batch's targets.
        autocast: Whether forward runs in bfloat16 under torch.autocast, as is usual for such a model.
    """

    build: Callable[[str], nn.Module]
    batch: Callable[[torch.Generator, str], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    autocast: bool = False

    def seeded(self, device: str, form: str) -> nn.Module:
        """The module on the device, with the same weights in every call and on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(form).to(device)

    def batch_of(self, rank: int, step: int, device: str, form: str) -> tuple[Tensor, Tensor]:
        """The batch of a rank in a step."""
        generator = torch.Generator().manual_seed(1000 * (step + 1) + rank)
        inputs, targets = self.batch(generator, form)
        return inputs.to(device), targets.to(device)


class _Bottleneck(nn.Module):
    """Three convolutions on a residual stream, as in a ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        is_same = stride == 1 and inputs == outputs
        shortcut = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _cnn(form: str) -> nn.Module:
    """ResNet-50: 25.6 million parameters in 161 tensors."""
    width, depths, classes = {
        "whole": (64, (3, 4, 6, 3), 1000),
        "small": (8, (1, 1, 1, 1), 10),
        "tiny": (1, (3, 4, 6, 3), 2),
    }[form]
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            layers.append(_Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class _Block(nn.Module):
    """Attention, then a two-layer perceptron, both on the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (third.unflatten(-1, (self.heads, -1)).transpose(1, 2) for third in thirds)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class _Gpt(nn.Module):
    """A decoder whose output layer is its table of words: 100.6 million parameters in its large form."""

    def __init__(self, words: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.words(tokens) + self.places(places)))
        return functional.linear(x, self.words.weight)


_WORDS, _LENGTH = 20000, 256


def _gpt(form: str) -> nn.Module:
    sizes = {"whole": (_WORDS, _LENGTH, 768, 12, 12), "small": (50, 16, 16, 2, 2), "tiny": (8, 4, 4, 12, 1)}
    return _Gpt(*sizes[form])


def _tokens(generator: torch.Generator, form: str) -> tuple[Tensor, Tensor]:
    sizes = {"whole": (8, _LENGTH, _WORDS), "small": (2, 16, 50), "tiny": (1, 4, 8)}
    count, length, words = sizes[form]
    # Each word follows from the one before it, so that there is a pattern to learn.
    rows = torch.randint(words, (count, 1), generator=generator)
    tokens = (rows + 7 * torch.arange(length + 1)) % words
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _images(generator: torch.Generator, form: str) -> tuple[Tensor, Tensor]:
    sizes = {"whole": (32, 128, 1000), "small": (4, 32, 10), "tiny": (2, 32, 2)}
    count, side, classes = sizes[form]
    targets = torch.randint(classes, (count,), generator=generator)
    noise = torch.randn(count, 3, side, side, generator=generator)
    return noise + targets.view(-1, 1, 1, 1) / classes, targets


def _toy(form: str) -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))


def _points(generator: torch.Generator, form: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(20, 10, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def _wide(form: str) -> nn.Module:
    width = {"whole": 1024, "small": 16, "tiny": 4}[form]
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(16)))


def _rows(generator: torch.Generator, form: str) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(4, {"whole": 1024, "small": 16, "tiny": 4}[form], generator=generator)
    return inputs, inputs.flip(1)


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def _word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


TASKS = {
    # As in the distributed tutorials: the cost of a step for a model that costs nothing itself.
    "toy": Task(_toy, _points, _squared_error),
    "cnn": Task(_cnn, _images, functional.cross_entropy),
    "gpt": Task(_gpt, _tokens, _word_loss, autocast=True),
    # For the memory of a step: 64 MiB of parameters, and hardly any activations.
    "wide": Task(_wide, _rows, _squared_error),
}
