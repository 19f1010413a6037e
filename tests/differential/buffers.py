"""Generated programs whose forwards write and read buffers, compared with torch's own DDP.

make fuzz WHAT=buffers SEEDS=0:200

If only some ranks write a buffer between two steps, every rank must raise. A write by a forward is no error,
however it is done: in place, by reassigning, through `.data`, an index or `out=`, with and without gradients,
in training and in evaluation; the whole of a buffer or a slice of a larger one. So the only programs here
that may raise or warn are those whose last operation writes on some ranks only, whether the framework can see
the write or not: then all ranks raise. Gradients, and rank 0's buffers, must equal those of torch's class. It
broadcasts buffers at the start of each forward, and Paceline after each backward, so gradients are compared
only if one forward follows one backward. They are not compared while ranks have other values in between:
after evaluations that write, uneven data, and forwards of another wrapped model with the same layers.

Paddle's class leaves buffers to each rank, so a write on some ranks only is a warning there. The programs of
Paddle, in `buffers_paddle.py`, continue after it, and are compared with both ranks in one process.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import run_ranks

FRAMEWORKS = ("torch", "paddle")
WIDTH = 3
LARGE, PLACE = 200, 40
"""The size of a larger buffer, and the position of the mean in it: no quick check samples these bytes."""
LR = 0.05
WAYS = ("in place", "reassigned", "data", "index", "out", "set", "twice", "detached")
APART = ("train", "train", "other", "uneven")
"""After these the ranks' values differ from those under torch's class."""
Seen = list[tuple[str, list[np.ndarray | None]]]
"""One entry after each operation: the kind of values, and the values."""


def generate(seed: int, framework: str = "torch") -> Program:
    """The program of a seed."""
    random_ = random.Random(seed)
    layers = []
    for _ in range(random_.randint(1, 3)):
        if random_.random() < 0.25:
            layers.append({"kind": "norm"})
            continue
        layers.append(
            {
                "kind": "writer",
                "way": random_.choice(WAYS),
                "with_grad": random_.random() < 0.3,
                "in_eval": random_.random() < 0.4,
                "reads": random_.choice(["before", "after", "never"]),
                "is_persistent": random_.random() < 0.7,
            }
        )
    writes_in_eval = any(layer.get("in_eval") for layer in layers)
    kinds = ["step"] * 6 + ["micro", "two", "evaluate", "evaluate", "lost", "write", "inner", "load"]
    if writes_in_eval or random_.random() < 0.4:
        kinds += APART
    ops: list[dict[str, Any]] = []
    is_apart = False  # whether forwards have left other values on each rank
    for _ in range(random_.randint(3, 10)):
        op: dict[str, Any] = {"op": random_.choice(kinds)}
        if (op["op"] == "load" and is_apart) or (op["op"] == "inner" and writes_in_eval):
            op["op"] = "write"  # otherwise the program itself would write other values on each rank
        if op["op"] in ("evaluate", "inner"):
            op |= {"who": random_.choice(["all", "rank 0"]), "with_grad": random_.random() < 0.4}
        if op["op"] == "uneven":
            op |= {"counts": random_.choice([[1, 2], [2, 1], [0, 2], [2, 2]])}
        if op["op"] not in ("inner", "load"):
            is_apart = op["op"] == "train" or (op["op"] == "evaluate" and writes_in_eval)
        ops.append(op)
    # From another generator, so that a seed makes the same program as before one rank could load alone.
    loads = random.Random(f"loads {seed}")
    for op in ops:
        if op["op"] == "load":
            op["who"] = loads.choice(["all", "rank 0", "rank 1"])
    ops += [{"op": "step"}, {"op": "step"}]
    options = {
        "gradient_as_bucket_view": random_.random() < 0.3,
        "reduce_through": random_.choice(["auto", "group"]),
    }
    if framework == "paddle":
        _for_paddle(ops, options, random.Random(f"paddle {seed}"))
    ends_apart = random_.choice([None, None, 0, 1])  # the rank that alone makes the last write
    if all(layer.get("reads") in (None, "never") for layer in layers):  # no training reads these
        ends_apart = None
    return {
        "seed": seed,
        "layers": layers,
        "ops": ops,
        "options": options,
        "ends_apart": ends_apart,
        "ends_with_evaluation": random_.random() < 0.3,
        # From another generator, as above.
        **_large(layers, random.Random(f"large {seed}")),
    }


def _large(layers: list[dict[str, Any]], random_: random.Random) -> dict[str, Any]:
    """Make means slices of larger buffers, and make the last write invisible to the framework."""
    for layer in layers:
        if layer["kind"] == "writer" and random_.random() < 0.4:
            layer["is_large"] = True
    return {"ends_by": random_.choice(["add_", "numpy", "data"])}


def _for_paddle(ops: list[dict[str, Any]], options: dict[str, Any], random_: random.Random) -> None:
    """Make some ranks write alone in the middle, too, which Paddle's class allows."""
    for number, op in enumerate(ops):
        if op["op"] in ("other", "uneven"):  # the fuzzer of one backward covers these
            ops[number] = {"op": "step"}
    if random_.random() < 0.4:
        for _ in range(random_.randint(1, 3)):
            ops.insert(random_.randrange(len(ops)), {"op": "apart", "who": random_.randrange(2)})


