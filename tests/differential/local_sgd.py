"""Generated programs of local SGD, compared with the algorithm in one process, in float64.

make fuzz WHAT=local_sgd SEEDS=0:200

The fuzzer of one backward (the rest of this folder) compares gradients, and does not model replicas that
train independently. Here a program has several hosts and some of: steps with and without weights and
micro-batches, parameters that are frozen and trained again, uneven data, syncs on demand, syncs that fail,
checkpoints, and copies of the wrapper. After each operation every rank's parameters are compared with those
of `Simulation`, which shares no code with Paceline.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import run_ranks
from tests.local_sgd_reference import sync, values_of
from tests.several_hosts import be_on_host

WIDTH = 5
LR = 0.1
NUM_LAYERS = 3
FRAMEWORKS = ("torch",)


def generate(seed: int, framework: str = "torch") -> Program:
    """The program of a seed: the ranks of each host, the options, and the operations that all ranks make."""
    random_ = random.Random(seed)
    hosts = random_.choice([[0, 1], [0, 1], [0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 1, 1], [0, 1, 2]])
    world_size = len(hosts)
    outer_lr, outer_momentum = random_.choice([(1.0, 0.0), (1.0, 0.0), (0.7, 0.9), (0.5, 0.5)])
    options = {
        "every": random_.randint(1, 4),
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "nesterov": random_.random() < 0.7,
        "warmup_steps": random_.choice([0, 0, 1, 2, 3, 5]),
        "between": random_.choice(["hosts", "hosts", "ranks"]),
    }
    ops: list[dict[str, Any]] = []
    frozen: set[int] = set()
    for _ in range(random_.randint(4, 12)):
        kind = random_.choices(
            ["step", "freeze", "sync", "spoil", "reload", "epoch"], weights=[8, 2, 2, 1, 1, 2]
        )[0]
        if kind == "step":
            micros = random_.choice([1, 1, 2, 3])
            weights = None
            if random_.random() < 0.5:
                weights = [_weights(random_, micros) for _ in hosts]
            given = random_.choice(["scope", "before", "after"])
            ops += [{"op": "step", "micros": micros, "weights": weights, "given": given}] * random_.randint(
                1, 3
            )
        elif kind == "freeze":
            layer = random_.randrange(NUM_LAYERS)
            is_frozen = layer not in frozen
            if is_frozen and len(frozen) == NUM_LAYERS - 1:
                continue
            frozen ^= {layer}
            ops.append({"op": "freeze", "layer": layer, "frozen": is_frozen})
        elif kind == "spoil":
            ops.append({"op": "spoil", "rank": random_.randrange(world_size), "times": random_.randint(1, 2)})
        elif kind == "epoch":
            counts = [random_.randint(0, 5) for _ in hosts]
            ops.append({"op": "epoch", "counts": counts, "steps_along": random_.random() < 0.5})
        else:
            ops.append({"op": kind})
    ops.append({"op": "sync"})
    return {"seed": seed, "hosts": hosts, "options": options, "ops": _with_copies(seed, ops)}


def _with_copies(seed: int, ops: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Before some operations, replace the wrapper by a copy, which changes nothing.

    From another generator, so that a seed makes the same program as before there were copies.
    """
    random_ = random.Random(f"copies {seed}")
    found = []
    for number, op in enumerate(ops):
        if random_.random() < 0.12:
            how = random_.choice(["deepcopy", "pickle"])
            # Parameters trained in the forward that connects a copy count as trained until a backward.
            follow = (each["op"] for each in ops[number:] if _trains_all(each) or each["op"] == "freeze")
            if next(follow, "") != "freeze":
                found.append({"op": "copy", "how": how})
        found.append(op)
    return found


def _trains_all(op: dict[str, Any]) -> bool:
    """True if every rank makes a backward in it."""
    return op["op"] == "step" or (op["op"] == "epoch" and min(op["counts"]) > 0)


def _weights(random_: random.Random, micros: int) -> list[float]:
    """The weights of one rank's micro-batches: some may be 0, but not all."""
    found = [random_.choice([0.0, 1.0, 2.0, 3.5]) for _ in range(micros)]
    return found if any(found) else _weights(random_, micros)


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 4), nn.Linear(4, 3), nn.Linear(3, 1)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).to(dtype)


def layer_of(net: nn.Module, number: int) -> nn.Module:
    found: nn.Module = net[2 * number]  # type: ignore[index]
    return found


