"""Generated programs of compressed gradients, compared with their sums in float64.

make fuzz WHAT=kept_errors SEEDS=0:200 FRAMEWORK=paddle

The fuzzer of one backward (the rest of this folder) compares each mean; with compression only the sum over
many means is right. So here the gradients are the program's own, and a program ends with backwards of zeros,
which send the remaining errors. Then the total received of each parameter, over all good backwards that used
it, is the sum of its true means. In between there are backwards that are not finite, on one rank or all; that
raise in a hook of the user's; that leave parameters out although that is not allowed; and micro-batches. Some
programs use local SGD, whose hosts synchronise in between, or fail to. The sums share no code with Paceline.
All ranks must have the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import run_ranks
from tests.several_hosts import be_on_host

FRAMEWORKS = ("torch", "paddle")
BETWEEN_HOSTS = ("topk", "int8", "bf16", "fp16")
HOOKS = ("eight_bit", "bf16", "fp16")
DRAINS = {"topk": 80}  # it sends 8 of 256 values; the others need few
EVERYTHING: dict[str, Any] = {"how": "unused", "left_out": [], "some": [], "of": 0}
SPOILS = ("inf", "inf", "nan", "overflow", "raise", "raise on one", "refused")


def generate(seed: int, framework: str = "torch") -> Program:
    """The program of a seed: the ranks of each host, the wrapper's options, and all ranks' operations."""
    program = _of_torch(seed)
    return _for_paddle(program) if framework == "paddle" else program


def _of_torch(seed: int) -> Program:
    random_ = random.Random(seed)
    hosts = random_.choice([[0, 1], [0, 1], [0, 0, 1], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1, 1]])
    world_size = len(hosts)
    is_hook = random_.random() < 0.3
    codes = random_.choice(HOOKS if is_hook else BETWEEN_HOSTS)
    sizes = [random_.choice([1, 3, 40, 255, 256, 700, 3000]) for _ in range(random_.randint(2, 6))]
    if random_.random() < 0.15:
        sizes[0] = 60_000  # large enough for two rounds between three hosts
    allows = random_.random() < 0.8
    options = {
        "find_unused_parameters": allows,
        "gradient_as_bucket_view": random_.random() < 0.4,
        "bucket_cap_mb": random_.choice([0.001, 0.01, 25]),
        "nonfinite": random_.choice(["ignore", "raise", "warn"]),
    }
    weights = [random_.choice([1.0, 2.0, 0.5]) for _ in hosts] if random_.random() < 0.3 else None
    ops: list[dict[str, Any]] = []
    for _ in range(random_.randint(3, 9)):
        kind = random_.choices(["step", "spoil", "turns"], weights=[4, 3, 3])[0]
        if kind == "spoil":
            what = random_.choice(SPOILS if not allows else SPOILS[:-1])
            # Codes of fp16 are finite, and the rest is sent later. After a step with weights, gradients are
            # multiplied by their fraction of its weights before they are added up: such a sum may be finite.
            if what == "overflow" and (codes == "fp16" or weights is not None):
                what = "nan"
            ops.append(
                {
                    "op": "spoil",
                    "what": what,
                    "rank": random_.randrange(world_size),
                    "param": random_.randrange(len(sizes)),
                    "micros": random_.choice([1, 1, 2]),
                    "times": random_.choice([1, 1, 2]),
                }
            )
            continue
        left_out: list[int] = []
        if kind == "turns":
            left_out = random_.sample(range(len(sizes)), random_.randint(1, len(sizes) - 1))
        trained = [index for index in range(len(sizes)) if index not in left_out]
        has_some = allows and len(trained) > 1 and random_.random() < 0.3
        op = {
            "op": "step",
            "how": "frozen" if not allows else random_.choice(["unused", "frozen"]),
            "left_out": left_out,
            "scale": random_.choice([1.0, 1.0, 100.0]),
            "micros": random_.choice([1, 1, 2]),
            # In these, some ranks leave out parameters that other ranks use.
            "some": random_.sample(trained, 1) if has_some else [],
            "of": random_.randrange(world_size),
        }
        ops += [op] * random_.choice([1, 1, 2, 5])
    program = {"seed": seed, "hosts": hosts, "codes": codes, "is_hook": is_hook, "sizes": sizes}
    program |= {"options": options, "weights": weights, "ops": ops}
    # From another generator, so that a seed makes the same program as before these were added.
    more = random.Random(f"more {seed}")
    program["to_none"] = more.random() < 0.7
    if not is_hook and more.random() < 0.3:
        program |= {"every": more.choice([1, 1, 2, 3]), "weights": None}
        for op in ops:
            if op["op"] == "spoil":
                op["what"] = "sync"
    return program


def _for_paddle(program: Program) -> Program:
    """Without frozen parameters, because a model is wrapped anew to freeze them."""
    allows = program["options"]["find_unused_parameters"]
    ops = [
        {**op, "how": "unused", "left_out": op["left_out"] if allows else []} if op["op"] == "step" else op
        for op in program["ops"]
    ]
    program = {key: value for key, value in program.items() if key != "every"}
    return {**program, "ops": [op for op in ops if op.get("what") != "sync"]}


def gradient(program: Program, op: int, micro: int, rank: int, index: int, scale: float) -> np.ndarray:
    drawn = np.random.default_rng([op, micro, rank, index]).standard_normal(program["sizes"][index])
    return (drawn * scale).astype(np.float32)


def uses(op: dict[str, Any], rank: int, index: int) -> bool:
    """True if a rank uses a parameter in a step."""
    is_left_out = index in op["left_out"] or (index in op["some"] and rank != op["of"])
    return not (is_left_out and (op["how"] == "unused" or index in op["some"]))


def is_there(op: dict[str, Any], index: int) -> bool:
    """True if any rank trains it."""
    return index not in op["left_out"]


# --- one rank ---


class OnTorch:
    """The operations of a program, in torch."""

    def __init__(self, program: Program, rank: int) -> None:
        import torch
        from torch import nn

        from paceline.torch import DistributedDataParallel, compression

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in program["sizes"])

            def forward(self, given: dict[int, Any]) -> Any:
                return sum((self.parts[index] * value).sum() for index, value in given.items())

        self.net, self.tensor, self._to_none = Net(), torch.from_numpy, program["to_none"]
        self.parameters = list(self.net.parameters())
        self.ddp = wrap(program, self.net, DistributedDataParallel, compression)

    def freeze(self, frozen: list[int]) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.requires_grad_(index not in frozen)

    def clear(self) -> None:
        self.net.zero_grad(set_to_none=self._to_none)


class OnPaddle:
    """The operations of a program, in Paddle."""

    def __init__(self, program: Program, rank: int) -> None:
        import paddle
        from paddle import nn

        from paceline.paddle import DataParallel, compression
        from tests.multiprocess.paddle_models import join_paddle

        class Net(nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                zeros = nn.initializer.Constant(0.0)
                make = self.create_parameter
                parts = [make([size], default_initializer=zeros) for size in program["sizes"]]
                self.parts = nn.ParameterList(parts)

            def forward(self, given: dict[int, Any]) -> Any:
                parts = list(self.parts)
                return sum((parts[index] * value).sum() for index, value in given.items())

        join_paddle(rank)
        self.net, self.tensor, self._to_none = Net(), paddle.to_tensor, program["to_none"]
        self.parameters = list(self.net.parameters())
        self.ddp = wrap(program, self.net, DataParallel, compression)

    def clear(self) -> None:
        for parameter in self.parameters:
            if self._to_none:
                parameter.grad = None
            else:  # to zeros, whatever set_to_zero= is; they count as a gradient
                parameter.clear_gradient()


def wrap(program: Program, net: Any, wrapper: Callable[..., Any], compression: Any) -> Any:
    options, codes = program["options"], program["codes"]
    if "every" in program:
        from paceline.torch import LocalSGD

        options = {**options, "local_sgd": LocalSGD(program["every"], outer_lr=1, outer_momentum=0)}
    if not program["is_hook"]:
        return wrapper(net, timeout_s=20, compress_between_hosts=codes, **options)
    ddp = wrapper(net, timeout_s=20, reduce_through="group", **options)
    names = {"eight_bit": "EightBitCompression", "bf16": "Bf16Compression", "fp16": "Fp16Compression"}
    ddp.register_comm_hook(getattr(compression, names[codes])(), getattr(compression, f"{codes}_hook"))
    return ddp


class Failed(Exception):
    """A hook of the program's."""


