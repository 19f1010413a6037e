"""`ddp.writing()`: announced changes of shared parameters, as torch's autograd sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paceline.errors import ConfigError
from paceline.torch.one_model.homes import Home


@contextlib.contextmanager
def written(home: Home | None) -> Iterator[None]:
    """Within it parameters of `home` may be changed; its end is collective.

    See `DistributedDataParallel.writing`.

    Args:
        home: None: each rank has its own parameters, and there is nothing to do.
    """
    if home is None:
        yield
        return
    home.raise_stray_write()
    if torch._C._current_graph_task_id() != -1:
        raise ConfigError(
            "writing(): a backward is running, which may need the old values.",
            likely="a hook, or an optimizer that steps within backward",
            hint="change parameters when backward() has returned",
        )
    core = home.core
    core.set_activity("in writing(), which all ranks of the host end together")
    home.copy.begin()
    try:
        yield
    except BaseException as error:
        # The others must not wait for this rank; what they raise in return is told by this exception.
        with contextlib.suppress(Exception):
            home.copy.end(error)
        raise
    else:
        home.copy.end()
        home.note_writes()
    finally:
        core.set_activity("")
