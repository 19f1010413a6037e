"""`DistributedDataParallel`: a module whose gradients are averaged over the ranks during backward().

This file has the class that users construct. The work is done in `model` (arguments, parameters and buffers),
`communicator` (the process group) and `backward` (each backward). The names that the class has in common with
torch's are in `torch_names`.
"""

# mypy: disable-error-code="override"
# Attributes of torch's class are properties here

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.arguments import Arguments
from paceline.ddp.wrapped_model import WrappedModel, checked_norms
from paceline.errors import ConfigError, PacelineError
from paceline.reducer.comm_hooks import CommHook
from paceline.reducer.communicator import Communicator
from paceline.reducer.local_sgd.options import LocalSGD
from paceline.reducer.model_agreement import reporting_to_peers
from paceline.rendezvous.preflight import refuse_latecomers
from paceline.sharding.partial_steps import partial_steps
from paceline.torch.backend.init_process_group import membership_of_default_group
from paceline.torch.backward.autograd import TorchBackwardSync, make_sync
from paceline.torch.checkpoint import CHECKPOINT_OPS
from paceline.torch.communicator.comm_hook import check_hook
from paceline.torch.communicator.connect import connect
from paceline.torch.communicator.find_peers import Peers, find_peers, known_exchange
from paceline.torch.ddp.active_wrapper import active_wrapper
from paceline.torch.ddp.logging_data import noting_errors
from paceline.torch.ddp.pickling import refuse_backward
from paceline.torch.ddp.torch_names import TorchNames, hide_torchs_own, moved
from paceline.torch.ddp.wrapped_twice import check_inner, check_outer
from paceline.torch.model.arguments import check_materialised, checked_module
from paceline.torch.model.config import DDPConfig, Weight, make_config
from paceline.torch.model.mixed_precision import cast_buffers, run_in
from paceline.torch.model.parameters import ManagedTensors
from paceline.torch.model.torch_compile import refuse_compiled_autograd, untraced, untraced_itself
from paceline.torch.ops import OPS
from paceline.torch.sharding.shared_storage import check_before_state_dict, is_in_backward
from paceline.trace.recording import recording

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from paceline.collectives.group import Group


