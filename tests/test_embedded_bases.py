"""The bases that ship: whole, small, ordinary, and as good as their document says."""

from __future__ import annotations

from pathlib import Path

import pytest

import engine

EMBEDDED = Path(engine.__file__).parent / "embedded"
BASES = ("unet", "flow")
SHARED = ("vae", "text_encoder", "tokenizer")
FLOORS = {"unet": 0.85, "flow": 0.75}  # share of held-out pairs whose shape is right


def test_both_bases_hold_the_very_same_vae_and_clip() -> None:
    for component in SHARED:
        first, second = (EMBEDDED / base / component for base in BASES)
        files = sorted(path.name for path in first.iterdir())
        assert files and files == sorted(path.name for path in second.iterdir())
        assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)


def test_all_weights_are_half_precision_safetensors_and_small_enough_to_ship() -> None:
    from safetensors import safe_open

    weights = [path for base in BASES for path in (EMBEDDED / base).rglob("*.safetensors")]
    assert len(weights) == 7
    for path in weights:
        with safe_open(path, "pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} <= {"F16", "I64"}  # noqa: SIM118
    assert sum(path.stat().st_size for base in BASES for path in (EMBEDDED / base).rglob("*")) < 12e6


@pytest.mark.parametrize("base", BASES)
def test_every_size_that_is_offered_for_a_base_is_among_those_it_was_trained_at(base: str) -> None:
    from engine.data.buckets import bucket_sizes
    from engine.families.registry import open_base
    from engine.settings.schema import Base, Buckets

    family, located = open_base(Base(source=f"embedded/{base}"))
    side = family.resolution(located)
    offered = bucket_sizes(side, family.pixel_multiple(located), Buckets().max_aspect)
    assert set(offered) | {(side, side)} == set(located.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_pictures_show_what_the_prompt_says_also_for_pairs_the_denoiser_never_saw(base: str) -> None:
    from engine.embedded.measure import measure_base

    results, _ = measure_base(EMBEDDED / base, count=64, seed=123)
    held_out = results["held_out"]
    assert min(held_out["colour"], held_out["background"], held_out["position"]) >= 0.95
    assert held_out["shape"] >= FLOORS[base] - 0.06  # one standard error of 64 pictures
