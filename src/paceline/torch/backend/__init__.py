"""The torch.distributed backend "paceline": runs torch's collective calls in memory that the ranks share.

    registration    registers the backend with torch, and creates its process groups
    init_process_group   torch's function, with the settings of any supported launcher
    process_group   the process group: one method for each of torch's calls
    identity        rank, size, names and devices of a group
    reductions, movements, sparse, staging   what a call does with its tensors
    work, transfer  the Work objects that calls return
    other_devices   groups like "cpu:paceline,cuda:nccl"
    empty           tensors in shared memory

Design: docs/design/torch_backend.md. Not public.
"""

from paceline.torch.backend.registration import register as register
