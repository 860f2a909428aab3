"""Number formats: fp16's gradient scale, autocast around single forwards, dtypes that stay what they should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.errors import SettingsError, TrainingError
from engine.plan import plan_base
from engine.precision import Precision, all_finite, checksum, pick_precision
from tests.training import choose, make_trainer

CPU = torch.device("cpu")


def step_with_gradient(precision: Precision, value: float) -> tuple[bool, float]:
    """One step on a single weight of 1; (was it taken, the weight afterwards)."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    precision.backward((weight * value).sum())
    precision.unscale(optimizer)
    return precision.step(optimizer), float(weight.detach())


# --- fp16 -------------------------------------------------------------------------------------------------------------


def test_fp16_starts_with_a_scale_of_32768_and_the_others_with_none() -> None:
    assert Precision("fp16", CPU).scale == 32768.0
    assert Precision("bf16", CPU).scale is None and Precision("fp32", CPU).scale is None


def test_the_scale_does_not_change_the_step() -> None:
    assert step_with_gradient(Precision("fp16", CPU), 3.0) == (True, pytest.approx(1 - 3e-3))
    assert step_with_gradient(Precision("fp32", CPU), 3.0) == (True, pytest.approx(1 - 3e-3))


def test_R68_a_step_that_overflows_is_left_out_and_halves_the_scale() -> None:
    precision = Precision("fp16", CPU)
    assert step_with_gradient(precision, float("inf")) == (False, 1.0)
    assert precision.scale == 16384.0
    assert step_with_gradient(precision, 1.0)[0]


def test_a_scale_below_one_stops_the_run_and_says_what_to_do() -> None:
    precision = Precision("fp16", CPU)
    with pytest.raises(TrainingError, match="overflows again and again") as caught:
        for _ in range(20):
            step_with_gradient(precision, float("inf"))
    assert "bf16" in caught.value.hint
    assert precision.scale == 0.5, "stopped at once: fifteen halvings lead to 1, the sixteenth below"


def test_the_scale_goes_into_the_checkpoint_and_comes_back() -> None:
    precision, again = Precision("fp16", CPU), Precision("fp16", CPU)
    step_with_gradient(precision, float("inf"))
    step_with_gradient(precision, 1.0)
    again.load_state(precision.state())
    assert again.state() == precision.state() != Precision("fp16", CPU).state()
    assert Precision("fp32", CPU).state() == {}


# --- autocast ---------------------------------------------------------------------------------------------------------


def test_R50_an_autocast_region_for_each_forward_sees_new_weights() -> None:
    precision = Precision("bf16", CPU)

    def losses(region: Callable[[], Any], whole: Callable[[], Any]) -> list[float]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        inputs, goal = torch.randn(16, 8), torch.randn(16, 8)
        found = []
        with whole():
            for _ in range(4):
                with region():
                    loss = (layer(inputs).float() - goal).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        return found

    import contextlib

    ours = losses(precision.autocast, contextlib.nullcontext)
    assert ours == sorted(ours, reverse=True) and len(set(ours)) == 4
    assert len(set(losses(contextlib.nullcontext, precision.autocast))) == 1, "the fault: one region serves stale casts"


def test_R84_autocast_is_opened_around_a_forward_and_nowhere_else() -> None:
    folder = Path(engine.__file__).parent
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"\bautocast\(", path.read_text(encoding="utf-8")) and "embedded" not in path.parts
    }
    # flux1 only switches it off, around an encoder that is not trained
    assert found == {"precision.py", "denoiser.py", "sampling.py", "export.py", "families/flux1.py"}
    trainer = (folder / "trainer.py").read_text(encoding="utf-8")
    assert "autocast" not in trainer


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "base_dtype", "precision"),
    [
        ((), torch.float32, "fp32"),
        (("train.precision='bf16'",), torch.float32, "bf16"),
        (("train.precision='bf16'", "base.dtype='bf16'"), torch.bfloat16, "bf16"),
        (("train.precision='bf16'", "base.dtype='fp32'"), torch.float32, "bf16"),
        (("train.precision='fp16'", "base.dtype='fp16'"), torch.float16, "fp16"),
    ],
)
def test_R81_the_bases_dtype_is_what_the_settings_say(
    overrides: tuple[str, ...], base_dtype: torch.dtype, precision: str, base: Callable[[str], Path], pictures: Path
) -> None:
    found = plan_base(choose(base("sd15"), pictures, *overrides))
    assert (found.dtype, found.precision) == (base_dtype, precision)


def test_half_format_weights_without_half_format_computation_are_refused(
    base: Callable[[str], Path], pictures: Path
) -> None:
    with pytest.raises(SettingsError, match=r"base\.dtype") as caught:
        plan_base(choose(base("sd15"), pictures, "base.dtype='bf16'"))
    assert "train.precision = 'bf16'" in caught.value.hint


def test_auto_precision_is_fp32_on_a_cpu() -> None:
    assert pick_precision("auto", CPU) == "fp32"
    assert pick_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize("family", ["sd15", "flux1"])
def test_R82_float32_masters_over_a_half_format_base_keep_their_low_bits(
    family: str, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    half = ("train.precision='bf16'", "base.dtype='bf16'", "train.ema_decay=0.9", "method.dora=true")
    trainer = make_trainer(choose(base(family), pictures, *half), tmp_path)
    assert trainer.parts["vae"].dtype == torch.float32
    frozen = {p.dtype for name, p in trainer.bundle.named_parameters() if "lora_" not in name}
    assert frozen == {torch.bfloat16}
    for step in range(3):
        trainer._train_step(step)
    parameters = trainer.weights.parameters("policy")
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    for tensors in (parameters, trainer.weights.lagging("ema")):
        low_bits = [not torch.equal(tensor.detach(), tensor.detach().bfloat16().float()) for tensor in tensors.values()]
        assert all(low_bits)
    assert trainer._proof()["base_unchanged"]


def test_a_run_in_fp16_trains_and_notes_its_scale(base: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    from engine import events
    from tests.training import read_events

    trainer = make_trainer(choose(base("sd15"), pictures, "train.precision='fp16'"), tmp_path)
    for step in range(2):
        trainer._train_step(step)
    found = read_events(trainer.run_folder, events.Loss)
    assert [event.scale for event in found] == [32768.0, 32768.0]
    assert trainer._proof()["weights"]["moved"] == trainer._proof()["weights"]["of"]


# --- checks -----------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters and buffers of every shape and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.number = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0))


@pytest.mark.parametrize("name", ["weight", "short", "number", "count", "flags"])
def test_the_checksum_sees_the_smallest_change_of_anything(name: str) -> None:
    module = Odd()
    before = checksum(module)
    assert checksum(module) == before
    tensor = module.get_parameter(name) if name in dict(module.named_parameters()) else module.get_buffer(name)
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    bits[0] ^= 1
    assert checksum(module) != before
    changed = checksum(module, skip=[name])
    bits[0] ^= 1
    assert checksum(module) == before
    assert checksum(module, skip=[name]) == changed, "what is left out is not looked at"


def test_the_checksum_sees_two_values_that_changed_places() -> None:
    module = Odd()
    before = checksum(module)
    module.weight.data = module.weight.data.flip(0)
    assert checksum(module) != before


def test_a_single_value_that_is_not_finite_is_found() -> None:
    assert all_finite([torch.ones(3), torch.zeros(0)])
    assert not all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
