"""torch's side of `FrameworkOps`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from paceline.reducer.communicator import Communicator, Reduction
from paceline.reducer.framework_ops import FrameworkOps, Names, dtype_name
from paceline.reducer.gradient_buffer import GradientBuffer
from paceline.reducer.model_agreement import TensorDescription
from paceline.reducer.plan import Plan
from paceline.reducer.replica_hashes import flattened
from paceline.torch.model.gradient_stand_in import ScatteredGradient
from paceline.torch.model.inner_tensors import (
    as_plain,
    extent,
    inner_tensors,
    is_dense,
    is_disjoint,
    is_plain,
    is_wrapper,
    plain_tensors,
)
from paceline.torch.model.parameters import DTYPES, describe_tensors
from paceline.trace.recording import batches, optimizer_steps


class TorchOps(FrameworkOps[torch.Tensor]):
    names = Names(
        wrapper="DistributedDataParallel",
        variable="ddp",
        loading="ddp.load_state_dict()",
        clearing="optimizer.zero_grad()",
        moving="module.to(), half(), share_memory() or `parameter.data = ...`",
        converting="module.to(), .half() or `parameter.data = ...`",
        device="a GPU",
        forming='call torch.distributed.init_process_group("nccl" or "gloo") first',
        sampling="DataLoader(dataset, sampler=paceline.data.DistributedSampler(dataset), ...), or torch's",
    )
    tensor = torch.Tensor
    stand_in = ScatteredGradient
    refuses_writes = True

    def is_dense(self, tensor: torch.Tensor) -> bool:
        return is_dense(tensor)

    def is_readable(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and is_plain(tensor) and tensor.is_contiguous()

    def has_values(self, tensor: torch.Tensor) -> bool:
        try:
            return tensor.device.type in ("cpu", "cuda") and is_plain(tensor)
        except RuntimeError:  # a wrapper of other tensors, as in vmap
            return False

    def random_state(self) -> object:
        state = torch.default_generator.get_state().numpy().tobytes()
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return state
        if torch.cuda.is_current_stream_capturing():
            return None
        return state, torch.cuda.get_rng_state().numpy().tobytes()

    def extent(self, tensor: torch.Tensor) -> int:
        return extent(tensor)

    def data(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data  # has a version counter of its own, not the parameter's

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided((tensor.numel(),), (1,))

    def split(self, flat: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        return flat.split_with_sizes(list(sizes))

    def as_laid_out(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.stride() == parameter.stride():
            return plain
        room = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=plain.dtype, device=plain.device
        )
        return room.copy_(plain)

    def over(
        self,
        memory: Any,
        at: int,
        nbytes: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        like: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not nbytes:
            return torch.empty(tuple(shape), dtype=dtype)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=at).view(dtype)
        return flat.reshape(tuple(shape)) if like is None else flat.as_strided(tuple(shape), like.stride())

    def lay(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        tensor.data = values

    def plain_tensors(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return plain_tensors(tensors)

    def plain_parts(self, name: str, tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
        parts = inner_tensors(name, tensor)
        return [each for each in parts if not each[1].is_meta and (each[1] is tensor or each[1].numel())]

    @torch.no_grad()
    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.detach().cpu().contiguous()

    def buffer_at(
        self, plan: Plan, parameters: Sequence[torch.Tensor], pointer: int, owner: object
    ) -> GradientBuffer[torch.Tensor]:
        """Every view keeps `owner` alive, which keeps the memory mapped."""
        memory = (ctypes.c_char * max(1, plan.buffer_bytes)).from_address(pointer)
        memory.owner = owner  # type: ignore[attr-defined]
        sections = []
        for section in plan.sections:
            count, dtype = (section.end_byte - section.begin_byte) // section.itemsize, DTYPES[section.dtype]
            sections.append(
                torch.frombuffer(memory, dtype=dtype, count=count, offset=section.begin_byte)
                if count
                else torch.empty(0, dtype=dtype)
            )
        return GradientBuffer(plan, parameters, sections, _place)

    def places_at(
        self, plan: Plan, parameters: Sequence[torch.Tensor], pointer: int, owner: object
    ) -> Sequence[torch.Tensor]:
        return self.buffer_at(plan, parameters, pointer, owner).places

    def allocate(
        self,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        instead_of: Reduction[torch.Tensor] | None = None,
    ) -> GradientBuffer[torch.Tensor]:
        """Another order of the same parameters has sections of the same sizes, so their memory is reused."""
        if instead_of is not None:
            before = zip(instead_of.plan.sections, instead_of.sections)
            kinds = {(section.dtype, section.device): memory for section, memory in before}
            sections = [kinds[section.dtype, section.device].zero_() for section in plan.sections]
        else:
            sections = [
                torch.zeros(
                    (section.end_byte - section.begin_byte) // section.itemsize,
                    dtype=DTYPES[section.dtype],
                    device=section.device,
                )
                for section in plan.sections
            ]
        return GradientBuffer(plan, parameters, sections, _place)

    def empty(self, shape: Sequence[int], dtype: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(
            tuple(shape), dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device=like.device
        )

    def from_bytes(self, data: bytes) -> torch.Tensor:
        return torch.tensor(list(data), dtype=torch.uint8)

    def as_array(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return np.array(tensor.detach().cpu().numpy())

    def from_array(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    @torch.no_grad()
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    @torch.no_grad()
    def scale(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        torch._foreach_mul_(list(tensors), factor)

    @torch.no_grad()
    def add(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | float) -> None:
        if tensors:
            torch._foreach_add_(list(tensors), others if isinstance(others, float) else list(others))

    @torch.no_grad()
    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        tensor /= divisor

    def sums_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sums, taken = [], set()
        for tensor in tensors:
            plain, pointer = tensor.detach(), tensor.data_ptr()
            if plain.is_floating_point() and plain.itemsize < 4:
                plain = plain.float()
            elif pointer in taken or not pointer:  # shared, as behind an addition; 0: torch's zero tensors
                plain = plain.clone() if pointer else torch.zeros_like(plain)
            taken.add(pointer)
            sums.append(plain)
        return sums

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def use_threads(self, number: int) -> int:
        before = torch.get_num_threads()
        if number != before:
            torch.set_num_threads(number)
        return before

    def squared_norm(self, tensor: torch.Tensor) -> float:
        return float(tensor.double().square().sum())

    def is_finite(self, tensor: torch.Tensor) -> bool:
        return bool(torch.isfinite(tensor).all())

    @torch.no_grad()
    def average_buffers(
        self, communicator: Communicator[torch.Tensor], buffers: Sequence[torch.Tensor], active: Sequence[int]
    ) -> None:
        """One sum for each device and dtype. `WrittenBuffers` sets the buffers' versions for autograd."""
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in plain_tensors(buffers):
            wide = torch.float64 if buffer.dtype is torch.float64 else torch.float32
            kinds.setdefault((buffer.device, wide), []).append(buffer)
        for (_, dtype), group in kinds.items():
            flat = torch.cat([buffer.detach().to(dtype).flatten() for buffer in group])
            if communicator.rank not in active:
                flat.zero_()
            communicator.sum(flat)
            flat /= len(active)
            means = torch.split(flat, [buffer.numel() for buffer in group])
            for buffer, mean in zip(group, means):
                buffer.data.copy_(mean.view(buffer.shape))

    def versions(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [tensor._version for tensor in tensors]

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        torch.autograd.graph.increment_version(tensors)

    def wide(self, parameter: torch.Tensor) -> torch.Tensor:
        values = as_plain(parameter) if is_wrapper(parameter) else parameter.detach()
        if values.is_complex():
            return torch.view_as_real(values.resolve_conj())
        return values.float() if values.itemsize < 4 else values

    def wide_copy(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return values.detach().to(device=like.device, dtype=like.dtype, copy=True).contiguous()

    def write_wide(self, values: torch.Tensor, parameter: torch.Tensor) -> None:
        parameter.detach().copy_(torch.view_as_complex(values) if parameter.is_complex() else values)

    def rounded(self, values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.is_complex() or values.dtype is parameter.dtype:
            return values
        return values.to(parameter.dtype).to(values.dtype)

    def is_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)

    def subtract(self, one: torch.Tensor, other: torch.Tensor, place: torch.Tensor) -> None:
        torch.sub(one, other, out=place)

    def held_by(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
        names = {id(parameter): name for name, parameter in parameters.items()}
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            yield from flattened(f"group {number}", options)
            for place, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"group {number}.params.{place}")
                yield from flattened(name, optimizer.state.get(parameter, {}))

    def beside(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(parameter.device).contiguous()

    def kept_copy(self, value: Any, parameter: torch.Tensor) -> Any:
        """A copy on the CPU; a tensor of the parameter's shape gets the layout of zeros_like()."""
        if isinstance(value, torch.Tensor):
            if value.shape != parameter.shape:
                return value.cpu().clone()
            return self.room_for_state(parameter, value.dtype).copy_(value)
        if isinstance(value, dict):
            return {key: self.kept_copy(each, parameter) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.kept_copy(each, parameter) for each in value)
        return value

    def room_for_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)

    def watch_steps(self, check: Callable[[object, Iterable[torch.Tensor]], None]) -> None:
        def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if not getattr(optimizer, "steps_shared_parameters", False):
                check(optimizer, (each for group in optimizer.param_groups for each in group["params"]))

        register_optimizer_step_pre_hook(look)

    def note_steps(self) -> None:
        _note_steps()

    def is_trained(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad

    def form(self, parameter: torch.Tensor) -> str:
        return f"shape {tuple(parameter.shape)}, {dtype_name(parameter)}, strides {parameter.stride()}"

    def device(self, tensor: torch.Tensor) -> str:
        return str(tensor.device)

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def step_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in parameters]

    def is_sparse(self, gradient: torch.Tensor) -> bool:
        return gradient.layout is not torch.strided

    def put_stand_in(self, parameter: torch.Tensor, stand_in: ScatteredGradient) -> None:
        # torch refuses a .grad of another dtype or shape; the backward has raised for such a parameter.
        is_as_wrapped = (parameter.dtype, parameter.shape) == (stand_in.dtype, stand_in.shape)
        parameter.grad = stand_in if is_as_wrapped else None

    def lend_gradients(self, pieces: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        for piece, gradient in zip(pieces, gradients):
            piece.grad = gradient

    def end_loans(self, pieces: Sequence[torch.Tensor]) -> None:
        for piece in pieces:
            piece.grad = None

    def describe(
        self, name: str, tensor: torch.Tensor, requires_grad: bool | None
    ) -> Iterator[TensorDescription]:
        return describe_tensors(name, tensor, requires_grad=requires_grad)

    def why_not_shared(self, name: str, tensor: torch.Tensor) -> str | None:
        kind = (type(tensor) if is_wrapper(tensor) else type(tensor.data)).__name__
        if kind != "Tensor" or tensor.layout is not torch.strided or tensor.is_quantized:
            return (
                f"'{name}' is no plain dense tensor: {kind}, {tensor.layout}, {tensor.dtype}\n"
                "name it in module._ddp_params_and_buffers_to_ignore; or train without sharing parameters"
            )
        if not tensor.is_cpu:
            return f"'{name}' is on {tensor.device}, and not in the memory of the host\nmodel.cpu()"
        if not is_disjoint(tensor):
            return (
                f"several elements of '{name}' lie in the same memory (strides {tensor.stride()})\n"
                "contiguous() makes a parameter of it whose elements are its own"
            )
        return None

    def rescaled(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, child in model.named_modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
                yield f"'{name}' has max_norm={child.max_norm}", child.weight


@functools.cache
def _note_steps() -> None:
    """Note steps and batches: torch has global hooks for steps, and one method that yields all batches."""
    steps = optimizer_steps()
    register_optimizer_step_pre_hook(steps.begin)
    register_optimizer_step_post_hook(steps.end)
    iterator = dataloader._BaseDataLoaderIter
    iterator.__next__ = batches().around(iterator.__next__)  # type: ignore[method-assign]


def _place(section: torch.Tensor, first: int, count: int, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient's place with the memory layout of the parameter, which autograd's gradients have, too."""
    place = section[first : first + count]
    if count and parameter.is_complex() and not place.is_complex():
        place = torch.view_as_complex(place.view(-1, 2))
    if count and is_dense(parameter):
        place = place.as_strided(parameter.shape, parameter.stride())
    elif count or not parameter.numel():  # else a sparse gradient, which lies elsewhere
        place = place.view(parameter.shape)
    return place.data  # with a version counter of its own; views share that of their base


OPS = TorchOps()
