"""Captions: read in whatever encoding, written as UTF-8 in one step, and every bulk edit can be undone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data import captions
from engine.errors import DatasetError, WorkspaceError

WORDS = st.text(max_size=30)


def test_utf_8_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("  ein Käfer, 一只猫\r\nzweite Zeile \n".encode())
    assert captions.read(tmp_path / "a.txt") == captions.CaptionText("ein Käfer, 一只猫\nzweite Zeile")


@pytest.mark.parametrize(
    ("data", "note"),
    [
        ("naïve “café”".encode("cp1252"), captions.NOTE_CP1252),
        ("naïve “café”".encode("utf-8-sig"), captions.NOTE_BOM),
        ("naïve “café”".encode("utf-16"), captions.NOTE_UTF16),
    ],
)
def test_other_encodings_are_read_and_reported(tmp_path: Path, data: bytes, note: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    assert captions.read(tmp_path / "a.txt") == captions.CaptionText("naïve “café”", note)


def test_an_empty_file_is_an_empty_caption(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert captions.read(tmp_path / "a.txt") == captions.CaptionText("")


@pytest.mark.parametrize("data", [b"\x89PNG\0\0\0", b"\x81\x8d", b"\xff\xfe\x00", b"x" * 1_000_001])
def test_what_is_no_caption_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(DatasetError, match=r"a\.txt is"):
        captions.read(tmp_path / "a.txt")


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0\ufeff"), max_size=200))
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.txt"
    captions.write(path, text)
    assert captions.read(path) == captions.CaptionText(text.strip())


def test_a_failed_write_leaves_the_old_caption_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions.write(tmp_path / "a.txt", "old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WorkspaceError, match=r"cannot write a\.txt: Permission denied"):
        captions.write(tmp_path / "a.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert captions.read(tmp_path / "a.txt").text == "old"


@pytest.mark.parametrize(
    ("caption", "trigger", "expected"),
    [
        ("a dog", "sks", "sks, a dog"),
        ("", "sks", "sks"),
        ("a dog", "", "a dog"),
        ("sks, a dog", "sks", "sks, a dog"),
        ("SKS dog", "sks", "SKS dog"),
        ("category", "cat", "cat, category"),
        ("a dog", "sks, ", "sks, a dog"),
        ("sks", "sks", "sks"),
    ],
)
def test_the_trigger_goes_in_front_once(caption: str, trigger: str, expected: str) -> None:
    assert captions.expand(caption, trigger) == expected


@given(WORDS, WORDS)
def test_expanding_twice_is_expanding_once(caption: str, trigger: str) -> None:
    once = captions.expand(caption, trigger)
    assert captions.expand(once, trigger) == once


# --- bulk edits ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg", "sub/c.jpg"):
        (tmp_path / "data" / name).write_bytes(b"image")
    (tmp_path / "data" / "a.txt").write_bytes("caf\u00e9".encode("cp1252"))
    (tmp_path / "data" / "b.txt").write_bytes(b"old b\r\n")
    return tmp_path / "data"


def texts(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.txt"))}


def test_an_edit_sets_removes_and_adds_captions_and_undo_restores_every_byte(folder: Path, tmp_path: Path) -> None:
    before = texts(folder)
    edit = captions.apply(folder, {"a.jpg": "new ä", "b.jpg": None, "sub/c.jpg": "third"}, tmp_path / "journal")
    assert texts(folder) == {"a.txt": "new ä\n".encode(), "sub/c.txt": b"third\n"}
    assert captions.history(tmp_path / "journal") == (edit,)
    assert captions.undo(tmp_path / "journal", edit) == ()
    assert texts(folder) == before
    assert captions.history(tmp_path / "journal") == ()


def test_the_undo_record_is_there_before_the_first_caption_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, journal = texts(folder), tmp_path / "journal"

    def die(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(captions, "write", die)
        with pytest.raises(KeyboardInterrupt):
            captions.apply(folder, {"a.jpg": "new", "b.jpg": "new"}, journal)
    captions.write(folder / "a.txt", "new")  # as if it had been interrupted after the first
    (edit,) = captions.history(journal)
    assert captions.undo(journal, edit) == ()
    assert texts(folder) == before


def test_without_a_place_for_the_undo_record_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    before = texts(folder)
    (tmp_path / "journal").write_text("a file is in the way")
    with pytest.raises(WorkspaceError):
        captions.apply(folder, {"a.jpg": "new"}, tmp_path / "journal")
    assert texts(folder) == before


def test_undo_keeps_what_was_changed_again_and_says_so(folder: Path, tmp_path: Path) -> None:
    edit = captions.apply(folder, {"a.jpg": "new", "b.jpg": "new"}, tmp_path / "journal")
    captions.write(folder / "a.txt", "by hand")
    (problem,) = captions.undo(tmp_path / "journal", edit)
    assert problem.where == "a.jpg" and "changed again" in problem.reason
    assert texts(folder) == {"a.txt": b"by hand\n", "b.txt": b"old b\r\n"}


def test_edits_are_undone_in_the_order_of_history(folder: Path, tmp_path: Path) -> None:
    before, journal = texts(folder), tmp_path / "journal"
    for text in ("one", "two", "three"):
        captions.apply(folder, {"a.jpg": text}, journal)
    for _ in range(3):
        assert captions.undo(journal, captions.history(journal)[0]) == ()
    assert texts(folder) == before


@pytest.mark.parametrize("id", ["", "../../etc/passwd", "000001-000000000000"])
def test_an_unknown_edit_is_refused(tmp_path: Path, id: str) -> None:
    with pytest.raises(WorkspaceError, match="there is no edit"):
        captions.undo(tmp_path, id)


def test_an_edit_cannot_be_undone_twice(folder: Path, tmp_path: Path) -> None:
    edit = captions.apply(folder, {"a.jpg": "new"}, tmp_path / "journal")
    captions.undo(tmp_path / "journal", edit)
    with pytest.raises(WorkspaceError, match="undone already"):
        captions.undo(tmp_path / "journal", edit)


@pytest.mark.parametrize("name", ["../out.jpg", "/etc/out.jpg", "sub/../../out.jpg", "", ".", "nul\0.jpg"])
def test_names_that_leave_the_folder_are_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, name: str
) -> None:
    before = texts(tmp_path)
    with pytest.raises(DatasetError, match="is not the name of an image"):
        captions.apply(folder, {"a.jpg": "new", name: "x"}, tmp_path / "journal")
    assert texts(tmp_path) == before


def test_two_edits_of_one_caption_file_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"a\.jpg and a\.png share the caption file a\.txt"):
        captions.apply(folder, {"a.jpg": "one", "a.png": "two"}, tmp_path / "journal")


def test_an_edit_writes_into_the_caption_file_that_is_read(folder: Path, tmp_path: Path) -> None:
    (folder / "d.jpg").write_bytes(b"image")
    (folder / "d.TXT").write_text("old")
    captions.apply(folder, {"d.jpg": "new"}, tmp_path / "journal")
    assert not (folder / "d.txt").exists() or (folder / "d.txt").samefile(folder / "d.TXT")
    assert captions.read(folder / "d.TXT").text == "new"


def test_a_file_that_cannot_be_written_does_not_stop_the_others(folder: Path, tmp_path: Path) -> None:
    (folder / "a.txt").unlink()
    (folder / "a.txt").mkdir()  # cannot be replaced by a file, whoever runs the test
    with pytest.raises(WorkspaceError, match="1 of 2 captions could not be written") as refusal:
        captions.apply(folder, {"a.jpg": "new", "b.jpg": "new"}, tmp_path / "journal")
    assert [problem.where for problem in refusal.value.problems] == ["a.jpg"]
    assert (folder / "b.txt").read_text() == "new\n"
