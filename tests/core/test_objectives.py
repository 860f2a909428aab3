"""Losses against hand formulas, with a denoiser whose answer is known."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.denoiser import PlainDenoiser
from engine.errors import SettingsError
from engine.families import registry
from engine.families.family import Extras
from engine.loss_run import LossRun
from engine.noise import Diffusion, Flow, LevelLaw, min_snr_weight
from engine.objectives.denoise import Denoise, huber
from engine.objectives.objective import Batch, Phase
from engine.precision import Precision
from engine.settings import schema
from engine.state import LatentState, per_sample

POLICY = Phase("policy")
EPSILON = registry.get("sd15").parameterisation(
    {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
)


class AnyRole:
    """Stands where `Weights` stands; remembers which roles were asked for."""

    def __init__(self) -> None:
        self.used: list[str] = []

    @contextlib.contextmanager
    def using(self, role: str) -> Iterator[None]:
        self.used.append(role)
        yield


class Known:
    """A denoiser with one trainable number per latent cell, that remembers what it was given."""

    def __init__(self, parameterisation: Diffusion | Flow, shape: tuple[int, ...] = (2, 4, 8, 8)) -> None:
        self.parameterisation = parameterisation
        self.answer = torch.randn(shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
        self.seen: list[tuple[LatentState, Tensor]] = []

    def predict(self, noisy: LatentState, level: Tensor, text: object) -> LatentState:
        self.seen.append((noisy, level))
        return LatentState.single(self.answer)


def make_run(denoiser: Any, law: LevelLaw | None = None) -> LossRun:
    family = registry.get("flux1" if isinstance(denoiser.parameterisation, Flow) else "sd15")
    run = LossRun(denoiser, AnyRole(), family, law or LevelLaw(schema.UniformLevels(), 1.0))  # type: ignore[arg-type]
    run.reseed("test")
    return run


def batch(mask: Tensor | None = None) -> Batch:
    clean = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(LatentState.single(clean), ("a", "b"), None if mask is None else LatentState.single(mask))


def drawn(seed_run: LossRun, given: Batch, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The level and the noise that a run draws for this batch."""
    seed_run.reseed("test")
    return seed_run.levels(given), seed_run.noise(given.clean, offset).latent


@pytest.mark.parametrize("parameterisation", [EPSILON, Flow()], ids=["epsilon", "flow"])
def test_R103_the_loss_is_the_plain_formula_bit_for_bit(parameterisation: Diffusion | Flow) -> None:
    denoiser = Known(parameterisation)
    run = make_run(denoiser)
    given = batch()
    loss, metrics = Denoise(schema.Denoise()).loss(POLICY, given, run)
    level, noise = drawn(make_run(Known(parameterisation)), given)
    clean = given.clean.latent
    target = noise - clean if isinstance(parameterisation, Flow) else noise
    assert torch.equal(loss, (denoiser.answer - target).square().flatten(1).mean(1))
    assert torch.equal(metrics["level"], level)
    noisy, seen = denoiser.seen[0]
    assert torch.equal(seen, level)
    assert torch.equal(noisy.latent, parameterisation.mix(given.clean, LatentState.single(noise), level).latent)


def test_R13_a_loss_draws_levels_and_noise_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    levels, noise = LossRun.levels, LossRun.noise
    monkeypatch.setattr(LossRun, "levels", lambda *a: (calls.append("levels"), levels(*a))[1])
    monkeypatch.setattr(LossRun, "noise", lambda *a: (calls.append("noise"), noise(*a))[1])
    Denoise(schema.Denoise()).loss(POLICY, batch(), make_run(Known(Flow())))
    assert calls == ["levels", "noise"]


def test_R11_mixing_draws_nothing_and_gives_the_same_twice() -> None:
    run = make_run(Known(Flow()))
    given = batch()
    level, noise = run.levels(given), run.noise(given.clean)
    own, everyones = run.generator.get_state(), torch.get_rng_state()
    first, second = run.mix(given.clean, noise, level), run.mix(given.clean, noise, level)
    run.target(given.clean, noise, level)
    assert torch.equal(first.latent, second.latent)
    assert torch.equal(run.generator.get_state(), own) and torch.equal(torch.get_rng_state(), everyones)


def test_R12_noise_is_drawn_component_after_component_in_their_order() -> None:
    run = make_run(Known(Flow()))
    film = LatentState({"video": torch.zeros(2, 16, 4), "audio": torch.zeros(2, 6, 4)})
    found = run.noise(film)
    run.reseed("test")
    assert torch.equal(found["video"], torch.randn(2, 16, 4, generator=run.generator))
    assert torch.equal(found["audio"], torch.randn(2, 6, 4, generator=run.generator))


