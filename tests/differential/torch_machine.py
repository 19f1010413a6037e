"""Runs a program of the torch grammar as one rank. A `Subject` averages; this file is independent of it.

`Machine._op_...` are the ops, with their defaults.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tests.differential.programs import Op, Program, numbered
from tests.differential.records import Event, Value
from tests.differential.torch_models import WIDTH, Batch, Factor, Net, Table, make_layer, parameter_of
from tests.differential.torch_tensors import dense_of, make_plain, spoil
from tests.differential.walk import Parting, Run, Sync, Walker, of_rank

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.5}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 0.05}),
}


def seed(number: int) -> None:
    """Seed the CPU's generator only: for the others torch.manual_seed() keeps a formatted stack each time."""
    torch.default_generator.manual_seed(number)


class Subject(Protocol):
    """The wrapper that averages.

    Attributes:
        simulates: It is the reference: everything is computed in float64, and it does not average.
    """

    simulates: bool

    def wrap(self, net: nn.Module, options: dict[str, Any], nest: str | None) -> nn.Module: ...
    def no_sync(self, wrapper: nn.Module) -> contextlib.AbstractContextManager[None]: ...
    def weight(self, wrapper: nn.Module, value: float) -> None: ...
    def finished(self, wrapper: nn.Module, step: Any) -> None: ...
    def join(self, wrapper: nn.Module) -> contextlib.AbstractContextManager[Any]: ...
    def iterate(self, wrapper: nn.Module, batches: Sequence[int], step: Any) -> Iterator[int]: ...
    def clip(self, wrapper: nn.Module, trainable: list[nn.Parameter], max_norm: float) -> torch.Tensor: ...
    def sharded(
        self, params: list[nn.Parameter], kind: type[torch.optim.Optimizer], options: dict[str, float]
    ) -> Any: ...


@dataclass
class Loss:
    """A forward whose backward may come."""

    value: torch.Tensor
    models: list[int]
    is_syncing: bool
    batch: Batch
    inputs: list[torch.Tensor]  # whose gradients are compared


