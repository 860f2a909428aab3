"""What a scan finds in a folder: every image and every fault is reported, and no bad file ends it."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from engine.data import pixels
from engine.data.manifest import Manifest, load_image, require_usable, scan
from engine.errors import DatasetError, Problem
from engine.settings import schema

MIN_SIDE = 16


def dataset(folder: Path, **settings: Any) -> schema.Dataset:
    return schema.Dataset(folder=str(folder), **settings)


def look(folder: Path, **settings: Any) -> Manifest:
    return scan(dataset(folder, **settings), MIN_SIDE)


def save(path: Path, size: tuple[int, int] = (24, 32), *, seed: int = 0, caption: str | None = "a photo") -> Path:
    """A noisy RGB image of (height, width) with a caption beside it."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def about(found: tuple[Problem, ...], where: str) -> str:
    """All that was found about one file."""
    return " | ".join(f"{problem.reason} -> {problem.remedy}" for problem in found if problem.where == where)


def png_header_only(width: int, height: int) -> bytes:
    """A PNG that says it has this size, with hardly any data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


# --- good images -----------------------------------------------------------------------------------------------


def test_an_ordinary_folder_gives_items_sorted_by_name(tmp_path: Path) -> None:
    save(tmp_path / "b.png", (24, 32), seed=1, caption="second")
    save(tmp_path / "a.jpg", (40, 20), seed=2, caption=" first \n")
    save(tmp_path / "sub" / "c.webp", (16, 16), seed=3, caption="third")
    made = look(tmp_path)
    assert [(item.name, item.size, item.caption, item.repeats) for item in made.items] == [
        ("a.jpg", (40, 20), "first", 1),
        ("b.png", (24, 32), "second", 1),
        ("sub/c.webp", (16, 16), "third", 1),
    ]
    assert made.items[1].content_hash == hashlib.sha256((tmp_path / "b.png").read_bytes()).hexdigest()
    assert made.items[1].path == tmp_path / "b.png"
    assert (made.problems, made.notes, made.left_out) == ((), (), ())
    assert made.formats == {"JPEG": 1, "PNG": 1, "WEBP": 1}
    assert made.captioned == 3 and made.samples_per_epoch == 3 and made.sizes[(40, 20)] == 1
    require_usable(made)


def test_the_order_does_not_depend_on_the_order_of_creation(tmp_path: Path) -> None:
    names = [f"{number}/{letter}.png" for number in range(3) for letter in "abc"]
    for folder, seed in (("one", 1), ("two", 2)):
        random.Random(seed).shuffle(names)
        for name in names:
            save(tmp_path / folder / name)
    one, two = look(tmp_path / "one"), look(tmp_path / "two")
    assert [item.name for item in one.items] == [item.name for item in two.items] == sorted(names)


def test_unicode_and_spaces_in_names(tmp_path: Path) -> None:
    folder = tmp_path / "Ätna fotos – 写真"
    save(folder / "grüße aus 東京.png", caption="ok")
    save(folder / "my cat (1) 🐈.png", caption="cat", seed=1)
    made = look(folder)
    assert {item.caption for item in made.items} == {"ok", "cat"}
    assert not made.problems


def test_a_caption_is_found_although_its_accent_is_written_the_other_way(tmp_path: Path) -> None:
    save(tmp_path / "caf\u00e9.png", caption=None)
    (tmp_path / "cafe\u0301.TXT").write_text("a cup")  # as macOS writes it
    assert look(tmp_path).items[0].caption == "a cup"


def test_the_type_is_taken_from_the_content_and_a_wrong_ending_is_noted(tmp_path: Path) -> None:
    shutil.move(save(tmp_path / "a.png"), tmp_path / "a.jpg")
    shutil.move(save(tmp_path / "b.png", seed=1), tmp_path / "b")
    made = look(tmp_path)
    assert made.formats == {"PNG": 2}
    assert "is a PNG file" in about(made.notes, "a.jpg") and "is a PNG file" in about(made.notes, "b")


def test_progress_counts_every_image(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / f"{number}.png", seed=number)
    calls: list[tuple[int, int]] = []
    scan(dataset(tmp_path), MIN_SIDE, lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_repeats_come_from_the_nearest_named_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("a.png", "cats/a.png", "cats/old/a.png", "dogs/old/a.png")):
        save(tmp_path / name, seed=number)
    made = look(tmp_path, repeats=2, folder_repeats={"cats": 5, "dogs/old": 7})
    assert {item.name: item.repeats for item in made.items} == {
        "a.png": 2,
        "cats/a.png": 5,
        "cats/old/a.png": 5,
        "dogs/old/a.png": 7,
    }
    assert made.samples_per_epoch == 19


def test_repeats_for_a_folder_that_is_not_there_are_a_problem(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    made = look(tmp_path, folder_repeats={"kats": 5})
    assert "no sub-folder 'kats'" in about(made.problems, "dataset.folder_repeats")


def test_a_folder_named_as_for_other_trainers_is_explained(tmp_path: Path) -> None:
    save(tmp_path / "10_cat" / "a.png")
    made = look(tmp_path)
    assert made.items[0].repeats == 1 and "folder_repeats" in about(made.notes, "10_cat")


# --- bad images ------------------------------------------------------------------------------------------------


def truncated(path: Path) -> None:
    save(path, (64, 64))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def huge(path: Path) -> None:
    path.write_bytes(png_header_only(60_000, 60_000))


def broken_link(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def flipped_bits(path: Path) -> None:
    save(path, (64, 64))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated.png": (truncated, "damaged or cut short"),
    "truncated.jpg": (truncated, "damaged or cut short"),
    "truncated.webp": (truncated, "damaged or cut short"),
    "truncated.gif": (truncated, "damaged or cut short"),
    "flipped.png": (flipped_bits, "damaged or cut short"),
    "empty.png": (lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "one_pixel.png": (lambda path: save(path, (1, 1)), "is 1x1 px; the shorter side must have at least 16 px"),
    "narrow.png": (lambda path: save(path, (300, 15)), "is 15x300 px"),
    "huge.png": (huge, "more than 178 million pixels"),
    "text.jpg": (lambda path: path.write_text("hello"), "is not an image"),
    "page.jpg": (lambda path: path.write_text("<!DOCTYPE html><p>404"), "is a web page"),
    "phone.heic": (lambda path: path.write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 60), "HEIC"),
    "drawing.svg": (lambda path: path.write_text("<svg xmlns='x'/>"), "is an SVG drawing"),
    "float.tif": (lambda path: Image.new("F", (32, 32)).save(path), "32-bit or floating-point"),
}
if sys.platform != "win32":
    BAD["broken_link.png"] = (broken_link, "cannot be opened")
    BAD["link_to_itself.png"] = (link_to_itself, "cannot be opened")
    BAD["pipe.png"] = (os.mkfifo, "is not a file")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_a_problem_with_reason_and_remedy(tmp_path: Path, name: str) -> None:
    make, reason = BAD[name]
    make(tmp_path / name)
    save(tmp_path / "good.png", seed=99)
    made = look(tmp_path)
    assert [item.name for item in made.items] == ["good.png"]
    (problem,) = made.problems
    assert problem.where == name and reason in problem.reason and problem.remedy


def test_all_bad_images_are_reported_together_and_can_be_left_out(tmp_path: Path) -> None:
    for name, (make, _) in BAD.items():
        make(tmp_path / name)
    save(tmp_path / "good.png", seed=99)
    strict, lenient = look(tmp_path), look(tmp_path, bad_images="skip")
    assert len(strict.problems) == len(BAD) and not strict.left_out
    assert lenient.left_out == strict.problems and not lenient.problems
    require_usable(lenient)
    with pytest.raises(DatasetError, match=f"{len(BAD)} problems") as refusal:
        require_usable(strict)
    assert refusal.value.problems == strict.problems
    assert all(name in str(refusal.value) for name in BAD)


def test_a_folder_of_bad_images_only_is_not_usable_even_when_they_are_skipped(tmp_path: Path) -> None:
    truncated(tmp_path / "a.png")
    made = look(tmp_path, bad_images="skip")
    with pytest.raises(DatasetError, match=r"(?s)no image in .* can be used.*a\.png"):
        require_usable(made)


def test_truncated_images_stay_an_error_when_another_library_allowed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    truncated(tmp_path / "a.jpg")
    assert "cut short" in about(look(tmp_path).problems, "a.jpg")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_our_own_pixel_limit_holds_when_pillows_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    huge(tmp_path / "a.png")
    assert "million pixels" in about(look(tmp_path).problems, "a.png")
    assert pixels.MAX_PIXELS <= 200_000_000


def test_random_bytes_and_random_damage_never_raise(tmp_path: Path) -> None:
    noise = random.Random(0)
    good = [save(tmp_path / f"good.{ending}", (20, 20)) for ending in ("png", "jpg", "webp", "gif", "bmp", "tif")]
    for number in range(120):
        data = bytearray(good[number % len(good)].read_bytes())
        for _ in range(noise.randrange(1, 6)):
            data[noise.randrange(len(data))] = noise.randrange(256)
        start = noise.randrange(4)
        (tmp_path / f"damaged{number:03d}.png").write_bytes(
            data[start if start == 3 else 0 : noise.randrange(len(data))]
        )
    made = look(tmp_path, missing_captions="empty")
    assert len(made.items) + len(made.problems) == 120 + len(good)


@contextmanager
def unprivileged_folder() -> Iterator[Path]:
    """A folder in which permissions count, also when the tests run as root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    Image.init()  # its modules may not be readable for another user
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def without_privileges() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_unreadable_images_captions_and_folders_are_problems() -> None:
    with unprivileged_folder() as folder:
        for number, name in enumerate(("good.png", "image.png", "caption.png", "locked/a.png")):
            save(folder / name, seed=number)
        (folder / "image.png").chmod(0)
        (folder / "caption.txt").chmod(0)
        (folder / "locked").chmod(0)
        with without_privileges():
            made = look(folder)
        (folder / "locked").chmod(0o755)
        assert [item.name for item in made.items] == ["good.png"]
        assert "cannot be opened: Permission denied" in about(made.problems, "image.png")
        assert "caption that cannot be opened" in about(made.problems, "caption.png")
        assert "folder cannot be read" in about(made.problems, "locked")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_read_only_folder_can_be_scanned_and_an_unreadable_one_is_refused() -> None:
    with unprivileged_folder() as folder:
        save(folder / "a.png")
        folder.chmod(0o555)
        with without_privileges():
            assert not look(folder).problems
        folder.chmod(0)
        with without_privileges(), pytest.raises(DatasetError, match="cannot be read"):
            look(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that are not text")
def test_a_name_that_is_not_utf_8_is_a_problem_that_can_be_printed(tmp_path: Path) -> None:
    save(tmp_path / "good.png")
    shutil.copy(tmp_path / "good.png", tmp_path / os.fsdecode(b"bad\xff.png"))
    (problem,) = look(tmp_path).problems
    assert "not UTF-8" in problem.reason
    str(problem).encode("utf-8")


# --- folders ---------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        look(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="is a file, not a folder"):
        look(save(tmp_path / "a.png"))


@pytest.mark.parametrize("text", ["nul\0byte", "x" * 5000])
def test_an_impossible_folder_name_is_refused(text: str) -> None:
    with pytest.raises(DatasetError):
        scan(schema.Dataset(folder=text), MIN_SIDE)


def test_a_folder_without_images_is_refused_and_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="it is empty"):
        look(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "film.mp4").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"found 1 \.mp4, 1 \.txt"):
        look(tmp_path)


