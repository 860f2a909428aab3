"""What is in a data set: every image with its size, hash and caption, and everything that is wrong with it."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from PIL import Image

from ..errors import DatasetError, Problem
from ..settings import schema
from . import captions
from .items import Item, Size
from .listing import ENDINGS, Key, Listing, key, list_files, printable
from .pixels import Decoded, ImageFault, decode

LONG_CAPTION = 2000
"""Characters above which a caption is remarked on: about the 512 tokens that the longest text encoders read."""


@dataclass(frozen=True)
class Manifest:
    """A data set as it was found, sorted by name.

    `problems` stop training, `notes` are decisions that were taken and are reported, `left_out` are images that are
    not trained because `dataset.bad_images` says so. `formats` counts the usable images by what they really are.
    """

    folder: Path
    items: tuple[Item, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    left_out: tuple[Problem, ...]
    formats: Mapping[str, int] = field(default_factory=dict)

    @property
    def captioned(self) -> int:
        """Number of images whose caption is not empty."""
        return sum(bool(item.caption) for item in self.items)

    @property
    def sizes(self) -> Mapping[Size, int]:
        """Number of images of each size, the most frequent first."""
        return dict(Counter(item.size for item in self.items).most_common())

    @property
    def samples_per_epoch(self) -> int:
        """Images times repeats, at one resolution and without mirroring."""
        return sum(item.repeats for item in self.items)


def scan(dataset: schema.Dataset, min_side: int, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Decode every image in the folder completely, read its caption and mask, and report everything that is wrong.

    `min_side` is the shortest side in px an image may have. `progress(done, total)` is called after each image. Nothing
    is written. A bad file never raises. Raises DatasetError when the folder cannot be read or holds no images at all.
    """
    folder = _folder(dataset.folder)
    listing = list_files(folder, recursive=dataset.recursive)
    if not listing.images:
        raise _no_images(listing)
    findings = _Findings(problems=list(listing.problems), notes=list(listing.notes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd files; what matters is in the notes
        for done, name in enumerate(listing.images, start=1):
            _examine(name, listing, dataset, min_side, findings)
            if progress:
                progress(done, len(listing.images))
    _review_folder(listing, dataset, findings)
    return Manifest(
        folder,
        tuple(findings.items),
        tuple(findings.problems),
        tuple(findings.notes),
        tuple(findings.left_out),
        dict(findings.formats.most_common()),
    )


def require_usable(manifest: Manifest) -> None:
    """Raises one DatasetError with all problems when there are any, or when no image is left."""
    if manifest.problems:
        count = len(manifest.problems)
        raise DatasetError(
            f"the data set {manifest.folder} has {count} problem{'s' if count > 1 else ''}",
            "repair them; dataset.bad_images = 'skip' leaves bad images out, dataset.missing_captions says what to do "
            "without captions",
            problems=manifest.problems,
        )
    if not manifest.items:
        raise DatasetError(
            f"no image in {manifest.folder} can be used", "replace or repair them", problems=manifest.left_out
        )


def load_image(item: Item, background: str) -> Image.Image:
    """The image, upright, as 8-bit RGB; `background` (#rrggbb) shows through transparent pixels.

    Raises DatasetError naming the file when it cannot be decoded, or no longer has the size it was scanned with.
    """
    image = decode_item(item, background).image
    if image.size != (item.size[1], item.size[0]):
        raise DatasetError(f"{item.name} was changed since it was scanned", "start again, so that it is scanned anew")
    return image


def decode_item(item: Item, background: str) -> Decoded:
    """As `load_image`, with the transparency. Raises DatasetError naming the file."""
    try:
        return decode(item.path, background)
    except ImageFault as fault:
        raise DatasetError(f"{item.name} {fault.reason}", fault.remedy) from fault


@dataclass
class _Findings:
    """What a scan has gathered so far."""

    items: list[Item] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    left_out: list[Problem] = field(default_factory=list)
    formats: Counter[str] = field(default_factory=Counter)
    transparent: int = 0  # number of images with transparent parts
    by_content: dict[str, str] = field(default_factory=dict)
    by_key: dict[Key, str] = field(default_factory=dict)


def _examine(name: str, listing: Listing, dataset: schema.Dataset, min_side: int, findings: _Findings) -> None:
    """Add one image to the findings: as an item, or as a problem or left out."""
    path, shown, notes = listing.path(name), printable(name), list[str]()
    try:
        if shown != name:
            raise ImageFault("has a name that is not UTF-8", "rename it")
        decoded = _decode_checked(path, dataset, min_side)
        content_hash = _sha256(path)
        caption = _caption(name, listing, dataset, findings, notes)
        mask_path = _mask(name, decoded, listing) if dataset.masks == "file" else None
        mask_hash = _sha256(mask_path) if mask_path else None
    except ImageFault as fault:
        skipped = dataset.bad_images == "skip"
        (findings.left_out if skipped else findings.problems).append(Problem(shown, fault.reason, fault.remedy))
        return
    notes = [*decoded.notes, *notes]
    if path.suffix.lower() not in ENDINGS.get(decoded.format, ()):
        notes.insert(0, f"is a {decoded.format} file, whatever its name says; read as that")
    twin = findings.by_content.setdefault(content_hash, name)
    if twin != name:
        notes.append(f"is the same file as {twin}; both are trained")
    sharer = findings.by_key.setdefault(key(name), name)
    if sharer != name:
        notes.append(f"shares its caption file with {sharer}, because only their endings differ")
    findings.notes += [Problem(shown, note) for note in notes]
    findings.formats[decoded.format] += 1
    findings.transparent += decoded.alpha is not None
    size = (decoded.image.height, decoded.image.width)
    repeats = _repeats(name, dataset)
    findings.items.append(Item(path, name, size, content_hash, caption, mask_path, mask_hash, repeats))


def _decode_checked(path: Path, dataset: schema.Dataset, min_side: int) -> Decoded:
    try:
        status = path.stat()
    except OSError as error:  # a link to nothing or to itself
        raise ImageFault(f"cannot be opened: {error.strerror or error}", "check where the link leads") from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageFault("is not a file", "remove it from the folder")
    if status.st_size == 0:
        raise ImageFault("is empty (0 bytes)", "download or export the image again")
    decoded = decode(path, dataset.background)
    width, height = decoded.image.size
    if min(width, height) < min_side:
        raise ImageFault(
            f"is {width}x{height} px; the shorter side must have at least {min_side} px",
            "replace it by a larger one, or lower buckets.min_side",
        )
    if dataset.masks == "alpha" and decoded.alpha is not None and decoded.alpha.getextrema()[1] == 0:
        raise ImageFault("is transparent everywhere, so nothing of it would be trained", "repair its transparency")
    return decoded


def _caption(name: str, listing: Listing, dataset: schema.Dataset, findings: _Findings, notes: list[str]) -> str:
    """The caption, or what `dataset.missing_captions` says. Raises ImageFault when the file cannot be read."""
    file = listing.captions.get(key(name))
    text = ""
    if file is not None:
        try:
            read = captions.read(listing.path(file))
        except DatasetError as error:
            raise ImageFault(f"has a bad caption: {error.message}", error.hint) from error
        except OSError as error:
            raise ImageFault(
                f"has a caption that cannot be opened: {error.strerror or error}", "check its permissions"
            ) from error
        text = read.text
        notes += [read.note] if read.note else []
    if len(text) > LONG_CAPTION:
        notes.append(f"caption is very long ({len(text)} characters); text encoders read only its beginning")
    if text:
        return text
    missing = f"caption file {file} is empty" if file else "has no caption"
    stem = PurePosixPath(name).stem
    match dataset.missing_captions:
        case "error":
            remedy = f"write {stem}.txt, run a captioner, or set dataset.missing_captions to 'empty' or 'file_name'"
            findings.problems.append(Problem(name, missing, remedy))
            return ""
        case "empty":
            notes.append(f"{missing}; trained with an empty one")
            return ""
        case "file_name":
            notes.append(f"{missing}; its file name is used")
            return stem.replace("_", " ").strip()


def _mask(name: str, decoded: Decoded, listing: Listing) -> Path:
    """The image's mask file. Raises ImageFault when it is missing, unreadable, of another size or all black."""
    file = listing.masks.get(key(name))
    stem = PurePosixPath(name).stem
    if file is None:
        raise ImageFault(f"has no mask {stem}.mask.png", "draw one, or set dataset.masks = 'none'")
    path = listing.path(file)
    try:
        mask = decode(path, "#000000").image.convert("L")
    except ImageFault as fault:
        raise ImageFault(f"has a bad mask: {file} {fault.reason}", fault.remedy) from fault
    if mask.size != decoded.image.size:
        sizes = "{}x{} px, the image {}x{} px".format(*mask.size, *decoded.image.size)
        raise ImageFault(f"has a mask of another size: {sizes}", "save the mask in the size of the upright image")
    if mask.getextrema()[1] == 0:
        raise ImageFault("has a mask that is black everywhere, so nothing of it would be trained", "repair the mask")
    return path


def _repeats(name: str, dataset: schema.Dataset) -> int:
    """Of the nearest folder that `folder_repeats` names, by its name or its path relative to the data set."""
    for parent in PurePosixPath(name).parents:
        for folder in (parent.as_posix(), parent.name):
            if folder in dataset.folder_repeats:
                return dataset.folder_repeats[folder]
    return dataset.repeats


def _review_folder(listing: Listing, dataset: schema.Dataset, findings: _Findings) -> None:
    """Findings about the folder as a whole: settings without effect, files without an image, other files."""
    known = {*listing.folders, *(PurePosixPath(folder).name for folder in listing.folders)}
    for folder in sorted(set(dataset.folder_repeats) - known):
        findings.problems.append(
            Problem("dataset.folder_repeats", f"there is no sub-folder {folder!r}", "correct or remove the entry")
        )
    for folder in listing.folders:
        last = PurePosixPath(folder).name
        if re.match(r"\d+_", last) and not {folder, last} & set(dataset.folder_repeats):
            reason = "its name looks like 'repeats_subject' of other trainers, which has no meaning here"
            findings.notes.append(Problem(printable(folder), reason, "set dataset.folder_repeats"))
    keys = {key(name) for name in listing.images}
    for owner, file in sorted(listing.captions.items()):
        if owner not in keys:
            findings.notes.append(Problem(printable(file), "is a text file without an image; ignored"))
    for owner, file in sorted(listing.masks.items()):
        if owner not in keys:
            findings.notes.append(Problem(printable(file), "is a mask without an image; ignored"))
    if listing.masks and dataset.masks != "file":
        reason = f"{len(listing.masks)} mask files are there but not used"
        findings.notes.append(Problem("dataset.masks", reason, "set dataset.masks = 'file'"))
    if dataset.masks == "alpha" and not findings.transparent:
        reason = "is 'alpha', but no image has transparent parts; the loss counts everywhere"
        findings.notes.append(Problem("dataset.masks", reason, "save the images with transparency, or use mask files"))
    if listing.ignored:
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(listing.ignored.items()))
        findings.notes.append(Problem(str(listing.root), f"ignored: {printable(counts)}"))


def _folder(text: str) -> Path:
    try:
        folder = Path(text).expanduser().absolute()
        exists, is_folder = folder.exists(), folder.is_dir()
        if is_folder:
            os.scandir(folder).close()
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a NUL in the name, no home folder
        raise DatasetError(f"the data set folder {text!r} cannot be read: {error}", "check its permissions") from error
    if not exists:
        raise DatasetError(f"the data set folder {text!r} does not exist", "check dataset.folder for a misspelling")
    if not is_folder:
        raise DatasetError(f"{text!r} is a file, not a folder", "give the folder that the images are in")
    return folder


def _no_images(listing: Listing) -> DatasetError:
    found = dict(listing.ignored)
    if listing.captions:
        found[".txt"] = len(listing.captions)
    counts = ", ".join(f"{count} {ending}" for ending, count in sorted(found.items()))
    hint = "put PNG, JPEG or WebP images there"
    if "sub-folders" in found:
        hint += ", or set dataset.recursive = true to take those in sub-folders"
    return DatasetError(
        f"there are no images in {listing.root}" + (f"; found {printable(counts)}" if counts else "; it is empty"),
        hint,
        problems=listing.problems,
    )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ImageFault(f"cannot be read: {error.strerror or error}", "check the disk") from error
