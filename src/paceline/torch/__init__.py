"""Paceline for PyTorch: `DistributedDataParallel`, and the torch.distributed backend "paceline".

    from paceline.torch import DistributedDataParallel as DDP

Importing this package makes `torch.distributed.init_process_group("paceline")` work. The only package of
Paceline that imports torch; may import everything below it.
"""

from paceline.reducer.local_sgd import LocalSGD
from paceline.replacing import replace_if_asked
from paceline.torch import backend, compression
from paceline.torch.backend.init_process_group import init_process_group
from paceline.torch.data_parallel.data_parallel import DataParallel
from paceline.torch.ddp.distributed import DistributedDataParallel
from paceline.torch.ddp.replace_ddp import replace_ddp
from paceline.torch.one_model.memory_plan import plan_memory
from paceline.torch.one_model.sharded_optimizer import ShardedOptimizer
from paceline.torch.one_model.share import share
from paceline.torch.sync_batch_norm import SyncBatchNorm
from paceline.torch.tensorboard import log_to_tensorboard

backend.register()
replace_if_asked(replace_ddp)

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "LocalSGD",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "compression",
    "init_process_group",
    "log_to_tensorboard",
    "plan_memory",
    "replace_ddp",
    "share",
]
