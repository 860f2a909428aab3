"""What is in the wheel: the two packages, the presets, the embedded bases, and nothing that belongs elsewhere."""

from __future__ import annotations

import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
BASES = ("unet", "flow")
MAX_EMBEDDED_BYTES = 12 * MIB


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built by the backend itself, which needs no network."""
    builder = WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return zipfile.ZipFile(path)


def test_the_wheel_has_the_two_packages_and_nothing_else_at_the_top(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"engine", "webui"}


def test_every_module_of_the_source_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    source = {p.relative_to(ROOT).as_posix() for part in ("engine", "webui") for p in ROOT.glob(f"{part}/**/*.py")}
    assert len(source) > 60
    assert source - set(wheel.namelist()) == set()


def test_the_shipped_presets_are_in_the_wheel_where_they_are_looked_for(wheel: zipfile.ZipFile) -> None:
    source = {path.name for path in (ROOT / "presets").glob("*.toml")}
    assert source
    assert {n.removeprefix("engine/_presets/") for n in wheel.namelist() if n.startswith("engine/_presets/")} == source


def test_types_are_shipped(wheel: zipfile.ZipFile) -> None:
    assert {"engine/py.typed", "webui/py.typed"} <= set(wheel.namelist())


def test_the_wheel_holds_no_leftovers(wheel: zipfile.ZipFile) -> None:
    odd = [n for n in wheel.namelist() if "__pycache__" in n or n.endswith((".pyc", ".log", ".jsonl", ".tmp"))]
    assert odd == []
    assert not any(name.startswith(("tests/", "docs/", "notebooks/", "benchmarks/")) for name in wheel.namelist())


def test_the_metadata_names_licence_readme_command_and_extras(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert {"cuda8bit", "notebook", "test", "dev"} <= set(metadata.get_all("Provides-Extra") or ())
    assert "# Safelight" in str(metadata.get_payload())
    assert "safelight = webui.main:main" in wheel.read(f"{folder}/entry_points.txt").decode()


def test_the_embedded_measure_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert "engine/embedded/shape_classifier.safetensors" in wheel.namelist()


def test_the_embedded_bases_are_whole_and_small(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    for base in BASES:
        for part in ("model_index.json", "safelight.json", "vae/config.json", "scheduler/scheduler_config.json"):
            assert f"engine/embedded/{base}/{part}" in names
        own = [name for name in names if name.startswith(f"engine/embedded/{base}/")]
        folders = {name.split("/")[3] for name in own if name.endswith(".safetensors")}
        assert {"vae", "text_encoder", "unet" if base == "unet" else "transformer"} <= folders
    size = sum(item.file_size for item in wheel.infolist() if item.filename.endswith(".safetensors"))
    assert size <= MAX_EMBEDDED_BYTES, f"{size / MIB:.1f} MiB of weights"


def test_the_version_stands_in_one_value() -> None:
    import engine

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert engine.__version__ == project["version"]
