"""Sends the source of notebook cells to ranks, so that their tracebacks show it.

Code of a cell is in no file. Without its source, the traceback of a rank that runs a function of a cell has
no source lines, and meaningless file names ("/tmp/ipykernel_81/2685509415.py"). So the lines are sent with
the call, and file names in the output of ranks become "Cell In[2]", as in IPython.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from typing import Any

_FILE = re.compile(r'File "([^"\n]+)"')


def typed_sources() -> dict[str, list[str]]:
    return {
        name: list(entry[2])
        for name, entry in list(linecache.cache.items())
        # (size, time of change, lines, path): code that is in no file has no time. Shorter entries are not
        # loaded yet.
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
    }


def remember_sources(sources: dict[str, list[str]]) -> None:
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def with_cell_names(text: str) -> str:
    """`text`, with the file names of notebook cells replaced by the names of the cells."""
    shell = _shell()
    if shell is None:
        return text

    def renamed(found: re.Match[str]) -> str:
        try:
            name = shell.compile.format_code_name(found[1])
        except Exception:  # IPython's class, of any version
            return found[0]
        return " ".join(name) if name else found[0]

    return _FILE.sub(renamed, text)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
