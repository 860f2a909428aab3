"""The training loop costs little over a bare PyTorch loop, and the script that measures it works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.trainer_overhead import measure


def test_the_benchmark_runs_on_any_small_base(base: Callable[[str], Path]) -> None:
    """Only that it runs: against a base this small, a few checks are a large share."""
    result = measure(str(base("sd15")), batch_size=2, steps=2, blocks=2)
    assert result["steps"] == 4 and result["threads"] == 1
    assert result["ratio"] > 0 and set(result["wall_ms"]) == set(result["cpu_ms"]) == {"ours", "bare"}


@pytest.mark.slow
def test_the_loop_costs_less_than_a_tenth_of_a_step_on_the_embedded_base() -> None:
    """Measured at 1.03 of processor time, by turns in one process; the bound leaves room for busy machines."""
    result = measure("embedded/unet", batch_size=4, steps=4, blocks=6)
    assert result["ratio"] < 1.10, result
