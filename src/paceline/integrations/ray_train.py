"""Ray Train: `TorchTrainer(..., torch_config=PacelineConfig())`.

    from paceline.integrations.ray_train import PacelineConfig
    trainer = TorchTrainer(train, torch_config=PacelineConfig(), scaling_config=ScalingConfig(num_workers=2))

Ray's `TorchConfig` defines how its workers form a process group, and a context in which they call the user's
function. `PacelineConfig` changes two things: the workers of a run get a common secret, and during that call
Ray's `prepare_model` finds Paceline's class under the name of torch's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError
from paceline.health import exit_reports
from paceline.integrations.versions import tested_with
from paceline.ray import secret_for_workers
from paceline.rendezvous.secret import JobSecret, adopt_secret
from paceline.torch import DistributedDataParallel

with tested_with("ray", "2.60", "2.60"):
    import ray.train.torch
    from ray.train.torch import TorchConfig
    from ray.train.v2._internal.constants import is_v2_enabled

    _TorchBackend = TorchConfig().backend_cls
    _TorchContext = TorchConfig().train_func_context

__all__ = ["PacelineConfig"]

_NAME = "DistributedDataParallel"


@dataclass
class PacelineConfig(TorchConfig):
    """Ray's TorchConfig, with which `prepare_model` wraps in `paceline.torch.DistributedDataParallel`.

    The workers of a run get a secret by which they authenticate each other: the secret of this process, if
    the user has named one (PACELINE_SECRET_FILE), else a new one. It is sent in Ray's own calls. If the
    function of one worker raises, the workers that wait for it raise at once, and quote the exception.

    Args:
        backend: As in Ray's TorchConfig: "gloo", "nccl", or None for the one that fits.
        init_method: As in Ray's TorchConfig.
        timeout_s: Seconds that calls of the process group may take.

    Raises:
        ConfigError: The first version of Ray Train's API is switched on (RAY_TRAIN_V2_ENABLED=0), or the file
            of the user's secret cannot be read. The constructor is not collective and does not block.

    Example:
        Each of the two workers that Ray starts:

        >>> def train():
        ...     model = ray.train.torch.prepare_model(Net())       # arguments of our class go in a dict:
        ...     # prepare_model(Net(), parallel_strategy_kwargs={"nonfinite": "raise"})
        >>> scaling = ScalingConfig(num_workers=2)
        >>> TorchTrainer(train, torch_config=PacelineConfig(), scaling_config=scaling).fit()
    """

    _secret: JobSecret = field(default_factory=lambda: secret_for_workers(os.environ), init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_v2_enabled():
            raise ConfigError(
                "PacelineConfig needs the second version of Ray Train's API, and the first is switched on.",
                got=f"RAY_TRAIN_V2_ENABLED={os.environ.get('RAY_TRAIN_V2_ENABLED', '')}",
                hint="unset the variable; or TorchConfig, and paceline.torch.replace_ddp() in the workers",
            )

    @property
    def backend_cls(self) -> type:
        """The class of which Ray's controller makes an instance to start the workers."""
        return _Backend

    @property
    def train_func_context(self) -> type:
        """The context manager in which a worker calls the user's function."""
        return _Context


class _Backend(_TorchBackend):  # type: ignore[misc, valid-type]
    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        worker_group.execute(_join_job, backend_config._secret, os.urandom(16).hex())
        super().on_start(worker_group, backend_config)


def _join_job(secret: JobSecret, job_id: str) -> None:
    adopt_secret(secret)
    os.environ["PACELINE_JOB_ID"] = job_id


class _Context(_TorchContext):  # type: ignore[misc, valid-type]
    def __enter__(self) -> None:
        super().__enter__()
        self._module = sys.modules[ray.train.torch.prepare_model.__module__]
        self._theirs = getattr(self._module, _NAME, None)
        if self._theirs is None:
            raise ConfigError(
                "ray.train.torch.prepare_model does not name the class in which it wraps models any more.",
                where=self._module.__name__,
                got=f"ray {ray.__version__}",
                expected="ray 2.60, with which Paceline was tested",
                hint="wrap the model in paceline.torch.DistributedDataParallel yourself",
            )
        setattr(self._module, _NAME, DistributedDataParallel)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> Any:
        setattr(self._module, _NAME, self._theirs)
        if error is not None:
            exit_reports.announce(error)
        return super().__exit__(kind, error, traceback)
