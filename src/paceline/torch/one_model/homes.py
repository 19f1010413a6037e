"""Which parameters lie in memory that the ranks of a host share, and who may write to them.

The one idea: a `Parameter` stays the object that users and optimizers hold, and a table says where it lives.
`home_of()` is what an optimizer asks that updates a part of the parameters on each rank:

    home = home_of(parameter)                  # None: it is this rank's own
    place = home.writable(parameter)           # the same elements, where they may be written
    ... meet the ranks of `home.core`; write a part of `place`; meet again ...
    home.note_writes()                         # autograd learns that the values are others
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator

import torch

from paceline import _core
from paceline.errors import ConfigError
from paceline.reducer.one_copy import OneCopy, Place
from paceline.reducer.pass_errors import shorten
from paceline.torch.link.arena import extent


class Home:
    """One host's copy of a model's parameters.

    Args:
        copy: The memory, and writes to it that count for all.
        core: The ranks of this host, in a group of its own kind: they number from 0 there.
        allows_writing: Whether the model is trained; False: it is only read (`share()`).

    Attributes:
        rank: This rank's number on the host.
        world_size: The number of ranks on the host.
    """

    def __init__(self, copy: OneCopy, core: _core.HostGroup, *, allows_writing: bool) -> None:
        self.copy, self.core, self.allows_writing = copy, core, allows_writing
        self.rank, self.world_size = core.rank, core.world_size
        self._parameters: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def is_writing(self) -> bool:
        """Whether this rank is within `writing()`: it may change parameters in place."""
        return self.copy.is_writing

    def move_in(self, parameter: torch.Tensor, place: Place) -> None:
        """Let a parameter have its elements here, where rank 0's values are already."""
        if place.nbytes:
            view = self.view(parameter, self.copy.memory.values + place.begin, place.nbytes)
            parameter.data = view
        self._parameters.append((weakref.ref(parameter), parameter.data_ptr()))
        _register(parameter, self)

    def move_out(self) -> None:
        """Give this rank a copy of its own of each parameter that is still here."""
        with torch.no_grad():
            for parameter in list(self._held()):
                parameter.data = parameter.detach().clone(memory_format=torch.preserve_format)
                _homes.pop(id(parameter), None)

    def writable(self, parameter: torch.Tensor) -> torch.Tensor:
        """The elements of a parameter that lies here, of its shape and strides, where they may be written.

        Not within `writing()`, whose changes are seen by nobody before its end.
        """
        if not parameter.numel():
            return parameter.detach()
        memory = self.copy.memory
        return self.view(parameter, parameter.data_ptr() - memory.values + memory.writable, extent(parameter))

    def note_writes(self) -> None:
        """The elements have been written to: a backward that needs the old values raises, as always."""
        torch.autograd.graph.increment_version(list(self._held()))

    def check_in_place(self) -> None:
        """Raise if a write has strayed, or if a parameter has left this memory.

        Raises:
            ConfigError: Names the parameters.
        """
        self.raise_stray_write()
        for (reference, address), place in zip(self._parameters, self.copy.places):
            parameter = reference()
            if parameter is not None and parameter.data_ptr() != address:
                self._raise_moved(place)

    def raise_stray_write(self) -> None:
        """Raise if this process has written to a parameter outside of `writing()`. The write is undone."""
        offset = self.copy.memory.take_stray_write()
        if offset < 0:
            return
        hint = (
            "make the change in `with ddp.writing():`, on every rank; ddp.load_state_dict() does so itself"
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
            likely="module.to(), half(), share_memory() or `parameter.data = ...` after wrapping: this rank "
            "would go on with a copy of its own",
            hint="convert the model first, then wrap it with share_parameters=True, on every rank",
            parameter=first.name,
        )

    def _held(self) -> Iterator[torch.Tensor]:
        for reference, address in self._parameters:
            parameter = reference()
            if parameter is not None and parameter.data_ptr() == address:
                yield parameter

    def view(self, parameter: torch.Tensor, pointer: int, nbytes: int) -> torch.Tensor:
        """A tensor over these bytes, in a storage of its own: one saved parameter is not the whole model."""
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        memory.owner = self.copy.memory  # type: ignore[attr-defined]
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(parameter.dtype)
        return flat.as_strided(parameter.shape, parameter.stride())


# By identity: tensors compare element by element. An entry goes when its parameter does.
_homes: dict[int, tuple[weakref.ref[torch.Tensor], Home]] = {}


def _register(parameter: torch.Tensor, home: Home) -> None:
    key = id(parameter)

    def forget(reference: weakref.ref[torch.Tensor]) -> None:
        entry = _homes.get(key)
        if entry is not None and entry[0] is reference:
            del _homes[key]

    _homes[key] = weakref.ref(parameter, forget), home


def home_of(parameter: torch.Tensor) -> Home | None:
    """Where a parameter lives; None: in memory of this process alone."""
    entry = _homes.get(id(parameter))
    return None if entry is None else entry[1]


def homes_of(parameters: Iterable[torch.Tensor]) -> list[Home]:
    """Where any of these parameters live, each home once."""
    found: dict[int, Home] = {}
    for parameter in parameters:
        home = home_of(parameter)
        if home is not None:
            found[id(home)] = home
    return list(found.values())


def _tell_of_stray_write() -> None:
    for home in {id(home): home for _, home in list(_homes.values())}.values():
        home.raise_stray_write()


_core.tell_stray_writes(_tell_of_stray_write)
