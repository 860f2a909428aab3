"""LoRA layers -> the named tensors and the header of a file, in either format. Refuses what a format cannot say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ExportError, Problem
from ..lora_weights import LoraLayer, LoraWeights
from .fusing import fuse, scaled
from .kohya_names import KohyaLayer, layer_of, without_wrapper

ADAPTER_METADATA = "lora_adapter_metadata"  # diffusers' name of the header entry (loaders/lora_base.py)

# peft saves magnitudes without `.weight`, and transformers 5 then does not find them in a text encoder: it only inserts
# the adapter's name (`build_peft_weight_mapping` in peft). All readers take the longer spelling.
_MAGNITUDE = {"text_encoder": ".lora_magnitude_vector.weight"}


def check_finite(weights: LoraWeights) -> None:
    """Raises ExportError when there is nothing to write or a value is NaN or infinite."""
    if not any(weights.values()):
        raise ExportError("there are no LoRA weights to export", "train with method.type = 'lora' first")
    problems = [
        Problem(f"{component}.{module}", f"{name} is not finite")
        for component, layers in weights.items()
        for module, layer in layers.items()
        for name, tensor in (("down", layer.down), ("up", layer.up), ("magnitude", layer.magnitude))
        if tensor is not None and not bool(torch.isfinite(tensor).all())
    ]
    if problems:
        raise ExportError("the LoRA has values that are not finite", "export an earlier checkpoint", problems=problems)


# --- diffusers -------------------------------------------------------------------------------------------------------


def pack_diffusers(weights: LoraWeights) -> tuple[dict[str, Tensor], dict[str, str]]:
    """PEFT's keys behind the component's name, and the header entry that diffusers builds its LoraConfig from.

    alpha / r is folded into the factors: diffusers reads alpha from the header, most other programs do not and assume
    alpha = r. The header therefore says alpha = r too, and both kinds of reader get the same change.
    """
    tensors: dict[str, Tensor] = {}
    header: dict[str, object] = {}
    for component, layers in weights.items():
        if not layers:
            continue
        for module, layer in layers.items():
            name = f"{component}.{_diffusers_module(component, module)}"
            folded = scaled(layer, 1.0)
            tensors[f"{name}.lora_A.weight"] = folded.down
            tensors[f"{name}.lora_B.weight"] = folded.up
            if layer.magnitude is not None:
                tensors[name + _MAGNITUDE.get(component, ".lora_magnitude_vector")] = layer.magnitude
        header |= {f"{component}.{key}": value for key, value in _adapter_config(component, layers).items()}
    return tensors, {"format": "pt", ADAPTER_METADATA: json.dumps(header, indent=2, sort_keys=True)}


def _diffusers_module(component: str, module: str) -> str:
    # transformers >= 5 dropped CLIP's `text_model` level; every reader knows the old spelling, some know no other.
    return f"text_model.{without_wrapper(module)}" if component == "text_encoder" else module


def _adapter_config(component: str, layers: Mapping[str, LoraLayer]) -> dict[str, object]:
    """The LoraConfig of one component as plain data, as `_collate_lora_metadata` and `save_lora_weights` write it."""
    from peft import LoraConfig

    with_magnitude = [module for module, layer in layers.items() if layer.magnitude is not None]
    if with_magnitude and len(with_magnitude) != len(layers):
        without = [module for module in layers if module not in with_magnitude]
        raise ExportError(
            "some modules are DoRA and others are not, which no reader can apply",
            "train all of them alike",
            problems=[Problem(f"{component}.{module}", "has no magnitude") for module in without],
        )
    # Without `text_model` these names match both spellings of CLIP, since peft compares the ends of names.
    ranks = {without_wrapper(module): layer.rank for module, layer in layers.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    config: Any = LoraConfig(
        r=usual,
        lora_alpha=usual,
        rank_pattern=others,
        alpha_pattern=dict(others),
        target_modules=sorted(ranks),
        use_dora=bool(with_magnitude),
    )
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}


# --- kohya -----------------------------------------------------------------------------------------------------------


def pack_kohya(weights: LoraWeights, family: str) -> dict[str, Tensor]:
    """kohya's keys with one `.alpha` a layer. Raises ExportError for modules without a kohya name, and for DoRA."""
    groups = _kohya_groups(weights, family)
    tensors: dict[str, Tensor] = {}
    for component in weights:
        named = {layer.name: _fused(layer, parts) for layer, parts in groups.items() if layer.component == component}
        plain = {name: replace(x, alpha=x.scale * x.rank, rank_stabilised=False) for name, x in named.items()}
        for name, layer in (_with_one_alpha(plain) if family == "sd15" else plain).items():
            tensors[f"{name}.lora_down.weight"] = layer.down
            tensors[f"{name}.lora_up.weight"] = layer.up
            tensors[f"{name}.alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
    return tensors


def _kohya_groups(weights: LoraWeights, family: str) -> dict[KohyaLayer, dict[str, LoraLayer]]:
    groups: dict[KohyaLayer, dict[str, LoraLayer]] = {}
    nameless: list[str] = []
    magnitudes: list[str] = []
    for component, layers in weights.items():
        for module, layer in layers.items():
            kohya_layer = layer_of(component, module, family)
            if layer.magnitude is not None:
                magnitudes.append(f"{component}.{module}")
            if kohya_layer is None:
                nameless.append(f"{component}.{module}")
            else:
                position = without_wrapper(module) if component == "text_encoder" else module
                groups.setdefault(kohya_layer, {})[position] = layer
    if magnitudes:  # diffusers drops `dora_scale` with no more than a warning, so the pictures would differ
        raise ExportError(
            f"the kohya format cannot carry DoRA for every reader: {_first(magnitudes)}",
            "export with export.formats = ['diffusers'], or train with method.dora = false",
        )
    if nameless:
        raise ExportError(
            f"the kohya format has no name for {_first(nameless)}",
            "export with export.formats = ['diffusers'], or choose other method.targets",
        )
    return groups


def _fused(layer: KohyaLayer, parts: Mapping[str, LoraLayer]) -> LoraLayer:
    if len(layer.modules) == 1:
        return parts[layer.modules[0]]
    return fuse([parts.get(module) for module in layer.modules], _rows(layer, parts))


def _rows(layer: KohyaLayer, parts: Mapping[str, LoraLayer]) -> list[int]:
    """Output features of every part of a fused layer, also of those that were not trained."""
    width = next(iter(parts.values())).down.shape[1]  # q, k and v are square; FLUX.1's MLP is four times as wide
    usual = [4 * width if module.endswith(".proj_mlp") else width for module in layer.modules]
    return [parts[m].up.shape[0] if m in parts else rows for m, rows in zip(layer.modules, usual, strict=True)]


def _with_one_alpha(layers: Mapping[str, LoraLayer]) -> dict[str, LoraLayer]:
    """The same changes with the most frequent alpha in every layer.

    diffusers 0.42 matches differing alphas of a UNet's attention and of text encoders to names that do not exist and
    then uses the most frequent one for all (`_get_alpha_name` in loaders/lora_conversion_utils.py). For FLUX.1 it reads
    each layer's own.
    """
    acting = Counter(layer.alpha for layer in layers.values() if layer.alpha != 0.0)
    if not acting:
        return dict(layers)
    usual = acting.most_common(1)[0][0]
    return {
        name: layer if layer.alpha == usual else scaled(layer, usual / layer.rank) for name, layer in layers.items()
    }


def _first(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
