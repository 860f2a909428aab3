"""Stable Diffusion 1.x and 2.x: a UNet that predicts epsilon or v, with CLIP text.

Which of the two it predicts, the text width and the number of heads come from the checkpoint's own configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BaseModelError
from ..noise import Diffusion, Flow
from ..state import LATENT, LatentState
from .family import BaseNames, Conditioning, Extras, Family, FamilySpec, Parts
from .sources import LocatedBase

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
# proj_in and proj_out belong to the transformer blocks; with them the set is the 192 modules that LoRA tools expect.
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTIONS = ("conv1", "conv2", "time_emb_proj", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv")


class StableDiffusion15(Family):
    spec = FamilySpec(
        id="sd15",
        title="Stable Diffusion 1.5 / 2",
        pipeline_class="StableDiffusionPipeline",
        denoiser="unet",
        text_encoders=("text_encoder",),
        tokenizers=("tokenizer",),
        objective="diffusion",
        native_resolution=512,
        latent_sampling="sample",
        block_lists=("down_blocks", "mid_block", "up_blocks"),
        lora_targets={
            "attention": ATTENTION,
            "attention+feed_forward": ATTENTION + FEED_FORWARD,
            "all": ATTENTION + FEED_FORWARD + CONVOLUTIONS,
        },
        preview_steps=25,
        preview_guidance=7.0,
        default_formats=("kohya", "diffusers"),
        single_file=True,
    )

    def pixel_multiple(self, located: LocatedBase) -> int:
        levels = len(located.config("unet")["block_out_channels"])
        return self.vae_factor(located.config("vae")) * 2 ** (levels - 1)

    def resolution(self, located: LocatedBase) -> int:
        if "resolution" in located.defaults:
            return super().resolution(located)
        size = located.config("unet").get("sample_size")
        return int(size) * self.vae_factor(located.config("vae")) if size else self.spec.native_resolution

    def encode_text(self, parts: Parts, prompts: Sequence[str], *, grad: bool = False) -> list[Conditioning]:
        """hidden: (L, D), always the tokenizer's full length, since padding tokens are part of the conditioning."""
        tokenizer, encoder = parts["tokenizer"], parts["text_encoder"]
        tokens = tokenizer(
            list(prompts),
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        uses_mask = getattr(encoder.config, "use_attention_mask", False)
        with torch.set_grad_enabled(grad):
            hidden = encoder(
                tokens.input_ids.to(encoder.device),
                attention_mask=tokens.attention_mask.to(encoder.device) if uses_mask else None,
            )[0]
        return [{"hidden": row} for row in hidden]

    def count_tokens(self, parts: Parts, prompt: str) -> tuple[int, int]:
        tokenizer = parts["tokenizer"]
        return len(tokenizer(prompt, truncation=False).input_ids), int(tokenizer.model_max_length)

    def parameterisation(self, scheduler_config: Mapping[str, Any]) -> Diffusion | Flow:
        """The training schedule is DDPM's with the base's own betas, whatever sampler the base ships with."""
        from diffusers import DDPMScheduler
        from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

        kind = scheduler_config.get("prediction_type", "epsilon")
        if kind not in ("epsilon", "v_prediction"):
            raise BaseModelError(f"the base predicts '{kind}', which cannot be trained", "epsilon and v_prediction can")
        keys = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
        scheduler = DDPMScheduler(**{k: scheduler_config[k] for k in keys if scheduler_config.get(k) is not None})
        betas = scheduler.betas
        if scheduler_config.get("rescale_betas_zero_snr"):
            if kind == "epsilon":
                raise BaseModelError(
                    "the base predicts epsilon with zero terminal SNR, where epsilon says nothing", "use v"
                )
            betas = rescale_zero_terminal_snr(betas)
        return Diffusion(torch.cumprod(1.0 - betas.float(), dim=0), kind)

    def model_time(self, parameterisation: Diffusion | Flow, level: Tensor) -> Tensor:
        assert isinstance(parameterisation, Diffusion)
        return parameterisation.timesteps(level).to(level.device)

    def forward(
        self,
        denoiser: nn.Module,
        noisy: LatentState,
        model_time: Tensor,
        conditioning: Mapping[str, Tensor],
        extras: Extras,
    ) -> LatentState:
        prediction = denoiser(
            noisy[LATENT], model_time, encoder_hidden_states=conditioning["hidden"], return_dict=False
        )[0]
        return LatentState.single(prediction)

    def base_names(self, located: LocatedBase) -> BaseNames:
        """Version 2 is known by its text width of 1024 (OpenCLIP); its v models carry '_v'."""
        v_prediction = located.config("scheduler").get("prediction_type") == "v_prediction"
        second = located.config("unet").get("cross_attention_dim") == 1024
        size = "768-v" if v_prediction else "512"
        return BaseNames(
            architecture=f"stable-diffusion-v2-{size}" if second else "stable-diffusion-v1",
            base_version=("sd_v2" if second else "sd_v1") + ("_v" if v_prediction else ""),
            prediction_type="v" if v_prediction else "epsilon",
        )

    def optional_pipeline_arguments(self) -> dict[str, Any]:
        return {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}

    def sampler_arguments(
        self,
        denoiser: nn.Module,
        positive: Sequence[Conditioning],
        negative: Sequence[Conditioning],
        guidance_scale: float,
        device: torch.device,
    ) -> dict[str, Any]:
        return {
            "prompt_embeds": self.collate(positive, device)["hidden"],
            "negative_prompt_embeds": self.collate(negative, device)["hidden"],
            "guidance_scale": guidance_scale,
        }
