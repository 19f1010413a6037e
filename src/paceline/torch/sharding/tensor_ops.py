"""torch's tensors, as `paceline.sharding` uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.errors import ConfigError
from paceline.sharding import shards
from paceline.sharding.framework_ops import Names, dtype_name
from paceline.sharding.optimizer_arguments import OWNER
from paceline.torch.communicator.gradient_buffer import extent, is_dense
from paceline.torch.sharding.gradient_stand_in import ScatteredGradient


class TorchOps:
    """See `FrameworkOps`."""

    names = Names(
        wrapper="DistributedDataParallel",
        variable="ddp",
        loading="ddp.load_state_dict()",
        clearing="optimizer.zero_grad()",
        moving="module.to(), half(), share_memory() or `parameter.data = ...`",
        converting="module.to(), .half() or `parameter.data = ...`",
    )
    tensor = torch.Tensor
    stand_in = ScatteredGradient

    def is_dense(self, tensor: torch.Tensor) -> bool:
        return is_dense(tensor)

    def extent(self, tensor: torch.Tensor) -> int:
        return extent(tensor)

    def data(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data  # counts its writes by itself, and not with the parameter's

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

    def empty(self, shape: Sequence[int], dtype: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(
            tuple(shape), dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, device=like.device
        )

    def from_bytes(self, data: bytes) -> torch.Tensor:
        return torch.tensor(list(data), dtype=torch.uint8)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def scale(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(tensors), factor)

    def versions(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [tensor._version for tensor in tensors]

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        torch.autograd.graph.increment_version(tensors)

    def beside(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(parameter.device).contiguous()

    def kept_copy(self, value: Any, parameter: torch.Tensor) -> Any:
        """On the CPU; what has the parameter's shape is laid out as zeros_like() would."""
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

    def is_trained(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad

    def form(self, parameter: torch.Tensor) -> str:
        return f"shape {tuple(parameter.shape)}, {dtype_name(parameter)}, strides {parameter.stride()}"

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def put_stand_in(self, parameter: torch.Tensor, stand_in: ScatteredGradient) -> None:
        # torch lets no gradient of another dtype or shape be set; the backward has refused such a parameter.
        is_as_wrapped = (parameter.dtype, parameter.shape) == (stand_in.dtype, stand_in.shape)
        parameter.grad = stand_in if is_as_wrapped else None

    def lend_gradients(self, pieces: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        for piece, gradient in zip(pieces, gradients):
            piece.grad = gradient

    def end_loans(self, pieces: Sequence[torch.Tensor]) -> None:
        for piece in pieces:
            piece.grad = None


OPS = TorchOps()


class Shards(shards.Shards[torch.Tensor]):
    """All pieces of an optimizer's parameters, on one rank.

    A piece is made through .data, and so counts its writes by itself. Each rank writes to other elements, and
    all ranks must count the same number of writes to each parameter; so they are counted once, for all, after
    the step.
    """

    def _find_gradients(self) -> list[torch.Tensor | None]:
        found = [parameter.grad for parameter in self.parameters]
        for name, gradient in zip(self.names, found):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ConfigError(
                    f"{OWNER}: the gradient of parameter '{name}' is sparse.",
                    expected="dense gradients",
                    got=str(gradient.layout),
                    hint="nn.Embedding(..., sparse=False); or an optimizer of its own for this parameter, "
                    "such as torch.optim.SparseAdam, on every rank",
                )
        return found

    def count_writes(self, has_gradient: Sequence[int]) -> None:
        """Let autograd, and Paceline's comparison of the ranks, know of one write to each parameter."""
        self.ops.count_writes([each for each, has in zip(self.parameters, has_gradient) if has])
