"""What a denoiser works on: an ordered mapping of named latent tensors.

Images have one component, "latent"; a joint model may have "video" and "audio". The order is part of the value: draws,
reductions and files follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

LATENT = "latent"


class LatentState(Mapping[str, Tensor]):
    """Named tensors (B, ...) that share B. Checked once, when it is built, and trusted afterwards."""

    __slots__ = ("_components",)

    def __init__(self, components: Mapping[str, Tensor]) -> None:
        """Raises ValueError naming the component when one is not batched or its batch size differs."""
        if not components:
            raise ValueError("a latent state needs at least one component")
        sizes = {}
        for name, tensor in components.items():
            if tensor.dim() < 1:
                raise ValueError(f"component '{name}' has no batch axis: shape {tuple(tensor.shape)}")
            sizes[name] = tensor.shape[0]
        if len(set(sizes.values())) != 1:
            raise ValueError(f"components disagree on the batch size: {sizes}")
        self._components = dict(components)

    @classmethod
    def single(cls, latents: Tensor) -> LatentState:
        """The one-component state of an image model."""
        return cls({LATENT: latents})

    def __getitem__(self, name: str) -> Tensor:
        return self._components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    @property
    def batch_size(self) -> int:
        return int(next(iter(self._components.values())).shape[0])

    @property
    def latent(self) -> Tensor:
        """The tensor of a one-component state."""
        return self._components[LATENT]

    def map(self, function: Callable[[Tensor], Tensor]) -> LatentState:
        return LatentState({name: function(tensor) for name, tensor in self._components.items()})

    def combine(self, other: LatentState, function: Callable[[Tensor, Tensor], Tensor]) -> LatentState:
        """Component-wise function of two states with the same components in the same order."""
        other.require_components(tuple(self))
        return LatentState({name: function(tensor, other[name]) for name, tensor in self._components.items()})

    def require_components(self, expected: tuple[str, ...]) -> None:
        """Raises ValueError unless names and order are as expected."""
        if tuple(self) != expected:
            raise ValueError(f"expected components {expected}, received {tuple(self)}")

    def require_prediction(self, prediction: LatentState, context: str) -> None:
        """A prediction for this state must have its names, shapes and device, and one floating dtype.

        A wrong shape would broadcast in the loss and only look like a different scale.
        """
        prediction.require_components(tuple(self))
        for name, tensor in self._components.items():
            received = prediction[name]
            if received.shape != tensor.shape or received.device != tensor.device:
                raise ValueError(
                    f"{context}: component '{name}' should be {tuple(tensor.shape)} on {tensor.device}, "
                    f"received {tuple(received.shape)} on {received.device}"
                )
            if not received.is_floating_point():
                raise ValueError(f"{context}: component '{name}' has dtype {received.dtype}, not a floating one")
        if len({t.dtype for t in prediction.values()}) != 1:
            raise ValueError(f"{context}: components have different dtypes")


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """(B,) viewed as (B, 1, …, 1) so that it broadcasts over `like`, in its dtype."""
    return values.to(device=like.device, dtype=like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


def mean_active(errors: LatentState, mask: LatentState | None = None) -> Tensor:
    """The one reduction: weighted mean over all elements of all components -> (B,).

    errors: raw per-element values (B, ...). mask: weights that broadcast to them; an element of weight 0 counts
    neither in the sum nor in the number. Components weigh by their number of elements, not equally. A sample whose mask
    is empty contributes zero.
    """
    total: Tensor | None = None
    count: Tensor | None = None
    for name, values in errors.items():
        if values.dim() < 2:
            raise ValueError(f"component '{name}' is already reduced: shape {tuple(values.shape)}")
        if mask is None:
            if len(errors) == 1:
                return values.flatten(1).mean(dim=1)  # bit-identical to the plain formula
            weights = torch.ones_like(values)
        else:
            weights = mask[name].to(values.dtype).expand_as(values)
            values = torch.where(weights > 0, values, torch.zeros((), dtype=values.dtype, device=values.device))
        part, part_count = (values * weights).flatten(1).sum(dim=1), weights.flatten(1).sum(dim=1)
        total = part if total is None else total + part
        count = part_count if count is None else count + part_count
    assert total is not None and count is not None
    return torch.where(count > 0, total / count.clamp_min(torch.finfo(total.dtype).tiny), torch.zeros_like(total))
