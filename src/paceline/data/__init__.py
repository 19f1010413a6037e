"""Samplers: they choose the samples that each rank trains on, by index arithmetic alone."""

from paceline.data.batch_sampler import DistributedBatchSampler
from paceline.data.bucketed import BucketedSampler
from paceline.data.chunked import ChunkedShuffle
from paceline.data.distributed_sampler import DistributedSampler
from paceline.data.evaluation import EvaluationSampler
from paceline.data.stream import DistributedStream
from paceline.data.subset import SubsetDistributedSampler
from paceline.data.weighted import WeightedDistributedSampler

__all__ = [
    "BucketedSampler",
    "ChunkedShuffle",
    "DistributedBatchSampler",
    "DistributedSampler",
    "DistributedStream",
    "EvaluationSampler",
    "SubsetDistributedSampler",
    "WeightedDistributedSampler",
]
