"""Steps of a sharded optimizer in which a fault strikes, and the state that survivors find afterwards.

A step is right if the parameters are those of the whole step or those before it, bit for bit, or if every
operation that would use them raises. The result is added to the error, for the test: "found: whole", "none"
or "half". The reference is the framework's own optimizer, on copies that no other rank has.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import paceline
from paceline import _core
from paceline.errors import PacelineError, PeerLostError, TornStepError
from paceline.sharding import journal_layout

Array = np.ndarray[Any, Any]
Step = Callable[[int], None]
_SHAPES = ((37, 41), (300,), (700,))


def come_by_a_point() -> None:
    """In the middle of a shard: an optimizer that calls this passes `block_written`."""
    scratch = np.zeros(_core.StepTable.nbytes(1) + 128, np.uint8)
    at = -(-scratch.ctypes.data // 128) * 128
    _core.StepTable(at, 1, 0).close_block(0, 0)


class Steps(ABC):
    """The steps of one rank, in one framework.

    Args:
        group: All ranks.
        is_shared: Whether the parameters lie in memory that all ranks share.
    """

    keeps_journal = False
    _optimizer: Any
    _reference: Any

    def __init__(self, group: Any, is_shared: bool) -> None:
        drawn = np.random.default_rng(0)
        values = [drawn.standard_normal(shape).astype(np.float32) for shape in _SHAPES]
        if self.keeps_journal:
            journal_layout.BLOCK_BYTES = 1024  # several blocks for each rank
        self.make_alone(values)
        self.make(group, is_shared, values)

    @abstractmethod
    def make_alone(self, values: Sequence[Array]) -> None:
        """A model of these values that only this rank has."""

    @abstractmethod
    def make(self, group: Any, is_shared: bool, values: Sequence[Array]) -> None:
        """The wrapped model."""

    @abstractmethod
    def give(self, gradients: Sequence[Array]) -> None:
        """Give gradients to both models."""

    @abstractmethod
    def step_alone(self) -> None: ...

    @abstractmethod
    def step_together(self) -> None: ...

    @abstractmethod
    def found(self) -> list[Array]:
        """The values of the wrapped model."""

    @abstractmethod
    def expected(self) -> list[Array]:
        """The values of the reference."""

    @abstractmethod
    def uses(self) -> Iterator[Callable[[], object]]:
        """The operations that must raise if the parameters hold half of a step."""

    def step(self, number: int) -> None:
        drawn = np.random.default_rng(1 + number)
        self.give([drawn.standard_normal(shape).astype(np.float32) for shape in _SHAPES])
        before = self.expected()
        self.step_alone()
        try:
            self.step_together()
        except PacelineError as error:
            error.add_where(f"found: {self._look(before)}")
            raise
        assert _same(self.found(), self.expected())

    def _look(self, before: Sequence[Array]) -> str:
        raised = [_is_torn(use) for use in self.uses()]
        if all(raised):
            return "half"
        assert not any(raised), raised
        found = self.found()
        if _same(found, before):
            return "none"
        assert _same(found, self.expected()), "half a step, and nothing says so"
        if self.keeps_journal:
            assert _same(self.found_state(), self.expected_state()), "the state is another one"
        return "whole"

    def found_state(self) -> list[Array]:
        """The optimizer state of the wrapped model, of all ranks; on each survivor."""
        self._optimizer.consolidate_state_dict()
        return self.tensors(self._optimizer.state_dict())

    def expected_state(self) -> list[Array]:
        """The optimizer state of the reference."""
        return self.tensors(self._reference.state_dict())

    @abstractmethod
    def tensors(self, state: dict[str, Any]) -> list[Array]:
        """The entries of a state."""


def _is_torn(use: Callable[[], object]) -> bool:
    try:
        use()
    except PacelineError as error:
        return isinstance(error, TornStepError)
    return False


def _same(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


class TorchSteps(Steps):
    """torch's AdamW, which passes a point in the middle of its shard."""

    def make_alone(self, values: Sequence[Array]) -> None:
        import torch
        from torch import optim

        torch.set_num_threads(1)
        self._torch = torch
        self._alone = self._model(values)
        self._reference = optim.AdamW(self._alone.parameters(), lr=0.01)

    def make(self, group: Any, is_shared: bool, values: Sequence[Array]) -> None:
        from torch import optim

        from paceline.torch import DistributedDataParallel, ShardedOptimizer

        class InTwoHalves(optim.AdamW):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                groups = [(group, group["params"]) for group in self.param_groups]
                for half in (slice(0, 1), slice(1, None)):
                    for group, parameters in groups:
                        group["params"] = parameters[half]
                    super().step()
                    come_by_a_point()
                for group, parameters in groups:
                    group["params"] = parameters

        self._module = self._model(values)
        self._wrapped = DistributedDataParallel(self._module, process_group=group, share_parameters=is_shared)
        self._optimizer = ShardedOptimizer(
            self._wrapped.parameters(), InTwoHalves, process_group=group, journal=self.keeps_journal, lr=0.01
        )

    def _model(self, values: Sequence[Array]) -> Any:
        from torch import from_numpy, nn

        class Sum(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = nn.ParameterList([from_numpy(value.copy()) for value in values])

            def forward(self) -> Any:
                return sum(parameter.sum() for parameter in self.all)

        return Sum()

    def give(self, gradients: Sequence[Array]) -> None:
        for module in (self._alone, self._module):
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = self._torch.from_numpy(gradient.copy())

    def step_alone(self) -> None:
        self._reference.step()

    def step_together(self) -> None:
        self._optimizer.step()

    def found(self) -> list[Array]:
        return [parameter.detach().numpy().copy() for parameter in self._module.parameters()]

    def expected(self) -> list[Array]:
        return [parameter.detach().numpy().copy() for parameter in self._alone.parameters()]

    def uses(self) -> Iterator[Callable[[], object]]:
        def forward() -> None:
            with self._torch.no_grad():
                self._wrapped()

        yield from (forward, self._wrapped.state_dict, self._module.state_dict, self._module.all.state_dict)
        yield from (self._optimizer.step, self._optimizer.consolidate_state_dict)

    def tensors(self, state: dict[str, Any]) -> list[Array]:
        held = state["state"]
        return [held[number][key].numpy() for number in sorted(held) for key in sorted(held[number])]


class PaddleSteps(Steps):
    """Paddle's AdamW."""

    def make_alone(self, values: Sequence[Array]) -> None:
        import paddle

        self._paddle = paddle
        self._alone = self._model(values)
        self._reference = paddle.optimizer.AdamW(0.01, parameters=self._alone.parameters())

    def make(self, group: Any, is_shared: bool, values: Sequence[Array]) -> None:
        import paddle

        from paceline.paddle import DataParallel, ShardedOptimizer

        class InTwoHalves(paddle.optimizer.AdamW):
            def step(self) -> None:
                super().step()
                come_by_a_point()
                come_by_a_point()

        self._layers = self._model(values)
        self._wrapped = DataParallel(self._layers, group=group, share_parameters=is_shared)
        self._optimizer = ShardedOptimizer(
            self._wrapped.parameters(), InTwoHalves, group, journal=self.keeps_journal, learning_rate=0.01
        )

    def _model(self, values: Sequence[Array]) -> Any:
        from paddle import nn, utils

        class Sum(nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.all = nn.ParameterList([self.create_parameter(list(value.shape)) for value in values])
                for parameter, value in zip(self.all, values, strict=True):
                    parameter.set_value(value)

            def forward(self) -> Any:
                return sum(parameter.sum() for parameter in self.all)

        with utils.unique_name.guard():  # the state has names as keys
            return Sum()

    def give(self, gradients: Sequence[Array]) -> None:
        for layers in (self._alone, self._layers):
            for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
                parameter.grad = self._paddle.to_tensor(gradient)

    def step_alone(self) -> None:
        self._reference.step()

    def step_together(self) -> None:
        self._optimizer.step()

    def found(self) -> list[Array]:
        return [parameter.numpy().copy() for parameter in self._layers.parameters()]

    def expected(self) -> list[Array]:
        return [parameter.numpy().copy() for parameter in self._alone.parameters()]

    def uses(self) -> Iterator[Callable[[], object]]:
        def forward() -> None:
            with self._paddle.no_grad():
                self._wrapped()

        yield from (forward, self._wrapped.state_dict, self._layers.state_dict, self._layers.all.state_dict)
        yield from (self._optimizer.step, self._optimizer.consolidate_state_dict)

    def tensors(self, state: dict[str, Any]) -> list[Array]:
        return [state[name].numpy() for name in sorted(state)]


class _Surviving(Steps):
    """Survivors form a new group, and train on, with a journal."""

    keeps_journal = True

    def __init__(self, group: Any, is_shared: bool) -> None:
        self._group, self._is_shared, self._is_again = group, is_shared, False
        super().__init__(group, is_shared)

    def step(self, number: int) -> None:
        try:
            super().step(number)
        except PeerLostError as error:
            if self._is_again:
                raise
            self._go_on(error)
        if number == 6:
            assert self._is_again
            for rank in range(self._optimizer.world_size):
                self._optimizer.consolidate_state_dict(to=rank)
                if rank == self._optimizer.rank:
                    assert _same(self.tensors(self._optimizer.state_dict()), self.expected_state())
            raise RuntimeError("found: well, after all")

    def _go_on(self, error: PeerLostError) -> None:
        assert error.step_is_complete, error
        left = [rank for rank in range(self._group.world_size) if rank not in error.lost]
        self._optimizer.consolidate_state_dict()
        state = self._optimizer.state_dict()
        job = os.environ["PACELINE_JOB_ID"]
        group = paceline.init(
            rank=left.index(self._group.rank), world_size=len(left), job_id=f"{job}/again/{error.lost}"
        )
        self._is_again = True
        self.make(group, self._is_shared, self.found())
        self._optimizer.load_state_dict(state)


class JournaledTorchSteps(TorchSteps):
    keeps_journal = True


class RewrappedSteps(JournaledTorchSteps):
    """The model is wrapped anew, and its parameters get other memory, while the optimizer stays."""

    def make(self, group: Any, is_shared: bool, values: Sequence[Array]) -> None:
        self._group = group
        super().make(group, is_shared, values)

    def step(self, number: int) -> None:
        if number == 1:
            from paceline.torch import DistributedDataParallel

            self._wrapped = DistributedDataParallel(
                self._module, process_group=self._group, share_parameters=True
            )
        super().step(number)


class SurvivingTorchSteps(_Surviving, TorchSteps): ...


class JournaledPaddleSteps(PaddleSteps):
    keeps_journal = True


class SurvivingPaddleSteps(_Surviving, PaddleSteps): ...


def torch_shared(group: Any) -> Step:
    """Parameters that all ranks share, torch."""
    return TorchSteps(group, True).step


def torch_own(group: Any) -> Step:
    """Parameters of which each rank has a copy, torch."""
    return TorchSteps(group, False).step


def paddle_shared(group: Any) -> Step:
    """Parameters that all ranks share, Paddle."""
    return PaddleSteps(group, True).step


def paddle_own(group: Any) -> Step:
    """Parameters of which each rank has a copy, Paddle."""
    return PaddleSteps(group, False).step


def torch_journaled(group: Any) -> Step:
    """Parameters that all ranks share, and a journal, torch."""
    return JournaledTorchSteps(group, True).step


def paddle_journaled(group: Any) -> Step:
    """Parameters that all ranks share, and a journal, Paddle."""
    return JournaledPaddleSteps(group, True).step


def torch_surviving(group: Any) -> Step:
    """The same; the survivors train on."""
    return SurvivingTorchSteps(group, True).step


def paddle_surviving(group: Any) -> Step:
    """The same; the survivors train on."""
    return SurvivingPaddleSteps(group, True).step


def torch_rewrapped(group: Any) -> Step:
    """The same; the model was wrapped anew."""
    return RewrappedSteps(group, True).step
