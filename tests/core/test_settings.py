"""Settings exist once, are closed, and report every problem at once in words."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import engine
from engine import settings
from engine.errors import SettingsError
from engine.settings import Settings, schema

LEAST: dict[str, Any] = {"base": {"source": "embedded/unet"}, "dataset": {"folder": "pictures"}}
VARIANTS = {
    "method": ("lora", "full"),
    "optimizer": ("adamw", "adafactor", "prodigy", "schedule_free", "lion"),
    "schedule": ("constant", "linear", "cosine", "cosine_restarts"),
}


def parse(**sections: Any) -> Settings:
    return settings.parse({**LEAST, **sections})


def problems(**sections: Any) -> dict[str, str]:
    """Field -> what is wrong with it."""
    with pytest.raises(SettingsError) as caught:
        parse(**sections)
    return {problem.where: f"{problem.reason}; {problem.remedy}" for problem in caught.value.problems}


def every_field() -> list[tuple[type[BaseModel], str]]:
    found: list[tuple[type[BaseModel], str]] = []

    def visit(section: type[BaseModel]) -> None:
        for name, field in section.model_fields.items():
            inner = sections_in(field.annotation)
            if (section, name) not in found:
                found.append((section, name))
                for model in inner:
                    visit(model)

    visit(Settings)
    return found


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_R110_a_misspelled_setting_is_an_error_that_names_the_nearest() -> None:
    assert "did you mean rank" in problems(method={"rnak": 4})["method.rnak"]
    assert "did you mean batch_size" in problems(train={"batchsize": 4})["train.batchsize"]
    assert "did you mean optimizer" in problems(optimiser={})["optimiser"]


def test_a_setting_of_another_variant_is_an_error() -> None:
    assert "no such setting" in problems(optimizer={"type": "lion", "eps": 1e-8})["optimizer.eps"]
    assert "no such setting" in problems(method={"type": "full", "rank": 4})["method.rank"]


def test_every_problem_is_reported_at_once() -> None:
    found = problems(train={"batch_size": 0, "steps": "ten"}, method={"rank": 0}, optimizer={"lr": -1.0})
    assert set(found) == {"train.batch_size", "train.steps", "method.rank", "optimizer.lr"}


@pytest.mark.parametrize("value", ["16", True, 16.5, None])
def test_nothing_is_coerced_to_a_number(value: object) -> None:
    assert "method.rank" in problems(method={"rank": value})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value: float) -> None:
    assert "optimizer.lr" in problems(optimizer={"lr": value})


def test_an_unknown_variant_is_refused_with_the_known_ones() -> None:
    assert "prodigy" in problems(optimizer={"type": "sgd"})["optimizer.type"]


def test_a_section_without_a_type_is_the_default_variant() -> None:
    chosen = parse(optimizer={"lr": 1e-3}).optimizer
    assert isinstance(chosen, schema.AdamW) and chosen.lr == 1e-3


def test_steps_and_epochs_exclude_each_other() -> None:
    assert "not both" in " ".join(problems(train={"steps": 3, "epochs": 2}).values())


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().train.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(("section", "kind"), [(s, kind) for s, kinds in VARIANTS.items() for kind in kinds])
def test_every_variant_comes_back_from_its_toml(section: str, kind: str) -> None:
    chosen = parse(**{section: {"type": kind}})
    assert settings.parse(tomllib.loads(settings.to_toml(chosen))) == chosen


def test_values_of_every_shape_come_back_from_their_toml() -> None:
    chosen = parse(
        method={"targets": ["down_blocks.*.to_q"], "alpha": 0.5},
        objective={"levels": {"type": "logit_normal", "mean": 0.5}, "shift": 3.0, "min_snr_gamma": 5.0},
        dataset={"folder": "ein Ordner/写真", "folder_repeats": {"a": 3}},
        samples={"prompts": ['quotes " and \\ and \n'], "size": [64, 96]},
    )
    assert settings.parse(tomllib.loads(settings.to_toml(chosen))) == chosen


# --- files and overrides ----------------------------------------------------------------------------------------------


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_relative_folders_are_relative_to_the_file_and_hub_ids_stay(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", '[base]\nsource = "owner/name"\n[dataset]\nfolder = "pictures"\n')
    chosen = settings.load(file, ["train.steps=7", "optimizer.type=lion", "name=my run"])
    assert chosen.dataset.folder == str(tmp_path / "pictures")
    assert chosen.base.source == "owner/name"
    assert (chosen.train.steps, chosen.optimizer.type, chosen.name) == (7, "lion", "my run")


def test_changing_the_type_of_a_section_starts_it_afresh() -> None:
    data: dict[str, Any] = {"optimizer": {"type": "adamw", "eps": 1e-6}}
    settings.set_dotted(data, "optimizer.type='lion'")
    assert data == {"optimizer": {"type": "lion"}}


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", "name.first=3"])
def test_an_override_that_cannot_be_applied_is_refused(override: str) -> None:
    with pytest.raises(SettingsError):
        settings.set_dotted({"name": "x"}, override)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a = ", "not valid TOML"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"#" * (64 * 1024 + 1), "at most"),
    ],
)
def test_files_that_are_no_settings_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        settings.load(write(tmp_path / "bad.toml", content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        settings.load(tmp_path / "nowhere.toml")


# --- the schema itself ------------------------------------------------------------------------------------------------


def test_every_setting_says_what_it_means() -> None:
    described = [
        (section.__name__, name)
        for section, name in every_field()
        if not section.model_fields[name].description and not sections_in(section.model_fields[name].annotation)
    ]
    assert [entry for entry in described if entry[1] not in ("type", "lr", "weight_decay")] == []
    assert len(every_field()) > 80


def test_R58_every_setting_is_read_by_the_engine() -> None:
    """A setting that nothing reads would be ignored without a word."""
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for path in Path(engine.__file__).parent.rglob("*.py")
        if "settings" not in path.parts[-2]
    )
    names = {name for _, name in every_field()} - {"type", "schema_version"}
    assert [name for name in sorted(names) if not re.search(rf"\.{name}\b", source)] == []


def test_importing_the_settings_does_not_import_torch() -> None:
    code = "import sys, engine.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(engine.__file__).parents[1]).returncode == 0
