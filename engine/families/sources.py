"""Where a base model is and what it says about itself, read without loading weights."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import BaseModelError, WorkspaceError
from ..settings.schema import Base
from ..workspace import expand
from . import hub

EMBEDDED = ("embedded/unet", "embedded/flow")
PICKLES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}
NEVER_READ = PICKLES | {".msgpack", ".h5", ".onnx", ".pb"}  # copies of the weights for other programs
HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE_FILE_BYTES = 16 << 20
SAMPLE_BYTES = 1 << 12
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit

Check = Callable[[str, Mapping[str, Any]], object]


@dataclass(frozen=True)
class LocatedBase:
    """A base that exists on this machine.

    name is what the user wrote; path is a diffusers folder or a single .safetensors file; configuration is the folder
    with the components' configurations, which is path itself for a folder; index is its model_index.json; defaults
    come from an optional safelight.json in it; commit is the hub's, where it is known; notes say what was assumed.
    """

    name: str
    path: Path
    kind: Literal["folder", "single_file"]
    configuration: Path
    index: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    commit: str | None = None
    notes: tuple[str, ...] = ()

    def config(self, component: str) -> dict[str, Any]:
        """A component's configuration. Raises BaseModelError when it is missing or not JSON."""
        folder = self.configuration / component
        for file_name in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
            if (folder / file_name).is_file():
                return _read_json(folder / file_name)
        raise BaseModelError(f"{self.name}: no configuration of '{component}' in {folder}", "is the base complete?")

    def identity(self, components: Sequence[str]) -> str:
        """Hash over the components' files that changes when a weight or configuration file does.

        It says nothing about where and when the files were written, so a copy or a new download is the same base.
        """
        hashes = [_file_identity(self.path)] if self.kind == "single_file" else []
        for name in components:
            folder = self.configuration / name
            if not folder.is_dir():
                raise BaseModelError(f"{self.name}: there is no folder '{name}' in it", "is the base complete?")
            chosen = f"{self.variant}." if self.variant and has_variant(folder, self.variant) else ""
            hashes.append(chosen + _folder_identity(folder))
        return "-".join(hashes)

    @property
    def cpu_threads(self) -> int | None:
        """How many CPU threads suit the base, where it says so."""
        wanted = self.defaults.get("cpu_threads")
        return int(wanted) if wanted else None

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes (height, width) the base was trained at, where it says so; empty means any."""
        return tuple((int(h), int(w)) for h, w in self.defaults.get("sizes", ()))


def locate(base: Base, check: Check | None = None) -> LocatedBase:
    """Find a base. A hub id is downloaded, or taken from the hub's cache on this machine when there is no network.

    check is given the name and the model index before any weight is downloaded, and raises for an unwanted base.
    Raises BaseModelError saying what is wrong.
    """
    check = check or (lambda name, index: None)
    name = base.source
    if name.startswith("embedded/") and name not in EMBEDDED:
        raise BaseModelError(f"there is no base '{name}'", f"embedded bases are {' and '.join(EMBEDDED)}")
    try:
        path = expand(name)
    except WorkspaceError as error:
        raise BaseModelError(f"base model: {error.message}", error.hint) from error
    if name in EMBEDDED:
        path = Path(__file__).parent.parent / "embedded" / name.split("/")[1]
    elif path.suffix.lower() in PICKLES and not path.is_dir():
        raise BaseModelError(
            f"{name} is a pickle file, which can run code when it is opened, so it is refused",
            "convert it to .safetensors, or use a source that offers .safetensors",
        )
    elif not path.exists() and _is_hub_id(name):
        return _folder(name, _download(base, check), base.variant, check)
    if base.revision is not None:
        raise BaseModelError(f"base.revision is for models of the hub, but {name} is not one", "leave it out")
    if path.is_dir():
        return _folder(name, path.absolute(), base.variant, check)
    if base.variant is not None:
        raise BaseModelError(f"base.variant is for diffusers folders, but {name} is not one", "leave it out")
    if path.is_file():
        return _single_file(name, path.absolute(), check)
    raise BaseModelError(
        f"base model {name} does not exist",
        "of a model page's address give only 'owner/name'"
        if "://" in name
        else "give a folder, a .safetensors file or a hub id 'owner/name'",
    )


def has_variant(folder: Path, variant: str) -> bool:
    """Does the component have weights of this variant, as in model.fp16.safetensors?"""
    return any(folder.glob(f"*.{variant}.safetensors")) or any(folder.glob(f"*.{variant}-*.safetensors"))


def _download(base: Base, check: Check) -> Path:
    index = hub.file(base.source, "model_index.json", base.revision)
    check(base.source, _read_json(index))
    return hub.pipeline(base.source, commit=index.parent.name, variant=base.variant)


def _is_hub_id(name: str) -> bool:
    return bool(HUB_ID.fullmatch(name)) and ".." not in name and "--" not in name and not name.endswith(".safetensors")


# --- folders ----------------------------------------------------------------------------------------------------------


def _folder(name: str, path: Path, variant: str | None, check: Check) -> LocatedBase:
    index_path = path / "model_index.json"
    if not index_path.is_file():
        raise BaseModelError(
            f"{name}: no model_index.json in {path}", "give the folder of a whole pipeline in diffusers format"
        )
    index = _read_json(index_path)
    check(name, index)
    located = LocatedBase(
        name=name,
        path=path,
        kind="folder",
        configuration=path,
        index=index,
        defaults=_defaults(path),
        variant=variant,
        commit=_commit(path),
    )
    _require_safe_weights(located)
    if variant is not None and not any(has_variant(folder, variant) for folder in path.iterdir() if folder.is_dir()):
        raise BaseModelError(f"{name} has no weights of the variant '{variant}'", "leave base.variant out")
    return located


def _defaults(folder: Path) -> dict[str, Any]:
    path = folder / "safelight.json"
    return _read_json(path) if path.is_file() else {}


def _commit(path: Path) -> str | None:
    """The commit of a folder in the hub's cache: …/snapshots/<commit>."""
    return path.name if path.parent.name == "snapshots" and COMMIT.fullmatch(path.name) else None


