"""From an image file to upright RGB pixels, and from those to the pixels of a bucket."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms, ImageFile, UnidentifiedImageError

from .items import Item, Placement

if TYPE_CHECKING:
    from torch import Tensor

PIXELS_VERSION = 1
"""Part of every cache key that depends on pixels. Raise it when a change here changes any pixel value."""

MAX_PIXELS = 178_000_000
"""Larger images are refused. Pillow refuses from 178.96 million on its own account."""

# Only decoders that are part of Pillow and run no other program (its EPS decoder starts Ghostscript).
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM")

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112

NOTE_ROTATED = "turned upright as its EXIF data says"
NOTE_BAD_EXIF = "its EXIF data cannot be read; taken as upright"
NOTE_CMYK = "CMYK colours converted to RGB"
NOTE_16_BIT = "16 bits per channel reduced to 8"
NOTE_FRAMES = "has several frames or pages; the first is used"
NOTE_PROFILE = "colours converted from its own profile to sRGB"
NOTE_BAD_PROFILE = "its colour profile cannot be used; taken as sRGB"
NOTE_TRANSPARENT = "transparent parts show the background colour"


class ImageFault(Exception):
    """Why a file cannot be used as an image, and what to do about it. Raised by `decode` only."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class Decoded:
    """`image` is upright RGB; `alpha` (mode L, same size) is None when every pixel is opaque.

    `format` is what the content is, whatever the file is called; `notes` are the decisions taken.
    """

    image: Image.Image
    alpha: Image.Image | None
    format: str
    notes: tuple[str, ...]


def decode(path: Path, background: str) -> Decoded:
    """Decode the whole file. `background` (#rrggbb) shows through transparent pixels.

    Raises ImageFault for everything that is wrong with the file.
    """
    try:
        with _no_truncated_images(), Image.open(path, formats=_formats()) as source:
            return _develop(source, background)
    except ImageFault:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large() from error
    except UnidentifiedImageError as error:
        raise _unidentified(path) from error
    except (FileNotFoundError, PermissionError) as error:
        raise ImageFault(f"cannot be opened: {error.strerror}", "check that it exists and may be read") from error
    except Exception as error:  # from OSError to struct.error, decoders raise nearly anything
        raise ImageFault(f"is damaged or cut short ({error})", "export or download the image again") from error


def crop_and_resize(image: Image.Image, placement: Placement) -> Image.Image:
    """The pixels of the placement's bucket, resized with a Lanczos filter and cropped. Not mirrored."""
    height, width = placement.resized
    resized = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.LANCZOS)
    return crop(resized, placement)


def crop(resized: Image.Image, placement: Placement) -> Image.Image:
    """Cut the bucket out of an image that already has the size `placement.resized`."""
    bottom, right = placement.top + placement.bucket[0], placement.left + placement.bucket[1]
    return resized.crop((placement.left, placement.top, right, bottom))


def to_tensor(image: Image.Image) -> Tensor:
    """An RGB image as float32 (3, H, W) in [-1, 1]."""
    import torch

    pixels = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.uint8))
    return pixels.permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0).contiguous()


def pixel_facts(item: Item, placement: Placement, *, flipped: bool, background: str) -> dict[str, object]:
    """Everything that decides the pixels of a sample, for `cache.fingerprint`."""
    return {
        "pixels_version": PIXELS_VERSION,
        "content": item.content_hash,
        "resized": placement.resized,
        "bucket": placement.bucket,
        "corner": (placement.top, placement.left),
        "flipped": flipped,
        "background": background.lower(),
    }


@contextmanager
def _no_truncated_images() -> Iterator[None]:
    """Other libraries switch this Pillow global on; a half-grey picture must be an error here."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _formats() -> list[str]:
    """The formats that this build of Pillow has; AVIF came with 11.3 and is optional."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _develop(source: ImageFile.ImageFile, background: str) -> Decoded:
    if source.width * source.height > MAX_PIXELS:
        raise _too_large()
    notes: list[str] = []
    # An MPO is a photograph with a preview or a depth picture behind it, not an animation.
    if source.format != "MPO" and getattr(source, "is_animated", False):
        notes.append(NOTE_FRAMES)
        source.seek(0)
    # Raw modes such as 'RGB;16B': Pillow keeps the high byte. 'BGR;16' is 5-6-5 colour and not meant.
    if source.mode.startswith("I") or re.search(r";16[BLN]", str(source.tile)):
        notes.append(NOTE_16_BIT)
    if source.mode == "CMYK":
        notes.append(NOTE_CMYK)
    # Pillow turns TIFF files itself while it loads them. Others are not asked before loading: for a PNG, getexif()
    # loads, and an error in the pixels would pass for one in the EXIF data.
    turned = source.format == "TIFF" and _orientation(source, []) in _UPRIGHT
    source.load()
    turn = _UPRIGHT.get(_orientation(source, notes))
    image, alpha = _to_rgb(source, background, notes)
    if turned or turn is not None:
        notes.append(NOTE_ROTATED)
    if turn is not None:
        image = image.transpose(turn)
        alpha = alpha.transpose(turn) if alpha is not None else None
    return Decoded(image, alpha, source.format or "unknown", tuple(notes))


