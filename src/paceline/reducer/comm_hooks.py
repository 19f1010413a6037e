"""Communication hooks: functions of the user that average a bucket of gradients, in any framework.

A hook gets a state and a bucket, and returns the tensor that replaces the bucket's buffer, or a future of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.arguments import show
from paceline.errors import ConfigError, ConfigTypeError, RendezvousError
from paceline.reducer.model_agreement import ModelDescription, check_agreement
from paceline.reducer.plan import Plan
from paceline.rendezvous.exchange import Exchange

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True)
class CommHook:
    """A registered hook, and its state."""

    state: Any
    call: Callable[[Any, Any], Any]

    @property
    def name(self) -> str:
        return str(getattr(self.call, "__qualname__", type(self.call).__name__))


class HookedBucket(ABC, Generic[_Tensor]):
    """A bucket as a hook gets it: with the methods of `torch.distributed.GradBucket`, and its weight."""

    def __init__(
        self,
        index: int,
        buffer: _Tensor,
        gradients: Sequence[_Tensor],
        parameters: Sequence[_Tensor],
        is_last: bool,
        weight: float,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last
        self._weight = weight
        self._when_good: list[Callable[[list[_Tensor]], object]] = []

    @abstractmethod
    def _cut(self, buffer: _Tensor) -> list[_Tensor]: ...

    def index(self) -> int:
        return self._index

    def buffer(self) -> _Tensor:
        return self._buffer

    def gradients(self) -> list[_Tensor]:
        return list(self._gradients)  # views of the current buffer

    def parameters(self) -> list[_Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        return self._is_last

    def weight(self) -> float:
        """The factor of this rank's gradients: its weight divided by the ranks' mean weight."""
        return self._weight

    def when_good(self, call: Callable[[list[_Tensor]], object]) -> None:
        """Notify a hook that this backward was good, for state that it keeps from one backward to the next.

        Args:
            call: Called on every rank at the end of the backward, with those of `parameters()` that no rank
                used. It is not called if the backward raises on all ranks, or gives a gradient that is not
                finite, whatever `nonfinite=` says: no optimizer steps with such gradients, so the hook should
                keep its previous state. It must not raise.

        Example:
            >>> error = self.error + bucket.buffer() - decoded
            >>> bucket.when_good(lambda unused: self.keep(error, unused))
        """
        self._when_good.append(call)

    @property
    def is_awaited(self) -> bool:
        return bool(self._when_good)

    def be_good(self, unused: list[_Tensor]) -> None:
        for call in self._when_good:
            call(unused)

    def set_buffer(self, buffer: _Tensor) -> None:
        self._buffer = buffer
        self._gradients = self._cut(buffer)


class ShownBuckets(Generic[_Tensor]):
    """The buckets that a hook got in this backward, and whether those with a `when_good` are finite."""

    def __init__(self) -> None:
        self._shown: list[tuple[HookedBucket[_Tensor], Sequence[int]]] = []
        self._are_finite = True

    def add(self, bucket: HookedBucket[_Tensor], members: Sequence[int]) -> None:
        self._shown.append((bucket, members))

    def note(self, bucket: HookedBucket[_Tensor], is_finite: Callable[[], bool]) -> None:
        if bucket.is_awaited and self._are_finite:
            self._are_finite = is_finite()

    def end(self, unused: Collection[int] | None) -> None:
        shown, are_finite = self._shown, self._are_finite
        self._shown, self._are_finite = [], True
        if unused is None or not are_finite:
            return
        left_out = frozenset(unused)
        for bucket, members in shown:
            if bucket.is_awaited:
                parameters = zip(members, bucket.parameters(), strict=True)
                bucket.be_good([parameter for index, parameter in parameters if index in left_out])


class HookedBuckets(ABC, Generic[_Tensor]):
    """Gives buckets to a hook, one at a time: each waits until the hook is done with the one before.

    A hook may make further calls over the process group when one of its calls completes, and only this gives
    all calls the same order on all ranks.
    """

    def __init__(self, hook: CommHook, plan: Plan) -> None:
        self.shown: ShownBuckets[_Tensor] = ShownBuckets()
        self._hook = hook
        self._plan = plan
        self._latest: HookedCall | None = None

    @abstractmethod
    def _show(
        self, number: int, flat: _Tensor, members: Sequence[int], weight: float
    ) -> tuple[HookedBucket[_Tensor], Any]:
        """The bucket as the hook gets it, and what the hook returns for it."""

    @abstractmethod
    def _put(self, result: Any, number: int, flat: _Tensor) -> None: ...

    @abstractmethod
    def _is_finite(self, flat: _Tensor) -> bool: ...

    def launch(self, number: int, flat: _Tensor, weight: float) -> HookedCall:
        """Begin to average a bucket."""
        indices = self._plan.buckets[number].parameters
        members = [index for index in indices if self._plan.parameters[index].numel]
        shown, result = self._show(number, flat, members, weight)
        self.shown.add(shown, members)

        def finish() -> None:
            self._put(result, number, flat)
            self.shown.note(shown, lambda: self._is_finite(flat))

        self._latest = HookedCall(finish)
        return self._latest

    def wait(self) -> None:
        if self._latest is not None:
            self._latest.wait()

    def forget(self) -> None:
        self._latest = None


class HookedCall:
    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
            self._finish = None  # not reached if it raises, so that it raises again


def check_callable(hook: object, *, returns: str, hint: str) -> None:
    if not callable(hook):
        raise ConfigTypeError(
            "register_comm_hook: Communication hook must be callable.",  # torch's words
            expected=f"hook(state, bucket), which returns {returns}",
            got=f"hook={show(hook)}, of type {type(hook).__name__}",
            hint=hint,
            argument="hook",
        )


def check_is_first(known: CommHook | None) -> None:
    if known is not None:
        raise ConfigError(
            "register_comm_hook can only be called once.",
            seen=f"'{known.name}' is registered",
            hint="wrap the module anew to use another hook",
        )


def agree_on_hook(hook: CommHook, exchange: Exchange, timeout_s: float) -> None:
    """Raise on every rank if ranks have registered different hooks. Collective."""
    options = {"the communication hook": hook.name}
    try:
        check_agreement(ModelDescription((), (), options), exchange, timeout_s)
    except RendezvousError as error:
        raise RendezvousError(
            "register_comm_hook: not every rank has registered a hook.",
            where=error.where,
            seen=f"{error.summary} {error.seen}",
            expected="the same call on every rank, before the same forward",
            likely="a hook on some ranks only",
            hint="register it on every rank",
        ) from error


def wrong_result(
    name: str, expected: str, got: str, hint: str, kind: type[ConfigError] = ConfigError
) -> ConfigError:
    return kind(
        f"The communication hook '{name}' returned something that is no averaged bucket.",
        expected=expected,
        got=got,
        hint=hint,
    )
