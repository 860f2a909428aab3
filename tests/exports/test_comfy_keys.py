"""Which of our keys ComfyUI reads, per family and format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.exports.comfy_keys import unread_keys
from engine.exports.formats import write_lora
from engine.lora_weights import LoraLayer, LoraWeights
from tests.tiny import random_lora_layer

ATTENTION = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
UNET = (
    ATTENTION,
    "mid_block.attentions.0.proj_in",
    "up_blocks.1.resnets.0.conv1",
    "conv_in",
    "time_embedding.linear_1",
)
FLUX = ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp", "transformer_blocks.3.norm1.linear")
TEXT = ("encoder.layers.0.self_attn.out_proj", "encoder.layers.11.mlp.fc2")


def keys_of(weights: LoraWeights, folder: Path, format: str, family: str) -> list[str]:
    path = write_lora(weights, folder / "a.safetensors", format=format, family=family, metadata={}, dtype=torch.float32)
    return list(load_file(path))


def layers(names: tuple[str, ...], width: int = 8) -> dict[str, LoraLayer]:
    return {
        name: random_lora_layer((4 * width if name.endswith("proj_mlp") else width, width), alpha=2.0) for name in names
    }


@pytest.mark.parametrize(
    ("family", "denoiser", "names", "formats"),
    [("sd15", "unet", UNET, ("kohya",)), ("flux1", "transformer", FLUX, ("kohya", "diffusers"))],
)
def test_ComfyUI_reads_every_key_of_the_default_formats(
    tmp_path: Path, family: str, denoiser: str, names: tuple[str, ...], formats: tuple[str, ...]
) -> None:
    weights = {denoiser: layers(names), "text_encoder": layers(TEXT)}
    for format in formats:
        keys = keys_of(weights, tmp_path, format, family)
        assert len(keys) >= 10 and unread_keys(keys, family) == []


def test_ComfyUI_skips_the_attention_of_a_unet_in_the_diffusers_format(tmp_path: Path) -> None:
    keys = keys_of({"unet": layers(UNET), "text_encoder": layers(TEXT)}, tmp_path, "diffusers", "sd15")
    assert unread_keys(keys, "sd15") == [f"unet.{ATTENTION}.lora_A.weight", f"unet.{ATTENTION}.lora_B.weight"]
    older = [key.replace(".to_q.lora_A.weight", ".processor.to_q_lora.down.weight") for key in keys]
    older = [key.replace(".to_q.lora_B.weight", ".processor.to_q_lora.up.weight") for key in older]
    assert unread_keys(older, "sd15") == []


def test_ComfyUI_skips_names_that_it_does_not_know() -> None:
    for name, family in (
        ("lora_te_encoder_layers_0_mlp_fc1", "sd15"),  # text_model is missing
        ("lora_unet_double_blocks_0_img_attn_qkv", "sd15"),  # another family
        ("lora_unet_down_blocks_0_attentions_0_proj_in", "flux1"),
        ("lora_unet_transformer_blocks_0_attn_to_q", "flux1"),  # split parts under the fused format's prefix
        ("text_encoder.encoder.layers.0.mlp.fc1", "flux1"),
        ("transformer.transformer_blocks.0.attn.to_x", "flux1"),
    ):
        keys = [f"{name}.lora_down.weight", f"{name}.lora_up.weight", f"{name}.alpha"]
        assert unread_keys(keys, family) == sorted(keys), name


def test_a_half_of_a_pair_and_peft_magnitudes_are_not_read() -> None:
    pair = ["transformer.proj_out.lora_A.weight", "transformer.proj_out.lora_B.weight"]
    assert unread_keys(pair, "flux1") == []
    assert unread_keys(pair[:1], "flux1") == pair[:1]
    magnitude = "transformer.proj_out.lora_magnitude_vector"
    assert unread_keys([*pair, magnitude, "transformer.proj_out.alpha", "note"], "flux1") == ["note", magnitude]