class Writer(nn.Module):
    """Adds a running mean to its input, and counts its calls."""

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.place = slice(PLACE, PLACE + WIDTH) if spec.get("is_large") else slice(None)
        size = LARGE if spec.get("is_large") else WIDTH
        self.register_buffer("mean", torch.zeros(size), persistent=spec["is_persistent"])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reads = self.spec["reads"]
        if reads == "before":
            x = x + 0.3 * self.mean[self.place].clone()
        if self.training or self.spec["in_eval"]:
            with contextlib.nullcontext() if self.spec["with_grad"] else torch.no_grad():
                self._write(x.detach())
        return x + 0.3 * self.mean[self.place].clone() if reads == "after" else x

    def _write(self, x: torch.Tensor) -> None:
        way = self.spec["way"]
        mean = self.mean[self.place]
        now = 0.5 * mean + 0.5 * x.mean(0)
        if way in ("reassigned", "set"):
            whole = self.mean.clone()
            whole[self.place] = now
        if way == "reassigned":
            self.mean, self.count = whole, self.count + 1
            return
        self.count += 1
        if way == "data":
            self.mean.data[self.place] = now
        elif way == "index":
            for place in range(WIDTH):
                mean[place] = now[place]
        elif way == "out":
            torch.mul(now, 1.0, out=mean)
        elif way == "set":
            self.mean.set_(whole)
        elif way == "detached":
            mean.detach().copy_(now)
        else:
            mean.copy_(now)
            if way == "twice":
                mean.mul_(0.9).add_(0.1)


