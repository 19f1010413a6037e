"""The launcher's side of `--dashboard`: starts the process that serves the page, and ends it with the job.

A failure of the dashboard does not affect the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.errors import ConfigError
from paceline.launch.rank_process import python_command

TOKEN_VARIABLE = "PACELINE_DASHBOARD_TOKEN"
"""The user's token, for programs that poll the dashboard; without it, each job has a new one."""
_SHORTEST_TOKEN = 16
_ENDS_WITHIN_S = 3.0
_MOST_WAITING = 4096  # connections; further ones would retry after a second


def check_dashboard(port: str, inherited: Mapping[str, str]) -> tuple[int, str]:
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(
            f"--dashboard={port} is no port.",
            expected="a number up to 65535, or --dashboard alone: a free port",
            got=repr(port),
        )
    token = inherited.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18)
    if len(token) < _SHORTEST_TOKEN or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"{TOKEN_VARIABLE} is no token.",
            expected=f"letters, digits, - and _, at least {_SHORTEST_TOKEN} of them",
            got=f"{len(token)} characters",
            hint='python -c "import secrets; print(secrets.token_urlsafe())" makes one',
        )
    return int(port), token


class DashboardProcess:
    def __init__(self, folder: Path, port: int, token: str, say: Callable[[str], None]) -> None:
        self._folder, self._port, self._token, self._say = folder, port, token, say
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        try:
            with socket.create_server(("127.0.0.1", self._port), backlog=_MOST_WAITING) as listener:
                self._process = subprocess.Popen(
                    python_command("from paceline.monitor.dashboard import serve; serve()"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(listener.fileno(),),
                )
                self._send(folder=str(self._folder), fd=listener.fileno(), token=self._token)
                port = listener.getsockname()[1]
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            self._say(
                f"paceline: there is no dashboard on port {self._port}: {reason}. "
                "The job goes on without; --dashboard alone takes a free port"
            )
            return
        self._say(f"paceline: the dashboard is at http://127.0.0.1:{port}/?token={self._token}")

    def end(self, exit_status: int) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._send(exit_status=exit_status)
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _send(self, **facts: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        os.write(self._process.stdin.fileno(), json.dumps(facts).encode() + b"\n")
