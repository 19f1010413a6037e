"""The process group that runs `torch.distributed` calls in memory that the ranks share.

A synchronous call runs in the caller's thread and returns a finished Work, which all such calls share. An
asynchronous call goes to the group's queue. The methods have torch's names and arguments, and each one
translates one call.
"""
# torch overloads these methods by argument types; this Python subclass has the signatures that torch calls.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import Store

from paceline.collectives import arrays
from paceline.collectives.call_queue import CallQueue
from paceline.errors import ConfigError
from paceline.torch.backend import broadcast_gather_scatter, reductions
from paceline.torch.backend.identity import NamedProcessGroup
from paceline.torch.backend.reductions import KERNELS, NO_KERNEL
from paceline.torch.backend.send_recv import AnySourceWork, Mailbox, TransferWork
from paceline.torch.backend.work import FINISHED, CallWork

if TYPE_CHECKING:
    from paceline._core import HostGroup

Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Options:
    asyncOp: bool = True
    reduceOp: Any = ReduceOp.SUM
    rootRank: int = 0
    timeout: timedelta = timedelta(seconds=-1)


@dataclass(frozen=True)
class _BackendOptions:
    _timeout: timedelta
    backend: str = "paceline"


DEFAULTS = _Options()
_SYNCHRONOUS = _Options(asyncOp=False)
ASYNC = "asyncOp"  # the options of torch 2.6 lack it: there torch itself waits for a synchronous call


