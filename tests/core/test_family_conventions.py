"""Every family against the unmodified diffusers pipeline: signs, times, packing, text, latents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.families.family import Extras, Family, Parts
from engine.families.flux1 import pack, unpack
from engine.families.loading import load
from engine.families.registry import FAMILIES, open_base
from engine.noise import Diffusion, Flow
from engine.plan import scheduler_config
from engine.settings.schema import Base
from engine.state import LatentState

BASES = ("sd15", "sd15-v", "flux1", "flux1-dev")
SIZE = (64, 96)  # px; not a square, so that a mix-up of height and width shows
CELLS = (8, 12)


class Opened:
    """A tiny base, wholly loaded."""

    family: Family
    parts: Parts

    def __init__(self, folder: Path) -> None:
        self.family, located = open_base(Base(source=str(folder)))
        spec = self.family.spec
        names = (spec.denoiser, *self.family.text_components(), *self.family.media_components(), "scheduler")
        self.parts = load(self.family, located, names, dtype=torch.float32)
        self.parameterisation = self.family.parameterisation(scheduler_config(located))

    @property
    def denoiser(self) -> Any:
        return self.parts[self.family.spec.denoiser]


@pytest.fixture(scope="module")
def opened(base: Callable[[str], Path]) -> Callable[[str], Opened]:
    found: dict[str, Opened] = {}

    def get(name: str) -> Opened:
        if name not in found:
            found[name] = Opened(base(name))
        return found[name]

    return get


def draw(found: Opened, noise: Tensor, steps: int, *, output: str = "latent", guidance: float = 1.0) -> Tensor:
    """Latents (B,C,h,w) or pixels in [0,1] from the base's own pipeline, starting from `noise`."""
    pipeline = found.family.pipeline(found.parts)
    pipeline.set_progress_bar_config(disable=True)
    text = found.family.encode_text(found.parts, ["a red cat", ""])
    arguments = found.family.sampler_arguments(found.denoiser, text[:1], text[1:], guidance, torch.device("cpu"))
    start = pack(noise) if found.family.spec.id == "flux1" else noise
    with torch.no_grad():
        result: Tensor = pipeline(
            **arguments, height=SIZE[0], width=SIZE[1], num_inference_steps=steps, latents=start, output_type=output,
            return_dict=False,
        )[0]  # fmt: skip
    return result if output != "latent" else found.family.sampled_latents(result, SIZE, found.parts["vae"].config)


def level_of(found: Opened, timestep: Tensor) -> Tensor:
    """Noise level of a time as the network is fed it."""
    if isinstance(found.parameterisation, Flow):
        return timestep.float()
    return timestep.float().reshape(-1) / (found.parameterisation.num_steps - 1)


def exact_answer(found: Opened, clean: LatentState) -> Callable[..., tuple[Tensor]]:
    """A network's forward that knows the clean latents and answers with the engine's own training target."""
    flux = found.family.spec.id == "flux1"

    def forward(first: Tensor | None = None, timestep: Tensor | None = None, **inputs: Any) -> tuple[Tensor]:
        hidden = inputs["hidden_states"] if first is None else first
        noisy = unpack(hidden, *CELLS) if flux else hidden
        assert timestep is not None
        level = level_of(found, timestep)
        batch = clean.map(lambda x: x.expand(noisy.shape[0], *x.shape[1:]))
        if isinstance(found.parameterisation, Diffusion):
            signal, spread = (c.reshape(-1, 1, 1, 1) for c in found.parameterisation.coefficients(level))
        else:
            spread = level.reshape(-1, 1, 1, 1)
            signal = 1 - spread
        noise = LatentState.single((noisy - signal * batch.latent) / spread)
        answer = found.parameterisation.target(batch, noise, level.expand(noisy.shape[0])).latent
        return (pack(answer) if flux else answer,)

    return forward


