"""The files of a data set folder, sorted by what they are for. Images are not opened here beyond their first bytes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..errors import Problem
from .captions import same_stem
from .pixels import sniff

ENDINGS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "MPO": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k"),
    "PPM": (".ppm", ".pgm", ".pnm"),
}
"""The usual endings of the formats that can be read."""

# Files with these endings are meant as images; when they cannot be read, that is said and not passed over.
IMAGE_ENDINGS = frozenset(ending for endings in ENDINGS.values() for ending in endings) | {
    *(".heic", ".heif", ".svg", ".psd", ".jxl", ".tga", ".exr", ".hdr"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf"),
}
_MASK = ".mask.png"
_RESERVED = (".mask", ".cond")  # stems of masks and of the condition pictures of ControlNet data sets
# The other signatures are too short to claim a file whose name does not say that it is an image.
_TELLING = frozenset({"JPEG", "PNG", "WEBP", "GIF", "AVIF"})

Key = tuple[str, str]
"""(folder relative to the root, stem): what an image shares with its caption and its mask."""


@dataclass
class Listing:
    """Names are relative to the root and use '/'. `ignored` counts other files by their endings."""

    root: Path
    images: list[str] = field(default_factory=list)
    captions: dict[Key, str] = field(default_factory=dict)
    masks: dict[Key, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.root / name


def list_files(root: Path, *, recursive: bool) -> Listing:
    """Walk the folder in a fixed order. Hidden files and folders are passed over.

    Linked folders are followed after all real ones and each real folder is read once, so links in a circle end.
    """
    listing = Listing(root)
    pending, links, visited = [""], list[str](), set[tuple[int, int]]()
    while pending or links:
        folder = pending.pop() if pending else links.pop(0)
        try:
            identity = os.stat(root / folder)
            if (identity.st_dev, identity.st_ino) in visited:
                listing.notes.append(Problem(folder, "links to a folder that is read already; not read twice"))
                continue
            visited.add((identity.st_dev, identity.st_ino))
            with os.scandir(root / folder) as entries:
                ordered = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            reason = f"folder cannot be read: {error.strerror or error}"
            listing.problems.append(Problem(printable(folder) or str(root), reason, "check its permissions"))
            continue
        if folder:
            listing.folders.append(folder)
        below: list[str] = []
        for entry in ordered:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not _is_folder(entry):
                _sort_in(listing, name)
            elif not recursive:
                listing.ignored["sub-folders"] += 1
            else:
                (links if entry.is_symlink() else below).append(name)
                if PurePosixPath(name).suffix.lower() in IMAGE_ENDINGS:
                    listing.notes.append(Problem(printable(name), "is a folder, although it is named like an image"))
        pending += reversed(below)
    listing.images.sort()
    return listing


def key(name: str) -> Key:
    """What an image's caption is found by."""
    path = PurePosixPath(name)
    return path.parent.as_posix(), same_stem(path.stem)


def printable(name: str) -> str:
    """The name with what is no text written as an escape, so that it can be shown and stored."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for instance a link to itself; opening it later gives the reason
        return False


def _sort_in(listing: Listing, name: str) -> None:
    suffix = PurePosixPath(name).suffix.lower()
    if name.lower().endswith(_MASK):
        listing.masks[key(name[: -len(_MASK)] + ".png")] = name
    elif suffix in IMAGE_ENDINGS and PurePosixPath(name).stem.lower().endswith(_RESERVED):
        if suffix != ".png":
            listing.notes.append(Problem(printable(name), "is named like a mask, but only PNG masks are read; ignored"))
    elif suffix == ".txt":
        if name.endswith(".txt") or key(name) not in listing.captions:  # 'a.txt' comes before 'a.TXT'
            listing.captions[key(name)] = name
    elif suffix in IMAGE_ENDINGS or _looks_like_image(listing.path(name)):
        listing.images.append(name)
    else:
        listing.ignored[suffix or "files without ending"] += 1


def _looks_like_image(path: Path) -> bool:
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            return False
        with path.open("rb") as file:
            return sniff(file.read(64)) in _TELLING
    except OSError:
        return False
