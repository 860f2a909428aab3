"""From files to pixels: upright, in the right colours, resized and cropped as planned."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from engine.data import pixels
from engine.data.buckets import plan
from engine.data.items import Item, Placement
from engine.data.pixels import ImageFault, crop_and_resize, decode, pixel_facts, to_tensor
from engine.settings import schema

# Exif 2.32, table of tag 0x0112: where the stored first row and first column are in the picture as seen.
FIRST_ROW_AND_COLUMN = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def as_seen(stored: np.ndarray, orientation: int) -> np.ndarray:
    """Pixel by pixel from the words of the standard, independently of Pillow's transpositions."""
    rows, columns = stored.shape[:2]
    first_row, first_column = FIRST_ROW_AND_COLUMN[orientation]
    swapped = first_row in ("left", "right")
    seen = np.zeros((columns, rows, 3) if swapped else (rows, columns, 3), stored.dtype)
    height, width = seen.shape[:2]
    for row in range(rows):
        for column in range(columns):
            place = {}
            for side, number in ((first_row, row), (first_column, column)):
                axis = "y" if side in ("top", "bottom") else "x"
                last = (height if axis == "y" else width) - 1
                place[axis] = number if side in ("top", "left") else last - number
            seen[place["y"], place["x"]] = stored[row, column]
    return seen


@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_turned_upright(tmp_path: Path, orientation: int, ending: str) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    Image.fromarray(stored).save(path, exif=exif, lossless=True)  # lossless: for WebP
    decoded = decode(path, "#ffffff")
    np.testing.assert_array_equal(np.asarray(decoded.image), as_seen(stored, orientation))
    assert (pixels.NOTE_ROTATED in decoded.notes) == (orientation != 1)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_taken_as_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (5, 3)).save(tmp_path / "a.jpg", exif=exif)
    assert decode(tmp_path / "a.jpg", "#ffffff").image.size == (5, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_exif_data_do_not_make_an_image_unusable(tmp_path: Path) -> None:
    # One entry: tag 0x0112, of type text instead of a number.
    word = b"Exif\0\0II*\0" + struct.pack("<IHHHI4sI", 8, 1, 0x0112, 2, 3, b"up\0\0", 0)
    for name, exif in (("word.jpg", word), ("junk.jpg", b"Exif\0\0II*\0 no TIFF directory")):
        Image.new("RGB", (5, 3), "red").save(tmp_path / name, exif=exif)
        assert decode(tmp_path / name, "#ffffff").image.size == (5, 3)
    assert decode(tmp_path / "word.jpg", "#ffffff").notes == (pixels.NOTE_BAD_EXIF,)


def test_sixteen_bits_keep_their_brightness(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    Image.fromarray(values).save(tmp_path / "a.tif")
    for name in ("a.png", "a.tif"):
        decoded = decode(tmp_path / name, "#ffffff")
        assert np.asarray(decoded.image)[0, :, 0].tolist() == [0, 1, 128, 255]
        assert decoded.notes == (pixels.NOTE_16_BIT,)


def test_sixteen_bits_per_colour_are_reduced(tmp_path: Path) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + struct.pack(">3H", 65535, 32768, 0) * 2
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b""))
    decoded = decode(path, "#ffffff")
    assert decoded.image.getpixel((0, 0)) == (255, 128, 0)
    assert decoded.notes == (pixels.NOTE_16_BIT,)


@pytest.mark.parametrize("name", ["a.jpg", "a.tif"])
def test_cmyk_becomes_rgb(tmp_path: Path, name: str) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / name)
    decoded = decode(tmp_path / name, "#ffffff")
    assert decoded.image.mode == "RGB" and decoded.image.getpixel((8, 8)) == (255, 0, 0)
    assert decoded.notes == (pixels.NOTE_CMYK,)


def transparent_images() -> dict[str, Image.Image]:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([255, 255, 255, 9, 8, 7])
    palette.info["transparency"] = 1
    return {
        "RGBA": Image.new("RGBA", (4, 4), (9, 8, 7, 0)),
        "LA": Image.new("LA", (4, 4), (9, 0)),
        "P": palette,
    }


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_the_background_shows_where_an_image_is_transparent(tmp_path: Path, mode: str) -> None:
    """Not the colour that lies hidden under the transparency, and not black."""
    transparent_images()[mode].save(tmp_path / "a.png")
    decoded = decode(tmp_path / "a.png", "#20c0ff")
    assert decoded.image.getpixel((1, 1)) == (0x20, 0xC0, 0xFF)
    assert decoded.alpha is not None and decoded.alpha.getextrema() == (0, 0)
    assert decoded.notes == (pixels.NOTE_TRANSPARENT,)


def test_half_transparency_mixes_and_an_opaque_alpha_channel_changes_nothing(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 0, 255, 51)).save(tmp_path / "fifth.png")
    Image.new("RGBA", (4, 4), (0, 0, 255, 255)).save(tmp_path / "opaque.png")
    assert decode(tmp_path / "fifth.png", "#ff0000").image.getpixel((0, 0)) == (204, 0, 51)
    opaque = decode(tmp_path / "opaque.png", "#ff0000")
    assert opaque.image.getpixel((0, 0)) == (0, 0, 255) and opaque.alpha is None and opaque.notes == ()