def _require_safe_weights(located: LocatedBase) -> None:
    """Every component with weights must have them as safetensors; pickle weights are never opened."""
    for component in located.path.iterdir():
        if not component.is_dir():
            continue
        files = {p.suffix for p in component.iterdir() if p.is_file()}
        used = isinstance(located.index.get(component.name), list) and located.index[component.name][0] is not None
        if used and files & PICKLES and ".safetensors" not in files:
            raise BaseModelError(
                f"{located.name}: the weights of '{component.name}' are only there as pickle files, which are refused",
                "get the .safetensors version of this base",
            )


# --- single files -----------------------------------------------------------------------------------------------------


def _single_file(name: str, path: Path, check: Check) -> LocatedBase:
    """A checkpoint in the original layout. Such a file has no configuration: a folder of the same name beside it does.

    Without that folder, the configuration that diffusers knows for files like this is taken from the hub.
    """
    if path.suffix.lower() != ".safetensors":
        raise BaseModelError(
            f"{name} is not a .safetensors file", "give a .safetensors checkpoint or a diffusers folder"
        )
    tensors, metadata = read_header(path)
    if not any(key.startswith("model.diffusion_model.") for key in tensors):
        raise BaseModelError(
            f"{name} is not a whole checkpoint: it has no weights under 'model.diffusion_model.'",
            "a LoRA or a part of a model cannot be a base; give a checkpoint with denoiser, text encoder and VAE",
        )
    folder = path.with_suffix("")
    notes: tuple[str, ...] = ()
    if not (folder / "model_index.json").is_file():
        folder, notes = _usual_configuration(name, tensors, folder)
    index = _read_json(folder / "model_index.json")
    check(name, index)
    located = LocatedBase(
        name=name,
        path=path,
        kind="single_file",
        configuration=folder,
        index=index,
        defaults=_defaults(folder),
        notes=notes,
    )
    _require_agreement(located, tensors, metadata)
    return located


def _usual_configuration(name: str, tensors: Mapping[str, StoredTensor], beside: Path) -> tuple[Path, tuple[str, ...]]:
    import torch
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    shapes = {key: torch.empty(tensor.shape, device="meta") for key, tensor in tensors.items()}
    repository = str(fetch_diffusers_config(shapes)["pretrained_model_name_or_path"])
    remedy = f"put a diffusers folder with its configuration and tokenizer at {beside}"
    try:
        folder = hub.configuration(repository)
    except BaseModelError as error:
        raise BaseModelError(f"{name} does not say how it is built, and {error.message}", remedy) from error
    prediction = _read_json(folder / "scheduler" / "scheduler_config.json").get("prediction_type", "epsilon")
    note = f"{name} does not say how it is built: taken to be like {repository}, which predicts {prediction}"
    return folder, (f"{note}; if it is not, {remedy}",)


def _require_agreement(located: LocatedBase, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """Some files say what they predict. Training against the wrong target would ruin the model without an error."""
    declared = {"v": "v_prediction", "epsilon": "epsilon"}.get(metadata.get("modelspec.prediction_type", ""))
    if "v_pred" in tensors:
        declared = "v_prediction"
    configured = located.config("scheduler").get("prediction_type", "epsilon")
    if declared not in (None, configured):
        raise BaseModelError(
            f"{located.name} says that it predicts {declared}, but its configuration says {configured}",
            f"put a diffusers folder whose scheduler says '{declared}' at {located.path.with_suffix('')}",
        )


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file, in bytes from the file's beginning."""

    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the metadata, of a safetensors file. Raises BaseModelError when the file is cut off."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(LONGEST_HEADER_BYTES, size - 8):
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {key: _stored(entry, 8 + length) for key, entry in header.items()}
        end = max((tensor.end for tensor in tensors.values()), default=0)
        if end > size:
            raise ValueError(f"it should have {end:,} bytes and has {size:,}")
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"{path} is not a whole safetensors file: {error}", "get the file again") from error
    return tensors, metadata


def _stored(entry: Mapping[str, Any], offset: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    return StoredTensor(tuple(entry["shape"]), offset + int(start), offset + int(end))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path} cannot be read as JSON: {error}", "get the base again") from error
    if not isinstance(data, dict):
        raise BaseModelError(f"{path} does not hold a JSON object", "get the base again")
    return data


# --- identity ---------------------------------------------------------------------------------------------------------


def _folder_identity(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix not in NEVER_READ):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(_file_identity(file).encode())
    return digest.hexdigest()[:16]


def _file_identity(path: Path) -> str:
    """Size plus a hash of the whole file; of a large safetensors file its header and a piece of every tensor.

    Reading tens of gigabytes before each run would cost minutes. Whatever trains, merges or converts a model changes
    every number of the tensors that it touches, so a piece of each shows it.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES or path.suffix != ".safetensors":
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for start, length in _pieces(path):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()[:16]


def _pieces(path: Path) -> list[tuple[int, int]]:
    """(start, length) of the header and of the middle of every tensor, in the file's order."""
    tensors, _ = read_header(path)
    begin = min((tensor.start for tensor in tensors.values()), default=0)
    middles = [(max(t.start, (t.start + t.end - SAMPLE_BYTES) // 2), t.end) for t in tensors.values()]
    return [(0, begin), *sorted((start, min(SAMPLE_BYTES, end - start)) for start, end in middles)]
