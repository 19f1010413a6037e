"""Forwards whose backward is still to come: they keep the hooks of a model whose wrapper is gone.

The one idea: `loss = wrap(model)(x).sum()` drops the wrapper before its backward. So the
hooks on the outputs of a forward hold one object, which lives as long as their graph, and the model's hooks
stay until the wrapper is gone and no such graph is left to be run backward. One that has been is no reason to
stay: a `loss` that lingers must not make a later backward of the bare model wait for other ranks.

A backward that runs is known by `EndOfBackward`: the call at its end, or that the call was dropped.

The same for every framework.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from paceline.errors import ConfigError


class Graph:
    """One forward's. What its outputs' hooks hold, and nothing else.

    Args:
        on_gradient: Called with this graph when an output has got its gradient.
        is_averaged: Whether a backward through it is; not, if its forward ran in no_sync().
        counted_in: The backward in whose number of forwards it is, as `Graphs` counts them; None: in none.
        frozen: The parameters that were frozen when it was built.
    """

    __slots__ = ("__weakref__", "_on_gradient", "counted_in", "frozen", "is_averaged")

    def __init__(
        self,
        on_gradient: Callable[[Graph], None],
        *,
        is_averaged: bool,
        counted_in: int | None,
        frozen: frozenset[int],
    ) -> None:
        self._on_gradient = on_gradient
        self.is_averaged = is_averaged
        self.counted_in = counted_in
        self.frozen = frozen

    def hook(self, _: object) -> None:
        """The hook of each output."""
        self._on_gradient(self)


class Graphs:
    """The graphs of one wrapped model.

    Args:
        close: Removes the model's hooks.

    Attributes:
        reached: How many forwards the backward under way runs through that were counted since the last one.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._open: set[weakref.ref[Graph]] = set()
        self._begun: dict[weakref.ref[Graph], frozenset[int]] = {}  # and its `frozen`
        self._backwards = self.reached = 0
        self._has_wrapper = True
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether a backward has reached a forward's outputs, and its backward is not over."""
        return bool(self._begun)

    def frozen(self) -> frozenset[int] | None:
        """The parameters that were frozen in every graph that the backward under way runs through.

        None: it has come to no graph, because the outputs of its forwards could not be watched.
        """
        return frozenset.intersection(*self._begun.values()) if self._begun else None

    def add(
        self,
        on_gradient: Callable[[Graph], None],
        *,
        is_averaged: bool,
        is_counted: bool,
        frozen: frozenset[int] = frozenset(),
    ) -> Graph:
        """The graph of a new forward, open until a backward runs through it, or it is dropped."""
        counted_in = self._backwards if is_counted else None
        graph = Graph(on_gradient, is_averaged=is_averaged, counted_in=counted_in, frozen=frozen)
        if is_averaged:  # a local backward needs no hooks
            self._open.add(weakref.ref(graph, self._forget))
        return graph

    def check_open(self) -> None:
        """Before a backward begins.

        Raises:
            ConfigError: The hooks are gone already.
        """
        if self._is_closed:
            raise ConfigError(
                "This backward belongs to a model whose wrapper is gone, or has another process group now.",
                seen="a second backward of one forward, after the wrapper was dropped",
                hint="keep the wrapped model, not just its outputs; run forward again in the new group",
            )

    def begin(self, graph: Graph) -> None:
        """The backward under way runs through this graph."""
        self.check_open()
        self._begun[weakref.ref(graph)] = graph.frozen
        if graph.counted_in == self._backwards:
            graph.counted_in = None
            self.reached += 1

    def end_backward(self) -> None:
        """The backward is over, and the graphs that it ran through with it."""
        self._backwards += 1
        self.reached = 0
        self._open.difference_update(self._begun)
        self._begun = {}
        self._close_if_last()

    def drop_wrapper(self) -> None:
        """The user holds no wrapper any more."""
        self._has_wrapper = False
        self._close_if_last()

    def _forget(self, graph: weakref.ref[Graph]) -> None:
        self._open.discard(graph)
        self._close_if_last()

    def _close_if_last(self) -> None:
        if not self._has_wrapper and not self._open:
            self.close()

    def close(self) -> None:
        """Remove the model's hooks, whatever is still to be run."""
        if not self._is_closed:
            self._is_closed = True
            self._close()


class EndOfBackward:
    """The call that a framework makes at the end of a backward, or that never comes, because it raised.

    To be given to the framework, and not kept: it alone holds the call, together with what else it knows of
    that backward. An exception drops it all, and that the call goes unmade is how anybody learns that the
    backward is over. Where a framework runs a backward in a thread of its own, as torch does on devices, this
    thread may drop it while the user's has the exception already, and goes on.

    Args:
        end: Called when the backward is over.
        interrupted: Called when an exception has ended it, within the framework, or its end: it must neither
            wait nor raise. Before the user has the exception, where no other thread runs the backward.
    """

    __slots__ = ("_end", "_interrupted", "_is_made")

    def __init__(self, end: Callable[[], None], interrupted: Callable[[], None]) -> None:
        self._end = end
        self._interrupted = interrupted
        self._is_made = False

    def __call__(self) -> None:
        self._end()
        self._is_made = True  # else `interrupted` comes, too, and finds what `_end` has left to do

    def __del__(self) -> None:
        if not self._is_made:
            self._interrupted()
