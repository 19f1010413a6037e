"""`SyncBatchNorm`: batch normalisation over the batches of all ranks, on the CPU too.

The one idea: two sums over ranks, each a step of Paddle's own graph whose gradient is again a sum over ranks.
All else is ordinary arithmetic, so Paddle derives the gradient. Batches may differ in size.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional

from paceline.arguments import Arguments
from paceline.paddle import internals
from paceline.paddle.link.link import Link
from paceline.paddle.link.peers import common_link
from paceline.paddle.model.arguments import checked_group, checked_layer


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over all ranks: a drop-in for `paddle.nn.SyncBatchNorm`, which needs a GPU.

    In training, forward and backward are collective. In a single process it is plain batch normalisation.

    Args:
        num_features: Channels.
        *arguments: As those of `paddle.nn.SyncBatchNorm`: momentum, epsilon, weight_attr, bias_attr,
            data_format, name.
        process_group: A group of paddle.distributed, or a `paceline.Group`; None: as `DataParallel` finds it.

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
        self._link: Link | None = None
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
        """Normalise `x` (channels in dimension 1, or last for data_format "NHWC") over all ranks' batches."""
        if not self._has_looked:
            self._link = common_link(self.process_group, on_host=x.place.is_cpu_place())
            self._has_looked = True
        settings, statistics = internals.norm_settings_of(self), internals.running_statistics_of(self)
        assert statistics is not None
        if self._link is not None and self.training and not settings.use_global_stats:
            return self._normalise(x, settings, statistics, self._link)
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

    def _normalise(
        self,
        x: paddle.Tensor,
        settings: internals.NormSettings,
        statistics: tuple[paddle.Tensor, paddle.Tensor],
        link: Link,
    ) -> paddle.Tensor:
        channel = x.ndim - 1 if _without_length(settings.data_format) == "NHWC" else 1
        axes = [axis for axis in range(x.ndim) if axis != channel]
        shape = [-1 if axis == channel else 1 for axis in range(x.ndim)]
        wide = x.astype("float64" if x.dtype == paddle.float64 else "float32")
        own_count = paddle.full([1], x.size / x.shape[channel], wide.dtype)
        sums = _SumOverRanks.apply(paddle.concat([wide.sum(axes), own_count]), link)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.reshape(shape)
        variance = _SumOverRanks.apply((centred**2).sum(axes), link) / count
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


class _SumOverRanks(paddle.autograd.PyLayer):
    """The sum over ranks. Its gradient is the sum of theirs, because each rank's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, link: Link) -> paddle.Tensor:
        ctx.link = link
        return _summed(x, link)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _summed(gradient, ctx.link)


def _summed(x: paddle.Tensor, link: Link) -> paddle.Tensor:
    result = x.detach().clone().contiguous()
    link.sum(result)
    return result


def _layout_for(dimensions: int, data_format: str) -> str:
    """The word that `functional.batch_norm` wants for a tensor of so many dimensions."""
    is_last = _without_length(data_format) == "NHWC"
    return {2: "NC", 3: "NLC" if is_last else "NCL", 4: "NHWC" if is_last else "NCHW"}.get(
        dimensions, "NDHWC" if is_last else "NCDHW"
    )


def _without_length(data_format: str) -> str:
    """The two words that `nn.SyncBatchNorm` knows for all numbers of dimensions."""
    return "NHWC" if data_format in ("NLC", "NHWC", "NDHWC") else "NCHW"
