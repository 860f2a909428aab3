"""Whose weights: what trains, what is frozen, what lags behind. All of it in one root module.

A role is a name for a set of weights over one base. "policy" trains; "base" is the base without adapters; "ema" is a
slow average of the policy. An objective knows what a name means, this module knows the weights behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .errors import TrainingError
from .families.family import Conditioning, Extras, Family, Parts
from .state import LatentState

POLICY, BASE, EMA = "policy", "base", "ema"


@dataclass(frozen=True)
class Role:
    """keep: for a lagging role, optimizer step -> fraction of itself that it keeps (0 copies, 1 never moves)."""

    name: str
    kind: Literal["frozen", "trainable", "lagging"]
    form: Literal["adapter", "module", "base"]
    follows: str | None = None
    keep: Callable[[int], float] | None = None


class Bundle(nn.Module):
    """The one root that is prepared, clipped and saved: the denoiser, and text encoders when they train."""

    def __init__(self, family: Family, parts: Parts, text_members: Sequence[str] = ()) -> None:
        super().__init__()
        self.family = family
        self.parts = parts
        self.members = nn.ModuleDict({name: parts[name] for name in (family.spec.denoiser, *text_members)})

    @property
    def denoiser(self) -> nn.Module:
        return self.members[self.family.spec.denoiser]

    def forward(
        self, noisy: LatentState, model_time: Tensor, text: Mapping[str, Tensor] | Sequence[str], extras: Extras
    ) -> LatentState:
        """text: collated conditioning, or prompts when the text encoders train and so cannot be cached."""
        if not isinstance(text, Mapping):
            encoded: list[Conditioning] = self.family.encode_text(self.parts, text, grad=torch.is_grad_enabled())
            text = self.family.collate(encoded, model_time.device)
        return self.family.forward(self.denoiser, noisy, model_time, text, extras)


def adapter_layers(module: nn.Module) -> dict[str, BaseTunerLayer]:
    """Adapted layers by their path in the module."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)}


class Weights:
    """Parameters by role, and the switching between roles."""

    def __init__(self, bundle: Bundle, roles: Sequence[Role]) -> None:
        self.bundle = bundle
        self.roles = {role.name: role for role in roles}
        self._layers = list(adapter_layers(bundle).values())
        self._parameters = {role.name: self._find(role) for role in roles if role.kind == "trainable"}
        self._lagging: dict[str, dict[str, Tensor]] = {}
        self._active = next(name for name, role in self.roles.items() if role.kind == "trainable")
        self._enter(self.roles[self._active])  # the adapter that was added last is the active one otherwise
        self._reassert()
        if not any(self._parameters.values()):
            raise TrainingError(
                "nothing would be trained: no parameter belongs to a trainable role",
                "check method.targets; the run would end with the base unchanged",
            )
        for role in roles:
            if role.kind == "lagging":
                assert role.follows is not None and role.keep is not None
                self._lagging[role.name] = {
                    name: p.detach().float().clone() for name, p in self._parameters[role.follows].items()
                }

    def _find(self, role: Role) -> dict[str, nn.Parameter]:
        if role.form == "module":
            prefix = f"members.{self.bundle.family.spec.denoiser}"
            return {f"{prefix}.{name}": p for name, p in self.bundle.denoiser.named_parameters()}
        return {
            name: p for name, p in self.bundle.named_parameters() if "lora_" in name and role.name in name.split(".")
        }

    def parameters(self, role: str) -> dict[str, nn.Parameter]:
        """Trainable parameters of a role by name."""
        return self._parameters[role]

    def lagging(self, role: str) -> dict[str, Tensor]:
        """float32 copies that a lagging role holds, by the names of the role it follows."""
        return self._lagging[role]

    @property
    def trainable_names(self) -> set[str]:
        return {name for parameters in self._parameters.values() for name in parameters}

    @contextlib.contextmanager
    def using(self, role: str) -> Iterator[None]:
        """Compute as this role inside the block.

        On leaving, the previous role is active again and trainability is asserted anew: peft's switching clears
        requires_grad, which autograd reads only at backward time, so a role would silently get no gradient.
        """
        if role == self._active:
            yield
            return
        if role not in self.roles:
            raise TrainingError(f"there is no role '{role}' in this run; there are {', '.join(self.roles)}")
        previous = self._active
        self._leave(self.roles[previous])
        self._enter(self.roles[role])
        self._active = role
        try:
            yield
        finally:
            self._leave(self.roles[role])
            self._enter(self.roles[previous])
            self._active = previous
            self._reassert()

    def _enter(self, role: Role) -> None:
        if role.form == "base":
            self._enable_adapters(False)
        elif role.kind == "lagging":
            assert role.follows is not None
            self._set_adapter(role.follows)
            self._swap(role)
        else:
            self._set_adapter(role.name)

    def _leave(self, role: Role) -> None:
        """Undo `_enter`, so that roles may be entered from within any other."""
        if role.form == "base":
            self._enable_adapters(True)
        elif role.kind == "lagging":
            self._swap(role)

    @contextlib.contextmanager
    def training(self, role: str) -> Iterator[None]:
        """A window in which only this role may receive gradients; anything else is an error."""
        for name, parameters in self._parameters.items():
            stale = [n for n, p in parameters.items() if p.grad is not None]
            if stale:
                raise TrainingError(f"role '{name}' enters a phase with stale gradients, for instance of {stale[0]}")
        with self.using(role):
            yield
        for name, parameters in self._parameters.items():
            if name != role and any(p.grad is not None for p in parameters.values()):
                raise TrainingError(f"role '{name}' received gradients in the phase of '{role}'")

    def advance(self, step: int) -> None:
        """Let lagging roles follow, after optimizer step number `step` (counted from 1)."""
        for role in self.roles.values():
            if role.kind == "lagging":
                assert role.follows is not None and role.keep is not None
                keep = role.keep(step)
                own = self._lagging[role.name]
                for name, parameter in self._parameters[role.follows].items():
                    own[name].lerp_(parameter.detach().float(), 1.0 - keep)

    def _swap(self, role: Role) -> None:
        """Exchange the values of a lagging role and of the role it follows."""
        assert role.follows is not None
        own = self._lagging[role.name]
        for name, parameter in self._parameters[role.follows].items():
            live = parameter.detach().clone()
            parameter.data.copy_(own[name])
            own[name] = live.float()

    def _enable_adapters(self, enabled: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(enabled)

    def _set_adapter(self, name: str) -> None:
        for layer in self._layers:
            layer.set_adapter(name)

    def _reassert(self) -> None:
        trainable = {id(p) for parameters in self._parameters.values() for p in parameters.values()}
        for parameter in self.bundle.parameters():
            parameter.requires_grad_(id(parameter) in trainable)


def ema_keep(decay: float) -> Callable[[int], float]:
    """Fraction kept, rising to `decay`, so that the average forgets its start: min(decay, (1+step)/(10+step))."""
    return lambda step: min(decay, (1 + step) / (10 + step))
