"""LoRA, rank-stabilised LoRA and DoRA through peft, beside frozen base weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from ..errors import CheckpointError
from ..families.family import Family
from ..lora_weights import LoraLayer, LoraWeights
from ..roles import BASE, EMA, POLICY, Bundle, Role, adapter_layers, ema_keep
from ..settings.schema import Lora

# transformers' CLIP and T5 spell their attention layers differently
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "q", "k", "v", "o", "wi", "wo", "wi_0", "wi_1")


class LoraMethod:
    """See `Method`."""

    def __init__(self, settings: Lora, family: Family) -> None:
        self.settings = settings
        self.family = family

    def roles(self, ema_decay: float | None) -> tuple[Role, ...]:
        roles = (Role(POLICY, "trainable", "adapter"), Role(BASE, "frozen", "base"))
        if ema_decay is None:
            return roles
        return (*roles, Role(EMA, "lagging", "adapter", follows=POLICY, keep=ema_keep(ema_decay)))

    def text_members(self) -> tuple[str, ...]:
        return self.family.spec.text_encoders[:1] if self.settings.text_encoder else ()

    def attach(self, bundle: Bundle) -> None:
        add_adapter(bundle.denoiser, self.settings, self.family.lora_modules(bundle.denoiser, self.settings.targets))
        for name in self.text_members():
            add_adapter(bundle.members[name], self.settings, text_modules(bundle.members[name]))

    def collect(self, bundle: Bundle) -> LoraWeights:
        """The active adapter's weights by component and module, on the CPU."""
        return {
            component: {
                path: layer_weights(layer, POLICY, self.settings) for path, layer in adapter_layers(member).items()
            }
            for component, member in bundle.members.items()
        }


def add_adapter(module: nn.Module, settings: Lora, modules: list[str], name: str = POLICY) -> None:
    """Put an adapter on the named modules; down random, up zero, so that nothing changes at first."""
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.effective_alpha,  # peft says int and takes fractions
        lora_dropout=settings.dropout,
        use_rslora=settings.rank_stabilised,
        use_dora=settings.dora,
        target_modules=modules,
        init_lora_weights=True,
    )
    inject(module, config, name)


def inject(module: nn.Module, config: LoraConfig, name: str) -> None:
    """`add_adapter` of diffusers where the class has it, peft's own elsewhere (transformers wants a newer peft)."""
    if hasattr(module, "_hf_peft_config_loaded") and module.__class__.__module__.startswith("diffusers"):
        module.add_adapter(config, adapter_name=name)  # type: ignore[operator]
    else:
        inject_adapter_in_model(config, module, adapter_name=name)
    for parameter_name, parameter in module.named_parameters():
        if "lora_" in parameter_name and name in parameter_name.split("."):
            parameter.data = parameter.data.float()  # peft creates them in the base's dtype


def text_modules(encoder: nn.Module) -> list[str]:
    """Linear layers of a text encoder's attention and feed-forward blocks."""
    return [
        name
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TEXT_TARGETS
    ]


def layer_weights(layer: Any, adapter: str, settings: Lora) -> LoraLayer:
    """One peft layer's weights, copied to the CPU."""
    magnitude = None
    if settings.dora:
        magnitude = layer.lora_magnitude_vector[adapter].weight.detach().cpu().clone()
    return LoraLayer(
        down=layer.lora_A[adapter].weight.detach().cpu().clone(),
        up=layer.lora_B[adapter].weight.detach().cpu().clone(),
        alpha=float(layer.lora_alpha[adapter]),
        rank_stabilised=settings.rank_stabilised,
        magnitude=magnitude,
    )


def weights_from_parameters(parameters: Mapping[str, Tensor], settings: Lora) -> LoraWeights:
    """Adapter parameters by their names in a `Bundle`, as a checkpoint has them -> weights by component and module."""
    found: dict[str, dict[str, LoraLayer]] = {}
    for name, down in parameters.items():
        stem, middle, _ = name.partition(f".lora_A.{POLICY}.weight")
        if not middle:
            continue
        _, component, module = stem.split(".", 2)
        found.setdefault(component, {})[module] = LoraLayer(
            down=down,
            up=parameters[f"{stem}.lora_B.{POLICY}.weight"],
            alpha=settings.effective_alpha,
            rank_stabilised=settings.rank_stabilised,
            magnitude=parameters.get(f"{stem}.lora_magnitude_vector.{POLICY}.weight"),
        )
    return found


def set_weights(module: nn.Module, adapter: str, weights: Mapping[str, LoraLayer], origin: str) -> None:
    """Copy weights into an adapter in place. Raises CheckpointError unless modules and shapes are exactly the same."""
    layers = adapter_layers(module)
    if set(layers) != set(weights):
        odd = sorted(set(layers) ^ set(weights))
        raise CheckpointError(f"{origin} is of another set of layers: {len(odd)} differ, for instance {odd[0]}")
    for path, layer in layers.items():
        source = weights[path]
        pairs: list[tuple[nn.Parameter, Tensor | None]] = [
            (layer.lora_A[adapter].weight, source.down),
            (layer.lora_B[adapter].weight, source.up),
        ]
        magnitudes = getattr(layer, "lora_magnitude_vector", {})
        if adapter in magnitudes:
            pairs.append((magnitudes[adapter].weight, source.magnitude))
        for parameter, value in pairs:
            if value is None or parameter.numel() != value.numel():
                raise CheckpointError(
                    f"{origin}: {path} has another shape than this run's adapter", "same rank, same method?"
                )
            parameter.data.copy_(value.reshape(parameter.shape))


def remove_adapters(module: nn.Module) -> None:
    """Take all adapters off again, leaving the very layers that were there before."""
    if hasattr(module, "unload_lora"):
        module.unload_lora()  # type: ignore[operator]
        return
    from diffusers.utils.peft_utils import recurse_remove_peft_layers

    recurse_remove_peft_layers(module)
    if hasattr(module, "peft_config"):
        del module.peft_config
