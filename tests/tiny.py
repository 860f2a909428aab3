"""Tiny complete models in diffusers format, made offline in about a second each.

Heads that models usually start at zero get small noise here: with a zero head nothing that is trained would show.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.lora_weights import LoraLayer


def tiny_sd15(folder: Path, prediction_type: str = "epsilon") -> Path:
    """A StableDiffusionPipeline of about 0.3 M parameters: 8 px a latent cell, 64 px pictures, 77 tokens of 32."""
    diffusers: Any = importlib.import_module("diffusers")  # its classes are not annotated
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        unet=_without_zeros(unet),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder)
    return folder


def tiny_flux1(folder: Path, guidance_embeds: bool = False) -> Path:
    """A FluxPipeline of about 0.3 M parameters: 2 double and 2 single blocks 32 wide, 16 px a token, 64 px pictures."""
    diffusers: Any = importlib.import_module("diffusers")
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,  # 4 latent channels of 2x2 cells
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 4, 8),
    )
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        )
    )  # fmt: skip
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=guidance_embeds),
        vae=_vae(shift_factor=0.1),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=t5.eval(),
        tokenizer_2=_t5_tokenizer(),
        transformer=_without_zeros(transformer),
    )
    pipeline.save_pretrained(folder)
    return folder


def _vae(shift_factor: float | None = None) -> nn.Module:
    diffusers: Any = importlib.import_module("diffusers")
    vae = diffusers.AutoencoderKL(
        sample_size=64,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.5,
        shift_factor=shift_factor,
        use_quant_conv=shift_factor is None,
        use_post_quant_conv=shift_factor is None,
    )
    return _without_zeros(vae)


def _clip() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=32,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return _without_zeros(CLIPTextModel(config))


def _clip_tokenizer() -> Any:
    """Byte-level CLIP without merges: 256 characters, the same at the end of a word, start and end."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer({piece: index for index, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def _t5_tokenizer() -> Any:
    """Printable characters and word starts as a unigram vocabulary."""
    import string

    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -4.0) for letter in string.printable[:95] if letter != " "]
    pieces += [(f"▁{letter}", -3.0) for letter in string.ascii_lowercase]
    return T5Tokenizer(vocab=pieces, extra_ids=100, model_max_length=32)


def _without_zeros(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1 and not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


def random_lora_layer(
    weight_shape: torch.Size | tuple[int, ...],
    *,
    rank: int = 4,
    alpha: float = 4.0,
    rank_stabilised: bool = False,
    seed: int = 0,
    size: float = 0.1,
) -> LoraLayer:
    """An adapter for a linear (out, in) or convolution (out, in, k, k) weight, both factors random."""
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, *weight_shape[1:], generator=generator) * size
    up = torch.randn(weight_shape[0], rank, *(1 for _ in weight_shape[2:]), generator=generator) * size
    return LoraLayer(down, up, alpha, rank_stabilised)
