"""`replace_ddp`: replaces torch's wrappers by Paceline's, also where a library creates them."""

from __future__ import annotations

from torch.nn.parallel.data_parallel import DataParallel as _TorchDP
from torch.nn.parallel.distributed import DistributedDataParallel as _TorchDDP
from torch.utils.data.distributed import DistributedSampler as _TorchSampler

from paceline.arguments import Arguments
from paceline.data import DistributedSampler
from paceline.replace_class import Pair, Replacement, replace
from paceline.torch.data_parallel.data_parallel import DataParallel
from paceline.torch.ddp.distributed import DistributedDataParallel

_WRAPPERS = (
    Pair("torch.nn.parallel.DistributedDataParallel", _TorchDDP, DistributedDataParallel),
    Pair("torch.nn.DataParallel", _TorchDP, DataParallel),
)
_SAMPLERS = (
    Pair("torch.utils.data.DistributedSampler", _TorchSampler, DistributedSampler, is_wrapper=False),
)


def replace_ddp(*, samplers: bool = False) -> Replacement:
    """Replace torch's DistributedDataParallel and DataParallel by Paceline's from now on, in this process.

    The classes are replaced in every module that has bound one of them, and in every module that is imported
    later. So a trainer that wraps the model by itself (Lightning, Accelerate, Transformers) uses Paceline's.
    `paceline run --replace-ddp train.py` calls this when the script imports torch; with another launcher, the
    script calls it. Not collective, does not block. On rank 0 it prints what it has replaced, and a warning
    at the end of the process if no model was wrapped.

    It cannot replace a subclass of torch's class that was defined before (rank 0 prints its name), or a class
    that is held in a list, a default argument or an attribute of an object.

    Args:
        samplers: Also replace `torch.utils.data.DistributedSampler` by `paceline.data.DistributedSampler`.

    Returns:
        What was replaced and where; its `undo()` puts torch's classes back. A second call with the same
        arguments returns the same object.

    Raises:
        ConfigError: The classes were already replaced, with other arguments or by another library.

    Example:
        Both of two ranks:

        >>> paceline.torch.replace_ddp()
        >>> model = accelerator.prepare(model)      # a paceline.torch.DistributedDataParallel
    """
    samplers = Arguments("replace_ddp").flag("samplers", samplers)
    return replace(_WRAPPERS + _SAMPLERS if samplers else _WRAPPERS)
