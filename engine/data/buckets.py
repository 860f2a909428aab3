"""Sizes that images are brought to, and where each image goes. Pure arithmetic; sizes are (height, width) in px."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Problem, SettingsError
from ..settings import schema
from .items import Item, Placement, Size


@dataclass(frozen=True)
class Bucket:
    """One size and the images that are trained at it."""

    size: Size
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class BucketPlan:
    """Every image at every resolution: either in one bucket, or in `left_out` with the reason."""

    buckets: tuple[Bucket, ...]
    left_out: tuple[Problem, ...]
    batch_size: int

    @property
    def placements(self) -> tuple[Placement, ...]:
        """All placements, bucket by bucket. `Sample.placement` is a position in this list."""
        return tuple(placement for bucket in self.buckets for placement in bucket.placements)

    @property
    def images(self) -> int:
        """Number of placements: an image trained at two resolutions counts twice."""
        return sum(len(bucket.placements) for bucket in self.buckets)

    @property
    def batches_per_epoch(self) -> int:
        """Batches when every placement is seen once. `Sampler` knows the number with repeats and mirroring."""
        return sum(math.ceil(len(bucket.placements) / self.batch_size) for bucket in self.buckets)

    @property
    def mean_crop_loss(self) -> float:
        """Mean of `crop_loss` over all placements, in [0, 1]."""
        return sum(placement.crop_loss for placement in self.placements) / max(1, self.images)


def bucket_sizes(resolution: int, step: int, max_aspect: float) -> tuple[Size, ...]:
    """All bucket sizes for one resolution: multiples of `step`, at most `resolution`² px and `max_aspect`, sorted.

    Each short side gets the longest long side that both limits allow. Where the aspect is the limit, a smaller bucket
    of no more extreme shape than a larger one is dropped: it would only cost detail. The largest square is always
    there, since most data sets have square images. Sizes come in both orientations.

    Raises SettingsError when not even one `step` fits.
    """
    if step > resolution:
        raise SettingsError(
            f"buckets.resolutions: {resolution} px is less than one bucket step of {step} px",
            "raise the resolution or lower buckets.step",
        )
    largest = resolution // step * step
    sizes = {(largest, largest)}
    widest = (1, 1)  # (long, short) of the most extreme shape so far
    for short in range(largest, 0, -step):
        by_area = resolution**2 // short
        by_aspect = math.floor(short * max_aspect + 1e-9)  # 1e-9: 320 * 1.15 is 367.99999999999994
        long = min(by_area, by_aspect) // step * step
        if long >= short and long * widest[1] > widest[0] * short:
            widest = (long, short)
            sizes |= {(short, long), (long, short)}
    return tuple(sorted(sizes))


def plan(
    items: Sequence[Item],
    buckets: schema.Buckets,
    *,
    native_resolution: int,
    multiple: int,
    batch_size: int,
) -> BucketPlan:
    """Give every image one bucket per resolution, the one of nearest shape.

    `native_resolution` is the base's own resolution in px, `multiple` the px that the base's sides must be multiples
    of. Equal bucket sizes that arise at several resolutions are one bucket.

    Raises SettingsError, naming the setting, when the step or a resolution does not fit the base.
    """
    step = bucket_step(buckets, native_resolution=native_resolution, multiple=multiple)
    resolutions = buckets.resolutions or (native_resolution,)
    if len(set(resolutions)) < len(resolutions):
        raise SettingsError("buckets.resolutions names the same resolution twice", "name each resolution once")
    placed: dict[Size, list[Placement]] = {}
    left_out: list[Problem] = []
    for resolution in resolutions:
        sizes = bucket_sizes(resolution, step, buckets.max_aspect)
        for index, item in enumerate(items):
            size = _nearest(item.size, sizes)
            if not buckets.upscale and not _covers(item.size, size):
                size = _not_larger(item.size, step, resolution, buckets.max_aspect)
                if min(size) < step:
                    left_out.append(_too_small(item, step))
                    continue
            placed.setdefault(size, []).append(_place(index, item.size, size))
    made = tuple(Bucket(size, tuple(placed[size])) for size in sorted(placed))
    return BucketPlan(made, tuple(left_out), batch_size)


def bucket_step(buckets: schema.Buckets, *, native_resolution: int, multiple: int) -> int:
    """The px that bucket sides are multiples of. Raises SettingsError when `buckets.step` does not fit the base."""
    if buckets.step is None:
        # 64 px keeps the number of shapes, and with it compilation and ragged batches, small on full-size bases.
        return math.ceil(64 / multiple) * multiple if native_resolution >= 512 else multiple
    if buckets.step % multiple:
        lower = buckets.step // multiple * multiple
        choices = " or ".join(str(value) for value in (lower, lower + multiple) if value > 0)
        raise SettingsError(
            f"buckets.step is {buckets.step} px, but sides must be multiples of {multiple} px for this base",
            f"set buckets.step to {choices}, or leave it unset",
        )
    return buckets.step


def _nearest(size: Size, sizes: Sequence[Size]) -> Size:
    """The bucket with the smallest |log(aspect / aspect)|; of equally near ones the larger, then the first."""
    aspect = math.log(size[1] / size[0])

    def distance(bucket: Size) -> tuple[float, int, Size]:
        # Rounded, so that a tie between a bucket and its transpose does not hang on the last bit of a logarithm.
        return round(abs(math.log(bucket[1] / bucket[0]) - aspect), 9), -bucket[0] * bucket[1], bucket

    return min(sizes, key=distance)


def _covers(size: Size, bucket: Size) -> bool:
    return size[0] >= bucket[0] and size[1] >= bucket[1]


def _not_larger(size: Size, step: int, resolution: int, max_aspect: float) -> Size:
    """The largest bucket inside an image of `size`, within the limits of `bucket_sizes`; a side is 0 if none fits."""
    short, long = (side // step * step for side in sorted(size))
    long = min(long, math.floor(short * max_aspect + 1e-9) // step * step)
    while short * long > resolution**2:
        long -= step
    return (short, long) if size[0] <= size[1] else (long, short)


def _place(index: int, size: Size, bucket: Size) -> Placement:
    """Cover the bucket with the image, then crop around the centre."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    height, width = (max(edge, round(side * scale)) for edge, side in zip(bucket, size, strict=True))
    return Placement(
        item=index,
        bucket=bucket,
        resized=(height, width),
        top=(height - bucket[0]) // 2,
        left=(width - bucket[1]) // 2,
        crop_loss=1.0 - bucket[0] * bucket[1] / (height * width),
        scale=scale,
    )


def _too_small(item: Item, step: int) -> Problem:
    return Problem(
        item.name,
        f"{item.size[1]}x{item.size[0]} px holds no bucket of at least {step} px a side, and buckets.upscale is off",
        "set buckets.upscale = true, lower buckets.step, or replace the image",
    )
