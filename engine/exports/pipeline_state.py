"""Puts a pipeline's models back as they were before a LoRA was loaded into them.

Loading through diffusers, transformers and peft changes more than it adds: trainability of other adapters, which
adapter is active, train or eval mode, and number formats (`_load_lora_into_text_encoder` casts the whole encoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_LOADED_FLAG = "_hf_peft_config_loaded"


@dataclass(frozen=True)
class _ParameterState:
    parameter: nn.Parameter
    data: Tensor  # the same storage, not a copy
    requires_grad: bool
    copy: Tensor | None  # of adapter weights, which are small and could be initialised anew


@dataclass(frozen=True)
class _TunerState:
    layer: Any  # a BaseTunerLayer of peft
    active: str | list[str]
    disabled: bool


@dataclass(frozen=True)
class ModelState:
    """What one model was like; `restore` makes it so again."""

    model: nn.Module
    training: Mapping[nn.Module, bool]
    tuners: tuple[_TunerState, ...]
    parameters: tuple[_ParameterState, ...]
    loaded_flag: bool | None  # diffusers' and transformers' note on the model that it has adapters

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        from peft.tuners.tuners_utils import BaseTunerLayer

        tuners = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        adapter_weights = {id(p) for layer in tuners for p in _adapter_parameters(layer)}
        return cls(
            model,
            {module: module.training for module in model.modules()},
            tuple(_TunerState(layer, layer.active_adapter, layer.disable_adapters) for layer in tuners),
            tuple(
                _ParameterState(p, p.data, p.requires_grad, p.data.clone() if id(p) in adapter_weights else None)
                for p in model.parameters()
            ),
            model.__dict__.get(_LOADED_FLAG),
        )

    def restore(self, adapter_name: str) -> None:
        """Remove the adapter and undo every other change since `of`."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        known = {id(state.layer) for state in self.tuners}
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, BaseTunerLayer) and id(child) not in known:
                    setattr(parent, name, child.get_base_layer())
        for state in self.tuners:
            if adapter_name in state.layer._all_available_adapter_names():
                state.layer._active_adapter = []  # deleting an active adapter would activate another one and warn
                state.layer.delete_adapter(adapter_name)
            state.layer._active_adapter = state.active
            state.layer._disable_adapters = state.disabled
        self._restore_parameters()
        for module, training in self.training.items():
            module.training = training
        self._restore_attributes(adapter_name)

    def _restore_parameters(self) -> None:
        for state in self.parameters:
            if state.parameter.data_ptr() != state.data.data_ptr() or state.parameter.dtype != state.data.dtype:
                state.parameter.data = state.data
            if state.copy is not None and not torch.equal(state.data, state.copy):
                state.data.copy_(state.copy)
            state.parameter.requires_grad_(state.requires_grad)

    def _restore_attributes(self, adapter_name: str) -> None:
        configs = getattr(self.model, "peft_config", None)
        if isinstance(configs, dict):
            configs.pop(adapter_name, None)
            if not configs:
                del self.model.peft_config
        self.model.__dict__.pop(_LOADED_FLAG, None)
        if self.loaded_flag is not None:
            setattr(self.model, _LOADED_FLAG, self.loaded_flag)


def _adapter_parameters(layer: Any) -> list[nn.Parameter]:
    base = {id(p) for p in layer.get_base_layer().parameters()}
    return [p for p in layer.parameters() if id(p) not in base]
