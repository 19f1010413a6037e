"""Accelerate, and the Transformers Trainer above it: `use_paceline(accelerator)`.

    accelerator = use_paceline(Accelerator())
    trainer = Trainer(...)
    use_paceline(trainer.accelerator)

Accelerate has handlers for the arguments of torch's DistributedDataParallel, but none for the class. So its
`prepare_model` is called in evaluation mode, in which it does everything else (autocast, the device, the
bookkeeping of prepared models), and the model is wrapped in Paceline's class afterwards.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

from paceline.arguments import show
from paceline.errors import ConfigError, ConfigTypeError
from paceline.integrations.versions import tested_with
from paceline.torch import DistributedDataParallel

with tested_with("accelerate", "1.15", "1.15"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

__all__ = ["use_paceline"]

# Kinds of training that do not use torch's DistributedDataParallel, so there is nothing to replace.
_OWN_WAYS = {
    DistributedType.FSDP,
    DistributedType.DEEPSPEED,
    DistributedType.MEGATRON_LM,
    DistributedType.XLA,
}
_OURS_ALONE = {"module", "device_ids", "output_device", "self"}

_Accelerator = TypeVar("_Accelerator", bound=Accelerator)


def use_paceline(accelerator: _Accelerator, **arguments: Any) -> _Accelerator:
    """Let an Accelerator wrap models in `paceline.torch.DistributedDataParallel` from now on.

    Not collective, and does not block; `accelerator.prepare(model)` is collective, as it is without Paceline.
    The arguments in Accelerate's `DistributedDataParallelKwargs`, and its communication hook, are used as
    before. With `torch.compile` (a dynamo plugin) the module is compiled inside the wrapper. In a single
    process nothing is wrapped, as with Accelerate.

    Args:
        accelerator: Any Accelerator, before it has prepared a model; a Trainer's is `trainer.accelerator`.
        arguments: Further arguments for Paceline's class, such as nonfinite="raise" or
            buffers={"*": "average"}; they override those of Accelerate's handler.

    Returns:
        The same accelerator.

    Raises:
        ConfigTypeError: It is no Accelerator.
        ConfigError: It was given to use_paceline before, or has prepared a model already; or it was made for
            DeepSpeed, FSDP, Megatron-LM, XLA or tensor parallelism, which use no DistributedDataParallel; or
            Paceline's class has no argument of such a name.

    Example:
        Each of two ranks that `paceline run -n 2` or `accelerate launch --multi_gpu` starts:

        >>> accelerator = use_paceline(Accelerator(cpu=True))
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> type(model)
        <class 'paceline.torch.ddp.distributed.DistributedDataParallel'>
    """
    _check(accelerator, arguments)
    prepare = accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        was_prepared = getattr(model, "_is_accelerate_prepared", False)
        prepared = prepare(model, device_placement, evaluation_mode=True)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if was_prepared or evaluation_mode or not is_trained or accelerator.num_processes == 1:
            return prepared
        handler = accelerator.ddp_handler
        given = (handler.to_kwargs() if handler is not None else {}) | arguments
        devices = [accelerator.device] if accelerator.device.type != "cpu" else None
        wrapped: Any = DistributedDataParallel(prepared, device_ids=devices, **given)
        if handler is not None:
            handler.register_comm_hook(wrapped)
        prepared._is_accelerate_prepared = False  # only the wrapper must not be prepared again
        wrapped._is_accelerate_prepared = True
        return wrapped

    accelerator.prepare_model = prepare_model
    return accelerator


def _check(accelerator: object, arguments: dict[str, Any]) -> None:
    if not isinstance(accelerator, Accelerator):
        raise ConfigTypeError(
            "use_paceline takes an accelerate.Accelerator.",
            got=show(accelerator),
            hint="use_paceline(trainer.accelerator) for a Trainer of Transformers",
        )
    if "prepare_model" in vars(accelerator):
        raise ConfigError(
            "The prepare_model of this Accelerator is replaced already.",
            likely="use_paceline was called twice for it",
            hint="call use_paceline(accelerator) once, with all arguments",
        )
    if accelerator._models:
        raise ConfigError(
            "use_paceline comes too late: this Accelerator has prepared a model already.",
            seen=", ".join(type(model).__name__ for model in accelerator._models),
            hint="call use_paceline(accelerator) right after Accelerator() is made, before prepare()",
        )
    tensor_parallel = accelerator.parallelism_config is not None and accelerator.parallelism_config.tp_enabled
    if accelerator.distributed_type in _OWN_WAYS or tensor_parallel:
        way = "tensor parallelism" if tensor_parallel else accelerator.distributed_type.value
        raise ConfigError(
            "This Accelerator wraps no model in DistributedDataParallel, so there is nothing to replace.",
            seen=f"it was made for {way}",
            hint="leave use_paceline away, or make an Accelerator for data-parallel training",
        )
    known = inspect.signature(DistributedDataParallel).parameters.keys() - _OURS_ALONE - {"later"}
    for name in arguments:
        if name not in known:
            raise ConfigError(
                f"use_paceline got an argument that DistributedDataParallel does not have: {name}.",
                expected=", ".join(sorted(known)),
                got=f"{name}={show(arguments[name])}",
            )
