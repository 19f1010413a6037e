"""The state of a training run: collected on one or more ranks, and loaded on every rank.

It is a dict of plain values:

    format, framework, world_size, good_backwards    numbers and a text
    model       the module's state_dict()
    versions    the `_metadata` of that, if it has any
    own         by rank: the tensors that each rank keeps separately, such as buffers that are "local"
    objects     the state of each registered object, by its name
    random      by rank: the states of its generators, as bytes
    virtual_ranks, seed    of `ddp.steps()`, from which random numbers are derived; None: steps() is not used
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.arguments import Arguments
from paceline.checkpoint import random_states
from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.checkpoint.plain_values import plain
from paceline.errors import ConfigError, PacelineError, warn
from paceline.reducer.backward_errors import shorten
from paceline.reducer.communicator import Communicator
from paceline.reducer.framework_ops import dtype_name
from paceline.reducer.model_agreement import ModelDescription, check_agreement, reporting_to_peers
from paceline.reducer.peers import Ranks
from paceline.rendezvous.messages import read_of_ranks

FORMAT = 1
_NUMBERS = ("format", "framework", "world_size", "good_backwards")
_FIELDS = (*_NUMBERS, "model", "versions", "own", "objects", "random")
_SAVING, _LOADING = "save the training state", "load a training state"


@dataclass(frozen=True)
class Training:
    """The parts from which a training state is made.

    Attributes:
        owner: The class of the wrapper.
        variable: The usual name of a wrapped model in user code, for errors.
        module: The model.
        ops: The framework's operations.
        peers: The ranks.
        communicator: Moves tensors between the ranks; None: there is one rank.
        parameters: The parameters that are the same on all ranks.
        in_step: Names of the buffers that are the same on all ranks.
        objects: The registered objects, by name.
        good_backwards: The number of good backward passes, including those before this process.
        reason_against: Why the state can't be saved or loaded; None: it can.
        writing: A context in which parameters may be written to.
        virtual_ranks: Number of virtual ranks; None: there are none, and each rank has random numbers of its
            own.
        seed: The seed of the random numbers of virtual ranks; None: not known yet.
    """

    owner: str
    variable: str
    module: Any
    ops: CheckpointOps
    peers: Ranks
    communicator: Communicator[Any] | None
    parameters: Mapping[str, Any]
    in_step: Collection[str]
    objects: Mapping[str, Any]
    good_backwards: int
    reason_against: ConfigError | None
    writing: Callable[[], AbstractContextManager[None]]
    virtual_ranks: int | None = None
    seed: int | None = None

    def call(self, method: str) -> str:
        """A method of the wrapper, for errors."""
        return f"{self.owner}.{method}"

    def agree(self, doing: str, **options: object) -> None:
        """Raise on every rank if the ranks do not make the same call with the same options. Collective."""
        described = {name: str(value) for name, value in options.items()}
        description = ModelDescription((), (), described, doing=doing)
        check_agreement(description, self.peers.exchange, self.peers.timeout_s)

    def reporting(self, doing: str) -> AbstractContextManager[None]:
        """A context that reports a ConfigError to the ranks that wait in `agree`."""
        return reporting_to_peers(lambda: (self.peers.exchange, self.peers.timeout_s), doing)


def check_registration(owner: str, objects: Mapping[str, Any], name: Any, item: Any) -> None:
    """Refuse objects that can't be registered."""
    check = Arguments(f"{owner}.register_state")
    check.text("name", name, hint='for example name="optimizer"', may_be_empty=False)
    if isinstance(item, type) or not (hasattr(item, "state_dict") and _loader_of(item)):
        expected, hint = "an object with state_dict() and load_state_dict()", "an optimizer, a sampler, ..."
        raise check.refuse("obj", item, expected, hint, is_type=True)
    if objects.get(name, item) is not item:
        raise check.refuse(
            "name", name, "a name that no other object has", "a name of its own for each object"
        )


