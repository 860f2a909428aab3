"""Presets can be shared: complete, checked, and without anything that is one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import presets, settings
from engine.errors import SettingsError
from engine.workspace import Workspace

MINE: dict[str, Any] = {"base": {"source": "embedded/unet"}, "dataset": {"folder": "photos"}}


def test_every_shipped_preset_gives_valid_settings_with_rank_equal_to_alpha() -> None:
    assert presets.shipped() == ["embedded-lora", "flux1-lora", "sd15-lora"]
    for name in presets.shipped():
        preset = presets.load(name)
        chosen = settings.parse(presets.merge(preset, MINE))
        assert chosen.method.type == "lora" and chosen.method.alpha == chosen.method.rank
        assert preset.shipped and preset.about


def test_my_values_win_and_another_variant_starts_afresh() -> None:
    preset = {"optimizer": {"type": "adamw", "lr": 1e-3, "bits": 8}, "train": {"steps": 300, "batch_size": 8}}
    merged = presets.merge(preset, {"optimizer": {"type": "lion"}, "train": {"steps": 5}})
    assert merged == {"optimizer": {"type": "lion"}, "train": {"steps": 5, "batch_size": 8}}
    kept = presets.merge(preset, {"optimizer": {"lr": 1e-5}})
    assert kept["optimizer"] == {"type": "adamw", "lr": 1e-5, "bits": 8}


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('name = "mine"', "name"),
        ('[base]\nsource = "embedded/unet"', "base.source"),
        ('[dataset]\nfolder = "photos"', "dataset.folder"),
        ('[captions]\ntrigger = "/home/me/photos"', "captions.trigger"),
        ('[captions]\ntrigger = "C:\\\\Users\\\\me"', "captions.trigger"),
        ('[samples]\nprompts = ["a dog", "~/prompts.txt"]', "samples.prompts"),
        ('[captions]\ntrigger = "hf_abcdefghijklmnopqrstuvwxyz"', "captions.trigger"),
        ('[train]\nhub_token = "x"', "train.hub_token"),
    ],
)
def test_a_preset_with_a_path_or_a_secret_is_refused_with_the_place(tmp_path: Path, text: str, where: str) -> None:
    file = tmp_path / "shared.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="cannot be used as a preset") as caught:
        presets.load(file)
    assert [problem.where for problem in caught.value.problems] == [where]


def test_a_preset_with_an_unknown_setting_is_refused_with_near_names(tmp_path: Path) -> None:
    file = tmp_path / "shared.toml"
    file.write_text("[optimizer]\nlearning_rate = 1e-4\n[train]\nstpes = 4\n")
    with pytest.raises(SettingsError) as caught:
        presets.load(file)
    assert {problem.where for problem in caught.value.problems} == {"optimizer.learning_rate", "train.stpes"}
    assert "steps" in str(caught.value)


def test_a_name_that_does_not_exist_is_answered_with_near_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        presets.load("sd15lora")
    assert "sd15-lora" in caught.value.hint


def test_saved_settings_become_a_preset_without_what_is_mine(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    tuned = {"optimizer": {"type": "lion", "lr": 2e-5}, "train": {"steps": 7}, "buckets": {"step": 64}}
    chosen = settings.parse({**MINE, "name": "rex", **tuned})
    path = presets.save(workspace, "My style", chosen)
    assert path == tmp_path / "presets" / "My-style.toml"
    again = settings.parse(presets.merge(presets.load("My-style", workspace), {**MINE, "name": "rex"}))
    assert again == chosen
    assert "photos" not in path.read_text() and "rex" not in path.read_text()
    assert [item.name for item in presets.available(workspace)] == [*presets.shipped(), "My-style"]
