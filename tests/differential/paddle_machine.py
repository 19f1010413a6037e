"""Runs a program of the Paddle grammar as one rank. A `Subject` averages; this file is independent of it.

`Machine._op_...` are the ops, with their defaults.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import nn

from tests.differential.between import are_apart
from tests.differential.paddle_models import WIDTH, Batch, Factor, Net, Table, make_layer, parameter_of
from tests.differential.programs import Op, Program
from tests.differential.records import Event, Value
from tests.differential.walk import Parting, Run, Sync, Walker, of_rank

OPTIMIZERS = {
    "sgd": lambda p: paddle.optimizer.SGD(0.05, parameters=p),
    "momentum": lambda p: paddle.optimizer.Momentum(0.05, 0.5, parameters=p),
    "adam": lambda p: paddle.optimizer.Adam(0.01, epsilon=0.05, parameters=p),
}


class Subject(Protocol):
    """The wrapper that averages.

    Attributes:
        simulates: It is the reference: everything is computed in float64, and it does not average.
    """

    simulates: bool

    def wrap(self, net: nn.Layer, options: dict[str, Any]) -> Any: ...
    def no_sync(self, wrapper: Any) -> contextlib.AbstractContextManager[None]: ...
    def weight(self, wrapper: Any, value: float) -> None: ...
    def finished(self, wrapper: Any, step: Any) -> None: ...
    def backward_sync(self, wrapper: Any) -> int: ...
    def join(self, wrapper: Any) -> contextlib.AbstractContextManager[Any]: ...
    def iterate(self, wrapper: Any, batches: Sequence[int], step: Any) -> Iterator[int]: ...


@dataclass
class Loss:
    """A forward whose backward may come."""

    value: paddle.Tensor
    model: int
    is_syncing: bool
    batch: Batch
    inputs: list[paddle.Tensor]  # whose gradients are compared


class Machine(Walker):
    """One rank's run; see `Walker`."""

    subject: Subject

    def __init__(
        self, program: Program, rank: int, subject: Subject, *more: Any, device: str = "cpu"
    ) -> None:
        super().__init__(program, rank, subject, *more)
        paddle.set_device(device)
        self.specs: list[dict[str, Any]] = []
        self.kept: list[Any] = []
        self.losses: dict[str, Loss] = {}
        self.numbers: dict[int, int] = {}
        self.handles: list[Any] = []
        self._lost: list[paddle.Tensor] = []
        self._written_apart: set[int] = set()  # models with buffers whose values may differ between ranks
        self.dtype = "float64" if subject.simulates else program.get("dtype", "float32")
        paddle.set_default_dtype(self.dtype)
        for spec in program["models"] or [{}]:
            net = Net(spec, self.nets[:], self.traps, subject.simulates)
            if rank and not any(layer["kind"] == "borrow" for layer in spec.get("layers", [])):
                net.last.set_value(net.last * (1 + rank))  # wrapping must repair this
            self.nets.append(net)
            self.specs.append(spec)

    # --- ops: before and around training ---

    def _op_wrap(self, op: Op, label: str) -> Run:
        model = op.get("model", 0) % len(self.nets)
        if op.get("keep") and model in self.wrappers:
            self.kept.append(self.wrappers[model])
        self.wrappers.pop(model, None)
        net = self.nets[model]
        self.wrappers[model] = self.subject.wrap(net, self._wrapping())
        self.trainable[model] = [p for p in net.parameters() if not p.stop_gradient]
        yield Sync("wrapped", [model])
        self._note_parameters(model)

    def _op_optimizer(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        parameters = [p for p in self.nets[model].parameters() if not p.stop_gradient]
        self.optimizers[model] = OPTIMIZERS[op.get("kind", "sgd")](parameters)

    def _op_hook(self, op: Op, label: str) -> None:
        p = parameter_of(self._net(op), op.get("param", 0))
        kind = op.get("kind", "end scale")
        tables = [layer.weight for layer in self._net(op).sublayers() if isinstance(layer, nn.Embedding)]
        if p.stop_gradient or any(p is table for table in tables):
            return
        if kind.startswith("tensor"):
            self.handles.append(p.register_hook(lambda gradient: self._tensor_hook(gradient, kind)))
        else:
            p._register_backward_hook(lambda: _end_hook(p, kind))

    def _tensor_hook(self, gradient: paddle.Tensor, kind: str) -> paddle.Tensor | None:
        if kind == "tensor trap":
            self.traps.spring("hook")
            return None
        if kind == "tensor look":
            return None
        return gradient.clip(-0.3, 0.3) if kind == "tensor clip" else gradient * 0.5

    def _op_unhook(self, op: Op, label: str) -> None:
        if self.handles:
            self.handles.pop().remove()

    def _op_swap(self, op: Op, label: str) -> None:
        net, how = self._net(op), op.get("how", "same")
        p = parameter_of(net, op.get("param", 0))
        if how == "same":
            p.set_value(p * 0.9)
            return
        tables = [layer for layer in net.sublayers() if isinstance(layer, Table)]
        if not tables:
            return
        p = tables[0].rows
        now = p.detach()
        if how == "grown":
            p.data = paddle.concat([now, 0.5 * paddle.ones_like(now[:1])])
        elif how == "shrunk":
            p.data = now[: max(1, now.shape[0] // 2)].clone()
        elif not self.subject.simulates:
            p.data = now.astype("float32" if self.dtype == "float64" else "float64")

    def _op_freeze(self, op: Op, label: str) -> None:
        p = parameter_of(self._net(op), op.get("param", 0))
        p.stop_gradient = not op.get("on", False)
        if self.has_parted:
            self._drop_frozen(op.get("model", 0) % len(self.nets))

    def _drop_frozen(self, model: int) -> None:
        for p in self.trainable.get(model, []):
            if p.stop_gradient:
                put(p, None)

    def _op_replace(self, op: Op, label: str) -> None:
        net, model = self._net(op), op.get("model", 0) % len(self.nets)
        layers = self.specs[model].get("layers", [])
        number = op.get("layer", 0) % max(1, len(layers))
        if not layers or layers[number]["kind"] in ("again", "tied", "borrow"):
            return
        net.layers[number] = make_layer(layers[number], net)
        net.fill(99)

    # --- ops: a step ---

    def _op_forward(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        wrapper = self.wrappers.get(model)
        if wrapper is None:
            return
        is_syncing = not op.get("no_sync")
        if "flag" in op:
            self._set_flag([model], bool(op["flag"]))
        with contextlib.nullcontext() if is_syncing else self.subject.no_sync(wrapper):
            value, batch, x = self._loss(op, model, wrapper)
        inputs = [x] if op.get("input") else []
        self.losses[op.get("to", "loss")] = Loss(value, model, is_syncing, batch, inputs)

    def _loss(self, op: Op, model: int, wrapper: Any) -> tuple[paddle.Tensor, Batch, paddle.Tensor]:
        size = of_rank(op.get("batch", 2), self.rank)
        made = np.random.default_rng([op.get("data", 0), self.rank])
        x, factors = (made.standard_normal((size, WIDTH)).astype(np.float32) for _ in range(2))
        if self.rank in op.get("nan", []):
            x[0, 0] = np.nan
        rows = paddle.to_tensor(made.integers(0, 3, size))
        x, factors = (paddle.to_tensor(each.astype(self.dtype)) for each in (x, factors))
        x.stop_gradient = not (self._has_recompute or op.get("input"))
        number = self.numbers.get(model, -1) + 1
        batch = Batch(self.rank, number, rows, of_rank(op.get("weight", 1.0), self.rank))
        y = wrapper(x, batch)
        if op["op"] == "forward":
            self.numbers[model] = number  # not of one that Paceline refuses, which the reference leaves out
        scale = of_rank(op.get("scale", 1.0), self.rank)
        return ((y * factors).sum() + 0.1 * (y * y).sum()) * scale, batch, x

    def _op_lost(self, op: Op, label: str) -> None:
        """A forward that gets no backward."""
        model = op.get("model", 0) % len(self.nets)
        wrapper = self.wrappers.get(model)
        if wrapper is None:
            return
        if op.get("how") == "eval":
            wrapper.eval()
        value, _, _ = self._loss(op, model, wrapper)
        wrapper.train()
        if op.get("keep"):
            self._lost.append(value)

    def _op_evaluate(self, op: Op, label: str) -> None:
        wrapper = self.wrappers.get(op.get("model", 0) % len(self.nets))
        if wrapper is None:
            return
        if op.get("how") != "train":
            wrapper.eval()
        with paddle.set_grad_enabled(op.get("how") == "grad"):
            wrapper(paddle.ones([2, WIDTH]), Batch(self.rank, 0, paddle.zeros([2], "int64")))
        wrapper.train()

    def _op_look(self, op: Op, label: str) -> None:
        """paddle.grad() through a loss whose backward is still to come: no backward."""
        loss = self.losses.get(op.get("of", "loss"))
        if (
            loss is not None and not self._is_sparse and not self._has_recompute
        ):  # that runs backward() inside
            of = [p for p in self.trainable[loss.model] if not p.stop_gradient]
            paddle.grad([loss.value], of, retain_graph=True, allow_unused=True)

    def _op_weight(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        if model in self.wrappers:
            value = float(of_rank(op.get("values", 1.0), self.rank))
            self.weights[model] = value
            self.subject.weight(self.wrappers[model], value)

    def _op_backward(self, op: Op, label: str) -> Run:
        names = op.get("of", ["loss"])
        losses = [self.losses[name] for name in names if name in self.losses]
        if not losses:
            return
        models = sorted({loss.model for loss in losses})
        lag_s = of_rank(op.get("lag", 0.0), self.rank)
        if lag_s and not self.subject.simulates:
            time.sleep(lag_s)
        keeps = bool(op.get("retain"))
        with contextlib.ExitStack() as stack:
            if "flag" in op:
                self._set_flag(models, bool(op["flag"]))
                stack.callback(self._set_flag, models, True)
            if op.get("no_sync"):
                for model in models:
                    stack.enter_context(self.subject.no_sync(self.wrappers[model]))
            if not keeps:
                for name in names:
                    self.losses.pop(name, None)
            self._weigh(losses)
            with self._weighed(models), self._watching(losses, models):
                if op.get("how") == "sum":
                    total = sum((loss.value for loss in losses[1:]), losses[0].value)
                    total.backward(retain_graph=keeps)
                else:
                    paddle.autograd.backward([loss.value for loss in losses], retain_graph=keeps)
        # Paddle silently runs no backward if all tensors that a loss depends on are frozen.
        backward_sync = [loss for loss in losses if loss.is_syncing and not loss.value.stop_gradient]
        is_local = op.get("no_sync") or not op.get("flag", True)
        synced = [] if is_local else sorted({loss.model for loss in backward_sync})
        if self.parting is not Parting.NEVER:
            for p in (p for net in self.nets for p in net.parameters() if p.grad is not None):
                put(p, p.grad.clone())
        if synced:
            yield Sync("synchronised", synced)
            self._written_apart.difference_update(synced)
            for model in synced:
                self.weight_so_far.pop(model, None)
        for model in self.wrappers:
            self._note_gradients(model, is_shared=model in synced)
        self._note_inputs([loss for loss in losses if loss.inputs], synced)

    def _note_inputs(self, losses: list[Loss], synced: list[int]) -> None:
        """Note gradients of inputs, which are local to this rank.

        A backward without sync returns even if its forward has used a buffer on which the ranks differ.
        """
        for number, loss in enumerate(losses):
            values = {f"{number}": _value(x.grad) for x in loss.inputs}
            if self._written_apart and not (loss.is_syncing and loss.model in synced):
                continue
            self._note(loss.model, f"input {number}", values, False)

    def _set_flag(self, models: list[int], is_syncing: bool) -> None:
        """Set it outside of no_sync(): the reference uses only the flag of the backward."""
        for model in models:
            if not self.subject.simulates:
                self.wrappers[model].grad_need_sync = is_syncing

    def _op_write(self, op: Op, label: str) -> None:
        """Write to the buffers that no forward writes. Rank 0's values are right, on all ranks.

        Or a warning on all ranks, which is an error in these runs. A forward in no_sync() may still use this
        rank's own value.
        """
        if are_apart(op) and not self.options.get("forward_sync_buffers"):
            self._written_apart.add(op.get("model", 0) % len(self.nets))
        value = of_rank(op.get("values", 1.0), 0 if self.subject.simulates else self.rank)
        if value is None:  # this rank does not write
            return
        for layer in self.nets[op.get("model", 0) % len(self.nets)].sublayers():
            if not isinstance(layer, Factor):
                continue
            made = paddle.full([1], value, layer.factor.dtype)
            if op.get("how") == "anew":
                layer.factor = made
            else:
                layer.factor.set_value(made)

    @contextlib.contextmanager
    def _weighed(self, models: list[int]) -> Iterator[None]:
        """In the reference: apply the weight of this backward to the gradients that it adds."""
        weighed = {m: self.weights.pop(m) for m in models if m in self.weights}
        if not self.subject.simulates or not weighed:
            yield
            return
        before = {m: [held(p) for p in self.trainable[m]] for m in weighed}
        for m in weighed:
            for p in self.trainable[m]:
                put(p, None)
        yield
        done: set[int] = set()  # of two models in one backward, which have the same weight
        for model, weight in weighed.items():
            is_first = model not in self.weight_so_far
            past = self.weight_so_far.get(model, 0.0)
            whole = self.weight_so_far[model] = past + weight
            shares = (1.0, 1.0) if is_first or not whole else (past / whole, weight / whole)
            if is_first:
                self.weighed_so_far[model] = set()
            with_weights = self.weighed_so_far[model]
            for number, (p, earlier) in enumerate(zip(self.trainable[model], before[model])):
                kept = shares[0] if number in with_weights else 1.0
                given = [(g, share) for g, share in ((earlier, kept), (p.grad, shares[1])) if g is not None]
                if p.grad is not None:
                    with_weights.add(number)
                if given and id(p) not in done:
                    done.add(id(p))
                    put(p, sum((g * share for g, share in given if share), paddle.zeros_like(p)))

    def _op_clear(self, op: Op, label: str) -> None:
        zero, how = op.get("zero", True), op.get("how", "optimizer")
        for model, net in enumerate(self.nets):
            if op.get("model", model) != model:
                continue
            if how == "optimizer" and model in self.optimizers:
                self.optimizers[model].clear_grad(set_to_zero=zero)
            elif how == "tensor":
                for p in net.parameters():
                    if not p.stop_gradient:  # the ranks' frozen gradients are not averaged
                        p.clear_gradient(set_to_zero=zero)
            else:
                layer = self.wrappers.get(model, net) if how == "wrapper" else net
                layer.clear_gradients(set_to_zero=zero)
            for p in net.parameters():
                if self._tainted and p.stop_gradient:  # Paddle keeps the failed backward's gradients
                    put(p, None)
        self._tainted = False
        self.weight_so_far.clear()

    def _op_clip(self, op: Op, label: str) -> None:
        if self._is_sparse:  # Paddle aborts
            return
        for model, wrapper in self.wrappers.items():
            if op.get("model", model) != model:
                continue
            trainable = [p for p in self.trainable[model] if p.grad is not None]
            if not trainable:
                continue
            true = sum(float(p.grad.astype("float64").square().sum()) for p in trainable) ** 0.5
            if hasattr(type(wrapper), "clip_grad_norm_"):
                reported = float(wrapper.clip_grad_norm_(op.get("max", 1.0)))
            else:
                reported = float(nn.utils.clip_grad_norm_(trainable, op.get("max", 1.0)))
            self._note_norm(reported, true, max(paddle.finfo(p.grad.dtype).eps for p in trainable))

    def _op_scale_grads(self, op: Op, label: str) -> None:
        if self._is_sparse:
            return
        for p in (p for net in self.nets for p in net.parameters()):
            gradient = p.grad
            if gradient is None:
                continue
            with paddle.no_grad():
                if op.get("how") == "set":
                    p.grad = gradient * op.get("by", 0.1)
                else:
                    gradient.scale_(op.get("by", 0.1))

    def _op_step(self, op: Op, label: str) -> None:
        for model, optimizer in self.optimizers.items():
            if op.get("model", model) == model:
                optimizer.step()
                self._is_lost = self._is_lost or self._tainted
                if model in self.wrappers:
                    self._note_parameters(model)

    # --- recording values ---

    def _note_gradients(self, model: int, *, is_shared: bool) -> None:
        net = self.nets[model]
        values = {f"{model}:{name}": _value(p.grad) for name, p in net.named_parameters()}
        if self._written_apart and not is_shared:  # the next mean shows whether it is right
            at = f"{self.at} model {model}"
            self.record.events.append(Event(at, "gradients", {}, model, tainted=True))
        else:
            self._note(model, "gradients", values, is_shared)
        buffers = {f"{model}:{name}": _value(b) for name, b in buffers_of(net).items()}
        if is_shared and buffers:
            self._note(model, "buffers", buffers, True)

    def _note_parameters(self, model: int) -> None:
        statistics = buffers_of(self.nets[model])
        named = self.nets[model].named_parameters()
        values = {f"{model}:{name}": _value(p) for name, p in named if name not in statistics}
        self._note(model, "parameters", values, True)

    def _is_own(self, error: BaseException) -> bool:
        return super()._is_own(error) or "UserError: raised in " in str(error)  # Paddle's own text around it

    # --- helpers ---

    def _net(self, op: Op) -> Net:
        net: Net = self.nets[op.get("model", 0) % len(self.nets)]
        return net

    @property
    def _has_recompute(self) -> bool:
        return has_layer(self.specs, "recompute")

    @property
    def _is_sparse(self) -> bool:
        return has_layer(self.specs, "embedding")


def has_layer(specs: list[dict[str, Any]], kind: str) -> bool:
    """True if a model, or a layer, contains a layer of this kind."""
    return any(spec.get("kind") == kind or has_layer(spec.get("layers", []), kind) for spec in specs)


def buffers_of(net: nn.Layer) -> dict[str, paddle.Tensor]:
    """Buffers and running statistics."""
    statistics = {n: p for n, p in net.named_parameters() if n.endswith(("_mean", "_variance"))}
    return statistics | dict(net.named_buffers())


def held(p: paddle.Tensor) -> paddle.Tensor | None:
    """A copy of the gradient."""
    return None if p.grad is None else p.grad.clone()


def put(p: paddle.Tensor, gradient: paddle.Tensor | None) -> None:
    """Replace the gradient, in new memory; other tensors that share the old memory keep it."""
    if gradient is not None:
        p._copy_gradient_from(gradient.detach().clone())
        p._unset_fake_empty()  # after clear_gradient(), the next backward would replace it
    elif p.grad is not None:
        p._copy_gradient_from(paddle.empty([1], p.dtype))  # otherwise `None` frees the others' memory, too
        p.clear_gradient(False)


def dense(gradient: paddle.Tensor, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """The values, with zeros for the rows that a sparse gradient lacks."""
    if not gradient.is_selected_rows():
        return np.array(gradient.detach().numpy())
    selected = gradient.get_selected_rows()
    rows = np.array(selected.get_tensor())
    values = np.zeros(shape, rows.dtype)
    np.add.at(values, list(selected.rows()), rows)
    return values


def _value(tensor: paddle.Tensor | None) -> Value | None:
    if tensor is None:
        return None
    height = tensor.get_selected_rows().height() if tensor.is_selected_rows() else 0
    return Value.of(dense(tensor, [height, WIDTH]))


def _end_hook(p: paddle.Tensor, kind: str) -> None:
    """Called once the gradient is accumulated; must not raise."""
    gradient = p.grad
    if gradient is None:
        return
    with paddle.no_grad():
        if kind == "end set":
            p.grad = gradient * 0.5
        elif kind == "end look":
            gradient.sum()
        elif kind == "end clip":
            gradient.clip_(-0.3, 0.3)
        else:
            gradient.scale_(0.5)
