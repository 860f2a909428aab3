"""The tensor cache: every ingredient is in the key, entries are complete or absent, only missing ones are encoded."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from engine.data.buckets import plan
from engine.data.cache import TensorCache, fill, fingerprint
from engine.data.items import Item, Placement
from engine.data.manifest import load_image, scan
from engine.data.pixels import crop_and_resize, pixel_facts, to_tensor
from engine.errors import DatasetError, WorkspaceError
from engine.settings import schema

A, B, C = (fingerprint(name=name) for name in "abc")


def entry(value: float = 1.0, *, size: int = 4) -> dict[str, Tensor]:
    return {"latents": torch.full((size,), value)}


class Encoder:
    """Counts what it is asked for; encodes a number as that number, or a text as its length."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, jobs: list[Any]) -> list[dict[str, Tensor]]:
        self.calls.append(list(jobs))
        return [entry(len(job) if isinstance(job, str) else float(job)) for job in jobs]

    @property
    def encoded(self) -> list[Any]:
        return [job for call in self.calls for job in call]


# --- keys ------------------------------------------------------------------------------------------------------


def test_a_key_does_not_depend_on_the_order_of_fields_or_on_tuples_and_lists() -> None:
    assert fingerprint(a=1, b=(1, 2)) == fingerprint(b=[1, 2], a=1)
    assert len(A) == 64 and A != B


