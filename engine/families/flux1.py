"""FLUX.1: a flow-matching transformer with CLIP's pooled text vector and T5's token states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..noise import Diffusion, Flow
from ..state import LATENT, LatentState
from .family import BaseNames, Conditioning, Extras, Family, FamilySpec, Parts
from .sources import LocatedBase

MAX_T5_TOKENS = 512
ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
    "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
)  # fmt: skip
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp", "proj_out")
MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")


class Flux1(Family):
    spec = FamilySpec(
        id="flux1",
        title="FLUX.1",
        pipeline_class="FluxPipeline",
        denoiser="transformer",
        text_encoders=("text_encoder", "text_encoder_2"),
        tokenizers=("tokenizer", "tokenizer_2"),
        objective="flow",
        native_resolution=1024,
        latent_sampling="sample",
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        lora_targets={
            "attention": ATTENTION,
            "attention+feed_forward": ATTENTION + FEED_FORWARD,
            "all": ATTENTION + FEED_FORWARD + MODULATION,
        },
        preview_steps=28,
        preview_guidance=3.5,
        default_formats=("diffusers", "kohya"),
    )

    def pixel_multiple(self, located: LocatedBase) -> int:
        return self.vae_factor(located.config("vae")) * 2

    def encode_text(self, parts: Parts, prompts: Sequence[str], *, grad: bool = False) -> list[Conditioning]:
        """hidden: (L, D) of T5; pooled: (P,) of CLIP. Fixed lengths: padding is part of the conditioning, no mask."""
        clip_tokens = parts["tokenizer"](
            list(prompts),
            padding="max_length",
            max_length=parts["tokenizer"].model_max_length,
            truncation=True,
            return_tensors="pt",
        ).input_ids
        t5_tokens = parts["tokenizer_2"](
            list(prompts),
            padding="max_length",
            max_length=self.t5_tokens(parts),
            truncation=True,
            return_tensors="pt",
        ).input_ids
        clip, t5 = parts["text_encoder"], parts["text_encoder_2"]
        with torch.set_grad_enabled(grad):
            pooled = clip(clip_tokens.to(clip.device), output_hidden_states=False).pooler_output
        # Outside autocast: T5 overflows in fp16.
        with torch.no_grad(), torch.autocast(t5.device.type, enabled=False):
            hidden = t5(t5_tokens.to(t5.device), output_hidden_states=False)[0]
        return [{"hidden": h, "pooled": p} for h, p in zip(hidden, pooled, strict=True)]

    def t5_tokens(self, parts: Parts) -> int:
        """Text length the base was trained with: its tokenizer's limit, 512 at most, as diffusers' pipeline has it."""
        return min(MAX_T5_TOKENS, int(parts["tokenizer_2"].model_max_length))

    def count_tokens(self, parts: Parts, prompt: str) -> tuple[int, int]:
        return len(parts["tokenizer_2"](prompt, truncation=False).input_ids), self.t5_tokens(parts)

    def parameterisation(self, scheduler_config: Mapping[str, Any]) -> Diffusion | Flow:
        return Flow()

    def base_names(self, located: LocatedBase) -> BaseNames:
        return BaseNames(
            architecture="flux-1-dev" if self.embeds_guidance(located) else "flux-1-schnell",
            base_version="flux1",
            implementation="https://github.com/black-forest-labs/flux",
        )

    def embeds_guidance(self, located: LocatedBase) -> bool:
        return bool(located.config("transformer").get("guidance_embeds"))

    def image_tokens(self, latent_size: tuple[int, int]) -> int:
        return (latent_size[0] // 2) * (latent_size[1] // 2)

    def model_time(self, parameterisation: Diffusion | Flow, level: Tensor) -> Tensor:
        return level  # the transformer multiplies by 1000 itself

    def forward(
        self,
        denoiser: nn.Module,
        noisy: LatentState,
        model_time: Tensor,
        conditioning: Mapping[str, Tensor],
        extras: Extras,
    ) -> LatentState:
        latents = noisy[LATENT]
        height, width = latents.shape[-2:]
        hidden = conditioning["hidden"]
        guidance = None
        if denoiser.config.guidance_embeds:  # type: ignore[union-attr]
            # (B,): the transformer multiplies by 1000 itself
            guidance = torch.full((latents.shape[0],), extras.guidance, device=latents.device, dtype=torch.float32)
        prediction = denoiser(
            hidden_states=pack(latents),
            timestep=model_time,
            guidance=guidance,
            pooled_projections=conditioning["pooled"],
            encoder_hidden_states=hidden,
            txt_ids=torch.zeros(hidden.shape[1], 3, device=latents.device, dtype=latents.dtype),
            img_ids=image_ids(height // 2, width // 2, latents),
            return_dict=False,
        )[0]
        return LatentState.single(unpack(prediction, height, width))

    def sampled_latents(self, latents: Tensor, size: tuple[int, int], vae_config: Any) -> Tensor:
        factor = self.vae_factor(vae_config)
        return unpack(latents, size[0] // factor, size[1] // factor)

    def preview_defaults(self, located: LocatedBase) -> tuple[int, float]:
        if located.defaults.get("preview") is None and not self.embeds_guidance(located):
            return 4, 1.0  # schnell: distilled to few steps without guidance
        return super().preview_defaults(located)

    def sampler_arguments(
        self,
        denoiser: nn.Module,
        positive: Sequence[Conditioning],
        negative: Sequence[Conditioning],
        guidance_scale: float,
        device: torch.device,
    ) -> dict[str, Any]:
        """Bases that embed guidance are given it as such; others are guided the classical way against the negative."""
        text = self.collate(positive, device)
        arguments = {"prompt_embeds": text["hidden"], "pooled_prompt_embeds": text["pooled"]}
        if denoiser.config.guidance_embeds:  # type: ignore[union-attr]
            return {**arguments, "guidance_scale": guidance_scale}
        against = self.collate(negative, device)
        return {
            **arguments,
            "negative_prompt_embeds": against["hidden"],
            "negative_pooled_prompt_embeds": against["pooled"],
            "true_cfg_scale": guidance_scale,
        }


def pack(latents: Tensor) -> Tensor:
    """(B,C,h,w) -> tokens (B, h/2*w/2, 4C): each 2x2 cell becomes one token, channel-major."""
    batch, channels, height, width = latents.shape
    cells = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Inverse of pack; height and width in latent cells."""
    batch, _, width4 = tokens.shape
    cells = tokens.reshape(batch, height // 2, width // 2, width4 // 4, 2, 2)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(batch, width4 // 4, height, width)


def image_ids(rows: int, columns: int, like: Tensor) -> Tensor:
    """Position of each token, (rows*columns, 3): (0, row, column)."""
    ids = torch.zeros(rows, columns, 3, device=like.device, dtype=like.dtype)
    ids[..., 1] = torch.arange(rows, device=like.device, dtype=like.dtype)[:, None]
    ids[..., 2] = torch.arange(columns, device=like.device, dtype=like.dtype)[None, :]
    return ids.reshape(rows * columns, 3)
