"""The named tensors of a LoRA file -> layers. Every key is either used or listed as left over."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import LoraFileError, Problem
from ..lora_weights import LoraLayer, LoraWeights
from .fusing import split
from .kohya_names import KohyaLayer, family_of_name, read_name, without_wrapper
from .packing import ADAPTER_METADATA


@dataclass(frozen=True)
class Parsed:
    """`sources`: (component, module) -> the keys that it came from."""

    weights: LoraWeights
    sources: Mapping[tuple[str, str], tuple[str, ...]]
    leftover: tuple[str, ...]


@dataclass
class _Group:
    """Tensors that belong to one layer of the file."""

    layer: KohyaLayer | None
    tensors: dict[str, Tensor] = field(default_factory=dict)  # "down", "up", "alpha", "magnitude", "unknown"
    keys: list[str] = field(default_factory=list)


def is_kohya(keys: Iterable[str]) -> bool:
    return any(key.startswith(("lora_unet_", "lora_te")) for key in keys)


def guess_family(keys: Iterable[str], metadata: Mapping[str, str]) -> str | None:
    """Family from the names of the denoiser's layers; for a file with a text encoder only, from its metadata."""
    listed = list(keys)
    for key in listed:
        name = key.split(".")[0]
        component, module = _component_of(key)
        if family_of_name(name) is not None:
            return family_of_name(name)
        if component == "transformer" and re.match(r"(single_)?transformer_blocks\.|(double|single)_blocks\.", module):
            return "flux1"
        if component == "unet":
            return "sd15"
    told = f"{metadata.get('modelspec.architecture', '')} {metadata.get('ss_base_model_version', '')}"
    if "flux" in told:
        return "flux1"
    if "stable-diffusion-v1" in told or "sd_v1" in told or any(key.startswith("lora_te_") for key in listed):
        return "sd15"
    return None


def parse_kohya(tensors: Mapping[str, Tensor], family: str) -> Parsed:
    """`lora_unet_…`, `lora_te_…`, `lora_te1_…` with `lora_down`, `lora_up` and `alpha`."""
    suffixes = {"lora_down.weight": "down", "lora_up.weight": "up", "alpha": "alpha"}
    groups: dict[str, _Group] = {}
    for key, tensor in tensors.items():
        name, _, suffix = key.partition(".")
        group = groups.setdefault(name, _Group(read_name(name, family)))
        group.tensors[suffixes.get(suffix, "unknown")] = tensor
        group.keys.append(key)
    return _assemble(groups, {})


# What follows a module's name in diffusers files, newest spelling first.
_ENDINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\.lora_A(\.[^.]+)?\.weight$"), "down"),
    (re.compile(r"\.lora_B(\.[^.]+)?\.weight$"), "up"),
    (re.compile(r"\.lora_magnitude_vector(\.[^.]+)?(\.weight)?$"), "magnitude"),
    (re.compile(r"(\.lora|_lora|\.lora_linear_layer)\.down\.weight$"), "down"),
    (re.compile(r"(\.lora|_lora|\.lora_linear_layer)\.up\.weight$"), "up"),
    (re.compile(r"\.lora_down\.weight$"), "down"),
    (re.compile(r"\.lora_up\.weight$"), "up"),
    (re.compile(r"(_lora)?\.alpha$"), "alpha"),
)


