"""Which samples each rank trains on: pure index arithmetic. May import numpy, `errors` and `env`."""

from paceline.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
