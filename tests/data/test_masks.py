"""Masks lie on the latents exactly where they lie on the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.data.buckets import plan
from engine.data.items import Item, Placement
from engine.data.manifest import load_image, scan
from engine.data.masks import load_mask
from engine.data.pixels import crop_and_resize, to_tensor
from engine.errors import DatasetError
from engine.settings import schema


def placed(folder: Path, **settings: Any) -> tuple[Item, Placement, schema.Dataset]:
    dataset = schema.Dataset(folder=str(folder), missing_captions="empty", **settings)
    manifest = scan(dataset, 16)
    (item,) = manifest.items
    (place,) = plan([item], schema.Buckets(), native_resolution=48, multiple=8, batch_size=1).placements
    return item, place, dataset


def half(size: tuple[int, int]) -> np.ndarray:
    """White on the right half of (height, width), black on the left."""
    values = np.zeros(size, np.uint8)
    values[:, size[1] // 2 :] = 255
    return values


def test_without_masks_everything_counts(tmp_path: Path) -> None:
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    mask = load_mask(*placed(tmp_path), (6, 6))
    assert mask.shape == (1, 6, 6) and mask.dtype == torch.float32 and bool((mask == 1).all())


def test_a_mask_file_is_averaged_over_the_area_of_each_latent(tmp_path: Path) -> None:
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    values = np.zeros((48, 48), np.uint8)
    values[:, 20:] = 255  # latent column 2 covers px 16 to 23, half of them white
    Image.fromarray(values).save(tmp_path / "a.mask.png")
    mask = load_mask(*placed(tmp_path, masks="file"), (6, 6))
    assert mask[0, 3].tolist() == [0, 0, 0.5, 1, 1, 1]


def test_the_mask_gets_the_same_crop_as_the_image(tmp_path: Path) -> None:
    """An image that shows its own mask: both must agree after resizing, cropping and turning upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    values = half((90, 260))
    values[:20, :200] = 255
    Image.fromarray(values).convert("RGB").save(tmp_path / "a.png", exif=exif)
    Image.fromarray(values).save(tmp_path / "a.mask.png", exif=exif)
    item, place, dataset = placed(tmp_path, masks="file")
    assert place.crop_loss > 0.2
    mask = load_mask(item, place, dataset, (place.bucket[0] // 8, place.bucket[1] // 8))
    shown = to_tensor(crop_and_resize(load_image(item, "#ffffff"), place)).mean(0, keepdim=True) / 2 + 0.5
    expected = torch.nn.functional.avg_pool2d(shown, 8)
    assert mask.shape == expected.shape
    torch.testing.assert_close(mask, expected, atol=0.03, rtol=0)  # Lanczos against bilinear at the edges


def test_transparency_can_be_the_mask(tmp_path: Path) -> None:
    rgba = np.full((48, 48, 4), 200, np.uint8)
    rgba[..., 3] = half((48, 48))
    Image.fromarray(rgba).save(tmp_path / "a.png")
    item, place, dataset = placed(tmp_path, masks="alpha")
    assert load_mask(item, place, dataset, (6, 6))[0, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_an_opaque_image_counts_everywhere_when_transparency_is_the_mask(tmp_path: Path) -> None:
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    item, place, dataset = placed(tmp_path, masks="alpha")
    assert bool((load_mask(item, place, dataset, (6, 6)) == 1).all())


def test_weights_stay_between_zero_and_one_and_white_stays_one(tmp_path: Path) -> None:
    Image.new("RGB", (131, 77)).save(tmp_path / "a.png")
    noise = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (77, 131))
    Image.fromarray(noise).save(tmp_path / "a.mask.png")
    mask = load_mask(*placed(tmp_path, masks="file"), (4, 8))
    assert float(mask.min()) >= 0 and float(mask.max()) <= 1
    Image.new("L", (131, 77), 255).save(tmp_path / "a.mask.png")
    assert bool((load_mask(*placed(tmp_path, masks="file"), (4, 8)) == 1).all())


def test_a_mask_that_disappears_after_the_scan_is_named(tmp_path: Path) -> None:
    Image.new("RGB", (48, 48)).save(tmp_path / "a.png")
    Image.new("L", (48, 48), 255).save(tmp_path / "a.mask.png")
    found = placed(tmp_path, masks="file")
    (tmp_path / "a.mask.png").unlink()
    with pytest.raises(DatasetError, match=r"the mask of a\.png cannot be opened"):
        load_mask(*found, (6, 6))
