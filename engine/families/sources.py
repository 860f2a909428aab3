"""Where a base model is and what it says about itself, read without loading weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import BaseModelError
from ..settings.schema import Base

EMBEDDED = ("embedded/unet", "embedded/flow")
PICKLES = {".ckpt", ".pt", ".pth", ".bin", ".pkl"}
SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class LocatedBase:
    """A base that exists on this machine.

    name is what the user wrote; path is a diffusers folder or a single .safetensors file; index is model_index.json,
    empty for a single file; defaults come from an optional safelight.json beside it.
    """

    name: str
    path: Path
    kind: Literal["folder", "single_file"]
    index: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None

    def config(self, component: str) -> dict[str, Any]:
        """A component's configuration. Raises BaseModelError when it is missing or not JSON."""
        folder = self.path / component
        for file_name in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
            if (folder / file_name).is_file():
                return _read_json(folder / file_name)
        raise BaseModelError(f"{self.name}: no configuration of '{component}' in {folder}", "is the base complete?")

    def identity(self, components: Sequence[str]) -> str:
        """Hash over the components' files that changes when a weight or configuration file does."""
        if self.kind == "single_file":
            return _file_identity(self.path)
        return "-".join(_folder_identity(self.path / name) for name in components)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sizes (height, width) the base was trained at, where it says so; empty means any."""
        return tuple((int(h), int(w)) for h, w in self.defaults.get("sizes", ()))


def locate(base: Base) -> LocatedBase:
    """Find a base; a hub id is downloaded by diffusers' own rules. Raises BaseModelError saying what is wrong."""
    name = base.source
    if name in EMBEDDED:
        return _folder(name, Path(__file__).parent.parent / "embedded" / name.split("/")[1], None)
    if name.startswith("embedded/"):
        raise BaseModelError(f"there is no base '{name}'", f"embedded bases are {' and '.join(EMBEDDED)}")
    path = Path(name).expanduser()
    if path.suffix.lower() in PICKLES:
        raise BaseModelError(
            f"{name} is a pickle file, which can run code when it is opened, so it is refused",
            "convert it to .safetensors, or use a source that offers .safetensors",
        )
    if path.is_dir():
        return _folder(name, path, base.variant)
    if path.is_file():
        return _single_file(name, path)
    if _looks_like_hub_id(name):
        return _folder(name, _download(base), base.variant)
    raise BaseModelError(
        f"base model {name} does not exist", "give a folder, a .safetensors file or a hub id 'owner/name'"
    )


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~", "\\")) and ":" not in name and "\\" not in name


def _folder(name: str, path: Path, variant: str | None) -> LocatedBase:
    index_path = path / "model_index.json"
    if not index_path.is_file():
        raise BaseModelError(
            f"{name}: no model_index.json in {path}", "give the folder of a whole pipeline in diffusers format"
        )
    defaults = path / "safelight.json"
    located = LocatedBase(
        name=name,
        path=path,
        kind="folder",
        index=_read_json(index_path),
        defaults=_read_json(defaults) if defaults.is_file() else {},
        variant=variant,
    )
    _require_safe_weights(located)
    return located


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


def _single_file(name: str, path: Path) -> LocatedBase:
    if path.suffix.lower() != ".safetensors":
        raise BaseModelError(
            f"{name} is not a .safetensors file", "give a .safetensors checkpoint or a diffusers folder"
        )
    return LocatedBase(name=name, path=path, kind="single_file")


def _download(base: Base) -> Path:
    import diffusers
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            diffusers.DiffusionPipeline.download(
                base.source, revision=base.revision, variant=base.variant, use_safetensors=True
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BaseModelError(
            f"cannot get {base.source} from the hub: {reason}",
            "check the name, the network and, for gated models, `hf auth login`; only safetensors weights are taken",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BaseModelError(f"{path} cannot be read as JSON: {error}", "get the base again") from error
    if not isinstance(data, dict):
        raise BaseModelError(f"{path} does not hold a JSON object", "get the base again")
    return data


def _folder_identity(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode())
        digest.update(_file_identity(file).encode())
    return digest.hexdigest()[:16]


def _file_identity(path: Path) -> str:
    """Size plus a hash of the whole file, or of its two ends and its change time when it is large.

    Reading tens of gigabytes before each run would cost minutes; an edit that keeps size and both ends still changes
    the modification time.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= 16 * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(size - SAMPLE_BYTES)
            digest.update(file.read(SAMPLE_BYTES))
            digest.update(str(path.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:16]
