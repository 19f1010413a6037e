"""From a seed to a program. The same seed makes the same program on every machine.

A program is set up (models, hooks, optimizers, wrapping, in varying order), then makes two to four steps of
various kinds, with a rare event before some of them. Programs end with an ordinary step, in which all ranks
synchronise: every earlier error must have been reported by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from tests import accelerator
from tests.differential.between import (
    are_apart,
    compare_inputs,
    freeze_around,
    freeze_gated,
    set_flags,
    step_directly,
    vary_weighted,
    weigh_forwards,
    write_buffers,
)
from tests.differential.orders import of_episodes, out_of_order
from tests.differential.programs import Op, Program, numbered
from tests.differential.torch_tensors import add_tensors

VIEWS = ("plain", "unsqueeze", "view", "reshape", "t", "expand", "cat", "stack", "chunk", "select", "cut")
HOOKS = ("post clamp_", "post replace", "post scale", "post look", "tensor scale", "tensor clamp")
ALWAYS_MODES = ("default", "tiny", "view", "tiny view", "gloo", "backend", "gloo tiny view", "gloo memory")
UNUSED_MODES = ("unused", "unused view", "gloo unused", "static")
HOSTS_MODES = ("hosts", "hosts tiny", "hosts tiny view")
HOSTS_UNUSED_MODES = ("hosts unused", "hosts static")
SCATTER_MODES = ("scatter", "scatter unused")
UNEVEN_MODES = ("uneven tiny", "uneven view", "uneven exact")
UNEVEN_UNUSED_MODES = ("uneven unused",)
DEVICE_MODES = ("device", "device view", "device batched", "device blocking", "device hosts")
DEVICE_UNUSED_MODES = ("device unused", "device static", "device hosts unused")


def generate(seed: int) -> Program:
    """The program of this seed."""
    writer = _Writer(random.Random(seed))
    program = writer.program(seed)
    program["modes"] = program["modes"] or ["default"]  # it can run in none of the modes that were drawn
    _add_hosts(program, random.Random(f"hosts {seed}"), needs_unused=writer.needs_unused)
    _make_uneven(program, random.Random(f"uneven {seed}"))
    if not accelerator.IS_THERE:  # the stand-in device has only plain tensors
        add_tensors(program, random.Random(f"tensors {seed}"))
    _make_scattering(program, random.Random(f"scatter {seed}"), needs_unused=writer.needs_unused)
    _add_between(program, random.Random(f"between {seed}"))
    vary_weighted(program, random.Random(f"weighted {seed}"), clipping="tensor clamp")
    weigh_forwards(program, random.Random(f"forwards {seed}"))
    is_gated = _freeze_gated(program, random.Random(f"gated {seed}"))
    _compare_inputs(program, random.Random(f"inputs {seed}"))
    _let_gradients_arrive_twice(program, random.Random(f"pieces {seed}"))
    if accelerator.IS_THERE:
        needs_unused = writer.needs_unused or is_gated
        _put_on_device(program, random.Random(f"device {seed}"), needs_unused=needs_unused)
    return program


def _compare_inputs(program: Program, rng: random.Random) -> None:
    """In some programs, compare gradients of inputs, half of them perhaps in a parameter gradient's memory.

    Hooks of the user may change such memory.
    """
    if rng.random() > 1 / 6:
        return
    hooks = any(op["op"] == "hook" for _, op in numbered(program["ops"]))
    views = ("unsqueeze", "view", "reshape", "t", "cat")
    first = [{"kind": "trap"}, {"kind": "add", "view": rng.choice(views)}]
    shares = rng.random() < 0.5 and not hooks
    compare_inputs(program, first=first if shares else [], is_wrapped_again=shares and rng.random() < 0.2)


def _freeze_gated(program: Program, rng: random.Random) -> bool:
    if rng.random() > 1 / 10 or any(mode.startswith("scatter") for mode in program["modes"]):
        return False
    modes = [mode for mode in (*UNUSED_MODES, "hosts unused") if mode != "static"]
    modes = [mode for mode in modes if can_run_in(program, mode)]
    return freeze_gated(program, rng, modes=modes, clearing="zero_grad")


def _let_gradients_arrive_twice(program: Program, rng: random.Random) -> None:
    """In some static graphs, make gradients arrive twice in a backward, in memory that may be shared.

    Without static_graph such a program is refused.
    """
    if rng.random() > 1 / 40 or len(program["models"]) > 1:
        return
    plain = ("wrap", "optimizer", "zero_grad", "forward", "backward", "step")  # others change the graph
    program["ops"] = [op for op in program["ops"] if op["op"] in plain]
    view = rng.choice(("stack", "cat", "expand", "select", "chunk"))
    again = {"kind": "checkpoint", "reentrant": True, "layers": [{"kind": "again", "layer": 0}]}
    layers: list[dict[str, Any]] = [{"kind": "add", "view": view}, {"kind": "linear"}, again]
    program["models"][0]["layers"] = layers
    program["modes"] = [rng.choice(("static", "hosts static"))]


def can_run_in(program: Program, mode: str) -> bool:
    """True if ranks can have the same bits: Gloo adds with the float settings of each rank."""
    flushes = any(op["op"] == "ftz" for op in program["ops"])
    return not flushes or not mode.startswith("gloo") or mode == "gloo memory"


def modes_of(program: Program) -> list[str]:
    """Every mode in which it can run."""
    over_hosts = (*HOSTS_MODES, *HOSTS_UNUSED_MODES, *UNEVEN_MODES, *UNEVEN_UNUSED_MODES)
    modes = (*ALWAYS_MODES, *UNUSED_MODES, *SCATTER_MODES, *over_hosts)
    return [mode for mode in modes if can_run_in(program, mode)]


def _add_hosts(program: Program, rng: random.Random, *, needs_unused: bool) -> None:
    """Run every third program over hosts of one rank too, and every twelfth with four ranks on two hosts.

    From another generator, so that a seed makes the same program as before there were hosts.
    """
    draw = rng.random()
    if draw > 1 / 3:
        return
    mode = rng.choice(HOSTS_UNUSED_MODES if needs_unused or rng.random() < 0.1 else HOSTS_MODES)
    if draw < 1 / 12:  # values per rank repeat for the other ranks
        program["ranks"] = 4
        program["modes"] = [mode]
    else:
        program["modes"].append(mode)


def _make_uneven(program: Program, rng: random.Random) -> None:
    """In every second program of three or four ranks over several hosts, use hosts of different sizes."""
    mode = program["modes"][-1]
    if program["ranks"] > 2 and mode in HOSTS_MODES + HOSTS_UNUSED_MODES and rng.random() < 0.5:
        others = UNEVEN_MODES if mode in HOSTS_MODES else UNEVEN_UNUSED_MODES
        program["modes"][-1] = rng.choice(others)


def _make_scattering(program: Program, rng: random.Random, *, needs_unused: bool) -> None:
    """Run every sixth program with a sharded optimizer and sharded gradients, and in no other mode.

    Most of these clear the sharded gradients after each step, and have dense gradients; most operations of
    the others on a shard are refused.
    """
    if rng.random() < 1 / 6:
        program["modes"] = [SCATTER_MODES[needs_unused or rng.random() < 0.3]]
        if rng.random() < 0.8:
            program["ops"] = list(_clearing(program["ops"]))
            for model in program["models"]:
                _make_dense(model["layers"])


def _clearing(ops: list[Op]) -> Iterator[Op]:
    """The ops, without those that read gradients, and with gradients cleared after each step."""
    for op in ops:
        if op["op"] == "scale_grads":
            continue
        op = {key: value for key, value in op.items() if key != "none"}
        for part in ("body", "otherwise"):
            if part in op:
                op[part] = list(_clearing(op[part]))
        yield op
        if op["op"] == "step":
            yield {"op": "zero_grad"}


def _add_between(program: Program, rng: random.Random) -> None:
    """In some programs, write buffers, set flags, freeze around forwards, or step after autograd.grad()."""
    if rng.random() < 1 / 8:
        write_buffers(program, rng)
    if rng.random() < 1 / 8:
        set_flags(program["ops"], rng)
    is_scattering = any(mode.startswith("scatter") for mode in program["modes"])
    if rng.random() < 1 / 25 and not is_scattering:  # a sharded optimizer takes no gradients from the program
        step_directly(program["ops"], rng)
    if rng.random() < 1 / 10:
        freeze_around(program["ops"], rng)


def _put_on_device(program: Program, rng: random.Random, *, needs_unused: bool) -> None:
    """Run a program on a device, in two modes and no other, without features that the stand-in lacks.

    These are sparse and complex tensors, and the setting for denormals. Paceline does not see writes through
    `.data` to a buffer there (docs/design/reducer.md), so ranks do not write different values that way. Nor
    is a norm computed after an exception: in-flight buckets still write to gradients that are views of them.
    """
    modes = DEVICE_UNUSED_MODES if needs_unused or rng.random() < 0.3 else DEVICE_MODES
    program["modes"] = rng.sample(modes, 2)
    program["ops"] = [op for op in program["ops"] if op["op"] != "ftz"]
    for _, op in numbered(program["ops"]):
        op.pop("nest", None)  # in torch's own wrapper, over another group
        if are_apart(op) and op["how"] == "data":
            op["how"] = "put"
        if "otherwise" in op:
            op["otherwise"] = [each for each in op["otherwise"] if each["op"] != "clip"]
    for model in program["models"]:
        _make_dense(model["layers"])
        _make_real(model["layers"])


def _make_real(layers: list[dict[str, Any]]) -> None:
    for layer in layers:
        if layer["kind"] == "complex":
            layer.update(kind="scale", view="plain")
        _make_real(layer.get("layers", []))


def _make_dense(layers: list[dict[str, Any]]) -> None:
    for layer in layers:
        layer.pop("sparse", None)
        _make_dense(layer.get("layers", []))


class _Writer:
    """Writes one program."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.ranks = 3 if rng.random() < 0.25 else 2
        self.data = 0
        self.needs_trap = False
        self.is_strict = False
        self.is_sparse = False
        self.many_models = rng.random() < 0.2
        self.amp = rng.random() < 0.08
        self.needs_unused = False
        self.is_weighted = rng.random() < 0.1
        self.sizes = rng.choice([[1], [1], [2], [3, 1], [1, 2, 3], [2, 0]])
        self.lags = rng.random() < 0.5

    # --- models ---

    def program(self, seed: int) -> Program:
        rng = self.rng
        models: list[dict[str, Any]] = [{"layers": self.layers(rng.randint(1, 5), depth=0)}]
        if self.many_models:
            layers = self.layers(rng.randint(1, 2), depth=1)
            if rng.random() < 0.6:
                layers.insert(rng.randint(0, len(layers)), {"kind": "borrow", "layer": rng.randint(0, 3)})
            models.append({"layers": layers})
        if rng.random() < 0.1:
            models[0]["frozen"] = [rng.randint(0, 5)]
        ops = self.setup(len(models))
        for number in range(rng.randint(2, 4)):
            if rng.random() < 0.15:
                ops.extend(self.event())
            ops.extend(self.step(number))
        ops.extend([*self.clear(sure=True), *self.plain(), self.do("step")])
        if self.needs_trap:  # not as the first layer, whose input needs no gradient
            layers = models[0]["layers"]
            layers.insert(rng.randint(1, len(layers)), {"kind": "trap"})
        program: Program = {"seed": seed, "ranks": self.ranks, "models": models, "ops": ops}
        if rng.random() < 0.05 and not self.amp and not self.is_sparse:
            program["dtype"] = rng.choice(["float64", "bfloat16"])
        if rng.random() < 0.06 or self.is_strict:
            program["options"] = {"nonfinite": "raise"}
        modes = list(UNUSED_MODES if self.needs_unused else ALWAYS_MODES)
        rng.shuffle(modes)
        program["modes"] = (
            modes[:2] if self.needs_unused else ["tiny", *(m for m in modes if m != "tiny")][:3]
        )
        if rng.random() < 0.15:
            program["modes"][-1] = rng.choice(ALWAYS_MODES + UNUSED_MODES)
        program["modes"] = [mode for mode in program["modes"] if can_run_in(program, mode)]
        return program

    def layers(self, count: int, depth: int) -> list[dict[str, Any]]:
        return [self.layer(depth) for _ in range(count)]

    def layer(self, depth: int) -> dict[str, Any]:
        rng = self.rng
        kind = rng.choices(
            (
                "linear",
                "add",
                "scale",
                "table",
                "embedding",
                "complex",
                "buffer",
                "again",
                "tied",
                "gate",
                "checkpoint",
                "trap",
            ),
            (6, 7, 2, 2, 2, 1, 1.5, 1, 1, 1.2 if depth == 0 else 0, 1.5 if depth == 0 else 0, 1),
        )[0]
        if kind == "linear":
            return {"kind": kind, "bias": rng.random() < 0.7}
        if kind == "add":
            return {"kind": kind, "view": rng.choice(VIEWS)}
        if kind == "table":
            return {"kind": kind, "rows": 9000 if rng.random() < 0.06 else rng.randint(2, 6)}
        if kind == "embedding":
            sparse = rng.random() < 0.4
            self.is_sparse = self.is_sparse or sparse
            return {"kind": kind, "sparse": sparse}
        if kind == "complex":
            return {"kind": kind, "view": rng.choice(("real", "conj", "imag", "conj-imag"))}
        if kind in ("again", "tied"):
            return {"kind": kind, "layer": rng.randint(0, 3)}
        if kind == "gate":
            self.needs_unused = True
            rule: dict[str, Any] = rng.choice(
                [{"ranks": [0]}, {"ranks": [1]}, {"ranks": []}, {"after": 1}, {"every": 2}]
            )
            if rng.random() < 0.3:
                rule = {"skips": [[rng.randrange(self.ranks), rng.randint(0, 5)]]}
            return {"kind": kind, **rule, "layers": self.layers(rng.randint(1, 2), depth + 1)}
        if kind == "checkpoint":
            inner = self.layers(rng.randint(1, 2), depth + 1)
            layer = {"kind": kind, "reentrant": rng.random() < 0.5, "layers": inner}
            if rng.random() < 0.1:
                layer["twice"] = True
            return layer
        return {"kind": kind}

    # --- setting up ---

    def setup(self, models: int) -> list[Op]:
        rng = self.rng
        ops: list[Op] = []
        for model in range(models):
            where = {} if not model else {"model": model}
            parts: list[list[Op]] = [[self.do("wrap", **where)]]
            kind = rng.choice(["sgd", "sgd", "momentum", "sgd" if self.is_sparse else "adam"])
            parts.insert(rng.randint(0, 1), [self.do("optimizer", kind=kind, **where)])
            if rng.random() < 0.15:
                parts.insert(0, [self.hook(where)])
            if rng.random() < 0.2:
                parts.append([self.hook(where)])
            if rng.random() < 0.03:
                parts[-1].append(self.do("wrap", keep=rng.random() < 0.5, **where))
            ops.extend(op for part in parts for op in part)
        if rng.random() < 0.03 and not self.is_sparse:
            ops.insert(0, self.do("ftz", ranks=[rng.randrange(self.ranks)]))
        if rng.random() < 0.02 and models == 1:
            next(op for op in ops if op["op"] == "wrap")["nest"] = rng.choice(
                ["torch inside", "torch outside"]
            )
        return ops

    def hook(self, where: dict[str, Any]) -> Op:
        kind = self.rng.choice(HOOKS)
        if self.is_weighted and kind.startswith("post"):
            kind = "post look"  # the hook sees the accumulated gradient
        return self.do("hook", kind=kind, param=self.rng.randint(0, 6), **where)

    # --- parts of steps ---

    def do(self, name: str, **arguments: Any) -> Op:
        return {"op": name, **arguments}

    def forward(self, to: str = "loss", **arguments: Any) -> Op:
        self.data += 1
        batch = self.sizes[0] if len(self.sizes) == 1 else list(self.sizes)
        if self.amp:
            arguments["amp"] = True
        if to != "loss":
            arguments["to"] = to
        return self.do("forward", batch=batch, data=self.data, **arguments)

    def backward(self, *of: str, **arguments: Any) -> Op:
        if of:
            arguments["of"] = list(of)
        if self.lags and self.rng.random() < 0.7:
            lag = [0.0] * self.ranks
            lag[self.rng.randrange(self.ranks)] = 0.006
            arguments["lag"] = lag
        return self.do("backward", **arguments)

    def clear(self, *, sure: bool = False) -> list[Op]:
        rng = self.rng
        sure = sure or self.is_weighted  # existing gradients would count as gradients of weight 1
        if not sure and rng.random() < 0.1:
            return []
        arguments: dict[str, Any] = {}
        if not sure and rng.random() < 0.35:
            arguments["none"] = False
        if rng.random() < 0.3:
            arguments["how"] = rng.choice(["wrapper", "module"])
        return [self.do("zero_grad", **arguments)]

    def end(self) -> list[Op]:
        rng = self.rng
        ops: list[Op] = []
        if rng.random() < 0.15:
            ops.append(self.do("clip", max=rng.choice([0.1, 1.0, 1e9])))
            if rng.random() < 0.5:
                how = rng.choice(["data", "numpy", "detach", "plain"])
                ops.insert(0, self.do("scale_grads", by=rng.choice([0.1, 0.01]), how=how))
        if rng.random() < 0.9:
            ops.append(self.do("step"))
        return ops

    def plain(self) -> list[Op]:
        ops: list[Op] = [self.forward()]
        if self.is_weighted:
            values = [self.rng.choice([0.0, 1.0, 2.0, 5.0]) for _ in range(self.ranks)]
            values[self.rng.randrange(self.ranks)] = 3.0
            ops.append(self.do("weight", values=values))
        if self.rng.random() < 0.05:
            ops.append(self.do("penalty"))
        ops.append(self.backward())
        return ops

    # --- kinds of steps ---

    def step(self, number: int) -> list[Op]:
        kinds: dict[Callable[[], list[Op]], float] = {
            self.plain_step: 5,
            self.accumulate: 1.5,
            self.out_of_order: 0.8,
            self.of_episodes: 0.6,
            self.two_losses: 1.5,
            self.retain: 0.7,
            self.failing: 1.2,
            self.evaluated: 0.5,
            self.strange_values: 0.5,
            self.uneven: 0.8,
            self.two_models: 6 if self.many_models else 0,
        }
        return self.rng.choices(list(kinds), list(kinds.values()))[0]()

    def plain_step(self) -> list[Op]:
        if self.rng.random() < 0.25:  # as the README does it
            return [*self.plain(), *self.end(), *self.clear()]
        return [*self.clear(), *self.plain(), *self.end()]

    def accumulate(self) -> list[Op]:
        rng = self.rng
        ops = self.clear(sure=True)
        for _ in range(rng.randint(1, 2)):
            inside = rng.choice([{"no_sync": True}, {"no_sync": True}, {}])
            ops.append(self.forward(**inside))
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
        ops = [*self.clear(sure=True), self.forward(), self.backward(retain=True)]
        return [*ops, self.backward(), *self.end()]

    def failing(self) -> list[Op]:
        """An exception in some place, caught; on all ranks or on one."""
        rng = self.rng
        place = rng.choice(["forward", "backward", "hook", "between", "own"])
        where = {} if rng.random() < 0.5 else {"ranks": [rng.randrange(self.ranks)]}
        two = rng.random() < 0.4
        body: list[Op] = []
        if place == "hook":
            kind = rng.choice(["post trap", "tensor trap"])
            body.append(self.do("hook", kind=kind, param=rng.randint(0, 6)))
        if place != "own":
            if place == "between":
                fault = self.do("raise", **where)
            else:
                fault = self.do("trap", place=place, **where)
                self.needs_trap = self.needs_trap or place != "hook"
            body.append(fault)
        before: list[Op] = []
        if two:
            before = [self.forward("a"), self.forward("b")]
            inner = [*body, self.backward("a")]
        else:
            inner = [self.forward(), *body, self.backward()]
            if place == "forward":
                inner = [*body, self.forward(), self.backward()]
        if place == "own" and rng.random() < 0.5:  # a skipped backward
            inner = [self.forward("lost", **where), *inner] if where else [self.forward("lost"), *inner]
        otherwise = [self.do("zero_grad")]
        if rng.random() < 0.3:
            otherwise.insert(0, self.do("clip", max=1e9))
        attempt = self.do("try", body=[*inner, *([] if two else self.end())], otherwise=otherwise)
        ops = [*self.clear(sure=True), *before, attempt]
        if two:
            ops.extend([self.backward("b"), *self.end()])
        if rng.random() < 0.4:  # the handler may catch errors of Paceline, too
            again = [*self.clear(sure=True), *self.plain(), *self.end()]
            ops.append(self.do("try", body=again, otherwise=[self.do("zero_grad")]))
        return ops

    def evaluated(self) -> list[Op]:
        how = self.rng.choice(["eval", "train"])
        where = {} if how == "train" or self.rng.random() < 0.5 else {"ranks": [0]}
        return [self.do("evaluate", how=how, **where), *self.plain_step()]

    def strange_values(self) -> list[Op]:
        """Not a number, too large for a sum, too small for some processors."""
        rng = self.rng
        what = rng.choice(["nan", "large", "small", "small"])
        ops = self.clear(sure=True)
        self.is_strict = self.is_strict or what == "large"  # otherwise infinities are expected
        if what == "nan":
            body = [self.forward(nan=[rng.randrange(self.ranks)]), self.backward()]
        elif what == "large":
            body = [self.forward(scale=rng.choice([5e37, 1e38, 2e38])), self.backward()]
        else:
            body = [self.forward(scale=1e-39), self.backward()]
            ops.append(self.do("ftz", ranks=[rng.randrange(self.ranks)]))
        ops.append(self.do("try", body=body, otherwise=[]))
        if what == "small":
            ops.append(self.do("ftz", on=False))
        return [*ops, self.do("zero_grad")]

    def uneven(self) -> list[Op]:
        """Only model 0 steps: a rank without data makes no step of another model's optimizer."""
        rng = self.rng
        how = rng.choice(["finished", "finished", "loader", "finished" if self.is_weighted else "join"])
        counts = [rng.randint(0, 3) for _ in range(self.ranks)]
        if how == "join":
            counts = [max(1, count) for count in counts]
        ends = [self.do("step", model=0) if self.many_models else self.do("step")]
        if rng.random() < 0.5:
            body = [*self.plain(), *ends, *self.clear(sure=True)]
        else:
            body = [*self.clear(sure=True), *self.plain(), *ends]
        loop = self.do("iterate", how=how, counts=counts, body=body)
        ops: list[Op] = [self.do("optimizer", kind="sgd")] if how == "join" else []
        ops += [*self.clear(sure=True), loop]
        if rng.random() < 0.5:  # no clearing in between
            ops.extend([*self.plain(), self.do("step"), *self.clear(sure=True)])
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
                ops += [self.forward("loss", model=model), self.backward()]
        return [*ops, *self.end()]

    # --- rare events ---

    def event(self) -> list[Op]:
        rng = self.rng
        what = rng.choice(["swap", "swap", "freeze", "replace", "convert", "hook", "unhook", "rewrap"])
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
        if what == "convert":
            return [self.do("convert", to=rng.choice(["float64", "bfloat16"]))]
        if what == "hook":
            return [self.hook({})]
        if what == "unhook":
            return [self.do("unhook")]
        return [self.do("wrap", keep=rng.random() < 0.5)]
