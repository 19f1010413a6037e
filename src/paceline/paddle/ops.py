"""Paddle's implementation of `FrameworkOps`.

To move a parameter, its memory is exchanged: it stays the same object with the same name, by which layers and
optimizers find it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paceline.paddle import internals
from paceline.paddle.model.gradient_stand_in import ScatteredGradient
from paceline.paddle.model.parameters import DTYPES, describe_tensor
from paceline.reducer.communicator import Communicator, Reduction
from paceline.reducer.framework_ops import FrameworkOps, Names, dtype_name, nbytes, numel
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.model_agreement import TensorDescription
from paceline.reducer.plan import Plan
from paceline.reducer.replica_hashes import flattened
from paceline.trace.recording import batches, optimizer_steps


class PaddleOps(FrameworkOps[paddle.Tensor]):
    names = Names(
        wrapper="DataParallel",
        variable="model",
        loading="model.set_state_dict()",
        clearing="optimizer.clear_grad()",
        moving="layer.to(), or another conversion",
        converting="layer.to(dtype=...) or another conversion",
        device="a device",
        forming="call paddle.distributed.init_parallel_env() before, and leave out the group",
        sampling="DataLoader(dataset, batch_sampler=paceline.data.DistributedBatchSampler(dataset, 32)), or "
        "Paddle's",
    )
    tensor = paddle.Tensor
    stand_in = ScatteredGradient
    # As with Paddle's class, each rank uses its own values.
    refuses_writes = False

    def is_dense(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.is_contiguous())

    def is_readable(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.place.is_cpu_place() and tensor.is_contiguous())

    def has_values(self, tensor: paddle.Tensor) -> bool:
        return bool(tensor.is_dense() and internals.has_memory(tensor))

    def random_state(self) -> object:
        return internals.generator_states("cpu"), internals.generator_states(None)

    def extent(self, tensor: paddle.Tensor) -> int:
        return nbytes(tensor)

    def data(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach()

    def flat(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return paddle.view(tensor.detach(), [numel(tensor)])

    def split(self, flat: paddle.Tensor, sizes: Sequence[int]) -> Sequence[paddle.Tensor]:
        ends = np.cumsum(sizes).tolist()
        return [flat[end - size : end] for end, size in zip(ends, sizes)]

    def as_laid_out(self, tensor: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return tensor if tensor.is_contiguous() else tensor.contiguous()

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: Any,
        shape: Sequence[int],
        like: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        if not nbytes:
            return paddle.empty(list(shape), dtype)
        array = np.frombuffer(memory, np.uint8, nbytes, at)
        return internals.over(array, dtype).reshape(list(shape))

    def lay(self, tensor: paddle.Tensor, values: paddle.Tensor) -> None:
        internals.lay_into(tensor, values)

    def plain_tensors(self, tensors: Sequence[paddle.Tensor]) -> Sequence[paddle.Tensor]:
        return [tensor for tensor in tensors if tensor.size]

    def plain_parts(self, name: str, tensor: paddle.Tensor) -> Sequence[tuple[str, paddle.Tensor]]:
        return ((name, tensor),)

    def on_host(self, tensor: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            held = tensor if tensor.place.is_cpu_place() else tensor.cpu()
            return held if held.is_contiguous() else held.contiguous()

    def places_at(
        self, plan: Plan, parameters: Sequence[paddle.Tensor], pointer: int, owner: object
    ) -> Sequence[paddle.Tensor]:
        memory = (ctypes.c_char * max(1, plan.buffer_bytes)).from_address(pointer)
        memory.owner = owner  # type: ignore[attr-defined]
        # Slice before Paddle sees it: paddle.view(tensor[a:b], dtype) takes `a` in elements of the new dtype.
        return [
            self.over(memory, offset, spec.nbytes, DTYPES[spec.dtype], parameter.shape)
            if spec.numel
            else _nothing(parameter)
            for spec, offset, parameter in zip(plan.parameters, plan.offsets, parameters)
        ]

    def allocate(
        self,
        plan: Plan,
        parameters: Sequence[paddle.Tensor],
        instead_of: Reduction[paddle.Tensor] | None = None,
    ) -> GradientBuffer[paddle.Tensor]:
        sections = [
            self.empty(
                [(section.end_byte - section.begin_byte) // section.itemsize],
                DTYPES[section.dtype],
                parameters[0],
            ).zero_()
            for section in plan.sections
        ]
        return GradientBuffer(plan, parameters, sections, _place)

    def empty(self, shape: Sequence[int], dtype: Any, like: paddle.Tensor) -> paddle.Tensor:
        return internals.empty_on(like.place, shape, dtype)

    def from_bytes(self, data: bytes) -> paddle.Tensor:
        return paddle.to_tensor(list(data), "uint8", place=paddle.CPUPlace())

    def as_array(self, tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
        return np.array(tensor.numpy())

    def from_array(self, array: np.ndarray[Any, Any]) -> paddle.Tensor:
        return paddle.to_tensor(array, place=paddle.CPUPlace())

    def copy(self, source: paddle.Tensor, target: paddle.Tensor) -> None:
        with paddle.no_grad():
            if internals.same_place(source.place, target.place):
                paddle.assign(source, target)
            else:
                target.copy_(source, True)

    def scale(self, tensors: Sequence[paddle.Tensor], factor: float) -> None:
        with paddle.no_grad():
            for tensor in tensors:
                tensor.scale_(factor)

    def add(self, tensors: Sequence[paddle.Tensor], others: Sequence[paddle.Tensor] | float) -> None:
        with paddle.no_grad():
            if isinstance(others, float):
                others = [paddle.full_like(tensor, others) for tensor in tensors]
            for tensor, other in zip(tensors, others):
                tensor.add_(other)

    def divide(self, tensor: paddle.Tensor, divisor: int) -> None:
        with paddle.no_grad():
            tensor.divide_(paddle.full_like(tensor, divisor))

    def sums_of(self, tensors: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
        sums, taken = [], set()
        with paddle.no_grad():
            for tensor in tensors:
                plain, pointer = tensor.detach(), tensor.data_ptr()
                if plain.is_floating_point() and plain.element_size() < 4:
                    plain = plain.astype("float32")
                elif pointer in taken:
                    plain = plain.clone()
                taken.add(pointer)
                sums.append(plain)
        return sums

    def copied(self, tensor: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            return tensor.detach().clone()

    def use_threads(self, number: int) -> int:
        return internals.use_threads(number)

    def squared_norm(self, tensor: paddle.Tensor) -> float:
        return float(tensor.astype("float64").square().sum())

    def is_finite(self, tensor: paddle.Tensor) -> bool:
        return bool(paddle.isfinite(tensor).all())

    def average_buffers(
        self,
        communicator: Communicator[paddle.Tensor],
        buffers: Sequence[paddle.Tensor],
        active: Sequence[int],
    ) -> None:
        with paddle.no_grad():
            for buffer in buffers:
                dtype = "float64" if buffer.dtype == paddle.float64 else "float32"
                wide = buffer.astype(dtype).contiguous() * float(communicator.rank in active)
                communicator.sum(wide)
                paddle.assign((wide / len(active)).astype(buffer.dtype), buffer)

    def versions(self, tensors: Sequence[paddle.Tensor]) -> list[int]:
        return [int(tensor.inplace_version) for tensor in tensors]

    def count_writes(self, tensors: Sequence[paddle.Tensor]) -> None:
        internals.count_writes(tensors)

    def wide(self, parameter: paddle.Tensor) -> paddle.Tensor:
        values = parameter.detach()
        values = values.astype("float32") if values.element_size() < 4 else values
        return values if values.is_contiguous() else values.contiguous()

    def wide_copy(self, values: paddle.Tensor, like: paddle.Tensor) -> paddle.Tensor:
        return values.detach().astype(like.dtype).clone()

    def write_wide(self, values: paddle.Tensor, parameter: paddle.Tensor) -> None:
        with paddle.no_grad():
            paddle.assign(values.astype(parameter.dtype), parameter)

    def rounded(self, values: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        dtype = parameter.dtype
        return values if values.dtype == dtype else values.astype(dtype).astype(values.dtype)

    def is_equal(self, one: paddle.Tensor, other: paddle.Tensor) -> bool:
        return bool(paddle.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))

    def subtract(self, one: paddle.Tensor, other: paddle.Tensor, place: paddle.Tensor) -> None:
        place.copy_(one - other, True)

    def held_by(self, optimizer: Any, parameters: Mapping[str, paddle.Tensor]) -> Iterator[tuple[str, Any]]:
        """The keys of an optimizer's state contain Paddle's parameter names, which are replaced by the
        model's.
        """
        names = {parameter.name: name for name, parameter in parameters.items()}
        yield "learning rate", float(optimizer.get_lr())
        for key, value in flattened("", optimizer.state_dict()):
            key = key.removeprefix(".")
            owner = max((own for own in names if f".{key}".find(f".{own}") >= 0), key=len, default=None)
            yield key if owner is None else key.replace(owner, names[owner], 1), value

    def beside(self, tensor: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach().contiguous()

    def kept_copy(self, value: paddle.Tensor, parameter: paddle.Tensor) -> paddle.Tensor:
        return value.detach().clone()

    def room_for_state(self, parameter: paddle.Tensor, dtype: Any) -> paddle.Tensor:
        return internals.empty_on(parameter.place, parameter.shape, dtype)

    def watch_steps(self, check: Callable[[object, Iterable[paddle.Tensor]], None]) -> None:
        def look(optimizer: Any) -> None:
            check(optimizer, (each for group in internals.groups_of(optimizer) for each in group["params"]))

        internals.watch_steps(look)

    def note_steps(self) -> None:
        _note_steps()

    def is_trained(self, parameter: paddle.Tensor) -> bool:
        return not parameter.stop_gradient

    def form(self, parameter: paddle.Tensor) -> str:
        return f"shape {tuple(parameter.shape)}, {dtype_name(parameter)}"

    def device(self, tensor: paddle.Tensor) -> str:
        return str(tensor.place)

    def gradient(self, parameter: paddle.Tensor) -> paddle.Tensor | ScatteredGradient | None:
        gradient = internals.gradient_of(parameter)
        if gradient is not None:
            return gradient
        stand_in: ScatteredGradient | None = internals.stand_in_of(parameter)
        return stand_in

    def step_gradients(self, parameters: Sequence[paddle.Tensor]) -> list[Any]:
        return [None if each.stop_gradient else self.gradient(each) for each in parameters]

    def is_sparse(self, gradient: paddle.Tensor) -> bool:
        return internals.is_sparse(gradient)

    def put_stand_in(self, parameter: paddle.Tensor, stand_in: ScatteredGradient) -> None:
        internals.put_stand_in(parameter, stand_in)

    def lend_gradients(self, pieces: Sequence[paddle.Tensor], gradients: Sequence[paddle.Tensor]) -> None:
        for piece, gradient in zip(pieces, gradients):
            internals.lend_gradient(piece, gradient)

    def end_loans(self, pieces: Sequence[paddle.Tensor]) -> None:
        for piece in pieces:
            internals.end_loan(piece)

    def describe(
        self, name: str, tensor: paddle.Tensor, requires_grad: bool | None
    ) -> Iterable[TensorDescription]:
        return (describe_tensor(name, tensor, requires_grad),)

    def why_not_shared(self, name: str, tensor: paddle.Tensor) -> str | None:
        leave = "set parameter.no_sync = True; or train without sharing parameters"
        if not tensor.is_dense():
            return f"'{name}' is no dense tensor\n{leave}"
        if not tensor.place.is_cpu_place():
            hint = 'paddle.set_device("cpu") before the model is built'
            return f"'{name}' is on {tensor.place}, and not in the memory of the host\n{hint}"
        if not tensor.is_contiguous():
            return f"the elements of '{name}' do not lie one after the other\n{leave}"
        return None

    def rescaled(self, model: nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
        for name, child in model.named_sublayers(include_self=True):
            if isinstance(child, nn.Embedding) and internals.has_max_norm(child):
                yield f"'{name}' has a max_norm", child.weight


@functools.cache
def _note_steps() -> None:
    """Wrap the methods themselves, because Paddle has no hooks for steps."""
    steps, asked = optimizer_steps(), batches()
    for optimizer in internals.classes_with("step", internals.optimizers()):
        optimizer.step = steps.around(optimizer.step)
    for iterator in internals.classes_with("__next__", internals.loader_iterators()):
        iterator.__next__ = asked.around(iterator.__next__)


def _place(section: paddle.Tensor, first: int, count: int, parameter: paddle.Tensor) -> paddle.Tensor:
    return section[first : first + count].reshape(parameter.shape) if count else _nothing(parameter)


def _nothing(parameter: paddle.Tensor) -> paddle.Tensor:
    return internals.empty_on(parameter.place, parameter.shape, parameter.dtype).zero_()


OPS = PaddleOps()
