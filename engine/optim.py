"""Optimizers from maintained packages and learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError, MissingPackage, SettingsError
from .settings.schema import (
    Adafactor,
    AdamW,
    Constant,
    Cosine,
    CosineRestarts,
    LearningRateSchedule,
    Linear,
    Lion,
    Optimizer,
    Prodigy,
    ScheduleFree,
)


def require_available(settings: Optimizer, schedule: LearningRateSchedule, device: torch.device) -> None:
    """Refuse, before weights are loaded, what cannot work here."""
    if isinstance(settings, AdamW) and settings.bits == 8:
        if device.type != "cuda":
            raise SettingsError("optimizer.bits: 8-bit optimizer state needs a CUDA device", "set optimizer.bits = 32")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise MissingPackage(
                "optimizer.bits = 8 needs bitsandbytes", "pip install 'safelight[cuda8bit]', or set optimizer.bits = 32"
            )
    if isinstance(settings, ScheduleFree) and (not isinstance(schedule, Constant) or schedule.cooldown_steps):
        raise SettingsError(
            "optimizer 'schedule_free' takes the place of a falling learning rate",
            "set schedule.type = 'constant' without cooldown_steps, or choose another optimizer",
        )


def build(settings: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer over one parameter group."""
    match settings:
        case AdamW(bits=8):
            import bitsandbytes

            return bitsandbytes.optim.AdamW8bit(
                parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
            )
        case AdamW():
            return torch.optim.AdamW(
                parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
            )
        case Adafactor():
            return torch.optim.Adafactor(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
        case Prodigy():
            from prodigyopt import Prodigy as ProdigyOptimizer

            return ProdigyOptimizer(
                parameters,
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                d_coef=settings.d_coef,
                safeguard_warmup=settings.safeguard_warmup,
                use_bias_correction=True,
            )
        case ScheduleFree():
            from schedulefree import AdamWScheduleFree

            return AdamWScheduleFree(
                parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
            )
        case Lion():
            from lion_pytorch import Lion as LionOptimizer

            return LionOptimizer(parameters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)


def warmup_steps(schedule: LearningRateSchedule, total_steps: int) -> int:
    """The warm-up in steps: as set, or 5 % of the run and at most 100."""
    return schedule.warmup_steps if schedule.warmup_steps is not None else min(100, total_steps // 20)


def lr_factor(schedule: LearningRateSchedule, step: int, total_steps: int) -> float:
    """Factor on the learning rate for the step numbered `step` from 0. Never 0 during warm-up, so no step is wasted."""
    warmup = warmup_steps(schedule, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match schedule:
        case Constant():
            left = total_steps - step
            return min(1.0, left / schedule.cooldown_steps) if schedule.cooldown_steps else 1.0
        case Linear():
            return schedule.final + (1.0 - schedule.final) * (1.0 - progress)
        case Cosine():
            return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case CosineRestarts():
            within = (progress * schedule.cycles) % 1.0 if progress < 1.0 else 1.0
            return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * within))


class RoleOptimizer:
    """One role's optimizer, its learning rate over time, and its state by parameter name."""

    def __init__(
        self,
        settings: Optimizer,
        schedule: LearningRateSchedule,
        parameters: Mapping[str, nn.Parameter],
        total_steps: int,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.schedule = schedule
        self.base_lr = settings.lr
        self.total_steps = total_steps
        self.optimizer = build(settings, self.parameters)
        self._train_mode()

    def set_step(self, step: int) -> float:
        """Learning rate for the step numbered from 0; applied and returned."""
        lr = self.base_lr * lr_factor(self.schedule, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    @property
    def effective_lr(self) -> float:
        """The learning rate that applies, including the step size Prodigy found."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"]) * float(group.get("d", 1.0))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """The weights that a user gets. Differs from the training ones only for schedule-free optimizers.

        The training weights come back bit for bit: schedule-free's own switching rounds, so they are set aside.
        """
        if not hasattr(self.optimizer, "eval"):
            yield
            return
        aside = [p.detach().clone() for p in self.parameters]
        self.optimizer.eval()
        try:
            yield
        finally:
            self._train_mode()
            with torch.no_grad():
                for parameter, value in zip(self.parameters, aside, strict=True):
                    parameter.copy_(value)

    def _train_mode(self) -> None:
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything needed to go on: (tensors, plain values), both keyed by parameter name."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {"groups": [], "state": {}}
        saved = self.optimizer.state_dict()
        for index, values in saved["state"].items():
            for key, value in _flat(values):
                _put(tensors, plain["state"], f"{self.names[int(index)]}:{key}", value)
        for index, group in enumerate(saved["param_groups"]):
            scalars: dict[str, Any] = {}
            for key, value in group.items():
                if key != "params":
                    _put(tensors, scalars, f"group{index}:{key}", value)
            plain["groups"].append(scalars)
        return tensors, plain

    def load_state(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Inverse of `state`. Raises CheckpointError when the parameters are not the same."""
        current = self.optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        positions = {name: index for index, name in enumerate(self.names)}
        for key, value in (*tensors.items(), *plain["state"].items()):
            name, _, field = key.rpartition(":")
            if name.startswith("group") and name not in positions:
                continue
            if name not in positions:
                raise CheckpointError(f"the optimizer state is of other weights: '{name}' is not trained now")
            state.setdefault(positions[name], {})[field] = value
        groups = []
        for index, group in enumerate(current["param_groups"]):
            restored = {"params": group["params"]}
            for key, value in (*plain["groups"][index].items(), *tensors.items()):
                name, _, field = key.rpartition(":")
                if name == f"group{index}":
                    restored[field] = tuple(value) if isinstance(group.get(field), tuple) else value
            groups.append({**group, **restored})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Newer bitsandbytes puts 8-bit tensors one level deeper in state_dict() and loads them from either level."""
    for key, value in values.items():
        yield from value.items() if isinstance(value, Mapping) else [(key, value)]


def _put(tensors: dict[str, Tensor], plain: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Tensor):
        tensors[key] = value.detach().cpu().contiguous()
    else:
        plain[key] = value
