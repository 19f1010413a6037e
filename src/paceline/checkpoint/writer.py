"""The process that writes checkpoints: `python -m paceline.checkpoint.writer`, started by a `WriterProcess`.

It reads one line of JSON for each checkpoint from its standard input, and answers with one line each. It
finishes the current checkpoint and ends when its input ends, or when the training process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_ops import CheckpointOps
from paceline.checkpoint.folder import FORMAT, Manifest, name_of, remove_old, sha256_of
from paceline.checkpoint.snapshot import Described, read_state

_LOOK_S = 1.0


def main(module: str, memory: str, answers: str, folder: str) -> None:
    """Write checkpoints until the last job is done.

    Args:
        module: The module with the framework's `CHECKPOINT_OPS`.
        memory: The file descriptor of the memory with the states.
        answers: The file descriptor of the pipe for the answers.
        folder: The folder to write to.
    """
    parent = os.getppid()
    ops: CheckpointOps = import_module(module).CHECKPOINT_OPS
    for job in _jobs(parent):
        answer = {"steps": job["steps"], "failed": _write(ops, int(memory), Path(folder), job)}
        try:
            os.write(int(answers), json.dumps(answer).encode() + b"\n")
        except OSError:  # the training process is gone
            return


def _jobs(parent: int) -> Any:
    """The checkpoints to write.

    The parent's pid is checked too, because children of the training process may hold its end of the pipe
    open.
    """
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _LOOK_S)[0]:
            continue
        received = os.read(0, 1 << 16)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            if (job := json.loads(line)) is None:  # the last line
                return
            yield job


def _write(ops: CheckpointOps, memory: int, folder: Path, job: dict[str, Any]) -> str:
    """Write one checkpoint; returns why it failed, or an empty string."""
    steps: int = job["steps"]
    try:
        state = read_state(memory, Described(*job["described"]), ops)

        def describe(file: str, size: int, digest: str) -> Manifest:
            versions = {
                "paceline": import_module("paceline").__version__,
                ops.framework: ops.version(),
                "python": platform.python_version(),
            }
            return Manifest(FORMAT, file, size, digest, steps, state["world_size"], ops.framework, versions)

        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, ops.suffix, lambda path: ops.save(state, path), describe, name_of(steps))
        remove_old(folder, steps, job["keep"], job["also"])
    except Exception as error:
        try:
            free = f"; {shutil.disk_usage(folder).free} bytes are free in {folder}"
        except OSError:
            free = ""
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{free}"
    return ""


def write_checkpoint(
    folder: Path,
    suffix: str,
    save: Callable[[Path], None],
    describe: Callable[[str, int, str], Manifest],
    name: str,
) -> None:
    """Write a checkpoint. If the process is killed at any moment, the checkpoint is whole or has no manifest.

    Args:
        folder: The folder to write to.
        suffix: The suffix of the framework's file.
        save: Writes the framework's file at the path that it is given.
        describe: Makes the manifest from the file's name, its size in bytes and its hash.
        name: The name of both files, without suffix.

    Raises:
        OSError: For example, the disk is full. No incomplete file remains.
    """
    target = folder / f"{name}{suffix}"
    temporary = folder / f"{target.name}.tmp"
    manifest = folder / f"{name}.json"
    temporary_manifest = folder / f"{manifest.name}.tmp"
    try:
        save(temporary)
        size, digest = _on_disk(temporary), sha256_of(temporary)
        # Remove the manifest of an older, damaged file of this name: it must not describe the new file.
        manifest.unlink(missing_ok=True)
        temporary.rename(target)
        _sync_folder(folder)
        temporary_manifest.write_text(json.dumps(asdict(describe(target.name, size, digest)), indent=1))
        _on_disk(temporary_manifest)
        temporary_manifest.rename(manifest)
        _sync_folder(folder)
    except BaseException:
        for path in (temporary, temporary_manifest):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def _on_disk(path: Path) -> int:
    """Flush a file to the disk; returns its size in bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # skips the framework's slow exit, for which the training process would wait
