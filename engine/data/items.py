"""One image of a data set, and how it becomes pixels of a bucket. Sizes are (height, width) in px."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Size = tuple[int, int]


@dataclass(frozen=True)
class Item:
    """One usable image.

    `name` is its path relative to the folder, with '/'; `size` is (height, width) in px after EXIF orientation; hashes
    are the sha256, in hex, of the files' bytes; `caption` is without the trigger words.
    """

    path: Path
    name: str
    size: Size
    content_hash: str
    caption: str
    mask_path: Path | None
    mask_hash: str | None
    repeats: int


@dataclass(frozen=True)
class Placement:
    """How one image becomes the pixels of one bucket: resize to `resized`, then cut `bucket` out at (`top`, `left`).

    `item` is the image's position in `Manifest.items`. `crop_loss` is the share of the resized area that is cut away,
    `scale` the factor on the image's sides (above 1 enlarges).
    """

    item: int
    bucket: Size
    resized: Size
    top: int
    left: int
    crop_loss: float
    scale: float
