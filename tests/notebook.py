"""A real notebook kernel, started as Jupyter starts it: runs cells and returns their output as it comes."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

_WITHIN_S = 240.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """The output of a cell: the text of its two streams as it came, and the error that ended it."""

    pieces: list[tuple[str, str]] = field(default_factory=list)
    error: str = ""
    traceback: str = ""

    @property
    def stdout(self) -> str:
        return "".join(text for name, text in self.pieces if name == "stdout")

    @property
    def stderr(self) -> str:
        return "".join(text for name, text in self.pieces if name == "stderr")


class Kernel:
    """One kernel of this interpreter.

    Args:
        folder: Its working directory, which also holds its files.
    """

    def __init__(self, folder: Path) -> None:
        self._manager: Any = KernelManager(connection_file=str(folder / "kernel.json"), transport="ipc")
        self._manager.ip = str(folder / "kernel")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self._manager._kernel_spec = KernelSpec(argv=command, display_name="test", language="python")
        environment = os.environ | {"IPYTHONDIR": str(folder / "ipython"), "JUPYTER_PLATFORM_DIRS": "1"}
        self._manager.start_kernel(cwd=str(folder), env=environment)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_WITHIN_S)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)

    def run(self, cell: str, while_running: Callable[[Shown], None] = lambda shown: None) -> Shown:
        """Run a cell to its end.

        Args:
            cell: Its code.
            while_running: Called for each output message, while the cell runs.
        """
        asked = self._client.execute(cell)
        shown = Shown()
        deadline = time.monotonic() + _WITHIN_S
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.pieces.append((content["name"], content["text"]))
                while_running(shown)
            elif kind == "error":
                shown.error = f"{content['ename']}: {content['evalue']}"
                shown.traceback = _COLOURS.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown

    def interrupt(self) -> None:
        """Interrupt the kernel, as the stop button does."""
        self._manager.interrupt_kernel()

    def close(self) -> None:
        """Kill the kernel, as a restart does in the end."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
