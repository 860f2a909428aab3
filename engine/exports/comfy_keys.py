"""Would ComfyUI read every key of a LoRA file? It skips the others with no more than a line in its log.

The rules are those of ComfyUI's `comfy/lora.py` (which names of layers it knows) and `comfy/weight_adapter/lora.py`
(which endings it knows), written anew for the families that Safelight trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .kohya_names import layer_of, read_name

# Endings of a pair's up weight that ComfyUI looks for, with the ending of the down weight that must then be there.
_PAIRS = {
    ".lora_up.weight": ".lora_down.weight",
    "_lora.up.weight": "_lora.down.weight",
    ".lora_B.weight": ".lora_A.weight",
    ".lora.up.weight": ".lora.down.weight",
    ".lora_B": ".lora_A",
    ".lora_linear_layer.up.weight": ".lora_linear_layer.down.weight",
    ".lora_B.default.weight": ".lora_A.default.weight",
}
_SINGLE = (".alpha", ".dora_scale", ".lora_mid.weight")
_LONGEST_FIRST = sorted((*_PAIRS, *_PAIRS.values()), key=len, reverse=True)
_ENDING = re.compile(rf"({'|'.join(re.escape(ending) for ending in _LONGEST_FIRST)})$")
_TEXT_LAYER = re.compile(r"text_encoder\.text_model\.encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])")

_FLUX_OUTER_LAYER = re.compile(
    r"(x|context)_embedder|time_text_embed\.(timestep|guidance|text)_embedder\.linear_[12]|norm_out\.linear|proj_out"
)


def unread_keys(keys: Iterable[str], family: str) -> list[str]:
    """The keys that ComfyUI would skip when the file is applied to a base of this family, in sorted order."""
    present = set(keys)
    return sorted(key for key in present if not _is_read(key, present, family))


def _is_read(key: str, present: set[str], family: str) -> bool:
    found = _ENDING.search(key)
    if found is None:
        single = next((ending for ending in _SINGLE if key.endswith(ending)), None)
        name = "" if single is None else key.removesuffix(single)
        has_pair = any(f"{name}{up}" in present and f"{name}{down}" in present for up, down in _PAIRS.items())
        return single is not None and has_pair and _knows(name, family)
    name = key.removesuffix(found.group())
    pair = [(up, down) for up, down in _PAIRS.items() if found.group() in (up, down)]
    return any(f"{name}{up}" in present and f"{name}{down}" in present for up, down in pair) and _knows(name, family)


def _knows(name: str, family: str) -> bool:
    """Whether this is one of the names that ComfyUI gives a layer of the family."""
    if name.startswith(("lora_te_", "lora_te1_")):
        return read_name(name, family) is not None
    if name.startswith("text_encoder."):
        return _TEXT_LAYER.fullmatch(name) is not None
    if name.startswith("lora_unet_"):
        return read_name(name, family) is not None
    if family == "sd15":
        return _is_unet_name(name.removeprefix("unet."))
    if name.startswith("diffusion_model."):
        return read_name("lora_unet_" + name.removeprefix("diffusion_model.").replace(".", "_"), family) is not None
    module = name.removeprefix("transformer.")
    return layer_of("transformer", module, family) is not None or _FLUX_OUTER_LAYER.fullmatch(module) is not None


def _is_unet_name(name: str) -> bool:
    """diffusers names, but with `.processor` before the attention's layers and without `.0` after `to_out`."""
    module = re.sub(r"\.processor\.to_out$", ".processor.to_out.0", name)
    if re.search(r"\.to_(q|k|v|out)\b", module) and ".processor.to_" not in module:
        return False
    return layer_of("unet", module.replace(".processor.to_", ".to_"), "sd15") is not None