def run(group: Any, program: Program, framework: str) -> list[tuple[str, list[np.ndarray | None]]]:
    """A digest of all gradients for each good backward; and the gradients, from rank 0 only."""
    rank = int(group)
    be_on_host(program["hosts"][rank])
    do: Any = (OnTorch if framework == "torch" else OnPaddle)(program, rank)
    if "every" in program:
        return _run_local(do, program, rank)
    found: list[tuple[str, list[np.ndarray | None]]] = []
    for number, op in enumerate(program["ops"]):
        if op["op"] == "spoil":
            for time in range(op["times"]):
                _spoil(do, program, op, number * 10 + time, rank)
        else:
            if op["how"] == "frozen":
                do.freeze(op["left_out"])
            _backward(do, program, op, number, rank, op["scale"], op["micros"])
            found.append(_taken(do, rank))
            if op["how"] == "frozen":
                do.freeze([])
    for _ in range(DRAINS.get(program["codes"], 6)):
        _backward(do, program, EVERYTHING, 0, rank, 0.0, 1)
        found.append(_taken(do, rank))
    return found


def _run_local(do: Any, program: Program, rank: int) -> list[tuple[str, list[np.ndarray | None]]]:
    """With local SGD: the total gradients that all hosts have applied by a plain optimizer."""
    import torch

    from paceline.errors import NonFiniteGradientError

    optimizer = torch.optim.SGD(do.parameters, lr=1.0)
    for number, op in enumerate(program["ops"]):
        if op["op"] == "step":
            do.freeze(op["left_out"] if op["how"] == "frozen" else [])
            _backward(do, program, op, number, rank, op["scale"], op["micros"])
            optimizer.step()
            do.freeze([])
        elif do.ddp._outer_sync.since:
            weight = do.parameters[op["param"]]
            before = weight.detach().clone()
            for _ in range(op["times"]):
                if rank == op["rank"]:
                    weight.data.fill_(float("nan"))
                with contextlib.suppress(NonFiniteGradientError):
                    do.ddp.sync_parameters()
                    raise AssertionError("a barrier with a NaN was good")
                weight.data.copy_(before)
    for _ in range(DRAINS.get(program["codes"], 6)):
        _backward(do, program, EVERYTHING, 0, rank, 0.0, 1)
        optimizer.step()
        do.ddp.sync_parameters()
    for parameter in do.parameters:
        parameter.grad = -parameter.detach()
    return [_taken(do, rank)]


