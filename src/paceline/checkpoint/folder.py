"""A folder of checkpoints: lists them, and removes old ones. `writer` writes them.

A checkpoint is two files: `step-00000012.pt`, of the framework's own format, and `step-00000012.json`, its
manifest. The manifest is written after the other file is on the disk, and each file is renamed to its name
only when it is complete. So a checkpoint with a manifest is whole, unless it was damaged later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

FORMAT = 1
_PIECE_BYTES = 1 << 20
_NAME = re.compile(r"step-(\d{8,})\.\w+(\.tmp)?")


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        format: The version of this file format.
        file: The name of the framework's file.
        bytes: Its size.
        sha256: Its hash.
        steps: Number of steps made before it was saved.
        world_size: Number of ranks that made them.
        framework: "torch" or "paddle".
        versions: The versions of Paceline, the framework and Python.
    """

    format: int
    file: str
    bytes: int
    sha256: str
    steps: int
    world_size: int
    framework: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Listing:
    """The contents of a folder.

    Attributes:
        whole: Manifests by the number of steps; their files may be damaged.
        broken: Why some files are no checkpoint, by the number of steps.
    """

    whole: dict[int, Manifest]
    broken: dict[int, str]


def name_of(steps: int) -> str:
    """The name of a checkpoint's files, without suffix."""
    return f"step-{steps:08d}"


def list_checkpoints(folder: Path) -> Listing:
    """Read the manifests of a folder, which need not exist."""
    names: dict[int, list[str]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if found := _NAME.fullmatch(path.name):
            names.setdefault(int(found[1]), []).append(path.name)
    listing = Listing({}, {})
    for steps, of_steps in names.items():
        manifest = f"{name_of(steps)}.json"
        if manifest not in of_steps:
            listing.broken[steps] = f"{sorted(of_steps)[0]} has no manifest: it was not written to the end"
            continue
        try:
            read = Manifest(**json.loads((folder / manifest).read_bytes()))
            if read.format != FORMAT or read.steps != steps:
                raise ValueError(f"format {read.format}, step {read.steps}")
            listing.whole[steps] = read
        except (OSError, ValueError, TypeError) as error:
            listing.broken[steps] = f"{manifest} can't be read: {error}"
    return listing


def why_damaged(folder: Path, manifest: Manifest) -> str:
    """Why the file of a checkpoint differs from what was written, in words that name it; empty: it does
    not.
    """
    try:
        size = (folder / manifest.file).stat().st_size
        if size != manifest.bytes:
            return f"{manifest.file} has {size} bytes, and not {manifest.bytes}"
        if sha256_of(folder / manifest.file) != manifest.sha256:
            return f"{manifest.file} has other contents than were written: its SHA-256 differs"
    except OSError as error:
        return f"{manifest.file} can't be read: {error.strerror}"
    return ""


def remove_old(folder: Path, written: int, keep: int, also: Collection[int] = ()) -> None:
    """Keep the new checkpoint and the newest whole ones before it, and remove all others.

    Args:
        folder: The folder of the checkpoints.
        written: The number of steps of the new checkpoint. Checkpoints with more steps were skipped as
            damaged when the run resumed.
        keep: How many to keep.
        also: Step numbers of further checkpoints to keep.
    """
    earlier = sorted(steps for steps in list_checkpoints(folder).whole if steps < written)
    kept = {written, *also, *earlier[max(0, len(earlier) - keep + 1) :]}
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix != ".json"):  # manifests first
        found = _NAME.fullmatch(path.name)
        if found and (int(found[1]) not in kept or found[2]):
            with contextlib.suppress(OSError):
                path.unlink()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
