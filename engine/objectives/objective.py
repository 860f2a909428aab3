"""The contract of an objective: which loss, from which roles, in which phases. Pure per-sample losses, (B,).

An objective sees tensors and names only. It knows no optimizer, no adapter library and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..state import LatentState

Text = Mapping[str, Tensor] | Sequence[str]  # collated conditioning, or prompts when text encoders train


@dataclass(frozen=True)
class Phase:
    """A window in which one role trains, `repeats` times."""

    role: str
    repeats: int = 1


@dataclass(frozen=True)
class Batch:
    """What a source fills and an objective reads.

    clean: latents without noise. mask: loss weights that broadcast to `clean`, None counts everything. files: names for
    messages.
    """

    clean: LatentState
    text: Text
    mask: LatentState | None = None
    files: tuple[str, ...] = ()


class Run(Protocol):
    """All that an objective may touch."""

    def predict(self, role: str, noisy: LatentState, level: Tensor, text: Text, *, grad: bool = False) -> LatentState:
        """Prediction of a role; without grad nothing is remembered for a backward."""

    def levels(self, batch: Batch) -> Tensor:
        """Draws noise levels (B,)."""

    def noise(self, like: LatentState, offset: float = 0.0) -> LatentState:
        """Draws noise, component after component; offset adds one value per sample and channel."""

    def mix(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        """Noisy state. Draws nothing."""

    def target(self, clean: LatentState, noise: LatentState, level: Tensor) -> LatentState:
        """What the base should predict."""

    def level_weight(self, level: Tensor, min_snr_gamma: float | None) -> Tensor | None:
        """Loss weight of a level (B,), None for 1."""

    def mean(self, errors: LatentState, mask: LatentState | None) -> Tensor:
        """Raw per-element errors -> (B,), the one reduction."""


class Objective(Protocol):
    """roles: names it computes with. phases: what trains, in order. needs: fields of `Batch` it reads."""

    roles: tuple[str, ...]
    phases: tuple[Phase, ...]
    needs: frozenset[str]

    def loss(self, phase: Phase, batch: Batch, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-sample loss (B,) and metrics (B,) by fixed names."""
