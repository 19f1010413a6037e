"""Records the parameters that lie in memory of all ranks of a host, and checks writes to them.

A parameter stays the object that users and optimizers hold; a table maps it to its storage. An optimizer that
updates a part of the parameters on each rank uses `storage_of()`:

    storage = storage_of(parameter)            # None: the parameter is this rank's own
    place = storage.writable(parameter)        # the same elements in a writable mapping
    ... barrier over the ranks of `storage.core`; write a part of `place`; barrier again ...
    storage.note_writes()                      # count up the versions that autograd checks
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, cast

from paceline import _core
from paceline.errors import ConfigError, format_ranks
from paceline.reducer.backward_errors import shorten
from paceline.reducer.framework_ops import FrameworkOps, Tensor
from paceline.sharding.collective_writes import OneCopy, Place
from paceline.sharding.partial_steps import partial_step_error, partial_steps


class SharedStorage(Generic[Tensor]):
    """One host's copy of a model's parameters."""

    def __init__(
        self,
        copy: OneCopy,
        core: _core.HostGroup,
        ops: FrameworkOps[Tensor],
        is_in_backward: Callable[[], bool],
        *,
        allows_writing: bool,
    ) -> None:
        self.copy, self.core, self.ops, self.allows_writing = copy, core, ops, allows_writing
        self.is_in_backward = is_in_backward
        self.rank, self.world_size = core.rank, core.world_size
        # The step table lies behind the values, in the same memory, which outlives the ranks.
        memory = copy.memory
        self.step_table = _core.StepTable(memory.writable + copy.values_end, core.world_size, core.rank)
        # The writable mapping does not exist in a forked child.
        self._step_table_to_read = _core.StepTable(
            memory.values + copy.values_end, core.world_size, core.rank
        )
        self._parameters: list[tuple[weakref.ref[Tensor], int]] = []

    @property
    def is_writing(self) -> bool:
        return self.copy.is_writing

    def fill(self, parameter: Tensor, place: Place) -> None:
        if place.nbytes:
            target = self._view(parameter, self.copy.memory.writable + place.begin, place.nbytes)
            self.ops.copy(parameter, target)

    def move_in(self, parameter: Tensor, place: Place) -> None:
        """Move a parameter here, where rank 0's values are already."""
        if place.nbytes:
            values = self._view(parameter, self.copy.memory.values + place.begin, place.nbytes)
            self.ops.lay(parameter, values)
        self._parameters.append((weakref.ref(parameter), parameter.data_ptr()))
        _register(parameter, self)

    def move_out(self) -> None:
        """Give this rank a private copy of each parameter that is still here."""
        held = list(self._held())
        if not self._step_table_to_read.is_whole:
            partial_steps.mark(held, self.ops.versions, self._describe_missing())
        for parameter in held:
            self.ops.lay(parameter, parameter.detach().clone())
            _storages.pop(id(parameter), None)

    def writable(self, parameter: Tensor) -> Tensor:
        """The elements of a parameter that lies here, in a writable mapping, with its shape and strides.

        Don't call it within `writing()`, whose changes are not visible here before its end.
        """
        nbytes = self.ops.extent(parameter)
        if not nbytes:
            return cast(Tensor, parameter.detach())
        memory = self.copy.memory
        return self._view(parameter, parameter.data_ptr() - memory.values + memory.writable, nbytes)

    def note_writes(self) -> None:
        self.ops.count_writes(list(self._held()))

    def missing_parts(self) -> list[int]:
        """The ranks of this host that have not written their shards of the last step."""
        return [rank for rank in range(self.world_size) if not self._step_table_to_read.is_finished(rank)]

    def check_whole(self, owner: str) -> None:
        """Raise if these parameters hold half of a step."""
        if not self._step_table_to_read.is_whole:
            raise partial_step_error(owner, self._describe_missing())

    def _describe_missing(self) -> str:
        missing, step = self.missing_parts(), self._step_table_to_read.step
        return (
            f"step {step} of the optimizer: {format_ranks(missing)} of this host wrote no part, or half of it"
        )

    def check_in_place(self) -> None:
        """Raise if a parameter was written outside of `writing()` or has left this memory, or if a step was
        not completed.
        """
        self.raise_stray_write()
        self.check_whole(self.ops.names.wrapper)
        for (reference, address), place in zip(self._parameters, self.copy.places):
            parameter = reference()
            if parameter is not None and parameter.data_ptr() != address:
                self._raise_moved(place)

    def raise_stray_write(self) -> None:
        """Raise if this process has written to a parameter outside of `writing()`. The write is undone."""
        offset = self.copy.memory.take_stray_write()
        if offset < 0:
            return
        names = self.ops.names
        hint = (
            f"make the change in `with {names.variable}.writing():`, on every rank; {names.loading} does so "
            "itself"
            if self.allows_writing
            else "a model of share() is for inference; copy.deepcopy(model) gives this process its own"
        )
        raise ConfigError(
            f"This process wrote to '{self.copy.name_at(offset)}', which all ranks of its host share.",
            seen="an in-place change (copy_, clamp_, an optimizer's step, a parameter's .data) just before "
            "this; it is undone, all of it",
            likely="code that was written for a rank that has a model of its own",
            hint=hint,
            parameter=self.copy.name_at(offset),
        )

    def _raise_moved(self, first: Place) -> None:
        moved = [
            place.name
            for (reference, address), place in zip(self._parameters, self.copy.places)
            if (parameter := reference()) is not None and parameter.data_ptr() != address
        ]
        raise ConfigError(
            "Parameters that all ranks of a host share were moved out of the shared memory on this rank.",
            seen=f"{shorten(moved)} ({len(moved)} of {len(self._parameters)})",
            likely=f"{self.ops.names.moving} after wrapping: this rank would go on with its own copy",
            hint="convert the model first, then wrap it with share_parameters=True, on every rank",
            parameter=first.name,
        )

    def _held(self) -> Iterator[Tensor]:
        for reference, address in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() == address:
                yield parameter

    def _view(self, parameter: Tensor, pointer: int, nbytes: int) -> Tensor:
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        memory.owner = self.copy.memory  # type: ignore[attr-defined]
        return self.ops.over(memory, 0, nbytes, parameter.dtype, parameter.shape, parameter)


