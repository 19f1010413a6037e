"""Training with virtual ranks, for the tests that compare numbers of processes; and the same by hand.

What differs between frameworks is in virtual_torch and virtual_paddle: models, losses, and how tensors,
optimizers and loaders are handled.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from paceline.data import DistributedBatchSampler

LENGTH, GLOBAL_BATCH = 40, 16  # three steps an epoch, the last one padded
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # a model, and options of the wrapper
    "cnn": ("cnn", {}),
    "averaged": ("cnn", {"buffers": {"*": "average"}}),
    "gpt": ("gpt", {}),
    "views": ("gpt", {"gradient_as_bucket_view": True}),
    "half": ("half", {}),
    "half views": ("half", {"gradient_as_bucket_view": True}),
    "words": ("words", {}),
}


def adapter(framework: str) -> ModuleType:
    return importlib.import_module(f"tests.multiprocess.virtual_{framework}")


class Images:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal((3, 8, 8)).astype(np.float32)


class Texts(Images):
    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).integers(0, 32, 12)


SAMPLES = {"cnn": Images, "gpt": Texts, "half": Images, "words": Texts}
OPTIMIZERS = {"half": "sgd", "words": "sgd"}  # Paddle has no other for bfloat16 on a CPU; else "adamw"


class Run:
    """One process's."""

    def __init__(
        self, framework: str, kind: str, rank: int, world_size: int, group: Any, virtual_ranks: int = 8
    ) -> None:
        self._do = do = adapter(framework)
        name, options = KINDS[kind]
        make, self.loss_of = do.MODELS[name]
        seed(do, 5)
        self._names = do.names()
        with self._names():
            model = make()
            seed(do, 100 + rank)  # what comes must not depend on it
            self.ddp = do.wrap(model, group, virtual_ranks=virtual_ranks, **options)
            self.optimizer = do.optimizer(model, OPTIMIZERS.get(name, "adamw"))
        self.sampler = DistributedBatchSampler(
            range(LENGTH),
            num_replicas=world_size,
            rank=rank,
            shuffle=True,
            global_batch_size=GLOBAL_BATCH,
            virtual_ranks=virtual_ranks,
        )
        self.loader = do.DataLoader(SAMPLES[name](), batch_sampler=self.sampler)
        for state in ("optimizer", "sampler"):
            self.ddp.register_state(state, getattr(self, state))

    def train(self, steps: int) -> str:
        """Make so many steps; a digest of all that they have changed."""
        made = 0
        while made < steps:
            for step in self.ddp.steps(self.loader, seed=3):
                for batch in step:
                    self.loss_of(self.ddp, batch[0] if isinstance(batch, (list, tuple)) else batch).backward()
                with self._names():
                    self.optimizer.step()
                self._do.zero_grad(self.optimizer)
                self.sampler.commit()
                made += 1
                if made == steps:
                    break
        return self.digest()

    def digest(self) -> str:
        return digest_of(self._do, self.ddp.module, self.optimizer)


def by_hand(framework: str, kind: str, steps: int) -> str:
    """The same with the framework alone: eight micro-batches one after the other, and a tree written out."""
    do = adapter(framework)
    name, options = KINDS[kind]
    make, loss_of = do.MODELS[name]
    seed(do, 5)
    names = do.names()
    with names():
        model, data = make(), SAMPLES[name]()
        optimizer = do.optimizer(model, OPTIMIZERS.get(name, "adamw"))
    trained, buffers = do.trained(model), do.buffers(model)
    with do.one_thread():
        for number, samples_of in zip(range(steps), global_batches()):
            before = [np.array(buffer.numpy()) for buffer in buffers]
            gradients, after = [], []
            for rank in range(8):
                for buffer, value in zip(buffers, before):
                    do.write(buffer, value)
                batch = do.tensor(np.stack([data[index] for index in samples_of[rank::8]]))
                seed(do, number_of(3, number, "micro-batch", rank))
                loss_of(model, batch).backward()
                gradients.append([do.leaf(parameter.grad) for parameter in trained])
                after.append([np.array(buffer.numpy()) for buffer in buffers])
                do.drop_gradients(optimizer)
            for parameter, leaves in zip(trained, zip(*gradients)):
                give_mean(do, parameter, leaves, [1.0] * 8)
            for buffer, values in zip(buffers, zip(*after)):
                is_averaged = "buffers" in options and values[0].dtype.kind == "f"
                do.write(buffer, tree(values) / np.float32(8) if is_averaged else values[0])
            with names():
                optimizer.step()
            do.drop_gradients(optimizer)
    return digest_of(do, model, optimizer)


def seed(do: ModuleType, number: int) -> None:
    do.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def digest_of(do: ModuleType, model: Any, optimizer: Any) -> str:
    digest = hashlib.sha256()
    for values in (model.state_dict(), do.state_of(optimizer)):
        for name, tensor in sorted(values.items()):
            digest.update(name.encode() + do.bits(tensor))
    return digest.hexdigest()


def give_mean(do: ModuleType, parameter: Any, leaves: Sequence[Any], weights: Sequence[float]) -> None:
    """Give it the mean over virtual ranks of these arrays, or rows of arrays; None stands for zeros."""
    given = [(leaf, weight) for leaf, weight in zip(leaves, weights) if leaf is not None and weight]
    if given and isinstance(given[0][0], tuple):
        do.give_rows(parameter, [(*leaf, weight) for leaf, weight in given], sum(weights))
        return
    none = np.zeros(parameter.shape, np.float32)
    weighted = [none if leaf is None else leaf * leaf.dtype.type(w) for leaf, w in zip(leaves, weights)]
    parameter.grad = do.tensor(tree(weighted) / np.float32(sum(weights)), parameter.dtype)


def tree(leaves: Sequence[Any]) -> Any:
    """The sum of neighbours, then of neighbouring sums, and so on; an odd one is carried up."""
    while len(leaves) > 1:
        pairs = [one + other for one, other in zip(leaves[::2], leaves[1::2])]
        leaves = [*pairs, *leaves[2 * len(pairs) :]]
    return leaves[0]


def global_batches(
    length: int = LENGTH, global_batch: int = GLOBAL_BATCH, **options: Any
) -> Iterator[list[int]]:
    sampler = DistributedBatchSampler(
        range(length), num_replicas=1, rank=0, shuffle=True, global_batch_size=global_batch, **options
    )
    while True:
        yield from sampler


def number_of(*parts: object) -> int:
    """The seed of a micro-batch, of (seed, step, "micro-batch", virtual rank)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
