"""The wrapper whose forward runs, where torch.compile looks for it, to cut graphs at its buckets.

torch keeps it in an attribute of its class. To set an attribute of a class makes Python forget all lookups of
attributes that it has cached for that class and its subclasses, ours among them, and each step would pay for
that. So a descriptor is put there once, and tells what the attribute is.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

_ATTRIBUTES = TorchDDP.__dict__


class ActiveWrapper:
    """What stands in the attribute.

    Attributes:
        wrapper: The innermost one whose forward runs; None: none does.
    """

    __slots__ = ("wrapper",)

    def __init__(self) -> None:
        self.wrapper: Any = None

    def __get__(self, instance: object, owner: type) -> Any:
        return self.wrapper


_active = ActiveWrapper()


def active_wrapper() -> ActiveWrapper:
    """What torch finds is the `wrapper` of this, until a forward of torch's own wrapper begins."""
    if _ATTRIBUTES["_active_ddp_module"] is not _active:
        _active.wrapper = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = _active  # type: ignore[assignment]
    return _active