def _orientation(source: Image.Image, notes: list[str]) -> int:
    try:
        return int(source.getexif().get(_ORIENTATION, 1))
    except Exception:  # as many kinds as there are ways to break a TIFF directory
        notes.append(NOTE_BAD_EXIF)
        return 1


def _to_rgb(source: ImageFile.ImageFile, background: str, notes: list[str]) -> tuple[Image.Image, Image.Image | None]:
    """sRGB with transparency composited, and the alpha channel unless it is opaque everywhere."""
    image: Image.Image = source
    alpha: Image.Image | None = None
    if image.mode.startswith("I"):
        image = _grey_from_16_bit(source)
    elif image.mode == "F":
        raise _no_white()
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image, alpha = rgba.convert("RGB"), rgba.getchannel("A")
        if alpha.getextrema()[0] == 255:
            alpha = None
    image = _to_srgb(image, source.info.get("icc_profile"), notes).convert("RGB")
    if alpha is not None:
        notes.append(NOTE_TRANSPARENT)
        image = Image.composite(image, Image.new("RGB", image.size, background), alpha)
    return image, alpha


def _to_srgb(image: Image.Image, profile: bytes | None, notes: list[str]) -> Image.Image:
    """Colours as an embedded profile means them: phones save Display P3, which looks dull when read as sRGB."""
    if not profile or image.mode not in ("RGB", "CMYK"):
        return image
    try:
        given = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if given.profile.xcolor_space.strip() != image.mode or "srgb" in ImageCms.getProfileDescription(given).lower():
            return image
        converted = ImageCms.profileToProfile(image, given, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError, ImportError):
        notes.append(NOTE_BAD_PROFILE)
        return image
    notes.append(NOTE_PROFILE)
    return converted or image


def _grey_from_16_bit(source: ImageFile.ImageFile) -> Image.Image:
    """65535 becomes 255. Pillow's own conversion clips everything above 255 to white."""
    # Older Pillow opens 16-bit PNG as 'I' as well; in a TIFF that mode means 32 bits.
    if source.mode == "I" and source.format not in ("PNG", "PPM"):
        raise _no_white()
    values = np.asarray(source).astype(np.int64)
    grey = Image.fromarray(((values + 128) // 257).clip(0, 255).astype(np.uint8))
    transparent = source.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return grey


def _too_large() -> ImageFault:
    return ImageFault(
        f"has more than {MAX_PIXELS // 1_000_000} million pixels",
        "scale it down; no base needs more than a few million",
    )


def _no_white() -> ImageFault:
    return ImageFault(
        "has 32-bit or floating-point pixels, which do not say what white is", "save it with 8 or 16 bits per channel"
    )


def _unidentified(path: Path) -> ImageFault:
    """Say what the file is instead, as far as its first bytes tell."""
    with path.open("rb") as file:
        head = file.read(64)
    kind = sniff(head)
    if kind is None:
        return ImageFault("is not an image, whatever its name says", "replace it by a PNG, JPEG or WebP file")
    if kind in _FORMATS:
        return ImageFault(f"begins like {kind} but cannot be decoded", "export or download the image again")
    return ImageFault(f"is {kind}, which cannot be read", "convert it to PNG, JPEG or WebP")


def sniff(head: bytes) -> str | None:
    """What the first 64 bytes of a file say it is: a Pillow format name, words for what cannot be read, or None."""
    if head[4:8] == b"ftyp":
        return "AVIF" if head[8:12] in (b"avif", b"avis") else "an HEIC picture or a video"
    if head[:4] == b"RIFF":
        return "WEBP" if head[8:12] == b"WEBP" else None
    text = head.lstrip().lower()
    signatures = {
        b"\xff\xd8\xff": "JPEG",
        b"\x89PNG\r\n\x1a\n": "PNG",
        b"GIF8": "GIF",
        b"BM": "BMP",
        b"II*\0": "TIFF",
        b"MM\0*": "TIFF",
        b"\0\0\0\x0cjP  ": "JPEG2000",
        b"8BPS": "a Photoshop file",
        b"%PDF": "a PDF",
    }
    for magic, kind in signatures.items():
        if head.startswith(magic):
            return kind
    if text.startswith((b"<!doctype html", b"<html")):
        return "a web page"
    return "an SVG drawing" if text.startswith((b"<svg", b"<?xml")) else None
