"""Noise levels and parameterisations against diffusers' schedulers and published formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.errors import SettingsError
from engine.families import registry
from engine.noise import (
    Diffusion,
    Flow,
    as_level,
    level_law,
    min_snr_weight,
    quantile,
    resolution_shift,
    shift_levels,
)
from engine.settings.schema import Denoise, LogitNormalLevels, UniformLevels
from engine.state import LatentState

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
STEPS = torch.tensor([0, 1, 499, 998, 999])


def diffusion(prediction_type: str = "epsilon", **extra: object) -> Diffusion:
    found = registry.get("sd15").parameterisation({**BETAS, "prediction_type": prediction_type, **extra})
    assert isinstance(found, Diffusion)
    return found


def sample() -> tuple[LatentState, LatentState]:
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(5, 4, 8, 8, generator=generator) for _ in range(2))
    return LatentState.single(clean), LatentState.single(noise)


def scheduler(prediction_type: str = "epsilon", **extra: object) -> object:
    from diffusers import DDPMScheduler

    return DDPMScheduler(**BETAS, prediction_type=prediction_type, **extra)


# --- parameterisations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "zero_snr"), [("epsilon", False), ("v_prediction", False), ("v_prediction", True)])
def test_diffusion_mixes_and_aims_as_diffusers_does(kind: str, zero_snr: bool) -> None:
    ours, oracle = diffusion(kind, rescale_betas_zero_snr=zero_snr), scheduler(kind, rescale_betas_zero_snr=zero_snr)
    clean, noise = sample()
    level = STEPS.float() / 999
    noisy = ours.mix(clean, noise, level)
    assert torch.allclose(noisy.latent, oracle.add_noise(clean.latent, noise.latent, STEPS), atol=1e-6)  # type: ignore[attr-defined]
    target = ours.target(clean, noise, level).latent
    expected = noise.latent if kind == "epsilon" else oracle.get_velocity(clean.latent, noise.latent, STEPS)  # type: ignore[attr-defined]
    assert torch.allclose(target, expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "flow"])
def test_a_perfect_prediction_gives_back_the_clean_latents(kind: str) -> None:
    ours = Flow() if kind == "flow" else diffusion(kind)
    clean, noise = sample()
    level = ours.snap(torch.tensor([0.0, 0.2, 0.5, 0.8, 0.95], dtype=torch.float64))
    found = ours.to_clean(ours.mix(clean, noise, level), ours.target(clean, noise, level), level)
    assert torch.allclose(found.latent, clean.latent, atol=1e-4)


def test_flow_mixes_as_diffusers_does() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    oracle = FlowMatchEulerDiscreteScheduler()
    clean, noise = sample()
    timesteps = oracle.timesteps[torch.tensor([0, 1, 500, 998, 999])]
    expected = oracle.scale_noise(clean.latent, timesteps, noise.latent)
    assert torch.allclose(Flow().mix(clean, noise, timesteps / 1000).latent, expected, atol=1e-6)


def test_flow_at_level_zero_is_clean_and_its_target_points_to_noise() -> None:
    clean, noise = sample()
    assert torch.equal(Flow().mix(clean, noise, torch.zeros(5)).latent, clean.latent)
    assert torch.equal(Flow().target(clean, noise, torch.rand(5)).latent, noise.latent - clean.latent)


def test_an_epsilon_base_with_zero_terminal_snr_is_refused() -> None:
    from engine.errors import BaseModelError

    with pytest.raises(BaseModelError, match="zero terminal SNR"):
        diffusion("epsilon", rescale_betas_zero_snr=True)


def test_uniform_levels_become_every_step_equally_often() -> None:
    ours = diffusion()
    probability = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    steps = ours.timesteps(ours.snap(probability))
    assert torch.equal(torch.bincount(steps, minlength=1000), torch.full((1000,), 10))
    assert ours.timesteps(ours.snap(torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))).tolist() == [0, 999]


def test_every_step_survives_its_way_through_a_float32_level() -> None:
    ours = diffusion()
    steps = torch.arange(1000)
    assert torch.equal(ours.timesteps((steps.double() / 999).float()), steps)


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.5, 0.7), (-1.0, 2.0)])
def test_quantiles_of_logit_normal_levels_are_those_of_a_direct_sample(mean: float, std: float) -> None:
    law = LogitNormalLevels(mean=mean, std=std)
    generator = torch.Generator().manual_seed(0)
    direct = torch.sigmoid(mean + std * torch.randn(400_000, generator=generator, dtype=torch.float64))
    ours = quantile(law, torch.rand(400_000, generator=generator, dtype=torch.float64))
    edges = 20
    shares = [torch.histc(values, edges, 0.0, 1.0) / len(values) for values in (direct, ours)]
    assert (shares[0] - shares[1]).abs().max() < 2e-3
    probability = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.allclose(quantile(law, probability), torch.quantile(direct[:100_000], probability), atol=5e-3)


def test_the_ends_of_the_probabilities_give_levels_inside_the_unit_interval() -> None:
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    for law in (UniformLevels(), LogitNormalLevels(), LogitNormalLevels(mean=5.0, std=5.0)):
        levels = as_level(quantile(law, ends))
        assert torch.isfinite(levels).all() and (levels >= 0).all() and (levels < 1).all()


def test_R15_no_level_rounds_up_to_one() -> None:
    below = torch.nextafter(torch.tensor(1000.0), torch.tensor(0.0))
    assert (below * torch.tensor(0.001)).item() == 1.0, "the fault that float32 arithmetic has"
    assert as_level(below.double() / 1000).item() < 1.0
    neighbours = torch.tensor([1.0 - k * 2.0**-53 for k in range(2000)], dtype=torch.float64)
    assert (as_level(neighbours) < 1.0).all()
    for shift in (0.3, 1.0, 3.0, 12.0):
        assert (as_level(shift_levels(neighbours, shift)) < 1.0).all()


def test_shift_is_the_published_formula() -> None:
    levels = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    for shift in (0.5, 1.0, 3.0):
        expected = [shift * u / (1 + (shift - 1) * u) for u in levels.tolist()]
        assert shift_levels(levels, shift).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
@pytest.mark.parametrize("tokens", [16, 256, 1024, 4096, 6000])
def test_resolution_shift_is_that_of_diffusers(tokens: int, kind: str) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
    oracle = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type=kind)
    levels = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    shift = resolution_shift(tokens, base_tokens=256, max_tokens=4096, base_shift=0.5, max_shift=1.15, kind=kind)
    assert torch.allclose(shift_levels(levels, shift), oracle.time_shift(mu, 1.0, levels), rtol=1e-9)


FLOW_STATIC = {"shift": 3.0, "use_dynamic_shifting": False}
FLOW_DYNAMIC = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}


@pytest.mark.parametrize(
    ("wanted", "flow", "config", "at_4096"),
    [
        ("auto", False, {}, 1.0),
        ("auto", True, FLOW_STATIC, 3.0),
        ("auto", True, {}, 1.0),
        ("auto", True, FLOW_DYNAMIC, math.exp(1.15)),
        ("resolution", True, FLOW_STATIC, math.exp(1.15)),
        ("none", True, FLOW_DYNAMIC, 1.0),
        (2.5, True, FLOW_DYNAMIC, 2.5),
        (2.5, False, {}, 2.5),
    ],
)
def test_the_shift_follows_the_settings_and_the_bases_scheduler(
    wanted: object, flow: bool, config: dict[str, object], at_4096: float
) -> None:
    law = level_law(Denoise.model_validate({"shift": wanted}), flow=flow, scheduler=config)
    assert law.shift_for(4096) == pytest.approx(at_4096)
    assert isinstance(law.distribution, LogitNormalLevels if flow else UniformLevels)


def test_a_resolution_shift_on_an_epsilon_base_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"objective\.shift"):
        level_law(Denoise(shift="resolution"), flow=False, scheduler={})


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_min_snr_weights_follow_the_paper(kind: str) -> None:
    from diffusers.training_utils import compute_snr

    ours = diffusion(kind)
    level = STEPS.float() / 999
    a = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0)[STEPS]
    snr = a / (1 - a)
    by_hand: Tensor = snr.clamp(max=5.0) / (snr if kind == "epsilon" else snr + 1)
    assert torch.allclose(min_snr_weight(ours, level, 5.0).double(), by_hand, rtol=1e-4)
    assert torch.allclose(ours.signal_to_noise(level), compute_snr(scheduler(), STEPS), rtol=1e-4)


def test_min_snr_is_finite_at_a_zero_snr_end() -> None:
    ours = diffusion("v_prediction", rescale_betas_zero_snr=True)
    assert min_snr_weight(ours, torch.tensor([1.0]), 5.0).tolist() == [0.0]