class Machine(Walker):
    """One rank's run; see `Walker`.

    With `Parting.AT_ONCE`, each gradient gets separate memory before any hook of the program sees it.
    Autograd may give two parameters the same memory as their gradients: a hook that writes to one changes
    both, and the next backward, or the second contribution to a gradient, adds to that memory twice.
    """

    subject: Subject

    def __init__(
        self, program: Program, rank: int, subject: Subject, *more: Any, device: str = "cpu"
    ) -> None:
        super().__init__(program, rank, subject, *more)
        self.device = device
        self.specs: list[dict[str, Any]] = []
        self.kept: list[nn.Module] = []
        self.losses: dict[str, Loss] = {}
        self.numbers: dict[int, int] = {}
        self.handles: list[Any] = []
        self._lost: list[torch.Tensor] = []
        self._written_apart: set[int] = set()  # models with buffers whose values may differ between ranks
        self.uses_amp = any(op.get("amp") for _, op in numbered(program["ops"]))
        for spec in program["models"]:
            self._build(spec)

    def _build(self, spec: dict[str, Any]) -> None:
        seed(17 + len(self.nets))
        net = Net(spec, self.nets[:], self.traps)
        if "dtype" in self.program:
            _convert(net, DTYPES[self.program["dtype"]])
        if self.rank and not any(layer["kind"] == "borrow" for layer in spec.get("layers", [])):
            with torch.no_grad():  # wrapping must repair this
                net.last.mul_(1 + self.rank)
                spoil(net, 1 + self.rank)
        if self.subject.simulates:
            make_plain(net)
        if self.subject.simulates and not self.uses_amp:
            net.double()
        net.to(self.device)
        self._part_gradients(net)
        self.nets.append(net)
        self.specs.append(spec)

    def _part_gradients(self, module: nn.Module) -> None:
        for p in module.parameters() if self.parting is Parting.AT_ONCE else ():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(_give_own_memory)  # type: ignore[no-untyped-call]

    def run(self) -> Run:
        """Run the whole program; errors that it does not catch propagate."""
        try:
            yield from super().run()
        finally:
            torch.set_flush_denormal(False)

    # --- ops: before and around training ---

    def _op_wrap(self, op: Op, label: str) -> Run:
        model = op.get("model", 0) % len(self.nets)
        if op.get("keep") and model in self.wrappers:
            self.kept.append(self.wrappers[model])
        self.wrappers.pop(model, None)
        net = self.nets[model]
        self.wrappers[model] = self.subject.wrap(net, self._wrapping(), op.get("nest"))
        self.trainable[model] = [p for p in net.parameters() if p.requires_grad]
        yield Sync("wrapped", [model])
        self._note_parameters(model)

    def _op_optimizer(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        kind, options = OPTIMIZERS[op.get("kind", "sgd")]
        trained = [p for p in self.nets[model].parameters() if p.requires_grad]
        if self.options.get("reduce") == "scatter":
            self.optimizers[model] = self.subject.sharded(trained, kind, options)
        else:
            self.optimizers[model] = kind(trained, **options)  # type: ignore[call-arg]

    def _op_hook(self, op: Op, label: str) -> None:
        p = parameter_of(self._net(op), op.get("param", 0))
        kind = op.get("kind", "post clamp_")
        if not p.requires_grad:
            return
        if kind.startswith("tensor"):
            self.handles.append(p.register_hook(lambda g: self._tensor_hook(g, kind)))  # type: ignore[no-untyped-call]
        else:
            self.handles.append(
                p.register_post_accumulate_grad_hook(lambda q: self._post_hook(q, kind))  # type: ignore[no-untyped-call]
            )

    def _tensor_hook(self, gradient: torch.Tensor, kind: str) -> torch.Tensor | None:
        if kind == "tensor trap":
            self.traps.spring("hook")
            return None
        if gradient.is_sparse:
            return None
        if kind == "tensor clamp" and not gradient.is_complex():
            return gradient.clamp(-0.3, 0.3)
        return gradient * 0.5

    def _post_hook(self, p: torch.Tensor, kind: str) -> None:
        if kind == "post trap":
            self.traps.spring("hook")
            return
        if p.grad is None or p.grad.is_sparse:
            return
        with torch.no_grad():
            if kind == "post clamp_" and not p.is_complex():
                p.grad.clamp_(-0.3, 0.3)
            elif kind == "post replace":
                p.grad = p.grad * 0.5
            elif kind == "post look":
                p.grad.sum()
            else:
                p.grad.mul_(0.5)

    def _op_unhook(self, op: Op, label: str) -> None:
        if self.handles:
            self.handles.pop().remove()

    def _op_swap(self, op: Op, label: str) -> None:
        net, how = self._net(op), op.get("how", "same")
        p = parameter_of(net, op.get("param", 0))
        if how in ("grown", "shrunk", "dtype"):
            tables = [module for module in net.modules() if isinstance(module, Table)]
            if not tables:
                return
            p = tables[0].rows
            if "ranks" in op and not p.requires_grad:  # it is not averaged: ranks may always differ
                return
        data = p.data
        if how == "grown":
            p.data = torch.cat([data, 0.5 * torch.ones_like(data[:1])])
        elif how == "shrunk":
            p.data = data[: max(1, data.shape[0] // 2)].clone()
        elif how == "dtype":
            if self.subject.simulates:
                return
            p.data = data.to(torch.bfloat16 if data.dtype is torch.float64 else torch.float64)
        else:
            p.data = data * 0.9

    def _op_freeze(self, op: Op, label: str) -> None:
        p = parameter_of(self._net(op), op.get("param", 0))
        p.requires_grad_(bool(op.get("on", False)))
        if self.has_parted:
            self._drop_frozen(op.get("model", 0) % len(self.nets))

    def _drop_frozen(self, model: int) -> None:
        for p in self.nets[model].parameters():
            if not p.requires_grad:
                p.grad = None

    def _op_replace(self, op: Op, label: str) -> None:
        net, model = self._net(op), op.get("model", 0) % len(self.nets)
        layers = self.specs[model].get("layers", [])
        if not layers:
            return
        number = op.get("layer", 0) % len(layers)
        if layers[number]["kind"] in ("again", "tied", "borrow"):
            return
        seed(99)
        net.layers[number] = None  # type: ignore[assignment]
        net.layers[number] = make_layer(layers[number], net)
        _convert(net, self._dtype())
        net.to(self.device)
        self._part_gradients(net.layers[number])

    def _op_convert(self, op: Op, label: str) -> None:
        if not self.subject.simulates:
            _convert(self._net(op), DTYPES[op.get("to", "float64")])

    def _op_ftz(self, op: Op, label: str) -> None:
        if not self.subject.simulates:
            torch.set_flush_denormal(bool(op.get("on", True)))

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
        self.losses[op.get("to", "loss")] = Loss(value, [model], is_syncing, batch, inputs)

    def _loss(self, op: Op, model: int, wrapper: nn.Module) -> tuple[torch.Tensor, Batch, torch.Tensor]:
        size = of_rank(op.get("batch", 2), self.rank)
        made = torch.Generator().manual_seed(1000 * op.get("data", 0) + self.rank)
        dtype = self._dtype()
        x = torch.randn(size, WIDTH, generator=made).to(self.device, dtype)
        factors = torch.randn(size, WIDTH, generator=made).to(self.device, dtype)
        rows = torch.randint(0, 3, (size,), generator=made).to(self.device)
        if self.rank in op.get("nan", []):
            x = x * float("nan")
        if self._has_reentrant(model) or op.get("input"):
            x.requires_grad_()
        number = self.numbers.get(model, 0)
        amp = torch.autocast(self.device, torch.bfloat16) if op.get("amp") else contextlib.nullcontext()
        batch = Batch(self.rank, number, rows, of_rank(op.get("weight", 1.0), self.rank))
        with amp:
            y = wrapper(x, batch)
        if op["op"] == "forward":
            self.numbers[model] = (
                number + 1
            )  # not of one that Paceline refuses, which the reference leaves out
        y = y.to(dtype)
        scale = of_rank(op.get("scale", 1.0), self.rank)
        return ((y * factors).sum() + 0.1 * (y * y).sum()) * scale, batch, x

    def _op_lost(self, op: Op, label: str) -> None:
        """A forward that gets no backward."""
        model = op.get("model", 0) % len(self.nets)
        wrapper = self.wrappers.get(model)
        if wrapper is None:
            return
        wrapper.train(op.get("how") != "eval")
        value, _, _ = self._loss(op, model, wrapper)
        wrapper.train()
        if op.get("keep"):
            self._lost.append(value)

    def _op_evaluate(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        wrapper = self.wrappers.get(model)
        if wrapper is None:
            return
        if op.get("how") != "train":
            wrapper.eval()
        with torch.set_grad_enabled(op.get("how") == "grad"):
            x = torch.ones(2, WIDTH, dtype=self._dtype(), device=self.device)
            wrapper(x, Batch(self.rank, 0, torch.zeros(2, dtype=torch.int64, device=self.device)))
        wrapper.train()

    def _op_penalty(self, op: Op, label: str) -> None:
        loss = self.losses.get(op.get("of", "loss"))
        if loss is None:
            return
        of = self.trainable.get(loss.models[0], [])
        gradients = torch.autograd.grad(loss.value, of, create_graph=True, allow_unused=True)
        real = [g for g in gradients if g is not None and not g.is_complex() and not g.is_sparse]
        loss.value = loss.value + 0.05 * sum((g * g).sum() for g in real)

    def _op_weight(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        if model in self.wrappers:
            value = float(of_rank(op.get("values", 1.0), self.rank))
            self.weights[model] = value
            self.subject.weight(self.wrappers[model], value)

    def _op_backward(self, op: Op, label: str) -> Run:
        losses = [self.losses[name] for name in op.get("of", ["loss"]) if name in self.losses]
        if not losses:
            return
        models = sorted({model for loss in losses for model in loss.models})
        lag_s = of_rank(op.get("lag", 0.0), self.rank)
        if lag_s and not self.subject.simulates:
            time.sleep(lag_s)
        total = sum((loss.value for loss in losses[1:]), losses[0].value)
        with contextlib.ExitStack() as stack:
            if "flag" in op:
                self._set_flag(models, bool(op["flag"]))
                stack.callback(self._set_flag, models, True)
            if op.get("no_sync"):
                for model in models:
                    stack.enter_context(self.subject.no_sync(self.wrappers[model]))
            if not op.get("retain"):
                for name in op.get("of", ["loss"]):
                    self.losses.pop(name, None)
            self._weigh(losses)
            with self._weighed(models), self._watching(losses, models):
                total.backward(retain_graph=bool(op.get("retain")))
        if self.parting is not Parting.NEVER:  # including those that were frozen when the model was built
            for p in (p for net in self.nets for p in net.parameters()):
                _give_own_memory(p)
        is_local = op.get("no_sync") or not op.get("flag", True)
        synced = [] if is_local else [m for loss in losses if loss.is_syncing for m in loss.models]
        synced = sorted(set(synced))
        if synced:
            yield Sync("synchronised", synced)
            self._written_apart.difference_update(synced)
            for model in synced:
                self.weight_so_far.pop(model, None)
        for model in range(len(self.nets)):
            if model in self.wrappers:
                self._note_gradients(model, is_shared=model in synced)
        self._note_inputs([loss for loss in losses if loss.inputs], synced)

    def _note_inputs(self, losses: list[Loss], synced: list[int]) -> None:
        """Note gradients of inputs, which are local to this rank.

        A backward without sync returns even if its forward has used a buffer on which the ranks differ.
        """
        for number, loss in enumerate(losses):
            if self._written_apart and not (loss.is_syncing and loss.models[0] in synced):
                continue
            values = {f"{number}": _value(x.grad) for x in loss.inputs}
            self._note(loss.models[0], f"input {number}", values, False)

    def _set_flag(self, models: list[int], is_syncing: bool) -> None:
        """Set it outside of no_sync(): the reference uses only the flag of the backward."""
        for model in models:
            if not self.subject.simulates:
                self.wrappers[model].require_backward_grad_sync = is_syncing

    def _op_write(self, op: Op, label: str) -> None:
        """Write to the buffers that no forward writes. Rank 0's values are right, on all ranks.

        A forward in no_sync() may still use this rank's own value: the mean that follows is right, or an
        error on every rank.
        """
        values = op.get("values", 1.0)
        is_apart = isinstance(values, list) and len(set(values)) > 1
        if is_apart and not self.options.get("forward_sync_buffers"):
            self._written_apart.add(op.get("model", 0) % len(self.nets))
        value = of_rank(values, 0 if self.subject.simulates else self.rank)
        if value is None:  # this rank does not write
            return
        for layer in self._net(op).modules():
            if not isinstance(layer, Factor):
                continue
            if op.get("how") == "anew":
                layer.factor = torch.full_like(layer.factor, value)
            elif op.get("how") == "data":
                layer.factor.data.fill_(value)
            else:
                layer.factor.fill_(value)

    def _op_direct(self, op: Op, label: str) -> Run:
        """A step with gradients from autograd.grad(), which are not averaged although they should be."""
        loss = self.losses.pop("loss", None)
        if loss is None or loss.models[0] not in self.optimizers:
            return
        (model,) = loss.models
        for p in self.trainable[model]:
            p.grad = None
        of = [p for p in self.trainable[model] if p.requires_grad]
        for p, g in zip(of, torch.autograd.grad(loss.value, of, allow_unused=True)):
            p.grad = g
        if self.subject.simulates:
            yield Sync("synchronised", [model])
        self.optimizers[model].step()

    @contextlib.contextmanager
    def _weighed(self, models: list[int]) -> Iterator[None]:
        """In the reference: apply the weight of this backward to the gradients that it adds."""
        weighed = {m: self.weights.pop(m) for m in models if m in self.weights}
        if not self.subject.simulates or not weighed:
            yield
            return
        before = {p: p.grad for m in weighed for p in self.trainable[m]}
        for p in before:
            p.grad = None
        yield
        done: set[nn.Parameter] = set()  # of two models in one backward, which have the same weight
        for model, weight in weighed.items():
            is_first = model not in self.weight_so_far
            past = self.weight_so_far.get(model, 0.0)
            whole = self.weight_so_far[model] = past + weight
            shares = (1.0, 1.0) if is_first or not whole else (past / whole, weight / whole)
            if is_first:
                self.weighed_so_far[model] = set()
            with_weights = self.weighed_so_far[model]
            for number, p in enumerate(self.trainable[model]):
                kept = shares[0] if number in with_weights else 1.0
                given = [(g, share) for g, share in ((before[p], kept), (p.grad, shares[1])) if g is not None]
                if p.grad is not None:
                    with_weights.add(number)
                if given and p not in done:
                    done.add(p)
                    p.grad = sum((g * share for g, share in given if share), torch.zeros_like(p))
                    if all(g.is_sparse for g, _ in given):  # momentum of rows accepts only sparse gradients
                        p.grad = p.grad.to_sparse(1)

    def _op_zero_grad(self, op: Op, label: str) -> None:
        none, how = op.get("none", True), op.get("how", "optimizer")
        for model, net in enumerate(self.nets):
            if op.get("model", model) != model:
                continue
            if how == "optimizer" and model in self.optimizers:
                self.optimizers[model].zero_grad(set_to_none=none)
            elif how == "wrapper" and model in self.wrappers:
                self.wrappers[model].zero_grad(set_to_none=none)
            else:
                net.zero_grad(set_to_none=none)
        if "model" not in op:
            self._tainted = self._is_lost

    def _op_clip(self, op: Op, label: str) -> None:
        model = op.get("model", 0) % len(self.nets)
        if model not in self.wrappers:
            return
        trainable = self.trainable[model]
        if any(p.grad is not None and p.grad.is_sparse for p in trainable):
            return
        is_elsewhere = any(map(_is_elsewhere, trainable))
        true = 0.0 if is_elsewhere else _norm(trainable)
        reported = self.subject.clip(self.wrappers[model], trainable, op.get("max", 1.0))
        if is_elsewhere:  # the next step shows the remaining gradients
            return
        resolutions = [torch.finfo(p.grad.dtype).eps for p in trainable if p.grad is not None]
        self._note_norm(float(reported), true, max(resolutions, default=0.0))

    def _op_scale_grads(self, op: Op, label: str) -> None:
        """Write into gradients, in ways that autograd's version counters may not see."""
        how, by = op.get("how", "data"), op.get("by", 0.1)
        for p in self._net(op).parameters():
            if p.grad is None or p.grad.is_sparse:
                continue
            if how == "numpy" and p.is_cpu and not p.is_complex() and p.dtype != torch.bfloat16:
                p.grad.numpy()[...] *= by
            elif how == "detach":
                p.grad.detach().mul_(by)
            elif how == "plain":
                p.grad.mul_(by)
            else:
                p.grad.data.mul_(by)

    def _op_step(self, op: Op, label: str) -> None:
        for model, optimizer in self.optimizers.items():
            if op.get("model", model) == model:
                optimizer.step()
                self._is_lost = self._is_lost or self._tainted
                if model in self.wrappers:
                    self._note_parameters(model)

    # --- recording values ---

    def _note_gradients(self, model: int, *, is_shared: bool) -> None:
        named = self.nets[model].named_parameters()
        uses_own_buffers = bool(self._written_apart) and not is_shared
        if uses_own_buffers or any(map(_is_elsewhere, self.nets[model].parameters())):
            # The next mean shows whether it is right; for shards, the parameters after the next step.
            at = f"{self.at} model {model}"
            self.record.events.append(Event(at, "gradients", {}, model, shared=is_shared, tainted=True))
        else:
            values = {f"{model}:{name}": _value(p.grad) for name, p in named}
            self._note(model, "gradients", values, is_shared)
        buffers = {f"{model}:{name}": _value(b) for name, b in self.nets[model].named_buffers()}
        if is_shared and buffers:
            self._note(model, "buffers", buffers, True)

    def _note_parameters(self, model: int) -> None:
        values = {f"{model}:{name}": _value(p.data) for name, p in self.nets[model].named_parameters()}
        self._note(model, "parameters", values, True)

    # --- helpers ---

    def _net(self, op: Op) -> Net:
        return self.nets[op.get("model", 0) % len(self.nets)]

    def _dtype(self) -> torch.dtype:
        if self.subject.simulates:
            return torch.float32 if self.uses_amp else torch.float64
        return next(self.nets[0].parameters()).dtype if self.nets else torch.float32

    def _has_reentrant(self, model: int) -> bool:
        def search(layers: list[dict[str, Any]]) -> bool:
            return any(layer["kind"] == "checkpoint" or search(layer.get("layers", [])) for layer in layers)

        return search(self.specs[model].get("layers", [])) or any(
            search(spec.get("layers", [])) for spec in self.specs
        )


def _value(tensor: torch.Tensor | None) -> Value | None:
    if tensor is None:
        return None
    dense = dense_of(tensor).detach().cpu()
    if dense.is_sparse:
        rows = dense.coalesce()
        # Copied, not added to zeros as by to_dense(): a rank may flush the sum.
        dense = torch.zeros(dense.shape, dtype=dense.dtype)
        dense[rows.indices()[0]] = rows.values()
    if dense.dtype == torch.bfloat16:
        dense = dense.float()
    return Value.of(dense.resolve_conj().resolve_neg().numpy())


def _is_elsewhere(p: torch.Tensor) -> bool:
    """True if each rank has a shard of the gradient, and `.grad` is a stand-in for it."""
    return type(p.grad).__name__ == "ScatteredGradient"


def _give_own_memory(p: torch.Tensor) -> None:
    if p.grad is not None:
        p.grad = p.grad.clone()


def _convert(net: nn.Module, dtype: torch.dtype) -> None:
    """Like `.to(dtype)`, which would make complex parameters real."""
    net._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _norm(trainable: list[nn.Parameter]) -> float:
    squares = [p.grad.detach().abs().double().square().sum() for p in trainable if p.grad is not None]
    return float(sum(squares)) ** 0.5
