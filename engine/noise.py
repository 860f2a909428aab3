"""Noise levels and what a level means. Plain functions and two small value types.

`level` is in [0, 1], 1 is pure noise. Levels are computed in float64 and handed out as float32 below 1, since a float32
time multiplied by 0.001 on a GPU can round up to exactly 1 and then divides by zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import SettingsError
from .settings.schema import AutoLevels, Denoise, LogitNormalLevels, UniformLevels
from .state import LatentState, per_sample

LARGEST_LEVEL = 1.0 - 2.0**-24  # the largest float32 below 1
Distribution = UniformLevels | LogitNormalLevels


def quantile(distribution: Distribution, probability: Tensor) -> Tensor:
    """Inverse cumulative distribution: probabilities in [0, 1) -> levels, float64.

    Drawing through it makes a level a pure function of one uniform number, and gives ranges of equal probability.
    """
    p = probability.double()
    if isinstance(distribution, UniformLevels):
        return p
    tiny = torch.finfo(torch.float64).tiny
    return torch.sigmoid(distribution.mean + distribution.std * torch.special.ndtri(p.clamp(tiny, LARGEST_LEVEL)))


def shift_levels(levels: Tensor, shift: float) -> Tensor:
    """s*u / (1 + (s-1)*u) (Esser et al. 2024, arXiv:2403.03206, eq. 23)."""
    return levels if shift == 1.0 else shift * levels / (1.0 + (shift - 1.0) * levels)


def resolution_shift(
    tokens: int, *, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float, kind: str = "exponential"
) -> float:
    """Shift that grows with the number of image tokens between two anchors, as FLUX.1's scheduler defines it.

    mu is linear in the tokens; the shift is exp(mu), or mu itself for the linear kind.
    """
    mu = base_shift + (max_shift - base_shift) * (tokens - base_tokens) / (max_tokens - base_tokens)
    return math.exp(mu) if kind == "exponential" else mu


def as_level(levels: Tensor) -> Tensor:
    """float64 levels -> float32 in [0, 1): the form in which levels travel."""
    return levels.double().clamp(0.0, LARGEST_LEVEL).float()


@dataclass(frozen=True)
class Flow:
    """Straight paths: x = (1-s)*x0 + s*n, the base predicts n - x0 (Lipman et al. 2023, arXiv:2210.02747)."""

    def snap(self, levels: Tensor) -> Tensor:
        return as_level(levels)

    def mix(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        return clean.combine(noise, lambda x, n: x + per_sample(level, x) * (n - x))

    def target(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        return clean.combine(noise, lambda x, n: n - x)

    def to_clean(self, noisy: LatentState, prediction: LatentState, level: Tensor) -> LatentState:
        return noisy.combine(prediction, lambda x, v: x - per_sample(level, x) * v)


@dataclass(frozen=True, eq=False)
class Diffusion:
    """Variance-preserving steps: x = sqrt(a)*x0 + sqrt(1-a)*n with a = alphas_cumprod[t] (Ho et al. 2020, eq. 4).

    alphas_cumprod: (T,) float32. `epsilon` predicts n, `v_prediction` predicts sqrt(a)*n - sqrt(1-a)*x0 (Salimans & Ho
    2022, arXiv:2202.00512, section 4). A level stands for the step t = level * (T-1).
    """

    alphas_cumprod: Tensor
    prediction_type: Literal["epsilon", "v_prediction"]

    @property
    def num_steps(self) -> int:
        return int(self.alphas_cumprod.shape[0])

    def snap(self, levels: Tensor) -> Tensor:
        """Uniform levels in [0, 1) become uniform integers 0..T-1."""
        steps = (levels.double() * self.num_steps).floor().clamp(0, self.num_steps - 1)
        return (steps / (self.num_steps - 1)).float()

    def timesteps(self, level: Tensor) -> Tensor:
        """levels -> integer steps (B,) int64."""
        return (level.double().cpu() * (self.num_steps - 1)).round().long()

    def coefficients(self, level: Tensor) -> tuple[Tensor, Tensor]:
        """(sqrt(a), sqrt(1-a)) of each sample, float32 (B,)."""
        a = self.alphas_cumprod[self.timesteps(level)]
        return a.sqrt(), (1.0 - a).sqrt()

    def signal_to_noise(self, level: Tensor) -> Tensor:
        """a / (1-a), (B,) float32; 0 at a zero-terminal-SNR end."""
        a = self.alphas_cumprod[self.timesteps(level)]
        return a / (1.0 - a)

    def mix(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        signal, spread = self.coefficients(level)
        return clean.combine(noise, lambda x, n: per_sample(signal, x) * x + per_sample(spread, x) * n)

    def target(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        if self.prediction_type == "epsilon":
            return noise
        signal, spread = self.coefficients(level)
        return clean.combine(noise, lambda x, n: per_sample(signal, x) * n - per_sample(spread, x) * x)

    def to_clean(self, noisy: LatentState, prediction: LatentState, level: Tensor) -> LatentState:
        signal, spread = self.coefficients(level)
        if self.prediction_type == "epsilon":
            return noisy.combine(prediction, lambda x, n: (x - per_sample(spread, x) * n) / per_sample(signal, x))
        return noisy.combine(prediction, lambda x, v: per_sample(signal, x) * x - per_sample(spread, x) * v)


def min_snr_weight(diffusion: Diffusion, level: Tensor, gamma: float) -> Tensor:
    """min(snr, gamma) / snr for epsilon, / (snr + 1) for v (Hang et al. 2023, arXiv:2303.09556, eq. 6); (B,)."""
    snr = diffusion.signal_to_noise(level)
    divisor = snr if diffusion.prediction_type == "epsilon" else snr + 1.0
    return snr.clamp_max(gamma) / divisor


@dataclass(frozen=True)
class ShiftAnchors:
    """A shift that depends on the picture's size: see `resolution_shift`."""

    base_tokens: int
    max_tokens: int
    base_shift: float
    max_shift: float
    kind: str


