"""Generated trainings with virtual ranks, on random numbers of processes, stopped and resumed.

make fuzz WHAT=virtual_ranks SEEDS=0:200

A program has a network, virtual ranks, and some of: norms, dropout, random numbers of numpy, a layer that
only some micro-batches use, layers that are frozen and trained again, parameters of 16 bits, sparse
gradients, weights, clipping. It is trained on one process, on a random number of processes, and once more
with stops, after each of which another number of processes continues. All must end with the same bits of
parameters, buffers and the optimizer's state, and close to those of the framework alone, which makes one
micro-batch after the other and adds the gradients in a tree written out in numpy.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from paceline.collectives.group import Group
from paceline.data import DistributedBatchSampler
from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import RanksFailed, run_ranks
from tests.multiprocess.virtual_training import adapter, digest_of, give_mean, global_batches, number_of, seed

FRAMEWORKS = ("torch", "paddle")
WIDTH, MICRO_BATCH, LENGTH = 6, 3, 60
# The numbers of processes that can run so many virtual ranks (docs/same-result.md).
PROCESSES = {2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 3, 4), 5: (1, 2, 3), 6: (1, 2, 3, 4), 8: (1, 2, 3, 4)}
# An optimizer that has loaded a state refuses parameters which were first trained after that.
_PADDLES_OWN = "Optimizer set error"


def generate(seed: int, framework: str = "torch") -> Program:
    """The program of a seed: a network, its training, and the numbers of processes."""
    draw = random.Random(f"virtual ranks {seed}")
    virtual_ranks, steps = draw.choice([2, 3, 4, 4, 5, 6, 8, 8]), draw.randint(2, 7)
    kinds = ["linear", "linear", "norm", "norm", "dropout", "tanh", "tanh"]
    layers = ["linear", *(draw.choice(kinds) for _ in range(draw.randint(1, 5))), "linear"]
    linear = [number for number, kind in enumerate(layers) if kind == "linear"]
    toggles = [
        [draw.randrange(steps), draw.choice(linear[1:])] for _ in range(draw.choice([0, 0, 1, 2]))
    ]  # before these steps, a layer is frozen, or trained again
    weights = None
    if draw.random() < 0.4:
        weights = [_weights(draw, virtual_ranks) for _ in range(steps)]
    program = {
        "seed": seed,
        "virtual_ranks": virtual_ranks,
        "processes": draw.choice(PROCESSES[virtual_ranks][1:]),
        "parts": _parts(draw, steps, virtual_ranks),
        "layers": layers,
        "skips": draw.random() < 0.3,  # some micro-batches leave out a layer
        "table": False,
        "toggles": sorted(toggles),
        "weights": weights,
        "given": draw.choice(["scope", "before"]),
        "buffers": draw.choice([None, "average"]),
        "view": draw.random() < 0.3,
        "bucket_mb": draw.choice([None, 0.0001]),
        "clips": draw.random() < 0.3,
        "optimizer": draw.choice(["sgd", "momentum", "adamw"]),
        "steps": steps,
        "threads": draw.choice([1, 1, 2]),
    }
    if draw.random() < 0.35:
        kinds = ["linear", "bfloat16", "float16" if framework == "torch" else "bfloat16"]
        layers[:] = [draw.choice(kinds) if kind == "linear" else kind for kind in layers]
        if framework == "paddle":  # which has no others for bfloat16 on a CPU
            program |= {"optimizer": "sgd", "clips": False}
    if draw.random() < 0.35:  # no optimizer of torch but this one, and no clipping, takes sparse gradients
        program |= {"table": True, "optimizer": "sgd", "clips": False}
    return program


def _weights(draw: random.Random, count: int) -> list[float]:
    found = [draw.choice([0.0, 1.0, 1.0, 2.0, 3.5]) for _ in range(count)]
    return found if any(found) else _weights(draw, count)


def _parts(draw: random.Random, steps: int, virtual_ranks: int) -> list[list[int]]:
    """For each segment of the stopped training: the number of processes, and its first and last step."""
    ends = [*sorted(draw.sample(range(1, steps), min(steps - 1, draw.randint(1, 2)))), steps]
    return [[draw.choice(PROCESSES[virtual_ranks]), *part] for part in zip([0, *ends], ends)]


class Training:
    """One process's training, or (without a group) that of the framework alone."""

    def __init__(self, framework: str, program: Program) -> None:
        self.do: ModuleType = adapter(framework)
        self.program = program
        seed(self.do, 5)
        with self.do.names()():
            self.model = self.do.mlp(
                program["layers"], WIDTH, skips=program["skips"], has_table=program["table"]
            )
            self.optimizer = self.do.optimizer(self.model, program["optimizer"], clips=program["clips"])

    def toggle(self, step: int) -> None:
        for when, layer in self.program["toggles"]:
            if when == step:
                self.do.toggle(self.model.layers[layer])

    def loss(self, model: Any, batch: Any) -> Any:
        noisy = batch * (1 + 0.1 * float(np.random.rand())) + 0.1 * random.random()
        return (model(noisy) - batch.flip([1])).square().mean()


