"""The parameters, buffers and running statistics of a wrapped layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle
from paddle import nn

from paceline import _core
from paceline.ddp.wrapper_arguments import WrapperArguments
from paceline.errors import ConfigError
from paceline.paddle import internals
from paceline.reducer.backward_errors import shorten
from paceline.reducer.model_agreement import TensorDescription
from paceline.reducer.plan import ParameterSpec

DTYPES = {
    "float32": paddle.float32,
    "float64": paddle.float64,
    "float16": paddle.float16,
    "bfloat16": paddle.bfloat16,
}
"""The dtypes of gradients that both kinds of reducer average."""
ITEMSIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


def dtype_name(dtype: paddle.dtype) -> str:
    return str(dtype).removeprefix("paddle.")


class ManagedTensors:
    """The parameters and buffers of a layer that the wrapper synchronises.

    Parameters and buffers with `no_sync = True` are left out, as in Paddle's class. So are buffers that are
    sparse tensors, and those without values, which a recurrent layer has on the CPU.

    Attributes:
        buffers: All other buffers, and running statistics.
        statistics: Running statistics, which are parameters for Paddle.
        delayed: Indices of delay_all_reduce_named_params.
        frozen_now: Indices of trainable parameters that were frozen at the last check of a forward.
    """

    def __init__(self, layer: nn.Layer) -> None:
        named = [(name, p) for name, p in layer.named_parameters() if not _is_left_alone(p)]
        sparse = {
            id(child.weight)
            for child in layer.sublayers(include_self=True)
            if isinstance(child, nn.Embedding) and internals.makes_sparse_gradients(child)
        }
        statistics = _running_statistics(layer)
        trained = [(name, p) for name, p in named if not _is_frozen(p)]
        self.all_parameters = {name: p for name, p in named if id(p) not in statistics}
        self.names = [name for name, p in trained if id(p) not in sparse]
        self.trainable = [p for _, p in trained if id(p) not in sparse]
        self.sparse = {name: p for name, p in trained if id(p) in sparse}
        self.frozen = [p for p in self.all_parameters.values() if _is_frozen(p)]
        self.statistics = {name: p for name, p in named if id(p) in statistics}
        self._layer = layer
        self._find_buffers()
        self.delayed: frozenset[int] = frozenset()
        # Walking the layers takes far longer than comparing the dictionaries of their members.
        layers = layer.sublayers(include_self=True)
        self._slots = [slot for child in layers for slot in internals.slots_of(child)]
        self._structure = _core.ModuleSnapshot(self._slots, "stop_gradient", [], [])
        # Running statistics are parameters, in the same dictionaries as the trained parameters.
        named_layers = [("", layer), *layer.named_sublayers()]
        self._buffer_slots: list[tuple[str, dict[str, Any]]] = [("", dict(self.statistics))]
        self._buffer_slots += [
            (f"{name}." if name else "", internals.buffers_of(child)) for name, child in named_layers
        ]
        self._estimates = {
            f"{name}.{key}" if name else key: child
            for name, child in named_layers
            for key in internals.estimates_of(child)
        }
        self._norms = {id(p): child for child in layers for p in internals.running_statistics_of(child) or ()}
        self._take_snapshot()

    def _find_buffers(self) -> None:
        self.buffers = self.statistics | {
            name: b for name, b in self._layer.named_buffers() if _can_be_copied(b) and not _is_left_alone(b)
        }

    def _take_snapshot(self) -> None:
        """Record what is frozen, and separately frozen parameters that are in autograd's graph
        nevertheless.
        """
        still = [p for p in self.frozen if p.stop_gradient]
        self._in_graph = [p for p in self.frozen if not p.stop_gradient]
        flags = [p.stop_gradient for p in self.trainable]
        self.frozen_now = frozenset(index for index, flag in enumerate(flags) if flag)
        still += [p for p, flag in zip(self.trainable, flags) if flag]
        trained = [p for p, flag in zip(self.trainable, flags) if not flag]
        self._snapshot = _core.ModuleSnapshot(self._slots, "stop_gradient", still, trained)

    @property
    def all_names(self) -> list[str]:
        return [*self.names, *self.sparse]

    @property
    def all_trainable(self) -> list[paddle.Tensor]:
        return [*self.trainable, *self.sparse.values()]

    def specs(self, reduce_dtype: paddle.dtype | None = None, *, widens: bool = False) -> list[ParameterSpec]:
        """The parameters as a plan lists them.

        Args:
            reduce_dtype: The dtype in which gradients are averaged; None: that of each parameter.
            widens: Whether gradients of 16 bits are averaged in float32.
        """
        specs = []
        for name, p in zip(self.names, self.trainable):
            dtype = dtype_name(p.dtype if reduce_dtype is None else reduce_dtype)
            if widens and ITEMSIZES[dtype] < 4:
                dtype = "float32"
            specs.append(ParameterSpec(name, int(p.size), dtype, ITEMSIZES[dtype], _device(p)))
        return specs

    def delay(
        self, named: Iterable[tuple[str, paddle.Tensor]] | None, trigger: paddle.Tensor | None
    ) -> dict[str, paddle.Tensor] | None:
        """Find the parameters that the wrapper's arguments name, or refuse the arguments.

        Returns:
            delay_all_reduce_named_params as a dictionary, because it may have been an iterator.
        """
        arguments = WrapperArguments("DataParallel")
        delayed = arguments.delayed(named, trigger, known=self.all_parameters, trained=self.trainable)
        self.delayed = frozenset(i for i, name in enumerate(self.names) if delayed and name in delayed)
        return delayed

    def agreed_options(self) -> dict[str, str]:
        delayed = ", ".join(self.names[index] for index in sorted(self.delayed))
        return {"delay_all_reduce_named_params": delayed}

    def describe(self) -> tuple[tuple[TensorDescription, ...], tuple[TensorDescription, ...]]:
        trained = [(name, p, not _is_frozen(p)) for name, p in self.all_parameters.items()]
        parameters = tuple(describe_tensor(*each) for each in trained)
        return parameters, tuple(describe_tensor(name, b, None) for name, b in self.buffers.items())

    def current_buffers(self) -> dict[str, paddle.Tensor]:
        now = dict(self._layer.named_buffers()) | dict(self._layer.named_parameters())
        return {
            name: buffer
            for name, known in self.buffers.items()
            if (buffer := now.get(name)) is known or _can_be_copied(buffer)
        }

    def buffer_slots(self) -> list[tuple[str, dict[str, Any]]]:
        return self._buffer_slots

    def snapshot(self, slots: list[dict[str, Any]]) -> _core.BufferSnapshot:
        """Detects writes to buffers by their bytes, because most writes do not count up a tensor's
        version.
        """
        norms = {name: self._norms[id(p)] for name, p in self.statistics.items()}
        owners = [norms, *({} for _ in slots[1:])]
        example = internals.example_of_bytes(self.all_trainable)
        return _core.BufferSnapshot(slots, owners, "inplace_version", example)

    def find_new_buffers(self) -> None:
        self._find_buffers()

    def is_unread(self, name: str) -> bool:
        owner = self._norms.get(id(self.statistics.get(name)))
        return owner is not None and bool(owner.training)

    def is_estimate(self, name: str) -> bool:
        owner = self._estimates.get(name)
        return owner is not None and bool(owner.training)

    def written_buffers(self, *_: object, **__: object) -> None:
        """None: Paddle's autograd does not raise if a buffer that it has saved is overwritten."""

    def check_trainable(self) -> None:
        if not self.is_trained:
            raise ConfigError(
                "DataParallel is not needed: this model does not have any parameters to train.",
                seen=f"{len(self.all_parameters)} parameters, all with stop_gradient=True",
                hint="call the layer itself; or unfreeze parameters before wrapping it",
            )
        for name, parameter in [*zip(self.names, self.trainable), *self.sparse.items()]:
            if dtype_name(parameter.dtype) not in DTYPES:
                raise ConfigError(
                    f"DataParallel: the dtype of '{name}' is not supported.",
                    expected=", ".join(DTYPES),
                    got=dtype_name(parameter.dtype),
                )
        if narrow := [name for name, p in self.sparse.items() if ITEMSIZES[dtype_name(p.dtype)] < 4]:
            raise ConfigError(
                "DataParallel cannot average sparse gradients of 16 bits, whose values Paddle does not give.",
                seen=shorten(narrow),
                hint="make the embedding with sparse=False, or in float32",
            )
        self._check_places()

    def _check_places(self) -> None:
        places = {name: p.place for name, p in [*zip(self.names, self.trainable), *self.sparse.items()]}
        (first, place), *others = places.items()
        for name, other in others:
            if not internals.same_place(other, place):
                raise ConfigError(
                    "DataParallel: the parameters are on several devices.",
                    expected="all on one device: each process drives one",
                    got=f"{first} on {place}, {name} on {other}",
                    hint="paddle.set_device() before the model is built",
                )
        if self.sparse and not self.is_on_host:
            raise ConfigError(
                "DataParallel: sparse gradients are averaged on the CPU only.",
                seen=f"on {place}: {shorten(list(self.sparse))}",
                hint="make the embedding with sparse=False",
            )

    @property
    def is_trained(self) -> bool:
        return bool(self.trainable or self.sparse)

    @property
    def place(self) -> Any:
        return [*self.trainable, *self.sparse.values()][0].place

    @property
    def is_on_host(self) -> bool:
        return bool(self.place.is_cpu_place())

    def check_unchanged(self) -> None:
        """Raise if parameters were added, removed, replaced or unfrozen since the model was wrapped."""
        if self._snapshot.is_unchanged() and not (self._in_graph and self._unfrozen()):
            return
        unfrozen = self._unfrozen()
        if not unfrozen and self._structure.is_unchanged():
            # A forward has changed frozen parameters in place, or other parameters are frozen than before.
            self._take_snapshot()
            return
        now = dict(self._layer.named_parameters())
        before = self.all_parameters | self.buffers
        left_alone = {name for name, p in now.items() if _is_left_alone(p)}
        changes = {
            "added": [name for name in now if name not in before and name not in left_alone],
            "removed": [name for name in self.all_parameters if name not in now],
            "replaced": [name for name in now if name in before and now[name] is not before[name]],
            "unfrozen": [name for name, p in before.items() if id(p) in unfrozen],
        }
        rows = [f"{what}: {shorten(names)}" for what, names in changes.items() if names]
        raise ConfigError(
            "The parameters of a wrapped model have changed.",
            seen="\n".join(rows) or "a sublayer was added, removed or replaced",
            likely="the model was changed after DataParallel() had wrapped it",
            hint="make such changes first, then wrap; or wrap `.module` again, on every rank",
        )

    def _unfrozen(self) -> set[int]:
        return {id(p) for p in self.frozen if not _is_frozen(p)}


