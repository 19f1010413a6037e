"""What torch does not bring through a restart of its workers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping


def warn_of_shared_store(backend: str, rank: int, environ: Mapping[str, str] | None = None) -> None:
    """Warn on rank 0 if torchrun may restart ranks that talk over Gloo, and its agent's store is shared.

    The ranks of the next attempt then find the addresses of those of the last one in it: with torch 2.13,
    two of four restarts ended in `connectFullMesh failed`, with DistributedDataParallel of torch as well.
    To be left out when torch gives each attempt keys of its own.
    """
    environ = os.environ if environ is None else environ
    restarts_left = _number(environ, "TORCHELASTIC_MAX_RESTARTS") - _number(
        environ, "TORCHELASTIC_RESTART_COUNT"
    )
    is_shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if "gloo" not in backend or rank != 0 or restarts_left <= 0 or not is_shared:
        return
    warnings.warn(
        "torchrun may not bring this job back after a failure: the ranks that it restarts look for the dead "
        "ones' Gloo addresses in the store that its agent keeps, and half of such restarts fail with "
        "`connectFullMesh failed`. That is torch's fault. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
        'environment of torchrun; or use the backend "paceline", which has keys of its own for each attempt.',
        RuntimeWarning,
        stacklevel=2,
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
