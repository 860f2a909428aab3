"""The weights of a LoRA, independent of any file format or of peft.

Shapes: r rank, in/out features, k kernel size. A linear layer has down (r, in) and up (out, r); a convolution has
down (r, in, k, k) and up (out, r, 1, 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoraLayer:
    """One adapted module: W + scale * up @ down, with magnitude when it is a DoRA layer."""

    down: Tensor
    up: Tensor
    alpha: float
    rank_stabilised: bool = False
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) when rank-stabilised (arXiv:2312.03732, eq. 4)."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def delta(self) -> Tensor:
        """The change of the weight, float32, in the weight's own shape (without DoRA's magnitude)."""
        down, up = self.down.float(), self.up.float()
        return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:]) * self.scale


# component ("unet", "transformer", "text_encoder") -> module path inside it -> layer
LoraWeights = Mapping[str, Mapping[str, LoraLayer]]
