"""From a seed to a program. The same seed makes the same program on every machine.

A program is set up (models, hooks, optimizers, wrapping, in varying order), then makes two to four steps,
each of a kind drawn in `step`, with a rare event before some of them. Programs end with an ordinary step, in
which all ranks synchronise: every earlier error must have been reported by then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.device import paddle as device
from tests.differential.between import (
    compare_inputs,
    freeze_around,
    freeze_gated,
    set_flags,
    vary_weighted,
    weigh_forwards,
    write_buffers,
)
from tests.differential.orders import of_episodes, out_of_order
from tests.differential.programs import Op, Program, numbered

VIEWS = (
    "plain",
    "unsqueeze",
    "reshape",
    "flatten",
    "t",
    "expand",
    "concat",
    "stack",
    "chunk",
    "select",
    "cut",
)
HOOKS = ("end scale", "end clip", "end set", "end look", "tensor scale", "tensor clip", "tensor look")
ALWAYS_MODES = ("default", "tiny", "view", "tiny view", "group", "group tiny view")
UNUSED_MODES = ("unused", "unused one bucket", "unused view", "group unused")
LAYERS = {
    "linear": 6.0,
    "add": 7.0,
    "scale": 2.0,
    "table": 2.0,
    "embedding": 1.5,
    "buffer": 1.0,
    "norm": 1.5,
    "own": 2.0,
    "again": 1.0,
    "tied": 1.0,
    "trap": 1.0,
    "gate": 1.5,
    "recompute": 1.5,
}
NESTING = ("gate", "recompute")
COMPLEX = ("real", "imag", "product", "square", "abs")
MORE_MODES = ("static", "bfloat16 sums", "group float64 sums", "hosts", "hosts tiny view")
MORE_UNUSED_MODES = ("static", "group static", "hosts unused", "hosts static")
DEVICE_MODES = ("device", "device view", "device float64 sums")
DEVICE_UNUSED_MODES = ("device unused", "device static")


def generate(seed: int) -> Program:
    """The program of this seed."""
    writer = _Writer(random.Random(seed))
    program = writer.program(seed)
    # From other generators, so that most seeds make the same programs as before these were added.
    rng = random.Random(f"more {seed}")
    if rng.random() < 0.12:
        program["models"][0]["layers"].append({"kind": "complex", "view": rng.choice(COMPLEX)})
    if rng.random() < 0.08 and not writer.is_weighted:
        last = max(number for number, op in enumerate(program["ops"]) if op["op"] == "clear")
        program["ops"][last:last] = writer.joined(rng)
    _add_modes(program, rng, needs_unused=writer.needs_unused)
    rng = random.Random(f"between {seed}")
    if rng.random() < 1 / 8:
        # A wrapper warns once, which ends the program, unless the program catches it. On a device Paceline
        # does not look at bytes, and set_value() counts up no version.
        catches = any(op["op"] == "try" for _, op in numbered(program["ops"]))
        write_buffers(program, rng, may_differ=not catches and not device.IS_THERE)
    if rng.random() < 1 / 8:
        set_flags(program["ops"], rng)
    if rng.random() < 1 / 10:
        # For a model that is frozen entirely, Paddle silently runs no backward.
        program["models"][0]["layers"].append({"kind": "linear"})
        freeze_around(program["ops"], rng)
    if '"norm"' not in json.dumps(program["models"]):  # frozen in part, it calls hooks without a gradient
        vary_weighted(program, random.Random(f"weighted {seed}"), clipping="tensor clip")
    weigh_forwards(program, random.Random(f"forwards {seed}"))
    is_gated, rng = False, random.Random(f"gated {seed}")
    if rng.random() < 1 / 10:
        is_gated = freeze_gated(program, rng, modes=(*UNUSED_MODES, "hosts unused"), clearing="clear")
    _compare_inputs(program, random.Random(f"inputs {seed}"))
    if device.IS_THERE:
        needs_unused = writer.needs_unused or is_gated
        _put_on_device(program, random.Random(f"device {seed}"), needs_unused=needs_unused)
    return program


def _compare_inputs(program: Program, rng: random.Random) -> None:
    """In some programs, compare gradients of inputs, half of them in a parameter gradient's memory.

    Paddle adds to such memory twice if a layer is used again, hooks of the user may change it, and it crashes
    if a graph with a PyLayer is kept.
    """
    if rng.random() > 1 / 6:
        return
    text = json.dumps([program["models"], program["ops"]])
    if '"look"' in text:  # paddle.grad() of parameters alone refuses a PyLayer whose input is trained, too
        return
    may_share = not any(f'"{each}"' in text for each in ("again", "borrow", "recompute", "retain", "hook"))
    shares = may_share and rng.random() < 0.7
    first = [{"kind": "own", "shares": True}] if shares else []
    compare_inputs(program, first=first, is_wrapped_again=shares and rng.random() < 0.2)


def modes_of(program: Program) -> list[str]:
    """Every mode in which it can run."""
    return list(dict.fromkeys([*ALWAYS_MODES, *UNUSED_MODES, *MORE_MODES, *MORE_UNUSED_MODES]))


def _add_modes(program: Program, rng: random.Random, *, needs_unused: bool) -> None:
    """Run every third program in one more mode, and some of these only with four ranks on two hosts."""
    draw = rng.random()
    if draw > 1 / 3:
        return
    mode = rng.choice(MORE_UNUSED_MODES if needs_unused or rng.random() < 0.2 else MORE_MODES)
    if draw < 1 / 12 and mode.startswith("hosts"):  # values per rank repeat for the other ranks
        program["ranks"] = 4
        program["modes"] = [mode]
    else:
        program["modes"].append(mode)


def _put_on_device(program: Program, rng: random.Random, *, needs_unused: bool) -> None:
    """Run a program on a device, in two modes and in no other, without sparse gradients."""
    program["modes"] = rng.sample(
        DEVICE_UNUSED_MODES if needs_unused or rng.random() < 0.3 else DEVICE_MODES, 2
    )
    for model in program["models"]:
        _make_dense(model["layers"])


def _make_dense(layers: list[dict[str, Any]]) -> None:
    for layer in layers:
        layer.pop("sparse", None)
        _make_dense(layer.get("layers", []))


def has_own_operations(layers: list[dict[str, Any]]) -> bool:
    """True if there is a PyLayer in it."""
    return any(
        layer.get("kind") in ("own", "trap")
        or layer.get("reentrant")
        or has_own_operations(layer.get("layers", []))
        for layer in layers
    )


class _Writer:
    """Writes one program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ranks = 3 if rng.random() < 0.2 else 2
        self.data = 0
        self.needs_trap = False
        self.needs_unused = False
        self.is_sparse = False
        self.many_models = rng.random() < 0.25
        self.is_weighted = rng.random() < 0.1
        self.sizes = rng.choice([[1], [1], [2], [3, 1], [1, 2, 3]])
        self.lags = rng.random() < 0.5
        self.raises = rng.random() < 0.08

    # --- models ---

    def program(self, seed: int) -> Program:
        rng = self.rng
        models: list[dict[str, Any]] = [{"layers": self.layers(rng.randint(1, 5), depth=0)}]
        if self.many_models:
            layers = self.layers(rng.randint(1, 2), depth=1)
            if rng.random() < 0.7:
                layers.insert(rng.randint(0, len(layers)), {"kind": "borrow", "layer": rng.randint(0, 3)})
            models.append({"layers": layers})
        if rng.random() < 0.1:
            models[0]["frozen"] = [rng.randint(0, 5)]
        ops = self.setup(len(models))
        for _ in range(rng.randint(2, 4)):
            if rng.random() < 0.15:
                ops.extend(self.event())
            ops.extend(self.step())
        ops.extend([*self.clear(sure=True), *self.plain(), self.do("step")])
        if self.needs_trap:  # not as the first layer, whose input needs no gradient
            layers = models[0]["layers"]
            layers.insert(rng.randint(1, len(layers)), {"kind": "trap"})
        if has_own_operations(models):  # Paddle crashes in the second backward of a graph with a PyLayer
            ops = [op for op in ops if not op.get("retain")]
        program: Program = {"seed": seed, "ranks": self.ranks, "models": models, "ops": ops}
        if rng.random() < 0.04 and not self.is_sparse:
            program["dtype"] = "float64"
        if self.raises:
            program["options"] = {"nonfinite": "raise"}
        modes = rng.sample(UNUSED_MODES if self.needs_unused else ALWAYS_MODES, 2)
        if rng.random() < 0.15:
            modes[-1] = rng.choice(ALWAYS_MODES + UNUSED_MODES)
        program["modes"] = sorted(set(modes))
        return program

    def layers(self, count: int, depth: int) -> list[dict[str, Any]]:
        return [self.layer(depth) for _ in range(count)]

    def layer(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        odds = {kind: odds for kind, odds in LAYERS.items() if not depth or kind not in NESTING}
        kind = rng.choices(list(odds), list(odds.values()))[0]
        if kind == "linear":
            return {"kind": kind, "bias": rng.random() < 0.7}
        if kind == "add":
            return {"kind": kind, "view": rng.choice(VIEWS)}
        if kind == "table":
            return {"kind": kind, "rows": 9000 if rng.random() < 0.06 else rng.randint(2, 6)}
        if kind == "embedding":
            sparse = rng.random() < 0.6
            self.is_sparse = self.is_sparse or sparse
            return {"kind": kind, "sparse": sparse}
        if kind == "buffer":
            return {"kind": kind, "replaces": rng.random() < 0.3}
        if kind in ("again", "tied"):
            return {"kind": kind, "layer": rng.randint(0, 3)}
        if kind == "gate":
            self.needs_unused = True
            rules = [{"ranks": [0]}, {"ranks": [1]}, {"ranks": []}, {"after": 1}, {"every": 2}]
            rule: dict[str, Any] = rng.choice(rules)
            if rng.random() < 0.3:
                rule = {"skips": [[rng.randrange(self.ranks), rng.randint(0, 5)]]}
            return {"kind": kind, **rule, "layers": self.layers(rng.randint(1, 2), depth + 1)}
        if kind == "recompute":
            inner = self.layers(rng.randint(1, 2), depth + 1)
            twice = {"twice": True} if rng.random() < 0.1 else {}
            return {"kind": kind, "reentrant": rng.random() < 0.5, **twice, "layers": inner}
        return {"kind": kind}

    # --- setting up ---

    def setup(self, models: int) -> list[Op]:
        rng = self.rng
        ops: list[Op] = []
        for model in range(models):
            where = {} if not model else {"model": model}
            parts: list[list[Op]] = [[self.do("wrap", **where)]]
            kind = "sgd" if self.is_sparse else rng.choice(["sgd", "sgd", "momentum", "adam"])
            parts.insert(rng.randint(0, 1), [self.do("optimizer", kind=kind, **where)])
            if rng.random() < 0.15:
                parts.insert(0, [self.hook(where)])
            if rng.random() < 0.2:
                parts.append([self.hook(where)])
            if rng.random() < 0.06:
                parts.append([self.do("wrap", keep=rng.random() < 0.5, **where)])
            ops.extend(op for part in parts for op in part)
        return ops

    def hook(self, where: dict[str, Any]) -> Op:
        kinds = HOOKS if not self.is_weighted else HOOKS[3:]  # others follow the weight
        return self.do("hook", kind=self.rng.choice(kinds), param=self.rng.randint(0, 6), **where)

    # --- parts of steps ---

    def do(self, name: str, **arguments: Any) -> Op:
        return {"op": name, **arguments}

    def forward(self, to: str = "loss", **arguments: Any) -> Op:
        self.data += 1
        batch = self.sizes[0] if len(self.sizes) == 1 else list(self.sizes)
        if to != "loss":
            arguments["to"] = to
        return self.do("forward", batch=batch, data=self.data, **arguments)

    def backward(self, *of: str, **arguments: Any) -> Op:
        if of:
            arguments["of"] = list(of)
        if len(of) > 1 and self.rng.random() < 0.5:
            arguments["how"] = "sum"
        if self.lags and self.rng.random() < 0.7:
            lag = [0.0] * self.ranks
            lag[self.rng.randrange(self.ranks)] = 0.006
            arguments["lag"] = lag
        return self.do("backward", **arguments)

    def clear(self, *, sure: bool = False) -> list[Op]:
        rng = self.rng
        sure = (
            sure or self.many_models or self.is_weighted
        )  # existing gradients would count as gradients of weight 1
        if not sure and rng.random() < 0.1:
            return []
        arguments: dict[str, Any] = {}
        if self.is_weighted or rng.random() < 0.45:
            arguments["zero"] = False
        if rng.random() < 0.4:
            arguments["how"] = rng.choice(["wrapper", "model", "tensor"])
        return [self.do("clear", **arguments)]

    def end(self) -> list[Op]:
        rng = self.rng
        ops: list[Op] = []
        if rng.random() < 0.15:
            ops.append(self.do("clip", max=rng.choice([0.1, 1.0, 1e9])))
            if rng.random() < 0.5:
                ops.insert(
                    0, self.do("scale_grads", by=rng.choice([0.1, 0.01]), how=rng.choice(["in place", "set"]))
                )
        if rng.random() < 0.9:
            ops.append(self.do("step"))
        return ops

    def plain(self) -> list[Op]:
        ops: list[Op] = [self.forward()]
        if self.is_weighted:
            values = [self.rng.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(self.ranks)]
            values[self.rng.randrange(self.ranks)] = 3.0
            ops.append(self.do("weight", values=values))
        if self.rng.random() < 0.05 and not self.needs_trap:
            ops.append(self.do("look"))
        return [*ops, self.backward()]

    # --- kinds of steps ---

    def step(self) -> list[Op]:
        kinds: dict[Callable[[], list[Op]], float] = {
            self.plain_step: 5,
            self.accumulate: 2,
            self.out_of_order: 0.8,
            self.of_episodes: 0.6,
            self.two_losses: 1.5,
            self.retain: 0.7,
            self.failing: 1.2,
            self.evaluated: 0.5,
            self.strange_values: 0.3,
            self.uneven: 0.8,
            self.two_models: 6 if self.many_models else 0,
        }
        return self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def plain_step(self) -> list[Op]:
        if self.rng.random() < 0.25:  # as the README does it
            return [*self.plain(), *self.end(), *self.clear()]
        return [*self.clear(), *self.plain(), *self.end()]

    def accumulate(self) -> list[Op]:
        """Several backwards for one step: within no_sync(), or each of them synchronised."""
        rng = self.rng
        ops = self.clear(sure=True)
        is_local = self.is_weighted or rng.random() < 0.7
        for _ in range(rng.randint(1, 2)):
            if not is_local:
                ops.extend(self.plain())
                continue
            ops.append(self.forward(**rng.choice([{"no_sync": True}, {"no_sync": True}, {}])))
            if self.is_weighted:
                ops.append(self.do("weight", values=[float(1 + rank) for rank in range(self.ranks)]))
            ops.append(self.backward(no_sync=True))
        return [*ops, *self.plain(), *self.end()]

    def out_of_order(self) -> list[Op]:
        return out_of_order(self)

    def of_episodes(self) -> list[Op]:
        return of_episodes(self)

    def two_losses(self) -> list[Op]:
        ops = [*self.clear(sure=True), self.forward("a"), self.forward("b")]
        if self.rng.random() < 0.5:
            ops.append(self.backward("a", "b"))
        else:
            ops.extend([self.backward("a"), self.backward("b")])
        return [*ops, *self.end()]

    def retain(self) -> list[Op]:
        return [
            *self.clear(sure=True),
            self.forward(),
            self.backward(retain=True),
            self.backward(),
            *self.end(),
        ]

    def failing(self) -> list[Op]:
        """An exception in some place, caught; on all ranks or on one."""
        rng = self.rng
        place = rng.choice(["forward", "backward", "hook", "between", "own"])
        where = {} if rng.random() < 0.5 else {"ranks": [rng.randrange(self.ranks)]}
        two = rng.random() < 0.4
        body: list[Op] = []
        if place == "hook":
            body.append(self.do("hook", kind="tensor trap", param=rng.randint(0, 6)))
        if place == "between":
            body.append(self.do("raise", **where))
        elif place != "own":
            body.append(self.do("trap", place=place, **where))
            self.needs_trap = self.needs_trap or place != "hook"
        before: list[Op] = []
        if two:
            before = [self.forward("a"), self.forward("b")]
            inner = [*body, self.backward("a")]
        elif place == "forward":
            inner = [*body, self.forward(), self.backward()]
        else:
            inner = [self.forward(), *body, self.backward()]
        if place == "own" and rng.random() < 0.5:  # a skipped backward
            inner = [self.forward("lost", **where), *inner]
        otherwise = [self.do("clear", zero=rng.random() < 0.5)]
        attempt = self.do("try", body=[*inner, *([] if two else self.end())], otherwise=otherwise)
        ops = [*self.clear(sure=True), *before, attempt]
        if two:
            ops.extend([self.backward("b"), *self.end()])
        if rng.random() < 0.4:  # the handler may catch errors of Paceline, too
            again = [*self.clear(sure=True), *self.plain(), *self.end()]
            ops.append(self.do("try", body=again, otherwise=[self.do("clear")]))
        return ops

    def evaluated(self) -> list[Op]:
        how = self.rng.choice(["eval", "train"])
        where = {} if how == "train" or self.rng.random() < 0.5 else {"ranks": [0]}
        return [self.do("evaluate", how=how, **where), *self.plain_step()]

    def strange_values(self) -> list[Op]:
        """Not a number, or too large for a sum."""
        rng = self.rng
        strange: dict[str, Any] = {"nan": [rng.randrange(self.ranks)]}
        if self.raises and rng.random() < 0.6:  # otherwise there is a warning only
            strange = {"scale": rng.choice([5e37, 1e38, 2e38])}
        body = [self.forward(**strange), self.backward()]
        attempt = self.do("try", body=body, otherwise=[])
        return [*self.clear(sure=True), attempt, self.do("clear", zero=False)]

    def uneven(self) -> list[Op]:
        """Only of model 0: other models have their gradients on some ranks and step there."""
        rng = self.rng
        counts = [rng.randint(0, 3) for _ in range(self.ranks)]
        parts = [self.plain(), [self.do("step", model=0)]]
        parts.insert(rng.choice([0, 2]), self.clear(sure=True))
        body = [op for part in parts for op in part]
        if self.many_models:  # on all ranks, or on none
            body = [{**op, "model": 0} if op["op"] == "clear" else op for op in body]
        loop = self.do("iterate", how=rng.choice(["finished", "loader"]), counts=counts, body=body)
        ops = [*self.clear(sure=True), loop]
        if rng.random() < 0.5:  # no clearing in between
            ops.extend([*self.plain(), self.do("step", model=0), *self.clear(sure=True)])
        elif self.many_models:
            ops.extend(self.clear(sure=True))
        return ops

    def joined(self, rng: random.Random) -> list[Op]:
        """Uneven data within join(): of model 0, and with an optimizer that keeps no state of its steps."""
        counts = [rng.randint(1, 3) for _ in range(self.ranks)]
        body = [self.do("clear", zero=rng.random() < 0.5), *self.plain(), self.do("step", model=0)]
        if self.many_models:
            body = [{**op, "model": 0} if op["op"] == "clear" else op for op in body]
        loop = self.do("iterate", how="join", counts=counts, body=body)
        # Gradients of frozen parameters, too: their remainders are averaged only if unused parameters are
        # allowed.
        ops = [self.do("optimizer", kind="sgd"), self.do("clear", zero=False, how="tensor"), loop]
        if rng.random() < 0.5:  # no clearing in between
            ops.extend([*self.plain(), self.do("step", model=0)])
        return ops

    def two_models(self) -> list[Op]:
        rng = self.rng
        ops = self.clear(sure=True)
        order = [0, 1]
        rng.shuffle(order)
        if rng.random() < 0.5:
            ops += [self.forward(f"m{model}", model=model) for model in order]
            if rng.random() < 0.5:
                ops.append(self.backward("m0", "m1"))
            else:
                rng.shuffle(order)
                ops += [self.backward(f"m{model}") for model in order]
        else:
            for model in order:
                ops += [self.forward(model=model), self.backward()]
        return [*ops, *self.end()]

    # --- rare events ---

    def event(self) -> list[Op]:
        rng = self.rng
        what = rng.choice(["swap", "swap", "freeze", "replace", "hook", "unhook", "wrap", "wrap"])
        param = rng.randint(0, 6)
        if what == "swap":
            how = rng.choice(["same", "same", "grown", "shrunk", "dtype"])
            where = {} if rng.random() < 0.8 or how == "same" else {"ranks": [rng.randrange(self.ranks)]}
            return [self.do("swap", how=how, param=param, **where)]
        if what == "freeze":
            ops = [self.do("freeze", param=param)]
            if rng.random() < 0.5:
                ops += [*self.plain_step(), self.do("freeze", param=param, on=True)]
            return ops
        if what == "replace":
            return [self.do("replace", layer=rng.randint(0, 4))]
        if what == "hook":
            return [self.hook({})]
        if what == "unhook":
            return [self.do("unhook")]
        return [self.do("wrap", keep=rng.random() < 0.5)]
