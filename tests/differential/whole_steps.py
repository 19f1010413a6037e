"""Generated programs of Paddle whose steps are static functions, compared with one process.

The fuzzer of one backward (the rest of this folder) stops a rank wherever ranks synchronise, so it has no
step that is one call. Here a whole step is under paddle.jit.to_static, or the model is, or the function of
the loss, or nothing. Steps have gradients of gradients (of the inputs, of the parameters, and once more),
norms over all ranks, layers that are recomputed or used by some ranks only, micro-batches, and evaluations in
between. The optimizer is Paddle's or a ShardedOptimizer, over several hosts or with a journal too. Some steps
are refused by Paddle, and some raise on every rank and are repeated. In float64, the parameters after each
step must equal those of one process, which translates nothing; or every rank must have refused a step that
the documentation says is refused, and trains on as if it had not tried.

make fuzz WHAT=whole_steps FRAMEWORK=paddle SEEDS=0:200
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.differential.driver import Check, main, plainly
from tests.differential.programs import Program
from tests.harness import run_ranks
from tests.several_hosts import be_on_host

FRAMEWORKS = ("paddle",)
WIDTH = 3
SCALE = 5.0
"""The divisor of a sum over samples: a loss is no mean, so that it is the same for any batch sizes."""

Outcome = dict[str, Any]
"""`parameters` after a step; `statistics` of norms; a `loss` of an evaluation; the errors `refused`."""

_REFUSED_OPTIMIZER = "makes no step"
_REFUSED_GRAPH = "a static graph cannot exchange sums"
_RAISED = "raised by the optimizer on every rank"


def generate(seed: int, framework: str = "paddle") -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 2, 3])
    kinds = ["linear", "tanh", "recompute", *rng.choice([[], ["norm"], ["norm", "norm"]])]
    kinds += rng.choice([[], [], ["gate"]])
    layers: list[dict[str, Any]] = [{"kind": "linear"}]
    for _ in range(rng.randint(1, 4)):
        layers.append({"kind": rng.choice(kinds)})
        if layers[-1]["kind"] == "recompute":
            layers[-1]["reentrant"] = rng.random() < 0.3
        if layers[-1]["kind"] == "norm":
            layers[-1]["affine"] = rng.random() < 0.7
    layers.append({"kind": "linear"})
    has = {layer["kind"] for layer in layers}
    static = rng.choice(["step"] * 4 + ["model", "loss", "nothing"])
    program: Program = {"seed": seed, "ranks": ranks, "layers": layers, "static": static}
    program["full_graph"] = static in ("model", "loss") and rng.random() < 0.4
    if program["full_graph"]:  # Paddle itself cannot trace these
        program["layers"] = layers = [each for each in layers if each["kind"] not in ("recompute", "gate")]
        has = {layer["kind"] for layer in layers}
    program["is_sharded"] = is_sharded = rng.random() < 0.5
    program["optimizer"] = rng.choice(["sgd", "momentum", "adam", "adam", "adam of many tensors"])
    options: dict[str, Any] = {"find_unused_parameters": "gate" in has or rng.random() < 0.3}
    if is_sharded:
        options |= rng.choice([{}, {}, {"share_parameters": True}, {"reduce": "scatter"}])
    if "reduce" not in options and rng.random() < 0.4:
        options["gradient_as_bucket_view"] = True
    if rng.random() < 0.4:
        options["bucket_cap_mb"] = 0.0001
    program["options"] = options
    program["steps"] = [_step(rng, program, has) for _ in range(rng.randint(2, 4))]
    # From another generator, so that a seed makes the same steps as before these were added.
    rng = random.Random(f"raising {seed}")
    if is_sharded and not program["full_graph"] and rng.random() < 0.2:
        program["raises_at"] = rng.randrange(len(program["steps"]))
    rng = random.Random(f"layout {seed}")
    if is_sharded and not program["full_graph"]:
        if options.get("share_parameters") and rng.random() < 0.5:
            program["journal"] = True
            program["raises_late"] = rng.random() < 0.5  # and undoes its writes
        elif "reduce" not in options and rng.random() < 0.4:
            program["hosts"] = rng.choice([list(range(ranks)), [0, *[1] * (ranks - 1)]])
        if ("journal" in program or "hosts" in program) and rng.random() < 0.5:
            program["raises_at"] = rng.randrange(len(program["steps"]))
    rng = random.Random(f"weights {seed}")
    for step in program["steps"] if not program["full_graph"] and rng.random() < 0.4 else ():
        if step["loss"] == "plain":
            step["weights"] = [[rng.choice([0.5, 1.0, 3.0]) for _ in range(ranks)] for _ in step["sizes"]]
    return program


def _step(rng: random.Random, program: Program, has: set[str]) -> dict[str, Any]:
    ranks = program["ranks"]
    losses = ["plain"]
    is_reentrant = any(layer.get("reentrant") for layer in program["layers"])
    if program["static"] in ("step", "nothing") and not is_reentrant:
        # Paddle has no third derivative of a norm. And norms connect a parameter with all ranks, so a
        # gradient of one rank's loss alone is meaningless.
        losses += ["slope", "slope"] if "norm" in has else ["slope", "curvature", "parameters"]
    micros = 1 if program["options"].get("reduce") == "scatter" else rng.choice([1, 1, 1, 2])
    sizes = [[rng.choice([1, 2, 3, 4]) for _ in range(ranks)] for _ in range(micros)]
    if rng.random() < 0.5 or program["full_graph"]:  # Paddle's own gradients are wrong in graphs of two sizes
        sizes = [[2] * ranks] * micros
    opens = [rng.random() < 0.6 for _ in range(ranks)]
    evaluates = rng.choice([None, None, "all", "one"])
    breaks = rng.random() < 0.2
    return {
        "loss": rng.choice(losses),
        "sizes": sizes,
        "opens": opens,
        "evaluates": evaluates,
        "breaks": breaks,
    }


def expected_refusals(program: Program) -> list[str]:
    """Texts of the errors that every rank must raise, once each, in this order."""
    expected = []
    if program["is_sharded"] and program["optimizer"] == "adam of many tensors":
        expected.append(_REFUSED_OPTIMIZER)
    if program["full_graph"] and any(layer["kind"] == "norm" for layer in program["layers"]):
        expected.append(_REFUSED_GRAPH)
    if "raises_at" in program:
        expected.append(_RAISED)
    return expected


def values(program: Program) -> Iterator[np.ndarray[Any, Any]]:
    """Random values for one parameter after the other; each takes a slice of its shape."""
    numbers = np.random.default_rng(program["seed"])
    while True:
        yield 0.5 * numbers.standard_normal((WIDTH, WIDTH))


def batch(program: Program, step: int, micro: int) -> list[np.ndarray[Any, Any]]:
    """The batches of all ranks."""
    sizes = program["steps"][step]["sizes"][micro]
    numbers = np.random.default_rng([program["seed"], step, micro])
    return np.split(numbers.standard_normal((sum(sizes), WIDTH)), np.cumsum(sizes)[:-1])


def show(program: Program) -> str:
    rows = [f"{key}: {value}" for key, value in program.items() if key != "steps"]
    return "\n".join([*rows, *(f"step {number}: {step}" for number, step in enumerate(program["steps"]))])


# --- the model and a step, in Paddle alone ---


def make_net(program: Program) -> Any:
    """A model with the same values in every process. `opens` is of the rank, or of each row."""
    import paddle
    from paddle import nn
    from paddle.distributed.fleet.utils import recompute

    class Gate(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, opens: Any) -> Any:
            if isinstance(opens, bool):
                return x + paddle.tanh(self.linear(x)) if opens else x
            return x + opens * paddle.tanh(self.linear(x)) if float(opens.sum()) else x

    class Recomputed(nn.Layer):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), reentrant

        def forward(self, x: Any) -> Any:
            return recompute(self.inner, x, use_reentrant=self.reentrant)

    class Net(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LayerList([make_layer(spec) for spec in program["layers"]])

        def forward(self, x: Any, opens: Any) -> Any:
            for layer in self.layers:
                x = layer(x, opens) if isinstance(layer, Gate) else layer(x)
            return x

    def make_layer(spec: dict[str, Any]) -> Any:
        if spec["kind"] == "norm":
            attributes = None if spec["affine"] else False
            return nn.BatchNorm1D(WIDTH, epsilon=0.1, weight_attr=attributes, bias_attr=attributes)
        if spec["kind"] == "recompute":
            return Recomputed(spec["reentrant"])
        return {"linear": lambda: nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh, "gate": Gate}[spec["kind"]]()

    paddle.set_default_dtype("float64")
    net, numbers = Net(), values(program)
    for parameter in _trained(net):
        value = next(numbers)
        parameter.set_value(value if len(parameter.shape) == 2 else value[0])
    return net


def _trained(net: Any) -> list[Any]:
    return [parameter for parameter in net.parameters() if not parameter.stop_gradient]


def make_optimizer(
    kind: str, make: Callable[..., Any] | None = None, wrap: Callable[[Any], Any] = lambda which: which
) -> Callable[[list[Any]], Any]:
    """The optimizer of a kind; `make`: of parameters, a class and its arguments."""
    import paddle

    classes: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (paddle.optimizer.SGD, {"learning_rate": 0.1}),
        "momentum": (paddle.optimizer.Momentum, {"learning_rate": 0.05, "momentum": 0.5}),
        "adam": (paddle.optimizer.Adam, {"learning_rate": 0.02, "epsilon": 0.05}),
    }
    classes["adam of many tensors"] = (classes["adam"][0], {**classes["adam"][1], "use_multi_tensor": True})
    which, arguments = wrap(classes[kind][0]), classes[kind][1]
    if make is None:
        return lambda parameters: which(parameters=parameters, **arguments)
    return lambda parameters: make(parameters, which, **arguments)


def loss_of(net: Any, x: Any, opens: Any, kind: str, shares: Any = 1.0) -> Any:
    """The sum over samples of one rank's batch; of a whole batch without `parameters`, that over all ranks.

    `shares`: of each sample, in a plain loss.
    """
    import paddle

    output = net(x, opens)
    loss = (shares * output**2).sum() / SCALE
    if kind in ("slope", "curvature"):
        (slope,) = paddle.grad((paddle.tanh(output) ** 2).sum(), [x], create_graph=True)
        loss = loss + (slope**2).sum() / SCALE
        if kind == "curvature":
            (curvature,) = paddle.grad((slope**2).sum(), [x], create_graph=True)
            loss = loss + (curvature**2).sum() / SCALE
    elif kind == "parameters":
        trained = [parameter for parameter in net.parameters() if not parameter.stop_gradient]
        slopes = paddle.grad(loss, trained, create_graph=True, allow_unused=True)
        for slope in slopes:
            if slope is not None:
                loss = loss + 0.1 * (slope**2).sum()
    return loss


# --- one rank, under Paceline ---


def train_step(
    net: Any,
    optimizer: Any,
    loss_of: Any,
    parts: list[Any],
    opens: bool,
    kind: str,
    breaks: bool,
    weights: list[float] | None,
) -> None:
    """One step; to_static translates it as it is."""
    for number, part in enumerate(parts[:-1]):
        with net.no_sync():
            if weights is not None:
                net.weight(weights[number])
            loss_of(net, part, opens, kind).backward()
    if weights is not None:
        net.weight(weights[-1])
    loss = loss_of(net, parts[-1], opens, kind)
    if breaks:
        print(float(loss))  # not a part of the graph
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()


def run(rank: int, program: Program) -> list[Outcome]:
    """The result of each step on this rank."""
    import paddle

    from paceline.errors import ConfigError
    from paceline.paddle import DataParallel, ShardedOptimizer, SyncBatchNorm
    from tests.multiprocess.paddle_models import join_paddle

    if "hosts" in program:
        be_on_host(program["hosts"][rank])
        join_paddle(rank)
    outcomes: list[Outcome] = []

    def refuses(error: Exception) -> None:
        outcomes.append({"refused": str(error)})

    static = functools.partial(paddle.jit.to_static, full_graph=program["full_graph"])
    net = SyncBatchNorm.convert_sync_batchnorm(make_net(program))
    wrapped = DataParallel(static(net) if program["static"] == "model" else net, **program["options"])
    kind, parameters = program["optimizer"], _trained(net)
    sharded = functools.partial(ShardedOptimizer, journal=program.get("journal", False))
    make = sharded if program["is_sharded"] else None
    if kind == "adam of many tensors":
        if make is not None:
            try:
                make_optimizer(kind, make)(parameters)
            except ConfigError as error:
                refuses(error)
        kind = "adam"
    raising: list[str] = []
    optimizer = make_optimizer(kind, make, functools.partial(_that_raises, raising, program))(parameters)
    loss = static(loss_of) if program["static"] == "loss" else loss_of
    step_once = static(train_step) if program["static"] == "step" else train_step
    has_refused = False
    for number, step in enumerate(program["steps"]):
        own = [batch(program, number, micro)[rank] for micro in range(len(step["sizes"]))]
        # An input that needs a gradient is a leaf: its gradient is not used here.
        parts = [paddle.to_tensor(part, stop_gradient=False) for part in own]
        weights = [row[rank] for row in step["weights"]] if "weights" in step else None
        arguments = (parts, step["opens"][rank], step["loss"], step["breaks"], weights)
        if number == program.get("raises_at"):
            raising.append(_RAISED)
        try:
            try:
                step_once(wrapped, optimizer, loss, *arguments)
            except ConfigError as error:
                if has_refused or not program["full_graph"]:
                    raise
                refuses(error)
                has_refused = True
                if program["static"] == "model":
                    net.forward = net.forward.rollback() if hasattr(net.forward, "rollback") else net.forward
                loss = loss_of
                step_once(wrapped, optimizer, loss, *arguments)
        except Exception as error:  # of any type: Paddle may wrap the exception of a function of a graph
            if not raising:
                raise
            refuses(error)
            raising.clear()
            optimizer.step()
            optimizer.clear_grad()
        outcomes.append(_outcome(net))
        if step["evaluates"] == "all" or (step["evaluates"] == "one" and rank == 0):
            outcomes[-1]["loss"] = _evaluation(wrapped, program, number)
    return outcomes


def _that_raises(raising: list[str], program: Program, which: Any) -> Any:
    """A class of optimizer whose step raises while `raising` is not empty."""
    is_late = program.get("raises_late", False)

    class Raising(which):  # type: ignore[misc]
        def step(self) -> None:
            if not raising or is_late:
                super().step()
            if raising:
                raise ValueError(raising[0])

    return Raising


def _outcome(net: Any) -> Outcome:
    statistics = [each for name, each in net.state_dict().items() if name.endswith(("_mean", "_variance"))]
    return {
        "parameters": [parameter.numpy() for parameter in _trained(net)],
        "statistics": [each.numpy() for each in statistics],
    }


def _evaluation(net: Any, program: Program, number: int) -> float:
    import paddle

    net.eval()
    with paddle.no_grad():
        output = net(paddle.to_tensor(np.concatenate(batch(program, number, 0))), True)
    net.train()
    return float((output**2).sum())


# --- all ranks, in one process ---


def run_alone(rank: int, program: Program) -> list[Outcome]:
    """The required result of each step."""
    import paddle

    net, ranks = make_net(program), program["ranks"]
    kind = "adam" if program["optimizer"].startswith("adam") else program["optimizer"]
    optimizer = make_optimizer(kind)(_trained(net))
    leaves_zeros = "reduce" not in program["options"]  # sharded gradients leave nothing
    outcomes = []
    for number, step in enumerate(program["steps"]):
        for micro in range(len(step["sizes"])):
            parts = batch(program, number, micro)
            if step["loss"] == "parameters":  # no norms: losses of separate batches
                for part, opens in zip(parts, step["opens"]):
                    loss = loss_of(net, paddle.to_tensor(part), opens, step["loss"])
                    (loss / ranks).backward()
                continue
            whole = paddle.to_tensor(np.concatenate(parts), stop_gradient=False)
            opens, shares = (
                paddle.to_tensor(np.repeat(np.array(row, float), [len(part) for part in parts])[:, None])
                for row in (step["opens"], _shares(step, micro, ranks))
            )
            if step["loss"] == "plain":
                loss_of(net, whole, opens, "plain", shares).backward()
            else:
                (loss_of(net, whole, opens, step["loss"]) / ranks).backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=leaves_zeros)
        outcomes.append(_outcome(net))
        if step["evaluates"] is not None:
            outcomes[-1]["loss"] = _evaluation(net, program, number)
    return outcomes


def _shares(step: dict[str, Any], micro: int, ranks: int) -> list[float]:
    """The factors of the ranks' losses: without weights, micro-batches are added and averaged over ranks."""
    if "weights" not in step:
        return [1 / ranks] * ranks
    return [weight / sum(map(sum, step["weights"])) for weight in step["weights"][micro]]