def batch(op: int, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(((op * 50 + step) * 5 + micro) * 8 + rank)
    return torch.randn(3, WIDTH, generator=generator)


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


# --- one rank ---


def run(rank: int, program: Program) -> list[list[np.ndarray]]:
    """The parameters of this rank after each operation."""
    from paceline.torch import DistributedDataParallel, LocalSGD

    be_on_host(program["hosts"][rank])
    options = LocalSGD(**program["options"])
    ddp = DistributedDataParallel(network(torch.float32), timeout_s=20, local_sgd=options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    found = []
    for number, op in enumerate(program["ops"]):
        if op["op"] == "step":
            _step(ddp, optimizer, number, op, rank)
        elif op["op"] == "freeze":
            layer_of(ddp.module, op["layer"]).requires_grad_(not op["frozen"])
        elif op["op"] == "sync":
            ddp.sync_parameters()
        elif op["op"] == "spoil":
            _spoil(ddp, op, rank)
        elif op["op"] == "epoch":
            after_pass = optimizer.step if op["steps_along"] else None
            for step in ddp.iterate(range(op["counts"][rank]), after_pass):
                optimizer.zero_grad()
                loss_of(ddp, batch(number, step, 0, rank)).backward()
                optimizer.step()
        elif op["op"] == "copy":
            ddp = _copied(ddp, op["how"])
            optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        else:
            ddp.sync_parameters()
            state, net = ddp.local_sgd_state_dict(), copy.deepcopy(ddp.module)
            trained = [parameter.requires_grad for parameter in net.parameters()]
            ddp = DistributedDataParallel(net.requires_grad_(), timeout_s=20, local_sgd=options)
            ddp.load_local_sgd_state_dict(state)
            for parameter, is_trained in zip(net.parameters(), trained, strict=True):
                parameter.requires_grad_(is_trained)
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        found.append(values_of(ddp))
    return found


def _copied(ddp: Any, how: str) -> Any:
    """A copy, connected by a forward in training mode, because other operations need a connected wrapper."""
    copied = copy.deepcopy(ddp) if how == "deepcopy" else pickle.loads(pickle.dumps(ddp))
    copied(torch.zeros(1, WIDTH))
    return copied


def _step(ddp: Any, optimizer: torch.optim.Optimizer, number: int, op: dict[str, Any], rank: int) -> None:
    optimizer.zero_grad()
    for micro in range(op["micros"]):
        is_last = micro == op["micros"] - 1
        weight = None if op["weights"] is None else op["weights"][rank][micro]
        with contextlib.ExitStack() as scopes:
            if not is_last:
                scopes.enter_context(ddp.no_sync())
            if weight is not None and op["given"] == "scope":
                scopes.enter_context(ddp.weight(weight))
            elif weight is not None and op["given"] == "before":
                ddp.weight(weight)
            loss = loss_of(ddp, batch(number, 0, micro, rank))
            if weight is not None and op["given"] == "after":
                ddp.weight(weight)
            loss.backward()
    optimizer.step()


def _spoil(ddp: Any, op: dict[str, Any], rank: int) -> None:
    from paceline.errors import NonFiniteGradientError

    if ddp._outer_sync is None or not ddp._outer_sync.since:
        return
    weight = layer_of(ddp.module, 1).weight
    before = weight.detach().clone()
    for _ in range(op["times"]):
        if rank == op["rank"]:
            weight.data.fill_(float("nan"))
        try:
            ddp.sync_parameters()
        except NonFiniteGradientError:
            pass
        else:
            raise AssertionError("a sync with a NaN was good")
        weight.data.copy_(before)


# --- the algorithm ---


class Simulation:
    """Local SGD in one process: a replica for each replica group."""

    def __init__(self, program: Program) -> None:
        options, hosts = program["options"], program["hosts"]
        ranks = range(len(hosts))
        if options["between"] == "ranks":
            self.members = [[rank] for rank in ranks]
        else:
            self.members = [[rank for rank in ranks if hosts[rank] == host] for host in sorted(set(hosts))]
        self.options, self.program = options, program
        self.replicas = [network(torch.float64) for _ in self.members]
        self.left = options["warmup_steps"]
        self.is_local = self.left == 0
        self.since = [0] * len(self.members)
        self.weights = [0.0] * len(self.members)
        self.begun = values_of(self.replicas[0])
        self.velocity = [np.zeros_like(each) for each in self.begun]

    def of_rank(self, rank: int) -> list[np.ndarray]:
        return values_of(self.replicas[next(m for m, ranks in enumerate(self.members) if rank in ranks)])

    def run(self) -> Iterator[None]:
        """Yield after each operation."""
        for number, op in enumerate(self.program["ops"]):
            if op["op"] == "step":
                self._begin_forward()
                self._step(number, op)
            elif op["op"] == "freeze":
                for replica in self.replicas:
                    layer_of(replica, op["layer"]).requires_grad_(not op["frozen"])
            elif op["op"] == "epoch":
                self._epoch(number, op["counts"])
            elif op["op"] == "copy":
                self._begin_forward()
            elif op["op"] in ("sync", "reload") and self.is_local:
                self._synchronise()
            yield

    def _begin_forward(self) -> None:
        if not self.is_local and self.left <= 0:
            self.is_local = True
            self.begun = values_of(self.replicas[0])
        if self.is_local and self.since[0] >= self.options["every"]:
            self._synchronise()

    def _step(self, number: int, op: dict[str, Any]) -> None:
        """Step all ranks; the groups have made equally many steps."""
        groups = self.members if self.is_local else [[rank for ranks in self.members for rank in ranks]]
        for member, ranks in enumerate(groups):
            given = op["weights"] or [[1.0] * op["micros"]] * len(self.program["hosts"])
            terms = [
                (given[rank][micro], batch(number, 0, micro, rank))
                for rank in ranks
                for micro in range(op["micros"])
            ]
            # Without weights, micro-batches are added up, and the sum is averaged over ranks.
            total = len(ranks) if op["weights"] is None else sum(weight for weight, _ in terms)
            passed = [member] if self.is_local else range(len(self.members))
            for each in passed:
                self._descend(each, [(weight / total, x) for weight, x in terms])
            if self.is_local:
                self.since[member] += 1
                self.weights[member] += total
        self.left -= not self.is_local

    def _descend(self, member: int, terms: list[tuple[float, torch.Tensor]]) -> None:
        replica = self.replicas[member]
        parameters = [each for each in replica.parameters() if each.requires_grad]
        loss = sum(share * loss_of(replica, x.double()) for share, x in terms)
        gradients = torch.autograd.grad(loss, parameters)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= LR * gradient

    def _epoch(self, number: int, counts: list[int]) -> None:
        step = 0
        while not self.is_local:
            if self.left <= 0:
                self.is_local = True
                self.begun = values_of(self.replicas[0])
                break
            active = [rank for rank, count in enumerate(counts) if count > step]
            if not active:
                return
            for member in range(len(self.members)):
                self._descend(member, [(1 / len(active), batch(number, step, 0, rank)) for rank in active])
            self.left -= 1
            step += 1
        walks = [self._walk(member, number, step, counts) for member in range(len(self.members))]
        are_finished = [False]
        while not all(are_finished):
            are_finished = [next(walk) for walk in walks]  # each goes as far as its next sync
            self._synchronise()

    def _walk(self, member: int, number: int, step: int, counts: list[int]) -> Iterator[bool]:
        """Walk to each sync of a group in an epoch; yield whether it has run out of data."""
        while True:
            if self.since[member] >= self.options["every"]:
                yield False
            active = [rank for rank in self.members[member] if counts[rank] > step]
            if not active:
                break
            self._descend(member, [(1 / len(active), batch(number, step, 0, rank)) for rank in active])
            self.since[member] += 1
            self.weights[member] += len(active)
            step += 1
        while True:
            yield True

    def _synchronise(self) -> None:
        if sum(self.weights):
            names = ("outer_lr", "outer_momentum", "nesterov")
            lr, momentum, nesterov = (self.options[name] for name in names)
            sync(self.replicas, self.begun, self.velocity, self.weights, (lr, momentum, nesterov))
        self.since = [0] * len(self.members)
        self.weights = [0.0] * len(self.members)


# --- the comparison ---


def check(program: Program, framework: str = "torch") -> str:
    """The differences, in words; empty: none."""
    outcomes = run_ranks(run, len(program["hosts"]), {"program": program}, group="gloo")
    simulation = Simulation(program)
    for number, _ in enumerate(simulation.run()):
        op = program["ops"][number]
        for rank, found in enumerate(outcomes):
            for index, (value, expected) in enumerate(
                zip(found[number], simulation.of_rank(rank), strict=True)
            ):
                if not np.allclose(value, expected, rtol=1e-4, atol=2e-5):
                    error = np.abs(value - expected).max()
                    return f"op {number} {op}: parameter {index} of rank {rank} differs by {error:.3g}"
    return ""


def show(program: Program) -> str:
    rows = [f"hosts {program['hosts']}, {program['options']}"]
    return "\n".join([*rows, *(f"{number:3d} {op}" for number, op in enumerate(program["ops"]))])


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
