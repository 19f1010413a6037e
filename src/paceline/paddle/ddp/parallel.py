"""`DataParallel`: a layer that averages its gradients over the ranks during backward().

This file is the layer that users hold. The rest is in `model/config.py` (arguments), `model/parameters.py`
(the synchronised tensors), `communicator/find_peers.py` (the ranks) and `backward/autograd.py` (each
backward).
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import paddle
from paddle import nn

from paceline.arguments import Arguments
from paceline.ddp.wrapped_model import WrappedModel, checked_norms
from paceline.errors import ConfigError, PacelineError
from paceline.paddle.backward.autograd import PaddleBackwardSync, make_sync
from paceline.paddle.backward.collectives_in_backward import forwards
from paceline.paddle.backward.graphs import calls
from paceline.paddle.checkpoint import CHECKPOINT_OPS
from paceline.paddle.communicator.comm_hook import GradBucket
from paceline.paddle.communicator.connect import connect
from paceline.paddle.communicator.find_peers import LonePeers, Peers, find_peers, known_exchange
from paceline.paddle.communicator.form_group import membership_of_default_group
from paceline.paddle.ddp.paddle_names import PaddleNames, hide_paddles_own
from paceline.paddle.ddp.wrapped_twice import check_inner, check_outer
from paceline.paddle.model.arguments import check_views, checked_group, checked_layer
from paceline.paddle.model.config import DataParallelConfig, make_config
from paceline.paddle.model.mixed_precision import MixedPrecision, cast_buffers, check_castable, run_in
from paceline.paddle.model.parameters import ManagedTensors
from paceline.paddle.ops import OPS
from paceline.paddle.sharding.shared_storage import StateDictGuard
from paceline.reducer.backward.uneven_inputs import joining
from paceline.reducer.comm_hooks import CommHook, check_callable
from paceline.reducer.communicator import Communicator
from paceline.reducer.local_sgd.options import LocalSGD
from paceline.reducer.model_agreement import reporting_to_peers
from paceline.rendezvous.exchange import Exchange
from paceline.rendezvous.preflight import refuse_latecomers
from paceline.sharding.partial_steps import partial_steps
from paceline.sharding.shared_parameters import written
from paceline.trace.recording import recording

_DELAY = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")
_NORMS = (2.0, 1.0, 0.0, math.inf)
_NOT_OPTIONS = ("group", "process_group", "device_mesh", "strategy", "__class__", _DELAY[1])


@hide_paddles_own
class DataParallel(WrappedModel, PaddleNames):
    """Trains one model on several processes: a drop-in for `paddle.DataParallel`, with torch's arguments.

    Every rank wraps the same model and runs forward and backward on its own share of the batch. When
    backward() returns, every parameter's gradient is the mean over the ranks, with the same bits on each; or
    every rank has raised. Gradients are averaged in memory that the ranks of one host share. With several
    hosts, the sums of the hosts are exchanged over Gloo. On GPUs, gradients are averaged by
    paddle.distributed.

    Attributes and methods of the model are reached through the wrapper, except names that the wrapper has
    itself: `model.module.finish` is the model's own. If the model has a tensor `weight`, `model.weight` is
    that tensor; use the argument `weight` to weigh the mean. Parameters and buffers with `no_sync = True`,
    and buffers that are sparse tensors, are not synchronised.

    Collective: every rank constructs it, and runs the same number of synchronised backward passes.

    Args:
        layers: The model. Its parameters must not be added, replaced or unfrozen afterwards.
        strategy: Deprecated. As in Paddle, only its `nranks` counts: if it is 1, nothing is averaged, and a
            warning says so.
        comm_buffer_size: Largest size of a bucket, in MiB. In shared memory it changes no result.
        last_comm_buffer_size: Largest size of the bucket that is averaged first, in MiB.
        find_unused_parameters: Let a parameter that got no gradient contribute 0. Otherwise it raises an
            error on every rank; if no rank uses it, there is one warning instead, as replicas cannot differ.
            A parameter unused on all ranks keeps its gradient.
        group: A group of paddle.distributed, or a `paceline.Group`. None: the default group of
            paddle.distributed, or, if it is not initialised, one formed from the launcher's environment.
        device_ids: The device of the parameters, as the only entry, or None. Inputs stay where they are.
        output_device: The device of the parameters, or None.
        dim: 0, the only dimension along which a batch is shared.
        broadcast_buffers: Give every rank rank 0's buffers and running statistics, when wrapping and at the
            end of each synchronised backward. None: yes. A buffer that the program writes between two steps
            keeps the value of each rank in the next forward, as with Paddle's class; if the ranks have
            written different values, there is one warning.
        forward_sync_buffers: True: broadcast rank 0's buffers also at the start of the first forward in
            training mode after each synchronised backward. That forward is then collective. False: like
            broadcast_buffers=False. In both cases buffers are broadcast at construction. None:
            broadcast_buffers decides.
        init_sync: Give every rank rank 0's parameters when wrapping.
        process_group: Another name of `group`.
        bucket_cap_mb: Another name of `comm_buffer_size`; if both are passed, this one counts.
        gradient_as_bucket_view: Keep gradients in the memory where they are averaged, so that there is only
            one copy of them.
        static_graph: A promise that the same parameters are unused in each backward. Breaking it raises.
        check_reduction: Accepted without effect; these checks are always made.
        delay_all_reduce_named_params: (name, parameter) pairs whose gradients are averaged at the end of
            backward. Such a gradient may arrive several times, or not at all, which counts as zeros.
        param_to_hook_all_reduce: Accepted with the argument above, which waits for the end of backward.
        mixed_precision: A `MixedPrecision`: the dtypes in which forward runs, gradients are averaged and
            buffers are kept. Parameters and gradients keep their dtypes. With param_dtype, the model must not
            use recompute().
        device_mesh: A `paddle.distributed.ProcessMesh` of one dimension, instead of group.
        skip_all_reduce_unused_params: Over a group, don't send buckets that no rank used in the previous
            backward. If they are used again, they are sent at the end of the backward.
        bucket_cap_mb_list: Bucket sizes in MiB, one per bucket; the last applies to all further buckets.
            Replaces comm_buffer_size.
        batched_grad_copy: Accepted without effect; how gradients are copied changes no result.
        buffers: What to do with buffers and running statistics after each synchronised backward, by name
            pattern (`"*._mean"`): "average" them, "broadcast" those of rank 0, or leave them "local". The
            first match counts; broadcast_buffers decides if none matches. Integers are broadcast instead of
            averaged.
        weight: The weight of this rank's gradients in the average: a number, or a function of forward's
            arguments that returns one (for example the number of tokens). If a backward goes through several
            forwards, their weights add up. None: 1, unless weight() is called.
        nonfinite: What to do when a gradient holds an infinity or a NaN: "warn" (once), "raise" (on every
            rank) or "ignore".
        reduce_through: Where gradients are averaged: in "memory", which ranks on one host share; over the
            "group" of paddle.distributed; or "auto": if the model is on the CPU, in the memory of each host
            and then between at most 16 hosts; else over the group.
        timeout_s: Seconds, or a timedelta, to wait for the slowest rank; None: the time-out of a
            `paceline.Group`, else 1800. With reduce_through="group", Paddle's Gloo gives up after 30 s,
            whatever this is.
        warn_after_s: Seconds, or a timedelta, after which a warning names a late rank; None: 10.
        init_sync_buffers: Broadcast rank 0's buffers when wrapping. None: like broadcast_buffers.
        check_replicas_every: At the end of each n-th synchronised backward, compare the replicas, and raise
            on every rank if they differ; see check_replicas(). None: only if the ranks have written to
            their parameters a different number of times (one has skipped a step). 0: never.
        compress_between_hosts: "bf16", "fp16", "int8" or "topk": send gradients between hosts in fewer bytes,
            with error feedback, as with paceline.torch; on one host it does nothing. None: nothing is
            compressed.
        deterministic: "world": gradients have the bits of one host with as many ranks, wherever the ranks
            are, as with paceline.torch. On the CPU, without a hook. None: see `bits`.
        local_sgd: `LocalSGD(every=...)`: let hosts train on their own, and sync every so many steps. None:
            gradients are averaged over all ranks in each step.
        share_parameters: Keep one copy of the parameters for all ranks of a host, on the CPU, instead of one
            for each rank. The parameters are then read-only, except within writing(); a `ShardedOptimizer`
            needs no writing() for its steps.
        reduce: "mean": .grad is the mean on every rank. "scatter": each rank gets the part of the mean that
            its `ShardedOptimizer` needs, and less memory is written. Reading .grad then raises; clip with
            `model.clip_grad_norm_()`. All trained parameters must be in a ShardedOptimizer when the first
            forward begins. On the CPU, with all ranks on one host.
        virtual_ranks: Average each step over so many micro-batches, which up to as many processes compute:
            the same training, bit for bit, on any number of processes. Train with steps(). Implies
            deterministic="world". Gradients of 16 bits are added in float32, and the mean is rounded once.
            None: average over the ranks.

    Raises:
        ConfigError: An argument, or the model, is not supported; the message says which and why.
        ModelMismatchError: The ranks wrapped different models; names the first difference.

    Example:
        >>> model = DataParallel(nn.Linear(4, 1))
        >>> model(batch).sum().backward()   # rank 0's gradient was 1, rank 1's was 3: now 2 on both
    """

    _ops = OPS
    _checkpoint_ops = CHECKPOINT_OPS
    _tensors: ManagedTensors
    _backward_sync: PaddleBackwardSync | None
    _config: DataParallelConfig
    _has_looked_outward = False

    def __init__(
        self,
        layers: nn.Layer,
        strategy: Any = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Any = None,
        *,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        buffers: Mapping[str, str] | None = None,
        weight: float | Callable[..., Any] | None = None,
        nonfinite: str = "warn",
        reduce_through: str = "auto",
        timeout_s: float | timedelta | None = None,
        warn_after_s: float | timedelta | None = None,
        init_sync_buffers: bool | None = None,
        check_replicas_every: int | None = None,
        compress_between_hosts: str | None = None,
        deterministic: str | None = None,
        local_sgd: LocalSGD | None = None,
        share_parameters: bool = False,
        reduce: str = "mean",
        virtual_ranks: int | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "layers")}
        peers: Peers | None = None

        def known() -> tuple[Exchange, float] | None:
            if peers is not None:
                return peers.exchange, peers.timeout_s
            return known_exchange(process_group if group is None else group, device_mesh)

        with reporting_to_peers(known):
            self._prepare(layers, arguments)
            if not _asks_for_one_rank(strategy):
                times = self._config.timeout_s, self._config.warn_after_s
                peers = find_peers(self._arguments["group"], *times, device_mesh)
                refuse_latecomers(membership_of_default_group())
            self._peers = peers
            if peers is None and not self._tensors.is_trained:  # nothing to average, and no other rank
                return
            self._tensors.check_trainable()
            self._config.check_devices(self._tensors.place)
            # A single rank averages nothing and must pay nothing, but these arguments work on one rank, too.
            asked = weight, local_sgd, virtual_ranks
            if peers is None and (nonfinite == "raise" or any(each is not None for each in asked)):
                peers = LonePeers()
            if peers is not None:
                check_views("DataParallel")
        if peers is not None:
            self._peers = peers
            self._check_model(peers)
            self._backward_sync = self._begin_sync()
        recording.begin_if_batches_count(*((0, 1) if peers is None else (peers.rank, peers.world_size)))
        self._warn_of_unused_compression(0 if peers is None else peers.rank)

    def _prepare(self, layers: nn.Layer, arguments: dict[str, Any]) -> None:
        checked_layer("DataParallel", layers, "layers")
        # Not Paddle's constructor: its class is a base only so that other code recognises this class.
        nn.Layer.__init__(self, f"{layers.full_name()}_data_parallel")
        self._config = make_config(**{name: v for name, v in arguments.items() if name not in _NOT_OPTIONS})
        check_inner(layers)
        self._layers = layers
        self.find_unused_parameters = bool(arguments["find_unused_parameters"])
        self._peers = self._backward_sync = None
        process_group = checked_group("DataParallel", arguments["process_group"], "process_group")
        group = process_group if arguments["group"] is None else arguments["group"]
        self._tensors = ManagedTensors(layers)
        check_castable(self._tensors, self._config.precision)
        cast_buffers(self._tensors, self._config.precision)
        delayed = self._tensors.delay(*(arguments[name] for name in _DELAY))
        self._arguments = arguments | {"group": group, _DELAY[0]: delayed}

    def _ranks(self) -> Peers:
        return self._peers or LonePeers()

    def _make_communicator(self, peers: Peers) -> Communicator[paddle.Tensor]:
        check_views("DataParallel")
        return connect(
            peers,
            on_host=self._tensors.is_on_host,
            reduce_through=self._config.reduce_through,
            between_hosts=self._between_hosts(),
        )

    def _guard_model(self) -> None:
        for layer in self._layers.sublayers(include_self=True):
            layer.register_state_dict_hook(StateDictGuard(layer))

    def _make_sync(self, communicator: Any) -> PaddleBackwardSync:
        return make_sync(self._tensors, communicator, self._config)

    @staticmethod
    def _is_in_backward() -> bool:
        return bool(calls.depth)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped model; if gradients will be needed, prepare to average them.

        Raises:
            ConfigError: It is traced into a static graph, whose runs do not call forward any more, and an
                argument of the wrapper needs each forward: weight, local_sgd, forward_sync_buffers, or
                param_dtype.
        """
        if not paddle.in_dynamic_mode():
            self._check_traceable()
            return self._run(inputs, kwargs)
        if self._on_preemption is not None:
            self._call_if_preempted()
        if recording.has_batches and paddle.is_grad_enabled() and not calls.depth:
            recording.note_batch(inputs, kwargs)
        if self._storage is not None:
            self._storage.check_in_place()
        if partial_steps.marks:
            self._check_whole(self._tensors.all_parameters.values())
        if self._backward_sync is None:
            return self._run(inputs, kwargs)
        try:
            return self._forward(self._backward_sync, inputs, kwargs)
        except PacelineError as error:
            self._backward_sync.publish_error(error)
            raise
        finally:
            self._backward_sync.buffers.end_forward()

    def _forward(
        self, backward_sync: PaddleBackwardSync, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not paddle.is_grad_enabled():
            backward_sync.begin_untrained_forward()
            return self._run(inputs, kwargs)
        if calls.depth:  # recompute runs the model again, then backward
            output = self._run(inputs, kwargs)
            is_averaged = self._syncs_backward
            backward_sync.state.begin_forward(is_averaged, is_training=False, in_backward=True)
            backward_sync.micro_batches.begin_forward(self._weight_of(inputs, kwargs))
            backward_sync.watch(output)
            return output
        self._tensors.check_unchanged()
        if not self._has_looked_outward:
            check_outer()
            self._has_looked_outward = True
        if self._config.local_sgd is not None:
            backward_sync = self._begin_local_forward(backward_sync, is_training=self._layers.training)
        is_syncing = self._syncs_backward
        weight = None if self._config.weight is None else self._weight_of(inputs, kwargs)
        is_training = self._layers.training
        backward_sync.begin_forward(
            inputs, kwargs, is_syncing=is_syncing, is_training=is_training, weight=weight
        )
        output = self._run(inputs, kwargs)
        backward_sync.watch(output)
        if recording.note is not None:
            backward_sync.end_forward()
            if recording.keeps_all and not is_syncing:
                backward_sync.watch_local(output)
        return output

    def _check_traceable(self) -> None:
        """Refuse arguments that need each forward: a static graph is traced once, and its runs do not call
        forward.

        Without these arguments, a backward begins at the first gradient of a parameter, and works as usual.
        """
        config, needs = self._config, ""
        if config.precision.param_dtype is not None:
            needs = "param_dtype casts the parameters in each forward"
        elif config.weight is not None and self._layers.training:
            needs = "weight= gives each forward its weight"
        elif config.local_sgd is not None and self._layers.training:
            needs = "local_sgd counts forwards"
        elif config.syncs_forward and self._layers.training:
            needs = "forward_sync_buffers broadcasts buffers in each forward"
        if needs:
            raise ConfigError(
                f"{type(self).__name__}: forward is traced into a static graph, and {needs}.",
                likely="paddle.jit.to_static(..., full_graph=True), or jit.save(), around the wrapped model",
                hint="wrap the static model instead: DataParallel(paddle.jit.to_static(model)); or leave out "
                "full_graph=True; or, to save it, pass `.module`",
            )

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = self._config.precision.param_dtype
        outer, forwards.backward_sync = forwards.backward_sync, self._backward_sync
        try:
            if dtype is None:
                return self._layers(*inputs, **kwargs)
            return run_in(dtype, self._tensors, self._layers, inputs, kwargs)
        finally:
            forwards.backward_sync = outer

    def init_reducer(self) -> None:
        """Update the set of averaged parameters to those that the model trains now. Collective.

        Call it after parameters were added, replaced or unfrozen, and not inside a backward. No value is
        broadcast. After wrapping there is no need to call it.

        Raises:
            ConfigError: The model has no parameters to train.
            ModelMismatchError: The ranks have different models.
        """
        self._refuse_with_local_sgd("init_reducer() trains other parameters")
        if self._backward_sync is None and self._peers is None:  # alone
            return
        tensors = ManagedTensors(self._layers)
        tensors.check_trainable()
        tensors.delay(*(self._arguments[name] for name in _DELAY))
        self._tensors = tensors
        self._check_model(self._ranks())
        self._backward_sync = self._begin_again()
        if self._comm_hook is not None:
            self._backward_sync.use_hook(self._comm_hook, self.group)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which ranks may make different numbers of steps, like torch's; see also finish().

        A rank that leaves the context takes part in the others' backward passes, and blocks until all ranks
        have left it. Then all ranks have the model of a rank that made the most steps, and gradients are
        restored.

        Args:
            divide_by_initial_world_size: Divide sums of gradients by the number of all ranks; False: by the
                number of ranks that still have data.
            enable: False: the context has no effect.
            throw_on_early_termination: Raise on all ranks at the end of the first backward for which a rank
                had no more data.

        Raises:
            SkippedPassError: A rank had no more data, with throw_on_early_termination. Also a RuntimeError,
                as in torch.

        Example:
            Rank 0 has 3 batches and rank 1 has 5; the gradient of the last two steps is half of rank 1's:

            >>> with model.join():
            ...     for batch in batches:
            ...         train_step(batch)
        """
        divide, is_on, throws = self._check_join(
            "join()", divide_by_initial_world_size, enable, throw_on_early_termination
        )
        if not is_on or self._backward_sync is None:
            return contextlib.nullcontext()
        self._refuse_with_local_sgd(
            "join() counts the backward passes of all ranks; finish() and iterate() don't"
        )
        return joining(self._backward_sync, divide_by_all=divide, throws=throws)

    def register_comm_hook(self, state: object, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Average each bucket of gradients with a communication hook.

        Collective. Call it once for a wrapped model, and not inside a backward. Hooks that send fewer bits
        are in `paceline.paddle.compression`.

        Args:
            state: Passed to the hook unchanged.
            hook: Called as `hook(state, bucket)` when all gradients of a bucket are ready, not divided by
                the world size, on every rank in the same order. Returns the tensor that replaces
                `bucket.buffer()`, or a future of it. `bucket.all_reduce(tensor)` and `bucket.all_gather()`
                return such futures, and work in shared memory and over a group.

        Raises:
            RuntimeError: A hook was registered before.
            TypeError: It is not callable; or, in backward, does not return a tensor or a future of one.
            ValueError: The shape or dtype it returns is wrong.
            ModelMismatchError: Ranks registered different hooks.

        Example:
            >>> def hook(state, bucket):  # half the bytes on the wire
            ...     sums = bucket.all_reduce(bucket.buffer().astype("bfloat16"))
            ...     return sums.then(lambda f: f.value() / bucket.world_size)
            >>> model.register_comm_hook(None, hook)
        """
        hint = "paceline.paddle.compression has some"
        check = functools.partial(check_callable, returns="a tensor, or a future of one", hint=hint)
        self._register_hook(CommHook(state, hook), check, self._peers, self.group)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> paddle.Tensor:
        """Scale all dense gradients so that their norm is at most `max_norm`; returns the norm they had.

        Like `paddle.nn.utils.clip_grad_norm_`, but from the second call on it reuses the norm that backward
        has computed, unless gradients have changed since. It may miss a change of only a few elements by a
        kernel or numpy.

        Args:
            max_norm: The largest norm allowed.
            norm_type: 0, 1, 2 or infinity, as in Paddle; norms other than 2 are always computed.

        Example:
            Rank 0's gradient is 6 and rank 1's 10: the norm is 8, and after clip_grad_norm_(2) both hold 2.
        """
        if not (type(max_norm) is type(norm_type) is float and max_norm >= 0 and norm_type > 0):
            max_norm, norm_type = checked_norms(max_norm, norm_type)
        if norm_type not in _NORMS:
            expected, hint = "0, 1, 2 or math.inf, as Paddle has it", "norm_type=2.0"
            raise Arguments("clip_grad_norm_").refuse("norm_type", norm_type, expected, hint)
        norm = self._clip_by_known_norm(max_norm, norm_type)
        if norm is not None:
            return paddle.to_tensor(norm)
        found: paddle.Tensor = nn.utils.clip_grad_norm_(self._tensors.trainable, max_norm, norm_type)
        return found

    @property
    def weight(self) -> Any:
        """The method weight() of `WrappedModel`; if the model has a tensor of this name, that tensor."""
        own = getattr(self._layers, "weight", None)
        return own if isinstance(own, paddle.Tensor) else super().weight

    @property
    def module(self) -> nn.Layer:
        """The wrapped model; `_layers` is Paddle's name for it."""
        return self._layers

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_layers":
                raise
            return getattr(self._layers, name)

    # --- state_dict, under the wrapped model's own names ---

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        include_sublayers: bool = True,
        structured_name_prefix: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """The wrapped model's state_dict(). Its names have no prefix, so they are the same without the
        wrapper.

        Raises:
            TornStepError: The parameters hold half of an optimizer's step, in which a rank was lost.
        """
        self._check_whole(self._tensors.all_parameters.values())
        result: dict[str, Any] = self._layers.state_dict(
            destination=destination,
            include_sublayers=include_sublayers,
            structured_name_prefix=structured_name_prefix,
            **options,
        )
        return result

    def set_state_dict(
        self, state_dict: dict[str, Any], use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load values into the wrapped model. Collective with share_parameters=True: see writing().

        Args:
            state_dict: The values by name, as returned by state_dict().
            use_structured_name: Whether the keys are the model's names of its parameters, or each
                parameter's own `.name`.

        Returns:
            Missing keys and unexpected keys, like Layer.set_state_dict.

        Raises:
            ConfigError: An argument is of another kind.
        """
        check = Arguments("set_state_dict")
        if not isinstance(state_dict, Mapping):
            hint = "paddle.load(path) reads one from a file"
            raise check.refuse("state_dict", state_dict, "a state_dict", hint, is_type=True)
        use_structured_name = check.flag("use_structured_name", use_structured_name)
        with written(self._storage):
            result: tuple[list[str], list[str]] = self._layers.set_state_dict(
                state_dict, use_structured_name=use_structured_name
            )
        partial_steps.forget(self._tensors.all_parameters.values())
        return result

    set_dict = set_state_dict
    load_dict = set_state_dict

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            "DataParallel cannot be copied or pickled.",
            likely="it is connected to other ranks; Paddle's own class can't be copied either",
            hint="copy.deepcopy(model.module) copies the model, for an average of weights say; "
            "paddle.save(model.state_dict(), path) saves it",
        )

    # --- deprecated in Paddle ---

    def scale_loss(self, loss: paddle.Tensor) -> paddle.Tensor:
        """Return the loss as it is: deprecated and without effect, as in Paddle."""
        _warn_of_deprecated("scale_loss")
        return loss

    def apply_collective_grads(self) -> None:
        """Do nothing: deprecated and without effect, as in Paddle."""
        _warn_of_deprecated("apply_collective_grads")


def _asks_for_one_rank(strategy: Any) -> bool:
    if getattr(strategy, "nranks", 2) > 1:
        return False
    text = f"DataParallel averages nothing: strategy.nranks is {strategy.nranks}. Leave strategy out."
    warnings.warn(text, UserWarning, stacklevel=3)
    return True


def _warn_of_deprecated(name: str) -> None:
    text = f"DataParallel.{name}() does nothing: gradients are averaged by backward(). Remove the call."
    warnings.warn(text, DeprecationWarning, stacklevel=3)
