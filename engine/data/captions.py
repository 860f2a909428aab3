"""Captions beside images: reading whatever encoding they come in, writing UTF-8, and edits that can be undone."""

from __future__ import annotations

import base64
import codecs
import contextlib
import errno
import json
import os
import re
import time
import unicodedata
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DatasetError, Problem, WorkspaceError

MAX_BYTES = 1_000_000
"""A larger .txt file is something else than a caption."""

NOTE_BOM = "caption begins with a byte order mark, which is left out"
NOTE_CP1252 = "caption is not UTF-8; read as Windows-1252"
NOTE_UTF16 = "caption is UTF-16"

_ID = re.compile(r"[0-9]{6,}-[0-9a-f]{12}")


@dataclass(frozen=True)
class CaptionText:
    """A caption without surrounding white space, and how it had to be read if it was not plain UTF-8."""

    text: str
    note: str | None = None


@dataclass(frozen=True)
class Applied:
    """What a bulk edit did: the id for `undo`, and the files that could not be written."""

    id: str
    failed: tuple[Problem, ...]


def read(path: Path) -> CaptionText:
    """Read a caption file. Raises DatasetError when it is not text or far too long, OSError when it cannot open."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DatasetError(
            f"{path.name} is larger than a caption can be", "shorten it, or rename it if it is no caption"
        )
    text, note = _decode(path, data)
    if "\0" in text:
        raise _not_text(path)
    return CaptionText(text.replace("\r\n", "\n").strip(), note)


def write(path: Path, text: str) -> None:
    """Replace a caption file by `text` in UTF-8, in one step. Raises WorkspaceError when it cannot be written."""
    _replace(path, _file_bytes(text))


def expand(caption: str, trigger: str) -> str:
    """The caption with the trigger words and a comma in front, unless it already begins with them."""
    trigger = trigger.strip().rstrip(",").rstrip()
    caption = caption.strip()
    if not trigger or not caption:
        return trigger or caption
    rest = caption[len(trigger) :]
    if caption.casefold().startswith(trigger.casefold()) and not rest[:1].isalnum() and rest[:1] != "_":
        return caption
    return f"{trigger}, {caption}"


def caption_path(image: Path) -> Path:
    """Where the caption of an image is written: 'photo.txt' beside 'photo.jpg'."""
    return image.with_suffix(".txt")


def find_caption(image: Path) -> Path:
    """The caption file of an image, existing or not; allows for '.TXT' and for another way to write accents."""
    return _caption_files(image.parent).get(same_stem(image.stem), caption_path(image))


def same_stem(stem: str) -> str:
    """Stems that are equal after this belong together: macOS writes accents as separate characters, others do not."""
    return unicodedata.normalize("NFC", stem)


def apply(folder: Path, edits: Mapping[str, str | None], journal: Path) -> str:
    """Set (text) or remove (None) the captions of images, given by their names relative to `folder`.

    The state before is recorded in the folder `journal` first; the returned id undoes the edit. Raises DatasetError for
    names that leave the folder or share a caption file, WorkspaceError listing the files that could not be written;
    the others are written and can be undone with the id in the message.
    """
    applied = apply_each(folder, edits, journal)
    if applied.failed:
        raise WorkspaceError(
            f"{len(applied.failed)} of {len(edits)} captions could not be written (edit {applied.id})",
            "make the folder writable and repeat the edit",
            problems=applied.failed,
        )
    return applied.id


def apply_each(folder: Path, edits: Mapping[str, str | None], journal: Path) -> Applied:
    """As `apply`, but files that cannot be written are reported instead of raised."""
    targets = _targets(folder, edits)
    states: dict[str, dict[str, str | None]] = {}
    failed: list[Problem] = []
    for path, (name, text) in list(targets.items()):
        try:
            before = _stored(path)
        except WorkspaceError as error:  # what cannot be put back is not overwritten
            failed.append(Problem(name, error.message, error.hint))
            del targets[path]
            continue
        after = None if text is None else _encoded(_file_bytes(text))
        states[path.relative_to(folder).as_posix()] = {"image": name, "before": before, "after": after}
    record = {"folder": str(folder.absolute()), "time": time.time(), "edits": states}
    id = _next_id(journal)
    _replace(journal / f"{id}.json", json.dumps(record, ensure_ascii=True, indent=1).encode("ascii"))
    for path, (name, text) in targets.items():
        try:
            if text is None:
                _remove(path)
            else:
                write(path, text)
        except WorkspaceError as error:
            failed.append(Problem(name, error.message, error.hint))
    return Applied(id, tuple(failed))


def undo(journal: Path, id: str) -> tuple[Problem, ...]:
    """Put back the captions, byte for byte, as they were before the edit `id`.

    A caption that was changed again since then is left as it is and returned. Raises WorkspaceError when there is no
    such edit or it was undone already.
    """
    record_path = journal / f"{id}.json"
    if not _ID.fullmatch(id) or not record_path.is_file():
        raise WorkspaceError(f"there is no edit {id!r} to undo", "it may have been undone already")
    record = json.loads(record_path.read_text("ascii"))
    folder = Path(record["folder"])
    kept: list[Problem] = []
    for name, states in record["edits"].items():
        path = folder / name
        try:
            now = _stored(path)
            if now == states["before"]:
                continue
            if now != states["after"]:
                kept.append(Problem(states["image"], "its caption was changed again after the edit", "undo that first"))
            elif states["before"] is None:
                _remove(path)
            else:
                _replace(path, base64.b64decode(states["before"]))
        except WorkspaceError as error:
            kept.append(Problem(states["image"], error.message, error.hint))
    if not kept:
        os.replace(record_path, record_path.with_suffix(".undone"))
    return tuple(kept)


def history(journal: Path) -> tuple[str, ...]:
    """The ids of edits that can be undone, newest first."""
    ids = [path.stem for path in journal.glob("*.json") if _ID.fullmatch(path.stem)]
    return tuple(sorted(ids, key=_number, reverse=True))


def _number(id: str) -> int:
    return int(id.partition("-")[0])


def _next_id(journal: Path) -> str:
    """Numbered, because edits can follow each other faster than a clock ticks; undone edits keep their numbers."""
    numbers = [_number(path.stem) for path in journal.glob("*") if _ID.fullmatch(path.stem)]
    return f"{max(numbers, default=0) + 1:06d}-{uuid.uuid4().hex[:12]}"


def _decode(path: Path, data: bytes) -> tuple[str, str | None]:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        readings: list[tuple[str, str | None]] = [("utf-16", NOTE_UTF16)]  # what Windows PowerShell writes
    else:
        note = NOTE_BOM if data.startswith(codecs.BOM_UTF8) else None
        readings = [("utf-8-sig", note), ("cp1252", NOTE_CP1252)]
    for encoding, remark in readings:
        try:
            return data.decode(encoding), remark
        except UnicodeDecodeError:
            continue
    raise _not_text(path)


def _not_text(path: Path) -> DatasetError:
    return DatasetError(f"{path.name} is not text", "save the caption as plain text in UTF-8")


def _targets(folder: Path, edits: Mapping[str, str | None]) -> dict[Path, tuple[str, str | None]]:
    """Caption file -> (image name, text). The file names come from a form, so they must not leave the folder."""
    targets: dict[Path, tuple[str, str | None]] = {}
    listed: dict[Path, dict[str, Path]] = {}
    for name, text in edits.items():
        relative = Path(name)
        if not relative.name or "\0" in name or relative.anchor or ".." in relative.parts:
            raise DatasetError(f"{name!r} is not the name of an image in the data set", "give a name relative to it")
        image = folder / relative
        if image.parent not in listed:
            listed[image.parent] = _caption_files(image.parent)
        path = listed[image.parent].get(same_stem(image.stem), caption_path(image))
        if path in targets:
            raise DatasetError(
                f"{targets[path][0]} and {name} share the caption file {path.name}", "edit one of them, or rename one"
            )
        targets[path] = (name, text)
    return targets


def _caption_files(folder: Path) -> dict[str, Path]:
    """Existing caption files by normalised stem; 'a.txt' goes before 'a.TXT'."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".txt")
    except OSError:
        return {}
    return {same_stem(path.stem): path for path in files}


def _stored(path: Path) -> str | None:
    """The bytes of a file for the journal; None when there is no such file."""
    try:
        return _encoded(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot_write(path, error) from error


def _file_bytes(text: str) -> bytes:
    return (text.strip() + "\n").encode("utf-8")


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _replace(path: Path, data: bytes) -> None:
    """Write to a hidden temporary name, then rename: a reader sees the old or the new file, never half of one."""
    temporary = path.with_name(f".safelight-{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> WorkspaceError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = f"make {path.parent} writable, or copy the data set to a place that is"
    return WorkspaceError(
        f"cannot write {path.name}: {error.strerror or error}", "free some space on the disk" if full else hint
    )
