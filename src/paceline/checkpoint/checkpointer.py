"""`Checkpointer`: saves the state of a run in the background, and resumes from the newest whole checkpoint.

One rank for each folder writes: rank 0, and if other ranks do not see its folder (hosts without a shared
disk), the lowest rank of those that see the same folder. When a checkpoint may be due, all ranks make one
small exchange and decide alike; no rank uses its own clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import signal
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.arguments import Arguments
from paceline.checkpoint.folder import Listing, list_checkpoints, name_of, why_damaged
from paceline.checkpoint.writer_process import WriterProcess
from paceline.errors import ConfigError, warn
from paceline.health.stop_signals import EXIT_STATUS, stop_signals
from paceline.rendezvous.messages import read_of_ranks

_log = logging.getLogger("paceline")
_OWNER = "Checkpointer"
_CLOSING_S = 600.0
_MOMENT_S = 1.0


class Checkpointer:
    """Saves a training state from time to time, and resumes from the newest.

    Each checkpoint is the `training_state()` of the wrapped model with `steps`, in the framework's own format
    (`step-00000100.pt`, `.pdparams` for Paddle), and a manifest beside it (`.json`) with its hash. Training
    waits only while the state is copied in memory. Another process writes the copy to the disk, and this
    process waits for it before it exits. When the disk is full, or the writing process dies, rank 0 warns and
    training goes on. A checkpoint counts only once its manifest exists, so an incomplete one never replaces
    an older one.

    SIGTERM or SIGUSR1, sent to any rank, stops the job: the next step() of all ranks saves, waits until the
    checkpoint is written, and raises SystemExit(75). The program's own handlers of these signals are called
    as well.

    Collective: the constructor, resume(), step() and save(), on all ranks and in the same order.

    Args:
        folder: The folder of the checkpoints. If hosts share no disk, each host has the same checkpoints in
            its own folder.
        ddp: The wrapped model, of torch or Paddle. Register other objects with `ddp.register_state()`.
        every_steps: Save at each step whose number is a multiple of this; None: the step number does not
            matter. The same on all ranks.
        every_s: Save when so many seconds, or a timedelta, have passed since the last checkpoint, by the
            clock of rank 0; None: time does not matter.
        keep: How many checkpoints to keep. Older ones are removed when a new one is whole.

    Raises:
        ConfigError: An argument is wrong, the folder can't be written to, or the model has no training state.

    Example:
        >>> with paceline.Checkpointer("checkpoints", ddp, every_steps=1000) as checkpointer:
        ...     steps = checkpointer.resume()       # 0 if there is none
        ...     while steps < 10_000:
        ...         train_step()
        ...         checkpointer.step()             # after optimizer.step(), on every rank
        ...         steps += 1
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        ddp: Any,
        every_steps: int | None = None,
        every_s: float | timedelta | None = None,
        keep: int = 3,
    ) -> None:
        check = Arguments(_OWNER)
        if not hasattr(ddp, "_training_state"):
            hint = "paceline.torch.DistributedDataParallel(model), or paceline.paddle.DataParallel(model)"
            raise check.refuse("ddp", ddp, "a wrapped model", hint, is_type=True)
        self._ddp = ddp
        training = ddp._training()
        self._ops, self._peers = training.ops, training.peers
        self._rank, self._world_size = training.peers.rank, training.peers.world_size
        with training.reporting("make a Checkpointer"):
            if training.reason_against is not None:
                raise training.reason_against
            self._folder = Path(folder).absolute()
            self._every_steps = (
                None if every_steps is None else check.whole("every_steps", every_steps, least=1)
            )
            self._every_s = check.optional_seconds("every_s", every_s)
            self._keep = check.whole("keep", keep, least=1)
        training.agree("make a Checkpointer", every_steps=every_steps, every_s=self._every_s, keep=keep)
        self._steps = self._begun_at = 0
        self._begun_s = time.monotonic()
        self._look_at = 1 if self._every_s else 0  # the next step at which to check rank 0's clock; 0: never
        self._is_due = False
        self._saved_at = -1
        self._whole = -1  # steps of the newest checkpoint that all folders have
        self._writers = self._find_writers()
        self._writer = None
        if self._rank in self._writers:
            self._writer = WriterProcess(self._ops, self._folder, self._keep)
        stop_signals.listen()
        # Wait for the writer at exit, because a launcher ends processes that a rank leaves behind.
        self._finish = weakref.finalize(self, _finish, self._writer, os.getpid())
        self._is_closed = self._has_warned = False
        self._has_others = any(self._gather({"found": bool(list_checkpoints(self._folder).whole)}, "found"))

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank keeps for copies: 0 before the first copy, and on ranks that do not
        write.
        """
        return 0 if self._writer is None else self._writer.memory.nbytes

    def resume(self) -> int:
        """Load the newest whole checkpoint, the same on every rank. Collective; call it before the first
        step.

        A checkpoint that is damaged or incomplete is skipped with a warning.

        Returns:
            How many steps were made; 0 if there is no checkpoint.

        Raises:
            ConfigError: The checkpoint is of another model, or of other objects than are registered.
        """
        self._check_open()
        self._has_others = False
        listing = list_checkpoints(self._folder) if self._writer is not None else Listing({}, {})
        whole = self._gather({"whole": sorted(listing.whole)}, "whole")
        known = [set(whole[rank]) for rank in self._writers]
        candidates = sorted(set.intersection(*known), reverse=True)
        newest = next((each for each in candidates if self._is_usable(each, listing)), 0)
        broken = [f"{self._folder}: {why}" for steps, why in sorted(listing.broken.items()) if steps > newest]
        self._warn_of([why for of_rank in self._gather({"seen": broken}, "seen") for why in of_rank])
        if not newest:
            self._begin_at(0)
            return 0
        training = self._ddp._training()
        with training.reporting("read a checkpoint"):
            path = self._folder / f"{name_of(newest)}{self._ops.suffix}"
            try:
                state = self._ops.load(path)
            except Exception as error:
                raise ConfigError(
                    f"{_OWNER}.resume: {path} can't be read, though it is as it was written.",
                    seen=f"{type(error).__name__}: {error}",
                    likely=f"another version of {self._ops.framework} has written it; see the manifest",
                    hint="that version; or move the file and its manifest away to begin with the one before",
                ) from error
        training.agree("read a checkpoint", steps=newest)
        self._ddp.load_training_state(state)
        self._begin_at(newest)
        self._saved_at = self._whole = newest
        return newest

    def step(self) -> None:
        """Count a step, and save if it is due. Call it on every rank, after optimizer.step(). Collective if
        it is due.

        If the previous checkpoint is still being written, the save moves to the next step at which it is not.

        Raises:
            SystemExit: A signal has asked the job to stop, and this step is saved.
            ConfigError: A registered object can't be saved; or the folder has checkpoints, and resume() was
                not called.
        """
        self._check_open()
        self._steps += 1
        if self._ddp._is_stopping:
            self._stop()
        if self._every_steps and self._steps % self._every_steps == 0:
            self._is_due = True
        if self._is_due or self._steps == self._look_at:
            self._sync()

    def save(self) -> None:
        """Save now: wait until the previous checkpoint is written, then copy the state. Collective.

        If the wait exceeds the time-out of the wrapped model, rank 0 warns, and the next step() at which
        nothing is being written saves instead.

        Raises:
            ConfigError: See step().
        """
        self._check_open()
        self._is_due = True
        self._save_in_time(waits_until_written=False)

    def close(self, timeout_s: float | timedelta = _CLOSING_S) -> None:
        """Wait until the checkpoints of this rank are written. Not collective; leaving the context calls it.

        Args:
            timeout_s: The longest wait in seconds. The writing process continues after that, unless it is
                killed.
        """
        limit_s = Arguments(f"{_OWNER}.close").seconds("timeout_s", timeout_s, may_be_zero=True)
        if self._is_closed:
            return
        self._is_closed = True
        if self._writer is not None:
            if not self._writer.close(limit_s):
                self._warn(f"a checkpoint in {self._folder} is still being written")
            self._warn_of(self._writer.take_failures(), on_each=True)
        self._finish()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"{_OWNER}: it was closed.", hint="make another one")

    def _begin_at(self, steps: int) -> None:
        """Count steps and time from here."""
        self._steps = self._begun_at = steps
        self._begun_s = time.monotonic()
        self._look_at = steps + 1 if self._every_s else 0

    def _gather(self, values: Mapping[str, Any], name: str) -> list[Any]:
        """One of the values of each rank, by rank. Collective."""
        return [each[name] for each in self._gather_all(values)]

    def _gather_all(self, values: Mapping[str, Any]) -> list[Any]:
        messages = self._peers.exchange.all_gather(json.dumps(values).encode(), self._peers.timeout_s)
        return read_of_ranks(messages, json.loads)

    # --- which ranks write ---

    def _find_writers(self) -> list[int]:
        """The lowest rank of each set of ranks that see the same folder. Collective."""
        writers: list[int] = []
        placed: set[int] = set()
        while len(placed) < self._world_size:
            writer = min(set(range(self._world_size)) - placed)
            token, failed = f".token-{secrets.token_hex(8)}", ""
            if writer == self._rank:
                try:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    (self._folder / token).touch()
                except OSError as error:
                    failed = str(error)
            reported = self._gather_all({"token": token, "failed": failed})[writer]
            sees = self._rank not in placed and os.path.exists(self._folder / reported["token"])
            seen = self._gather({"sees": sees}, "sees")
            if writer == self._rank:
                with contextlib.suppress(OSError):
                    (self._folder / token).unlink()
            if reported["failed"]:
                raise ConfigError(
                    f"{_OWNER}: rank {writer} of {self._world_size} can't write to the folder.",
                    seen=reported["failed"],
                    hint="a folder that this process may write to",
                    argument="folder",
                )
            writers.append(writer)
            placed |= {rank for rank, sees_it in enumerate(seen) if sees_it} | {writer}
        return writers

    # --- saving ---

    def _save_in_time(self, *, waits_until_written: bool) -> None:
        """Save if it is due, or stop waiting with a warning at the model's time-out. Collective."""
        limit_s = self._peers.timeout_s
        until = time.monotonic() + limit_s
        while self._sync() and (self._is_due or waits_until_written):
            # Wait in short rounds with an exchange in each, so that no rank waits for a disk within a
            # collective. The clock of rank 0 decides, so that all ranks stop after the same round.
            if self._gather({"late": time.monotonic() >= until}, "late")[0]:
                if self._is_due:
                    said = f"step {self._steps} is not saved now: after {limit_s:g} s an older checkpoint"
                    self._warn_of([f"{said} was still being written to {self._folder}"])
                return
            if self._writer is not None:
                self._writer.wait(_MOMENT_S)

    def _sync(self) -> bool:
        """Check together whether a checkpoint is due, and save it if nothing is being written. Collective.

        Returns:
            Whether something is being written now.
        """
        if self._has_others:
            raise ConfigError(
                f"{_OWNER}: the folder has checkpoints of another run.",
                where=str(self._folder),
                seen="resume() was not called, so this run does not go on from them, and would replace them",
                hint="call checkpointer.resume() before the first step; or choose an empty folder",
            )
        writer = self._writer
        own: dict[str, Any] = {"wait": self._steps_to_wait(), "next": self._steps_after_saving()}
        if writer is not None:
            own |= {"busy": writer.is_busy(), "whole": max(writer.written, self._whole)}
            own["failures"] = writer.take_failures()
        reports = self._gather_all(own)
        writing = [reports[rank] for rank in self._writers]
        self._warn_of([failure for each in writing for failure in each["failures"]])
        self._whole = min(each["whole"] for each in writing)
        if self._every_s:
            self._is_due |= reports[0]["wait"] == 0
            self._look_at = self._steps + max(1, reports[0]["wait"])
        if any(each["busy"] for each in writing):
            return True
        if not self._is_due:
            return False
        self._is_due = False
        if self._saved_at == self._steps == self._whole:
            return False
        self._save()
        self._saved_at = self._steps
        if self._every_s:
            self._begun_at, self._begun_s = self._steps, time.monotonic()
            self._look_at = self._steps + reports[0]["next"]
        return True

    def _stop(self) -> None:
        """Save, wait until the checkpoint is written, and end this process. Collective."""
        self._is_due = True
        self._save_in_time(waits_until_written=True)
        stop_signals.listen()  # until the process ends, because the launcher may forward the signal only now
        self.close(_MOMENT_S)
        if self._rank == 0:
            received = stop_signals.received
            by = signal.Signals(received).name if received else "another rank's signal"
            newest = f"the newest checkpoint in {self._folder} is that of step {self._whole}"
            _log.warning(
                "paceline: stopped after step %d by %s; %s. Exit status %d: to be resumed",
                self._steps,
                by,
                newest if self._whole >= 0 else f"{self._folder} has no whole checkpoint yet",
                EXIT_STATUS,
            )
        raise SystemExit(EXIT_STATUS)

    def _save(self) -> None:
        if not self._ddp._registered and self._rank == 0 and not self._has_warned:
            self._has_warned = True
            self._warn("nothing is registered, so checkpoints have no optimizer: ddp.register_state()")
        state = self._ddp._training_state(self._writers)
        if self._writer is not None:
            # Keep the newest checkpoint that all folders have, until all have this one.
            self._writer.begin({**state, "steps": self._steps}, self._steps, [self._whole])
            self._warn_of(self._writer.take_failures() if self._rank == 0 else [])

    def _steps_to_wait(self) -> int:
        """Steps until the clock is to be checked again; 0: it is time to save. By this rank's clock."""
        steps, elapsed_s = self._steps - self._begun_at, time.monotonic() - self._begun_s
        if self._every_s is None or elapsed_s >= self._every_s:
            return 0
        # Look ahead at most as many steps as were measured, because steps may become slower.
        return max(1, min(steps, math.floor((self._every_s - elapsed_s) * steps / max(elapsed_s, 1e-9))))

    def _steps_after_saving(self) -> int:
        """Steps until the clock is to be checked, if a checkpoint is saved now."""
        steps, elapsed_s = self._steps - self._begun_at, time.monotonic() - self._begun_s
        expected = math.floor((self._every_s or 0.0) * steps / max(elapsed_s, 1e-9))
        return max(1, min(2 * steps, expected))

    # --- checkpoints in the folders ---

    def _is_usable(self, steps: int, listing: Listing) -> bool:
        """True if a checkpoint is whole in all folders; if not, rank 0 warns. Collective."""
        why = why_damaged(self._folder, listing.whole[steps]) if self._writer is not None else ""
        reasons = [each for each in self._gather({"why": why and f"{self._folder}: {why}"}, "why") if each]
        self._warn_of(reasons)
        return not reasons

    def _warn_of(self, reasons: Sequence[str], *, on_each: bool = False) -> None:
        if self._rank == 0 or on_each:
            for reason in reasons:
                self._warn(reason)

    def _warn(self, text: str) -> None:
        warn(f"{_OWNER}: {text}.")


def _finish(writer: WriterProcess | None, pid: int) -> None:
    """Wait for the writer when the Checkpointer is no longer used; does nothing in a forked child."""
    if os.getpid() == pid:
        if writer is not None:
            writer.close(_CLOSING_S)
        stop_signals.leave()
