"""Roles over one base: who computes, who trains, who lags behind, and that nobody is switched off in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import TrainingError
from engine.families.family import Extras
from engine.families.loading import load
from engine.families.registry import open_base
from engine.methods.lora import add_adapter
from engine.roles import Bundle, Role, Weights, ema_keep
from engine.settings.schema import Base, Lora
from engine.state import LatentState

ADAPTERS = ("policy", "fake", "surrogate")


def bundle_of(folder: Path, dtype: torch.dtype = torch.float32) -> Bundle:
    family, located = open_base(Base(source=str(folder)))
    return Bundle(family, load(family, located, [family.spec.denoiser], dtype=dtype))


def attention(bundle: Bundle) -> list[str]:
    return bundle.family.lora_modules(bundle.denoiser, "attention")


def adapt(bundle: Bundle, modules: list[str], *names: str) -> None:
    """Adapters that each do something of their own."""
    for index, name in enumerate(names):
        add_adapter(bundle.denoiser, Lora(rank=2), modules, name)
        generator = torch.Generator().manual_seed(index)
        for parameter_name, parameter in bundle.named_parameters():
            if "lora_" in parameter_name and name in parameter_name.split("."):
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def predict(bundle: Bundle) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    noisy = LatentState.single(torch.randn(1, 4, 8, 8, generator=generator))
    text = {"hidden": torch.randn(1, 5, 32, generator=generator)}
    if bundle.family.spec.id == "flux1":
        text["pooled"] = torch.randn(1, 32, generator=generator)
        return bundle(noisy, torch.tensor([0.5]), text, Extras()).latent
    return bundle(noisy, torch.tensor([500]), text, Extras()).latent


@pytest.fixture(params=["sd15", "flux1"])
def bundle(request: pytest.FixtureRequest, base: Callable[[str], Path]) -> Bundle:
    return bundle_of(base(request.param))


def three_roles(bundle: Bundle, *lagging: Role) -> Weights:
    adapt(bundle, attention(bundle), *ADAPTERS)
    roles = [Role(name, "trainable", "adapter") for name in ADAPTERS]
    return Weights(bundle, [*roles, Role("base", "frozen", "base"), *lagging])


def test_R45_each_role_predicts_with_its_own_adapter_and_base_is_the_untouched_model(bundle: Bundle) -> None:
    with torch.no_grad():
        untouched = predict(bundle)
        weights = three_roles(bundle)
        seen = {}
        for role in (*ADAPTERS, "base"):
            with weights.using(role):
                seen[role] = predict(bundle)
    assert torch.equal(seen["base"], untouched)
    names = list(seen)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert not torch.allclose(seen[first], seen[second]), f"{first} and {second} have collapsed"


def test_roles_may_be_entered_from_within_any_other_role(bundle: Bundle) -> None:
    weights = three_roles(bundle, Role("ema", "lagging", "adapter", follows="policy", keep=lambda step: 0.0))
    for tensor in weights.lagging("ema").values():
        tensor.mul_(-0.5)
    alone, nested = {}, {}
    names = (*ADAPTERS, "base", "ema")
    with torch.no_grad():
        for role in names:
            with weights.using(role):
                alone[role] = predict(bundle)
        for outer in names:
            for inner in names:
                with weights.using(outer):
                    with weights.using(inner):
                        nested[outer, inner] = predict(bundle)
                    nested[outer, inner, "after"] = predict(bundle)
    for outer in names:
        for inner in names:
            assert torch.equal(nested[outer, inner], alone[inner]), f"{inner} inside {outer}"
            assert torch.equal(nested[outer, inner, "after"], alone[outer]), f"{outer} after {inner}"


def test_R48_a_role_gets_its_gradients_although_others_were_active_before_the_backward(bundle: Bundle) -> None:
    weights = three_roles(bundle)
    trainable = weights.trainable_names
    with weights.using("fake"):
        loss = predict(bundle).square().mean()
    with torch.no_grad():
        for other in ("base", "surrogate", "policy"):
            with weights.using(other):
                predict(bundle)
    loss.backward()
    assert all(parameter.grad is not None for parameter in weights.parameters("fake").values())
    assert all(parameter.grad is None for parameter in weights.parameters("policy").values())
    assert {name for name, parameter in bundle.named_parameters() if parameter.requires_grad} == trainable


def test_R48_trainability_is_put_back_when_a_forward_fails(bundle: Bundle) -> None:
    weights = three_roles(bundle)
    with pytest.raises(RuntimeError, match="inside"), weights.using("base"), weights.using("fake"):
        raise RuntimeError("inside")
    assert {name for name, p in bundle.named_parameters() if p.requires_grad} == weights.trainable_names
    with torch.no_grad():
        after = predict(bundle)
        with weights.using("policy"):
            assert torch.equal(predict(bundle), after)


def test_R49_gradients_of_another_role_are_an_error(bundle: Bundle) -> None:
    weights = three_roles(bundle)
    other = next(iter(weights.parameters("fake").values()))
    with (
        pytest.raises(TrainingError, match="'fake' received gradients in the phase of 'policy'"),
        weights.training("policy"),
    ):
        other.grad = torch.zeros_like(other)
    with pytest.raises(TrainingError, match="stale gradients"), weights.training("policy"):
        pass


def test_R46_a_lagging_role_copies_keeps_or_blends_as_its_rule_says(bundle: Bundle) -> None:
    adapt(bundle, attention(bundle), "policy")
    rules = {"copy": 0.0, "still": 1.0, "slow": 0.9}
    lagging = [
        Role(name, "lagging", "adapter", follows="policy", keep=lambda step, keep=keep: keep)  # type: ignore[misc]
        for name, keep in rules.items()
    ]
    weights = Weights(bundle, [Role("policy", "trainable", "adapter"), *lagging])
    parameters = weights.parameters("policy")
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.data.add_(1.0)
    weights.advance(1)
    for name, parameter in parameters.items():
        assert torch.equal(weights.lagging("copy")[name], parameter)
        assert torch.equal(weights.lagging("still")[name], start[name])
        expected = 0.9 * start[name].double() + 0.1 * parameter.double()
        assert torch.allclose(weights.lagging("slow")[name].double(), expected, atol=1e-6)


def test_using_a_lagging_role_computes_with_its_weights_and_gives_the_live_ones_back_bit_for_bit(
    bundle: Bundle,
) -> None:
    adapt(bundle, attention(bundle), "policy")
    ema = Role("ema", "lagging", "adapter", follows="policy", keep=ema_keep(0.99))
    weights = Weights(bundle, [Role("policy", "trainable", "adapter"), ema])
    with torch.no_grad():
        first = predict(bundle)
        for parameter in weights.parameters("policy").values():
            parameter.mul_(1.7)
        live = {name: p.clone() for name, p in weights.parameters("policy").items()}
        with weights.using("ema"):
            assert torch.equal(predict(bundle), first)
    assert all(torch.equal(live[name], p) for name, p in weights.parameters("policy").items())


def test_the_average_forgets_its_start_and_then_keeps_what_was_asked() -> None:
    keep = ema_keep(0.99)
    assert keep(1) == pytest.approx(2 / 11)
    assert [keep(step) for step in (1, 10, 100)] == sorted(keep(step) for step in (1, 10, 100))
    assert keep(10_000) == 0.99
    assert ema_keep(0.0)(5) == 0.0


def test_R52_adapters_are_float32_over_a_half_format_base_whenever_they_are_made(base: Callable[[str], Path]) -> None:
    bundle = bundle_of(base("sd15"), torch.bfloat16)
    modules = attention(bundle)
    adapt(bundle, modules, "policy")
    Weights(bundle, [Role("policy", "trainable", "adapter")])
    adapt(bundle, modules, "fake", "surrogate")
    kinds = {name: p.dtype for name, p in bundle.named_parameters()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {torch.bfloat16}


def test_R64_a_run_in_which_nothing_would_train_is_refused(bundle: Bundle) -> None:
    with pytest.raises(TrainingError, match="nothing would be trained"):
        Weights(bundle, [Role("policy", "trainable", "adapter")])


def test_only_adapter_weights_train_beside_a_frozen_base(bundle: Bundle) -> None:
    modules = attention(bundle)
    adapt(bundle, modules, "policy")
    weights = Weights(bundle, [Role("policy", "trainable", "adapter")])
    prefix = f"members.{bundle.family.spec.denoiser}"
    expected = {f"{prefix}.{module}.lora_{factor}.policy.weight" for module in modules for factor in "AB"}
    assert {name for name, p in bundle.named_parameters() if p.requires_grad} == expected == weights.trainable_names


def test_every_weight_of_the_denoiser_trains_in_a_module_role(bundle: Bundle) -> None:
    weights = Weights(bundle, [Role("policy", "trainable", "module")])
    assert weights.trainable_names == {name for name, _ in bundle.named_parameters()}