@hide_torchs_own
class DistributedDataParallel(WrappedModel, TorchNames):
    """Trains one model on several processes: a drop-in for `torch.nn.parallel.DistributedDataParallel`.

    Every rank wraps the same model, and runs forward and backward on its own part of the batch. When
    backward() returns, every parameter's .grad is the mean over the ranks, with the same bits on each; or
    every rank has raised. Ranks of one host average in shared memory. Other groups, and parameters on a GPU,
    use the all_reduce of the process group.

    Collective: every rank constructs it, and runs the same number of synchronised backwards.

    Args:
        module: The model. After wrapping, parameters may be frozen for a while, and everything that is not
            trained may change. A parameter to train must not be added, replaced or unfrozen.
        device_ids: A list of one device, to which inputs are moved, or None.
        output_device: The device in device_ids, or None.
        broadcast_buffers: Broadcast rank 0's buffers (running statistics) to all ranks, when wrapping and at
            the end of each synchronised backward. None: True. A forward waits for no other rank. So if the
            program writes a buffer between two steps, it must write the same values on all ranks; otherwise
            the backward raises on every rank.
        init_sync: Broadcast rank 0's parameters to all ranks when wrapping.
        process_group: A process group of torch, or a `paceline.Group`. None: torch's default group, or,
            if torch.distributed is not initialised, a group formed from the environment that
            `paceline run` (or torchrun, or mpirun) has set.
        bucket_cap_mb: Largest size of a bucket, in MiB; None: 25. In shared memory it changes no result.
        find_unused_parameters: Let a parameter that got no gradient contribute 0. Otherwise it raises an
            error on every rank. A parameter unused on all ranks keeps its .grad.
        gradient_as_bucket_view: Keep .grad in the memory where it is averaged, so that gradients are held
            once. A forked child cannot read it; copy it before the fork.
        static_graph: A promise that the same parameters are unused in each backward. Breaking it raises.
        mixed_precision: torch's `_MixedPrecision`, also on the CPU: the dtypes in which forward runs,
            gradients are averaged and buffers are kept. Parameters and .grad keep their dtype. Does not work
            with activation checkpointing.
        bucket_cap_mb_list: Bucket sizes in MiB, one per bucket; the last applies to all further buckets.
            Replaces bucket_cap_mb.
        device_mesh: A mesh of one dimension, instead of process_group.
        forward_sync_buffers: True: also broadcast rank 0's buffers in forward, as torch does: in the first
            forward in training mode after each synchronised backward. That forward is then collective.
            False: as broadcast_buffers=False. In both cases buffers are broadcast at construction. None:
            broadcast_buffers decides.
        buffers: What to do with buffers after each synchronised backward, by name pattern ("*.running_*"):
            "average" them, "broadcast" those of rank 0, or leave them "local". The first match counts;
            broadcast_buffers decides if none matches. Integers are broadcast instead of averaged.
        weight: The weight of this rank's gradients in the average: a number, or a function of forward's
            arguments that returns one (for example the number of tokens). The weights of all forwards that a
            backward goes through are added. None: 1, unless weight() is called.
        nonfinite: What to do when a gradient holds an infinity or a NaN: "warn" (once), "raise" (on every
            rank) or "ignore". Over NCCL, "warn" warns one or more backwards later; only "raise" waits for
            the GPU.
        timeout_s: Seconds to wait for the slowest rank, or a timedelta; None: the group's own time-out.
        warn_after_s: Seconds after which a late rank is named in a warning; None: 10.
        reduce_through: Where gradients are averaged: in "memory" that the ranks share, over the process
            "group", or "auto", the best of what is possible. On several hosts, "auto" averages in the memory
            of each host first, and then between the hosts. "hosts" also does this for parameters on GPUs,
            over a process group of the ranks of each host; all hosts must have the same number of ranks. Not
            yet run on a GPU. On one host it changes nothing.
        dim, check_reduction: Accepted for compatibility; they have no effect.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients are averaged after the gradient
            of `param_to_hook_all_reduce` is ready. Until then they may be computed several times, or not at
            all, which counts as zeros.
        param_to_hook_all_reduce: The parameter whose gradient the delayed ones wait for.
        skip_all_reduce_unused_params: Over a process group, don't send buckets that no rank used in the
            previous backward. If they are used again, they are sent at the end of the backward.
        batched_grad_copy: Accepted, without effect: over a process group, gradients are always copied a
            bucket at a time.
        lazy_bucket_allocation: Accepted, without effect: all backwards use the same memory for buckets.
        init_sync_buffers: Broadcast rank 0's buffers when wrapping. None: as broadcast_buffers.
        check_replicas_every: At the end of each n-th synchronised backward, compare the replicas, and raise
            on every rank if they differ; see check_replicas(). None: only if the ranks have written to
            their parameters a different number of times (one has skipped a step). 0: never.
        compress_between_hosts: Send gradients between hosts in fewer bytes: "bf16" or "fp16" (a half),
            "int8" (a quarter), or "topk" (8 of each 256 values, about 1/43). What compression removes from a
            gradient is added to the next one (error feedback). Nothing is rounded within a host, so on one
            host this does nothing. Float64 and sparse gradients are not compressed. None: no compression.
        deterministic: "world": gradients, and buffers that are averaged, have the bits of one host with the
            same number of ranks, on any layout of the ranks. One host has these bits anyway, and so have the
            gradients of hosts with aligned blocks of ranks (2x2, 4x4). Other hosts each send the sums of
            several blocks of ranks, which takes up to (L + 1) / 2 times the bytes for L ranks per host. None:
            the attribute `bits` says which bits result. For parameters on the CPU, without a hook.
        local_sgd: `LocalSGD(every=...)`: hosts train on their own, and synchronise every so many steps. None:
            gradients are averaged over all ranks in each step.
        share_parameters: Keep one copy of the parameters for all ranks of a host, on the CPU, instead of one
            for each. The parameters are still the same objects, but are read-only: all changes go through
            writing(), including an optimizer's step. Each rank has its own buffers.
        reduce: "mean": .grad is the mean on every rank. "scatter": each rank gets the part of the mean that
            its `ShardedOptimizer` needs, and less memory is written. .grad is then a stand-in that raises
            when it is read; clip with `ddp.clip_grad_norm_()`. All trained parameters must be in a
            ShardedOptimizer when the first forward begins. On the CPU, with all ranks on one host.
        virtual_ranks: Average each step over this number of micro-batches, which at most as many processes
            compute: the same training, bit for bit, on any number of processes. Train such a model with
            steps(). It implies deterministic="world". Gradients of 16 bits are added in float32, and the mean
            is rounded once. None: average over the ranks.
        later: Arguments of a newer torch, which must have torch's default values.

    Raises:
        ConfigError: An argument, or the model, is not supported; the message says which and why. Also raised
            if torch's own class has already wrapped the model, or wraps the result.
        ModelMismatchError: The ranks wrapped different models; names the first difference.

    Attributes:
        module: The wrapped model.

    Example:
        >>> model = DistributedDataParallel(nn.Linear(4, 1))
        >>> model(batch).sum().backward()   # rank 0's .grad was 1, rank 1's was 3: now 2 on both
    """

    module: nn.Module
    _ops = OPS
    _checkpoint_ops = CHECKPOINT_OPS
    _tensors: ManagedTensors
    _backward_sync: TorchBackwardSync | None
    _config: DDPConfig
    _has_looked_outward = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Group | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        share_parameters: bool = False,
        reduce: str = "mean",
        buffers: Mapping[str, str] | None = None,
        weight: float | Callable[..., Weight] | None = None,
        nonfinite: str = "warn",
        timeout_s: float | timedelta | None = None,
        warn_after_s: float | timedelta | None = None,
        reduce_through: str = "auto",
        init_sync_buffers: bool | None = None,
        check_replicas_every: int | None = None,
        compress_between_hosts: str | None = None,
        deterministic: str | None = None,
        local_sgd: LocalSGD | None = None,
        virtual_ranks: int | None = None,
        **later: Any,
    ) -> None:
        arguments = dict(locals())
        for name in ("self", "module", "process_group", "device_mesh", "later"):
            del arguments[name]
        arguments |= later
        nn.Module.__init__(self)  # not torch's DDP, a base only so that libraries recognise this class
        self._arguments = arguments
        with reporting_to_peers(lambda: known_exchange(process_group, device_mesh)):
            self._prepare(module, arguments)
            times = self._config.timeout_s, self._config.warn_after_s
            peers = find_peers(process_group, device_mesh, *times)
            refuse_latecomers(membership_of_default_group())
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._connect(peers)

    def _prepare(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        checked_module("DistributedDataParallel", module)
        self._config = make_config(**arguments)
        check_inner(module)
        check_materialised("DistributedDataParallel", module)
        self.module = module
        self.require_forward_param_sync = True  # libraries set it; buffers are synchronised after backward
        self._join_config = None  # torch's Join sets it
        self._joining = self._backward_sync = None
        self._tensors = ManagedTensors(module)
        self._tensors.check_device(self._config.device)
        self._tensors.delay(arguments)
        cast_buffers(module, self._config.precision.buffer_dtype, self._tensors.ignored)

    def _connect(self, peers: Peers, *, is_first: bool = True) -> None:
        """Collective."""
        self._peers = peers
        # A single rank averages nothing and pays nothing. But nonfinite="raise" also works on one rank.
        config = self._config
        needs_none = config.nonfinite != "raise" and config.weight is None and config.local_sgd is None
        is_alone = peers.world_size == 1 and needs_none and config.virtual_ranks is None
        self._check_model(peers)
        self._backward_sync = None if is_alone else self._begin_sync(is_first=is_first)
        recording.begin_if_batches_count(peers.rank, peers.world_size)
        self._warn_of_unused_compression(peers.rank)
        self._is_connected = True

    def _connected(self) -> Peers:
        peers = self._peers
        if self._are_hooks_removed:
            raise ConfigError(
                "This wrapper averages no gradients any more.",
                seen="_remove_autograd_hooks() was called",
                hint="wrap the model anew, on every rank, and use that wrapper; or use `.module`, alone",
            )
        if peers is None or not self._is_connected:
            peers = peers or find_peers(None, None, self._config.timeout_s, self._config.warn_after_s)
            self._connect(peers)
        return peers

    def _check_model(self, peers: Peers) -> None:
        super()._check_model(peers)
        self._tensors.check_trainable()
        self._tensors.check_averaged(self._config.buffers)

    def _ranks(self) -> Peers:
        return self._peers or self._connected()

    def _make_communicator(self, peers: Peers) -> Communicator[torch.Tensor]:
        return connect(
            peers,
            on_host=self._tensors.is_on_host,
            reduce_through=self._config.reduce_through,
            between_hosts=self._between_hosts(),
            devices={parameter.device for parameter in self._tensors.trainable},
        )

    def _make_sync(self, communicator: Communicator[torch.Tensor]) -> TorchBackwardSync:
        return make_sync(self._tensors, communicator, self._config)

    def _begin_sync(self, *, is_first: bool = True) -> TorchBackwardSync:
        backward_sync: TorchBackwardSync = super()._begin_sync(is_first=is_first)
        backward_sync.autograd.errors = self._errors
        if self._sample_rate is not None:
            backward_sync.autograd.times.use_rate(self._sample_rate, backward_sync.good_backwards)
        backward_sync.use_ends_by_hand(self._ends_by_hand)  # as set before copying or regrouping
        return backward_sync

    def _guard_model(self) -> None:
        for module in self.module.modules():
            module.register_state_dict_pre_hook(check_before_state_dict)  # type: ignore[no-untyped-call]

    _is_in_backward = staticmethod(is_in_backward)

    @untraced_itself
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and prepare to average gradients if they will be needed."""
        try:
            inputs, kwargs, is_training = self._before_forward(inputs, kwargs)
        except PacelineError as error:
            self._errors.add(error)
            if self._backward_sync is not None:
                self._backward_sync.publish_error(error)
            raise
        # torch.compile splits the graphs of this forward at the buckets. torch's own _inside_ddp_forward()
        # would import the compiler, which takes seconds in every program.
        active = active_wrapper()
        outer, active.wrapper = active.wrapper, self
        try:
            output = self._run_ddp_forward(*inputs, **kwargs)
        finally:
            active.wrapper = outer
            if self._backward_sync is not None:
                self._backward_sync.buffers.end_forward()
        if is_training:
            self._after_forward(output)
        return output

    @untraced_itself
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        module: Any = self._modules["module"]  # without the search of nn.Module.__getattr__
        dtype = self._config.precision.param_dtype
        if dtype is None:
            return module(*inputs, **kwargs)
        return run_in(dtype, module, self._tensors.ignored, inputs, kwargs)

    @untraced
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
        if self._on_preemption is not None:
            self._call_if_preempted()
        if self._storage is not None:
            self._storage.check_in_place()
        if partial_steps.marks:
            self._check_whole(self._tensors.all_parameters.values())
        if self._config.device is not None:
            inputs, kwargs = moved((inputs, kwargs), self._config.device)
        is_alone = self._is_connected and self._backward_sync is None
        if recording.has_batches and torch.is_grad_enabled():
            recording.note_batch(inputs, kwargs)
        if not torch.is_grad_enabled() or is_alone or not self._tensors.are_trained():
            if self._backward_sync is not None:
                self._backward_sync.begin_untrained_forward()
            return inputs, kwargs, False
        refuse_compiled_autograd()
        active = TorchDDP._active_ddp_module  # the wrapper of a forward around this one
        if active is not None or not self._has_looked_outward:
            check_outer(self, active)
            self._has_looked_outward = True
        module: Any = self._modules["module"]  # as above
        is_training = module.training
        if not self._is_connected and is_training:
            self._connected()
        backward_sync = self._backward_sync
        if backward_sync is not None:
            if self._config.local_sgd is not None:
                backward_sync = self._begin_local_forward(backward_sync, is_training=is_training)
            is_syncing = self._syncs_backward
            if self._join_config is not None and self._join_config.enable and self._joining is not None:
                self._joining.notify(self, is_syncing, is_training=is_training)
            weight = None if self._config.weight is None else self._weight_of(inputs, kwargs)
            backward_sync.begin_forward(
                inputs, kwargs, is_syncing=is_syncing, is_training=is_training, weight=weight
            )
        return inputs, kwargs, True

    @untraced
    def _after_forward(self, output: object) -> None:
        backward_sync = self._backward_sync
        if not self._is_connected:
            refuse_backward(output)
        elif backward_sync is not None:
            backward_sync.watch(output)
            if recording.note is not None:
                backward_sync.end_forward()
                if recording.keeps_all and not backward_sync.state.is_forward_averaged:
                    backward_sync.watch_local(output)

    def _sync_to_weigh(self) -> Any:
        if not self._is_connected:
            self._connected()
        return super()._sync_to_weigh()

    @noting_errors
    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook` average each bucket of gradients, over torch's process group.

        Collective. torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) work unmodified, also on
        the CPU. Call this once for each wrapped model, and not within a backward.

        Args:
            state: Passed to the hook unchanged.
            hook: Called as `hook(state, bucket)` when all gradients of a bucket are ready, not divided by
                the world size; returns a future of the tensor that replaces `bucket.buffer()`.

        Raises:
            RuntimeError: A hook was registered before.
            TypeError: The hook is not callable; or, in backward, does not return a future of a tensor.
            ValueError: The hook's annotations, or the shape or dtype that it returns, are wrong; or the ranks
                are connected by a `paceline.Group`, which hooks can't use.
            ModelMismatchError: Ranks registered different hooks.

        Example:
            >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
            >>> model.register_comm_hook(None, fp16_compress_hook)  # half the bytes on the wire
        """
        peers = self._connected()

        def check(given: Any) -> None:
            check_hook(given)
            if peers.process_group is None:
                raise ConfigError(
                    "register_comm_hook: a communication hook needs a process group of torch.",
                    seen="a paceline.Group",
                    hint='torch.distributed.init_process_group("paceline") makes one in shared memory',
                )

        self._register_hook(CommHook(state, hook), check, peers, peers.process_group)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; returns the norm that they had.

        Same result as `torch.nn.utils.clip_grad_norm_`. From the second call on, the norm that backward
        has computed is reused if no gradient has changed since. If a kernel or numpy has changed only a few
        elements of a gradient, this may go unnoticed.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; norms other than 2 are computed.
            scaler: The GradScaler, if gradients are still scaled by it: `max_norm` and the result are then
                those of unscaled gradients. Leave it out after `scaler.unscale_()`.

        Example:
            Rank 0's gradient is 6 and rank 1's 10: the norm is 8, and after clip_grad_norm_(2) both hold 2.
        """
        if not (type(max_norm) is type(norm_type) is float and max_norm >= 0 and norm_type > 0):
            max_norm, norm_type = checked_norms(max_norm, norm_type)
        if scaler is not None and not hasattr(scaler, "get_scale"):
            hint = "the GradScaler that scaled the loss, or None"
            raise Arguments("clip_grad_norm_").refuse("scaler", scaler, "a GradScaler", hint, is_type=True)
        scale = 1.0 if scaler is None else scaler.get_scale()
        norm = self._clip_by_known_norm(max_norm * scale, norm_type)
        if norm is None:
            return nn.utils.clip_grad_norm_(self._tensors.trainable, max_norm * scale, norm_type) / scale
        _, gradient = next(self._own_gradients(), (None, None))
        return torch.tensor(norm, device=None if gradient is None else gradient.device) / scale

    def will_sync_module_buffers(self) -> bool:
        """Whether a synchronised backward synchronises buffers."""
        return self._backward_sync is not None and self._backward_sync.buffers.is_needed

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch's process group, or None if a `paceline.Group` connects the ranks."""
        return None if self._peers is None else self._peers.process_group