# --- the comparison ---


def check(program: Program, framework: str = "paddle") -> str:
    """The failures, in words; empty: none."""
    quiet = [("ignore", None, Warning, None, 0)]  # Paddle's own, of its compiler and of running statistics
    facts = {"program": program}
    found = run_ranks(run, program["ranks"], facts, group=None, framework="paddle", warning_filters=quiet)
    (right,) = run_ranks(run_alone, 1, facts, group=None, framework="paddle", warning_filters=quiet)
    for rank, outcomes in enumerate(found):
        refused = [outcome["refused"] for outcome in outcomes if "refused" in outcome]
        expected = expected_refusals(program)
        if len(refused) != len(expected) or not all(map(str.__contains__, refused, expected)):
            return f"rank {rank} has refused {refused}, not {expected}"
        trained = [outcome for outcome in outcomes if "refused" not in outcome]
        for number, (ours, wanted) in enumerate(zip(trained, right, strict=True)):
            if text := _difference(ours, wanted):
                return f"step {number}, rank {rank}: {text}"
    for number, row in enumerate(zip(*found)):
        parameters = [outcome.get("parameters", []) for outcome in row]
        if any(map(_differ, parameters, [parameters[0]] * len(row))):
            return f"outcome {number}: the ranks have other bits"
    return ""


def _differ(some: list[np.ndarray[Any, Any]], others: list[np.ndarray[Any, Any]]) -> bool:
    return any(one.tobytes() != other.tobytes() for one, other in zip(some, others, strict=True))


def _difference(ours: Outcome, wanted: Outcome) -> str:
    # Paddle's own norm holds the momentum of its statistics in float32, and a static graph its constants.
    for what in ("parameters", "statistics"):
        for index, (value, right) in enumerate(zip(ours[what], wanted[what], strict=True)):
            if not np.allclose(value, right, rtol=1e-6, atol=1e-6):
                return f"{what} {index} differ by {np.abs(value - right).max():.3g}"
    if "loss" in ours and not np.allclose(ours["loss"], wanted["loss"], rtol=1e-6, atol=1e-6):
        return f"the evaluation gave {ours['loss']}, not {wanted['loss']}"
    return ""


def checking(framework: str) -> contextlib.AbstractContextManager[Check]:
    return plainly(check, framework)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.modules[__name__]))