class PacelineProcessGroup(NamedProcessGroup):
    """A torch process group whose ranks are the processes of one host.

    `torch.distributed.init_process_group("paceline")` and `new_group()` create it, not users.
    """

    def __init__(self, core: HostGroup, store: Store, timeout_s: float) -> None:
        super().__init__(core.rank, core.world_size, store)
        self._core = core
        self._core_all_reduce = core.all_reduce  # looked up once: a look-up costs time in the shortest calls
        self._timeout_s = timeout_s
        # Inference mode can write to any tensor: to one that requires a gradient, and to inference tensors.
        self._queue = CallQueue(f"{core.name}, rank {core.rank}", torch.inference_mode)
        self._mailbox = Mailbox(core, self._queue)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def options(self) -> _BackendOptions:
        return _BackendOptions(timedelta(seconds=self._timeout_s))

    # --- reductions ---

    def allreduce(self, tensors: Tensors, opts: Any = DEFAULTS) -> Work:
        # Most calls take this path, so it has the least Python: a synchronous call on a contiguous tensor.
        op = opts.reduceOp
        if not getattr(opts, ASYNC, True) and self._queue.newest is None and len(tensors) == 1:
            tensor = tensors[0]
            number, ops = KERNELS.get(tensor.dtype, NO_KERNEL)
            code = ops.get(hash(op))
            try:
                pointer = tensor.data_ptr()
            except RuntimeError:  # a sparse tensor, which the code below handles
                pointer = 0
            if pointer and code is not None and tensor.is_contiguous():
                self._core_all_reduce(pointer, tensor.numel(), number, code, 1.0, self._timeout_s)
                return FINISHED
        return self._make(opts, reductions.all_reduce(self._core, tensors, op, self._timeout_s), tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = DEFAULTS) -> Work:
        call = reductions.all_reduce(self._core, tensors, opts.reduceOp, self._timeout_s)
        return self._make(opts, call, tensors)

    def reduce(self, tensors: Tensors, opts: Any = DEFAULTS) -> Work:
        call = reductions.reduce(self._core, _only(tensors), opts.reduceOp, opts.rootRank, self._timeout_s)
        return self._make(opts, call, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = DEFAULTS) -> Work:
        call = reductions.reduce_scatter(
            self._core, _only(outputs), _only(inputs), opts.reduceOp, self._timeout_s
        )
        return self._make(opts, call, outputs)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = DEFAULTS) -> Work:
        call = reductions.reduce_scatter_single(self._core, output, source, opts.reduceOp, self._timeout_s)
        return self._make(opts, call, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULTS
    ) -> Work:
        one = partial(reductions.reduce_scatter_single, op=opts.reduceOp, timeout_s=self._timeout_s)
        calls = [one(self._core, *pair) for pair in zip(outputs, inputs, strict=True)]
        return self._make(opts, reductions.in_turn(calls), outputs)

    # --- broadcast, gather, scatter ---

    def broadcast(self, tensors: Tensors, opts: Any = DEFAULTS) -> Work:
        call = broadcast_gather_scatter.broadcast(self._core, tensors, opts.rootRank, self._timeout_s)
        return self._make(opts, call, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = DEFAULTS) -> Work:
        call = broadcast_gather_scatter.all_gather(self._core, _only(outputs), _only(inputs), self._timeout_s)
        work = self._make(opts, call, outputs[0])
        if isinstance(work, CallWork):
            # One tensor with the outputs of all ranks, as in NCCL's future: torch's quantization hooks
            # rely on it.
            work.deliver = lambda: [torch.stack(tuple(outputs[0]))]
        return work

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = DEFAULTS
    ) -> Work:
        per_input = zip(*output_lists, strict=True)
        calls = [
            broadcast_gather_scatter.all_gather(self._core, outputs, source, self._timeout_s)
            for outputs, source in zip(per_input, inputs, strict=True)
        ]
        return self._make(opts, reductions.in_turn(calls), [t for tensors in output_lists for t in tensors])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = DEFAULTS) -> Work:
        call = broadcast_gather_scatter.all_gather_single(self._core, output, source, self._timeout_s)
        return self._make(opts, call, [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULTS) -> Work:
        calls = [
            broadcast_gather_scatter.all_gather_single(self._core, output, source, self._timeout_s)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self._make(opts, reductions.in_turn(calls), outputs)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = DEFAULTS) -> Work:
        targets = outputs[0] if outputs else []
        call = broadcast_gather_scatter.gather(
            self._core, targets, _only(inputs), opts.rootRank, self._timeout_s
        )
        return self._make(opts, call, targets)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = DEFAULTS) -> Work:
        sources = inputs[0] if inputs else []
        call = broadcast_gather_scatter.scatter(
            self._core, _only(outputs), sources, opts.rootRank, self._timeout_s
        )
        return self._make(opts, call, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = DEFAULTS) -> Work:
        return self._make(
            opts, broadcast_gather_scatter.all_to_all(self._core, outputs, inputs, self._timeout_s), outputs
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = DEFAULTS,
    ) -> Work:
        call = broadcast_gather_scatter.all_to_all_single(
            self._core, output, source, output_splits, input_splits, self._timeout_s
        )
        return self._make(opts, call, [output])

    # The names of torch before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages and barriers ---

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> TransferWork:
        return self._mailbox.send(_only(tensors), destination, tag, self._timeout_s)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> TransferWork:
        return self._mailbox.receive(_only(tensors), source, tag, self._timeout_s)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnySourceWork:
        return AnySourceWork(self._mailbox, _only(tensors), tag, self._timeout_s)

    def barrier(self, opts: Any = DEFAULTS, timeout: timedelta | None = None) -> Work:
        seconds = (opts.timeout if timeout is None else timeout).total_seconds()
        timeout_s = seconds if seconds > 0 else self._timeout_s
        return self._make(opts, partial(self._core.barrier, timeout_s), [])

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """torch 2.15 calls this on any group."""
        self.barrier(timeout=timeout).wait()

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: coalescing calls into one would save too little."""

    def _end_coalescing(self, device: torch.device) -> Work:
        return FINISHED if self._queue.is_empty() else self._queued(_nothing, [])

    def _make(self, opts: Any, call: Callable[[], None], results: Tensors) -> Work:
        if getattr(opts, ASYNC, True) or not self._queue.is_empty():
            return self._queued(call, results)
        call()
        return FINISHED

    def _queued(self, call: Callable[[], None], results: Tensors) -> CallWork:
        work = CallWork(call, list(results))
        self._queue.submit(work)
        return work

    # --- memory ---

    def allocate(self, nbytes: int) -> arrays.Array:
        """Collective."""
        made: list[arrays.Array] = []

        def call() -> None:
            made.append(arrays.allocate(self._core, (nbytes,), np.dtype(np.uint8), self._timeout_s))

        self._make(_SYNCHRONOUS, call, ()).wait()
        return made[0]

    # --- the end ---

    def shutdown(self) -> None:
        """Later calls raise GroupClosedError."""
        self._queue.close()
        self._core.close()

    def abort(self) -> None:
        """The other ranks' calls raise."""
        self._core.abort("torch.distributed aborted the process group on this rank")
        self.shutdown()


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise ConfigError(
            "torch's multi-device collectives are not served.",
            expected="one tensor per rank (or one list of them)",
            got=f"{len(tensors)}",
            hint="start one process per device",
        )
    return tensors[0]


def _nothing() -> None:
    pass
