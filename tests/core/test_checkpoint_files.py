"""A checkpoint's folder: there whole or not at all, and read by what its manifest says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoints
from engine.checkpoints import Manifest, Writer, list_steps, newest, prune, read_manifest, step_folder
from engine.errors import CheckpointError

ROLES = ("policy", "fake", "surrogate")


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 3), fill), "bias": torch.full((3,), fill)}


def write(root: Path, step: int = 5, fill: float = 1.0, roles: tuple[str, ...] = ("policy",)) -> Path:
    writer = Writer(root, step)
    for index, role in enumerate(roles):
        writer.add_tensors(role, "weights", tensors(fill + index), component="unet")
        writer.add_tensors(role, "optimizer", {"weight:step": torch.tensor(3.0)}, component="unet")
    writer.add_tensors("ema", "lagging", tensors(-fill), component="unet")
    return writer.commit(
        Manifest(
            step=step, epoch=1, seed=0, base="base", data="data", settings={"name": "x"}, entries=tuple(writer.entries),
            optimizer={"policy": {"groups": [], "state": {}}},
        )
    )  # fmt: skip


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    folder = write(tmp_path, roles=ROLES)
    found = read_manifest(folder)
    assert (found.step, found.epoch, found.settings) == (5, 1, {"name": "x"})
    assert not list(tmp_path.glob(".*"))
    for index, role in enumerate(ROLES):
        loaded = checkpoints.read_tensors(checkpoints.entry_file(folder, found.entry(role, "weights")))
        assert torch.equal(loaded["weight"], tensors(1.0 + index)["weight"]), "no two roles have collapsed"


def test_R69_every_file_that_is_written_is_one_that_the_reader_asks_for(tmp_path: Path) -> None:
    folder = write(tmp_path, roles=ROLES)
    found = read_manifest(folder)
    asked = {checkpoints.entry_file(folder, entry).relative_to(folder).as_posix() for entry in found.entries}
    assert files(folder) == asked | {checkpoints.MANIFEST}
    laid_out = {checkpoints.file_path(folder, entry.role, entry.kind) for entry in found.entries}
    assert {path.relative_to(folder).as_posix() for path in laid_out} == asked


def test_R70_the_manifest_wins_over_file_names(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "policy" / "weights.safetensors").rename(folder / "elsewhere.safetensors")
    record = json.loads((folder / checkpoints.MANIFEST).read_text())
    entry = next(e for e in record["entries"] if (e["role"], e["kind"]) == ("policy", "weights"))
    entry["files"] = {"elsewhere.safetensors": next(iter(entry["files"].values()))}
    (folder / checkpoints.MANIFEST).write_text(json.dumps(record))
    save_file(tensors(9.0), folder / "policy" / "weights.safetensors")
    found = read_manifest(folder)
    loaded = checkpoints.read_tensors(checkpoints.entry_file(folder, found.entry("policy", "weights")))
    assert torch.equal(loaded["weight"], tensors(1.0)["weight"])


@pytest.mark.parametrize("name", checkpoints.LEGACY_FILES)
def test_R70_a_plain_lora_folder_is_read_without_a_manifest(name: str, tmp_path: Path) -> None:
    save_file(tensors(2.0), tmp_path / name)
    found = read_manifest(tmp_path)
    path = checkpoints.entry_file(tmp_path, found.entry("policy", "weights"))
    assert path.name == name and torch.equal(load_file(path)["weight"], tensors(2.0)["weight"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "name", ["policy/weights.safetensors", "policy/optimizer.safetensors", "ema/weights.safetensors"]
)
def test_R79_a_missing_or_changed_file_is_an_error_that_names_it_and_the_remedy(name: str, tmp_path: Path) -> None:
    write(tmp_path, 3)
    folder = write(tmp_path, 6)
    cut(folder / name)
    with pytest.raises(CheckpointError, match=f"damaged: {name}") as caught:
        read_manifest(folder)
    assert "step-000006" in caught.value.hint and "from step 3" in caught.value.hint
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b"7", b"{}", b'{"entries": []}', b'{"entries": [{"role": "x"}]}', b"\xff\xfe"],
)
def test_R79_a_manifest_that_is_no_manifest_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / checkpoints.MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        read_manifest(folder)


def test_R79_a_folder_without_anything_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    record = asdict(read_manifest(folder)) | {"layout_version": 99}
    (folder / checkpoints.MANIFEST).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="layout 99"):
        read_manifest(folder)


def test_an_entry_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 5 holds no weights of role 'fake'"):
        read_manifest(write(tmp_path)).entry("fake", "weights")


def test_R75_saving_a_step_again_leaves_nothing_of_the_first_save(tmp_path: Path) -> None:
    folder = write(tmp_path, 5, 1.0, ROLES)
    for stale in ("policy/model.safetensors.index.json", "policy/model-00001-of-00002.safetensors", "notes.txt"):
        (folder / stale).write_text("{}")
    assert write(tmp_path, 5, 7.0) == folder
    assert files(folder) == {
        "manifest.json", "policy/weights.safetensors", "policy/optimizer.safetensors", "ema/weights.safetensors",
    }  # fmt: skip
    assert torch.equal(load_file(folder / "policy" / "weights.safetensors")["weight"], tensors(7.0)["weight"])
    assert not list(tmp_path.glob(".*"))


def test_unfinished_and_foreign_folders_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 5)
    writer = Writer(tmp_path, 10)
    writer.add_tensors("policy", "weights", tensors(1.0), component="unet")
    (tmp_path / "step-last").mkdir()
    (tmp_path / "step-000020").write_text("a file")
    assert list_steps(tmp_path) == [5]
    assert newest(tmp_path) == step_folder(tmp_path, 5)


def test_what_a_killed_process_left_behind_is_removed_by_the_next_save(tmp_path: Path) -> None:
    for leftover in (".writing-step-000005", ".removing-step-000001"):
        (tmp_path / leftover / "policy").mkdir(parents=True)
        (tmp_path / leftover / "policy" / "weights.safetensors").write_text("half")
    write(tmp_path, 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000007"]


def test_without_checkpoints_there_is_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    assert newest(tmp_path) is None


def test_only_the_newest_are_kept_in_the_order_of_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5, 250):
        write(tmp_path, step)
    assert prune(tmp_path, 2) == [5, 250]
    assert list_steps(tmp_path) == [999_999, 1_000_000]
    assert prune(tmp_path, 2) == []


def test_a_checkpoint_that_is_being_removed_does_not_count_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)

    def killed(path: Path, **_: object) -> Iterator[None]:
        if path.exists():
            (path / checkpoints.MANIFEST).unlink()
            raise KeyboardInterrupt
        return iter(())

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert list_steps(tmp_path) == [2]