def test_a_key_tells_apart_values_that_look_alike() -> None:
    values = [1, "1", 1.5, "1.5", None, "null", True, "true", [], {}, "", ["a", "b"], ["a,b"], "é", "e\u0301"]
    assert len({fingerprint(value=value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [float("nan"), Path("x"), b"x", object()])
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        fingerprint(value=value)


BASE_ITEM = Item(Path("a.png"), "a.png", (60, 90), "00", "c", None, None, 1)


def latent_key(
    item: Item, settings: schema.Buckets, *, flipped: bool = False, background: str = "#ffffff", **model: str
) -> str:
    (place,) = plan([item], settings, native_resolution=48, multiple=8, batch_size=1).placements
    facts = pixel_facts(item, place, flipped=flipped, background=background)
    facts |= {"family": "sd15", "space": 1, "encoder": "e0", "dtype": "fp32"} | model
    return fingerprint(**facts)


def test_R89_each_ingredient_changes_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = schema.Buckets()
    keys = {
        "as it is": latent_key(BASE_ITEM, plain),
        "content": latent_key(replace(BASE_ITEM, content_hash="01"), plain),
        "resolution": latent_key(BASE_ITEM, schema.Buckets(resolutions=(64,))),
        "shape of the bucket": latent_key(BASE_ITEM, schema.Buckets(max_aspect=1.0)),
        "mirrored": latent_key(BASE_ITEM, plain, flipped=True),
        "background": latent_key(BASE_ITEM, plain, background="#000000"),
        "family": latent_key(BASE_ITEM, plain, family="sdxl"),
        "encoder": latent_key(BASE_ITEM, plain, encoder="e1"),
        "dtype": latent_key(BASE_ITEM, plain, dtype="bf16"),
    }
    monkeypatch.setattr("engine.data.pixels.PIXELS_VERSION", -1)
    keys["version of the code"] = latent_key(BASE_ITEM, plain)
    assert len(set(keys.values())) == len(keys) == 10


def test_R89_the_same_content_elsewhere_has_the_same_key() -> None:
    moved = replace(BASE_ITEM, path=Path("/other/b.png"), name="b.png", caption="another", repeats=5)
    assert latent_key(moved, schema.Buckets()) == latent_key(BASE_ITEM, schema.Buckets())


# --- entries ---------------------------------------------------------------------------------------------------


def test_what_is_written_reads_back_in_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(2, 3).half(),
        "brain": torch.randn(2, 3).bfloat16(),
        "whole": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        "view": torch.randn(6, 4).t()[1:3],
    }
    TensorCache(tmp_path).write(A, tensors)
    back = TensorCache(tmp_path).read(A)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_an_entry_is_a_copy_that_does_not_hold_its_batch_in_memory(tmp_path: Path) -> None:
    batch = torch.zeros(100, 4)
    cache = TensorCache(tmp_path)
    cache.write(A, {"latents": batch[7]})
    batch.fill_(1.0)
    assert cache.read(A)["latents"].sum() == 0
    assert cache.read(A)["latents"].untyped_storage().nbytes() == 16


def test_entries_lie_two_folders_deep_and_nothing_temporary_stays(tmp_path: Path) -> None:
    TensorCache(tmp_path).write(A, entry())
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [f"{A[:2]}/{A[2:4]}/{A}.safetensors"]


def test_a_missing_entry_is_absent_and_reading_it_says_what_to_do(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path / "not" / "there")
    assert not cache.has(A)
    with pytest.raises(WorkspaceError, match="missing or damaged") as refusal:
        cache.read(A)
    assert "run again" in refusal.value.hint


@pytest.mark.parametrize("key", ["", "../../x", "A" * 64, A + "0"])
def test_only_fingerprints_are_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a cache key"):
        TensorCache(tmp_path).has(key)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(data[:-3])
    elif how == "garbage":
        path.write_bytes(b"garbage" * 20)
    elif how == "one bit in the data":
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    elif how == "another name in the header":
        path.write_bytes(data.replace(b'"latents"', b'"latentz"'))
    elif how == "longer":
        path.write_bytes(data + b"\0")
    elif how == "huge header":
        path.write_bytes((2**62).to_bytes(8, "little") + data[8:])


DAMAGES = [
    "empty",
    "truncated",
    "garbage",
    "one bit in the data",
    "another name in the header",
    "longer",
    "huge header",
]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_rebuilt_with_a_warning(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    TensorCache(tmp_path).write(A, entry(1.0))
    damage(TensorCache(tmp_path).path(A), how)
    cache, encoder = TensorCache(tmp_path), Encoder()
    with caplog.at_level(logging.WARNING):
        assert fill(cache, {A: 5}, encoder, batch_size=4) == 1
    assert "is damaged and is made anew" in caplog.text
    assert torch.equal(TensorCache(tmp_path).read(A)["latents"], entry(5.0)["latents"])


def test_a_file_of_another_program_is_not_trusted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = TensorCache(tmp_path).path(A)
    path.parent.mkdir(parents=True)
    save_file(entry(), path)
    assert not TensorCache(tmp_path).has(A)


def test_memory_holds_what_was_used_last_and_no_more_than_asked(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, memory_bytes=2 * 4 * 4)  # room for two entries
    for key in (A, B):
        cache.write(key, entry())
    first = cache.read(A)
    assert cache.read(A) is first, "from memory"
    cache.write(C, entry())  # drops B, which was used less recently
    cache.path(A).unlink()
    cache.path(B).unlink()
    assert cache.read(A) is first and not cache.has(B) and cache.has(C)


def test_an_entry_larger_than_the_memory_is_read_from_disk_each_time(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path, memory_bytes=8)
    cache.write(A, entry())
    assert cache.read(A) is not cache.read(A)
    assert torch.equal(cache.read(A)["latents"], entry()["latents"])


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "cannot write the cache")]
)
def test_a_full_or_read_only_disk_is_an_error_with_a_remedy_and_leaves_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WorkspaceError, match=words) as refusal:
        TensorCache(tmp_path).write(A, entry())
    assert refusal.value.hint
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# --- filling ---------------------------------------------------------------------------------------------------


