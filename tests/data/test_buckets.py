"""Where images go: every image in one bucket per resolution or listed, and sizes that keep to the limits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.buckets import bucket_sizes, plan
from engine.data.items import Item, Size
from engine.errors import SettingsError
from engine.settings import schema

STEPS = st.sampled_from([8, 16, 32, 64])
ASPECTS = st.floats(1.0, 8.0)
SIZES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=12)


def item(size: Size, name: str = "a.png") -> Item:
    return Item(Path(name), name, size, "0" * 64, "caption", None, None, 1)


def test_the_sizes_for_48_px_are_the_five_that_can_be_worked_out_by_hand() -> None:
    assert set(bucket_sizes(48, 8, 2.0)) == {(48, 48), (40, 56), (56, 40), (32, 64), (64, 32)}


def test_the_sizes_for_1024_px_are_the_well_known_ones_of_sdxl() -> None:
    """Podell et al. 2023, arXiv:2307.01952, appendix I lists (height, width) with areas close to 1024²."""
    published = {(1024, 1024), (1088, 960), (1152, 896), (1216, 832), (1344, 768), (960, 1088), (896, 1152)}
    assert published <= set(bucket_sizes(1024, 64, 2.0))


@given(st.integers(64, 2048), STEPS, ASPECTS)
def test_sizes_are_multiples_within_area_and_aspect_in_both_orientations(
    resolution: int, step: int, max_aspect: float
) -> None:
    sizes = bucket_sizes(resolution, step, max_aspect)
    assert sizes == tuple(sorted(set(sizes)))
    for height, width in sizes:
        assert height % step == 0 and width % step == 0
        assert height * width <= resolution**2
        assert max(height, width) / min(height, width) <= max_aspect + 1e-6
        assert (width, height) in sizes


@given(st.integers(64, 2048), STEPS, ASPECTS)
def test_no_size_could_be_longer_without_breaking_a_limit(resolution: int, step: int, max_aspect: float) -> None:
    square = resolution // step * step
    for height, width in bucket_sizes(resolution, step, max_aspect):
        if height <= width and (height, width) != (square, square):
            longer = width + step
            assert height * longer > resolution**2 or longer / height > max_aspect


def test_a_resolution_smaller_than_the_step_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"48 px is less than one bucket step of 64 px") as refusal:
        bucket_sizes(48, 64, 2.0)
    assert "buckets.step" in refusal.value.hint


@given(SIZES, st.lists(st.integers(64, 1024), min_size=1, max_size=3, unique=True), STEPS, ASPECTS, st.booleans())
def test_every_image_lands_in_exactly_one_bucket_per_resolution_or_is_listed(
    sizes: list[Size], resolutions: list[int], step: int, max_aspect: float, upscale: bool
) -> None:
    settings = schema.Buckets(resolutions=tuple(resolutions), step=step, max_aspect=max_aspect, upscale=upscale)
    items = [item(size, f"{index}.png") for index, size in enumerate(sizes)]
    made = plan(items, settings, native_resolution=64, multiple=8, batch_size=4)
    for index, one in enumerate(items):
        placed = sum(placement.item == index for placement in made.placements)
        listed = sum(problem.where == one.name for problem in made.left_out)
        assert placed + listed == len(resolutions)
        assert not (upscale and listed)
    assert made.images == len(made.placements)
    assert len({bucket.size for bucket in made.buckets}) == len(made.buckets)


@given(SIZES, st.integers(64, 1024), ASPECTS, st.booleans())
def test_a_placement_covers_its_bucket_and_reports_what_it_cuts_away(
    sizes: list[Size], resolution: int, max_aspect: float, upscale: bool
) -> None:
    settings = schema.Buckets(resolutions=(resolution,), step=16, max_aspect=max_aspect, upscale=upscale)
    made = plan([item(size) for size in sizes], settings, native_resolution=64, multiple=8, batch_size=1)
    for bucket in made.buckets:
        for place in bucket.placements:
            assert place.bucket == bucket.size
            assert 0 <= place.top <= place.resized[0] - place.bucket[0]
            assert 0 <= place.left <= place.resized[1] - place.bucket[1]
            # One direction fits exactly, so nothing is cut that need not be.
            assert place.resized[0] == place.bucket[0] or place.resized[1] == place.bucket[1]
            kept = math.prod(place.bucket) / math.prod(place.resized)
            assert place.crop_loss == pytest.approx(1 - kept)
            assert upscale or place.scale <= 1.0


@given(SIZES)
def test_an_image_goes_to_the_bucket_of_nearest_shape(sizes: list[Size]) -> None:
    settings = schema.Buckets(resolutions=(512,), max_aspect=2.0)
    made = plan([item(size) for size in sizes], settings, native_resolution=512, multiple=8, batch_size=1)
    choices = bucket_sizes(512, 64, 2.0)
    for place in made.placements:
        height, width = sizes[place.item]

        def distance(size: Size, aspect: float = width / height) -> float:
            return abs(math.log(size[1] / size[0] / aspect))

        assert distance(place.bucket) == pytest.approx(min(distance(size) for size in choices))


def test_a_small_image_gets_a_smaller_bucket_when_enlarging_is_off() -> None:
    settings = schema.Buckets(resolutions=(512,), step=64, upscale=False)
    made = plan([item((200, 330))], settings, native_resolution=512, multiple=8, batch_size=1)
    assert [bucket.size for bucket in made.buckets] == [(192, 320)]


def test_an_image_below_one_step_is_left_out_with_its_name_and_a_remedy() -> None:
    settings = schema.Buckets(resolutions=(512,), step=64, upscale=False)
    made = plan([item((40, 300), "tiny.png")], settings, native_resolution=512, multiple=8, batch_size=1)
    assert made.images == 0
    (problem,) = made.left_out
    assert problem.where == "tiny.png"
    assert "300x40 px" in problem.reason and "upscale" in problem.remedy


@pytest.mark.parametrize(("native", "multiple", "step"), [(48, 8, 8), (512, 8, 64), (1024, 16, 64), (512, 48, 96)])
def test_the_step_follows_the_base_when_it_is_not_set(native: int, multiple: int, step: int) -> None:
    made = plan([item((900, 1600))], schema.Buckets(), native_resolution=native, multiple=multiple, batch_size=1)
    assert all(side % step == 0 for bucket in made.buckets for side in bucket.size)
    assert made.buckets[0].size in bucket_sizes(native, step, 2.0)


def test_a_step_that_does_not_fit_the_base_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"buckets\.step is 24 px.*multiples of 16 px") as refusal:
        plan([item((64, 64))], schema.Buckets(step=24), native_resolution=64, multiple=16, batch_size=1)
    assert "16 or 32" in refusal.value.hint


def test_naming_a_resolution_twice_is_refused() -> None:
    settings = schema.Buckets(resolutions=(64, 64))
    with pytest.raises(SettingsError, match="twice"):
        plan([item((64, 64))], settings, native_resolution=64, multiple=8, batch_size=1)


def test_the_plan_counts_images_batches_and_crop() -> None:
    items = [item((48, 48))] * 5 + [item((32, 64))] * 2
    made = plan(items, schema.Buckets(), native_resolution=48, multiple=8, batch_size=2)
    assert (made.images, made.batches_per_epoch, made.mean_crop_loss) == (7, 3 + 1, 0.0)
