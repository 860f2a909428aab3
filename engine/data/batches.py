"""Which images a step looks at: a pure function of (seed, epoch, step, world size), without any global state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DatasetError
from ..settings import schema
from .buckets import BucketPlan
from .items import Size

DEFAULT_STEPS = 1500
_STREAM = 0x6261_7463  # keeps these draws apart from others that are seeded with (seed, epoch) too


@dataclass(frozen=True)
class Sample:
    """One image of a batch: a position in `BucketPlan.placements`, and whether it is mirrored left to right."""

    placement: int
    flipped: bool


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at once: samples of one size.

    `weights` are 1.0 for samples that count and 0.0 for repeats that only fill up a rank, so that all ranks make the
    same calls. Over all ranks the weights of one global batch sum to its number of samples.
    """

    bucket: Size
    samples: tuple[Sample, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _GlobalBatch:
    bucket: Size
    samples: tuple[Sample, ...]


class Sampler:
    """Batches of a bucket plan, epoch after epoch; any step can be asked for directly, which makes resuming exact.

    In an epoch every placement is seen exactly `repeats[placement.item]` times, with `flip` as often again mirrored.
    Samples are shuffled within their bucket, cut into batches of `batch_size * world_size` and the batches are shuffled
    over all buckets. The last batch of a bucket may be smaller, the last window of an epoch shorter; both are trained.
    The order depends on the global batch size only, so 2 ranks of 2 see what 1 rank of 4 sees.

    Raises DatasetError when the plan holds no image.
    """

    def __init__(
        self,
        plan: BucketPlan,
        repeats: Sequence[int],
        *,
        batch_size: int,
        accumulation: int,
        seed: int,
        flip: bool,
        world_size: int = 1,
    ) -> None:
        if not plan.images:
            raise DatasetError("no image is left to train on", "see the reasons above", problems=plan.left_out)
        self.seed = seed
        self.world_size = world_size
        self.accumulation = accumulation
        self._global_size = batch_size * world_size
        self._pools: list[tuple[Size, list[Sample]]] = []
        start = 0
        for bucket in plan.buckets:
            pool = [
                Sample(start + offset, flipped)
                for offset, placement in enumerate(bucket.placements)
                for flipped in ((False, True) if flip else (False,))
                for _ in range(repeats[placement.item])
            ]
            self._pools.append((bucket.size, pool))
            start += len(bucket.placements)
        self._epoch = -1
        self._order: list[_GlobalBatch] = []

    @property
    def images_per_epoch(self) -> int:
        """Samples that count in one epoch, over all ranks."""
        return sum(len(pool) for _, pool in self._pools)

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of each rank in one epoch."""
        return sum(math.ceil(len(pool) / self._global_size) for _, pool in self._pools)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return math.ceil(self.batches_per_epoch / self.accumulation)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, window in that epoch) of an optimizer step; all three count from 0."""
        return divmod(step, self.steps_per_epoch)

    def window(self, step: int, rank: int = 0) -> list[MicroBatch]:
        """The micro-batches whose gradients rank `rank` adds up for optimizer step `step`: 1 to `accumulation`."""
        epoch, window = self.position(step)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        chosen = self._order[window * self.accumulation : (window + 1) * self.accumulation]
        return [self._share(batch, rank) for batch in chosen]

    def _epoch_order(self, epoch: int) -> list[_GlobalBatch]:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, self.seed, epoch])))
        batches: list[_GlobalBatch] = []
        for size, pool in self._pools:
            shuffled = [pool[index] for index in _permutation(random, len(pool))]
            for start in range(0, len(shuffled), self._global_size):
                batches.append(_GlobalBatch(size, tuple(shuffled[start : start + self._global_size])))
        return [batches[index] for index in _permutation(random, len(batches))]

    def _share(self, batch: _GlobalBatch, rank: int) -> MicroBatch:
        """Every `world_size`-th sample, filled up with weightless repeats to the size that rank 0 gets."""
        size = math.ceil(len(batch.samples) / self.world_size)
        own = batch.samples[rank :: self.world_size]
        padding = size - len(own)
        return MicroBatch(batch.bucket, own + batch.samples[:1] * padding, (1.0,) * len(own) + (0.0,) * padding)


def total_steps(train: schema.Train, sampler: Sampler) -> int:
    """Optimizer steps of the whole run: `train.steps`, or `train.epochs` counted by the sampler, or 1500."""
    if train.epochs is not None:
        return train.epochs * sampler.steps_per_epoch
    return train.steps if train.steps is not None else DEFAULT_STEPS


def _permutation(random: np.random.Generator, length: int) -> Iterator[int]:
    """A random order of range(length).

    Sorted raw 64-bit draws instead of `Generator.permutation`: numpy promises that the former stay the same in all its
    versions, and not the latter (NEP 19), so that a run can be resumed after an update.
    """
    draws = np.asarray(random.bit_generator.random_raw(length), dtype=np.uint64)
    return iter(np.argsort(draws, kind="stable").tolist())