def test_only_missing_entries_are_encoded_in_groups_and_batches(tmp_path: Path) -> None:
    cache, encoder = TensorCache(tmp_path), Encoder()
    jobs = {fingerprint(n=number): number for number in range(7)}
    cache.write(fingerprint(n=4), entry(4))
    calls: list[tuple[int, int]] = []
    count = fill(
        cache,
        jobs,
        encoder,
        batch_size=2,
        group=lambda number: number % 2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert count == 6
    assert encoder.calls == [[0, 2], [6], [1, 3], [5]]
    assert calls == [(1, 7), (3, 7), (4, 7), (6, 7), (7, 7)]
    assert fill(cache, jobs, encoder, batch_size=2) == 0 and len(encoder.calls) == 4
    assert fill(TensorCache(tmp_path), jobs, encoder, batch_size=2) == 0 and len(encoder.calls) == 4
    for key, number in jobs.items():
        assert torch.equal(cache.read(key)["latents"], entry(number)["latents"])


def test_changing_one_caption_reencodes_only_that_caption(tmp_path: Path) -> None:
    cache, encoder = TensorCache(tmp_path), Encoder()

    def encode_all(captions: list[str]) -> None:
        fill(cache, {fingerprint(text=text, encoder="clip"): text for text in captions}, encoder, batch_size=8)

    encode_all(["a cat", "a dog", "a bird"])
    encode_all(["a cat", "a wet dog", "a bird"])
    assert encoder.encoded == ["a cat", "a dog", "a bird", "a wet dog"]


def test_values_that_are_not_finite_are_named_and_not_stored(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    jobs = {A: "a.png", B: "bad.png", C: "worse.png"}

    def encode(names: list[str]) -> list[dict[str, Tensor]]:
        values = {"a.png": 1.0, "bad.png": float("nan"), "worse.png": float("inf")}
        return [{"latents": torch.zeros(2), "more": torch.tensor([values[name]])} for name in names]

    with pytest.raises(DatasetError, match=r"(?s)not finite.*bad\.png.*worse\.png") as refusal:
        fill(cache, jobs, encode, batch_size=1, name=lambda job: job)
    assert [problem.where for problem in refusal.value.problems] == ["bad.png", "worse.png"]
    assert "fp16" in refusal.value.hint
    assert (cache.has(A), cache.has(B), cache.has(C)) == (True, False, False)


def test_a_broken_encoder_is_stopped_early(tmp_path: Path) -> None:
    seen: list[int] = []

    def encode(numbers: list[int]) -> list[dict[str, Tensor]]:
        seen.extend(numbers)
        return [entry(float("nan")) for _ in numbers]

    with pytest.raises(DatasetError):
        fill(TensorCache(tmp_path), {fingerprint(n=n): n for n in range(500)}, encode, batch_size=4)
    assert len(seen) < 50


def test_an_interruption_costs_one_batch(tmp_path: Path) -> None:
    jobs = {fingerprint(n=number): number for number in range(6)}
    encoder = Encoder()

    def interrupted(numbers: list[int]) -> list[dict[str, Tensor]]:
        if 4 in numbers:
            raise KeyboardInterrupt
        return encoder(numbers)

    with pytest.raises(KeyboardInterrupt):
        fill(TensorCache(tmp_path), jobs, interrupted, batch_size=2)
    assert fill(TensorCache(tmp_path), jobs, encoder, batch_size=2) == 2
    assert encoder.encoded == [0, 1, 2, 3, 4, 5]


def test_R91_the_cache_holds_encodings_and_is_enough_without_the_images(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "a.png")
    dataset = schema.Dataset(folder=str(folder), missing_captions="empty")
    items = scan(dataset, 16).items
    places = plan(items, schema.Buckets(), native_resolution=48, multiple=8, batch_size=1).placements
    cache = TensorCache(tmp_path / "cache")

    def encode(jobs: list[Placement]) -> list[dict[str, Tensor]]:
        images = [to_tensor(crop_and_resize(load_image(items[job.item], "#ffffff"), job)) for job in jobs]
        return [{"latents": image.mean(dim=(1, 2))} for image in images]

    keys = [fingerprint(**pixel_facts(items[p.item], p, flipped=False, background="#ffffff")) for p in places]
    assert fill(cache, dict(zip(keys, places, strict=True)), encode, batch_size=1) == 1
    (folder / "a.png").unlink()
    stored = TensorCache(tmp_path / "cache").read(keys[0])
    assert stored["latents"].tolist() == pytest.approx((noise.mean(axis=(0, 1)) / 127.5 - 1).tolist(), abs=1e-5)
    assert cache.path(keys[0]).stat().st_size < noise.nbytes
