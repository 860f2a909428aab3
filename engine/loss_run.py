"""What an objective may touch while it computes a loss: draws, roles, mixing, the one reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from .denoiser import Denoiser
from .errors import SettingsError
from .families.family import Family
from .noise import Diffusion, LevelLaw, min_snr_weight
from .objectives.objective import Batch, Text
from .roles import Weights
from .seeds import seed_of
from .state import LatentState, mean_active


class LossRun:
    """See `objectives.objective.Run`.

    Draws come from a CPU generator, so that a run has the same noise on every device; `reseed` sets it for one batch.
    """

    def __init__(self, denoiser: Denoiser, weights: Weights, family: Family, law: LevelLaw) -> None:
        self.denoiser = denoiser
        self.weights = weights
        self.family = family
        self.law = law
        self.generator = torch.Generator()

    def reseed(self, *parts: int | str) -> None:
        """All draws of the next batch follow from these parts; dropout draws from torch's own generator."""
        seed = seed_of(*parts)
        self.generator.manual_seed(seed)
        torch.manual_seed(seed)

    def predict(self, role: str, noisy: LatentState, level: Tensor, text: Text, *, grad: bool = False) -> LatentState:
        with self.weights.using(role), torch.set_grad_enabled(grad):
            return self.denoiser.predict(noisy, level, text)

    def levels(self, batch: Batch) -> Tensor:
        first = next(iter(batch.clean.values()))
        tokens = self.family.image_tokens((first.shape[-2], first.shape[-1]))
        probability = torch.rand(batch.clean.batch_size, generator=self.generator, dtype=torch.float64)
        return self.denoiser.parameterisation.snap(self.law.levels(probability, tokens)).to(first.device)

    def noise(self, like: LatentState, offset: float = 0.0) -> LatentState:
        drawn = {}
        for name, tensor in like.items():
            noise = torch.randn(tensor.shape, generator=self.generator)
            if offset:
                noise += offset * torch.randn(*tensor.shape[:2], *([1] * (tensor.dim() - 2)), generator=self.generator)
            drawn[name] = noise.to(tensor.device)
        return LatentState(drawn)

    def mix(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        return self.denoiser.parameterisation.mix(clean, noise, level)

    def target(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        return self.denoiser.parameterisation.target(clean, noise, level)

    def level_weight(self, level: Tensor, min_snr_gamma: float | None) -> Tensor | None:
        if min_snr_gamma is None:
            return None
        parameterisation = self.denoiser.parameterisation
        if not isinstance(parameterisation, Diffusion):
            raise SettingsError(
                "objective.min_snr_gamma is for epsilon and v bases; this one is trained by flow matching"
            )
        return min_snr_weight(parameterisation, level, min_snr_gamma).to(level.device)

    def mean(self, errors: LatentState, mask: LatentState | None) -> Tensor:
        return mean_active(errors, mask)
