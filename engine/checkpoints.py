"""Saving and going on. A checkpoint is a folder that exists whole or not at all.

    checkpoints/step-000500/
        manifest.json                                what is in it, with size and hash of every file
        policy/weights.safetensors                   a role's weights, float32, by parameter name
        policy/optimizer.safetensors                 tensors of the optimizer state, by parameter name
        ema/weights.safetensors                      a lagging role, apart from the live weights

Weights are the very numbers that train. Files for other programs are made by an export, which may fold or round them.

Everything random is derived from (seed, step), and batches are a function of (seed, epoch, step), so the step is all
there is to remember of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import CheckpointError, WorkspaceError
from .workspace import disk_errors

LAYOUT_VERSION = 1
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
WEIGHTS = "weights.safetensors"
LEGACY_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


@dataclass(frozen=True)
class Entry:
    """One artifact: kind is "weights", "optimizer" or "lagging"; files are relative paths -> sha256."""

    role: str
    kind: str
    component: str
    dtype: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `settings` is the complete run; `optimizer` and `scaler` are plain values."""

    step: int
    epoch: int
    seed: int
    base: str  # identity of the base's denoiser files
    data: str  # identity of the pictures and captions
    settings: Mapping[str, Any]
    entries: tuple[Entry, ...]
    optimizer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scaler: Mapping[str, float] = field(default_factory=dict)
    layout_version: int = LAYOUT_VERSION

    def entry(self, role: str, kind: str) -> Entry:
        """Raises CheckpointError when there is no such entry."""
        for entry in self.entries:
            if (entry.role, entry.kind) == (role, kind):
                return entry
        raise CheckpointError(f"the checkpoint of step {self.step} holds no {kind} of role '{role}'")


def file_path(folder: Path, role: str, kind: str) -> Path:
    """The one place that knows where an artifact lies in a checkpoint folder."""
    return folder / role / (OPTIMIZER if kind == "optimizer" else WEIGHTS)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def list_steps(root: Path) -> list[int]:
    """Steps that have a checkpoint, in order. Unfinished writes do not count."""
    if not root.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{6,})", path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in names if match)


def newest(root: Path) -> Path | None:
    """The latest checkpoint folder, None when there is none."""
    steps = list_steps(root)
    return step_folder(root, steps[-1]) if steps else None


class Writer:
    """Writes one checkpoint into a temporary folder; `commit` makes it appear under its name in one rename."""

    def __init__(self, root: Path, step: int) -> None:
        self.target = step_folder(root, step)
        self.folder = root / f".writing-{self.target.name}"
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            remove_unfinished(root)  # of a process that was killed
            self.folder.mkdir()
        self.entries: list[Entry] = []

    def add_tensors(self, role: str, kind: str, tensors: Mapping[str, Tensor], *, component: str) -> None:
        """Write one artifact and record its hash."""
        path = file_path(self.folder, role, kind)
        path.parent.mkdir(exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        _flush(path)
        _flush(path.parent)
        files = {path.relative_to(self.folder).as_posix(): _sha256(path)}
        self.entries.append(Entry(role, kind, component, "float32", files))

    def commit(self, manifest: Manifest) -> Path:
        path = self.folder / MANIFEST
        path.write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
        _flush(path)
        _flush(self.folder)
        if self.target.exists():
            aside = _set_aside(self.target)
            self.folder.rename(self.target)
            shutil.rmtree(aside)
        else:
            self.folder.rename(self.target)
        _flush(self.target.parent)
        return self.target


def remove_unfinished(root: Path) -> None:
    """Give back the space of checkpoints that were not written to their end, or not removed to it."""
    for leftover in (*root.glob(".writing-*"), *root.glob(".removing-*")):
        shutil.rmtree(leftover)


@contextlib.contextmanager
def tidy(root: Path) -> Iterator[None]:
    """Where writing fails, leave nothing half done: on a full disk there must be room to say what happened."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            remove_unfinished(root)
        raise


def prune(root: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` checkpoints; returns the removed steps."""
    removed = list_steps(root)[:-keep]
    for step in removed:
        shutil.rmtree(_set_aside(step_folder(root, step)))
    return removed


def _set_aside(folder: Path) -> Path:
    """Under a name that does not count, so that a folder being removed is never taken for a checkpoint."""
    aside = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def read_manifest(folder: Path) -> Manifest:
    """The manifest, after checking that every file it names is there, whole and unchanged.

    A folder without a manifest is read as a plain LoRA folder when it holds one of the usual files. Raises
    CheckpointError otherwise, naming the file.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return _legacy_manifest(folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(Entry(**entry) for entry in data.pop("entries"))
        manifest = Manifest(entries=entries, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", _use_another(folder)) from error
    if manifest.layout_version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{folder} was written in layout {manifest.layout_version}, this program reads {LAYOUT_VERSION}"
        )
    for entry in manifest.entries:
        for name, digest in entry.files.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{folder} is not whole: {name} is missing", _use_another(folder))
            if _sha256(file) != digest:
                raise CheckpointError(
                    f"{folder} is damaged: {name} has changed since it was written", _use_another(folder)
                )
    return manifest


def entry_file(folder: Path, entry: Entry) -> Path:
    """The file of a one-file entry."""
    return folder / next(iter(entry.files))


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _legacy_manifest(folder: Path) -> Manifest:
    for name in LEGACY_FILES:
        if (folder / name).is_file():
            entry = Entry("policy", "weights", "", "", {name: _sha256(folder / name)})
            return Manifest(step=0, epoch=0, seed=0, base="", data="", settings={}, entries=(entry,))
    raise CheckpointError(f"{folder} holds no checkpoint: {MANIFEST} is missing", _use_another(folder))


def _use_another(folder: Path) -> str:
    others = [step for step in list_steps(folder.parent) if step_folder(folder.parent, step) != folder]
    if not others:
        return "there is no other checkpoint in this run; start it again"
    return f"move {folder.name} away to go on from step {others[-1]}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Make sure that the file's bytes, or the folder's names, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders for this
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise WorkspaceError(f"{path} cannot be written to disk: {error.strerror}") from error
    finally:
        os.close(descriptor)