@pytest.mark.parametrize("steps", [4, 9])
@pytest.mark.parametrize("name", BASES)
def test_a_denoiser_that_answers_with_the_training_target_lands_on_the_clean_latents(
    name: str, steps: int, opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(name)
    generator = torch.Generator().manual_seed(1)
    clean, noise = (torch.randn(1, 4, *CELLS, generator=generator) for _ in range(2))
    monkeypatch.setattr(found.denoiser, "forward", exact_answer(found, LatentState.single(clean)))
    landed = draw(found, noise, steps)
    # DDIM ends one step above clean (set_alpha_to_one=False), where the oracle's own noise is still mixed in a little.
    left = (1 - found.parts["scheduler"].alphas_cumprod[0]) ** 0.5 if name.startswith("sd15") else 0.0
    assert (landed - clean).abs().max() <= left * 8 + 1e-3
    assert (landed - clean).square().mean() < 0.01 * (noise - clean).square().mean()


class Recorder:
    """Records what a network is called with, without changing what it returns."""

    def __init__(self, network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        forward = network.forward

        def record(*given: Any, **named: Any) -> Any:
            positional = dict(zip(("sample", "timestep"), given, strict=False))
            self.calls.append({**positional, **named})
            return forward(*given, **named)

        monkeypatch.setattr(network, "forward", record)


@pytest.mark.parametrize("name", BASES)
def test_training_feeds_the_network_what_the_pipeline_feeds_it(
    name: str, opened: Callable[[str], Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(name)
    recorder = Recorder(found.denoiser, monkeypatch)
    noise = torch.randn(1, 4, *CELLS, generator=torch.Generator().manual_seed(2))
    draw(found, noise, 3, guidance=3.5 if name == "flux1-dev" else 1.0)
    assert len(recorder.calls) == 3
    text = found.family.collate(found.family.encode_text(found.parts, ["a red cat"]), torch.device("cpu"))
    for call in list(recorder.calls):
        hidden = call.get("hidden_states", call.get("sample"))
        noisy = LatentState.single(unpack(hidden, *CELLS) if found.family.spec.id == "flux1" else hidden)
        level = level_of(found, call["timestep"])
        time = found.family.model_time(found.parameterisation, level)
        found.family.forward(found.denoiser, noisy, time, text, Extras(guidance=3.5))
        ours = recorder.calls[-1]
        assert call.keys() - ours.keys() <= {
            "timestep_cond", "cross_attention_kwargs", "added_cond_kwargs", "joint_attention_kwargs",
        }  # fmt: skip
        for key, value in ours.items():
            if isinstance(value, Tensor):
                same = torch.allclose(value.float(), torch.as_tensor(call[key]).float(), rtol=1e-6, atol=1e-6)
                assert same, f"{key}: {value} instead of {call[key]}"
            else:
                assert value == call[key], key


@pytest.mark.parametrize("name", BASES)
def test_the_prediction_has_the_shape_of_the_latents_and_each_sample_its_own_time_and_text(
    name: str, opened: Callable[[str], Opened]
) -> None:
    found = opened(name)
    generator = torch.Generator().manual_seed(3)
    noisy = LatentState.single(torch.randn(2, 4, *CELLS, generator=generator))
    level = found.parameterisation.snap(torch.tensor([0.2, 0.7], dtype=torch.float64))
    time = found.family.model_time(found.parameterisation, level)
    texts = found.family.encode_text(found.parts, ["a red cat", "a blue house"])

    def predict(rows: list[int]) -> Tensor:
        text = found.family.collate([texts[i] for i in rows], torch.device("cpu"))
        with torch.no_grad():
            state = noisy.map(lambda x: x[rows])
            return found.family.forward(found.denoiser, state, time[rows], text, Extras()).latent

    together = predict([0, 1])
    assert together.shape == noisy.latent.shape
    assert torch.allclose(together, torch.cat([predict([0]), predict([1])]), atol=1e-5)
    assert torch.allclose(predict([1, 0]), together.flip(0), atol=1e-5)


@pytest.mark.parametrize("name", ["sd15", "flux1"])
def test_text_is_encoded_as_the_pipeline_encodes_it(name: str, opened: Callable[[str], Opened]) -> None:
    found = opened(name)
    pipeline = found.family.pipeline(found.parts)
    for prompt in ("a red cat", "", "x" * 200):
        ours = found.family.encode_text(found.parts, [prompt])[0]
        with torch.no_grad():
            if name == "sd15":
                expected = {"hidden": pipeline.encode_prompt(prompt, torch.device("cpu"), 1, False)[0][0]}
            else:
                hidden, pooled, _ = pipeline.encode_prompt(prompt, prompt, max_sequence_length=32)
                expected = {"hidden": hidden[0], "pooled": pooled[0]}
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["sd15", "flux1"])
def test_latents_are_decoded_as_the_pipeline_decodes_them(name: str, opened: Callable[[str], Opened]) -> None:
    found = opened(name)
    noise = torch.randn(1, 4, *CELLS, generator=torch.Generator().manual_seed(4))
    pixels = draw(found, noise, 2, output="pt")
    latents = draw(found, noise, 2)
    assert torch.allclose((found.family.decode_media(found.parts, latents) / 2 + 0.5).clamp(0, 1), pixels, atol=1e-5)


@pytest.mark.parametrize("name", ["sd15", "flux1"])
def test_encoding_a_picture_is_the_inverse_of_decoding_up_to_the_vaes_own_error(
    name: str, opened: Callable[[str], Opened]
) -> None:
    found = opened(name)
    vae = found.parts["vae"]
    pixels = torch.rand(2, 3, *SIZE, generator=torch.Generator().manual_seed(5)) * 2 - 1
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    latents = found.family.encode_media(found.parts, pixels, generators)
    assert latents.shape == (2, 4, *CELLS)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        noise = torch.stack([torch.randn(4, *CELLS, generator=torch.Generator().manual_seed(i)) for i in range(2)])
        raw = posterior.mean + posterior.std * noise
        assert torch.allclose(found.family.denormalise(latents, vae.config), raw, atol=1e-5)
        assert torch.allclose(found.family.decode_media(found.parts, latents), vae.decode(raw).sample, atol=1e-5)


def test_packing_is_diffusers_own_and_unpacking_its_inverse() -> None:
    from diffusers import FluxPipeline

    latents = torch.randn(2, 4, 8, 12)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 4, 8, 12))
    assert torch.equal(unpack(pack(latents), 8, 12), latents)


@pytest.mark.parametrize("name", BASES)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(name: str, base: Callable[[str], Path]) -> None:
    found = Opened(base(name))
    found.denoiser.requires_grad_(True).train()
    noisy = LatentState.single(torch.randn(2, 4, *CELLS, generator=torch.Generator().manual_seed(6)))
    level = found.parameterisation.snap(torch.tensor([0.2, 0.7], dtype=torch.float64))
    time = found.family.model_time(found.parameterisation, level)
    text = found.family.collate(found.family.encode_text(found.parts, ["a", "b"]), torch.device("cpu"))

    def loss_and_gradients() -> tuple[Tensor, list[Tensor]]:
        loss = found.family.forward(found.denoiser, noisy, time, text, Extras()).latent.square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in found.denoiser.parameters() if p.grad is not None]
        found.denoiser.zero_grad()
        return loss.detach(), gradients

    plain_loss, plain = loss_and_gradients()
    found.denoiser.enable_gradient_checkpointing()
    flagged = [m for m in found.denoiser.modules() if getattr(m, "gradient_checkpointing", False)]
    assert len(flagged) >= 1, "the flag reaches the modules that have one"
    loss, gradients = loss_and_gradients()
    assert torch.equal(loss, plain_loss)
    assert len(gradients) == len(plain) > 100
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_every_registered_family_is_tested_here() -> None:
    assert set(FAMILIES) == {name.split("-")[0] for name in BASES}
