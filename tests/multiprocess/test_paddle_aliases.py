"""Gradients that share memory with each other, or with a gradient that backward still uses, in random graphs.

A parameter's gradient may be the tensor that a PyLayer returned for two inputs, a part of it, or a view of
it. The reference is one process in float64.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paceline.paddle import DataParallel
from tests.multiprocess.paddle_models import CLEARS, assert_same_on_all_ranks, join_paddle, joined_ranks

SIZE = 4
STEPS = 4
NUM_GRAPHS = 12  # the fuzzer in tests/differential makes many more
MODES = {
    "memory": {},
    "memory, small buckets": {"comm_buffer_size": 1e-6, "last_comm_buffer_size": 1e-6},
    "view": {"gradient_as_bucket_view": True, "comm_buffer_size": 1e-6, "last_comm_buffer_size": 1e-6},
    "group": {"reduce_through": "group", "comm_buffer_size": 1e-6, "last_comm_buffer_size": 1e-6},
    "group, view": {"reduce_through": "group", "gradient_as_bucket_view": True},
}


class Twice(paddle.autograd.PyLayer):
    """A sum whose backward returns one tensor for both inputs."""

    @staticmethod
    def forward(ctx: Any, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return dy, dy


class Partly(paddle.autograd.PyLayer):
    """Adds `b` to some rows of `a`; backward returns a tensor and a part of it."""

    @staticmethod
    def forward(ctx: Any, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        return a + paddle.concat([paddle.zeros([1, SIZE], a.dtype), b, paddle.zeros([1, SIZE], a.dtype)])

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return dy, dy[1 : SIZE - 1]


Shaped = Callable[[paddle.Tensor], paddle.Tensor]
WAYS: dict[str, tuple[list[int], Shaped]] = {
    "as it is": ([SIZE, SIZE], lambda p: p),
    "reshape": ([SIZE * SIZE], lambda p: p.reshape([SIZE, SIZE])),
    "squeeze": ([1, SIZE, SIZE], lambda p: p.squeeze(0)),
    "unsqueeze": ([SIZE, SIZE], lambda p: p.unsqueeze(0).squeeze(0)),
    "flatten": ([SIZE, SIZE], lambda p: p.flatten().reshape([SIZE, SIZE])),
    "expand": ([SIZE], lambda p: p.expand([SIZE, SIZE])),
    "transpose": ([SIZE, SIZE], lambda p: p.t()),
    "slice": ([2 * SIZE, SIZE], lambda p: p[1 : SIZE + 1]),
    "assign": ([SIZE, SIZE], paddle.assign),
}
Joined = Callable[[paddle.Tensor, paddle.Tensor], paddle.Tensor]
JOINS: dict[str, Joined] = {
    "add": lambda h, p: h + p,
    "twice": Twice.apply,
    "twice, other way": lambda h, p: Twice.apply(p, h),
    "in a layer": lambda h, p: paddle.tanh(h) + p,
    "multiply": lambda h, p: h * p,
    "concat": lambda h, p: paddle.concat([h, p])[SIZE // 2 : SIZE // 2 + SIZE],
    "stack": lambda h, p: paddle.stack([h, p]).sum(0),
    "partly": Partly.apply,
}
PLAIN: dict[str, Joined] = {
    "twice": lambda h, p: h + p,
    "twice, other way": lambda h, p: p + h,
    "partly": lambda h, p: h + nn.functional.pad(p, [1, 1, 0, 0]),
}


# Joins whose backward passes on a gradient in the memory of the parameter's gradient.
BACKWARD_ON = {"twice", "twice, other way", "partly"}


class Graph(nn.Layer):
    """Parameters that are joined, one by one, to an earlier result.

    A result that is joined by a PyLayer which passes its gradient on is used nowhere else: Paddle would add
    other gradients to it in place, and so to those of both inputs, even in one process. See `is_right_alone`.

    Args:
        seed: Decides the whole graph.
        is_plain: Use ordinary additions: the same numbers, and no gradients share memory.
    """

    def __init__(self, seed: int, *, is_plain: bool = False) -> None:
        super().__init__()
        choose = random.Random(seed)
        paddle.seed(seed)
        self.is_plain = is_plain
        self.steps: list[tuple[str, str, int, int]] = []
        shapes, are_passing, free, unused = [], [], [0], {0}
        for number in range(choose.randint(2, 6)):
            join, way = choose.choice(list(JOINS)), choose.choice(list(WAYS))
            shape = [SIZE - 2, SIZE] if join == "partly" else WAYS[way][0]
            backwards = join in BACKWARD_ON
            is_again = number > 0 and shapes[-1] == shape and not (backwards or are_passing[-1])
            if not is_again or choose.random() < 0.5:
                shapes.append(shape)
                are_passing.append(backwards)
            candidates = sorted(unused & set(free)) if backwards else free
            before = choose.choice(candidates)
            if backwards:
                free.remove(before)
            unused.discard(before)
            self.steps.append((join, way, len(shapes) - 1, before))
            free.append(number + 1)
            unused.add(number + 1)
        self.unused = sorted(unused)
        self.added = nn.ParameterList([self.create_parameter(shape) for shape in shapes])
        self.first = nn.Linear(SIZE, SIZE)

    def forward(self, x: paddle.Tensor, factor: float) -> paddle.Tensor:
        made = [self.first(x)]
        for join, way, index, before in self.steps:
            parameter = self.added[index]
            shaped = parameter if join == "partly" else WAYS[way][1](parameter)
            if factor != 1.0:  # then no memory is shared; the ranks' factors differ
                shaped = shaped * factor
            joined = PLAIN.get(join, JOINS[join]) if self.is_plain else JOINS[join]
            made.append(joined(made[before], shaped))
        return paddle.add_n([made[number] for number in self.unused])


def inputs(seed: int, rank: int, step: int) -> tuple[np.ndarray, float]:
    x = np.random.default_rng([seed, rank, step]).standard_normal((SIZE, SIZE)).astype(np.float32)
    return x, (1.0, 0.5)[(seed + step * rank) % 3 == 1]


def loss_of(output: paddle.Tensor, rank: int) -> paddle.Tensor:
    return (output * paddle.arange(1, 1 + SIZE).astype(output.dtype)).sum() * (1 + rank)


@functools.cache
def expected_gradients(seed: int, step: int) -> list[np.ndarray]:
    alone = Graph(seed, is_plain=True).to(dtype="float64")
    means = [np.zeros(parameter.shape) for parameter in alone.parameters()]
    for rank in range(2):
        x, factor = inputs(seed, rank, step)
        loss = loss_of(alone(paddle.to_tensor(x.astype(np.float64)), factor), rank)
        for mean, gradient in zip(means, paddle.grad(loss, alone.parameters()), strict=True):
            mean += gradient.numpy() / 2
    return means


def is_right_alone(seed: int) -> bool:
    """Return whether Paddle is right in one process: it computes in place even where memory is shared."""
    for step in range(STEPS):
        sums = [0.0] * len(list(Graph(seed).parameters()))
        for rank in range(2):
            model = Graph(seed)
            x, factor = inputs(seed, rank, step)
            loss_of(model(paddle.to_tensor(x), factor), rank).backward()
            sums = [a + p.grad.numpy() / 2 for a, p in zip(sums, model.parameters(), strict=True)]
        pairs = zip(sums, expected_gradients(seed, step), strict=True)
        if any(np.abs(found - mean).max() > 1e-4 * (1 + np.abs(mean).max()) for found, mean in pairs):
            return False
    return True


def backward_behind(late: int, group: Any, wrapped: nn.Layer, x: paddle.Tensor, factor: float) -> None:
    """Run a backward that the rank `late` begins after the other rank has handed over all gradients."""
    token = np.zeros(1)

    def wait_or_signal(_: paddle.Tensor) -> None:
        group.recv(token, 1 - group.rank) if group.rank == late else group.send(token, 1 - group.rank)

    x.stop_gradient = False
    output = wrapped(x, factor)
    (output if group.rank == late else x).register_hook(wait_or_signal)  # that of x is one of the last
    loss_of(output, group.rank).backward()


@joined_ranks(2, group="paceline", deadline_s=180)
def test_random_graphs_equal_one_process_in_float64(group: Any) -> None:
    """In all modes; one reference serves all of them."""
    join_paddle(group.rank)
    clears = list(CLEARS.values())
    for seed, mode in itertools.product(filter(is_right_alone, range(NUM_GRAPHS)), MODES):
        model = Graph(seed)
        own = {} if mode.startswith("group") else {"group": group}
        wrapped = DataParallel(model, **MODES[mode], **own)
        so_far: list[np.ndarray] = [np.zeros(p.shape) for p in model.parameters()]
        for step in range(STEPS):
            x, factor = inputs(seed, group.rank, step)
            if step != 2:  # step 2 accumulates
                clears[seed % len(clears)](wrapped)
                so_far = [np.zeros_like(mean) for mean in so_far]
            backward_behind(step % 2, group, wrapped, paddle.to_tensor(x), factor)
            so_far = [a + b for a, b in zip(so_far, expected_gradients(seed, step), strict=True)]
            for (name, parameter), mean in zip(model.named_parameters(), so_far, strict=True):
                error = np.abs(parameter.grad.numpy() - mean).max()
                assert error < 1e-5 * (1 + np.abs(mean).max()), (
                    f"{mode}, seed {seed}, step {step}, {name}: {error} {model.steps}"
                )
            assert_same_on_all_ranks(model, group)


class Holders(nn.Layer):
    """Adds a row to its input, so that another tensor also holds the memory of the row's gradient.

    Args:
        holder: "input", for which a PyLayer returns the same tensor; "view" of the row, which retains its
            gradient; or "hook" of that view, which keeps the gradient that it gets.
    """

    def __init__(self, holder: str) -> None:
        super().__init__()
        self.holder = holder
        self.row = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(0.0))
        self.last = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(1.0))
        self.view: paddle.Tensor | None = None
        self.seen: list[paddle.Tensor] = []

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.view = self.row.unsqueeze(0)
        if self.holder == "view":
            self.view.retain_grads()
        elif self.holder == "hook":
            self.view.register_hook(self.seen.append)  # returns None: the gradient stays
        return Twice.apply(x, self.view) * self.last

    def of_others(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        """Return the last backward's gradients of tensors outside the model."""
        made = [x.grad]
        if self.holder == "view":
            made.append(self.view.grad)
        return made + self.seen[-1:]

    def check_memory(self, x: paddle.Tensor, rank: int, when: str) -> None:
        """Check that the row's mean shares no memory with these tensors, in either direction."""
        own = np.arange(1.0, 1.0 + SIZE) * (1 + rank)
        for gradient in self.of_others(x):
            assert np.allclose(gradient.numpy().reshape(-1), own), f"{when}: {gradient} instead of {own}"
        for gradient in self.of_others(x):
            gradient.detach().fill_(7.0)
        found, mean = self.row.grad.numpy(), np.arange(1.0, 1.0 + SIZE) * 1.5
        assert np.allclose(found, mean), f"{when}: {found} instead of {mean}"


