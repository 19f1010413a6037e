"""Memory that the C library keeps when gradients are freed, so that the next backward need not get it anew.

The one idea: a pass that scatters frees each gradient where it is handed over, and a backward makes as many
again. glibc gives free memory at the end of its heap back to the system, where it is more than twice the
largest block that was freed so far, and then the kernel fills each page with zeros once more. What a backward
is about to use again need not be given back. Imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_MOST_ON_HEAP = 32 << 20  # the largest block that glibc can be told to take from its heap
_BESIDES = 2 * _MOST_ON_HEAP  # what else is free there; and what glibc itself would come to
_MOST = 2**31 - 1  # an int

_kept_bytes = 0


def keep_freed_memory(nbytes: int) -> bool:
    """Have the C library keep twice this much freed memory and 64 MiB, or more if that was asked for before.

    For the whole process, until it ends. Nothing changes if the user has told the C library what to keep
    (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES). Another allocator that is preloaded
    does as it does. Blocks of more than 32 MiB are given back at once, as always.

    Returns:
        Whether it is kept.
    """
    global _kept_bytes
    users = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in users or {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ):
        return False
    wanted = min(2 * nbytes + _BESIDES, _MOST)  # activations are freed there, too
    if wanted <= _kept_bytes:
        return True
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    # The first call ends glibc's own search for the second number.
    _kept_bytes = wanted
    return bool(mallopt(_TRIM_THRESHOLD, wanted) and mallopt(_MMAP_THRESHOLD, _MOST_ON_HEAP))
