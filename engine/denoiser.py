"""How a prediction is computed. The plain way here; a control branch or routed blocks are other denoisers.

The denoiser owns the prediction convention: what time the base is fed, how noise is mixed in, what the target is.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from .families.family import Extras, Family
from .noise import Diffusion, Flow
from .objectives.objective import Text
from .precision import Precision
from .state import LatentState


class Denoiser(Protocol):
    """Predicts from a noisy state; level (B,) in [0, 1)."""

    parameterisation: Diffusion | Flow

    def predict(self, noisy: LatentState, level: Tensor, text: Text) -> LatentState: ...


class PlainDenoiser:
    """All layers of the base, once, under autocast."""

    def __init__(
        self,
        root: Any,  # the prepared Bundle, possibly wrapped for several processes
        family: Family,
        parameterisation: Diffusion | Flow,
        precision: Precision,
        extras: Extras,
    ) -> None:
        self.root = root
        self.family = family
        self.parameterisation = parameterisation
        self.precision = precision
        self.extras = extras

    def predict(self, noisy: LatentState, level: Tensor, text: Text) -> LatentState:
        """float32 prediction with the shapes of `noisy`. Raises ValueError when the base returns anything else."""
        time = self.family.model_time(self.parameterisation, level)
        with self.precision.autocast():
            prediction: LatentState = self.root(noisy, time, text, self.extras)
        prediction = prediction.map(lambda tensor: tensor.float())
        noisy.require_prediction(prediction, self.family.spec.title)
        return prediction