@pytest.mark.parametrize("ending", ["gif", "png", "webp", "tif"])
def test_the_first_frame_of_an_animation_is_used(tmp_path: Path, ending: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("#000000", "#ffffff", "#808080")]
    frames[0].save(tmp_path / f"a.{ending}", save_all=True, append_images=frames[1:])
    decoded = decode(tmp_path / f"a.{ending}", "#ffffff")
    assert decoded.image.getpixel((8, 8)) == (0, 0, 0)
    assert decoded.notes == (pixels.NOTE_FRAMES,)


def swapped_profile() -> bytes:
    """An sRGB profile whose red and green are exchanged, so that a conversion is easy to see."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = data.replace(b"rXYZ", b"tmp ", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"tmp ", b"gXYZ", 1)
    return data.replace("sRGB".encode("utf-16-be"), "swap".encode("utf-16-be"))


def test_colours_are_what_the_embedded_profile_says(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4), (255, 0, 0)).save(tmp_path / "a.png", icc_profile=swapped_profile())
    decoded = decode(tmp_path / "a.png", "#ffffff")
    assert decoded.image.getpixel((0, 0)) == pytest.approx((0, 255, 0), abs=2)
    assert decoded.notes == (pixels.NOTE_PROFILE,)


def test_an_srgb_profile_changes_no_pixel_and_a_broken_one_is_noted(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, profile, notes in (("srgb.png", srgb, ()), ("bad.png", b"junk", (pixels.NOTE_BAD_PROFILE,))):
        noise.save(tmp_path / name, icc_profile=profile)
        decoded = decode(tmp_path / name, "#ffffff")
        np.testing.assert_array_equal(np.asarray(decoded.image), np.asarray(noise))
        assert decoded.notes == notes


def test_decoders_that_run_other_programs_are_not_used(tmp_path: Path) -> None:
    """Pillow would hand an EPS file to Ghostscript."""
    Image.new("RGB", (16, 16)).save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(ImageFault, match="is not an image"):
        decode(tmp_path / "a.png", "#ffffff")


def test_numbers_run_from_minus_one_to_one_in_channels_rows_columns() -> None:
    image = Image.new("RGB", (3, 2), (0, 255, 0))
    image.putpixel((2, 0), (255, 0, 51))
    tensor = to_tensor(image)
    assert tensor.shape == (3, 2, 3) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert tensor[:, 0, 0].tolist() == [-1, 1, -1]
    assert tensor[:, 0, 2].tolist() == pytest.approx([1, -1, -0.6])


@given(st.integers(8, 120), st.integers(8, 120))
def test_a_crop_has_the_size_of_its_bucket(height: int, width: int) -> None:
    item = Item(Path("a"), "a", (height, width), "", "", None, None, 1)
    (place,) = plan([item], schema.Buckets(), native_resolution=48, multiple=8, batch_size=1).placements
    cut = crop_and_resize(Image.new("RGB", (width, height)), place)
    assert (cut.height, cut.width) == place.bucket


def test_the_crop_is_the_middle_and_pixels_are_untouched_when_nothing_is_resized() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 12, 3), dtype=np.uint8)
    place = Placement(0, bucket=(8, 12), resized=(20, 12), top=6, left=0, crop_loss=0.6, scale=1.0)
    np.testing.assert_array_equal(np.asarray(crop_and_resize(Image.fromarray(noise), place)), noise[6:14])


def test_a_flat_colour_stays_flat_through_resizing() -> None:
    place = Placement(0, bucket=(16, 24), resized=(18, 24), top=1, left=0, crop_loss=0.1, scale=0.3)
    cut = crop_and_resize(Image.new("RGB", (80, 60), (10, 200, 77)), place)
    assert cut.getcolors() == [(16 * 24, (10, 200, 77))]


def test_profiles_do_not_travel_into_the_pixels(tmp_path: Path) -> None:
    """A note about the file must not make two equal pictures different."""
    image = Image.new("RGB", (4, 4), (1, 2, 3))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    (tmp_path / "a.png").write_bytes(buffer.getvalue())
    assert to_tensor(decode(tmp_path / "a.png", "#ffffff").image).equal(to_tensor(image))


def test_facts_about_pixels_are_plain_data_and_ignore_how_a_colour_is_written() -> None:
    item = Item(Path("a"), "a", (48, 48), "hash", "", None, None, 1)
    (place,) = plan([item], schema.Buckets(), native_resolution=48, multiple=8, batch_size=1).placements
    lower = pixel_facts(item, place, flipped=False, background="#ffffff")
    assert lower == pixel_facts(item, place, flipped=False, background="#FFFFFF")
    assert lower["content"] == "hash" and lower["bucket"] == (48, 48)
