"""Prompts and pictures are encoded as the unmodified pipelines do it, and stay so: caches depend on it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from engine.families.family import Family, Parts
from engine.families.loading import load
from engine.families.registry import FAMILIES, open_base
from engine.precision import Precision
from engine.sampling import Shot, sample
from engine.settings.schema import Base

CPU = torch.device("cpu")
PROMPTS = ("a red ball on a table", "", "Ünïcödé 猫 (weighted:1.2)", "word " * 300)
Bases = Callable[[str], Path]


@dataclass
class Opened:
    family: Family
    parts: Parts

    @property
    def pipeline(self) -> Any:
        pipeline = self.family.pipeline(self.parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline


def open_folder(folder: Path) -> Opened:
    family, located = open_base(Base(source=str(folder)))
    names = (family.spec.denoiser, *family.text_components(), *family.media_components(), "scheduler")
    return Opened(family, load(family, located, names, dtype=torch.float32))


@pytest.fixture(scope="module")
def opened(base: Bases, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Tiny bases; "sd15-mask" has a text encoder that reads the attention mask, as some fine-tunes do."""
    found: dict[str, Opened] = {}

    def get(name: str) -> Opened:
        if name not in found:
            folder = base(name.removesuffix("-mask"))
            if name.endswith("-mask"):
                folder = Path(shutil.copytree(folder, tmp_path_factory.mktemp("masked") / name))
                config = folder / "text_encoder" / "config.json"
                config.write_text(json.dumps({**json.loads(config.read_text()), "use_attention_mask": True}))
            found[name] = open_folder(folder)
        return found[name]

    return get


def by_pipeline(found: Opened, prompts: list[str]) -> dict[str, Tensor]:
    """The pipeline's own encoding, batched."""
    with torch.no_grad():
        if found.family.spec.id == "sd15":
            hidden, _ = found.pipeline.encode_prompt(prompts, CPU, 1, do_classifier_free_guidance=False)
            return {"hidden": hidden}
        limit = min(512, found.parts["tokenizer_2"].model_max_length)
        hidden, pooled, _ = found.pipeline.encode_prompt(prompts, None, CPU, max_sequence_length=limit)
        return {"hidden": hidden, "pooled": pooled}


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd15", "sd15-mask", "flux1", "flux1-dev"])
def test_prompts_become_what_the_pipeline_makes_of_them(name: str, opened: Callable[[str], Opened]) -> None:
    found = opened(name)
    ours = found.family.collate(found.family.encode_text(found.parts, PROMPTS), CPU)
    theirs = by_pipeline(found, list(PROMPTS))
    assert ours.keys() == theirs.keys()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sd15", "sd15-mask", "flux1"])
def test_a_prompt_is_encoded_alike_alone_and_in_company(name: str, opened: Callable[[str], Opened]) -> None:
    found = opened(name)
    together = found.family.encode_text(found.parts, PROMPTS)
    for prompt, in_company in zip(PROMPTS, together, strict=True):
        (alone,) = found.family.encode_text(found.parts, [prompt])
        for key in alone:
            torch.testing.assert_close(alone[key], in_company[key], rtol=0, atol=1e-5)
    batch = found.family.collate([together[2], together[0]], CPU)
    assert torch.equal(batch["hidden"][1], together[0]["hidden"])


def test_the_attention_mask_matters_only_where_the_encoder_was_made_with_it(opened: Callable[[str], Opened]) -> None:
    found = [opened(name) for name in ("sd15", "sd15-mask")]
    plain, masked = (one.family.encode_text(one.parts, ["a ball"])[0]["hidden"] for one in found)
    assert (plain - masked).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "limit"), [("sd15", 77), ("flux1", 32)])
