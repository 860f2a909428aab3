"""Shipped presets work, not only parse; and what a run depends on is noticed when it changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import presets, settings
from engine.errors import CheckpointError, SettingsError
from tests.training import choose, make_trainer

BASES = {"embedded-lora": ("sd15", "flux1"), "sd15-lora": ("sd15",), "flux1-lora": ("flux1", "flux1-dev")}


def test_every_shipped_preset_is_tried_below() -> None:
    assert set(presets.shipped()) == set(BASES)


@pytest.mark.parametrize(("preset", "kind"), [(name, kind) for name, kinds in BASES.items() for kind in kinds])
def test_R107_every_shipped_preset_trains_its_first_step(
    preset: str, kind: str, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    wanted = {
        "base": {"source": str(base(kind))},
        "dataset": {"folder": str(pictures)},
        "buckets": {"resolutions": [64], "step": 16},
        "samples": {"every": 0},
        "train": {"device": "cpu", "precision": "fp32"},
    }
    chosen = settings.parse(presets.merge(presets.load(preset), wanted))
    trainer = make_trainer(chosen, tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.weights.parameters("policy").items()}
    trainer._train_step(0)
    after = trainer.weights.parameters("policy")
    assert any(not before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize("change", ["a caption", "a picture", "a new picture"])
def test_resuming_after_the_data_set_changed_is_refused(
    change: str, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(pictures, tmp_path / "pictures"))
    chosen = choose(base("sd15"), folder)
    trainer = make_trainer(chosen, tmp_path / "home")
    trainer._train_step(0)
    trainer.step = 1
    trainer._save()
    if change == "a caption":
        (folder / "picture-0.txt").write_text("something else", encoding="utf-8")
    elif change == "a picture":
        shutil.copy(folder / "picture-1.png", folder / "picture-0.png")
    else:
        shutil.copy(folder / "picture-1.png", folder / "picture-9.png")
        (folder / "picture-9.txt").write_text("one more", encoding="utf-8")
    with pytest.raises(CheckpointError, match="have changed"):
        make_trainer(chosen, tmp_path / "home", resume=trainer.run_folder)


def test_a_guidance_value_for_a_base_that_is_not_fed_one_is_refused(
    base: Callable[[str], Path], pictures: Path
) -> None:
    from engine.plan import plan_base

    with pytest.raises(SettingsError, match=r"objective\.guidance"):
        plan_base(choose(base("flux1"), pictures, "objective.guidance=3.5"))
    plan_base(choose(base("flux1-dev"), pictures, "objective.guidance=3.5"))
