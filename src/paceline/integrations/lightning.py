"""Lightning: `Trainer(strategy="paceline")` and `Fabric(strategy="paceline")`.

    import paceline.integrations.lightning   # registers the names
    trainer = Trainer(strategy="paceline", accelerator="cpu", devices=2)

Lightning finds callbacks of other packages by entry points, but not strategies. Its registries know a
strategy once the module that registers it has been imported.
"""

from __future__ import annotations

import os
from typing import Any

from paceline.errors import ConfigError
from paceline.integrations.versions import tested_with
from paceline.torch import DistributedDataParallel

with tested_with("lightning", "2.6", "2.6"):
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as _FabricDDP
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import StrategyRegistry
    from lightning.pytorch.strategies.ddp import DDPStrategy as _TrainerDDP

__all__ = ["PacelineFabricStrategy", "PacelineStrategy"]

_NAMES: dict[str, dict[str, Any]] = {
    "paceline": {},
    "paceline_find_unused_parameters_true": {"find_unused_parameters": True},
}


class PacelineStrategy(_TrainerDDP):
    """Lightning's DDPStrategy, with the model wrapped in `paceline.torch.DistributedDataParallel`.

    Args:
        arguments: The arguments of Lightning's DDPStrategy (`start_method`, `timeout`, `ddp_comm_hook` and
            others). Arguments that it does not know are passed to Paceline's class:
            `gradient_as_bucket_view`, `nonfinite`, `buffers` and others. A communication hook also works on
            the CPU, where Lightning's strategy drops it.

    Raises:
        ConfigError: When the trainer starts: the launcher started another number of processes than
            `devices` and `num_nodes` say.

    Example:
        Each of the two ranks that Lightning, `paceline run -n 2` or torchrun starts:

        >>> strategy = PacelineStrategy(nonfinite="raise")     # or the name, strategy="paceline"
        >>> Trainer(strategy=strategy, accelerator="cpu", devices=2).fit(model, loader)
    """

    def setup_environment(self) -> None:
        """Form the process group. Collective."""
        _check_number_of_processes(self.num_nodes, self.num_processes)
        super().setup_environment()

    def _setup_model(self, model: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the names known: "paceline" and "paceline_find_unused_parameters_true"."""
        _register(cls, strategy_registry)


class PacelineFabricStrategy(_FabricDDP):
    """Fabric's DDPStrategy, with modules wrapped in `paceline.torch.DistributedDataParallel`.

    Args:
        arguments: The arguments of Fabric's DDPStrategy. Arguments that it does not know are passed to
            Paceline's class.

    Raises:
        ConfigError: When Fabric launches: the launcher started another number of processes than `devices`
            and `num_nodes` say.

    Example:
        Each of two ranks:

        >>> fabric = Fabric(strategy="paceline", accelerator="cpu", devices=2)
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    def setup_environment(self) -> None:
        """Form the process group. Collective."""
        _check_number_of_processes(self.num_nodes, self.num_processes)
        super().setup_environment()

    def setup_module(self, module: Any) -> DistributedDataParallel:
        """Wrap a module. Collective."""
        return DistributedDataParallel(
            module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs
        )

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the names known: "paceline" and "paceline_find_unused_parameters_true"."""
        _register(cls, strategy_registry)


def _register(strategy: type, registry: Any) -> None:
    for name, arguments in _NAMES.items():
        about = f"{name}: gradients averaged by Paceline, in memory that the ranks of a host share"
        registry.register(name, strategy, description=about, override=True, **arguments)


def _check_number_of_processes(num_nodes: int, num_processes: int) -> None:
    # Without this check Lightning fails as it looks for a device with the number of an extra rank, or waits
    # for ranks that never start. Lightning's own launchers do not set RANK, and some platforms set WORLD_SIZE
    # although no launcher is used.
    is_launched = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
    started, wanted = os.environ.get("WORLD_SIZE", ""), num_nodes * num_processes
    if is_launched and started.isdigit() and int(started) != wanted:
        raise ConfigError(
            "The launcher started another number of processes than Lightning is to use.",
            expected=f"{wanted} processes: num_nodes={num_nodes} times {num_processes} devices",
            got=f"WORLD_SIZE={started}, of which this is rank {os.environ.get('RANK', '?')}",
            hint=f"devices={started} (and num_nodes=1), or `paceline run -n {wanted}`",
        )


PacelineStrategy.register_strategies(StrategyRegistry)
PacelineFabricStrategy.register_strategies(STRATEGY_REGISTRY)
