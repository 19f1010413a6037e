"""Where Paddle's parameters live: what `sharding.shared_parameters` asks of its tensors.

The one idea: a parameter's memory is exchanged beneath it, so it stays the object, and keeps the name, by
which layers and optimizers know it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paceline import _core
from paceline.paddle import internals
from paceline.paddle.communicator.peers import Peers
from paceline.paddle.model.parameters import nbytes
from paceline.rendezvous.shared_memory import HostMemory
from paceline.sharding import moving, shared_parameters
from paceline.sharding.moving import overlapping
from paceline.sharding.shared_parameters import WrapperNames, refuse_step, storage_of, storages_of

SharedStorage = shared_parameters.SharedStorage[paddle.Tensor]
_LEAVE = "set parameter.no_sync = True; or train without sharing parameters"
_is_watching = False


class PaddlePlacing:
    """See `Placing`.

    Args:
        is_in_backward: Whether this thread runs a backward.
    """

    names = WrapperNames(
        wrapper="DataParallel",
        variable="model",
        loading="model.set_state_dict()",
        moving="layer.to(), or another conversion",
    )

    def __init__(self, is_in_backward: Callable[[], bool]) -> None:
        self.is_in_backward = is_in_backward

    def extent(self, tensor: paddle.Tensor) -> int:
        return nbytes(tensor)

    def view(self, like: paddle.Tensor, pointer: int, nbytes: int, owner: object) -> paddle.Tensor:
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        memory.owner = owner  # type: ignore[attr-defined]
        array: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]
        return internals.over(array, like.dtype).reshape(like.shape)

    def own_copy(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.detach().clone()

    def copy(self, source: paddle.Tensor, target: paddle.Tensor) -> None:
        with paddle.no_grad():
            paddle.assign(source, target)

    def lay(self, parameter: paddle.Tensor, values: paddle.Tensor) -> None:
        internals.lay_into(parameter, values)

    def note_writes(self, parameters: Sequence[paddle.Tensor]) -> None:
        internals.count_writes(parameters)

    def version(self, tensor: paddle.Tensor) -> int:
        return int(tensor.inplace_version)

    def hashes(self, tensors: Sequence[paddle.Tensor]) -> Sequence[int]:
        whole = [tensor.detach().contiguous() for tensor in tensors]
        return _core.hash_all([each.data_ptr() for each in whole], [nbytes(each) for each in whole])


def move(
    owner: str,
    tensors: Mapping[str, paddle.Tensor],
    peers: Peers,
    memory: HostMemory,
    is_in_backward: Callable[[], bool],
    *,
    are_equal: bool,
    allows_writing: bool,
) -> SharedStorage:
    """See `reducer.moving.move`.

    Args:
        is_in_backward: Whether this thread runs a backward.
    """
    _watch_optimizers()
    placing = PaddlePlacing(is_in_backward)
    return moving.move(
        owner, tensors, peers, memory, placing, are_equal=are_equal, allows_writing=allows_writing
    )


def move_out(layer: nn.Layer) -> None:
    """Give this process a copy of its own of each parameter of a layer that lies elsewhere."""
    for storage in storages_of([*layer.parameters(), *layer.buffers()]):
        storage.move_out()


def refuse_strange(owner: str, layer: nn.Layer, tensors: Mapping[str, paddle.Tensor], peers: Peers) -> None:
    """Refuse tensors that can't be shared. Collective.

    Args:
        owner: Who is to share them, for errors.
        layer: Holds them.
        tensors: By name.
        peers: The ranks.

    Raises:
        ConfigError: A rank has one; on every rank.
    """
    moving.refuse_strange(owner, _problems(layer, tensors), peers)


def _problems(layer: nn.Layer, tensors: Mapping[str, paddle.Tensor]) -> Iterator[str]:
    """Why these parameters can't be shared, each with what to do in a second line."""
    for name, tensor in tensors.items():
        if not tensor.is_dense():
            yield f"'{name}' is no dense tensor\n{_LEAVE}"
        elif not tensor.place.is_cpu_place():
            hint = 'paddle.set_device("cpu") before the model is built'
            yield f"'{name}' is on {tensor.place}, and not in the memory of the host\n{hint}"
        elif not tensor.is_contiguous():
            yield f"the elements of '{name}' do not lie one after the other\n{_LEAVE}"
        elif (storage := storage_of(tensor)) is not None and storage.is_writing:
            yield f"'{name}' is being written to\nleave `writing()` first"
    yield from overlapping((t.data_ptr(), name, nbytes(t)) for name, t in tensors.items() if t.size)
    shared = {id(tensor) for tensor in tensors.values()}
    for name, child in layer.named_sublayers(include_self=True):
        if isinstance(child, nn.Embedding) and internals.has_max_norm(child) and id(child.weight) in shared:
            yield (
                f"the embedding '{name}' has a max_norm: forward changes its weight\n"
                "leave max_norm out, and scale the weight within writing()"
            )


def _watch_optimizers() -> None:
    """From now on, look at each optimizer of this process before its step. Once; there is no way back."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        internals.watch_steps(lambda optimizer: refuse_step(optimizer, _parameters_of(optimizer)))


def _parameters_of(optimizer: Any) -> Iterator[paddle.Tensor]:
    for group in internals.groups_of(optimizer):
        yield from group["params"]
