"""The constructor arguments that the wrappers of both frameworks share, and their checks.

Every argument is honoured or refused with an error; none is silently ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from paceline.arguments import Arguments, show
from paceline.errors import ConfigError
from paceline.reducer.backward.micro_batch_weights import as_weight
from paceline.reducer.backward_errors import shorten
from paceline.reducer.between_hosts.compressed_sums import ENCODINGS
from paceline.reducer.buffer_policy import check_policies
from paceline.reducer.local_sgd.options import LocalSGD
from paceline.reducer.mixed_precision import Precision

_Parameter = TypeVar("_Parameter")

MIB = 1 << 20
REDUCE_THROUGH = ("auto", "memory", "group")
NONFINITE_POLICIES = ("warn", "raise", "ignore")
HOSTS = "hosts"
"""A further value of `reduce_through`, in a front end that has a communicator between hosts."""
REDUCE = ("mean", "scatter")
DETERMINISTIC = ("world",)


SHARED_NAMES = (
    "broadcast_buffers",
    "bucket_cap_mb_list",
    "buffers",
    "check_replicas_every",
    "compress_between_hosts",
    "deterministic",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "init_sync",
    "init_sync_buffers",
    "local_sgd",
    "nonfinite",
    "reduce",
    "reduce_through",
    "share_parameters",
    "skip_all_reduce_unused_params",
    "static_graph",
    "timeout_s",
    "virtual_ranks",
    "warn_after_s",
    "weight",
)
"""Arguments that have the same meaning in both wrappers."""


_WITH_VIRTUAL_RANKS: Mapping[str, tuple[Any, ...]] = {
    "broadcast_buffers": (True, None),
    "compress_between_hosts": (None,),
    "delay_all_reduce_named_params": (None,),
    "forward_sync_buffers": (None,),
    "local_sgd": (None,),
    "mixed_precision": (None,),
    "reduce": ("mean",),
    "reduce_through": ("memory", "auto"),
    "share_parameters": (False,),
    "skip_all_reduce_unused_params": (False,),
    "static_graph": (False,),
}
"""The values that these arguments may have together with virtual_ranks."""


@dataclass(frozen=True, kw_only=True)
class WrapperOptions:
    """The checked options of a wrapped model that both front ends share.

    Attributes:
        bucket_cap_bytes: Largest size of a bucket.
        first_bucket_bytes: Largest size of the first bucket.
        bucket_caps_bytes: Largest sizes of the first, second, ... bucket; if not empty, they replace both.
        init_sync: Broadcast rank 0's parameters (and buffers) when wrapping.
        init_sync_buffers: Broadcast buffers (and running statistics), too, when wrapping.
        broadcast_buffers: Give every rank rank 0's buffers after each synchronised backward.
        syncs_forward: Give them at the start of training forwards, too.
        buffers: The policy of buffers, by name pattern.
        gradients_in_buffer: Gradients live in the gradient buffer, where they are averaged.
        skip_unused: Don't send buckets that no rank used in the backward before.
        allow_unused: A parameter without a gradient contributes 0.
        static_graph: The same parameters are unused in every backward; else backward raises.
        weight: The weight of this rank's gradients; a function computes it from forward's arguments.
        nonfinite: What to do about infinities and NaNs: "warn" once, "raise", or "ignore".
        reduce_through: Where gradients are averaged: in "memory" that the ranks share, over the process
            "group", within each of the "hosts" and then between them, or where it is best ("auto").
        timeout_s: Seconds to wait for the slowest rank; None: the group's own time-out.
        warn_after_s: Seconds after which a late rank is named in a warning; None: the default.
        check_replicas_every: Compare replicas after so many backward passes; None: only if ranks have written
            to their parameters a different number of times; 0: never.
        compress_between_hosts: How gradients are encoded between hosts, a key of ENCODINGS; None: not at all.
        deterministic: "world": the bits of one host, wherever the ranks are; None: no such promise.
        local_sgd: How replicas train on their own, and how often they sync; None: ranks average in each step.
        scatters: Each mean gradient is written only on the ranks that own it.
        share_parameters: The ranks of each host have one copy of the parameters.
        precision: The dtypes of parameters in forward, of averaged gradients, of buffers.
        virtual_ranks: Number of micro-batches over which each step averages; None: it averages over ranks.
        virtual_buffers: With virtual_ranks, the argument `buffers`; the field `buffers` is then "broadcast"
            for each pattern.
    """

    bucket_cap_bytes: int
    first_bucket_bytes: int
    bucket_caps_bytes: tuple[int, ...]
    init_sync: bool
    init_sync_buffers: bool
    broadcast_buffers: bool
    syncs_forward: bool
    buffers: Mapping[str, str]
    gradients_in_buffer: bool
    skip_unused: bool
    allow_unused: bool
    static_graph: bool
    weight: float | Callable[..., Any] | None
    nonfinite: str
    reduce_through: str
    timeout_s: float | None
    warn_after_s: float | None
    check_replicas_every: int | None
    compress_between_hosts: str | None
    deterministic: str | None
    local_sgd: LocalSGD | None
    scatters: bool
    share_parameters: bool
    precision: Precision[Any]
    virtual_ranks: int | None
    virtual_buffers: Mapping[str, str]

    def agreed_options(self) -> dict[str, str]:
        """The options that must be the same on all ranks, because their collectives would not match
        otherwise.
        """
        return {
            "bucket_cap_mb": str(self.bucket_cap_bytes / MIB),
            "mixed_precision": str(self.precision),
            "share_parameters": str(self.share_parameters),
            "bucket_cap_mb_list": str([cap / MIB for cap in self.bucket_caps_bytes]),
            "init_sync": str(self.init_sync),
            "broadcast_buffers": f"{self.broadcast_buffers}, {self.init_sync_buffers} at wrap",
            "forward_sync_buffers": str(self.syncs_forward),
            "buffers": str(dict(self.buffers)),
            "find_unused_parameters": "any" if self.static_graph else str(self.allow_unused),
            "static_graph": str(self.static_graph),
            "skip_all_reduce_unused_params": str(self.skip_unused),
            "nonfinite": self.nonfinite,
            "reduce_through": self.reduce_through,
            "check_replicas_every": str(self.check_replicas_every),
            "compress_between_hosts": str(self.compress_between_hosts),
            "deterministic": str(self.deterministic),
            "local_sgd": str(self.local_sgd),
            "reduce": "scatter" if self.scatters else "mean",
            "virtual_ranks": str(self.virtual_ranks),
            "virtual_buffers": str(dict(self.virtual_buffers)),
        }


class WrapperArguments:
    """The arguments of a wrapper's constructor."""

    def __init__(self, owner: str, through: tuple[str, ...] = REDUCE_THROUGH) -> None:
        self._owner, self._through = owner, through
        self.check = Arguments(owner)

    def mebibytes(self, name: str, value: float) -> int:
        size = self.check.number(name, value, above=0, what="a number of MiB", hint=f"for example {name}=25")
        return max(1, int(size * MIB))

    def nonfinite(self, value: str) -> str:
        return self.check.choice("nonfinite", value, NONFINITE_POLICIES)

    def reduce_through(self, value: str, *, skip_unused: bool) -> str:
        name = "reduce_through"
        value = self.check.choice(name, value, self._through)
        expected = (
            "another way with skip_all_reduce_unused_params, which sends gradients over the process group"
        )
        hint = f"leave out {name}, or the other argument"
        self.check.require(value != HOSTS or not skip_unused, name, value, expected, hint)
        return value

    def compression(self, value: str | None, reduce_through: str, *, skip_unused: bool) -> str | None:
        name = "compress_between_hosts"
        if value is None:
            return None
        value = self.check.choice(name, value, tuple(ENCODINGS))
        self._require_hosts(name, value, reduce_through, skip_unused=skip_unused)
        return value

    def deterministic(
        self, value: str | None, reduce_through: str, compression: str | None, *, skip_unused: bool
    ) -> str | None:
        name = "deterministic"
        if value is None:
            return None
        value = self.check.choice(name, value, DETERMINISTIC)
        self._require_hosts(name, value, reduce_through, skip_unused=skip_unused)
        expected = "None with compress_between_hosts, whose codes depend on the hosts and the buckets"
        hint = f"leave out {name}, or the other argument"
        self.check.require(compression is None, name, value, expected, hint)
        return value

    def local_sgd(self, value: LocalSGD | None, deterministic: str | None) -> LocalSGD | None:
        name = "local_sgd"
        if value is None:
            return None
        hint = "LocalSGD(every=16), of the package that has this wrapper"
        if not isinstance(value, LocalSGD):
            raise self.check.refuse(name, value, "a LocalSGD", hint, is_type=True)
        expected = "None with deterministic, because a host's own steps depend on who is on it"
        hint = f"leave out {name}, or the other argument"
        self.check.require(deterministic is None, name, value, expected, hint)
        return value

    def _require_hosts(self, name: str, value: str, reduce_through: str, *, skip_unused: bool) -> None:
        hint = f"leave out {name}, or the other argument"
        through_group = reduce_through == "group"
        for holds, other in (
            (through_group, 'reduce_through="group"'),
            (skip_unused, "skip_all_reduce_unused_params"),
        ):
            expected = f"None with {other}, which sends gradients over the process group alone"
            self.check.require(not holds, name, value, expected, hint)

    def optional_flag(self, name: str, value: bool | None) -> bool | None:
        return None if value is None else self.check.flag(name, value)

    def one_buffer_switch(
        self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
    ) -> tuple[bool | None, bool | None]:
        broadcast_buffers = self.optional_flag("broadcast_buffers", broadcast_buffers)
        forward_sync_buffers = self.optional_flag("forward_sync_buffers", forward_sync_buffers)
        if forward_sync_buffers is None or broadcast_buffers is None:
            return broadcast_buffers, forward_sync_buffers
        warnings.warn(
            f"{self._owner}: broadcast_buffers is ignored where forward_sync_buffers is given.",
            FutureWarning,  # torch's
            stacklevel=5,
        )
        return None, forward_sync_buffers

    def shared(
        self, arguments: Mapping[str, Any], precision: Precision[Any], cap_bytes: int, first_bytes: int
    ) -> dict[str, Any]:
        """The fields of `WrapperOptions`, from the arguments, which are checked here."""
        given, check = SimpleNamespace(**arguments), self.check
        broadcast_buffers, forward_sync_buffers = self.one_buffer_switch(
            given.broadcast_buffers, given.forward_sync_buffers
        )
        init_sync_buffers = self.optional_flag("init_sync_buffers", given.init_sync_buffers)
        find_unused_parameters = check.flag("find_unused_parameters", given.find_unused_parameters)
        static_graph = check.flag("static_graph", given.static_graph)
        skip_unused = check.flag("skip_all_reduce_unused_params", given.skip_all_reduce_unused_params)
        broadcasts = broadcast_buffers is not False
        caps_bytes = self.caps(given.bucket_cap_mb_list)
        cap_bytes = max(caps_bytes, default=cap_bytes)
        shares = check.flag("share_parameters", given.share_parameters)
        if shares:
            hint = "leave out one of the two"
            expected = "None with share_parameters=True: at a sync each rank writes to its own parameters"
            check.require(given.local_sgd is None, "local_sgd", given.local_sgd, expected, hint)
        in_other_dtype = precision.reduce_dtype is not None
        virtual_ranks = self.virtual_ranks(given.virtual_ranks, arguments)
        buffers = self.buffers(given.buffers)
        deterministic = given.deterministic
        if virtual_ranks is not None:
            deterministic = "world" if deterministic is None else deterministic
        return {
            "virtual_ranks": virtual_ranks,
            "virtual_buffers": {} if virtual_ranks is None else buffers,
            "bucket_cap_bytes": cap_bytes,
            "first_bucket_bytes": min(cap_bytes, first_bytes),
            "bucket_caps_bytes": caps_bytes,
            "precision": precision,
            "share_parameters": shares,
            "scatters": self.scatters(given.reduce, arguments, in_other_dtype=in_other_dtype),
            "init_sync": check.flag("init_sync", given.init_sync),
            "init_sync_buffers": broadcasts if init_sync_buffers is None else init_sync_buffers,
            "broadcast_buffers": broadcasts and forward_sync_buffers is not False,
            "syncs_forward": bool(forward_sync_buffers),
            "buffers": buffers if virtual_ranks is None else dict.fromkeys(buffers, "broadcast"),
            "gradients_in_buffer": check.flag("gradient_as_bucket_view", given.gradient_as_bucket_view),
            "skip_unused": skip_unused,
            "allow_unused": find_unused_parameters or static_graph,
            "static_graph": static_graph,
            "weight": self.weight(given.weight),
            "nonfinite": self.nonfinite(given.nonfinite),
            "reduce_through": self.reduce_through(given.reduce_through, skip_unused=skip_unused),
            "timeout_s": check.optional_seconds("timeout_s", given.timeout_s),
            "warn_after_s": check.optional_seconds("warn_after_s", given.warn_after_s),
            "check_replicas_every": self.passes("check_replicas_every", given.check_replicas_every),
            "compress_between_hosts": self.compression(
                given.compress_between_hosts, given.reduce_through, skip_unused=skip_unused
            ),
            "deterministic": self.deterministic(
                deterministic,
                given.reduce_through,
                given.compress_between_hosts,
                skip_unused=skip_unused,
            ),
            "local_sgd": self.local_sgd(given.local_sgd, given.deterministic),
        }

    def virtual_ranks(self, value: int | None, arguments: Mapping[str, Any]) -> int | None:
        """Check virtual_ranks, and refuse arguments that make the result depend on the number of
        processes.
        """
        name = "virtual_ranks"
        if value is None:
            return None
        value = self.check.whole(name, value, least=1, hint=f"{name}=8, for 1 to 8 processes")
        for other, usual in _WITH_VIRTUAL_RANKS.items():
            got = arguments.get(other)
            self.check.require(
                got in usual, other, got, f"{usual[-1]!r} with {name}", "leave it out, or virtual_ranks"
            )
        local = [pattern for pattern, policy in (arguments["buffers"] or {}).items() if policy == "local"]
        expected = (
            f'"average" or "broadcast" with {name}: a process that plays several has no buffers for each'
        )
        self.check.require(not local, "buffers", arguments["buffers"], expected, "leave local buffers out")
        return value

    def scatters(self, value: str, arguments: Mapping[str, Any], *, in_other_dtype: bool) -> bool:
        """Check `reduce`; True: each mean is written only on the ranks that own it."""
        if self.check.choice("reduce", value, REDUCE) == "mean":
            return False
        for holds, other in (
            (in_other_dtype, "a reduce_dtype in mixed_precision"),
            (
                bool(arguments.get("gradient_as_bucket_view")),
                "gradient_as_bucket_view, which keeps whole gradients",
            ),
            (arguments.get("local_sgd") is not None, "local_sgd, whose ranks step on their own"),
            (arguments.get("reduce_through") == "group", 'reduce_through="group"'),
            (arguments.get("delay_all_reduce_named_params") is not None, "delay_all_reduce_named_params"),
        ):
            expected = f'"mean" with {other}'
            self.check.require(not holds, "reduce", value, expected, "leave out one of the two")
        return True

    def caps(self, value: Sequence[float] | None) -> tuple[int, ...]:
        if value is None:
            return ()
        name = "bucket_cap_mb_list"
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            return tuple(self.mebibytes(name, cap) for cap in value)
        except (TypeError, ValueError, RuntimeError):  # also the ConfigError of a single cap
            expected = "positive numbers of MiB: of the first bucket, of the second, ..., of all others"
            raise self.check.refuse(name, value, expected, f"for example {name}=[1, 25]") from None

    def delayed(
        self,
        named: Iterable[tuple[str, _Parameter]] | Mapping[str, _Parameter] | None,
        trigger: _Parameter | None,
        *,
        known: Mapping[str, _Parameter],
        trained: Sequence[_Parameter],
    ) -> dict[str, _Parameter] | None:
        """delay_all_reduce_named_params as a dictionary; None: nothing is delayed."""
        name, trigger_name = "delay_all_reduce_named_params", "param_to_hook_all_reduce"
        if (named is None) != (trigger is None):
            raise ConfigError(
                f"{self._owner}: {name} and {trigger_name} need to be set at the same time.",
                expected="both or neither",
                got=f"{name}={show(named)},\n{trigger_name}={show(trigger)}",
                hint="both or neither; without, every gradient is averaged as soon as it is there",
            )
        if named is None:
            return None
        try:
            if isinstance(named, str):
                raise TypeError
            pairs = dict(named)
            if not all(isinstance(key, str) for key in pairs):
                raise TypeError
        except (TypeError, ValueError):
            expected, hint = "(name, parameter) pairs, and nothing else", "some of model.named_parameters()"
            raise self.check.refuse(name, named, expected, hint, is_type=True) from None
        wrong = [key for key, parameter in pairs.items() if known.get(key) is not parameter]
        if wrong:
            raise ConfigError(
                f"{self._owner}: these are no parameters of the model.",
                expected="(name, parameter) as model.named_parameters() gives them",
                got=f"{name}: {shorten(wrong)}",
                hint="take them from the model that is wrapped, before it is wrapped",
                argument=name,
            )
        if all(parameter is not trigger for parameter in trained):
            expected, hint = "a parameter of the model that is trained", "the parameter, not its name"
            raise self.check.refuse(trigger_name, trigger, expected, hint)
        return pairs

    def passes(self, name: str, value: int | None) -> int | None:
        hint = f"{name}=100; 0 for never; None where there is a reason"
        return None if value is None else self.check.whole(name, value, least=0, hint=hint)

    def weight(self, value: float | Callable[..., Any] | None) -> float | Callable[..., Any] | None:
        return value if value is None or callable(value) else as_weight(value, self._owner)

    def buffers(self, value: Mapping[str, str] | None) -> dict[str, str]:
        return check_policies(value, self._owner)
