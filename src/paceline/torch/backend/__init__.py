"""The torch.distributed backend "paceline": stock calls, served from the memory that the ranks share.

    registration    tells torch the name, and forms a group when torch asks for one
    init_process_group   torch's own, with what any launcher has told this process
    process_group   torch's calls, translated one by one
    identity        what torch asks a group about itself
    reductions, movements, staging   what a call does with its tensors
    work, transfer  what a call returns
    other_devices   groups like "cpu:paceline,cuda:nccl"

Design: docs/design/torch_backend.md. Not public.
"""

from paceline.torch.backend.registration import register as register
