"""The rank's side of `spawn`: makes the call that it inherited.

It starts as `python -c`, so that it inherits no thread and no lock.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from paceline.errors import leave_out_inner_frames
from paceline.launch import pickled_call
from paceline.launch.memory_file import read_memory_file
from paceline.stacks import answer_requests

_is_importing_main = False


def is_importing_main() -> bool:
    """Whether this process is a rank that is importing the script which called `spawn`."""
    return _is_importing_main


def _report_to_other_ranks(error: BaseException) -> None:
    if "paceline.health.exit_reports" in sys.modules:  # else this rank is in no group
        from paceline.health import exit_reports

        exit_reports.announce(error)


def _show_without_our_frames(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """Show an exception that ends a rank (such as Ctrl-C) as Python does, from the user's function on."""
    ours = frames
    while ours is not None and ours.tb_frame.f_code is not run_rank.__code__:
        ours = ours.tb_next
    traceback.print_exception(kind, error, frames if ours is None else ours.tb_next)


def run_rank(payload_fd: int) -> None:
    global _is_importing_main
    error_fd = int(os.environ.pop("PACELINE_ERROR_FD"))
    answer_requests()
    sys.excepthook = _show_without_our_frames
    try:
        _is_importing_main = True
        function, args = pickled_call.unpack(read_memory_file(payload_fd))
        _is_importing_main = False
        function(int(os.environ["LOCAL_RANK"]), *args)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report_to_other_ranks(error)
        # Without this frame, so that the traceback begins with the user's function.
        leave_out_inner_frames(error)
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        os.write(error_fd, text.encode(errors="replace"))
        sys.exit(1)