def collect(training: Training, to: Collection[int]) -> dict[str, Any]:
    """The state on the ranks `to`; empty on other ranks. Collective. Its tensors are the trained ones, not
    copies.
    """
    ops, peers, rank = training.ops, training.peers, training.peers.rank
    with training.reporting(_SAVING):
        if training.reason_against is not None:
            raise training.reason_against
        held = training.module.state_dict()
        model = plain(held, ops, "the model")
        versions = plain(getattr(held, "_metadata", {}), ops, "the model's _metadata")
        own = _own_tensors(training, model)
        # On every rank, in case a state_dict() is collective. That of a sharded optimizer works on one rank.
        states = {
            name: _state_of(training, name)
            for name, item in training.objects.items()
            if not hasattr(item, "consolidate_state_dict")
        }
    training.agree(_SAVING, registered=list(training.objects), own=list(own), to=list(to))
    for target in to:
        for name, item in training.objects.items():
            if hasattr(item, "consolidate_state_dict"):
                item.consolidate_state_dict(to=target)
                if rank == target:
                    states[name] = _state_of(training, name)
    message = random_states.pack(random_states.random_states(ops, training.parameters.values()))
    messages = peers.exchange.all_gather(message, peers.timeout_s)
    owned = _gather_own(training, own)
    if rank not in to:
        return {}
    return {
        "format": FORMAT,
        "framework": ops.framework,
        "world_size": peers.world_size,
        "good_backwards": training.good_backwards,
        "model": model,
        "versions": versions,
        "own": owned,
        "objects": {name: states[name] for name in training.objects},
        "random": [
            {
                name: ops.ops.from_array(np.frombuffer(state, np.uint8).copy())
                for name, state in of_rank.items()
            }
            for of_rank in read_of_ranks(messages, random_states.unpack)
        ],
        "virtual_ranks": training.virtual_ranks,
        "seed": training.seed,
    }


def restore(training: Training, state: Any) -> int:
    """Load a state. Collective.

    Returns:
        The number of good backward passes before it was saved.
    """
    ops, rank = training.ops, training.peers.rank
    with training.reporting(_LOADING):
        if training.reason_against is not None:
            raise training.reason_against
        _check(training, state)
        model = dict(state["model"])
        same_world = state["world_size"] == training.peers.world_size
        if state["own"]:
            model |= state["own"][rank if same_world else 0]
        _check_model(training, model)
    training.agree(_LOADING, world_size=state["world_size"], good_backwards=state["good_backwards"])
    with training.reporting(_LOADING):
        with training.writing():
            whole: dict[str, Any] = OrderedDict(model)
            if state["versions"]:
                whole._metadata = state["versions"]  # type: ignore[attr-defined]
            _load(training, "the model", training.module, whole)
        for name, item in training.objects.items():
            _load(training, f"'{name}'", item, state["objects"][name])
        if same_world and not training.virtual_ranks:
            states = {
                name: ops.ops.as_array(value).astype(np.uint8).tobytes()
                for name, value in state["random"][rank].items()
            }
            random_states.set_random_states(ops, states, training.parameters.values())
    training.agree(_LOADING)
    if not same_world and not training.virtual_ranks and rank == 0:
        _warn_of_other_world(training, state)
    return int(state["good_backwards"])


def _own_tensors(training: Training, model: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors that each rank keeps separately, by name.

    Raises:
        ConfigError: Some of them are trained by each rank separately, so the optimizers' states differ too.
    """
    named = {
        **dict(training.module.named_parameters()),
        **dict(training.module.named_buffers()),
    }
    alike = [*training.parameters.values(), *(named[name] for name in training.in_step if name in named)]
    places = {tensor.data_ptr() for tensor in alike}
    tensor_class = training.ops.ops.tensor
    own = {
        name: tensor
        for name, tensor in model.items()
        if isinstance(tensor, tensor_class) and 0 not in tensor.shape and tensor.data_ptr() not in places
    }
    trained = [name for name in own if name in named and training.ops.ops.is_trained(named[name])]
    if trained and training.peers.world_size > 1:
        raise ConfigError(
            f"{training.call('training_state')}: each rank trains parameters of its own.",
            seen=shorten(trained),
            expected="parameters that all ranks have alike, and optimizers with one state",
            likely="they are named in module._ddp_params_and_buffers_to_ignore, or have no_sync = True",
            hint="save the state of each rank: model.state_dict() and optimizer.state_dict()",
        )
    return own if training.peers.world_size > 1 else {}


def _gather_own(training: Training, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """These tensors of all ranks, by rank; empty if there are none. Collective."""
    if not own:
        return []
    assert training.communicator is not None
    ops = training.ops.ops
    gathered = []
    for rank in range(training.peers.world_size):
        copies = {name: ops.empty(list(each.shape), each.dtype, each) for name, each in own.items()}
        if rank == training.peers.rank:
            for name, each in own.items():
                ops.copy(each, copies[name])
        training.communicator.broadcast(list(copies.values()), root=rank)
        gathered.append(copies)
    return gathered


def _state_of(training: Training, name: str) -> Any:
    try:
        state = training.ops.state_of(training.objects[name])
    except PacelineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{training.call('training_state')}: state_dict() of '{name}' has raised.",
            seen=f"{type(error).__name__}: {error}",
            hint="an object whose state_dict() works between two steps",
        ) from error
    return plain(state, training.ops, f"the state of '{name}'")


def _loader_of(item: Any) -> Callable[[Any], object] | None:
    """The method that loads its state: load_state_dict(), or Paddle's set_state_dict()."""
    found: Callable[[Any], object] | None = getattr(item, "load_state_dict", None)
    return getattr(item, "set_state_dict", None) if found is None else found


def _load(training: Training, what: str, item: Any, state: Any) -> None:
    load = _loader_of(item)
    assert load is not None
    try:
        load(state)
    except PacelineError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{training.call('load_training_state')}: {what} does not take the state that was saved of it.",
            seen=f"{type(error).__name__}: {error}",
            likely="it was made with other arguments, or of another class, than when the state was saved",
            hint="make it as it was; what comes before it in the state is loaded already",
        ) from error