def parse_diffusers(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Parsed:
    """PEFT keys, or the older `.lora.down` and `.lora_linear_layer.down`, with or without the component in front.

    alpha comes from the layer's `.alpha`, else from the header, else it is the rank, as in diffusers.
    """
    groups: dict[str, _Group] = {}
    for key, tensor in tensors.items():
        component, rest = _component_of(key)
        kind, module = _ending(rest)
        name = f"{component}.{module}"
        if name not in groups:
            groups[name] = _Group(_diffusers_layer(component, module))
        groups[name].tensors[kind] = tensor
        groups[name].keys.append(key)
    return _assemble(groups, _adapter_configs(metadata))


def _component_of(key: str) -> tuple[str, str]:
    """(component, rest of the key); the component is "" when the key tells none."""
    key = key.removeprefix("base_model.model.").replace(".processor.", ".")
    for component in ("unet", "transformer", "text_encoder_2", "text_encoder"):
        if key.startswith(f"{component}."):
            return component, key.removeprefix(f"{component}.")
    if key.startswith("diffusion_model."):
        return "transformer", key.removeprefix("diffusion_model.")
    if key.startswith(("transformer_blocks.", "single_transformer_blocks.")):
        return "transformer", key
    if key.startswith(("down_blocks.", "mid_block.", "up_blocks.", "conv_in.", "conv_out.", "time_embedding.")):
        return "unet", key
    return ("text_encoder", key) if key.startswith("text_model.") else ("", key)


def _ending(rest: str) -> tuple[str, str]:
    """(kind of tensor, module)."""
    for pattern, kind in _ENDINGS:
        if pattern.search(rest):
            return kind, pattern.sub("", rest)
    return "unknown", rest


def _diffusers_layer(component: str, module: str) -> KohyaLayer | None:
    if component in ("", "text_encoder_2"):
        return None
    if component == "text_encoder":
        module = re.sub(r"self_attn\.to_(q|k|v|out)$", r"self_attn.\1_proj", module)  # diffusers < 0.18
        return KohyaLayer(module, component, (without_wrapper(module),))
    if re.match(r"(double|single)_blocks\.", module):  # FLUX.1's original names with dots
        return read_name("lora_unet_" + module.replace(".", "_"), "flux1")
    return KohyaLayer(module, component, (re.sub(r"(attn\d?)\.to_out$", r"\1.to_out.0", module),))


# --- alphas of the header --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AdapterConfig:
    alpha: float | None
    alphas: Mapping[str, float]
    rank_stabilised: bool

    def alpha_of(self, module: str) -> float | None:
        for pattern, alpha in self.alphas.items():
            name = pattern.removeprefix("^").removesuffix("$")
            if module == name or (not pattern.startswith("^") and module.endswith(f".{name}")):
                return alpha
        return self.alpha


def _adapter_configs(metadata: Mapping[str, str]) -> dict[str, _AdapterConfig]:
    """Component -> what the header says. Raises LoraFileError when the header is not what diffusers writes."""
    raw = metadata.get(ADAPTER_METADATA)
    if raw is None:
        return {}
    try:
        header = json.loads(raw)
        if not isinstance(header, dict):
            raise TypeError("it is not a table")
        components = {key.partition(".")[0] for key in header}
        return {component: _adapter_config(header, component) for component in components}
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"the header's {ADAPTER_METADATA} cannot be read: {error}"
        raise LoraFileError(reason, "export the file again") from error


def _adapter_config(header: Mapping[str, object], component: str) -> _AdapterConfig:
    patterns = header.get(f"{component}.alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise TypeError("alpha_pattern is not a table")
    unknown = [pattern for pattern in patterns if not re.fullmatch(r"\^?[\w.]+\$?", pattern)]
    if unknown:
        raise ValueError(f"alpha_pattern has the regular expression '{unknown[0][:80]}'; only names are read")
    alpha = header.get(f"{component}.lora_alpha")
    return _AdapterConfig(
        alpha=None if alpha is None else _number(alpha),
        alphas={without_wrapper(pattern): _number(value) for pattern, value in patterns.items()},
        rank_stabilised=header.get(f"{component}.use_rslora") is True,
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"alpha is {value!r}")
    return float(value)


# --- layers ----------------------------------------------------------------------------------------------------------


def _assemble(groups: Mapping[str, _Group], configs: Mapping[str, _AdapterConfig]) -> Parsed:
    weights: dict[str, dict[str, LoraLayer]] = {}
    sources: dict[tuple[str, str], tuple[str, ...]] = {}
    leftover: list[str] = []
    problems: list[Problem] = []
    for name, group in groups.items():
        # A layer with a part that is not understood (dora_scale, lora_mid, …) would be wrong without that part.
        if group.layer is None or "unknown" in group.tensors or not {"down", "up"} <= group.tensors.keys():
            leftover += group.keys
            continue
        problem = _problem(name, group)
        if problem is not None:
            problems.append(problem)
            continue
        for module, layer in _layers(group, group.layer, configs.get(group.layer.component)).items():
            if module in weights.setdefault(group.layer.component, {}):
                problems.append(Problem(name, f"{module} is in the file twice"))
            weights[group.layer.component][module] = layer
            sources[group.layer.component, module] = tuple(group.keys)
    if problems:
        reason = "the LoRA's tensors do not fit together"
        raise LoraFileError(reason, "the file is damaged; get it again", problems=problems)
    return Parsed(weights, sources, tuple(sorted(leftover)))


def _problem(name: str, group: _Group) -> Problem | None:
    down, up, alpha = group.tensors["down"], group.tensors["up"], group.tensors.get("alpha")
    for kind, tensor in group.tensors.items():
        if not tensor.is_floating_point():
            return Problem(name, f"{kind} holds {tensor.dtype} instead of floating-point numbers")
        if not bool(torch.isfinite(tensor.float()).all()):
            return Problem(name, f"{kind} has values that are not finite")
    if down.ndim != up.ndim or down.ndim not in (2, 4) or 0 in (*down.shape, *up.shape):
        return Problem(name, f"down is {tuple(down.shape)} and up is {tuple(up.shape)}")
    if up.shape[1] != down.shape[0] or tuple(up.shape[2:]) not in ((), (1, 1)):
        return Problem(name, f"down {tuple(down.shape)} and up {tuple(up.shape)} have no common rank")
    if alpha is not None and alpha.numel() != 1:
        return Problem(name, f"alpha has {alpha.numel()} values instead of one")
    assert group.layer is not None
    if len(group.layer.modules) > 1 and (down.ndim != 2 or min(_rows(group.layer, down, up)) <= 0):
        return Problem(name, f"up has {up.shape[0]} rows, which cannot be {len(group.layer.modules)} parts")
    return None


def _rows(layer: KohyaLayer, down: Tensor, up: Tensor) -> list[int]:
    """Output features of the parts of a fused layer: q, k and v are square, what remains is the MLP's."""
    width, parts = down.shape[1], len(layer.modules)
    if layer.modules[-1].endswith(".proj_mlp"):
        return [width] * 3 + [up.shape[0] - 3 * width]
    return [width] * parts if up.shape[0] == width * parts else [0]


def _layers(group: _Group, layer: KohyaLayer, config: _AdapterConfig | None) -> dict[str, LoraLayer]:
    down, up = group.tensors["down"], group.tensors["up"]
    rank_stabilised = False
    alpha = float(down.shape[0])
    if "alpha" in group.tensors:
        alpha = float(group.tensors["alpha"].item())
    elif config is not None:
        told = config.alpha_of(layer.modules[0])
        alpha = alpha if told is None else told
        rank_stabilised = config.rank_stabilised
    whole = LoraLayer(down, up, alpha, rank_stabilised, group.tensors.get("magnitude"))
    if len(layer.modules) == 1:
        return {layer.modules[0]: whole}
    parts = zip(layer.modules, split(whole, _rows(layer, down, up)), strict=True)
    return {module: part for module, part in parts if part is not None}