def test_a_prompt_that_is_too_long_loses_its_end(name: str, limit: int, opened: Callable[[str], Opened]) -> None:
    """The tiny tokenizers give about a token a letter."""
    found = opened(name)
    has, reads = found.family.count_tokens(found.parts, "x" * 200)
    assert reads == limit < has
    short_has, _ = found.family.count_tokens(found.parts, "a cat")
    assert short_has <= 8
    long, longer = (found.family.encode_text(found.parts, ["x" * n])[0]["hidden"] for n in (200, 300))
    assert torch.equal(long, longer)
    assert len(long) == limit


def test_text_is_encoded_without_a_graph_unless_it_is_trained(opened: Callable[[str], Opened]) -> None:
    found = opened("sd15")
    encoder = found.parts["text_encoder"]
    encoder.requires_grad_(True)
    try:
        assert not found.family.encode_text(found.parts, ["a"])[0]["hidden"].requires_grad
        found.family.encode_text(found.parts, ["a"], grad=True)[0]["hidden"].sum().backward()
        assert all(p.grad is not None for p in encoder.parameters())
    finally:
        encoder.requires_grad_(False)
        encoder.zero_grad()


# --- previews ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "guidance", "negative"),
    [("sd15", 5.0, "blurry, bad"), ("sd15", 5.0, ""), ("sd15", 1.0, ""), ("sd15-v", 4.0, "blurry"),
     ("sd15-mask", 5.0, "bad"), ("flux1", 1.0, ""), ("flux1", 3.0, "blurry, bad"), ("flux1-dev", 3.5, "")],
)  # fmt: skip
def test_a_preview_is_the_picture_that_the_pipeline_draws_from_the_prompt(
    name: str, guidance: float, negative: str, opened: Callable[[str], Opened]
) -> None:
    found = opened(name)
    family, parts, prompt = found.family, found.parts, "a red ball on a table"
    scale = "true_cfg_scale" if name == "flux1" else "guidance_scale"
    more: dict[str, Any] = {"max_sequence_length": 32} if family.spec.id == "flux1" else {}
    if name != "flux1-dev":
        more["negative_prompt"] = negative
    common: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 3, "output_type": "pt"}
    theirs = found.pipeline(
        prompt, **{scale: guidance}, **more, **common, generator=torch.Generator().manual_seed(4)
    ).images[0]  # fmt: skip
    conditioning = family.encode_text(parts, [prompt, negative])
    arguments = family.sampler_arguments(parts[family.spec.denoiser], conditioning[:1], conditioning[1:], guidance, CPU)
    ours = found.pipeline(**arguments, **common, generator=torch.Generator().manual_seed(4)).images[0]
    assert (ours - theirs).abs().max() < 1e-5
    shot = Shot((64, 96), 3, guidance)
    (picture,) = sample(family, parts, conditioning[:1], conditioning[1], [4], shot, Precision("fp32", CPU))
    expected = theirs.permute(1, 2, 0).numpy() * 255
    assert np.abs(np.asarray(picture, dtype=np.float32) - expected).max() <= 0.5 + 1e-2  # rounding to bytes
    if guidance > 1 and name != "flux1-dev":
        plain = found.pipeline(prompt, **{scale: 1.0}, **more, **common, generator=torch.Generator().manual_seed(4))
        assert (plain.images[0] - theirs).abs().max() > 1e-3, "guidance changes the picture"


# --- media ------------------------------------------------------------------------------------------------------------


def pixels(count: int = 2) -> Tensor:
    smooth = torch.rand(count, 3, 8, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return nn.functional.interpolate(smooth, (64, 96), mode="bilinear")


def generators() -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in (1, 2)]


