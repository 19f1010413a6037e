"""DistributedDataParallel on a GPU: streams, waits, CUDA graphs, mixed precision, and torch.compile.

One rank runs over NCCL. It has a weight, since a single rank without a weight averages nothing. Without a
GPU, these tests run on a simulated device if there is one (`tests.accelerator`), and are skipped otherwise.
The reference is the unwrapped module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.testing import assert_close

from paceline.torch import DistributedDataParallel
from tests import accelerator
from tests.accelerator import KIND, NCCL, busy, needs_cuda, no_waiting
from tests.gpu.models import TASKS
from tests.harness import ranks
from tests.multiprocess.ddp_models import two_layers

pytestmark = accelerator.needed
DEVICE = torch.device(KIND, 0)
VIEWS = (False, True)


def wrapped(model: nn.Module, **options: object) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, weight=1.0, **options)
    assert ddp.gradient_path == "group"
    return ddp


def steps(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Trains with SGD, which reads gradients on the current stream."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def some_batches(count: int = 6, width: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(8, width, generator=generator).to(DEVICE) for _ in range(count)]


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@ranks(1, group=NCCL, deadline_s=240)
def test_a_usual_backward_does_not_wait_for_the_device(rank: int) -> None:
    for nonfinite in ("warn", "ignore"):
        for view in VIEWS:
            alone, model = two_layers().to(DEVICE), two_layers().to(DEVICE)
            batches = some_batches()
            ddp = wrapped(model, nonfinite=nonfinite, gradient_as_bucket_view=view)
            steps(alone, batches)
            steps(ddp, batches[:2])  # the first backwards fix the buckets and check for NaN at once
            with no_waiting():
                steps(ddp, batches[2:])
            accelerator.module().synchronize()
            assert_same(model, alone)


@ranks(1, group=NCCL, deadline_s=240)
def test_backward_returns_before_the_device_has_run_it(rank: int) -> None:
    ddp = wrapped(two_layers().to(DEVICE))
    *first, last = some_batches(4)  # made now, since a copy to the device waits for its stream
    steps(ddp, first)
    accelerator.module().synchronize()
    busy(2000)
    behind = accelerator.module().Event()
    behind.record()
    steps(ddp, [last])
    assert not behind.query()  # the backward ended while its stream had not even begun it
    accelerator.module().synchronize()


@ranks(1, group=NCCL, deadline_s=240)
def test_nonfinite_gradients_are_reported_one_backward_later(rank: int) -> None:
    ddp = wrapped(two_layers().to(DEVICE))
    steps(ddp, some_batches(3))
    ddp.zero_grad()
    with pytest.warns(RuntimeWarning, match="infinity or a NaN"):
        ddp(torch.full((1, 4), float("nan"), device=DEVICE)).sum().backward()
        accelerator.module().synchronize()
        ddp.zero_grad()
        ddp(torch.ones(1, 4, device=DEVICE)).sum().backward()


class TwoStreams(nn.Module):
    """Half of its forward, and so of its backward, runs on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = two_layers(64), two_layers(64)
        self.side: torch.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        if self.side is None:
            return left + self.right(x)
        main = accelerator.module().current_stream()
        self.side.wait_stream(main)
        with accelerator.module().stream(self.side):
            busy(20)
            right = Slowly.apply(self.right(x))
        main.wait_stream(self.side)
        right.record_stream(main)
        return left + right


class Slowly(torch.autograd.Function):
    """The identity; its backward first keeps its stream busy."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        busy(20)
        return gradient


@ranks(1, group=NCCL, deadline_s=240)
def test_gradients_of_several_streams(rank: int) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"batched_grad_copy": True}):
        torch.manual_seed(3)
        model = TwoStreams().to(DEVICE)
        alone = copy.deepcopy(model)
        model.side = accelerator.module().Stream()
        batches = some_batches(4)
        steps(alone, batches)
        steps(wrapped(model, **options), batches)
        accelerator.module().synchronize()
        assert_same(model, alone)


@ranks(1, group=NCCL, deadline_s=240)
def test_training_on_a_stream_that_is_not_the_default(rank: int) -> None:
    for view in VIEWS:
        alone, model = two_layers(64).to(DEVICE), two_layers(64).to(DEVICE)
        batches = some_batches()
        steps(alone, batches)
        accelerator.module().synchronize()
        stream = accelerator.module().Stream()
        with accelerator.module().stream(stream):
            ddp = wrapped(model, gradient_as_bucket_view=view)
            for batch in batches:
                busy(20)
                steps(ddp, [batch])
        accelerator.module().synchronize()
        assert_same(model, alone)


def train_scaled(model: nn.Module, batches: list[torch.Tensor], dtype: torch.dtype) -> list[float]:
    """Trains with mixed precision and a gradient scaler; returns the scale after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(KIND, init_scale=2.0**10, enabled=dtype is torch.float16)
    scales = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast(KIND, dtype):
            loss = model(batch).square().mean()
        if number == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dtype is torch.float16 or number != 2:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.filterwarnings("ignore:.*infinity or a NaN:RuntimeWarning")
