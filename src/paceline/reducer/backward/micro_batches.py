"""The weighted mean, over the micro-batches of one rank: each gradient as their running mean.

After micro-batches with weights w_1 ... w_n, the gradient is sum(w_i * g_i) / W with
W = sum(w_i). A micro-batch of weight w keeps that true: what is there shrinks by W / (W + w) before the
framework adds to it, and each incoming gradient by w / (W + w). The reducer then weighs the ranks by their W,
so the mean over ranks and micro-batches is that of one process with the whole batch. A single micro-batch
needs no scaling at all.

Where forwards have weights, the weight of a backward is the sum over the forwards that it goes through: a
forward may never get a backward, or get two, or one in another order. Sums over ranks begin with the first
bucket, so these forwards must be known before the first gradient. Either the graph of one alone is left, or a
walk through the graph of the backward finds them. At its end they are compared with those whose outputs have
got gradients; if these are others, the step is refused on all ranks.

Models that were never given a weight pay nothing: the hooks come with the first weight.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from paceline.arguments import Arguments
from paceline.errors import ConfigError
from paceline.reducer.backward.state import RUNNING, BackwardState, EndOfBackward, Graph
from paceline.reducer.backward_errors import Unweighed

SCALE_THE_LOSS = (
    "give no weight on any rank, and multiply the loss by weight * world size / total weight of the step"
)
_LEAST, _MOST = 1e-20, 1e20  # weights multiply gradients in float32, and are added up


class _Living:
    """The weights of all models that are wrapped in this process.

    Attributes:
        is_any_used: Whether any of them was ever given a weight.
    """

    def __init__(self) -> None:
        self.is_any_used = False
        self._all: weakref.WeakSet[MicroBatchWeights] = weakref.WeakSet()

    def add(self, weights: MicroBatchWeights) -> None:
        self._all.add(weights)

    def all(self) -> list[MicroBatchWeights]:
        return list(self._all)


living = _Living()


class MicroBatchWeights(ABC):
    """The weights of one rank's micro-batches, and what they do to its gradients.

    Args:
        state: The state of the model's backward passes.

    Attributes:
        of_forward: The weight of the forward under way; None: it has none.
        is_used: Whether any weight was ever given.
        is_open: Whether a backward has begun to weigh, and it was neither ended nor given up since.
        unweighed: Why the gradients of the backward passes since the last synchronised one are not weighed.
        shared: Parameters that other wrapped models have, too, in whose backwards nothing is weighed here.
        count: How many micro-batches with weights there were in no_sync() since.
    """

    def __init__(self, state: BackwardState) -> None:
        self.is_used = False
        self.unweighed: Unweighed | None = None
        self.shared: set[int] = set()
        self.count = 0
        living.add(self)
        self._searched: set[int] = set()  # backwards whose graph was searched for exchanges
        self._state = state
        self._scopes: list[float] = []
        self._once: float | None = None
        self.of_forward: float | None = None
        self._weighs_forwards = False
        self._forwards: set[weakref.ref[Graph]] = set()  # all that are left of those with weights
        self._hidden: list[Graph] = []  # of these, those whose backward may pass the known outputs by
        self._reached: set[Graph] = set()  # those to whose outputs the backward has come
        self._reached_first: tuple[int, set[Graph]] = -1, set()  # the same before it begins, and which it is
        self._found: tuple[int, weakref.WeakSet[Graph]] | None = None  # by a walk, and in which backward
        self._expected: set[Graph] | None = None  # those whose weights `_weight` adds up
        self.is_open = False
        self._awaited: object = None  # stands for the end of one in no_sync() that the framework still holds
        self._weight = 0.0
        self._share = 1.0
        self._total = 0.0

    @abstractmethod
    def _install(self) -> None:
        """Have `_share_of_incoming` multiply each gradient before the framework accumulates it."""

    @abstractmethod
    def _put_last(self) -> None:
        """Have hooks of the user, registered since, see each gradient before `_share_of_incoming` does."""

    @abstractmethod
    def _shrink(self, factor: float) -> None:
        """Multiply what the micro-batches have left; not a gradient from before to which none has added."""

    @abstractmethod
    def _call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the backward that runs is over."""

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Whether a backward runs, and not a call that only returns gradients. Asked within one of both."""

    @abstractmethod
    def reaches(self, node: object) -> bool:
        """Whether a backward from this node of the graph (None: there is none) comes to the model."""

    @abstractmethod
    def _mark(self, graph: Graph, output: object) -> bool:
        """Let `_find_forwards` find this graph by the outputs of its forward.

        Returns:
            Whether there is no way around them: all tensors were found, and each has a node in the graph.
        """

    @abstractmethod
    def _find_forwards(self, left: Iterable[Graph]) -> set[Graph] | None:
        """Those of these graphs to which the backward leads that runs, the innermost one; None: not known.

        Looks at each node of its graph.
        """

    @abstractmethod
    def through_gradient(self, graph: Graph, gradient: Any) -> Any:
        """Let a backward of what autograd.grad() returns, with create_graph=True, come to this graph as well.

        Args:
            graph: Through which that call goes.
            gradient: Of an output.

        Returns:
            What replaces it; None: nothing does.
        """

    @abstractmethod
    def _backward(self) -> int:
        """What tells the backward that runs from others, the innermost one. Cheap."""

    @abstractmethod
    def _find_exchanges(self) -> list[str]:
        """Names of functions, not of ours, that exchange gradients between ranks in the backward that runs,
        the innermost one. Looks at each node of its graph.
        """

    @property
    def is_weighing(self) -> bool:
        """Whether a backward is under way that has begun to weigh, and no exception has ended it."""
        return self.is_open and (self._state.phase >= RUNNING or self._awaited is not None)

    @property
    def current(self) -> float:
        """The weight of the backward under way, or else of the next one; 1: it has none."""
        if self.is_weighing:
            return self._weight
        given = self._given()
        if given is None and self._weighs_forwards and (ahead := self._ahead()):
            given = _sum(ahead)
        return 1.0 if given is None else given

    def refuse(self, error: ConfigError) -> None:
        """Let the end of this step's synchronised backward raise, on every rank."""
        if self.unweighed is None or self.unweighed.exchanges:
            self.unweighed = Unweighed(error, [])

    @property
    def awaits_end(self) -> bool:
        """Whether a backward in no_sync() has begun to weigh, and the framework has not dropped its end."""
        return self._awaited is not None

    def forget_given(self) -> None:
        """What was given was for a backward that does not come: this rank has no more data."""
        self._once = None

    def take_over(self, before: MicroBatchWeights) -> None:
        """Go on where the weights of other backward passes have stopped, which these replace."""
        self._scopes = before._scopes  # the same list: a scope that is open ends there
        self._once = before._once
        self._weighs_forwards = before._weighs_forwards
        self._total, self.count = before._total, before.count
        self.unweighed = before.unweighed
        if before.is_used:
            self.use()

    def use(self) -> None:
        """Have the hooks that weighing needs."""
        if not self.is_used:
            self.is_used = living.is_any_used = True
            self._install()

    def give(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Weigh the next backward; or, if the result is entered, those within."""
        self.use()
        self._once = weight
        return self._scope(weight)

    def begin_forward(self, weight: float | None) -> None:
        """A forward begins, with a weight or (None) without one."""
        if weight is not None:
            self.use()
        self.of_forward = weight

    def add_forward(self, graph: Graph, output: object) -> None:
        """The forward is over that began with a weight, which counts where a backward comes to its graph."""
        graph.weight, self.of_forward = self.of_forward, None
        self._weighs_forwards = True
        self._forwards.add(weakref.ref(graph, self._forwards.discard))
        if not self._mark(graph, output):
            self._hidden.append(graph)

    def reach(self, graph: Graph) -> None:
        """A backward has come to an output of this graph's forward."""
        if graph.weight is None:
            return
        if self.is_weighing:
            self._reached.add(graph)
            return
        now = self._backward()
        if self._reached_first[0] != now:
            self._reached_first = now, set()
        self._reached_first[1].add(graph)

    def _ahead(self) -> set[Graph]:
        """The forwards that the backward goes through that runs, as far as it can be told."""
        if len(self._reached) == len(self._forwards) == 1:
            return self._reached.copy()
        now = self._backward()
        if self._found is None or self._found[0] != now:
            left = [graph for find in list(self._forwards) if (graph := find()) is not None]
            found = self._find_forwards(left)
            self._found = now, weakref.WeakSet(left if found is None else found)
        return set(self._found[1]) or set(self._hidden if len(self._hidden) == 1 else ())

    def _expect(self) -> float:
        """The weight of the forwards that the backward goes through that begins."""
        self._expected = expected = self._ahead()
        if others := [graph for graph in self._hidden if graph not in expected]:
            self.refuse(_hidden_error(others))
        elif not expected:
            self.refuse(_no_forward_error())
        return _sum(expected) if expected else 1.0

    def check_forwards(self) -> None:
        """At the end of a backward: refuse it if it has not come to the forwards whose weights it has."""
        if self.is_open and self._expected is not None and self._reached != self._expected:
            missed = self._expected.difference(self._reached, self._hidden)
            if missed or not self._reached <= self._expected:
                self.refuse(_other_forwards_error(self._expected, self._reached))

    @contextlib.contextmanager
    def _scope(self, weight: float) -> Iterator[None]:
        self._once = None
        self._scopes.append(weight)
        try:
            yield
        finally:
            self._scopes.pop()

    def begin(self, *, by_parameter: bool = False) -> float:
        """A backward begins (again to say so does nothing). Returns W of this rank, this backward counted.

        Args:
            by_parameter: The hook of a parameter says so, and not that of an output before it.

        Raises:
            ConfigError: Some micro-batches since the last synchronised backward have a weight and others
                none.
        """
        if self.is_open:
            return self._total + self._weight
        number, first = self._reached_first
        self._reached = first if first and number == self._backward() else set()
        self._reached_first = -1, set()
        given, self._expected = self._given(), None
        if given is None and self._weighs_forwards:
            given = self._expect()
        if given is None and self.count == 0:
            return 1.0
        if given is None or (self.count == 0 and self._state.accumulated):
            raise ConfigError(
                "Some micro-batches of this step have a weight and others have none.",
                likely="weight() was called for some backward passes between two steps only",
                hint="give every micro-batch its weight, those in no_sync() too",
            )
        self.is_open = True
        self._weight, self._once = given, None  # one that is given from now on is of the next backward
        if given != 1.0:
            self._look_for_exchanges()
        total = self._total + given
        if self.count == 0:
            # A first micro-batch of weight 0 must leave nothing that others are added to.
            self._share = 1.0 if given or self._state.is_syncing else 0.0
        else:
            self._share = given / total if total else 0.0
        if self._share != 1.0 and not by_parameter:
            self._put_last()
        if 0 < self._total < total:
            self._shrink(self._total / total)
        if not self._state.is_syncing:
            self._awaited = object()
            dropped = functools.partial(self._forget_if_awaited, self._awaited)
            self._call_at_end(EndOfBackward(self._end_local, dropped))
        return total

    def _look_for_exchanges(self) -> None:
        """Search the graph of the backward that runs for exchanges that do not bear weights, once.

        One within another, as that of a block that is recomputed, has a graph of its own.
        """
        backward = self._backward()
        if backward in self._searched:
            return
        self._searched.add(backward)
        if not (found := self._find_exchanges()):
            return
        if self.unweighed is None:
            self.unweighed = Unweighed(_foreign_exchange_error(found), [])
        elif not self.unweighed.exchanges:
            return
        self.unweighed.exchanges.append((self.count, self._weight))

    def take(self) -> float:
        """The weight of the micro-batches in no_sync(), which are taken out; 1: they have none."""
        weight, unweighed = self._total if self.count else 1.0, self.unweighed
        self.end()
        self.unweighed = unweighed
        return weight

    def end(self) -> None:
        """A synchronised backward is over, or given up."""
        self._close_backward()
        self._hidden.clear()
        self.unweighed = None
        self._total, self.count = 0.0, 0

    def give_up_interrupted(self) -> None:
        """Forget a backward that ended in an exception, and with it what has accumulated."""
        self._awaited = None
        if self.is_open:
            self._forget()

    def _forget_if_awaited(self, end: object) -> None:
        """The end of a backward was dropped; perhaps late, when another one has begun."""
        if end is self._awaited:
            self.give_up_interrupted()

    def _forget(self) -> None:
        self.end()
        self._state.accumulated.clear()

    def _share_of_incoming(self) -> float:
        """What a gradient is multiplied by before it is accumulated. 0 takes it out, whatever it holds."""
        if not self.is_open:
            self.begin(by_parameter=True)
        elif self._weight != 1.0:
            self._look_for_exchanges()
        return self._share if self.is_open else 1.0

    def _given(self) -> float | None:
        if self._once is not None:
            return self._once
        return self._scopes[-1] if self._scopes else None

    def _end_local(self) -> None:
        self._awaited = None
        self.check_forwards()
        if self._expected is not None:
            self._hidden = [graph for graph in self._hidden if graph not in self._expected]
        self._total += self._weight
        self.count += 1
        self._close_backward()

    def _close_backward(self) -> None:
        self.is_open = False
        self._searched.clear()
        self._reached.clear()
        self._found = self._expected = None


def as_weight(weight: object, owner: str = "weight") -> float:
    """A weight as a float.

    Raises:
        ConfigError: It is not a finite number, or is negative, or too small or large for float32.
    """
    if type(weight) is float and _LEAST <= weight <= _MOST:  # in each backward of a model that is weighed
        return weight
    hint = "the number of samples, or of tokens, in the rank's part of the batch"
    arguments = Arguments(owner)
    number = arguments.number("weight", weight, least=0, what="a finite number", hint=hint)
    if number and not _LEAST <= number <= _MOST:
        expected = f"0, or from {_LEAST:g} to {_MOST:g}"
        raise arguments.refuse("weight", weight, expected, "divide all weights by the largest: ratios count")
    return number


def _sum(graphs: Iterable[Graph]) -> float:
    return sum(graph.weight for graph in graphs if graph.weight is not None)


def _listed(graphs: Iterable[Graph]) -> str:
    weights = sorted(graph.weight for graph in graphs if graph.weight is not None)
    return ", ".join(f"{weight:g}" for weight in weights) or "none"


_GIVE = "or give each backward its weight by weight()"


def _other_forwards_error(expected: Iterable[Graph], reached: Iterable[Graph]) -> ConfigError:
    """Gradients were weighed as if the backward came to other forwards than it did."""
    return ConfigError(
        "The weight of this backward is not that of the forwards that it went through.",
        seen=f"forwards with these weights: {_listed(reached)}",
        expected=f"with these: {_listed(expected)}, which were weighed before the first gradient",
        likely="a forward without no_grad() whose output is kept; or several blocks of reentrant activation "
        "checkpointing around the wrapped model",
        hint=f"run a forward that has no backward under no_grad(), or detach what is kept; {_GIVE}",
    )


def _hidden_error(hidden: Sequence[Graph]) -> ConfigError:
    """Forwards of which nobody knows whether the backward comes to them."""
    return ConfigError(
        "The weight of this backward is not known: it may go through other forwards than is seen.",
        seen=f"{len(hidden)} with outputs in objects in which no tensor is found, weights {_listed(hidden)}",
        expected="outputs that are tensors, or tuples, lists, dicts or dataclasses of them",
        likely="a forward without no_grad() that has no backward; or several forwards before one backward",
        hint=f"run a forward that has no backward under no_grad(), or return tensors; {_GIVE}",
    )


def _no_forward_error() -> ConfigError:
    """The backward comes to no forward."""
    return ConfigError(
        "The weight of this backward is not known: it goes through no forward that has one.",
        expected="a backward of what forward has returned: weight= gives each forward a weight",
        likely="a loss of the parameters alone, or of gradients, or of what another method has returned",
        hint="add it to the loss of a forward; or give the backward its weight by weight()",
    )


def _foreign_exchange_error(names: list[str]) -> ConfigError:
    """The graph of a weighted backward holds functions of others that exchange gradients between ranks."""
    return ConfigError(
        "The model or its loss exchanges gradients between ranks, and they do not bear the ranks' weights.",
        seen=f"in the graph of this backward: {', '.join(names)}",
        expected="no weight, or only layers that Paceline knows to weigh: its own SyncBatchNorm",
        likely="all_gather with gradient (a contrastive loss), or another library's layer that sums over "
        "ranks, together with weight= or weight()",
        hint=f"{SCALE_THE_LOSS}: that is right for every exchange",
    )
