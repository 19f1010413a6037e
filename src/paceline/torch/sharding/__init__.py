"""Shared parameters of a host, and the sharded optimizer, for torch.

    sharded_optimizer   `ShardedOptimizer`
    param_groups        its arguments
    optimizer_steps     steps of torch's optimizers
    shared_storage      `share()`
    memory_plan         `plan_memory()`

Not public.
"""