@dataclass(frozen=True)
class LevelLaw:
    """The whole law of noise levels of a run: a distribution, then a shift."""

    distribution: Distribution
    shift: float | ShiftAnchors

    def shift_for(self, tokens: int) -> float:
        if isinstance(self.shift, float):
            return self.shift
        a = self.shift
        return resolution_shift(
            tokens,
            base_tokens=a.base_tokens,
            max_tokens=a.max_tokens,
            base_shift=a.base_shift,
            max_shift=a.max_shift,
            kind=a.kind,
        )

    def levels(self, probability: Tensor, tokens: int) -> Tensor:
        """Probabilities in [0, 1) -> levels float64, for pictures of that many tokens."""
        return shift_levels(quantile(self.distribution, probability), self.shift_for(tokens))


def level_law(settings: Denoise, *, flow: bool, scheduler: Mapping[str, Any]) -> LevelLaw:
    """The law that the settings and the base's scheduler configuration ask for.

    Raises SettingsError for a resolution-dependent shift on a base that has none.
    """
    distribution: Distribution
    if isinstance(settings.levels, AutoLevels):
        distribution = LogitNormalLevels() if flow else UniformLevels()
    else:
        distribution = settings.levels
    wanted = settings.shift
    if wanted == "auto":
        wanted = (
            "none"
            if not flow
            else "resolution"
            if scheduler.get("use_dynamic_shifting")
            else scheduler.get("shift", 1.0)
        )
    if wanted == "none":
        return LevelLaw(distribution, 1.0)
    if wanted != "resolution":
        return LevelLaw(distribution, float(wanted))
    if not flow:
        raise SettingsError(
            "objective.shift = 'resolution' is for flow-matching bases; this one predicts epsilon or v",
            "use 'auto', 'none' or a number",
        )
    anchors = ShiftAnchors(
        base_tokens=int(scheduler.get("base_image_seq_len") or 256),
        max_tokens=int(scheduler.get("max_image_seq_len") or 4096),
        base_shift=float(scheduler.get("base_shift") or 0.5),
        max_shift=float(scheduler.get("max_shift") or 1.15),
        kind=str(scheduler.get("time_shift_type") or "exponential"),
    )
    return LevelLaw(distribution, anchors)
