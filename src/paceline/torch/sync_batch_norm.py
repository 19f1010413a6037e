"""`SyncBatchNorm`: batch norm over the batches of all ranks, on any device, including the CPU.

Ranks exchange mean, variance and number of samples in forward, and the gradients of these in backward. All
other computation is ordinary tensor arithmetic, so backward is correct for batches of different sizes, and so
are second derivatives. Gradients that cross ranks have the weights that a wrapped model gives to its ranks
(`reducer.backward.collectives_in_backward`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.arguments import Arguments
from paceline.collectives.group import Group
from paceline.errors import ConfigError, format_ranks
from paceline.reducer.backward.collectives_in_backward import ExchangeWeight
from paceline.reducer.backward.micro_batch_weights import MicroBatchWeights
from paceline.reducer.backward.models_sharing_parameters import registry
from paceline.reducer.communicator import Communicator
from paceline.torch.communicator.calls import Patience, exchange_over, keep
from paceline.torch.communicator.find_peers import formed_group
from paceline.torch.model.arguments import checked_group, checked_module
from paceline.torch.model.torch_compile import untraced

_WHAT = "the statistics of SyncBatchNorm"
_NO_GRADIENTS, _NEEDS_NONE, _NEEDS_GRADIENT = 0, 1, 2


class _Exchange(NamedTuple):
    """The data that the backward of one forward needs.

    Attributes:
        group: The process group of the ranks; or the communicator between them, in shared memory.
        patience: How to wait for other ranks.
        weight: The factor of this rank's gradients before they are sent.
        without_backward: Ranks whose forward ran without gradients.
        rows: A description of this rank's input, for errors; "": it has no samples.
    """

    group: Any
    patience: Patience
    weight: ExchangeWeight
    without_backward: list[int]
    rows: str


class _RowsOfAllRanks(torch.autograd.Function):
    """The rows of all ranks, in rank order; backward gives each rank the sum of its row's gradients.

    Collective in backward: every rank has this node in its graph, or none.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, row: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        group = ctx.exchange.group
        rank = dist.get_rank(group) if isinstance(group, dist.ProcessGroup) else group.rank
        return None, _weighted_sum(ctx.exchange, gradient, rank), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, value: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        group = exchange.group
        if isinstance(group, Group):
            on_host = value.detach().cpu().contiguous().clone()
            group.all_reduce(on_host.numpy(), timeout_s=exchange.patience.timeout_s)
            return on_host.to(value.device)
        total = value.detach().contiguous().clone()
        if isinstance(group, Communicator):
            group.sum(total, exchange.patience.timeout_s)
            return total
        keep(total)
        exchange_over(
            group,
            lambda is_async: dist.all_reduce(total, group=group, async_op=is_async),
            _WHAT,
            exchange.patience,
            total.device,
        )
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _weighted_sum(ctx.exchange, gradient)