def test_latents_are_normalised_as_the_pipelines_of_flux_do_it(opened: Callable[[str], Opened]) -> None:
    from diffusers import FluxImg2ImgPipeline

    found = opened("flux1")
    assert found.parts["vae"].config.shift_factor == 0.1
    stand_in = type("Pipeline", (), {"vae": found.parts["vae"]})()
    with torch.no_grad():
        theirs = FluxImg2ImgPipeline._encode_vae_image(stand_in, pixels(), generators())
    ours = found.family.encode_media(found.parts, pixels(), generators())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_latents_are_normalised_as_the_pipelines_of_stable_diffusion_do_it(opened: Callable[[str], Opened]) -> None:
    """Its VAE has a scale and no shift: shift_factor is null in newer configurations and absent in older ones."""
    from diffusers import StableDiffusionImg2ImgPipeline

    found = opened("sd15")
    assert found.parts["vae"].config.shift_factor is None
    whole = StableDiffusionImg2ImgPipeline(
        **{key: value for key, value in found.pipeline.components.items() if key != "image_encoder"},
        requires_safety_checker=False,
    )
    step = torch.tensor([0])
    with torch.no_grad():
        noisy = whole.prepare_latents(pixels(1), step, 1, 1, torch.float32, CPU, generators()[0])
    ours = found.family.encode_media(found.parts, pixels(1), generators()[:1])
    noise = torch.randn(1, 4, 8, 12, generator=_after_one_draw(generators()[0]))
    expected = whole.scheduler.add_noise(ours, noise, step)  # the pipeline returns only the noised latents
    torch.testing.assert_close(noisy, expected, rtol=0, atol=1e-5)


def _after_one_draw(generator: torch.Generator) -> torch.Generator:
    torch.randn(1, 4, 8, 12, generator=generator)
    return generator


@pytest.mark.parametrize("config", [{"scaling_factor": 0.3611, "shift_factor": 0.1159}, {"scaling_factor": 0.18215},
                                    {"scaling_factor": 0.13025, "shift_factor": None}])  # fmt: skip
@pytest.mark.parametrize("family_id", FAMILIES)
def test_normalising_is_undone_exactly(family_id: str, config: dict[str, Any], opened: Callable[[str], Opened]) -> None:
    family = opened(family_id).family
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    normal = family.normalise(latents, config)
    torch.testing.assert_close(normal, (latents - (config.get("shift_factor") or 0)) * config["scaling_factor"])
    torch.testing.assert_close(family.denormalise(normal, config), latents)


@pytest.mark.parametrize("name", ["sd15", "flux1"])
def test_a_picture_is_encoded_alike_alone_and_in_company_and_in_float32(
    name: str, opened: Callable[[str], Opened]
) -> None:
    found = opened(name)
    latents = found.family.encode_media(found.parts, pixels(), generators())
    assert latents.shape == (2, 4, 8, 12)
    assert latents.dtype == torch.float32 and not latents.requires_grad
    for index in range(2):
        alone = found.family.encode_media(found.parts, pixels()[index : index + 1], generators()[index : index + 1])
        torch.testing.assert_close(alone[0], latents[index], rtol=0, atol=1e-5)
    back = found.family.decode_media(found.parts, latents)
    assert back.shape == (2, 3, 64, 96) and back.dtype == torch.float32


