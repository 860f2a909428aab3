"""Which layers get an adapter, and every kind of adapter through training and back from its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine import events, plan
from engine.errors import SettingsError
from engine.families import loading
from engine.families.family import Family
from engine.families.registry import open_base
from engine.settings.schema import Base
from tests.training import choose, make_trainer, read_events

FAMILIES = ("sd15", "flux1")
PRESETS = ("attention", "attention+feed_forward", "all")
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def skeleton(base: Callable[[str], Path]) -> Callable[[str], tuple[Family, nn.Module]]:
    def get(name: str) -> tuple[Family, nn.Module]:
        family, located = open_base(Base(source=str(base(name))))
        return family, loading.skeleton(family, located)

    return get


def transformer_blocks(family: Family, denoiser: nn.Module) -> list[str]:
    """Paths of the blocks that hold attention and a feed-forward part."""
    kinds = ("BasicTransformerBlock", "FluxTransformerBlock", "FluxSingleTransformerBlock")
    return [path for path, module in denoiser.named_modules() if type(module).__name__ in kinds]


# --- targets ----------------------------------------------------------------------------------------------------------


@EVERY_FAMILY
def test_the_skeleton_has_the_bases_layers_and_holds_no_weights(
    name: str, skeleton: Callable[[str], tuple[Family, nn.Module]], base: Callable[[str], Path]
) -> None:
    family, bare = skeleton(name)
    loaded = loading.load(
        family, open_base(Base(source=str(base(name))))[1], [family.spec.denoiser], dtype=torch.float32
    )
    assert [n for n, _ in bare.named_modules()] == [n for n, _ in loaded[family.spec.denoiser].named_modules()]
    assert all(parameter.is_meta for parameter in bare.parameters())


@EVERY_FAMILY
def test_presets_grow_and_name_layers_inside_the_blocks_only(
    name: str, skeleton: Callable[[str], tuple[Family, nn.Module]]
) -> None:
    family, denoiser = skeleton(name)
    small, usual, large = (family.lora_modules(denoiser, preset) for preset in PRESETS)
    assert set(small) < set(usual) < set(large)
    for module in large:
        assert module.startswith(tuple(f"{attribute}." for attribute in family.spec.block_lists))
        assert isinstance(denoiser.get_submodule(module), nn.Linear | nn.Conv2d)
    assert not {"proj_out", "conv_in", "conv_out", "x_embedder"} & set(large)


@EVERY_FAMILY
def test_the_default_preset_has_attention_and_a_feed_forward_layer_of_every_block(
    name: str, skeleton: Callable[[str], tuple[Family, nn.Module]]
) -> None:
    family, denoiser = skeleton(name)
    chosen = family.lora_modules(denoiser, "attention+feed_forward")
    blocks = transformer_blocks(family, denoiser)
    assert len(blocks) >= 3
    for block in blocks:
        inside = [module.removeprefix(f"{block}.") for module in chosen if module.startswith(f"{block}.")]
        assert any(module.startswith("attn") for module in inside), block
        assert any(module.startswith(("ff", "proj_mlp", "proj_out")) for module in inside), block


def test_released_stable_diffusion_15_gets_the_192_modules_that_lora_tools_expect() -> None:
    from diffusers import UNet2DConditionModel

    from engine.families import registry

    with torch.device("meta"):
        unet = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
    assert len(registry.get("sd15").lora_modules(unet, "attention+feed_forward")) == 192


@EVERY_FAMILY
def test_patterns_match_whole_names_or_their_ends(
    name: str, skeleton: Callable[[str], tuple[Family, nn.Module]]
) -> None:
    family, denoiser = skeleton(name)
    everything = [n for n, m in denoiser.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert family.lora_modules(denoiser, ["to_q"]) == [n for n in everything if n.endswith(".to_q")]
    first = family.spec.block_lists[0]
    within = family.lora_modules(denoiser, [f"{first}.0.*"])
    assert within == [n for n in everything if n.startswith(f"{first}.0.")]
    assert family.lora_modules(denoiser, ["to_q", "to_q", f"{first}.0.*"]) == [
        n for n in everything if n.endswith(".to_q") or n.startswith(f"{first}.0.")
    ]


@EVERY_FAMILY
@pytest.mark.parametrize("patterns", ["['to_nowhere']", "['to_q', 'q']", "[]"])
def test_R67_a_pattern_that_finds_nothing_is_refused_before_any_weight_is_loaded(
    patterns: str, name: str, base: Callable[[str], Path], pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_load_component", lambda *a, **k: pytest.fail("a weight was loaded"))
    with pytest.raises(SettingsError, match=r"method\.targets"):
        plan.plan_run(choose(base(name), pictures, f"method.targets={patterns}"))


# --- kinds of adapters ------------------------------------------------------------------------------------------------

KINDS = {
    "plain": (),
    "rank-stabilised": ("method.rank_stabilised=true", "method.rank=4", "method.alpha=3.0"),
    "dora": ("method.dora=true", "export.formats=['diffusers']"),
    "dropout": ("method.dropout=0.5",),
    "alpha": ("method.alpha=0.7",),
    "all": ("method.targets='all'", "export.formats=['diffusers']"),
    "patterns": ("method.targets=['to_k', 'to_out.0']",),
    "text": ("method.text_encoder=true",),
}


def finish(trainer: Any, steps: int = 3) -> Any:
    """The Finished event of a short run."""
    trainer.run()
    (found,) = read_events(trainer.run_folder, events.Finished)
    return found


@EVERY_FAMILY
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_trains_all_its_weights_and_reads_back_from_its_files(
    kind: str, name: str, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(choose(base(name), pictures, *KINDS[kind], "train.steps=3"), tmp_path)
    trainable = [n for n, p in trainer.root.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in n for n in trainable)
    found = finish(trainer)
    assert found.outcome == "finished"
    weights = found.proof["weights"]
    assert weights["moved"] == weights["of"] == len(trainable)
    assert 0 < weights["max_change"] < 1
    assert found.proof["base_unchanged"] and found.proof["loss_finite"]
    formats = [export["format"] for export in found.proof["exports"]]
    assert formats and len(set(formats)) == len(formats)
    for export in found.proof["exports"]:
        assert (trainer.run_folder.path / export["path"]).is_file()
        assert export["max_delta_error"] < 1e-5 and export["max_prediction_error"] < 1e-3


@EVERY_FAMILY
def test_a_text_encoder_that_trains_is_asked_anew_in_every_step_and_moves(
    name: str, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(choose(base(name), pictures, "method.text_encoder=true", "captions.dropout=0.0"), tmp_path)
    given = trainer.source.load(trainer.source.window(0)[0], torch.Generator(), live_text=True)
    assert all(isinstance(text, str) and text.startswith("a cloth") for text in given.text)
    before = trainer._conditioning("a cloth of colour 1")
    cached = trainer.source.conditioning("a cloth of colour 1")
    assert all(torch.allclose(before[key], cached[key], atol=1e-6) for key in cached), "at first nothing has changed"
    for step in range(3):
        trainer._train_step(step)
    moved = trainer.weights.parameters("policy")
    ups = {n: p for n, p in moved.items() if n.startswith("members.text_encoder.") and "lora_B" in n}
    assert ups and all(bool(p.any()) for p in ups.values())
    after = trainer._conditioning("a cloth of colour 1")
    assert any(not torch.allclose(after[key], cached[key]) for key in cached), "previews see what the encoder learned"


def test_adapter_dropout_is_on_while_training_and_off_while_showing(
    base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(choose(base("sd15"), pictures, "method.dropout=0.5"), tmp_path)
    for parameter in trainer.weights.parameters("policy").values():
        parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    given = trainer.source.load(trainer.source.window(0)[0], torch.Generator(), live_text=False)

    def predictions() -> list[torch.Tensor]:
        level = torch.tensor([0.5])
        return [trainer.loss_run.predict("policy", given.clean, level, given.text).latent for _ in range(2)]

    first, second = predictions()
    assert not torch.equal(first, second)
    with trainer.evaluation():
        first, second = predictions()
        assert torch.equal(first, second)
    assert trainer.bundle.training


def test_an_adapter_starts_as_the_base_itself_and_the_same_seed_starts_it_alike(
    base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    def start(seed: int) -> Any:
        torch.rand(seed * 17 + 3)  # whatever happened before must not matter
        return make_trainer(choose(base("sd15"), pictures, f"train.seed={seed}"), tmp_path / f"{torch.rand(1).item()}")

    first, again, other = start(1), start(1), start(2)
    starts = [trainer.weights.parameters("policy") for trainer in (first, again, other)]
    assert all(torch.equal(p, starts[1][n]) for n, p in starts[0].items())
    assert any(not torch.equal(p, starts[2][n]) for n, p in starts[0].items())
    assert all(not p.any() for n, p in starts[0].items() if "lora_B" in n)
    given = first.source.load(first.source.window(0)[0], torch.Generator(), live_text=False)
    level = torch.tensor([0.5])
    assert torch.equal(
        first.loss_run.predict("policy", given.clean, level, given.text).latent,
        first.loss_run.predict("base", given.clean, level, given.text).latent,
    )