def test_draws_depend_on_the_parts_they_are_seeded_with_and_on_nothing_before() -> None:
    run = make_run(Known(Flow()))
    given = batch()
    run.reseed(1, "policy", 3)
    first = run.noise(given.clean).latent, torch.rand(3)
    torch.rand(100)
    run.levels(given)
    run.reseed(1, "policy", 3)
    assert torch.equal(run.noise(given.clean).latent, first[0]) and torch.equal(torch.rand(3), first[1])
    run.reseed(1, "policy", 4)
    assert not torch.equal(run.noise(given.clean).latent, first[0])


def test_levels_of_a_flow_follow_the_size_of_the_picture() -> None:
    from engine.noise import ShiftAnchors

    law = LevelLaw(schema.LogitNormalLevels(), ShiftAnchors(256, 4096, 0.5, 1.15, "exponential"))
    run = make_run(Known(Flow()), law)

    def mean_level(side: int) -> float:
        run.reseed("same")
        return float(run.levels(Batch(LatentState.single(torch.zeros(4096, 1, side, side)), ())).mean())

    assert mean_level(16) < mean_level(64) < mean_level(128)


# --- R8: the denoiser owns the sign -----------------------------------------------------------------------------------


class Backward(Flow):
    """A base that predicts the way from noise to data."""

    def target(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        return super().target(clean, noise, level).map(torch.neg)

    def to_clean(self, noisy: LatentState, prediction: LatentState, level: Tensor) -> LatentState:
        return super().to_clean(noisy, prediction.map(torch.neg), level)


def test_R8_bases_of_opposite_signs_have_the_same_loss_and_the_same_clean_estimate() -> None:
    forward, backward = Known(Flow()), Known(Backward())
    backward.answer = (-forward.answer.detach()).requires_grad_()
    objective, given = Denoise(schema.Denoise()), batch()
    losses = [objective.loss(POLICY, given, make_run(known))[0] for known in (forward, backward)]
    assert torch.equal(losses[0], losses[1])
    estimates = [
        known.parameterisation.to_clean(*(known.seen[0][0], LatentState.single(known.answer)), known.seen[0][1]).latent
        for known in (forward, backward)
    ]
    assert torch.equal(estimates[0], estimates[1])


# --- what the settings change -----------------------------------------------------------------------------------------


def test_R41_what_lies_under_the_mask_changes_neither_loss_nor_gradients() -> None:
    mask = torch.zeros(2, 1, 8, 8)
    mask[:, :, :, :4] = 1.0
    results = []
    for poison in (0.0, 1e6):
        denoiser = Known(EPSILON)
        with torch.no_grad():
            denoiser.answer[:, :, :, 4:] += poison
        loss, _ = Denoise(schema.Denoise()).loss(POLICY, batch(mask), make_run(denoiser))
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), denoiser.answer)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][1][:, :, :, 4:].eq(0).all() and results[0][1][:, :, :, :4].ne(0).all()


def test_a_masked_loss_is_the_mean_over_what_the_mask_shows() -> None:
    mask = torch.zeros(2, 1, 8, 8)
    mask[:, :, 2:5] = 1.0
    denoiser, given = Known(EPSILON), batch(mask)
    loss, _ = Denoise(schema.Denoise()).loss(POLICY, given, make_run(denoiser))
    _, noise = drawn(make_run(Known(EPSILON)), given)
    expected = (denoiser.answer - noise)[:, :, 2:5].square().flatten(1).mean(1)
    assert torch.allclose(loss, expected, rtol=1e-5)


def test_noise_offset_adds_one_value_to_each_sample_and_channel() -> None:
    run = make_run(Known(EPSILON))
    zeros = LatentState.single(torch.zeros(2, 4, 8, 8))
    run.reseed("test")
    plain = run.noise(zeros).latent
    run.reseed("test")
    added = run.noise(zeros, 0.1).latent - plain
    flat = added.flatten(2)
    assert (flat - flat[..., :1]).abs().max() < 1e-6, "constant over a channel"
    assert flat[..., 0].std() > 0.02 and len(flat[..., 0].unique()) == 8, "different for each sample and channel"