def test_sub_folders_are_left_alone_when_asked(tmp_path: Path) -> None:
    save(tmp_path / "sub" / "b.png")
    with pytest.raises(DatasetError) as refusal:
        look(tmp_path, recursive=False)
    assert "dataset.recursive" in refusal.value.hint
    save(tmp_path / "a.png")
    assert [item.name for item in look(tmp_path, recursive=False).items] == ["a.png"]


def test_hidden_files_and_our_own_folders_are_passed_over(tmp_path: Path) -> None:
    for name in ("a.png", ".hidden.png", "._a.png", ".safelight/b.png", ".safelight-cache/c.png"):
        save(tmp_path / name)
    assert [item.name for item in look(tmp_path).items] == ["a.png"]


def test_a_folder_named_like_an_image_is_noted_and_read_as_a_folder(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    save(tmp_path / "b.png" / "c.png", seed=1)
    made = look(tmp_path)
    assert [item.name for item in made.items] == ["a.png", "b.png/c.png"]
    assert "is a folder" in about(made.notes, "b.png") and not made.problems


@pytest.mark.skipif(sys.platform == "win32", reason="links need privileges there")
def test_links_in_a_circle_end_and_linked_folders_are_read_once(tmp_path: Path) -> None:
    save(tmp_path / "data" / "real" / "a.png")
    save(tmp_path / "elsewhere" / "b.png", seed=1)
    (tmp_path / "data" / "real" / "up").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data" / "real")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    made = look(tmp_path / "data")
    assert [item.name for item in made.items] == ["linked/b.png", "real/a.png"]
    assert "read already" in about(made.notes, "again") and "read already" in about(made.notes, "real/up")


def test_other_files_are_counted_in_a_note(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    for name in ("film.mp4", "x.json", "y.json"):
        (tmp_path / name).write_text("x")
    assert "ignored: 2 .json, 1 .mp4" in about(look(tmp_path).notes, str(tmp_path))


# --- decisions that are reported -------------------------------------------------------------------------------


def test_what_was_converted_is_noted(tmp_path: Path) -> None:
    rotated = Image.Exif()
    rotated[0x0112] = 6
    noise = Image.open(save(tmp_path / "plain.png", (24, 32)))
    noise.save(tmp_path / "rotated.jpg", exif=rotated)
    noise.convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.fromarray(np.full((20, 20), 40_000, np.uint16)).save(tmp_path / "deep.png")
    noise.save(tmp_path / "animated.gif", save_all=True, append_images=[Image.new("RGB", noise.size)])
    Image.new("RGBA", (20, 20), (255, 0, 0, 100)).save(tmp_path / "glass.png")
    made = look(tmp_path, missing_captions="empty")
    assert not made.problems and len(made.items) == 6
    assert {item.name: item.size for item in made.items}["rotated.jpg"] == (32, 24)
    expected = {
        "rotated.jpg": pixels.NOTE_ROTATED,
        "cmyk.jpg": pixels.NOTE_CMYK,
        "deep.png": pixels.NOTE_16_BIT,
        "animated.gif": pixels.NOTE_FRAMES,
        "glass.png": pixels.NOTE_TRANSPARENT,
    }
    for name, note in expected.items():
        assert note in about(made.notes, name)
    assert about(made.notes, "plain.png") == ""


def test_the_same_file_twice_and_names_that_differ_in_their_ending_only_are_noted(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", tmp_path / "b.png")
    save(tmp_path / "a.jpg")
    made = look(tmp_path, missing_captions="empty")
    assert len(made.items) == 3
    assert "is the same file as a.png" in about(made.notes, "b.png")
    assert "shares its caption file with a.jpg" in about(made.notes, "a.png")
    assert {item.name: item.caption for item in made.items} == {"a.jpg": "a photo", "a.png": "a photo", "b.png": ""}


# --- captions --------------------------------------------------------------------------------------------------


def test_captions_in_other_encodings_are_read_and_noted(tmp_path: Path) -> None:
    for number, (name, data) in enumerate(
        {
            "cp1252": "café – “naïve”".encode("cp1252"),
            "bom": b"\xef\xbb\xbf" + "café – “naïve”".encode(),
            "utf16": "café – “naïve”".encode("utf-16"),
        }.items()
    ):
        save(tmp_path / f"{name}.png", seed=number).with_suffix(".txt").write_bytes(data)
    made = look(tmp_path)
    assert [item.caption for item in made.items] == ["café – “naïve”"] * 3
    assert "Windows-1252" in about(made.notes, "cp1252.png")
    assert "byte order mark" in about(made.notes, "bom.png")
    assert "UTF-16" in about(made.notes, "utf16.png")


def test_a_caption_of_10000_characters_is_kept_and_noted(tmp_path: Path) -> None:
    save(tmp_path / "a.png", caption="long " * 2000)
    made = look(tmp_path)
    assert len(made.items[0].caption) == 9999  # without the last space
    assert "very long (9999 characters)" in about(made.notes, "a.png")


def test_a_caption_file_that_is_no_text_is_a_problem(tmp_path: Path) -> None:
    save(tmp_path / "a.png").with_suffix(".txt").write_bytes(b"\x00\x01\x02\x81")
    save(tmp_path / "b.png", seed=1).with_suffix(".txt").write_bytes(b"x" * 2_000_000)
    made = look(tmp_path)
    assert "a.txt is not text" in about(made.problems, "a.png")
    assert "b.txt is larger than a caption" in about(made.problems, "b.png")


@pytest.mark.parametrize("text", [None, "", " \n\t"])
def test_missing_and_empty_captions_follow_the_setting(tmp_path: Path, text: str | None) -> None:
    save(tmp_path / "my_red cat.png", caption=text)
    strict = look(tmp_path)
    assert [item.caption for item in strict.items] == [""], "the page still shows the image"
    problem = about(strict.problems, "my_red cat.png")
    assert ("has no caption" if text is None else "my_red cat.txt is empty") in problem
    assert "dataset.missing_captions" in problem
    empty = look(tmp_path, missing_captions="empty")
    assert (empty.items[0].caption, empty.problems) == ("", ())
    named = look(tmp_path, missing_captions="file_name")
    assert (named.items[0].caption, named.problems) == ("my red cat", ())
    assert "file name is used" in about(named.notes, "my_red cat.png")


def test_text_files_without_an_image_are_noted(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    (tmp_path / "readme.txt").write_text("x")
    assert "without an image" in about(look(tmp_path).notes, "readme.txt")


# --- masks -----------------------------------------------------------------------------------------------------


def test_masks_belong_to_images_and_are_never_images(tmp_path: Path) -> None:
    save(tmp_path / "a.png", (24, 32))
    mask = Image.new("L", (32, 24), 255)
    mask.save(tmp_path / "a.mask.png")
    mask.save(tmp_path / "a.cond.png")
    plain, masked = look(tmp_path), look(tmp_path, masks="file")
    assert [item.name for item in plain.items] == [item.name for item in masked.items] == ["a.png"]
    assert plain.items[0].mask_path is None and "not used" in about(plain.notes, "dataset.masks")
    assert masked.items[0].mask_path == tmp_path / "a.mask.png"
    assert masked.items[0].mask_hash == hashlib.sha256((tmp_path / "a.mask.png").read_bytes()).hexdigest()


def test_a_mask_in_another_format_is_not_trained_as_an_image(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    Image.new("L", (32, 24), 255).save(tmp_path / "a.mask.jpg")
    made = look(tmp_path)
    assert [item.name for item in made.items] == ["a.png"]
    assert "only PNG masks are read" in about(made.notes, "a.mask.jpg")


def test_masks_that_are_missing_of_another_size_black_or_broken_are_problems(tmp_path: Path) -> None:
    for number, name in enumerate(("missing", "other_size", "black", "broken")):
        save(tmp_path / f"{name}.png", (24, 32), seed=number)
    Image.new("L", (24, 32), 255).save(tmp_path / "other_size.mask.png")
    Image.new("L", (32, 24), 0).save(tmp_path / "black.mask.png")
    (tmp_path / "broken.mask.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    made = look(tmp_path, masks="file")
    assert not made.items
    assert "has no mask missing.mask.png" in about(made.problems, "missing.png")
    assert "24x32 px, the image 32x24 px" in about(made.problems, "other_size.png")
    assert "black everywhere" in about(made.problems, "black.png")
    assert "bad mask: broken.mask.png" in about(made.problems, "broken.png")


def test_an_image_that_is_transparent_everywhere_cannot_be_masked_by_its_transparency(tmp_path: Path) -> None:
    Image.new("RGBA", (20, 20), (1, 2, 3, 0)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("glass")
    assert not look(tmp_path).problems
    assert "transparent everywhere" in about(look(tmp_path, masks="alpha").problems, "a.png")


# --- afterwards ------------------------------------------------------------------------------------------------


def test_an_image_that_changes_after_the_scan_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", (24, 32))
    (item,) = look(tmp_path).items
    assert load_image(item, "#ffffff").size == (32, 24)
    save(path, (50, 50))
    with pytest.raises(DatasetError, match=r"a\.png was changed since it was scanned"):
        load_image(item, "#ffffff")


def test_R92_a_decode_failure_names_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "sub" / "a.png")
    (item,) = look(tmp_path).items
    path.unlink()
    with pytest.raises(DatasetError, match=r"sub/a\.png cannot be opened"):
        load_image(item, "#ffffff")


def test_scanning_needs_no_torch() -> None:
    """The page scans and plans in its own process, which must start quickly."""
    modules = "manifest, captions, buckets, batches, pixels, masks, listing"
    imports = f"import sys; from engine.data import {modules}; import engine.captioners.template"
    code = f"{imports}; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
