"""One training step of a model: alone, in torch's DistributedDataParallel, and in Paceline's.

A step is what users write: zero_grad(), forward, loss, backward(), SGD. Before anything is timed, gradients
are compared with the mean over all ranks' batches, computed here without communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.workers.all_reduce import time_calls
from benchmarks.workers.torch_models import (
    MODELS,
    WIDE_BYTES,
    WIDE_INPUTS,
    Model,
    form_group,
    narrow,
    wide,
    wrap,
)

_NEVER_NS = 1 << 60


class Step:
    """A rank of a training.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        variant: `alone`, without other ranks; `torch` or `paceline` for their DDP.
        options: Further arguments of the DDP.
    """

    BY_ITSELF: ClassVar[tuple[str, ...]] = ("alone",)

    def __init__(self, rank: int, world_size: int, variant: str, **options: Any) -> None:
        self._rank = rank
        self._world_size = world_size
        self._variant = variant
        self._options = options
        self._averages = variant not in self.BY_ITSELF
        if self._averages:
            form_group("gloo", rank, world_size)

    def prepare(self, model: str) -> dict[str, Any]:
        """Build and wrap the model and check one backward; return its size and its gradients' digest."""
        plan = MODELS[model]
        self._module = self._wrap(plan.seeded())
        self._take_batches(plan)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._backward()
        gradients = [parameter.grad for parameter in self._module.parameters() if parameter.grad is not None]
        ranks = list(range(self._world_size)) if self._averages else [self._rank]
        _check_close(gradients, plan, [batch for rank in ranks for batch in self._batches_of(rank)])
        return {
            "parameters": sum(parameter.numel() for parameter in self._module.parameters()),
            "tensors": len(gradients),
            "digest": digest_of(gradients),
        }

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` steps, after one untimed step that synchronizes the ranks."""
        return time_calls(self._step, iterations)

    def _take_batches(self, plan: Model) -> None:
        self._inputs, self._targets = plan.batch_of(self._rank)

    def _batches_of(self, rank: int) -> range:
        """The numbers of the batches from which a rank's gradients are computed."""
        return range(rank, rank + 1)

    def _wrap(self, module: nn.Module) -> nn.Module:
        return wrap("none" if self._variant == "alone" else self._variant, module, **self._options)

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(self._module(self._inputs), self._targets))

    def _step(self) -> None:
        self._backward()
        self._optimizer.step()


class Backward(Step):
    """Times backward() alone, on one rank: the time that a DDP adds is the cost of its hooks.

    No rank waits for another; the hooks take each gradient, copy it, average it over one rank and write it
    back. The variants are those of `Step`, and `empty`, a hook that does nothing, and `torch_noop`, torch's
    DDP with a communication hook that averages nothing.
    """

    BY_ITSELF = ("alone", "empty")

    def time(self, iterations: int) -> float:
        """Return the seconds of `iterations` backwards, after one that warms up."""
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
        if self._variant == "empty":
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
            return module
        if self._variant == "torch_noop":
            ddp = TorchDDP(module, **self._options)
            ddp.register_comm_hook(None, noop_hook)
            return ddp
        return super()._wrap(module)


class AccumulatedStep(Step):
    """A step of several micro-batches on each rank: with `no_sync()`, or ("virtual") as virtual ranks."""

    MICRO_BATCHES = 4

    def _take_batches(self, plan: Model) -> None:
        self._batches = [plan.batch_of(number) for number in self._batches_of(self._rank)]
        if self._variant == "virtual":
            self._steps = self._ddp.steps(itertools.cycle(self._batches))

    def _batches_of(self, rank: int) -> range:
        return range(rank * self.MICRO_BATCHES, (rank + 1) * self.MICRO_BATCHES)

    @property
    def _ddp(self) -> Any:
        return self._module

    def _wrap(self, module: nn.Module) -> nn.Module:
        virtual = {"virtual_ranks": self.MICRO_BATCHES * self._world_size}
        return wrap("paceline", module, **(virtual if self._variant == "virtual" else {}))

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        if self._variant == "virtual":
            for inputs, targets in next(self._steps):
                torch.autograd.backward(nn.functional.mse_loss(self._module(inputs), targets))
            return
        *others, last = self._batches
        with self._ddp.no_sync():
            for batch in others:
                self._accumulate(*batch)
        self._accumulate(*last)

    def _accumulate(self, inputs: Tensor, targets: Tensor) -> None:
        loss = nn.functional.mse_loss(self._module(inputs), targets) / self.MICRO_BATCHES
        torch.autograd.backward(loss)


class RecordedStep(Step):
    """A rank that records nothing ("off"), as in each job ("flight"), or as with --trace ("trace")."""

    def __init__(self, rank: int, world_size: int, variant: str, **options: Any) -> None:
        super().__init__(rank, world_size, variant, **options)
        from paceline.trace.recording import recording

        self._recording = recording

    def digests(self, recordings: list[str]) -> dict[str, str]:
        """Return the digest of the gradients of the same backward for each kind of recording."""
        found = {}
        for kind in recordings:
            with self._recorded(kind):
                self._backward()
            found[kind] = digest_of([p.grad for p in self._module.parameters() if p.grad is not None])
        return found

    def time_in(self, recording: str, iterations: int) -> float:
        """Return the seconds of `iterations` steps, after one untimed step that synchronizes the ranks."""
        with self._recorded(recording):
            step = self._fetch_and_step if recording == "trace" else self._step
            step()  # the first backward of a recording writes totals, which `time_totals` measures
            self._recording.next_sample_ns = time.monotonic_ns() + _NEVER_NS
            return time_calls(step, iterations)

    def time_totals(self, iterations: int) -> float:
        """Return the mean seconds of writing the records that are written once a second."""
        with self._recorded("flight"):
            return (
                time_calls(lambda: self._recording.sample(self._recording.next_sample_ns), iterations)
                / iterations
            )

    def _fetch_and_step(self) -> None:
        """A step whose batch is recorded, as that of a data loader."""
        self._batches.begin()
        self._batches.end()
        self._step()

    @contextlib.contextmanager
    def _recorded(self, kind: str) -> Iterator[None]:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        from paceline.trace.recording import batches, optimizer_steps
        from paceline.trace.ring_file import FLIGHT_RECORDS, TRACE_RECORDS

        recording = self._recording
        if recording.note is None:  # always keep one, so that no sample includes creating it
            recording.start(None, self._rank, self._world_size, FLIGHT_RECORDS)
        if kind == "off":
            with recording.paused():
                yield
            return
        if kind == "flight":
            yield
            return
        end = recording.enlarge(self._rank, self._world_size, TRACE_RECORDS)
        steps, self._batches = optimizer_steps(), batches()
        handles = [
            register_optimizer_step_pre_hook(steps.begin),
            register_optimizer_step_post_hook(steps.end),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            end()


class UntilError(Step):
    """Trains a perceptron of 4M parameters until an exception. The victim holds more memory, as in practice.

    The kernel frees the memory of a killed process before it closes its sockets.
    """

    def __init__(self, rank: int, world_size: int, variant: str, victim: int, resident_mib: int) -> None:
        super().__init__(rank, world_size, variant)
        self._victim = victim
        # Written to, so that every page is allocated.
        self._ballast = b"\x01" * (resident_mib << 20) if rank == victim else b""
        self.prepare("mlp")

    def train(self) -> dict[str, Any]:
        """Train until an exception; return its time, its text, and whether it names the victim."""
        try:
            while True:
                self._step()
        except Exception as error:
            moment = time.monotonic()
            text = f"{type(error).__name__}: {error}"
            lost = getattr(error, "lost", None)
            named = lost == (self._victim,) or (lost is None and f"rank {self._victim}" in text)
            return {"moment_s": moment, "error": text[:2000], "is_named": named}


class Memory(Step):
    """Trains four layers of 16 MiB on single samples, so that gradients are much larger than activations."""

    def build(self) -> int:
        """Create the bare model; return the bytes of its gradients."""
        self._inputs, self._targets = torch.randn(WIDE_INPUTS)
        self._use(narrow())  # loads the code that a step needs, so that it is not counted
        self._bare = wide()
        return WIDE_BYTES

    def train(self, steps: int) -> None:
        """Wrap the model and train."""
        self._use(self._bare)
        for _ in range(steps):
            self._step()

    def _use(self, module: nn.Module) -> None:
        self._module = self._wrap(module)
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=1e-4)
        self._step()


def _check_close(gradients: list[Tensor], plan: Model, batches: list[int]) -> None:
    """Raise unless `gradients` are the mean over these batches, up to float32's rounding."""
    module = plan.seeded()
    for number in batches:
        inputs, targets = plan.batch_of(number)
        torch.autograd.backward(nn.functional.mse_loss(module(inputs), targets) / len(batches))
    expected = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    names = [name for name, _ in module.named_parameters()]
    for name, got, want in zip(names, gradients, expected, strict=True):
        scale = want.abs().max().item()
        if not torch.allclose(got, want, rtol=1e-3, atol=1e-4 * scale + 1e-7):
            worst = (got - want).abs().max().item()
            raise ArithmeticError(f"wrong gradient of {name}: off by {worst:.3g} of {scale:.3g}")


def digest_of(gradients: list[Tensor]) -> str:
    """Return a hash of the gradients' bits."""
    digest = hashlib.sha256()
    for gradient in gradients:
        digest.update(gradient.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
