"""Module names of kohya's format: dots become underscores, and FLUX.1 uses its original, fused layers.

A fused layer holds several diffusers layers stacked by output row: `attn_qkv` is q, k and v. Names as written by
kohya-ss/sd-scripts (`networks/lora.py`, `networks/lora_flux.py`) and read by ComfyUI, A1111 and diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

FAMILIES = ("sd15", "flux1")

_DENOISER_PREFIX = "lora_unet_"  # also for transformers: readers know no other
_TEXT_ENCODER_PREFIXES: Mapping[str, str] = {"sd15": "lora_te_", "flux1": "lora_te1_"}

_DOUBLE_STREAM: Mapping[str, tuple[str, ...]] = {
    "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "img_attn_proj": ("attn.to_out.0",),
    "txt_attn_proj": ("attn.to_add_out",),
    "img_mlp_0": ("ff.net.0.proj",),
    "img_mlp_2": ("ff.net.2",),
    "txt_mlp_0": ("ff_context.net.0.proj",),
    "txt_mlp_2": ("ff_context.net.2",),
    "img_mod_lin": ("norm1.linear",),
    "txt_mod_lin": ("norm1_context.linear",),
}
_SINGLE_STREAM: Mapping[str, tuple[str, ...]] = {
    "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation_lin": ("norm.linear",),
}
# diffusers block list -> (kohya's block list, layers)
_FLUX_LISTS: Mapping[str, tuple[str, Mapping[str, tuple[str, ...]]]] = {
    "transformer_blocks": ("double_blocks", _DOUBLE_STREAM),
    "single_transformer_blocks": ("single_blocks", _SINGLE_STREAM),
}

# Names that contain an underscore themselves; every other underscore of a kohya name stands for a dot.
_UNET_WORDS = (
    "down_blocks", "up_blocks", "mid_block", "transformer_blocks", "conv_in", "conv_out", "conv_shortcut", "proj_in",
    "proj_out", "to_q", "to_k", "to_v", "to_out", "time_emb_proj", "time_embedding", "linear_1", "linear_2",
)  # fmt: skip
_TEXT_WORDS = ("text_model", "self_attn", "q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True)
class KohyaLayer:
    """One layer of a kohya file and the diffusers modules that it stands for, in the order of its output rows."""

    name: str
    component: str
    modules: tuple[str, ...]


def layer_of(component: str, module: str, family: str) -> KohyaLayer | None:
    """The layer of a kohya file that holds this module, or None when the format has no name for it."""
    if component == "text_encoder":
        name = f"text_model.{without_wrapper(module)}".replace(".", "_")
        return read_name(_TEXT_ENCODER_PREFIXES[family] + name, family)
    if family == "sd15" and component == "unet":
        layer = read_name(_DENOISER_PREFIX + module.replace(".", "_"), family)
        return layer if layer is not None and layer.modules == (module,) else None
    if family == "flux1" and component == "transformer":
        return _flux_layer(module)
    return None


def read_name(name: str, family: str) -> KohyaLayer | None:
    """The layer with this name, for instance `lora_unet_single_blocks_3_linear1`, or None when it is unknown."""
    for prefix in ("lora_te_", "lora_te1_"):
        if name.startswith(prefix):
            module = _undotted(name.removeprefix(prefix), _TEXT_WORDS)
            return KohyaLayer(name, "text_encoder", (without_wrapper(module),)) if _is_text_layer(module) else None
    if not name.startswith(_DENOISER_PREFIX):
        return None
    body = name.removeprefix(_DENOISER_PREFIX)
    if family == "flux1":
        return _read_flux(body)
    module = _undotted(body, _UNET_WORDS)
    return KohyaLayer(name, "unet", (module,)) if _is_unet_layer(module) else None


def without_wrapper(module: str) -> str:
    """A CLIP text encoder's module as transformers >= 5 names it: the `text_model` level is gone there."""
    return module.removeprefix("text_model.")


def family_of_name(name: str) -> str | None:
    """Family that a denoiser's layer name belongs to, or None."""
    if re.match(r"lora_unet_(double|single)_blocks_\d", name):
        return "flux1"
    if re.match(r"lora_unet_(down_blocks_\d|up_blocks_\d|mid_block_|conv_in$|conv_out$|time_embedding_)", name):
        return "sd15"
    return None


def _flux_layer(module: str) -> KohyaLayer | None:
    found = re.fullmatch(r"(transformer_blocks|single_transformer_blocks)\.(\d+)\.(.+)", module)
    if found is None:
        return None
    block_list, index, rest = found.groups()
    kohya_list, layers = _FLUX_LISTS[block_list]
    for layer, parts in layers.items():
        if rest in parts:
            return _read_flux(f"{kohya_list}_{index}_{layer}")
    return None


def _read_flux(body: str) -> KohyaLayer | None:
    found = re.fullmatch(r"(double_blocks|single_blocks)_(\d+)_(.+)", body)
    if found is None:
        return None
    kohya_list, index, layer = found.groups()
    for block_list, (name, layers) in _FLUX_LISTS.items():
        if name == kohya_list and layer in layers:
            modules = tuple(f"{block_list}.{index}.{part}" for part in layers[layer])
            return KohyaLayer(_DENOISER_PREFIX + body, "transformer", modules)
    return None


@lru_cache(maxsize=4)
def _word_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(rf"({'|'.join(longest_first)}|[^_]+)(?:_|$)")


def _undotted(body: str, words: tuple[str, ...]) -> str:
    """`down_blocks_0_attentions_1_proj_in` -> `down_blocks.0.attentions.1.proj_in`."""
    return ".".join(_word_pattern(words).findall(body))


_BLOCK = r"(down_blocks\.\d+|up_blocks\.\d+|mid_block)"
_ATTENTION = r"attn[12]\.(to_[qkv]|to_out\.0)"
_UNET_LAYER = re.compile(
    rf"{_BLOCK}\.(attentions\.\d+\.(proj_in|proj_out|transformer_blocks\.\d+\.({_ATTENTION}|ff\.net\.0\.proj|ff\.net\.2))"
    r"|resnets\.\d+\.(conv1|conv2|conv_shortcut|time_emb_proj)|downsamplers\.0\.conv|upsamplers\.0\.conv)"
    r"|conv_in|conv_out|time_embedding\.linear_[12]"
)
_TEXT_LAYER = re.compile(r"text_model\.encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])")


def _is_unet_layer(module: str) -> bool:
    return _UNET_LAYER.fullmatch(module) is not None


def _is_text_layer(module: str) -> bool:
    return _TEXT_LAYER.fullmatch(module) is not None