def run(group: Group, framework: str, program: Program, begin: int, end: int, folder: Path) -> Any:
    """Run a segment of the training: return the digest, and on rank 0 all values."""
    training = Training(framework, program)
    do, model, optimizer = training.do, training.model, training.optimizer
    options = {
        "find_unused_parameters": program["skips"] or bool(program["toggles"]),
        "gradient_as_bucket_view": program["view"],
        **({"buffers": {"*": program["buffers"]}} if program["buffers"] else {}),
        **({"bucket_cap_mb": program["bucket_mb"]} if program["bucket_mb"] else {}),
    }
    ddp = do.wrap(model, group, virtual_ranks=program["virtual_ranks"], **options)
    sampler = _sampler(program, group.world_size, group.rank)
    loader = do.DataLoader(_Samples(), batch_sampler=sampler)
    ddp.register_state("optimizer", optimizer)
    ddp.register_state("sampler", sampler)
    for step in range(begin + bool(begin)):
        training.toggle(step)
    if begin:
        ddp.load_training_state(do.load(folder / f"{begin}"))
    number = begin
    while number < end:
        for step in ddp.steps(loader, seed=3, threads=program["threads"]):
            if number > begin or not begin:
                training.toggle(number)
            for batch, rank in zip(step, ddp._virtual.played):  # in this order, to the end of the step
                batch = batch[0] if isinstance(batch, (list, tuple)) else batch
                with contextlib.ExitStack() as scopes:
                    if program["weights"] is not None:
                        weight = ddp.weight(program["weights"][number][rank])
                        if program["given"] == "scope":
                            scopes.enter_context(weight)
                    training.loss(ddp, batch).backward()
            with do.names()():
                optimizer.step()
            do.zero_grad(optimizer)
            sampler.commit()
            number += 1
            if number == end:
                break
    if state := ddp.training_state():
        do.save(state, folder / f"{end}")
    values = {name: do.array(each) for name, each in model.state_dict().items()}
    return digest_of(do, model, optimizer), values if group.rank == 0 else None


def by_hand(_: Group, framework: str, program: Program) -> dict[str, np.ndarray]:
    """The framework alone: one micro-batch after the other."""
    training = Training(framework, program)
    do, model, optimizer = training.do, training.model, training.optimizer
    data, count = _Samples(), program["virtual_ranks"]
    parameters, buffers = list(model.parameters()), do.buffers(model)
    batches = global_batches(LENGTH, MICRO_BATCH * count, drop_last=True)
    with do.one_thread():
        for step, samples in zip(range(program["steps"]), batches):
            training.toggle(step)
            before = [np.array(buffer.numpy()) for buffer in buffers]
            weights = [1.0] * count if program["weights"] is None else program["weights"][step]
            leaves: list[list[Any]] = [[] for _ in parameters]
            after = []
            for rank in range(count):
                for buffer, value in zip(buffers, before):
                    do.write(buffer, value)
                seed(do, number_of(3, step, "micro-batch", rank))
                batch = do.tensor(np.stack([data[index] for index in samples[rank::count]]))
                training.loss(model, batch).backward()
                for parameter, each in zip(parameters, leaves):
                    each.append(None if parameter.grad is None else do.leaf(parameter.grad))
                after.append([np.array(buffer.numpy()) for buffer in buffers])
                do.drop_gradients(optimizer)
            for parameter, each in zip(parameters, leaves):
                if any(leaf is not None for leaf in each):
                    give_mean(do, parameter, each, weights)
            for buffer, values in zip(buffers, zip(*after)):
                is_averaged = program["buffers"] == "average" and values[0].dtype.kind == "f"
                mean = np.mean(np.array(values, np.float64), 0).astype(values[0].dtype)
                do.write(buffer, mean if is_averaged else values[0])
            with do.names()():
                optimizer.step()
            do.drop_gradients(optimizer)
    return {name: do.array(each) for name, each in model.state_dict().items()}


class _Samples:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)


def _sampler(program: Program, world_size: int, rank: int) -> Any:
    return DistributedBatchSampler(
        range(LENGTH),
        num_replicas=world_size,
        rank=rank,
        shuffle=True,
        global_batch_size=MICRO_BATCH * program["virtual_ranks"],
        virtual_ranks=program["virtual_ranks"],
        drop_last=True,
    )


# --- the comparison ---


def check(program: Program, framework: str = "torch") -> str:
    """The differences, in words; empty: none."""
    trainings = {
        "1 process": [[1, 0, program["steps"]]],
        f"{program['processes']} processes": [[program["processes"], 0, program["steps"]]],
        "with stops": program["parts"],
    }
    found: dict[str, set[str]] = {}
    for name, parts in trainings.items():
        with tempfile.TemporaryDirectory() as folder:
            for processes, begin, end in parts:
                options = {"framework": framework, "program": program, "begin": begin, "end": end}
                options["folder"] = Path(folder)
                try:
                    ended = run_ranks(run, processes, options, framework=framework, kept=True)
                except RanksFailed as error:
                    if _PADDLES_OWN in str(error):
                        return ""
                    raise
        found[name] = {digest for digest, _ in ended}
    if len(set.union(*found.values())) > 1:
        return f"the bits differ: {found}"
    options = {"framework": framework, "program": program}
    (expected,) = run_ranks(by_hand, 1, options, framework=framework, kept=True)
    for name, value in ended[0][1].items():
        if not np.allclose(value, expected[name], rtol=2e-3, atol=2e-5):
            return f"{name} differs from the framework alone by {np.abs(value - expected[name]).max():.3g}"
    return ""


def show(program: Program) -> str:
    return "\n".join(f"{name}: {value}" for name, value in program.items())


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
