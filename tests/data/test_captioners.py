"""Captioning runs: existing captions are kept, every file is reported, and everything can be undone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from engine.captioners.captioner import CAPTIONERS, Captioner, Picture, Report, captioner_class, run
from engine.captioners.template import TemplateCaptioner
from engine.data import captions
from engine.data.items import Item
from engine.data.manifest import scan
from engine.errors import MissingPackage, SettingsError
from engine.settings import schema


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "cats").mkdir(parents=True)
    for number, name in enumerate(("a_red one.png", "b.png", "cats/c.png")):
        Image.new("RGB", (30, 20), (number, 0, 0)).save(tmp_path / "data" / name)
    (tmp_path / "data" / "b.txt").write_text("by hand")
    return tmp_path / "data"


def items_of(folder: Path) -> tuple[Item, ...]:
    return scan(schema.Dataset(folder=str(folder), missing_captions="file_name"), 16).items


def outcomes(report: Report) -> list[tuple[str, str]]:
    return [(outcome.name, outcome.status) for outcome in report.outcomes]


class Scripted:
    """A captioner whose answers and failures are given; it records how it was called."""

    def __init__(self, answers: dict[str, str | Exception]) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []
        self.open = False

    def prepare(self) -> None:
        self.open = True

    def caption(self, pictures: Sequence[Picture]) -> list[str]:
        assert self.open
        self.calls.append([picture.item.name for picture in pictures])
        answers = [self.answers.get(picture.item.name, "fine") for picture in pictures]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [str(answer) for answer in answers]

    def close(self) -> None:
        self.open = False


def test_the_template_fills_its_fields(folder: Path, tmp_path: Path) -> None:
    pattern = "{trigger}: {name} in {folder}, {width}x{height}, {index:03d} {{x}}"
    captioner = TemplateCaptioner(pattern, trigger="sks")
    run(captioner, items_of(folder), folder=folder, journal=tmp_path / "journal", policy="overwrite")
    assert captions.read(folder / "a_red one.txt").text == "sks: a red one in data, 30x20, 001 {x}"
    assert captions.read(folder / "cats" / "c.txt").text == "sks: c in cats, 30x20, 003 {x}"


@pytest.mark.parametrize(
    "pattern",
    [
        "{colour}",
        "{name.__class__}",
        "{name[0]}",
        "{}",
        "{0}",
        "{name!r}",
        "{index:99999999999d}",
        "{name:>999999999}",
        "{index:{width}}",
    ],
)
def test_a_template_can_do_nothing_but_fill_fields(pattern: str) -> None:
    with pytest.raises(SettingsError, match="the caption template cannot be used"):
        TemplateCaptioner(pattern)


@pytest.mark.parametrize("pattern", ["{name", "name}"])
def test_a_template_with_a_single_brace_is_refused(pattern: str) -> None:
    with pytest.raises(SettingsError, match="malformed"):
        TemplateCaptioner(pattern)


def test_all_unknown_fields_of_a_template_are_reported_together() -> None:
    with pytest.raises(SettingsError, match=r"(?s)\{colour\}.*\{breed\}") as refusal:
        TemplateCaptioner("{colour} {name} {breed}")
    assert len(refusal.value.problems) == 2


def test_existing_captions_are_kept_unless_asked(folder: Path, tmp_path: Path) -> None:
    report = run(TemplateCaptioner("{name}"), items_of(folder), folder=folder, journal=tmp_path / "journal")
    assert outcomes(report) == [("a_red one.png", "written"), ("b.png", "skipped"), ("cats/c.png", "written")]
    assert captions.read(folder / "b.txt").text == "by hand"
    assert (report.count("written"), report.count("skipped"), report.count("failed")) == (2, 1, 0)


def test_an_empty_caption_file_counts_as_missing_and_an_unreadable_one_as_existing(
    folder: Path, tmp_path: Path
) -> None:
    items = items_of(folder)
    (folder / "a_red one.txt").write_text(" \n")
    (folder / "b.txt").write_bytes(b"\0\x81binary")
    report = run(TemplateCaptioner("new"), items, folder=folder, journal=tmp_path / "journal")
    assert outcomes(report)[:2] == [("a_red one.png", "written"), ("b.png", "skipped")]
    assert (folder / "b.txt").read_bytes() == b"\0\x81binary"


def test_a_run_can_be_undone(folder: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    report = run(
        TemplateCaptioner("new"), items_of(folder), folder=folder, journal=journal, policy="overwrite", batch_size=1
    )
    assert captions.read(folder / "b.txt").text == "new" and len(report.undo_ids) == 3
    for edit in report.undo_ids:
        assert captions.undo(journal, edit) == ()
    assert [path.name for path in folder.rglob("*.txt")] == ["b.txt"]
    assert captions.read(folder / "b.txt").text == "by hand"


def test_one_bad_picture_does_not_take_its_batch_along(folder: Path, tmp_path: Path) -> None:
    captioner = Scripted({"b.png": ValueError("too dark"), "cats/c.png": "  "})
    report = run(captioner, items_of(folder), folder=folder, journal=tmp_path / "journal", policy="overwrite")
    assert outcomes(report) == [("a_red one.png", "written"), ("b.png", "failed"), ("cats/c.png", "failed")]
    assert "too dark" in report.outcomes[1].reason and "empty caption" in report.outcomes[2].reason
    assert captions.read(folder / "b.txt").text == "by hand"
    assert not captioner.open


def test_a_captioner_that_cannot_start_ends_the_run_and_is_closed(folder: Path, tmp_path: Path) -> None:
    class Unavailable(Scripted):
        def prepare(self) -> None:
            super().prepare()
            raise MissingPackage("blip is not installed", "pip install safelight[blip]")

    captioner = Unavailable({})
    with pytest.raises(MissingPackage):
        run(captioner, items_of(folder), folder=folder, journal=tmp_path / "journal")
    assert not captioner.open


def test_batches_progress_and_lazy_decoding(folder: Path, tmp_path: Path) -> None:
    items = items_of(folder)
    (folder / "a_red one.png").unlink()  # not decoded by a captioner that does not ask for pixels
    captioner, calls = Scripted({}), list[tuple[int, int]]()
    run(
        captioner,
        items,
        folder=folder,
        journal=tmp_path / "journal",
        batch_size=1,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert captioner.calls == [["a_red one.png"], ["cats/c.png"]]
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_nothing_is_loaded_when_every_image_has_a_caption(folder: Path, tmp_path: Path) -> None:
    captioner = Scripted({})
    run(captioner, items_of(folder)[1:2], folder=folder, journal=tmp_path / "journal")
    assert captioner.calls == [] and not (tmp_path / "journal").exists()


def test_a_file_that_cannot_be_written_is_reported(folder: Path, tmp_path: Path) -> None:
    items = items_of(folder)
    (folder / "a_red one.txt").mkdir()  # in the way, whoever runs the test
    report = run(
        TemplateCaptioner("x"), items, folder=folder, journal=tmp_path / "journal", policy="overwrite", batch_size=8
    )
    assert outcomes(report) == [("a_red one.png", "failed"), ("b.png", "written"), ("cats/c.png", "written")]
    assert "cannot write a_red one.txt" in report.outcomes[0].reason


def test_images_that_share_a_caption_file_are_captioned_once(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(folder / "b.jpg")
    report = run(
        TemplateCaptioner("{name}"), items_of(folder), folder=folder, journal=tmp_path / "journal", policy="overwrite"
    )
    assert dict(outcomes(report))["b.jpg"] == "written" and dict(outcomes(report))["b.png"] == "skipped"


def test_every_registered_captioner_can_be_imported_and_keeps_the_contract() -> None:
    assert "template" in CAPTIONERS
    for name in CAPTIONERS:
        made = captioner_class(name)
        assert all(callable(getattr(made, method)) for method in ("prepare", "caption", "close"))
    captioner: Captioner = TemplateCaptioner("x")
    assert captioner.caption([]) == []


def test_an_unknown_captioner_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="no captioner 'blop'") as refusal:
        captioner_class("blop")
    assert "template" in refusal.value.hint