# By id(), because tensors compare element by element. An entry is removed with its parameter.
_storages: dict[int, tuple[weakref.ref[Any], SharedStorage[Any]]] = {}


def _register(parameter: Tensor, storage: SharedStorage[Tensor]) -> None:
    key = id(parameter)

    def forget(reference: weakref.ref[Tensor]) -> None:
        entry = _storages.get(key)
        if entry is not None and entry[0] is reference:
            del _storages[key]

    _storages[key] = weakref.ref(parameter, forget), storage


def storage_of(parameter: Tensor) -> SharedStorage[Tensor] | None:
    """The storage of a shared parameter; None: the parameter lies in private memory of this process."""
    entry = _storages.get(id(parameter))
    return None if entry is None else entry[1]


def storages_of(parameters: Iterable[Tensor]) -> list[SharedStorage[Tensor]]:
    """The storages of these parameters, each once."""
    found: dict[int, SharedStorage[Tensor]] = {}
    for parameter in parameters:
        storage = storage_of(parameter)
        if storage is not None:
            found[id(storage)] = storage
    return list(found.values())


def check_whole(owner: str, parameters: Iterable[Any]) -> None:
    """Raise if parameters hold half of an optimizer's step, in which a rank was lost."""
    held = list(parameters)
    for storage in storages_of(held):
        storage.check_whole(owner)
    partial_steps.check(owner, held)


def _report_stray_write() -> None:
    for storage in {id(storage): storage for _, storage in list(_storages.values())}.values():
        storage.raise_stray_write()


_core.tell_stray_writes(_report_stray_write)


@contextlib.contextmanager
def written(storage: SharedStorage[Tensor] | None) -> Iterator[None]:
    """A context in which parameters of `storage` may be changed; its end is collective. None: each rank has
    its own.

    Raises:
        ConfigError: A backward is running, or a parameter was written outside of `writing()` before.
        TornStepError: A rank was lost in the middle of a step.
        ReplicaError: Another rank has raised; nothing was written.
        ReplicasDifferError: Ranks have written different values; nothing was written.
        DeadlineError: A rank did not come to the end of its block; names it.
    """
    if storage is None:
        yield
        return
    storage.raise_stray_write()
    storage.check_whole("writing()")
    if storage.is_in_backward():
        raise ConfigError(
            "writing(): a backward is running, which may need the old values.",
            likely="a hook, or an optimizer that steps within backward",
            hint="change parameters when backward() has returned",
        )
    core = storage.core
    core.set_activity("in writing(), which all ranks of the host end together")
    storage.copy.begin()
    try:
        yield
    except BaseException as error:
        # The other ranks must not wait for this one. Their errors only quote this exception.
        with contextlib.suppress(Exception):
            storage.copy.end(error)
        raise
    else:
        storage.copy.end()
        storage.note_writes()
    finally:
        core.set_activity("")


def refuse_step(optimizer: object, parameters: Iterable[Tensor]) -> None:
    """Refuse a step of an optimizer that every rank would apply to the shared parameters."""
    for parameter in parameters:
        storage = storage_of(parameter)
        if storage is not None and not storage.is_writing:
            raise _refused(type(optimizer).__name__, storage)


def _refused(name: str, storage: SharedStorage[Any]) -> ConfigError:
    names = storage.ops.names
    if not storage.allows_writing:
        return ConfigError(
            f"{name}.step: its parameters are those of a model that several processes share to read.",
            seen=f"share(), {storage.world_size} processes",
            hint="copy.deepcopy(model) gives this process parameters of its own; or train with "
            f"{names.wrapper}(model, share_parameters=True)",
        )
    return ConfigError(
        f"{name}.step: its parameters are shared by {storage.world_size} ranks, and each would apply "
        "the update to them.",
        seen=f"{names.wrapper}(model, share_parameters=True); the optimizer may have been made before",
        expected="a step that all ranks make together",
        hint=f"`with {names.variable}.writing(): optimizer.step()` on every rank; nothing has been changed "
        "yet",
    )


def check_step_allowed(storage: SharedStorage[Any], owner: str, world_size: int) -> None:
    """Raise if a sharded step must not write to these shared parameters."""
    names = storage.ops.names
    if not storage.allows_writing:
        raise ConfigError(
            f"{owner}: its parameters are those of a model that several processes share to read.",
            seen=f"share(), {storage.world_size} processes",
            hint=f"{names.wrapper}(model, share_parameters=True) shares a model that is trained",
        )
    if storage.is_writing:
        raise ConfigError(
            f"{owner}.step within writing(): no rank would see what it writes before the end.",
            expected="a step outside of it: step() syncs the ranks by itself",
            hint=f"with this optimizer, call step() without `with {names.variable}.writing():`",
        )
    if world_size < storage.world_size:
        raise ConfigError(
            f"{owner}: some ranks that share its parameters take no part in its steps.",
            expected=f"the {storage.world_size} ranks that share the model's parameters",
            got=f"{world_size} ranks",
            hint="give the optimizer the process group over which the model is wrapped",
        )
