"""The wrapper whose forward runs, in the place where torch.compile looks for it to split graphs at buckets.

torch keeps it in an attribute of its class. Setting an attribute of a class makes Python drop its cached
attribute lookups for that class and its subclasses, including Paceline's, and each step would pay for that.
So the attribute is set once, to a descriptor that returns the wrapper.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel as TorchDDP

_ATTRIBUTES = TorchDDP.__dict__


class ActiveWrapper:
    """The descriptor in the attribute.

    Attributes:
        wrapper: The innermost wrapper whose forward runs; None: no forward runs.
    """

    __slots__ = ("wrapper",)

    def __init__(self) -> None:
        self.wrapper: Any = None

    def __get__(self, instance: object, owner: type) -> Any:
        return self.wrapper


_active = ActiveWrapper()


def active_wrapper() -> ActiveWrapper:
    """The descriptor; it is set again if a forward of torch's own wrapper has replaced it."""
    if _ATTRIBUTES["_active_ddp_module"] is not _active:
        _active.wrapper = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = _active  # type: ignore[assignment]
    return _active
