"""What the engine decides for the models that people train, from their published configurations, without any weight.

The values are those of the config.json files on the hub: stable-diffusion-v1-5/stable-diffusion-v1-5,
stabilityai/stable-diffusion-2-1, black-forest-labs/FLUX.1-dev and FLUX.1-schnell, written down by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import BaseModelError
from engine.families.family import Family, Parts
from engine.families.flux1 import Flux1
from engine.families.loading import skeleton
from engine.families.registry import get, open_base
from engine.families.sources import LocatedBase
from engine.noise import Diffusion, Flow
from engine.plan import scheduler_config
from engine.settings.schema import Base

# --- published configurations -----------------------------------------------------------------------------------------

SD_SCHEDULER = {
    "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1,
    "trained_betas": None, "clip_sample": False,
}  # fmt: skip
SD_VAE = {
    "_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": [128, 256, 512, 512], "in_channels": 3,
    "out_channels": 3, "latent_channels": 4, "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 512,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
SD15_UNET = {
    "_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": False, "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"], "downsample_padding": 1,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1,
    "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
}  # fmt: skip
SD21_UNET = {
    **SD15_UNET, "attention_head_dim": [5, 10, 20, 20], "cross_attention_dim": 1024, "dual_cross_attention": False,
    "only_cross_attention": False, "num_class_embeds": None, "sample_size": 96, "upcast_attention": True,
    "use_linear_projection": True,
}  # fmt: skip
FLUX_TRANSFORMER = {
    "_class_name": "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
    "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38,
    "patch_size": 1, "pooled_projection_dim": 768,
}  # fmt: skip
FLUX_VAE = {
    **SD_VAE, "latent_channels": 16, "sample_size": 1024, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    "use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": True, "force_upcast": True,
}  # fmt: skip
FLUX_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler", "base_image_seq_len": 256, "base_shift": 0.5,
    "max_image_seq_len": 4096, "max_shift": 1.15, "num_train_timesteps": 1000, "shift": 3.0,
    "use_dynamic_shifting": True,
}  # fmt: skip
SD_INDEX = {
    "_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "feature_extractor": ["transformers", "CLIPImageProcessor"],
}  # fmt: skip
FLUX_INDEX = {
    "_class_name": "FluxPipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"], "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"], "tokenizer_2": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
}  # fmt: skip

PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "sd15": {"model_index": SD_INDEX, "unet": SD15_UNET, "vae": SD_VAE, "scheduler": SD_SCHEDULER},
    "sd21": {
        "model_index": SD_INDEX, "unet": SD21_UNET, "vae": {**SD_VAE, "sample_size": 768},
        "scheduler": {**SD_SCHEDULER, "prediction_type": "v_prediction"},
    },
    "dev": {"model_index": FLUX_INDEX, "transformer": FLUX_TRANSFORMER, "vae": FLUX_VAE, "scheduler": FLUX_SCHEDULER},
    "schnell": {
        "model_index": FLUX_INDEX, "transformer": {**FLUX_TRANSFORMER, "guidance_embeds": False}, "vae": FLUX_VAE,
        "scheduler": {**FLUX_SCHEDULER, "shift": 1.0, "use_dynamic_shifting": False},
    },
}  # fmt: skip


@dataclass
class Published:
    family: Family
    located: LocatedBase
    denoiser: nn.Module  # on the meta device


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Published]:
    root = tmp_path_factory.mktemp("published")
    found: dict[str, Published] = {}

    def get(name: str) -> Published:
        if name not in found:
            for component, config in PUBLISHED[name].items():
                file = "scheduler_config" if component == "scheduler" else "config"
                path = root / name / component / f"{file}.json"
                if component == "model_index":
                    path = root / name / "model_index.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(config))
            family, located = open_base(Base(source=str(root / name)))
            found[name] = Published(family, located, skeleton(family, located))
        return found[name]

    return get


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "multiple", "resolution", "preview"),
    [
        ("sd15", "sd15", 64, 512, (25, 7.0)),
        ("sd21", "sd15", 64, 768, (25, 7.0)),
        ("dev", "flux1", 16, 1024, (28, 3.5)),
        ("schnell", "flux1", 16, 1024, (4, 1.0)),
    ],
)
def test_sizes_and_preview_defaults(
    name: str,
    family: str,
    multiple: int,
    resolution: int,
    preview: tuple[int, float],
    published: Callable[[str], Published],
) -> None:
    found = published(name)
    assert found.family.spec.id == family
    assert found.family.pixel_multiple(found.located) == multiple
    assert found.family.resolution(found.located) == resolution
    assert found.family.preview_defaults(found.located) == preview
    assert all(p.is_meta for p in found.denoiser.parameters())


@pytest.mark.parametrize(
    ("name", "preset", "count"),
    [
        ("sd15", "attention", 16 * 2 * 4),
        ("sd15", "attention+feed_forward", 192),  # the number of UNet modules in an ordinary kohya LoRA file
        ("sd21", "attention+feed_forward", 192),
        ("sd15", "all", 192 + 22 * 3 + 14 + 3 + 3),  # 22 residual blocks, 14 of them with a shortcut; 3 ways down, 3 up
        ("dev", "attention", 19 * 8 + 38 * 3),
        ("dev", "attention+feed_forward", 19 * 12 + 38 * 5),
        ("dev", "all", 19 * 14 + 38 * 6),
        ("schnell", "attention+feed_forward", 19 * 12 + 38 * 5),
    ],
)
def test_a_preset_covers_exactly_the_layers_it_names(
    name: str, preset: str, count: int, published: Callable[[str], Published]
) -> None:
    found = published(name)
    chosen = found.family.lora_modules(found.denoiser, preset)
    assert len(chosen) == len(set(chosen)) == count
    assert all(isinstance(found.denoiser.get_submodule(n), nn.Linear | nn.Conv2d) for n in chosen)
    lists = tuple(f"{n}." for n in found.family.blocks(found.denoiser))
    assert all(n.startswith(lists) for n in chosen), "nothing outside the blocks, such as FLUX's final proj_out"


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_the_usual_preset_reaches_the_attention_and_the_feed_forward_layers_of_every_block(
    name: str, published: Callable[[str], Published]
) -> None:
    found = published(name)
    chosen = found.family.lora_modules(found.denoiser, "attention+feed_forward")
    one_block = r"(.*\.transformer_blocks\.\d+|(?:single_)?transformer_blocks\.\d+)\."
    blocks = {match[1] for n, _ in found.denoiser.named_modules() if (match := re.match(one_block, n))}
    assert len(blocks) == (16 if found.family.spec.id == "sd15" else 57)
    for block in blocks:
        inside = [n.removeprefix(f"{block}.") for n in chosen if n.startswith(f"{block}.")]
        assert any(n.startswith("attn") for n in inside), block
        assert any(n.startswith("ff") or n in ("proj_mlp", "proj_out") for n in inside), block


def test_patterns_may_name_any_layer_also_outside_the_blocks(published: Callable[[str], Published]) -> None:
    found = published("dev")
    assert found.family.lora_modules(found.denoiser, ["x_embedder"]) == ["x_embedder"]
    assert len(found.family.lora_modules(found.denoiser, ["transformer_blocks.0.attn.to_*"])) == 5


def test_the_blocks_are_the_denoisers_own_lists(published: Callable[[str], Published]) -> None:
    flux = published("dev").family.blocks(published("dev").denoiser)
    assert {name: len(list(module.children())) for name, module in flux.items()} == {
        "transformer_blocks": 19, "single_transformer_blocks": 38,
    }  # fmt: skip
    unet = published("sd15").family.blocks(published("sd15").denoiser)
    assert list(unet) == ["down_blocks", "mid_block", "up_blocks"]
    assert len(list(unet["down_blocks"].children())) == len(list(unet["up_blocks"].children())) == 4


@pytest.mark.parametrize(("name", "kind"), [("sd15", "epsilon"), ("sd21", "v_prediction")])
def test_the_schedule_of_stable_diffusion_is_the_published_one(
    name: str, kind: str, published: Callable[[str], Published]
) -> None:
    found = published(name)
    parameterisation = found.family.parameterisation(scheduler_config(found.located))
    assert isinstance(parameterisation, Diffusion)
    assert parameterisation.prediction_type == kind
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2  # "scaled_linear"
    expected = torch.cumprod(1 - betas, dim=0).float()
    torch.testing.assert_close(parameterisation.alphas_cumprod, expected, rtol=1e-4, atol=1e-6)


def test_flux_is_trained_by_flow_matching(published: Callable[[str], Published]) -> None:
    assert isinstance(published("dev").family.parameterisation(FLUX_SCHEDULER), Flow)


@pytest.mark.parametrize("kind", ["sample", "x0"])
def test_a_base_that_predicts_something_else_is_refused(kind: str) -> None:
    with pytest.raises(BaseModelError, match=f"predicts '{kind}'"):
        get("sd15").parameterisation({**SD_SCHEDULER, "prediction_type": kind})


def test_a_base_that_predicts_epsilon_where_there_is_no_signal_is_refused() -> None:
    with pytest.raises(BaseModelError, match="zero terminal SNR"):
        get("sd15").parameterisation({**SD_SCHEDULER, "rescale_betas_zero_snr": True})
    rescaled = get("sd15").parameterisation(
        {**SD_SCHEDULER, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    )
    assert isinstance(rescaled, Diffusion) and rescaled.alphas_cumprod[-1] == 0


def test_guidance_is_embedded_where_the_base_was_distilled_with_it_and_classical_elsewhere(
    published: Callable[[str], Published],
) -> None:
    text = {"hidden": torch.zeros(512, 4096), "pooled": torch.zeros(768)}
    found = {}
    for name in ("dev", "schnell"):
        base = published(name)
        _, guidance = base.family.preview_defaults(base.located)
        found[name] = base.family.sampler_arguments(base.denoiser, [text], [text], guidance, torch.device("cpu"))
    assert found["dev"]["guidance_scale"] == 3.5
    assert not {"true_cfg_scale", "negative_prompt_embeds"} & found["dev"].keys()
    assert found["schnell"]["true_cfg_scale"] == 1.0, "which the pipeline takes as: no guidance, one pass a step"
    assert "guidance_scale" not in found["schnell"]
    stable = published("sd15").family.sampler_arguments(
        published("sd15").denoiser, [{"hidden": torch.zeros(77, 768)}], [{"hidden": torch.ones(77, 768)}], 7.0,
        torch.device("cpu"),
    )  # fmt: skip
    assert stable["guidance_scale"] == 7.0
    assert stable["negative_prompt_embeds"].shape == (1, 77, 768)


@pytest.mark.parametrize(("limit", "used"), [(512, 512), (256, 256), (int(1e30), 512)])
def test_t5_reads_512_tokens_or_what_its_tokenizer_allows(
    limit: int, used: int, published: Callable[[str], Published]
) -> None:
    tokenizer = SimpleNamespace(model_max_length=limit)
    family = published("dev").family
    assert isinstance(family, Flux1)
    assert family.t5_tokens(Parts(published("dev").located, {"tokenizer_2": tokenizer})) == used
