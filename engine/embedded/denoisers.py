"""Untrained denoisers of the embedded base and the complete diffusers folders around them.

Two families share the image codec and the CLIP text encoder: a UNet (v-prediction) and a flow-matching transformer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from engine.embedded.scenes import SIZES
from engine.embedded.text import WIDTH

_SAMPLE_SIZE = 12  # latent cells of a 48-pixel side
_GUIDANCE = {"unet": 3.0, "flow": 2.0}
_PREVIEW_STEPS = 12


def new_unet() -> UNet2DConditionModel:
    """A UNet whose residual branches and output start at zero, so that early steps already help."""
    unet = UNet2DConditionModel(
        sample_size=_SAMPLE_SIZE,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,  # for this class the number of heads, whatever its name says
        norm_num_groups=8,
    )
    for name, module in unet.named_modules():
        if name.endswith(("conv2", "to_out.0")) or name == "conv_out":
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return unet


def new_flow_transformer() -> FluxTransformer2DModel:
    """A FLUX transformer of 2 double and 4 single blocks with small modulations and a zero output."""
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,  # 4 latent channels of 2x2 cells
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )
    for name, module in transformer.named_modules():
        if name.endswith(("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(transformer.proj_out.weight)
    nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def new_unet_scheduler() -> DDIMScheduler:
    """v-prediction down to zero terminal SNR: without it a denoiser cannot choose a plain background."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
        steps_offset=1,
    )


def write_initial_bases(parts: Path, out: Path, *, seed: int = 4) -> None:
    """Write ``out/unet`` and ``out/flow``, complete pipelines whose denoisers are untrained.

    ``parts`` holds the trained ``vae``, ``tokenizer``, ``text_encoder``, ``tokenizer_2`` and ``text_encoder_2``.
    """
    torch.manual_seed(seed)
    shared = {
        "vae": AutoencoderKL.from_pretrained(parts / "vae"),
        "text_encoder": CLIPTextModel.from_pretrained(parts / "text_encoder"),
        "tokenizer": CLIPTokenizer.from_pretrained(parts / "tokenizer"),
    }
    StableDiffusionPipeline(
        **shared,
        unet=new_unet(),
        scheduler=new_unet_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(out / "unet")
    FluxPipeline(
        **shared,
        text_encoder_2=T5EncoderModel.from_pretrained(parts / "text_encoder_2"),
        tokenizer_2=T5TokenizerFast.from_pretrained(parts / "tokenizer_2"),
        transformer=new_flow_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
    ).save_pretrained(out / "flow")
    _spell_t5_tokenizer(out / "flow")
    for family, guidance in _GUIDANCE.items():
        write_notes(out / family, guidance)


def write_notes(folder: Path, guidance: float) -> None:
    """Write ``safelight.json``: the sizes in pixels (height, width) a base was trained on and good preview settings."""
    notes = {
        "resolution": 48,
        "sizes": [list(size) for size in SIZES],
        "preview": {"steps": _PREVIEW_STEPS, "guidance_scale": guidance},
        "cpu_threads": 1,  # its tensors are so small that threads wait for each other, minutes where others run too
    }
    (folder / "safelight.json").write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")


def adopt_notes(source: Path, target: Path) -> None:
    """Make a saved pipeline fit to ship: add safelight.json, and take out where on some machine it came from."""
    (target / "safelight.json").write_text((source / "safelight.json").read_text("utf-8"), encoding="utf-8")
    for path in target.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # save_pretrained makes weights that only their owner can read
        if path.suffix == ".json" and "_name_or_path" in (text := path.read_text("utf-8")):
            data = json.loads(text)
            data.pop("_name_or_path", None)
            path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if (target / "tokenizer_2").is_dir():
        _spell_t5_tokenizer(target)


def _spell_t5_tokenizer(folder: Path) -> None:
    """The name real FLUX folders carry; transformers before 5 would read T5Tokenizer as the SentencePiece class."""
    index = folder / "model_index.json"
    index.write_text(index.read_text("utf-8").replace('"T5Tokenizer"', '"T5TokenizerFast"'), "utf-8")
