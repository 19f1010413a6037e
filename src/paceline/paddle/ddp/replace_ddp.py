"""`replace_ddp`: replaces paddle.DataParallel by ours, whatever library uses it."""

from __future__ import annotations

from paddle.distributed.parallel import DataParallel as _PaddleDP
from paddle.io import DistributedBatchSampler as _PaddleSampler

from paceline import data
from paceline.arguments import Arguments
from paceline.paddle.ddp.parallel import DataParallel
from paceline.replace_class import Pair, Replacement, replace


class DistributedBatchSampler(data.DistributedBatchSampler, _PaddleSampler):
    """Paceline's sampler, as a subclass of Paddle's, so that isinstance checks for Paddle's class succeed.

    `paceline.data` imports no framework, so its own class cannot be one. No code of Paddle's class runs.
    """


_WRAPPERS = (Pair("paddle.DataParallel", _PaddleDP, DataParallel),)
_SAMPLERS = (
    Pair("paddle.io.DistributedBatchSampler", _PaddleSampler, DistributedBatchSampler, is_wrapper=False),
)


def replace_ddp(*, samplers: bool = False) -> Replacement:
    """Replace `paddle.DataParallel` by Paceline's class in this process.

    Every module that has imported the class gets ours, and so does every module that is imported later;
    hapi's `paddle.Model` and `fleet.distributed_model` wrap the model in ours.
    `paceline run --replace-ddp train.py` calls this when the script imports paddle; with another launcher,
    the script calls it. Not collective, does not block. Rank 0 prints what was replaced, and a warning at the
    end of the process if no model was wrapped.

    Args:
        samplers: Whether to replace `paddle.io.DistributedBatchSampler` by
            `paceline.data.DistributedBatchSampler`, too.

    Returns:
        What was replaced and where; its `undo()` restores Paddle's classes. A second call with the same
        arguments returns the same object.

    Raises:
        ConfigError: The classes are replaced already, with other arguments or by another library.

    Example:
        Both of two ranks:

        >>> paceline.paddle.replace_ddp()
        >>> model = fleet.distributed_model(model)      # a paceline.paddle.DataParallel
    """
    samplers = Arguments("replace_ddp").flag("samplers", samplers)
    return replace(_WRAPPERS + _SAMPLERS if samplers else _WRAPPERS)
