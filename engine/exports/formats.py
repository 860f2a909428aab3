"""LoRA files: writing, reading and describing them.

Two formats: `diffusers` (PEFT's names, with the adapter's configuration in the header) and `kohya` (underscored names
with one `.alpha` a layer). They are never mixed in one file, which diffusers refuses. Only safetensors is written and
read.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import ExportError, LoraFileError
from ..lora_weights import LoraLayer, LoraWeights
from ..workspace import write_atomic
from .kohya_names import FAMILIES
from .metadata import file_hashes
from .packing import ADAPTER_METADATA, check_finite, pack_diffusers, pack_kohya
from .parsing import Parsed, guess_family, is_kohya, parse_diffusers, parse_kohya

Format = Literal["diffusers", "kohya"]

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")


@dataclass(frozen=True)
class LoraFile:
    """A LoRA file that was read.

    `weights` names modules as the installed model classes do: a CLIP text encoder's without `text_model.`. `leftover`
    are keys that were not understood; a program that needs all of the file must refuse it when there are any.
    """

    path: Path
    format: Format
    weights: LoraWeights
    metadata: dict[str, str]
    leftover: tuple[str, ...]
    family: str = ""


# --- writing ---------------------------------------------------------------------------------------------------------


def write_lora(
    weights: LoraWeights, path: Path, *, format: str, family: str, metadata: Mapping[str, str], dtype: torch.dtype
) -> Path:
    """Write a LoRA in the given format; the file appears whole or not at all.

    The change of every weight is that of `weights`, rounded to `dtype`. Raises ExportError for what the format or the
    family cannot express and for values that are not finite, also after rounding.
    """
    if format == "kohya" and family not in FAMILIES:
        raise ExportError(f"kohya has no names for the layers of family '{family}'", "use the diffusers format")
    check_finite(weights)
    cpu = _on_cpu(weights)
    if format == "diffusers":
        tensors, header = pack_diffusers(cpu)
    elif format == "kohya":
        tensors, header = pack_kohya(cpu, family), {}
    else:
        raise ExportError(f"there is no LoRA format '{format}'", "export.formats knows 'diffusers' and 'kohya'")
    rounded = {key: _rounded(key, tensor, dtype) for key, tensor in tensors.items()}
    described = _own_metadata(metadata, format)
    described |= file_hashes(rounded, described)
    write_atomic(path, save(rounded, metadata=described | header))
    return path


def _on_cpu(weights: LoraWeights) -> dict[str, dict[str, LoraLayer]]:
    def plain(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", torch.float32).contiguous()

    return {
        component: {
            module: LoraLayer(
                plain(layer.down),
                plain(layer.up),
                layer.alpha,
                layer.rank_stabilised,
                None if layer.magnitude is None else plain(layer.magnitude),
            )
            for module, layer in layers.items()
        }
        for component, layers in weights.items()
    }


def _rounded(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if key.endswith(".alpha"):
        return tensor  # one number a layer: rounding it would change the strength and save nothing
    result = tensor.to(dtype).contiguous()
    if not bool(torch.isfinite(result).all()):
        raise ExportError(f"{key} does not fit into {dtype}", "export with export.dtype = 'fp32' or 'bf16'")
    return result.clone() if result.data_ptr() == tensor.data_ptr() else result  # layers may share storage


def _own_metadata(metadata: Mapping[str, str], format: str) -> dict[str, str]:
    """What the caller says about the file, without what only this module may say."""
    reserved = {ADAPTER_METADATA, "format"}
    if format == "diffusers":  # these describe a kohya file, and alpha is folded here
        reserved |= {"ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_network_args"}
    return {key: value for key, value in metadata.items() if key not in reserved}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_lora(path: Path, family: str | None = None) -> LoraFile:
    """Read a LoRA in either format. Nothing in the file is executed.

    Raises LoraFileError when the file is missing, not safetensors, damaged, of an unknown family, has values that are
    not finite, or holds no LoRA layer that is understood.
    """
    tensors, metadata = read_tensors(path)
    known = family or guess_family(tensors, metadata)
    if known is None or (is_kohya(tensors) and known not in FAMILIES):
        reason = f"family '{known}' is not supported" if known else "its keys are of no known model family"
        hint = f"supported are {', '.join(FAMILIES)}; first key: {next(iter(tensors))}"
        raise LoraFileError(f"{path.name}: {reason}", hint)
    parsed = parse_tensors(tensors, metadata, known, path)
    kind: Format = "kohya" if is_kohya(tensors) else "diffusers"
    return LoraFile(path, kind, parsed.weights, metadata, parsed.leftover, known)


def parse_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], family: str, path: Path) -> Parsed:
    """The file's layers with the keys they came from. Raises LoraFileError naming the file."""
    try:
        parsed = parse_kohya(tensors, family) if is_kohya(tensors) else parse_diffusers(tensors, metadata)
    except LoraFileError as error:
        raise LoraFileError(f"{path.name}: {error.message}", error.hint, problems=error.problems) from error
    if not any(parsed.weights.values()):
        raise LoraFileError(
            f"{path.name}: none of its {len(tensors)} keys belongs to a LoRA layer of family '{family}'",
            f"LoHa, LoKr and other adapters are not read; first key: {next(iter(tensors))}",
        )
    return parsed


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. Raises LoraFileError saying what is wrong with the file."""
    check_is_safetensors(path)
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            # Copies, because views of the mapped file would change when the file is replaced.
            tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118  not a mapping
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise LoraFileError(f"{path.name} is damaged: {error}", "download or export it again") from error
    if not tensors:
        raise LoraFileError(f"{path.name} holds no tensors", "download or export it again")
    return tensors, metadata


def check_is_safetensors(path: Path) -> None:
    """Raises LoraFileError for what can be seen to be no safetensors file before it is parsed."""
    try:
        if path.is_dir():
            raise LoraFileError(f"{path} is a folder", "give the .safetensors file inside it")
        if not path.is_file():
            raise LoraFileError(f"there is no file {path}", "check the path")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(9)
    except (OSError, ValueError) as error:  # no permission, a name that is too long
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise LoraFileError(f"{path.name[:80]} cannot be opened: {reason}", "check the path") from error
    header = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    plausible = 2 <= header <= MAX_HEADER_BYTES and start[8:] == b"{"
    looks_like_pickle = start[:4] == b"PK\x03\x04" or start[:1] == b"\x80"  # a header's length may begin like one, too
    if path.suffix.lower() in _PICKLES or (looks_like_pickle and not plausible):
        raise LoraFileError(
            f"{path.name} is a pickle, which can run any program when it is opened, and is not read",
            "get the .safetensors version of the file",
        )
    if size < 8:
        raise LoraFileError(f"{path.name} is empty or cut off ({size} bytes)", "download or export it again")
    if not plausible:
        raise LoraFileError(f"{path.name} is not a safetensors file", "its first bytes are not the length of a header")
    if header + 8 > size:
        raise LoraFileError(f"{path.name} is cut off inside its header", "download or export it again")


# --- describing ------------------------------------------------------------------------------------------------------


def describe(file: LoraFile) -> dict[str, object]:
    """What the file holds, as plain data for `safelight verify` and `--json`."""
    return {
        "file": file.path.name,
        "format": file.format,
        "family": file.family,
        "modules": sum(len(layers) for layers in file.weights.values()),
        "components": {component: _describe_layers(layers) for component, layers in file.weights.items()},
        "metadata": _summary(file.metadata),
        "leftover": list(file.leftover),
    }


def _describe_layers(layers: Mapping[str, LoraLayer]) -> dict[str, object]:
    return {
        "modules": len(layers),
        "ranks": sorted({layer.rank for layer in layers.values()}),
        "alphas": sorted({round(layer.alpha, 6) for layer in layers.values()}),
        "rank_stabilised": any(layer.rank_stabilised for layer in layers.values()),
        "dora": any(layer.magnitude is not None for layer in layers.values()),
        "dtypes": sorted({str(layer.down.dtype).removeprefix("torch.") for layer in layers.values()}),
        "blocks": dict(Counter(_block(module) for module in layers)),
        "max_abs_up": max(float(layer.up.float().abs().max()) for layer in layers.values()),
    }


def _block(module: str) -> str:
    """`down_blocks.1.attentions…` -> `down_blocks.1`; `encoder.layers.3.mlp.fc1` -> `encoder.layers.3`."""
    parts = module.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers and parts[0] != "mid_block" else parts[0]


def _summary(metadata: Mapping[str, str]) -> dict[str, str]:
    """The entries that say what the file is; long values such as thumbnails are cut."""
    wanted = {key: value for key, value in metadata.items() if key.startswith(("modelspec.", "ss_", "sshs_"))}
    if "safelight.settings" in metadata:
        wanted["safelight.settings"] = f"{len(json.dumps(metadata['safelight.settings']))} bytes, opens as a preset"
    return {key: value if len(value) <= 200 else value[:197] + "..." for key, value in sorted(wanted.items())}