def _is_frozen(parameter: paddle.Tensor) -> bool:
    """True if a parameter gets no gradient.

    If a forward writes to a frozen parameter in place, as quantization-aware training does, Paddle makes it
    part of the graph: it is no leaf any more, and stop_gradient is False. It still gets no gradient.
    """
    return bool(parameter.stop_gradient or not parameter.is_leaf)


def _is_left_alone(tensor: paddle.Tensor) -> bool:
    return bool(getattr(tensor, "no_sync", False))


def _can_be_copied(buffer: Any) -> bool:
    """True if its elements exist, in dense memory, so that those of another rank can replace them."""
    return isinstance(buffer, paddle.Tensor) and buffer.is_dense() and internals.has_memory(buffer)


def _running_statistics(layer: nn.Layer) -> set[int]:
    found: set[int] = set()
    for child in layer.sublayers(include_self=True):
        found.update(map(id, internals.running_statistics_of(child) or ()))
    return found


def describe_tensor(name: str, tensor: paddle.Tensor, requires_grad: bool | None) -> TensorDescription:
    return TensorDescription(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        device=_device(tensor),
        requires_grad=requires_grad,
    )


def _device(tensor: paddle.Tensor) -> str:
    return "cpu" if tensor.place.is_cpu_place() else str(tensor.place).removeprefix("Place(").split(":")[0]
