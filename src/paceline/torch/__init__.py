"""Paceline for PyTorch: `DistributedDataParallel`, and the torch.distributed backend "paceline".

    from paceline.torch import DistributedDataParallel as DDP

Importing this package makes `torch.distributed.init_process_group("paceline")` work. The only package of
Paceline that imports torch; may import everything below it.
"""

from paceline.torch import versions

versions.check()

from paceline.reducer.local_sgd.options import LocalSGD  # noqa: E402
from paceline.replace_class import replace_if_asked  # noqa: E402
from paceline.torch import backend, compression  # noqa: E402
from paceline.torch.backend.empty import empty  # noqa: E402
from paceline.torch.backend.init_process_group import init_process_group  # noqa: E402
from paceline.torch.communicator import gloo_threads  # noqa: E402
from paceline.torch.data_parallel.data_parallel import DataParallel  # noqa: E402
from paceline.torch.ddp.distributed import DistributedDataParallel  # noqa: E402
from paceline.torch.ddp.replace_ddp import replace_ddp  # noqa: E402
from paceline.torch.sharding.memory_plan import plan_memory  # noqa: E402
from paceline.torch.sharding.sharded_optimizer import ShardedOptimizer  # noqa: E402
from paceline.torch.sharding.shared_storage import share  # noqa: E402
from paceline.torch.sync_batch_norm import SyncBatchNorm  # noqa: E402
from paceline.torch.tensorboard import log_to_tensorboard  # noqa: E402

backend.register()
gloo_threads.wait_at_exit()
replace_if_asked(replace_ddp)

__all__ = [
    "DataParallel",
    "DistributedDataParallel",
    "LocalSGD",
    "ShardedOptimizer",
    "SyncBatchNorm",
    "compression",
    "empty",
    "init_process_group",
    "log_to_tensorboard",
    "plan_memory",
    "replace_ddp",
    "share",
]
