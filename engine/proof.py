"""Evidence that a run really trained: which weights moved, and how far."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

MAX_SAMPLED = 65_536  # elements remembered of each parameter; adapters fit whole, full models are sampled evenly


class Movement:
    """Remembers parameters as they are now; `report` compares them with what they have become."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self._before = {name: _sampled(parameter) for name, parameter in parameters.items()}

    def report(self) -> dict[str, object]:
        """{"moved": tensors that changed, "of": tensors, "max_change": largest |change| of an element}."""
        changes = self._changes()
        return {
            "moved": sum(change > 0 for change in changes.values()),
            "of": len(changes),
            "max_change": max(changes.values(), default=0.0),
        }

    def happened(self) -> bool:
        """Whether a gradient moved anything. Weight decay alone moves an adapter's random factor, not its zero one."""
        changes = self._changes()
        decisive = {name: change for name, change in changes.items() if ".lora_B." in name} or changes
        return any(change > 0 for change in decisive.values())

    def _changes(self) -> dict[str, float]:
        return {
            name: float((_sampled(parameter) - self._before[name]).abs().max()) if parameter.numel() else 0.0
            for name, parameter in self.parameters.items()
        }


def _sampled(parameter: Tensor) -> Tensor:
    flat = parameter.detach().flatten()
    stride = max(1, flat.numel() // MAX_SAMPLED)
    return flat[::stride].to("cpu", torch.float32, copy=True)
