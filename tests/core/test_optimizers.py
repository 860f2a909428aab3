"""Optimizers that train and go on bit for bit, and learning rates against published schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine import optim
from engine.errors import CheckpointError, SettingsError
from engine.optim import RoleOptimizer, lr_factor, warmup_steps
from engine.settings import schema
from engine.settings.schema import Constant, Cosine, CosineRestarts, Linear

OPTIMIZERS: dict[str, Any] = {
    "adamw": schema.AdamW(lr=1e-2),
    "adafactor": schema.Adafactor(lr=1e-1),
    "prodigy": schema.Prodigy(),
    "schedule_free": schema.ScheduleFree(lr=1e-2),
    "lion": schema.Lion(lr=5e-3),
}
EVERY = pytest.mark.parametrize("name", OPTIMIZERS)


class Toy:
    """Two factors and a bias, as a LoRA has matrices of odd shapes, that should become a given matrix."""

    def __init__(self, settings: Any, schedule: Any = Constant(warmup_steps=2), total: int = 200) -> None:  # noqa: B008
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            "down.weight": nn.Parameter(torch.randn(3, 6, generator=generator) * 0.3),
            "up.weight": nn.Parameter(torch.zeros(5, 3)),
            "bias": nn.Parameter(torch.zeros(5, 1)),
        }
        self.goal = torch.randn(5, 6, generator=generator)
        self.optimizer = RoleOptimizer(settings, schedule, self.parameters, total)

    def loss(self) -> torch.Tensor:
        down, up, bias = self.parameters.values()
        return (up @ down + bias - self.goal).square().mean()

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            self.optimizer.set_step(step)
            loss = self.loss()
            loss.backward()
            self.optimizer.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def through_files(state: tuple[dict[str, torch.Tensor], dict[str, Any]], folder: Path) -> tuple[Any, Any]:
    """The state as a checkpoint carries it: safetensors and JSON."""
    tensors, plain = state
    save_file(tensors, folder / "state.safetensors")
    return load_file(folder / "state.safetensors"), json.loads(json.dumps(plain))


@EVERY
def test_every_optimizer_really_trains(name: str) -> None:
    losses = Toy(OPTIMIZERS[name]).train(0, 150)
    assert losses[-1] < 0.7 * losses[0]


@EVERY
def test_every_optimizer_goes_on_bit_for_bit_from_its_saved_state(name: str, tmp_path: Path) -> None:
    schedule = Constant(warmup_steps=2) if name == "schedule_free" else Cosine(warmup_steps=2)
    whole, again = Toy(OPTIMIZERS[name], schedule), Toy(OPTIMIZERS[name], schedule)
    whole.train(0, 5)
    tensors, plain = through_files(whole.optimizer.state(), tmp_path)
    for key, parameter in again.parameters.items():
        parameter.data.copy_(whole.parameters[key])
    again.optimizer.load_state(tensors, plain)
    assert again.train(5, 6) == whole.train(5, 6)
    for key, parameter in again.parameters.items():
        assert torch.equal(parameter, whole.parameters[key]), key
    ours, theirs = again.optimizer.state(), whole.optimizer.state()
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0])


def test_state_that_an_optimizer_nests_is_saved_too(tmp_path: Path) -> None:
    """As bitsandbytes does with its 8-bit tensors; it loads them from the upper level as well."""
    toy = Toy(schema.AdamW())
    toy.train(0, 2)
    plain_state = toy.optimizer.optimizer.state_dict

    def nested() -> dict[str, Any]:
        found = plain_state()
        found["state"] = {
            i: {"step": s["step"], "__quantised__": {k: v for k, v in s.items() if k != "step"}}
            for i, s in found["state"].items()
        }
        return found

    expected, _ = toy.optimizer.state()
    toy.optimizer.optimizer.state_dict = nested  # type: ignore[method-assign]
    tensors, _ = through_files(toy.optimizer.state(), tmp_path)
    assert tensors.keys() == expected.keys()


@EVERY
def test_the_state_of_other_weights_is_refused(name: str) -> None:
    toy = Toy(OPTIMIZERS[name])
    toy.train(0, 2)
    tensors, plain = toy.optimizer.state()
    other = RoleOptimizer(OPTIMIZERS[name], Constant(), {"elsewhere.weight": nn.Parameter(torch.zeros(3, 6))}, 10)
    with pytest.raises(CheckpointError, match="other weights"):
        other.load_state(tensors, plain)


@EVERY
def test_evaluating_gives_the_training_weights_back_bit_for_bit(name: str) -> None:
    watched, unwatched = Toy(OPTIMIZERS[name]), Toy(OPTIMIZERS[name])
    for step in range(0, 12, 3):
        watched.train(step, 3)
        unwatched.train(step, 3)
        before = [p.detach().clone() for p in watched.parameters.values()]
        with watched.optimizer.evaluation():
            moved = any(not torch.equal(a, b) for a, b in zip(before, watched.parameters.values(), strict=True))
            assert moved == (name == "schedule_free")
        assert all(torch.equal(a, b) for a, b in zip(before, watched.parameters.values(), strict=True))
    assert all(torch.equal(watched.parameters[k], unwatched.parameters[k]) for k in watched.parameters)


def test_what_a_user_gets_from_schedule_free_is_its_average() -> None:
    toy = Toy(OPTIMIZERS["schedule_free"])
    toy.train(0, 60)
    noisy = toy.loss().detach()
    with toy.optimizer.evaluation():
        assert not torch.equal(toy.loss(), noisy)
    group = toy.optimizer.optimizer.param_groups[0]
    assert group["train_mode"]


def test_the_shown_learning_rate_contains_the_step_size_that_prodigy_found() -> None:
    toy = Toy(schema.Prodigy(d_coef=2.0))
    toy.train(0, 20)
    assert 0 < toy.optimizer.effective_lr < 1
    assert toy.optimizer.effective_lr == pytest.approx(toy.optimizer.optimizer.param_groups[0]["d"])


def test_R60_one_optimizer_setting_serves_the_only_role_that_trains() -> None:
    toy = Toy(schema.AdamW(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2))
    (group,) = toy.optimizer.optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 0.2)
    assert toy.optimizer.set_step(100) == 3e-3


# --- learning rates ---------------------------------------------------------------------------------------------------

SCHEDULES = [
    Constant(),
    Constant(cooldown_steps=10),
    Linear(),
    Linear(final=0.2),
    Cosine(),
    Cosine(final=0.1),
    CosineRestarts(),
    CosineRestarts(cycles=5, final=0.3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("warmup", [0, 1, 7, None])
def test_warm_up_rises_from_more_than_zero_and_no_step_is_wasted(schedule: Any, warmup: int | None) -> None:
    chosen = schedule.model_copy(update={"warmup_steps": warmup})
    factors = [lr_factor(chosen, step, 100) for step in range(100)]
    rise = factors[: warmup_steps(chosen, 100) + 1]
    assert rise == sorted(rise) and len(set(rise)) == len(rise)
    assert rise[-1] == 1.0
    assert all(0 < factor <= 1 for factor in factors)


@pytest.mark.parametrize(
    ("schedule", "name", "extra"),
    [
        (Linear(warmup_steps=10), "linear", {}),
        (Cosine(warmup_steps=10), "cosine", {}),
        (CosineRestarts(cycles=3, warmup_steps=10), "cosine_with_restarts", {"num_cycles": 3}),
        (Constant(warmup_steps=10), "constant_with_warmup", {}),
    ],
)
def test_after_the_warm_up_the_schedules_are_diffusers_own(schedule: Any, name: str, extra: dict[str, int]) -> None:
    from diffusers.optimization import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = get_scheduler(name, optimizer, num_warmup_steps=10, num_training_steps=100, **extra)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert [lr_factor(schedule, step, 100) for step in range(10, 100)] == pytest.approx(expected[10:], abs=1e-9)


def test_a_cosine_that_ends_above_zero_is_torchs_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    for step in range(50):
        assert lr_factor(Cosine(warmup_steps=0, final=0.1), step, 50) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()


def test_a_constant_rate_cools_down_at_the_very_end_only() -> None:
    factors = [lr_factor(Constant(warmup_steps=0, cooldown_steps=4), step, 20) for step in range(20)]
    assert factors[:16] == [1.0] * 16
    assert factors[16:] == [1.0, 0.75, 0.5, 0.25]


def test_warm_up_is_a_twentieth_of_the_run_and_a_hundred_steps_at_most() -> None:
    assert [warmup_steps(Constant(), total) for total in (10, 200, 1500, 100_000)] == [0, 10, 75, 100]
    assert warmup_steps(Constant(warmup_steps=3), 100_000) == 3


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_eight_bit_state_is_refused_without_a_cuda_device() -> None:
    with pytest.raises(SettingsError, match=r"optimizer\.bits"):
        optim.require_available(schema.AdamW(bits=8), Constant(), torch.device("cpu"))


@pytest.mark.parametrize("schedule", [Cosine(), Linear(), CosineRestarts(), Constant(cooldown_steps=5)], ids=repr)
def test_schedule_free_is_refused_with_a_falling_rate(schedule: Any) -> None:
    with pytest.raises(SettingsError, match="schedule_free"):
        optim.require_available(schema.ScheduleFree(), schedule, torch.device("cpu"))
    optim.require_available(schema.ScheduleFree(), Constant(warmup_steps=5), torch.device("cpu"))