def _backward(
    do: Any, program: Program, op: dict[str, Any], number: int, rank: int, scale: float, micros: int
) -> None:
    """The sums of a step's micro-batches, added up without weights."""
    do.clear()
    weights = program["weights"]
    for micro in range(micros):
        given = {
            index: do.tensor(gradient(program, number, micro, rank, index, scale))
            for index in range(len(program["sizes"]))
            if uses(op, rank, index)
        }
        with contextlib.ExitStack() as scopes:
            if micro < micros - 1:
                scopes.enter_context(do.ddp.no_sync())
            if weights is not None:
                scopes.enter_context(do.ddp.weight(weights[rank]))
            do.ddp(given).backward()


def _spoil(do: Any, program: Program, op: dict[str, Any], number: int, rank: int) -> None:
    """A backward of large gradients whose result is never used."""
    from paceline.errors import PacelineError

    do.clear()
    what, is_here = op["what"], op["rank"] == rank
    given = {
        index: gradient(program, 1000 + number, 0, rank, index, 1e4) for index in range(len(program["sizes"]))
    }
    values = given[op["param"]]
    if what in ("inf", "nan") and is_here:
        values[values.size // 2] = np.inf if what == "inf" else np.nan
    elif what == "overflow":  # finite on each rank, but not in sum
        values[-1] = 3e38
    elif what == "refused" and is_here:
        del given[op["param"]]
    handles = []
    if what == "raise" or (what == "raise on one" and is_here):

        def fail(_: Any) -> None:
            raise Failed

        handles.append(do.parameters[op["param"]].register_hook(fail))
    tensors = {index: do.tensor(value) for index, value in given.items()}
    with contextlib.suppress(PacelineError, Failed, OSError):
        if what in ("inf", "nan") and op["micros"] == 2:  # an earlier micro-batch has used it
            with do.ddp.no_sync():
                do.ddp(tensors).backward()
            tensors = {index: tensor * 0.5 for index, tensor in tensors.items()}
        if tensors:
            do.ddp(tensors).backward()
    for handle in handles:
        handle.remove()
    do.clear()


def _taken(do: Any, rank: int) -> tuple[str, list[np.ndarray | None]]:
    held = [None if p.grad is None else np.array(p.grad.numpy()) for p in do.parameters]
    # A missing gradient equals one of zeros; after a backward that raised on one rank, ranks may differ in
    # this.
    digest = hashlib.sha256()
    for each in held:
        digest.update(b"-" if each is None or not each.any() else each.tobytes())
    return digest.hexdigest(), held if rank == 0 else []


# --- the comparison ---


def exact(program: Program) -> list[np.ndarray]:
    """The sum of each parameter's means over all steps in which some rank used it."""
    hosts, weights = program["hosts"], program["weights"]
    given = weights or [1.0] * len(hosts)
    sums = [np.zeros(size) for size in program["sizes"]]
    for number, op in enumerate(program["ops"]):
        if op["op"] == "spoil":
            continue
        # With weights, the micro-batches of a step are averaged, too.
        share = op["micros"] if weights is not None else 1
        for index, total in enumerate(sums):
            for rank in range(len(hosts)) if is_there(op, index) else ():
                for micro in range(op["micros"]) if uses(op, rank, index) else ():
                    term = gradient(program, number, micro, rank, index, op["scale"]).astype(np.float64)
                    total += term * given[rank] / sum(given) / share
    return sums


def check(program: Program, framework: str = "torch") -> str:
    """The differences, in words; empty: none."""
    is_torch = framework == "torch"
    outcomes = run_ranks(
        run,
        len(program["hosts"]),
        {"program": program, "framework": framework},
        group="gloo" if is_torch else None,
        framework=framework,
        warning_filters=[("ignore", None, Warning, None, 0)],
    )
    for number, row in enumerate(zip(*outcomes, strict=True)):
        if len({digest for digest, _ in row}) > 1:
            return f"backward {number}: the ranks have other bits"
    arrived = [np.zeros(size) for size in program["sizes"]]
    steps = [op for op in program["ops"] if op["op"] == "step"]
    for _, held in outcomes[0]:
        for total, value in zip(arrived, held, strict=True):
            if value is not None:
                total += value.astype(np.float64)
    largest = max([100.0 if op["scale"] > 1 else 1.0 for op in steps], default=1.0)
    for index, (got, wanted) in enumerate(zip(arrived, exact(program), strict=True)):
        missing = np.abs(got - wanted)
        if not missing.max() <= 2e-3 * largest:
            place = int(np.argmax(missing))
            return (
                f"parameter {index}, element {place}: expected {wanted[place]:.6g} in all backwards, "
                f"{got[place]:.6g} has arrived"
            )
    return ""


def show(program: Program) -> str:
    rows = [f"{key}: {value}" for key, value in program.items() if key != "ops"]
    return "\n".join([*rows, *(f"{number:3d} {op}" for number, op in enumerate(program["ops"]))])


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
