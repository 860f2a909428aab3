"""The registry and what a family file may contain."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import SettingsError
from engine.families.registry import FAMILIES, PIPELINES, get

FOLDER = Path(__file__).resolve().parents[2] / "engine" / "families"
NOT_FAMILIES = {"__init__", "family", "hub", "loading", "registry", "sources"}
# Noise, loss, loop, optimizer and files belong to the engine; a family computes.
FORBIDDEN = re.compile(
    r"\b(optim\w*|AdamW?|backward|zero_grad|lr_scheduler|randn\w*|rand|normal_|save\w*|open|write\w*|mkdir|unlink"
    r"|DataLoader|accelerate|manual_seed|tqdm|mse_loss)\b"
)


@pytest.mark.parametrize("family_id", FAMILIES)
def test_every_family_is_importable_and_its_own_description_holds(family_id: str) -> None:
    import diffusers

    from engine.families.family import Family

    family = get(family_id)
    spec = family.spec
    assert isinstance(family, Family)
    assert spec.id == family_id
    assert hasattr(diffusers, spec.pipeline_class)
    assert PIPELINES[spec.pipeline_class] == family_id
    assert {"attention", "attention+feed_forward", "all"} == set(spec.lora_targets)
    assert set(spec.lora_targets["attention"]) < set(spec.lora_targets["attention+feed_forward"])
    assert set(spec.lora_targets["attention+feed_forward"]) < set(spec.lora_targets["all"])
    assert spec.denoiser not in family.text_components() + family.media_components()
    assert spec.latent_space_version >= 1 and spec.text_space_version >= 1
    assert spec.default_formats


def test_every_pipeline_belongs_to_a_family_and_every_family_file_is_registered() -> None:
    assert set(PIPELINES.values()) == set(FAMILIES)
    files = {path.stem for path in FOLDER.glob("*.py")} - NOT_FAMILIES
    assert files == {module.rpartition(".")[2] for module, _ in FAMILIES.values()}
    assert len(files) >= 2


def test_an_unknown_family_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingsError) as caught:
        get("nonsense")
    assert "sd15, flux1" in caught.value.hint


def test_a_family_is_data_and_functions_and_holds_no_state() -> None:
    for family_id in FAMILIES:
        family = get(family_id)
        assert not vars(family)
        assert get(family_id) is not family


@pytest.mark.parametrize("family_id", FAMILIES)
def test_a_family_file_contains_no_optimizer_no_loop_no_draw_and_no_file(family_id: str) -> None:
    path = FOLDER / f"{FAMILIES[family_id][0].rpartition('.')[2]}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names += [alias.name for node in imports for alias in node.names]
    assert len(names) > 100
    assert not [name for name in names if FORBIDDEN.search(name)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.While | ast.Global)]


def test_the_check_of_family_files_would_notice() -> None:
    for name in ("torch.optim", "AdamW", "backward", "randn_like", "save_pretrained", "open"):
        assert FORBIDDEN.search(name)
    assert not FORBIDDEN.search("set_grad_enabled")


def test_listing_families_imports_neither_torch_nor_diffusers() -> None:
    code = "import sys, engine.families.registry; print(sorted({'torch', 'diffusers'} & set(sys.modules)))"
    root = FOLDER.parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_modules_are_named_as_they_are_imported() -> None:
    for module, name in FAMILIES.values():
        assert getattr(importlib.import_module(module), name).__module__ == module
