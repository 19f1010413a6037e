"""Who averages the gradients: memory that the ranks share, or the process group below.

The one idea: a `Reduction` is an arena of tensors and a `Reducer` over it, made anew whenever the plan
changes; the hooks see no difference between the two kinds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline import _core
from paceline.collectives.ops import ReduceOp
from paceline.errors import ConfigError, RegionError
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.engine import EngineReducer
from paceline.reducer.host import CORE_DTYPES, make_host_reducer
from paceline.reducer.plan import Plan, plan_buckets, plan_whole_buckets
from paceline.reducer.protocol import Reducer
from paceline.reducer.witness import Witness
from paceline.torch.arena import Arena
from paceline.torch.buffers import broadcast_tensors
from paceline.torch.config import DDPConfig
from paceline.torch.engine import ProcessGroupTransport
from paceline.torch.hooked import HookTransport
from paceline.torch.parameters import ManagedTensors, dtype_name
from paceline.torch.peers import Peers, ProcessGroupPeers


@dataclass(frozen=True)
class Reduction:
    """The gradients' memory and who averages it.

    Attributes:
        arena: Every gradient's place.
        reducer: Averages the places over the ranks.
        takes_pointers: Whether the reducer copies a gradient into the arena, and the mean back to it, itself.
    """

    arena: Arena
    reducer: Reducer
    takes_pointers: bool


class ReductionFactory:
    """Makes plans and reductions for one wrapped model. Collective, as is each of its calls but `plan`.

    Args:
        peers: The ranks that train the model.
        device_kinds: Of the trainable parameters, the same on all ranks.
        config: Of the wrapped model.
    """

    def __init__(self, peers: Peers, device_kinds: set[str], config: DDPConfig) -> None:
        self._peers = peers
        self._checks_finite = config.nonfinite != "ignore"
        self._config = config
        on_host = device_kinds == {"cpu"}
        self.hook: CommHook | None = None
        self.host_group: _core.HostGroup | None = None
        if on_host and config.reduce_through != "group":
            self.host_group = peers.share_host()
        watched = self.host_group
        if self.host_group is None:
            self._check_group(on_host, config)
            watched = self._share_to_watch(on_host)
        self.witness = None if watched is None else Witness(watched)

    @property
    def path(self) -> str:
        """ "memory" or "group"."""
        return "group" if self.host_group is None or self.hook is not None else "memory"

    @property
    def tell(self) -> Callable[[str], None] | None:
        """Lets the errors of other ranks tell what this one was doing; None: they can't."""
        if self.host_group is not None and self.hook is None:
            return self.host_group.set_activity
        return None if self.witness is None else self.witness.tell

    def broadcast(self, payload: torch.Tensor, root: int = 0) -> None:
        """Replace a flat uint8 tensor by that of the rank `root`, by the shortest way. Collective."""
        if self.host_group is not None and payload.device.type == "cpu":
            self.host_group.broadcast(payload.data_ptr(), payload.numel(), root)
        else:
            self._peers.broadcast(payload, root)

    def broadcast_all(self, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
        """Replace the values of all tensors by those of the rank `root`. Collective."""
        if self.host_group is None or not all(tensor.is_cpu for tensor in tensors):
            broadcast = functools.partial(self.broadcast, root=root)
            broadcast_tensors(tensors, self._peers.rank, broadcast, root=root)
            return
        with torch.no_grad():
            whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
            pieces, sizes = [each.data_ptr() for each in whole], [each.nbytes for each in whole]
            self.host_group.broadcast_all(pieces, sizes, root)
            for tensor, copy in zip(tensors, whole):
                if copy is not tensor:
                    tensor.copy_(copy)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Payloads of all ranks, by rank, of any lengths. Collective."""
        core = self.host_group
        if core is None:
            return self._peers.exchange.all_gather(payload, self._peers.timeout_s)
        own_length = torch.tensor([len(payload)])
        lengths = torch.empty(self._peers.world_size, dtype=torch.int64)
        core.all_gather(own_length.data_ptr(), lengths.data_ptr(), 8)
        longest = max(1, int(lengths.max()))
        own = torch.zeros(longest, dtype=torch.uint8)
        if payload:
            own[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = torch.empty(self._peers.world_size, longest, dtype=torch.uint8)
        core.all_gather(own.data_ptr(), rows.data_ptr(), longest)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths.tolist())]

    def sum(self, values: torch.Tensor) -> None:
        """Replace a flat float32 or float64 tensor by its sum over ranks. Collective."""
        if self.host_group is not None and values.device.type == "cpu":
            dtype = CORE_DTYPES[dtype_name(values.dtype)]
            self.host_group.all_reduce(values.data_ptr(), values.numel(), dtype, ReduceOp.SUM)
        else:
            dist.all_reduce(values, group=self._peers.process_group)

    def plan(self, tensors: ManagedTensors, order: list[int] | None) -> Plan:
        """Of the trainable parameters, in this order; None: in the reverse of their registration."""
        return plan_parameters(tensors, self._config, order, is_hooked=self.hook is not None)

    def make(
        self, plan: Plan, parameters: Sequence[torch.Tensor], instead_of: Reduction | None = None
    ) -> Reduction:
        """An arena for this plan, filled with zeros, and its reducer. Collective.

        Args:
            plan: The same on all ranks.
            parameters: Those that the plan lists.
            instead_of: Another plan's reduction, which is over: its memory is given back, or used again.
        """
        if self.hook is not None:
            return self._make_hooked(plan, parameters, self.hook, instead_of)
        if self.host_group is not None:
            if instead_of is not None:
                instead_of.reducer.close()
            reducer = make_host_reducer(
                self.host_group, plan, gradients_in_arena=self._config.gradients_in_arena
            )
            shared = Arena.on_memory(plan, parameters, reducer.arena_pointer, owner=reducer)
            return Reduction(shared, reducer, takes_pointers=True)
        assert isinstance(self._peers, ProcessGroupPeers)
        arena = Arena.allocate(plan, parameters, instead_of.arena if instead_of is not None else None)
        transport = ProcessGroupTransport(
            arena, self._peers, checks_finite=self._checks_finite, witness=self.witness
        )
        engine = EngineReducer(plan, transport, skip_unused=self._config.skip_unused)
        return Reduction(arena, engine, takes_pointers=False)

    def _make_hooked(
        self, plan: Plan, parameters: Sequence[torch.Tensor], hook: CommHook, instead_of: Reduction | None
    ) -> Reduction:
        """In memory of its own: a hook's arena has no gaps, and so another size than any other."""
        assert isinstance(self._peers, ProcessGroupPeers)
        if instead_of is not None:
            instead_of.reducer.close()
        arena = Arena.allocate(plan, parameters)
        finite = self._checks_finite
        transport = HookTransport(
            arena, self._peers, parameters, hook, checks_finite=finite, witness=self.witness
        )
        return Reduction(arena, EngineReducer(plan, transport), takes_pointers=False)

    def _share_to_watch(self, on_host: bool) -> _core.HostGroup | None:
        """Memory of all ranks in which no gradient lies; None: they are on several hosts, or have none."""
        if on_host and self._config.reduce_through != "group":
            return None  # it was just tried
        try:
            return self._peers.share_host()
        except RegionError:  # on every rank; gradients need none of it
            return None

    def _check_group(self, on_host: bool, config: DDPConfig) -> None:
        """Without shared memory, gradients need a process group of torch."""
        if config.reduce_through == "memory":
            raise ConfigError(
                'DistributedDataParallel: reduce_through="memory" is not possible here.',
                seen="parameters on a GPU" if not on_host else "ranks on several hosts",
                hint='leave reduce_through at "auto"',
            )
        if not isinstance(self._peers, ProcessGroupPeers):
            raise ConfigError(
                "DistributedDataParallel: a paceline.Group averages gradients in host memory only.",
                seen="parameters on a GPU" if not on_host else f"reduce_through={config.reduce_through!r}",
                hint='call torch.distributed.init_process_group("nccl" or "gloo") before wrapping the model',
            )


def plan_parameters(
    tensors: ManagedTensors, config: DDPConfig, order: list[int] | None, *, is_hooked: bool
) -> Plan:
    """Where gradients are averaged, and which together.

    Args:
        tensors: Of the model.
        config: With the sizes of buckets.
        order: Of the gradients; None: the reverse of their parameters' registration.
        is_hooked: Whether the buckets are for a communication hook, which gets whole parameters.
    """
    first, others, caps = config.first_bucket_bytes, config.bucket_cap_bytes, config.bucket_caps_bytes
    specs = tensors.specs(config.reduce_dtype, complex_as_real=not is_hooked)
    if is_hooked:
        return plan_whole_buckets(specs, caps_bytes=caps or (first, others), order=order)
    return plan_buckets(
        specs, bucket_cap_bytes=others, first_bucket_bytes=first, order=order, caps_bytes=caps
    )
