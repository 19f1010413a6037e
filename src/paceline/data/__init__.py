"""Which samples each rank trains on: pure index arithmetic. Imports numpy, `errors`, `env` and the core."""

from paceline.data.batch_sampler import DistributedBatchSampler
from paceline.data.sampler import DistributedSampler

__all__ = ["DistributedBatchSampler", "DistributedSampler"]
