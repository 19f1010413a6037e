"""Paceline for PaddlePaddle: `DataParallel`, the same with torch's arguments, and `ShardedOptimizer`.

    from paceline.paddle import DataParallel

This is the only package of Paceline that imports paddle. It does not import torch, and may import every layer
below it. All calls of Paddle's private functions are in `internals`.
"""

from pathlib import Path

from paceline.paddle import versions

versions.check()

from paceline.paddle import compression, internals  # noqa: E402
from paceline.paddle.ddp.distributed import DistributedDataParallel, init_parallel_env, spawn  # noqa: E402
from paceline.paddle.ddp.parallel import DataParallel  # noqa: E402
from paceline.paddle.ddp.replace_ddp import replace_ddp  # noqa: E402
from paceline.paddle.model.mixed_precision import MixedPrecision  # noqa: E402
from paceline.paddle.sharding.sharded_optimizer import ShardedOptimizer  # noqa: E402
from paceline.paddle.sharding.shared_storage import share  # noqa: E402
from paceline.paddle.sync_batch_norm import SyncBatchNorm  # noqa: E402
from paceline.reducer.local_sgd.options import LocalSGD  # noqa: E402
from paceline.replace_class import replace_if_asked  # noqa: E402

replace_if_asked(replace_ddp)
internals.skip_in_sot(f"{Path(__file__).parents[1]}/")

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "LocalSGD",
    "MixedPrecision",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "compression",
    "init_parallel_env",
    "replace_ddp",
    "share",
    "spawn",
]
