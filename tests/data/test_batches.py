"""Which images a step sees: everything exactly as often as asked, reproducibly, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.batches import MicroBatch, Sample, Sampler, total_steps
from engine.data.buckets import BucketPlan, plan
from engine.data.items import Item, Size
from engine.errors import DatasetError
from engine.settings import schema

SHAPES: tuple[Size, ...] = ((48, 48), (40, 56), (64, 32))
COUNTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
SMALL = st.integers(1, 5)


def bucket_plan(counts: list[int]) -> BucketPlan:
    """A plan with so many images of each of SHAPES."""
    shapes = [shape for shape, count in zip(SHAPES, counts, strict=True) for _ in range(count)]
    items = [Item(Path("a"), f"{i}.png", shape, "", "", None, None, 1) for i, shape in enumerate(shapes)]
    return plan(items, schema.Buckets(), native_resolution=48, multiple=8, batch_size=1)


def sampler(
    counts: list[int], *, batch_size: int = 2, accumulation: int = 1, seed: int = 0, flip: bool = False, ranks: int = 1
) -> Sampler:
    made = bucket_plan(counts)
    repeats = [1 + index % 3 for index in range(made.images)]
    return Sampler(
        made, repeats, batch_size=batch_size, accumulation=accumulation, seed=seed, flip=flip, world_size=ranks
    )


def epoch_of(sampled: Sampler, epoch: int = 0, rank: int = 0) -> list[MicroBatch]:
    steps = range(epoch * sampled.steps_per_epoch, (epoch + 1) * sampled.steps_per_epoch)
    return [batch for step in steps for batch in sampled.window(step, rank)]


def counted(batches: list[MicroBatch]) -> Counter[Sample]:
    """How often each sample counts."""
    pairs = [pair for batch in batches for pair in zip(batch.samples, batch.weights, strict=True)]
    return Counter(sample for sample, weight in pairs if weight == 1.0)


@settings(max_examples=60)
@given(COUNTS, SMALL, SMALL, st.integers(0, 2**31 - 1), st.booleans(), st.integers(0, 3))
def test_each_sample_is_seen_exactly_repeats_times_an_epoch(
    counts: list[int], batch_size: int, accumulation: int, seed: int, flip: bool, epoch: int
) -> None:
    sampled = sampler(counts, batch_size=batch_size, accumulation=accumulation, seed=seed, flip=flip)
    placements = bucket_plan(counts).placements
    expected = Counter(
        {
            Sample(index, flipped): 1 + placement.item % 3
            for index, placement in enumerate(placements)
            for flipped in ([False, True] if flip else [False])
        }
    )
    assert counted(epoch_of(sampled, epoch)) == expected
    assert sampled.images_per_epoch == expected.total()


@settings(max_examples=60)
@given(COUNTS, SMALL, SMALL, st.integers(1, 4))
def test_a_batch_holds_one_size_and_partial_batches_and_windows_are_trained(
    counts: list[int], batch_size: int, accumulation: int, ranks: int
) -> None:
    sampled = sampler(counts, batch_size=batch_size, accumulation=accumulation, ranks=ranks)
    placements = bucket_plan(counts).placements
    windows = [sampled.window(step) for step in range(sampled.steps_per_epoch)]
    assert all(1 <= len(window) <= accumulation for window in windows)
    assert all(len(window) == accumulation for window in windows[:-1])
    assert sum(len(window) for window in windows) == sampled.batches_per_epoch
    for batch in epoch_of(sampled):
        assert 1 <= len(batch.samples) <= batch_size
        assert {placements[sample.placement].bucket for sample in batch.samples} == {batch.bucket}


@settings(max_examples=60)
@given(COUNTS, SMALL, SMALL, st.integers(2, 4), st.booleans())
def test_the_union_over_ranks_is_what_one_rank_with_the_whole_batch_sees(
    counts: list[int], batch_size: int, accumulation: int, ranks: int, flip: bool
) -> None:
    split = sampler(counts, batch_size=batch_size, accumulation=accumulation, ranks=ranks, flip=flip)
    whole = sampler(counts, batch_size=batch_size * ranks, accumulation=accumulation, flip=flip)
    assert split.steps_per_epoch == whole.steps_per_epoch
    for step in range(whole.steps_per_epoch):
        shares = [split.window(step, rank) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        for number, batch in enumerate(whole.window(step)):
            parts = [share[number] for share in shares]
            assert counted(parts) == counted([batch])
            assert {part.bucket for part in parts} == {batch.bucket}
            assert len({len(part.samples) for part in parts}) == 1, "all ranks make the same calls"


@settings(max_examples=30)
@given(COUNTS, SMALL, st.integers(0, 60))
def test_any_step_can_be_asked_for_directly_so_resuming_is_exact(
    counts: list[int], accumulation: int, start: int
) -> None:
    whole = sampler(counts, accumulation=accumulation, seed=7)
    straight = [whole.window(step) for step in range(start + 5)]
    resumed = sampler(counts, accumulation=accumulation, seed=7)
    assert [resumed.window(step) for step in range(start, start + 5)] == straight[start:]
    assert resumed.window(0) == straight[0], "going back works too"


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [str(epoch_of(sampler([9, 9, 9], seed=seed), epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert len(set(orders)) == 4


def test_the_global_random_state_is_neither_used_nor_moved() -> None:
    np.random.seed(1)
    before = str(np.random.get_state())
    first = epoch_of(sampler([9, 9, 9]))
    assert str(np.random.get_state()) == before
    np.random.seed(2)
    assert epoch_of(sampler([9, 9, 9])) == first


def test_sizes_are_mixed_over_the_epoch_instead_of_trained_one_after_the_other() -> None:
    sizes = [batch.bucket for batch in epoch_of(sampler([9, 9, 9], batch_size=1))]
    changes = sum(before != after for before, after in pairwise(sizes))
    assert changes > 10  # 2 if sorted by size; 36 of 53 on average


def test_a_rank_without_a_sample_gets_a_weightless_repeat() -> None:
    (batch,) = sampler([1, 0, 0], ranks=3).window(0, rank=2)
    assert batch.weights == (0.0,) and len(batch.samples) == 1


def test_position_counts_epochs_and_windows_from_zero() -> None:
    sampled = sampler([4, 0, 0], batch_size=2, accumulation=2)  # 1+2+3+1 samples: 4 batches, 2 steps
    assert [sampled.position(step) for step in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_total_steps_are_those_that_were_given_or_counted_by_the_sampler() -> None:
    sampled = sampler([4, 0, 0], batch_size=2, accumulation=2)
    assert total_steps(schema.Train(steps=77), sampled) == 77
    assert total_steps(schema.Train(epochs=5), sampled) == 10
    assert total_steps(schema.Train(), sampled) == 1500


def test_a_plan_without_images_is_refused_with_the_reasons() -> None:
    items = [Item(Path("a"), "tiny.png", (4, 4), "", "", None, None, 1)]
    empty = plan(items, schema.Buckets(upscale=False), native_resolution=48, multiple=8, batch_size=1)
    with pytest.raises(DatasetError, match=r"tiny\.png"):
        Sampler(empty, [1], batch_size=1, accumulation=1, seed=0, flip=False)
