"""With `weight=`, a backward has the weight of the forwards that it goes through, whatever others there were.

The reference is plain numpy on the whole batch, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from tests.harness import kept_ranks
from tests.multiprocess import conformance_numpy as reference
from tests.multiprocess.conformance_numpy import Arrays, batch
from tests.multiprocess.packed_outputs import unpack
from tests.multiprocess.test_conformance import adapter, close

both = pytest.mark.parametrize("framework", ["torch", "paddle"])
hows = pytest.mark.parametrize("how", ["dropped", "kept"])
on_two_ranks = kept_ranks(2, framework="framework")


def own(x: np.ndarray, rank: int) -> np.ndarray:
    """A quarter of the rows on rank 0, the others on rank 1."""
    return np.split(x, [len(x) // 4])[rank]


def means(*batches: np.ndarray) -> Arrays:
    """The sum of the gradients of whole batches."""
    return [sum(column) for column in zip(*(reference.gradients(reference.initial(), x) for x in batches))]


class Lost:
    """Runs forwards that never get a backward, with other weights than those that do."""

    def __init__(self, do: Any, wrapped: Any, rank: int, how: str) -> None:
        self._do, self._wrapped, self._rows, self._how = do, wrapped, 9 - 8 * rank, how
        self._kept: list[Any] = []

    def forward(self) -> None:
        loss = self._do.loss(self._wrapped, batch(self._rows, seed=5))
        if self._how == "kept":
            self._kept.append(loss)


@both
@hows
@pytest.mark.parametrize("mode", ["train", "eval", "eval on rank 1"])
@on_two_ranks
def test_a_forward_without_a_backward_weighs_nothing(
    group: object, framework: str, how: str, mode: str
) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    for _ in range(2):
        if mode != "train":
            wrapped.eval()
        if "rank 1" not in mode or group.rank == 1:
            lost.forward()
        wrapped.train()
        do.clear(wrapped)
        do.backward(do.loss(wrapped, own(x, group.rank)))
        close(do.gradients(model), means(x))


@both
@hows
@on_two_ranks
def test_a_lost_forward_between_a_forward_and_its_backward_weighs_nothing(
    group: object, framework: str, how: str
) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    loss = do.loss(wrapped, own(x, group.rank))
    lost.forward()
    do.backward(loss)
    close(do.gradients(model), means(x))


@both
@hows
@on_two_ranks
def test_a_lost_forward_between_micro_batches_weighs_nothing(group: object, framework: str, how: str) -> None:
    do, x = adapter(framework), batch(16)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    parts = np.split(own(x, group.rank), [1])
    for _ in range(2):
        do.clear(wrapped)
        lost.forward()
        with wrapped.no_sync():
            lost.forward()
            do.backward(do.loss(wrapped, parts[0]))
        lost.forward()
        do.backward(do.loss(wrapped, parts[1]))
        close(do.gradients(model), means(x))


@both
@hows
@on_two_ranks
def test_weights_of_several_forwards_of_one_backward_add_up(group: object, framework: str, how: str) -> None:
    do, x = adapter(framework), batch(16)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    parts = np.split(own(x, group.rank), [1])
    for _ in range(2):
        do.clear(wrapped)
        losses = []
        for part in parts:
            losses.append(do.loss(wrapped, part) * len(part))
            lost.forward()
        do.backward((losses[0] + losses[1]) / sum(map(len, parts)))
        close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_each_of_several_backwards_weighs_what_its_own_forward_does(group: object, framework: str) -> None:
    do, batches = adapter(framework), (batch(8), batch(4, seed=3))
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    inputs = [own(x, group.rank) for x in batches]
    inputs[1] = np.split(batches[1], [3])[group.rank]  # the ranks' weights the other way round
    for order in ((0, 1), (1, 0)):
        do.clear(wrapped)
        losses = [do.loss(wrapped, x) for x in inputs]
        for number in order:
            do.backward(losses[number])
        close(do.gradients(model), means(*batches))


@both
@hows
@on_two_ranks
def test_a_second_backward_of_one_forward_weighs_the_same(group: object, framework: str, how: str) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    loss = do.loss(wrapped, own(x, group.rank))
    loss.backward(retain_graph=True)
    lost.forward()
    loss.backward()
    close(do.gradients(model), means(x, x))


@both
@hows
@on_two_ranks
def test_a_rank_without_data_goes_on_beside_forwards_without_a_backward(
    group: object, framework: str, how: str
) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    for _ in range(1 + group.rank):
        do.clear(wrapped)
        wrapped.eval()
        lost.forward()
        wrapped.train()
        do.backward(do.loss(wrapped, own(x, group.rank)))
    wrapped.eval()
    lost.forward()
    wrapped.train()
    wrapped.finish()
    do.clear(wrapped)
    do.backward(do.loss(wrapped, own(x, group.rank)))
    close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_a_weight_that_is_given_replaces_those_of_forwards(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=lambda part: 5.0 - 4 * group.rank)
    lost = Lost(do, wrapped, group.rank, "kept")
    for how in ("around", "before"):
        do.clear(wrapped)
        lost.forward()
        loss = do.loss(wrapped, own(x, group.rank))
        if how == "around":
            with wrapped.weight(len(own(x, group.rank))):
                do.backward(loss)
        else:
            wrapped.weight(len(own(x, group.rank)))
            do.backward(loss)
        close(do.gradients(model), means(x))


@both
@hows
@pytest.mark.parametrize("packing", ["dict", "dataclass", "nested"])
@on_two_ranks
def test_outputs_that_are_no_plain_tensors(group: object, framework: str, how: str, packing: str) -> None:
    do, x = adapter(framework), batch(8)
    model = do.Packed(packing)
    wrapped = do.wrap(model, group, weight=len)
    kept = []
    for _ in range(2):
        do.clear(wrapped)
        lost = unpack(wrapped(do.tensor(batch(9 - 8 * group.rank))))
        if how == "kept":
            kept.append(lost)
        del lost
        do.backward(unpack(wrapped(do.tensor(own(x, group.rank)))).square().mean())
        close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_a_forward_that_may_have_a_backward_or_none_is_refused(group: object, framework: str) -> None:
    """Its output is in an object in which the wrapper does not look for tensors."""
    do, x = adapter(framework), batch(8)
    model = do.Packed("object")
    wrapped = do.wrap(model, group, weight=len)

    def loss() -> Any:
        return wrapped(do.tensor(own(x, group.rank))).tensor.square().mean()

    do.backward(loss())
    close(do.gradients(model), means(x))
    wrapped.eval()
    if group.rank == 1:
        wrapped(do.tensor(x))
    wrapped.train()
    do.clear(wrapped)
    last = loss()
    with pytest.raises(ConfigError, match="The weight of this backward is not known") as caught:
        do.backward(last)
    assert "rank 1 of 2" in str(caught.value)
    assert "2 with outputs in objects in which no tensor is found, weights 6, 8" in str(caught.value)
    do.clear(wrapped)
    do.backward(loss())
    close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_a_backward_of_parameters_alone_has_no_weight(group: object, framework: str) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, "kept")
    lost.forward()
    with pytest.raises(ConfigError, match="goes through no forward that has one"):
        sum(p.sum() for p in model.parameters()).backward()
    do.clear(wrapped)
    do.backward(do.loss(wrapped, own(x, group.rank)) + 0.0 * sum(p.sum() for p in model.parameters()))
    close(do.gradients(model), means(x))


@both
@pytest.mark.parametrize("how", ["no_grad", "inference"])
@on_two_ranks
def test_forwards_without_gradients_weigh_nothing(group: object, framework: str, how: str) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    for _ in range(2):
        do.clear(wrapped)
        with do.without_gradients(how):
            kept = do.loss(wrapped, x)
        do.backward(do.loss(wrapped, own(x, group.rank)))
        close(do.gradients(model), means(x))
        del kept


@both
@hows
@pytest.mark.parametrize("reentrant", [False, True])
@on_two_ranks
def test_a_recomputed_forward_weighs_once(group: object, framework: str, how: str, reentrant: bool) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    lost = Lost(do, wrapped, group.rank, how)
    for _ in range(2):
        do.clear(wrapped)
        loss = do.recomputed(wrapped, own(x, group.rank), reentrant=reentrant)
        lost.forward()
        do.backward(loss)
        close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_two_forwards_that_one_backward_makes_again(group: object, framework: str) -> None:
    """With torch each has its own backward; with Paddle the second is recomputed too late to be weighed."""
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len)
    parts = [np.split(own(x, rank), [1]) for rank in range(2)]
    losses = [do.recomputed(wrapped, part, reentrant=True) for part in parts[group.rank]]
    if framework == "torch":
        do.backward(losses[0] + losses[1])
        close(do.gradients(model), means(*map(np.concatenate, zip(*parts))))
        return
    with pytest.raises(ConfigError, match="not that of the forwards that it went through"):
        do.backward(losses[0] + losses[1])


@both
@hows
@on_two_ranks
def test_a_penalty_of_gradients_weighs_what_its_forward_does(group: object, framework: str, how: str) -> None:
    """The loss has two more terms, each of another forward, as the loss of a critic has."""
    do, batches = adapter(framework), [batch(8), batch(8, seed=3), batch(8, seed=4)]
    alone, model = do.network(), do.network()
    weights = ((1.0, 3.0), (5.0, 1.0), (2.0, 7.0))
    given: list[float] = []
    wrapped = do.wrap(model, group, weight=lambda _: given.pop(), find_unused_parameters=True)
    lost = Lost(do, wrapped, group.rank, how)

    def terms(net: Any, rank: int, which: list[int]) -> Any:
        losses = []
        for number in which:
            given.append(weights[number][rank])
            losses.append((do.loss, do.slope, do.loss)[number](net, own(batches[number], rank)))
        return sum(losses[1:], losses[0])

    for which in ([0, 1, 2], [1], [2, 1]):
        do.clear(alone)
        totals = [sum(weights[number][rank] for number in which) for rank in range(2)]
        for rank in range(2):
            do.backward(terms(alone, rank, which) * (totals[rank] / sum(totals)))
        expected = do.gradients(alone)
        do.clear(wrapped)
        given[:] = [9.0 - 8 * group.rank]
        lost.forward()
        do.backward(terms(wrapped, group.rank, which))
        for found, wanted in zip(do.gradients(model), expected):
            if wanted is not None:
                close([found], [wanted])


@both
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
@hows
@on_two_ranks
def test_forwards_without_a_backward_beside_options(
    group: object, framework: str, how: str, option: str
) -> None:
    do, x = adapter(framework), batch(8)
    model = do.network()
    wrapped = do.wrap(model, group, weight=len, **{option: True})
    lost = Lost(do, wrapped, group.rank, how)
    for _ in range(3):
        lost.forward()
        do.clear(wrapped)
        do.backward(do.loss(wrapped, own(x, group.rank)))
        close(do.gradients(model), means(x))


@both
@on_two_ranks
def test_a_backward_after_one_that_has_raised(group: object, framework: str) -> None:
    """There is no forward between the two backwards."""
    do, x = adapter(framework), batch(8)
    model = do.trapped()
    wrapped = do.wrap(model, group, weight=len)
    losses = [do.loss(wrapped, batch(9 - 8 * group.rank)), do.loss(wrapped, own(x, group.rank))]
    model[0].is_set = True
    with pytest.raises(OSError):
        do.backward(losses[0])
    model[0].is_set = False
    do.clear(wrapped)
    do.backward(losses[1])
    close(do.gradients(model), means(x))
