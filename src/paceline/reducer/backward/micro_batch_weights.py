"""The weighted mean over the micro-batches of one rank, kept as a running mean in each gradient.

After micro-batches with weights w_1 ... w_n, the gradient is sum(w_i * g_i) / W with W = sum(w_i). A further
micro-batch of weight w keeps this true: the present gradient is multiplied by W / (W + w) before the
framework adds to it, and each incoming gradient by w / (W + w). The reducer then weighs the ranks by their W,
so the mean over ranks and micro-batches is that of one process with the whole batch. A single micro-batch
needs no scaling.

If forwards have weights, the weight of a backward is the sum over the forwards that it goes through: a
forward may never get a backward, or get two, or get one in another order. Sums over ranks begin with the
first bucket, so these forwards must be known before the first gradient. Either the graph of only one forward
is left, or a walk through the graph of the backward finds them. At the end of the backward they are compared
with the forwards whose outputs have got gradients; if they differ, the step is refused on all ranks.

Models that were never given a weight pay nothing, because the hooks are installed at the first weight.
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
_LEAST, _MOST = 1e-20, 1e20  # weights multiply float32 gradients, and are added up


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
    """The weights of one rank's micro-batches, and their effect on its gradients.

    Args:
        state: The state of the model's backward passes.

    Attributes:
        of_forward: The weight of the forward under way; None if it has none.
        is_used: Whether any weight was ever given.
        is_open: Whether a backward has begun to weigh, and was neither ended nor given up since.
        unweighed: Why the gradients since the last synchronised backward are not weighed; None: they are.
        shared: Parameters that other wrapped models have too. Their gradients are not weighed here in a
            backward of those models.
        count: How many weighted micro-batches there were in no_sync() since the last synchronised backward.
    """

    def __init__(self, state: BackwardState) -> None:
        self.is_used = False
        self.unweighed: Unweighed | None = None
        self.shared: set[int] = set()
        self.count = 0
        living.add(self)
        self._searched: set[int] = set()  # backward passes whose graph was searched for exchanges
        self._state = state
        self._scopes: list[float] = []
        self._once: float | None = None
        self.of_forward: float | None = None
        self._weighs_forwards = False
        self._forwards: set[weakref.ref[Graph]] = set()  # the graphs left of forwards with weights
        self._hidden: list[Graph] = []  # those of them whose backward may bypass the outputs that were found
        self._reached: set[Graph] = set()  # those whose outputs the backward has reached
        self._reached_first: tuple[int, set[Graph]] = -1, set()  # those reached before weighing, by backward
        self._found: tuple[int, weakref.WeakSet[Graph]] | None = None  # by a walk, and in which backward
        self._expected: set[Graph] | None = None  # those whose weights `_weight` adds up
        self.is_open = False
        self._awaited: object = None  # stands for the end of a backward in no_sync() that is not over
        self._weight = 0.0
        self._share = 1.0
        self._total = 0.0

    @abstractmethod
    def _install(self) -> None:
        """Have `_share_of_incoming` multiply each gradient before the framework accumulates it."""

    @abstractmethod
    def _put_last(self) -> None:
        """Let hooks that the user has registered since see each gradient before `_share_of_incoming` does."""

    @abstractmethod
    def _shrink(self, factor: float) -> None:
        """Multiply the gradients that micro-batches have left, except older ones that none has added to."""

    @abstractmethod
    def _call_at_end(self, end: Callable[[], None]) -> None:
        """Call `end` when the running backward is over."""

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Whether the running call is a backward, and not one that only returns gradients."""

    @abstractmethod
    def reaches(self, node: object) -> bool:
        """Whether a backward from this node of the graph (None: there is none) reaches the model."""

    @abstractmethod
    def _mark(self, graph: Graph, output: object) -> bool:
        """Let `_find_forwards` find this graph by the outputs of its forward.

        Returns:
            Whether no backward can bypass them: all tensors were found, and each has a node in the graph.
        """

    @abstractmethod
    def _find_forwards(self, left: Iterable[Graph]) -> set[Graph] | None:
        """Those of these graphs that the running backward (the innermost one) leads to; None if unknown.

        Visits each node of its graph.
        """

    @abstractmethod
    def through_gradient(self, graph: Graph, gradient: Any) -> Any:
        """Let a backward of the result of autograd.grad(create_graph=True) reach this graph as well.

        Args:
            graph: A graph that the autograd.grad() call goes through.
            gradient: The gradient of an output.

        Returns:
            What replaces the gradient; None: nothing does.
        """

    @abstractmethod
    def _backward(self) -> int:
        """An identifier of the running backward, the innermost one. Cheap."""

    @abstractmethod
    def _find_exchanges(self) -> list[str]:
        """Names of other libraries' functions that exchange gradients between ranks in the running backward
        (the innermost one). Visits each node of its graph.
        """

    @property
    def is_weighing(self) -> bool:
        """Whether a backward that has begun to weigh is under way, and no exception has ended it."""
        return self.is_open and (self._state.phase >= RUNNING or self._awaited is not None)

    @property
    def current(self) -> float:
        """The weight of the current backward, or else of the next one; 1 if it has none."""
        if self.is_weighing:
            return self._weight
        given = self._given()
        if given is None and self._weighs_forwards and (ahead := self._ahead()):
            given = _sum(ahead)
        return 1.0 if given is None else given

    def refuse(self, error: ConfigError) -> None:
        """Make the end of this step's synchronised backward raise this error, on every rank."""
        if self.unweighed is None or self.unweighed.exchanges:
            self.unweighed = Unweighed(error, [])

    @property
    def awaits_end(self) -> bool:
        """Whether a backward in no_sync() has begun to weigh, and the framework still holds its end."""
        return self._awaited is not None

    def forget_given(self) -> None:
        """Forget the given weight, because this rank has no more data and its backward does not come."""
        self._once = None

    def take_over(self, before: MicroBatchWeights) -> None:
        """Continue with the state of the object that this one replaces."""
        self._scopes = before._scopes  # the same list, so that an open scope ends here
        self._once = before._once
        self._weighs_forwards = before._weighs_forwards
        self._total, self.count = before._total, before.count
        self.unweighed = before.unweighed
        if before.is_used:
            self.use()

    def use(self) -> None:
        """Install the hooks that weighing needs."""
        if not self.is_used:
            self.is_used = living.is_any_used = True
            self._install()

    def give(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Weigh the next backward, or, if the result is entered as a context, the backward passes within."""
        self.use()
        self._once = weight
        return self._scope(weight)

    def begin_forward(self, weight: float | None) -> None:
        """Note a new forward with its weight, or None."""
        if weight is not None:
            self.use()
        self.of_forward = weight

    def add_forward(self, graph: Graph, output: object) -> None:
        """End a weighted forward. Its weight counts in each backward that reaches its graph."""
        graph.weight, self.of_forward = self.of_forward, None
        self._weighs_forwards = True
        self._forwards.add(weakref.ref(graph, self._forwards.discard))
        if not self._mark(graph, output):
            self._hidden.append(graph)

    def reach(self, graph: Graph) -> None:
        """Note that a backward has reached an output of this graph's forward."""
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
        """The forwards that the running backward goes through, as far as known."""
        if len(self._reached) == len(self._forwards) == 1:
            return self._reached.copy()
        now = self._backward()
        if self._found is None or self._found[0] != now:
            left = [graph for find in list(self._forwards) if (graph := find()) is not None]
            found = self._find_forwards(left)
            self._found = now, weakref.WeakSet(left if found is None else found)
        return set(self._found[1]) or set(self._hidden if len(self._hidden) == 1 else ())

    def _expect(self) -> float:
        """The weight of the forwards that the backward goes through, at its beginning."""
        self._expected = expected = self._ahead()
        if others := [graph for graph in self._hidden if graph not in expected]:
            self.refuse(_hidden_error(others))
        elif not expected:
            self.refuse(_no_forward_error())
        return _sum(expected) if expected else 1.0

    def check_forwards(self) -> None:
        """Refuse the backward at its end if it did not reach the forwards whose weights it used."""
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
        """Begin a backward, unless it has begun. Returns W of this rank, including this backward.

        Args:
            by_parameter: Whether a parameter's hook calls this, and not the hook of an output before it.

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
        self._weight, self._once = given, None  # a weight given from now on is for the next backward
        if given != 1.0:
            self._look_for_exchanges()
        total = self._total + given
        if self.count == 0:
            # A first micro-batch of weight 0 must leave no gradient for others to be added to.
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
        """Search the graph of the running backward for exchanges that do not apply weights, once.

        A nested backward, such as that of a recomputed block, has its own graph.
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
        """The weight of the micro-batches in no_sync(), which this forgets; 1 if they have none."""
        weight, unweighed = self._total if self.count else 1.0, self.unweighed
        self.end()
        self.unweighed = unweighed
        return weight

    def end(self) -> None:
        """End a synchronised backward, or give it up."""
        self._close_backward()
        self._hidden.clear()
        self.unweighed = None
        self._total, self.count = 0.0, 0

    def give_up_interrupted(self) -> None:
        """Forget a backward that ended in an exception, and the gradients accumulated before it."""
        self._awaited = None
        if self.is_open:
            self._forget()

    def _forget_if_awaited(self, end: object) -> None:
        """The framework dropped the end of a backward, possibly after another one has begun."""
        if end is self._awaited:
            self.give_up_interrupted()

    def _forget(self) -> None:
        self.end()
        self._state.accumulated.clear()

    def _share_of_incoming(self) -> float:
        """The factor for each incoming gradient. 0 replaces it by zeros, even if it holds NaN."""
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
    """Convert a weight to a float.

    Raises:
        ConfigError: It is not a finite number, or is negative, or too small or large for float32.
    """
    if type(weight) is float and _LEAST <= weight <= _MOST:  # fast path, taken in each weighted backward
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
    """The backward reached other forwards than those whose weights were used."""
    return ConfigError(
        "The weight of this backward is not that of the forwards that it went through.",
        seen=f"forwards with these weights: {_listed(reached)}",
        expected=f"with these: {_listed(expected)}, which were weighed before the first gradient",
        likely="a forward without no_grad() whose output is kept; or several blocks of reentrant activation "
        "checkpointing around the wrapped model",
        hint=f"run a forward that has no backward under no_grad(), or detach what is kept; {_GIVE}",
    )


def _hidden_error(hidden: Sequence[Graph]) -> ConfigError:
    """It is unknown whether the backward reaches these forwards."""
    return ConfigError(
        "The weight of this backward is not known: it may go through other forwards than is seen.",
        seen=f"{len(hidden)} with outputs in objects in which no tensor is found, weights {_listed(hidden)}",
        expected="outputs that are tensors, or tuples, lists, dicts or dataclasses of them",
        likely="a forward without no_grad() that has no backward; or several forwards before one backward",
        hint=f"run a forward that has no backward under no_grad(), or return tensors; {_GIVE}",
    )


def _no_forward_error() -> ConfigError:
    """The backward reaches no forward."""
    return ConfigError(
        "The weight of this backward is not known: it goes through no forward that has one.",
        expected="a backward of what forward has returned: weight= gives each forward a weight",
        likely="a loss of the parameters alone, or of gradients, or of what another method has returned",
        hint="add it to the loss of a forward; or give the backward its weight by weight()",
    )


def _foreign_exchange_error(names: list[str]) -> ConfigError:
    """Functions of other libraries exchange gradients between ranks in the graph of a weighted backward."""
    return ConfigError(
        "The model or its loss exchanges gradients between ranks, and they do not bear the ranks' weights.",
        seen=f"in the graph of this backward: {', '.join(names)}",
        expected="no weight, or only layers that Paceline knows to weigh: its own SyncBatchNorm",
        likely="all_gather with gradient (a contrastive loss), or another library's layer that sums over "
        "ranks, together with weight= or weight()",
        hint=f"{SCALE_THE_LOSS}: that is right for every exchange",
    )