def test_a_half_precision_vae_gives_float32_latents_close_to_the_full_ones(base: Bases) -> None:
    family, located = open_base(Base(source=str(base("sd15"))))
    full, half = (load(family, located, ["vae"], dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    latents = [family.encode_media(parts, pixels(), generators()) for parts in (full, half)]
    assert latents[1].dtype == torch.float32
    torch.testing.assert_close(latents[1], latents[0], rtol=0.1, atol=0.05)
    assert family.decode_media(half, latents[0]).dtype == torch.float32


# --- the versions that caches depend on -------------------------------------------------------------------------------

# (space version, numbers of the output on a tiny model with known weights). When a test below fails because encode_text
# or encode_media was changed on purpose, raise the version in the family's spec and write the new numbers here.
PINNED: dict[str, dict[str, tuple[int, list[float]]]] = {
    "sd15": {
        "text": (1, [-0.0588049, 0.966105, -1.09414e-05, 0.000324015, 0.000311209, 0.00089038]),
        "latents": (1, [-0.0251146, 0.642453, 0.0193564, -0.0122136, 0.00483312, -0.0246169]),
    },
    "flux1": {
        "text": (1, [0.0151805, 1.01471, 0.00352371, -0.00163237, -0.00300175, 0.00464397,
                     -0.0782785, 0.979474, -0.00480935, -0.0171169, -0.0359401, -0.00103616]),
        "latents": (1, [0.149469, 5.46547, -0.05309, 0.0177851, -0.10395, 0.0857877]),
    },
}  # fmt: skip


def with_known_weights(found: Opened) -> Opened:
    """Weights by a formula, so that neither a library's way of initialising nor a CPU's random numbers matter."""
    for component in found.parts.components.values():
        if isinstance(component, nn.Module):
            for index, (name, parameter) in enumerate(sorted(component.named_parameters())):
                wave = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 0.7 + index)
                around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.data.copy_((around + 0.2 * wave).reshape(parameter.shape))
    return found


def numbers(tensor: Tensor) -> list[float]:
    """Mean, spread, and four projections on waves, which depend on every element and its place."""
    flat = tensor.double().reshape(-1)
    place = torch.arange(flat.numel(), dtype=torch.float64)
    waves = [float((flat * torch.cos(place * step)).mean()) for step in (0.11, 0.37, 1.3, 2.9)]
    return [float(flat.mean()), float(flat.std()), *waves]


def text_numbers(found: Opened) -> list[float]:
    encoded = found.family.encode_text(found.parts, ["a red ball", "word " * 60])
    return [value for key in sorted(encoded[0]) for value in numbers(torch.stack([c[key] for c in encoded]))]


def media_numbers(found: Opened) -> list[float]:
    return numbers(found.family.encode_media(found.parts, pixels(), generators()))


def same(one: list[float], other: list[float]) -> bool:
    small = max(map(abs, other)) * 1e-4
    pairs = zip(one, other, strict=True)
    return all(math.isclose(a, b, rel_tol=2e-3, abs_tol=small) for a, b in pairs)


@pytest.fixture(scope="module")
def known(base: Bases) -> Callable[[str], Opened]:
    found: dict[str, Opened] = {}

    def get(family_id: str) -> Opened:
        if family_id not in found:
            found[family_id] = with_known_weights(open_folder(base(family_id)))
        return found[family_id]

    return get


@pytest.mark.parametrize("space", ["text", "latents"])
@pytest.mark.parametrize("family_id", FAMILIES)
def test_encoding_does_not_change_without_a_new_space_version(
    family_id: str, space: str, known: Callable[[str], Opened]
) -> None:
    found = known(family_id)
    spec = found.family.spec
    version = spec.text_space_version if space == "text" else spec.latent_space_version
    now = text_numbers(found) if space == "text" else media_numbers(found)
    pinned_version, pinned = PINNED[family_id][space]
    changed = not same(now, pinned)
    assert not (changed and version == pinned_version), f"caches would mix old and new: raise the version. Now {now}"
    assert version == pinned_version, f"write down what version {version} gives: {now}"


@pytest.mark.parametrize("family_id", FAMILIES)
def test_the_pinned_numbers_notice_what_may_change(
    family_id: str, known: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = known(family_id)
    text, media = PINNED[family_id]["text"][1], PINNED[family_id]["latents"][1]
    tokenizer = found.parts["tokenizer_2" if family_id == "flux1" else "tokenizer"]
    with monkeypatch.context() as changing:
        changing.setattr(tokenizer, "model_max_length", tokenizer.model_max_length - 1)
        assert not same(text_numbers(found), text)
    with monkeypatch.context() as changing:
        changing.setattr(type(found.family), "spec", replace(found.family.spec, latent_sampling="mode"))
        assert not same(media_numbers(found), media)
    with monkeypatch.context() as changing:
        changing.setattr(type(found.family), "normalise", lambda self, latents, config: latents)
        assert not same(media_numbers(found), media)
