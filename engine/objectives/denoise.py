"""Ordinary training: one noisy look at each sample, error against the base's own target."""

from __future__ import annotations

from torch import Tensor

from ..settings.schema import Denoise as DenoiseSettings
from .objective import Batch, Phase, Run


class Denoise:
    """Mean of (prediction - target)^2 at random levels (Ho et al. 2020, arXiv:2006.11239, eq. 14), or Huber."""

    roles: tuple[str, ...] = ("policy",)
    phases: tuple[Phase, ...] = (Phase("policy"),)
    needs: frozenset[str] = frozenset({"clean", "text"})

    def __init__(self, settings: DenoiseSettings) -> None:
        self.settings = settings

    def loss(self, phase: Phase, batch: Batch, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
        level = run.levels(batch)
        noise = run.noise(batch.clean, self.settings.noise_offset)
        noisy = run.mix(batch.clean, noise, level)
        prediction = run.predict(phase.role, noisy, level, batch.text, grad=True)
        target = run.target(batch.clean, noise, level)
        loss = run.mean(prediction.combine(target, self._error), batch.mask)
        weight = run.level_weight(level, self.settings.min_snr_gamma)
        return (loss if weight is None else loss * weight), {"level": level}

    def _error(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        if self.settings.loss == "mse":
            return difference.square()
        return huber(difference, self.settings.huber_delta)


def huber(difference: Tensor, delta: float) -> Tensor:
    """Pseudo-Huber 2*delta*(sqrt(d^2 + delta^2) - delta): d^2 near zero, linear far out (Charbonnier et al. 1994)."""
    return 2.0 * delta * ((difference.square() + delta * delta).sqrt() - delta)