def network(program: Program) -> nn.Sequential:
    torch.manual_seed(program["seed"])
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for spec in program["layers"]:
        layers.append(nn.BatchNorm1d(WIDTH) if spec["kind"] == "norm" else Writer(spec))
        layers.append(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


def run(rank: int, program: Program, is_torchs: bool) -> Seen:
    """The values that this rank sees, under torch's class or Paceline's."""
    from paceline.errors import ReplicasDifferError
    from paceline.torch import DistributedDataParallel

    net = network(program)
    options = {key: value for key, value in program["options"].items() if key != "reduce_through"}
    wrapped = TorchDDP(net, **options) if is_torchs else DistributedDataParallel(net, **program["options"])
    other: Any = None
    if any(op["op"] == "other" for op in program["ops"]):
        other = (TorchDDP if is_torchs else DistributedDataParallel)(_another(net, program["seed"]))
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    numbers = np.random.default_rng([program["seed"], rank])
    seen: Seen = []

    def loss(model: nn.Module) -> torch.Tensor:
        x = torch.from_numpy(numbers.standard_normal((4, WIDTH)).astype(np.float32))
        return model(x).square().mean()

    for op in program["ops"]:
        optimizer.zero_grad()
        what = op["op"]
        if what == "step":
            loss(wrapped).backward()
            seen.append(("gradients", [_array(parameter.grad) for parameter in net.parameters()]))
            optimizer.step()
        elif what == "micro":
            with wrapped.no_sync():
                loss(wrapped).backward()
            loss(wrapped).backward()
        elif what == "two":
            (loss(wrapped) + loss(wrapped)).backward()
        elif what == "lost":  # a forward without a backward
            loss(wrapped)
            loss(wrapped).backward()
        elif what in ("evaluate", "inner"):
            _evaluate(rank, op, net if is_torchs or what == "inner" else wrapped, loss)
        elif what == "train":
            with torch.no_grad():
                loss(wrapped)
        elif what == "other":
            (loss(other) + loss(wrapped)).backward()
        elif what == "uneven":
            _train_unevenly(op["counts"][rank], wrapped, is_torchs, optimizer, loss)
        elif what == "write":
            for buffer in net.buffers():
                buffer.fill_(2)
        elif op["who"] in ("all", f"rank {rank}"):  # its present values, which are the same on all ranks
            net.load_state_dict(copy.deepcopy(net.state_dict()), strict=False)
        if rank == 0:
            seen.append(("buffers", [_array(buffer) for buffer in net.buffers()]))
    if program["ends_apart"] is not None and not is_torchs:
        if rank == program["ends_apart"]:
            _write_at_last(net, program["ends_by"])
        if program["ends_with_evaluation"]:
            with torch.no_grad():
                loss(wrapped)
        try:
            loss(wrapped).backward()
        except ReplicasDifferError:
            seen.append(("an error", []))
    return seen


def _write_at_last(net: nn.Module, way: str) -> None:
    large = [layer for layer in net.modules() if isinstance(layer, Writer) and layer.spec.get("is_large")]
    if way == "add_" or not large:
        for buffer in net.buffers():
            buffer.add_(1)
    for layer in large:
        if way == "numpy":
            layer.mean.numpy()[layer.place] += 1
        elif way == "data":
            layer.mean.data[layer.place] += 1


def _another(net: nn.Sequential, seed: int) -> nn.Sequential:
    """Another model with the same layers that have buffers."""
    torch.manual_seed(seed + 1)
    shared = [layer for layer in net if isinstance(layer, Writer)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *shared)


def _train_unevenly(
    count: int, wrapped: Any, is_torchs: bool, optimizer: torch.optim.Optimizer, loss: Any
) -> None:
    with wrapped.join() if is_torchs else contextlib.nullcontext():
        for _ in range(count) if is_torchs else wrapped.iterate(range(count)):
            optimizer.zero_grad()
            loss(wrapped).backward()
            optimizer.step()


def _evaluate(rank: int, op: dict[str, Any], model: nn.Module, loss: Any) -> None:
    model.eval()
    if op["who"] == "all" or rank == 0:
        with torch.set_grad_enabled(op["with_grad"]):
            loss(model)
    model.train()


def _array(tensor: torch.Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().numpy().copy()


def check(program: Program, framework: str = "torch") -> str:
    """The differences, in words; empty: none."""
    if framework == "paddle":
        return _check_paddle(program)
    ours, theirs = (
        run_ranks(run, 2, {"program": program, "is_torchs": is_torchs}, group="gloo")
        for is_torchs in (False, True)
    )
    # After evaluations that write, torch's ranks have rank 0's buffers; Paceline's keep their own until a
    # backward.
    is_compared = not any(layer.get("in_eval") for layer in program["layers"])
    is_compared &= not any(op["op"] in APART for op in program["ops"])
    for rank, (seen, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if program["ends_apart"] is not None:
            if not seen or seen[-1][0] != "an error":
                return f"rank {rank} has not heard that rank {program['ends_apart']} alone has written"
            seen = seen[:-1]
        if text := _difference(seen, wanted if is_compared else []):
            return f"rank {rank}, {text}"
    return ""


def _check_paddle(program: Program) -> str:
    from tests.differential import buffers_paddle

    ours = run_ranks(buffers_paddle.run, 2, {"program": program}, group=None, framework="paddle")
    (theirs,) = run_ranks(buffers_paddle.run_alone, 1, {"program": program}, group=None, framework="paddle")
    is_apart = program["ends_apart"] is not None or any(op["op"] == "apart" for op in program["ops"])
    for rank, (seen, wanted) in enumerate(zip(ours, theirs, strict=True)):
        is_warned = seen[-1][0] == buffers_paddle.WARNED
        if is_warned and not is_apart:
            return f"rank {rank} was warned, and no rank alone has written"
        if program["ends_apart"] is not None and not is_warned:
            return f"rank {rank} has not heard that rank {program['ends_apart']} alone has written"
        if text := _difference(seen, wanted):
            return f"rank {rank}, {text}"
    return ""


def _difference(seen: Seen, wanted: Seen) -> str:
    for number, ((what, values), (_, right)) in enumerate(zip(seen, wanted)):
        for index, (value, expected) in enumerate(zip(values, right, strict=True)):
            if value is None or expected is None:
                if value is not expected:
                    return f"{number}: one of {what} {index} is missing"
            elif not np.allclose(value, expected, rtol=1e-4, atol=1e-5):
                return f"{number}: {what} {index} differ by {np.abs(value - expected).max():.3g}"
    return ""


def show(program: Program) -> str:
    rows = [f"{key}: {program[key]}" for key in ("options", "ends_apart")]
    rows += [f"layer {spec}" for spec in program["layers"]]
    return "\n".join([*rows, *(f"{number:3d} {op}" for number, op in enumerate(program["ops"]))])


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