@ranks(1, group=NCCL, deadline_s=240)
def test_mixed_precision_and_a_gradient_scaler(rank: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for view in VIEWS:
            alone, model = two_layers(64).to(DEVICE), two_layers(64).to(DEVICE)
            batches = some_batches()
            expected = train_scaled(alone, batches, dtype)
            assert train_scaled(wrapped(model, gradient_as_bucket_view=view), batches, dtype) == expected
            assert_same(model, alone)
            assert dtype is torch.bfloat16 or expected[2] < expected[1]


@ranks(1, group=NCCL, deadline_s=240)
def test_gradients_that_are_reduced_in_16_bits(rank: int) -> None:
    alone, model = two_layers(64).to(DEVICE), two_layers(64).to(DEVICE)
    batches = some_batches()
    steps(alone, batches)
    precision = torch.nn.parallel.distributed._MixedPrecision(reduce_dtype=torch.bfloat16)
    steps(wrapped(model, mixed_precision=precision), batches)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad.dtype is torch.float32
        assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


def capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Runs eager steps on a side stream, then records one step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(11):  # as many as torch requires for its own DDP
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@needs_cuda
@ranks(1, group=NCCL, deadline_s=240)
def test_a_cuda_graph_of_a_whole_step(rank: int) -> None:
    batches = some_batches(4)
    for wrap in (wrapped, DistributedDataParallel):
        alone, model = two_layers(64).to(DEVICE), two_layers(64).to(DEVICE)
        ddp, fixed = wrap(model), batches[0].clone()

        def step(trained: nn.Module, batch: torch.Tensor) -> None:
            trained.zero_grad(set_to_none=True)
            trained(batch).square().mean().backward()
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.sub_(0.05 * parameter.grad)

        graph = capture(lambda ddp=ddp, fixed=fixed, step=step: step(ddp, fixed))
        for _ in range(11):
            step(alone, batches[0])
        for batch in batches:
            fixed.copy_(batch)
            graph.replay()
            step(alone, batch)
        torch.cuda.synchronize()
        assert_same(model, alone)


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
@ranks(1, group=NCCL, deadline_s=300)
def test_compiled_around_and_inside(rank: int) -> None:
    batches = some_batches()
    alone = two_layers(64).to(DEVICE)
    steps(alone, batches)
    inside, around = two_layers(64).to(DEVICE), two_layers(64).to(DEVICE)
    steps(wrapped(torch.compile(inside, backend="aot_eager")), batches)
    assert_same(inside, alone)
    steps(torch.compile(wrapped(around), backend="aot_eager"), batches)
    assert_same(around, alone)


@ranks(1, group=NCCL, deadline_s=240)
def test_losses_match_torchs_ddp(rank: int) -> None:
    for name in ("cnn", "gpt"):
        task = TASKS[name]

        def losses(wrap: Callable[[nn.Module], nn.Module], task=task) -> list[float]:
            model = wrap(task.seeded(KIND, "small"))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
            found = []
            for step in range(8):
                inputs, targets = task.batch_of(0, step, KIND, "small")
                optimizer.zero_grad()
                loss = task.loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found

        assert losses(wrapped) == pytest.approx(losses(TorchDDP), rel=1e-4)


@ranks(1, group=NCCL, deadline_s=240)
def test_unused_parameters_and_accumulation(rank: int) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = two_layers(), two_layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    for view in VIEWS:
        model = Halves().to(DEVICE)
        # "raise" makes a single rank average; a weight would also average the accumulated gradients.
        ddp = DistributedDataParallel(
            model, nonfinite="raise", find_unused_parameters=True, gradient_as_bucket_view=view
        )
        expected = two_layers().to(DEVICE)
        for batch in some_batches(3):
            with ddp.no_sync():
                ddp(batch).square().mean().backward()
            ddp(batch).square().mean().backward()
            for _ in range(2):
                expected(batch).square().mean().backward()
            for ours, theirs in zip(model.used.parameters(), expected.parameters(), strict=True):
                assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
            assert all(p.grad is None for p in model.idle.parameters())
            ddp.zero_grad()
            expected.zero_grad()