def _weighted_sum(exchange: _Exchange, gradient: torch.Tensor, row: int | None = None) -> torch.Tensor:
    """The sum of all ranks' gradients, each times its rank's weight, in units of this rank's weight."""
    if exchange.without_backward:
        who = format_ranks(exchange.without_backward)
        raise ConfigError(
            f"SyncBatchNorm: this backward needs the gradients of {who}, where forward ran without any.",
            seen=f"torch.no_grad() or inference_mode() around forward on {who} only",
            hint="run forward and backward in the same mode on every rank; or evaluate with model.eval()",
        )
    total: torch.Tensor = exchange.weight.sum(
        gradient, functools.partial(_SumOverRanks.apply, exchange), torch.zeros_like, exchange.rows, row
    )
    return total


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm with the statistics of the batches of all ranks together; also on the CPU.

    A drop-in for `torch.nn.SyncBatchNorm`, with its arguments, attributes and state_dict. Batches may have
    different sizes on different ranks, and may be empty on some. In eval mode, or on a single rank, it is
    batch norm. With `weight` of a wrapped model, gradients are those of the weighted mean of the ranks'
    losses, also through the statistics. It does not work with `finish()`, `iterate()` and `join()` if ranks
    end at different times.

    Collective: forward in training mode, and its backward. Blocks until all ranks have arrived, at most for
    the `timeout_s` of the wrapped model that the layer is in; without one, for the group's own time-out.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: As in torch.
        process_group: A process group of torch or a `paceline.Group`. None: torch's default group, or the
            group that `DistributedDataParallel` formed from the environment.

    Raises:
        ValueError: All ranks together have a single value per channel. In backward, on every rank: a rank has
            weight 0 and samples in the batch. In backward, on this rank: the forward of another rank ran
            without gradients.

    Example:
        >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
        >>> model = DistributedDataParallel(model)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        check = Arguments("SyncBatchNorm")
        super().__init__(
            check.whole("num_features", num_features, least=1),
            check.number("eps", eps, least=0),
            None if momentum is None else check.number("momentum", momentum),
            check.flag("affine", affine),
            check.flag("track_running_stats", track_running_stats),
            device=device,
            dtype=dtype,
        )
        self.process_group = checked_group("SyncBatchNorm", process_group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise each channel (dimension 1) by the statistics of all ranks.

        Args:
            input: Shape (batch, channels, ...), floating. 16-bit types are summed in float32.
        """
        group = _group(self.process_group) if self.training else None
        if group is None:
            return self._alone(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, variance, count = _statistics(self, group, input)
        self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1, *[1] * (input.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        centred = input - mean.view(shape)
        if self.bias is None:
            return (centred * scale.view(shape)).to(input.dtype)
        return torch.addcmul(self.bias.to(scale.dtype).view(shape), centred, scale.view(shape)).to(
            input.dtype
        )

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        # torch's plain batch norm. torch's own forward refuses the CPU only if it would synchronise.
        return nn.BatchNorm2d.forward(cast("Any", _AnyDimension(self)), input)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        step = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), step)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), step)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """The module with every batch norm in it replaced by one of this class; parameters are kept.

        Args:
            module: A module of any kind; a batch norm itself is replaced by the result.
            process_group: As the constructor's.
        """
        owner = "convert_sync_batchnorm"
        group = checked_group(owner, process_group)
        return _convert(cls, checked_module(owner, module), group, {})


class _AnyDimension:
    def __init__(self, module: nn.SyncBatchNorm) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _convert(
    cls: type[SyncBatchNorm], module: nn.Module, group: Any, done: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in done:  # a module that is used in two places stays one module
        return done[id(module)]
    new = module
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        new = cls(
            module.num_features,
            module.eps,
            module.momentum,
            module.affine,
            module.track_running_stats,
            process_group=group,
        )
        new._parameters.update(module._parameters)
        new._buffers.update(module._buffers)
        new.train(module.training)
    done[id(module)] = new
    for name, child in module._modules.items():
        if child is not None:
            new._modules[name] = _convert(cls, child, group, done)
    return new


def _group(given: Any) -> Any:
    group = given
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        group = formed_group()
    if group is None:
        return None
    size = group.world_size if isinstance(group, Group) else group.size()
    return group if size > 1 else None


def _group_and_patience(layer: nn.Module, group: Any, device: torch.device) -> tuple[Any, Patience]:
    """The group or communicator for the statistics, and how to wait for other ranks.

    Ranks that share memory exchange the statistics there, which detects at once that ranks are in different
    calls.
    """
    wrapper: Any = TorchDDP._active_ddp_module
    backward_sync = getattr(wrapper, "_backward_sync", None)
    if backward_sync is None:  # called outside of a wrapped forward, for example recomputed in a backward
        return group, Patience(registry.timeout_of(layer._parameters.values()), None)
    communicator, timeout_s = backward_sync.communicator, backward_sync.asked_timeout_s
    if wrapper.process_group is not group:
        return group, Patience(timeout_s, None)
    if communicator.path == "memory" and device.type == "cpu":
        return communicator, Patience(timeout_s, None)
    return group, Patience(timeout_s, communicator.peer_monitor)


def _statistics(
    layer: nn.Module, group: Any, input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and number of samples of each channel, over all ranks.

    Ranks send their own mean and variance, and not sums of squares, which would cancel if a mean is large.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """
    dims = [dim for dim in range(input.dim()) if dim != 1]
    channels = input.shape[1]
    values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    if values.numel():
        variance, mean = torch.var_mean(values, dims, correction=0)
    else:  # nothing to add, but the other ranks wait for this one, also in backward
        mean = variance = values.sum(dims)
    own = mean.new_full((1,), values.numel() // channels)
    rows = _gathered(layer, group, torch.cat([mean, variance, own]), input)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:].detach()
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    whole = (shares * means).sum(0)
    spread = (shares * (variances + (means - whole).square())).sum(0)
    return whole, spread, total


@untraced
def _gathered(layer: nn.Module, group: Any, row: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks. In the graph of every rank if any rank's row needs a gradient. Collective.

    Raises:
        ValueError: All ranks together have a single value per channel.
    """
    need = _NO_GRADIENTS
    if torch.is_grad_enabled():
        need = _NEEDS_GRADIENT if row.requires_grad else _NEEDS_NONE
    group, patience = _group_and_patience(layer, group, row.device)
    gathered = _all_gather(group, patience, torch.cat([row.detach(), row.new_full((1,), need)]))
    rows = gathered[:, :-1]
    counts_and_needs: list[list[float]] = gathered[:, -2:].tolist()
    count = sum(int(each) for each, _ in counts_and_needs)
    if count < 2:
        raise ConfigError(
            "SyncBatchNorm: Expected more than 1 value per channel when training.",
            got=f"input of shape {tuple(input.shape)} on this rank, {count} over all ranks",
        )
    needs = [each for _, each in counts_and_needs]
    if need == _NO_GRADIENTS or _NEEDS_GRADIENT not in needs:
        return rows
    exchange = _Exchange(
        group,
        patience,
        ExchangeWeight("SyncBatchNorm", _weights_around(), row.grad_fn),
        [rank for rank, each in enumerate(needs) if each == _NO_GRADIENTS],
        f"input of shape {tuple(input.shape)}" if input.numel() else "",
    )
    if not row.requires_grad:  # this rank takes part in the backward of the others
        row = row.detach().requires_grad_()
    found: torch.Tensor = _RowsOfAllRanks.apply(exchange, row, rows)  # type: ignore[no-untyped-call]
    return found


def _weights_around() -> MicroBatchWeights | None:
    """The weights of the wrapped model whose forward runs; None: no model runs, or it averages nothing."""
    wrapper: Any = TorchDDP._active_ddp_module
    backward_sync = getattr(wrapper, "_backward_sync", None)  # None: torch's own wrapper, or a single rank's
    if backward_sync is None or not wrapper._tensors.are_trained():
        return None
    weights: MicroBatchWeights = backward_sync.micro_batches
    return weights


def _all_gather(group: Any, patience: Patience, row: torch.Tensor) -> torch.Tensor:
    if isinstance(group, Communicator):
        return torch.from_numpy(group.gather(row.numpy()))
    if isinstance(group, Group):
        rows_on_host = group.all_gather(row.cpu().numpy(), timeout_s=patience.timeout_s)
        return torch.from_numpy(rows_on_host).to(row.device)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    keep(row, *rows)
    exchange_over(
        group,
        lambda is_async: dist.all_gather(rows, row, group=group, async_op=is_async),
        _WHAT,
        patience,
        row.device,
        is_read=True,  # the numbers of samples
    )
    return torch.stack(rows)
