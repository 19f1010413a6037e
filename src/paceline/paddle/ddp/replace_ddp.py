"""`replace_ddp`: paddle.DataParallel becomes ours, whatever library makes it."""

from __future__ import annotations

from paddle.distributed.parallel import DataParallel as _PaddleDP
from paddle.io import DistributedBatchSampler as _PaddleSampler

from paceline import data
from paceline.arguments import Arguments
from paceline.paddle.ddp.parallel import DataParallel
from paceline.replacing import Pair, Replacement, replace


class DistributedBatchSampler(data.DistributedBatchSampler, _PaddleSampler):
    """Paceline's, which code that looks for one of Paddle's batch samplers recognises.

    `paceline.data` imports no framework, so its own class cannot be that. Nothing of Paddle's class is run.
    """


_WRAPPERS = (Pair("paddle.DataParallel", _PaddleDP, DataParallel),)
_SAMPLERS = (
    Pair("paddle.io.DistributedBatchSampler", _PaddleSampler, DistributedBatchSampler, is_wrapper=False),
)


def replace_ddp(*, samplers: bool = False) -> Replacement:
    """Let `paddle.DataParallel` be Paceline's from now on, in this process.

    Every module that has bound the class gets ours, and so does every module that is imported later; hapi's
    `paddle.Model` and `fleet.distributed_model` wrap the model in ours. `paceline run --replace-ddp train.py`
    calls this when the script imports paddle; with another launcher, the script calls it.
    Not collective, does not block. On rank 0 it prints what it has replaced, and a warning at the end of the
    process if no model was wrapped.

    Args:
        samplers: Whether `paddle.io.DistributedBatchSampler` becomes
            `paceline.data.DistributedBatchSampler`, too.

    Returns:
        What was replaced and where; its `undo()` puts Paddle's classes back. A second call with the same
        arguments returns the same.

    Raises:
        ConfigError: The classes are replaced already, with other arguments or by another library.

    Example:
        Both of two ranks:

        >>> paceline.paddle.replace_ddp()
        >>> model = fleet.distributed_model(model)      # a paceline.paddle.DataParallel
    """
    samplers = Arguments("replace_ddp").flag("samplers", samplers)
    return replace(_WRAPPERS + _SAMPLERS if samplers else _WRAPPERS)
