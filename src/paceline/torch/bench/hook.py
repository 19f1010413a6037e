"""One backward on one rank: what a DistributedDataParallel adds to it is what its hooks cost."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.torch.bench.step import Step


class Backward(Step):
    """Times backward() alone.

    There is one rank, so nobody is waited for; what is left is to take each gradient, to copy it, to average
    it with nobody's, and to bring it back. The ways are those of `Step`, and: `empty`, a hook that does
    nothing; `torch_noop`, torch's with a communication hook that averages nothing.
    """

    BY_ITSELF = ("alone", "empty")

    def time(self, iterations: int) -> float:
        """Seconds in `iterations` backwards, after one that warms up."""
        spent = 0.0
        for number in range(iterations + 1):
            self._optimizer.zero_grad()
            loss = nn.functional.mse_loss(self._module(self._inputs), self._targets)
            start = time.perf_counter()
            torch.autograd.backward(loss)
            if number:
                spent += time.perf_counter() - start
        return spent

    def _wrap(self, module: nn.Module) -> nn.Module:
        if self._way == "empty":
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
            return module
        if self._way == "torch_noop":
            ddp = TorchDDP(module, **self._options)
            ddp.register_comm_hook(None, noop_hook)
            return ddp
        return super()._wrap(module)
