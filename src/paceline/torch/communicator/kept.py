"""Keeps tensors of calls over a group from being freed by a thread of torch's, where that may never end.

torch before 2.8 holds Python's lock while it waits for the threads of a group that is destroyed, and one of
them needs the lock to free a tensor that nobody else holds any more. So whoever destroys a group right after
a call over it, or after one that was given up, would wait for ever.
"""

from __future__ import annotations

from collections import deque

import torch

_kept: deque[tuple[torch.Tensor, ...]] | None = deque(maxlen=64) if torch.__version__ < "2.8" else None


def keep(*tensors: torch.Tensor) -> None:
    """Keep the small tensors of a call until many others have been made."""
    if _kept is not None:
        _kept.append(tensors)