def test_huber_is_quadratic_near_zero_and_linear_far_out() -> None:
    delta = 0.1
    small, large = torch.tensor([1e-3, -1e-3]), torch.tensor([50.0, -50.0])
    assert torch.allclose(huber(small, delta), small.square(), rtol=1e-3)
    assert torch.allclose(huber(large, delta), 2 * delta * (large.abs() - delta), rtol=1e-4)
    points = torch.linspace(-2, 2, 41, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(huber(points, delta).sum(), points)[0]
    assert torch.allclose(slope, 2 * delta * points.detach() / (points.detach() ** 2 + delta**2).sqrt())


def test_the_huber_setting_takes_the_place_of_the_square() -> None:
    denoiser, given = Known(EPSILON), batch()
    loss, _ = Denoise(schema.Denoise(loss="huber", huber_delta=0.3)).loss(POLICY, given, make_run(denoiser))
    _, noise = drawn(make_run(Known(EPSILON)), given)
    assert torch.allclose(loss, huber(denoiser.answer - noise, 0.3).flatten(1).mean(1))


def test_R28_min_snr_weighs_every_sample_by_its_own_level() -> None:
    assert isinstance(EPSILON, Diffusion)
    denoiser, given = Known(EPSILON), batch()
    plain, metrics = Denoise(schema.Denoise()).loss(POLICY, given, make_run(denoiser))
    weighted, _ = Denoise(schema.Denoise(min_snr_gamma=5.0)).loss(POLICY, given, make_run(denoiser))
    levels = metrics["level"].split(1)
    by_hand = [float(plain[i].detach()) * float(min_snr_weight(EPSILON, levels[i], 5.0)) for i in range(2)]
    assert weighted.shape == (2,)
    assert weighted.tolist() == pytest.approx(by_hand, rel=1e-6)


def test_min_snr_is_refused_for_a_flow() -> None:
    with pytest.raises(SettingsError, match="min_snr_gamma"):
        Denoise(schema.Denoise(min_snr_gamma=5.0)).loss(POLICY, batch(), make_run(Known(Flow())))


# --- the boundary to the network --------------------------------------------------------------------------------------


class Spy(nn.Module):
    """A network that takes anything, and remembers what."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer
        self.keys: set[str] = set()
        self.config = type("Config", (), {"guidance_embeds": False})

    def forward(self, *given: Tensor, **named: Any) -> tuple[Tensor]:
        self.keys |= set(named)
        return (self.answer(given[0] if given else named["hidden_states"]),)


def plain_denoiser(spy: Spy, family_id: str) -> PlainDenoiser:
    family = registry.get(family_id)

    def root(noisy: LatentState, time: Tensor, text: Any, extras: Extras) -> LatentState:
        return family.forward(spy, noisy, time, text, extras)

    parameterisation = Flow() if family_id == "flux1" else EPSILON
    return PlainDenoiser(root, family, parameterisation, Precision("fp32", torch.device("cpu")), Extras())


@pytest.mark.parametrize("family_id", ["sd15", "flux1"])
def test_R5_nothing_of_a_batch_but_latents_and_text_reaches_the_network(family_id: str) -> None:
    spy = Spy(lambda x: x)
    text = {"hidden": torch.zeros(2, 5, 32), "pooled": torch.zeros(2, 32)}
    given = dataclasses.replace(batch(torch.ones(2, 1, 8, 8)), text=text, files=("a.png", "b.png"))
    Denoise(schema.Denoise()).loss(POLICY, given, make_run(plain_denoiser(spy, family_id)))
    owned = {"clean", "mask", "files", "level", "noise", "target", "advantage", "sigma", "role"}
    assert spy.keys and not spy.keys & owned


def test_R3_a_network_that_answers_in_another_shape_stops_the_loss() -> None:
    spy = Spy(lambda x: x.mean(dim=(1, 2, 3), keepdim=True))
    given = dataclasses.replace(batch(), text={"hidden": torch.zeros(2, 5, 32)})
    with pytest.raises(ValueError, match=r"should be \(2, 4, 8, 8\).*received \(2, 1, 1, 1\)"):
        Denoise(schema.Denoise()).loss(POLICY, given, make_run(plain_denoiser(spy, "sd15")))


def test_R102_objectives_import_no_adapter_library_and_no_backend() -> None:
    import engine

    folder = Path(engine.__file__).parent / "objectives"
    files = list(folder.glob("*.py"))
    assert len(files) >= 2
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not any(
            f"import {name}" in text or f"from {name}" in text for name in ("peft", "accelerate", "diffusers")
        )


def test_a_level_broadcasts_over_its_own_sample() -> None:
    like = torch.zeros(2, 3, 4, 4)
    assert per_sample(torch.tensor([1.0, 2.0]), like).shape == (2, 1, 1, 1)