def _check(training: Training, state: Any) -> None:
    """Raise unless this run can load the state. The model's tensors are checked by `_check_model`."""
    call, objects = training.call("load_training_state"), training.objects
    if not isinstance(state, Mapping):
        hint = f"what {training.variable}.training_state() has returned"
        raise Arguments(call).refuse("state", state, "a training state", hint, is_type=True)
    missing = [name for name in _FIELDS if name not in state]
    if missing:
        raise ConfigError(
            f"{call}: this is no training state.",
            expected=f"a dict with {', '.join(_FIELDS)}",
            got=f"a dict without {', '.join(missing)}",
            likely="it is a state_dict of the model alone; or it was not saved by the rank that "
            "training_state(to=0) has given it to: on all others it is empty",
            hint=f"save what {training.variable}.training_state() returns on rank 0; load that on every rank",
        )
    if (state["format"], state["framework"]) != (FORMAT, training.ops.framework):
        raise ConfigError(
            f"{call}: this training state can't be read here.",
            expected=f"format {FORMAT}, of {training.ops.framework}",
            got=f"format {state['format']}, of {state['framework']}",
            hint="the framework, and the version of Paceline, that have saved it",
        )
    saved_with, has = state.get("virtual_ranks"), training.virtual_ranks
    if None not in (saved_with, has) and saved_with != has:
        raise ConfigError(
            f"{call}: the state was saved with another number of virtual ranks.",
            expected=f"virtual_ranks={saved_with}, on any number of processes",
            got=f"virtual_ranks={has}",
            hint="pass what the run began with",
        )
    lacking = [name for name in objects if name not in state["objects"]]
    unknown = [name for name in state["objects"] if name not in objects]
    if lacking or unknown:
        seen = [f"registered, and not in the state: {shorten(lacking)}"] if lacking else []
        seen += [f"in the state, and not registered: {shorten(unknown)}"] if unknown else []
        register = f'{training.variable}.register_state("{(unknown or lacking)[0]}", ...)'
        raise ConfigError(
            f"{call}: other objects are registered than the state was saved with.",
            seen="\n".join(seen),
            hint=f"{register} before loading"
            if unknown
            else f"load the state first, and call {register} behind that",
        )


def _check_model(training: Training, saved: Mapping[str, Any]) -> None:
    """Raise if the saved tensors do not match those of the model."""
    own = training.module.state_dict()

    def form(value: Any) -> str:
        is_tensor = isinstance(value, training.ops.ops.tensor)
        return f"{tuple(value.shape)}, {dtype_name(value)}" if is_tensor else "no tensor"

    differing = [name for name in own if name in saved and form(own[name]) != form(saved[name])]
    rows = [
        ("only in this model", [name for name in own if name not in saved]),
        ("only in the state", [name for name in saved if name not in own]),
        (
            "others than saved",
            [f"{name}: {form(own[name])}, saved {form(saved[name])}" for name in differing],
        ),
    ]
    seen = [f"{what}: {shorten(names)}" for what, names in rows if names]
    if seen:
        raise ConfigError(
            f"{training.call('load_training_state')}: the state is that of another model.",
            seen="\n".join(seen),
            likely="the model was built from other arguments, or by other code",
            hint="build the model as it was when the state was saved",
        )


def _warn_of_other_world(training: Training, state: Mapping[str, Any]) -> None:
    own = f" Each rank has got rank 0's {shorten(list(state['own'][0]))}." if state["own"] else ""
    warn(
        f"{training.call('load_training_state')}: the state was saved by {state['world_size']} ranks, and is "
        f"loaded by {training.peers.world_size}: the run goes on with other random numbers.{own}"
    )
