"""Number formats: what a device can do, autocast around single forwards, and the gradient scale of fp16."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .errors import SettingsError, TrainingError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 32768.0


def pick_device(wanted: str) -> torch.device:
    """'auto' or a device type -> device. Raises SettingsError when it is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in available.items() if there)
    if not available[wanted]:
        raise SettingsError(f"train.device: there is no {wanted} device here", "use train.device = 'auto'")
    return torch.device(wanted)


def use_threads(suiting_the_base: int | None, device: torch.device) -> None:
    """On a CPU, compute with as many threads as suit the base, unless OMP_NUM_THREADS says how many."""
    if suiting_the_base is not None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(suiting_the_base)


def pick_precision(wanted: str, device: torch.device) -> str:
    """'auto' or a precision -> precision for the device."""
    if wanted != "auto":
        return wanted
    if device.type == "cpu":
        return "fp32"
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return "fp16"
    return "bf16"


class Precision:
    """Computation in one precision. fp16 scales the loss, so that small gradients do not vanish."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=name == "fp16")

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """For one forward only: a region that spans a weight change would serve stale casts of the weights."""
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.name != "fp32"):
            yield

    @property
    def scale(self) -> float | None:
        """Factor on the loss; None when there is none."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def backward(self, loss: Tensor) -> None:
        scaled: Tensor = self.scaler.scale(loss)
        scaled.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """One optimizer step; False when fp16 overflowed and the step was left out.

        Raises TrainingError when the scale has fallen below 1: then fp16 cannot hold this model's gradients.
        """
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        if after < 1.0:
            raise TrainingError(
                f"the fp16 gradient scale fell to {after:g}: fp16 overflows again and again on this model",
                "set train.precision = 'bf16' (or 'fp32'), or lower the learning rate",
            )
        return after >= before

    def state(self) -> dict[str, float]:
        return dict(self.scaler.state_dict()) if self.scaler.is_enabled() else {}

    def load_state(self, state: dict[str, float]) -> None:
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def checksum(module: nn.Module, *, skip: Iterable[str] = ()) -> str:
    """Sums over the bits of all parameters and buffers except the named ones: shows whether any of them changed.

    Computed where the tensors are, so that it takes a blink for tens of gigabytes.
    """
    left_out = set(skip)
    plain = weighted = 0
    for index, (name, tensor) in enumerate((*module.named_parameters(), *module.named_buffers())):
        if name in left_out or tensor.numel() == 0:
            continue
        bits = tensor.detach().reshape(-1).view(torch.uint8).to(torch.int64)
        position = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
        plain += int(bits.sum())
        weighted += int((bits * position).sum()) * (index % 127 + 1)
    return f"{plain:x}-{weighted:x}"