@pytest.mark.parametrize("holder", ["input", "view", "hook"])
@joined_ranks(2, group="paceline")
def test_memory_of_a_gradient_that_other_tensors_hold(group: Any, holder: str) -> None:
    """No mean is written to it, and writing to it does not change a mean."""
    join_paddle(group.rank)
    for mode, clear in itertools.product(MODES, CLEARS.values()):
        model = Holders(holder)
        wrapped = DataParallel(model, **MODES[mode], **({} if mode.startswith("group") else {"group": group}))
        for step in range(3):
            x = paddle.zeros([1, SIZE])
            x.stop_gradient = False
            clear(model)
            loss_of(wrapped(x), group.rank).backward()
            model.check_memory(x, group.rank, f"{mode}, step {step}")


class Beside(nn.Layer):
    """Has a row that it does not use, and scales its input by its own parameter."""

    def __init__(self, row: paddle.Tensor) -> None:
        super().__init__()
        self.row = row
        self.factor = self.create_parameter([SIZE], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * self.factor


@pytest.mark.parametrize("other", ["wrapper", "behind", "before"])
@joined_ranks(2, group="paceline")
def test_memory_of_a_gradient_of_two_wrapped_models_that_other_tensors_hold(group: Any, other: str) -> None:
    """A model that is wrapped twice; or another model that has the parameter, in the same backward."""
    join_paddle(group.rank)
    for mode, clear in zip(MODES, itertools.cycle(CLEARS.values())):
        own = {} if mode.startswith("group") else {"group": group}
        model = Holders("hook" if other == "before" else "input")
        first = DataParallel(model, **MODES[mode], **own)
        beside = model if other == "wrapper" else Beside(model.row)
        second = DataParallel(beside, find_unused_parameters=True, **MODES[mode], **own)
        # The row's gradient is ready before backward reaches the layers in front.
        between = [nn.LeakyReLU(1.0) for _ in range(4)]
        parts = {"wrapper": [second], "behind": [first, second], "before": [second, *between, first]}
        whole = nn.Sequential(*parts[other])
        for step in range(3):
            x = paddle.zeros([1, SIZE])
            x.stop_gradient = False
            clear(whole)
            loss_of(whole(x), group.rank).backward()
            model.check_memory(x, group.rank, f"{mode}, step {step}")


@joined_ranks(2, group="paceline")
def test_gradients_stay_in_memory_that_the_program_chose(group: Any) -> None:
    """Means are written to where the user placed the gradients, so every holder of that memory sees them."""
    join_paddle(group.rank)
    mean = np.arange(1.0, 1.0 + SIZE) * 1.5
    for own in ({"group": group}, {"reduce_through": "group"}):
        model = Holders("input")
        wrapped = DataParallel(model, **own)
        flat = paddle.zeros([2 * SIZE])
        model.row._copy_gradient_from(flat[:SIZE])
        model.last._copy_gradient_from(flat[SIZE:])
        assert model.row.grad.data_ptr() == flat.data_ptr()
        for _ in range(2):
            flat.zero_()
            x = paddle.zeros([1, SIZE])
            x.stop_gradient = False
            loss_of(wrapped(x), group.rank).backward()
            assert np.allclose(flat[:SIZE].numpy(), mean)
