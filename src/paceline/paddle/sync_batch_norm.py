"""`SyncBatchNorm`: batch normalisation over the batches of all ranks, on the CPU too.

It takes two sums over ranks. Each is an operation of Paddle's graph whose gradient is again a sum over ranks.
Everything else is ordinary arithmetic, for which Paddle derives the gradient. Gradients that cross ranks are
scaled for the weights that a wrapped model gives to its ranks (`reducer.backward.collectives_in_backward`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import paddle
from paddle import nn
from paddle.nn import functional

from paceline.arguments import Arguments
from paceline.errors import ConfigError, PacelineError
from paceline.paddle import internals
from paceline.paddle.backward.collectives_in_backward import forwards
from paceline.paddle.backward.graphs import keep_as_it_is, raise_after_backward, watch_backwards
from paceline.paddle.communicator.connect import common_communicator
from paceline.paddle.model.arguments import checked_group, checked_layer
from paceline.reducer.backward.collectives_in_backward import ExchangeWeight
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.communicator import Communicator


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over all ranks: a drop-in for `paddle.nn.SyncBatchNorm`, which needs a GPU.

    In training, forward and backward are collective. They wait at most for the `timeout_s` of the wrapped
    model that the layer is in or, without one, for the group's time-out. In a single process it is plain
    batch normalisation. With `weight` of a wrapped model, gradients are those of the weighted mean of the
    ranks' losses, through the statistics too. It does not support `finish()` and `iterate()` if ranks end at
    different times.

    Raises:
        ValueError: In backward, on every rank: a rank has weight 0 and samples in the batch. Or on this rank:
            another rank's forward ran without gradients.

    Args:
        num_features: Number of channels.
        *arguments: The arguments of `paddle.nn.SyncBatchNorm`: momentum, epsilon, weight_attr, bias_attr,
            data_format, name.
        process_group: A group of paddle.distributed, or a `paceline.Group`; None: chosen as by
            `DataParallel`.

    Example:
        Rank 0 has a batch of [0, 2], rank 1 one of [4, 6]: all four are normalised with a mean of 3.
    """

    def __init__(self, num_features: int, *arguments: Any, process_group: Any = None, **options: Any) -> None:
        check = Arguments("SyncBatchNorm")
        names = ("momentum", "epsilon")
        for name, value in [*zip(names, arguments), *options.items()]:
            if name in names:
                check.number(name, value, least=0)
        super().__init__(check.whole("num_features", num_features, least=1), *arguments, **options)
        self.process_group = checked_group("SyncBatchNorm", process_group, "process_group")
        self._communicator: Communicator[paddle.Tensor] | None = None
        self._has_looked = False

    @classmethod
    def convert_sync_batchnorm(cls, layer: nn.Layer, process_group: Any = None) -> nn.Layer:
        """Replace every BatchNorm within `layer` by a SyncBatchNorm with its parameters and statistics.

        Returns:
            `layer`, or its replacement if it is itself a BatchNorm.
        """
        checked_layer("convert_sync_batchnorm", layer, "layer")
        checked_group("convert_sync_batchnorm", process_group, "process_group")
        if isinstance(layer, (nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D)):
            return cls._converted(layer, process_group)
        for name, child in layer.named_children():
            converted = cls.convert_sync_batchnorm(child, process_group)
            if converted is not child:
                layer.add_sublayer(name, converted)
        return layer

    @classmethod
    def _converted(cls, layer: nn.Layer, process_group: Any) -> SyncBatchNorm:
        old = internals.norm_settings_of(layer)
        layout = _without_length(old.data_format)
        made = cls(
            old.num_features,
            old.momentum,
            old.epsilon,
            old.weight_attr,
            old.bias_attr,
            layout,
            process_group=process_group,
        )
        made.weight, made.bias = layer.weight, layer.bias
        statistics = internals.running_statistics_of(layer)
        if statistics is not None:
            internals.set_running_statistics(made, *statistics)
        internals.use_global_stats(made, old.use_global_stats)
        made.training = layer.training
        return made

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Normalise `x` (channels in dimension 1, or last for data_format "NHWC") over all ranks' batches.

        Raises:
            ConfigError: In training with several ranks, it is traced into a static graph.
        """
        settings, statistics = internals.norm_settings_of(self), internals.running_statistics_of(self)
        assert statistics is not None
        if self.training and not settings.use_global_stats:
            communicator = self._find_communicator(x)
            if communicator is not None:
                return self._normalise(x, settings, statistics, communicator)
        return functional.batch_norm(
            x,
            *statistics,
            self.weight,
            self.bias,
            training=self.training,
            momentum=settings.momentum,
            epsilon=settings.epsilon,
            data_format=_layout_for(x.ndim, settings.data_format),
            use_global_stats=settings.use_global_stats,
        )

    @internals.untranslated
    def _find_communicator(self, x: paddle.Tensor) -> Communicator[paddle.Tensor] | None:
        is_traced = not paddle.in_dynamic_mode()
        if not self._has_looked:
            on_host = paddle.get_device() == "cpu" if is_traced else x.place.is_cpu_place()
            self._communicator = common_communicator(self.process_group, on_host=on_host)
            self._has_looked = True
        if self._communicator is not None and is_traced:
            raise ConfigError(
                "SyncBatchNorm: a static graph cannot exchange sums with other ranks.",
                seen="training, with several ranks, traced by paddle.jit.to_static(..., full_graph=True)",
                hint="leave out full_graph=True: then the graph ends at each SyncBatchNorm, and another one "
                "begins after it; or model.eval() before a model is saved",
            )
        return self._communicator

    def _timeout_s(self) -> float | None:
        if forwards.backward_sync is not None:
            return forwards.backward_sync.asked_timeout_s
        # Called outside of a wrapped forward, for example recomputed in a backward.
        return registry.timeout_of([each for each in (self.weight, self.bias) if each is not None])

    @internals.untranslated
    def _normalise(
        self,
        x: paddle.Tensor,
        settings: internals.NormSettings,
        statistics: tuple[paddle.Tensor, paddle.Tensor],
        communicator: Communicator[paddle.Tensor],
    ) -> paddle.Tensor:
        channel = x.ndim - 1 if _without_length(settings.data_format) == "NHWC" else 1
        axes = [axis for axis in range(x.ndim) if axis != channel]
        shape = [-1 if axis == channel else 1 for axis in range(x.ndim)]
        wide = x.astype("float64" if x.dtype == paddle.float64 else "float32")
        own = wide.sum(axes)
        timeout_s = self._timeout_s()
        total, count, exchange = _first_sum(x, own, x.size // x.shape[channel], communicator, timeout_s)
        mean = _part_of_graph(own, total, exchange) / count
        centred = wide - mean.reshape(shape)
        spread = (centred**2).sum(axes)
        variance = _part_of_graph(spread, _summed(spread, communicator, timeout_s), exchange) / count
        with paddle.no_grad():
            for running, new in zip(statistics, (mean, variance)):
                kept = settings.momentum * running + (1 - settings.momentum) * new.astype(running.dtype)
                paddle.assign(kept, running)
        result = centred * (variance + settings.epsilon).rsqrt().reshape(shape)
        if self.weight is not None:
            result = result * self.weight.reshape(shape)
        if self.bias is not None:
            result = result + self.bias.reshape(shape)
        return result.astype(x.dtype)


class _Exchange(NamedTuple):
    communicator: Communicator[paddle.Tensor]
    timeout_s: float | None
    weight: ExchangeWeight
    without_backward: int
    samples: str


def _first_sum(
    x: paddle.Tensor,
    own: paddle.Tensor,
    count: int,
    communicator: Communicator[paddle.Tensor],
    timeout_s: float | None,
) -> tuple[paddle.Tensor, paddle.Tensor, _Exchange | None]:
    """The sums and the count over ranks, and the exchange for their backward; None: no rank has a backward.
    Collective.

    If some rank's input needs a gradient, all ranks take part in its backward; else none does. So each rank
    sends beside its sums whether its own input needs one. On a device, reading that flag would wait for the
    device, so there all ranks take part.
    """
    has_gradients = paddle.is_grad_enabled()
    needs_gradient = has_gradients and not own.stop_gradient
    said = paddle.to_tensor([count, needs_gradient, not has_gradients], own.dtype, own.place)
    total = _summed(paddle.concat([own.detach(), said]), communicator, timeout_s)
    needed, without = total[-2:].tolist() if x.place.is_cpu_place() else (1, 0)
    if without:
        watch_backwards()
    sums, whole_count = total[:-3], total[-3]
    if not has_gradients or not needed:
        return sums, whole_count, None
    samples = f"input of shape {x.shape}" if count else ""
    weight = ExchangeWeight("SyncBatchNorm", forwards.weights, internals.grad_node(x))
    return sums, whole_count, _Exchange(communicator, timeout_s, weight, int(without), samples)


def _part_of_graph(own: paddle.Tensor, total: paddle.Tensor, exchange: _Exchange | None) -> paddle.Tensor:
    if exchange is None:
        return total
    if own.stop_gradient:  # this rank takes part in the backward of the others
        own = own.detach()
        own.stop_gradient = False
    result: paddle.Tensor = _SumOverRanks.apply(own, exchange, lambda: total)
    return result


class _SumOverRanks(paddle.autograd.PyLayer):
    """The sum over ranks. Its gradient is the sum of the ranks' gradients, because each rank's loss depends
    on it.

    Collective in backward: every rank has this operation in its graph, or none.
    """

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, exchange: _Exchange, total: Callable[[], Any]) -> paddle.Tensor:
        ctx.exchange = exchange
        return total()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        if not paddle.is_grad_enabled():
            return _weighted_sum(gradient, ctx.exchange)
        # With create_graph=True, this sum is an operation of the graph, too, on every rank.
        return _part_of_graph(gradient, _weighted_sum(gradient, ctx.exchange), ctx.exchange)


def _weighted_sum(gradient: paddle.Tensor, exchange: _Exchange) -> paddle.Tensor:
    if exchange.without_backward:
        error = ConfigError(
            "SyncBatchNorm: this backward needs the gradients of ranks whose forward ran without any.",
            seen=f"paddle.no_grad() around forward on {exchange.without_backward} of the other ranks",
            hint="run forward and backward in the same mode on every rank; or evaluate with model.eval()",
        )
        raise_after_backward(error)
        return paddle.zeros_like(gradient)

    def sum_over_ranks(own: paddle.Tensor) -> paddle.Tensor:
        try:
            return _summed(own, exchange.communicator, exchange.timeout_s)
        except PacelineError as error:
            keep_as_it_is(error)
            raise

    total: paddle.Tensor = exchange.weight.sum(gradient, sum_over_ranks, paddle.zeros_like, exchange.samples)
    return total


def _summed(
    x: paddle.Tensor, communicator: Communicator[paddle.Tensor], timeout_s: float | None
) -> paddle.Tensor:
    result = x.detach().clone().contiguous()
    communicator.sum(result, timeout_s)
    return result


def _layout_for(dimensions: int, data_format: str) -> str:
    is_last = _without_length(data_format) == "NHWC"
    return {2: "NC", 3: "NLC" if is_last else "NCL", 4: "NHWC" if is_last else "NCHW"}.get(
        dimensions, "NDHWC" if is_last else "NCDHW"
    )


def _without_length(data_format: str) -> str:
    return "NHWC" if data_format in ("NLC", "NHWC", "NDHWC") else "NCHW"
