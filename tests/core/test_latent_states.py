"""The state a denoiser works on, and the one reduction over it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.state import LatentState, mean_active, per_sample


def film(batch: int = 2) -> LatentState:
    """A joint state: 16 video tokens, 6 audio tokens."""
    generator = torch.Generator().manual_seed(0)
    return LatentState(
        {
            "video": torch.randn(batch, 16, 4, generator=generator),
            "audio": torch.randn(batch, 6, 4, generator=generator),
        }
    )


def test_R1_the_order_of_components_is_part_of_the_value() -> None:
    state = film()
    other = LatentState({name: state[name] for name in ("audio", "video")})
    with pytest.raises(ValueError, match=r"\('video', 'audio'\), received \('audio', 'video'\)"):
        state.combine(other, torch.add)
    assert tuple(state.map(torch.neg)) == ("video", "audio")


def test_R1_a_state_of_one_component_is_a_bare_tensor() -> None:
    latents = torch.randn(2, 4, 8, 8)
    assert LatentState.single(latents).latent is latents
    assert LatentState.single(latents).batch_size == 2


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "at least one component"),
        ({"latent": torch.tensor(1.0)}, "'latent' has no batch axis"),
        ({"video": torch.zeros(2, 3), "audio": torch.zeros(3, 3)}, "disagree on the batch size"),
    ],
)
def test_R2_a_state_is_batched_or_refused(components: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentState(components)


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        (LatentState.single(torch.zeros(2, 1, 1, 1)), r"teacher: component 'latent' should be \(2, 4, 8, 8\)"),
        (LatentState.single(torch.zeros(1, 4, 8, 8)), "should be"),
        (LatentState.single(torch.zeros(2, 4, 8, 8, dtype=torch.int64)), "not a floating one"),
        (LatentState({"video": torch.zeros(2, 4, 8, 8)}), "expected components"),
        (LatentState.single(torch.zeros(2, 4, 8, 8, device="meta")), "on meta"),
    ],
)
def test_R3_a_prediction_that_would_broadcast_is_refused(prediction: LatentState, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentState.single(torch.zeros(2, 4, 8, 8)).require_prediction(prediction, "teacher")


def test_R3_components_of_a_prediction_share_one_dtype() -> None:
    state = film()
    mixed = LatentState({"video": state["video"], "audio": state["audio"].double()})
    with pytest.raises(ValueError, match="different dtypes"):
        state.require_prediction(mixed, "model")


def test_R28_one_value_a_sample_weighs_its_own_sample_only() -> None:
    level = torch.tensor([0.25, 0.5])
    errors = torch.randn(2, 4, 8, 8)
    together = mean_active(LatentState.single(per_sample(level, errors) * errors))
    by_hand = torch.stack([(level[i] * errors[i]).mean() for i in range(2)])
    assert together.shape == (2,)
    assert torch.allclose(together, by_hand, rtol=1e-6)


def test_R36_elements_weigh_equally_and_not_components() -> None:
    state = LatentState({"video": torch.ones(1, 100), "audio": torch.full((1, 4), 3.0).square()})
    assert mean_active(state).item() == pytest.approx((100 + 4 * 9) / 104)


def test_R37_what_is_already_reduced_is_refused() -> None:
    with pytest.raises(ValueError, match="already reduced"):
        mean_active(LatentState.single(torch.ones(4)))


def test_R35_masked_elements_count_neither_in_the_sum_nor_in_the_number() -> None:
    values = torch.tensor([[[1.0, 2.0, 3.0, 1e30]], [[4.0, 1e30, 1e30, 1e30]], [[1e30] * 4]]).requires_grad_()
    mask = torch.tensor([[[1.0, 1.0, 0.5, 0.0]], [[1.0, 0.0, 0.0, 0.0]], [[0.0] * 4]])
    reduced = mean_active(LatentState.single(values), LatentState.single(mask))
    assert reduced.tolist() == pytest.approx([(1 + 2 + 1.5) / 2.5, 4.0, 0.0])
    reduced.sum().backward()
    assert values.grad is not None and torch.isfinite(values.grad).all()
    assert values.grad[mask == 0].eq(0).all()


def test_R35_infinite_values_under_the_mask_do_not_count_either() -> None:
    values = torch.tensor([[[1.0, float("inf"), float("nan")]]])
    mask = torch.tensor([[[1.0, 0.0, 0.0]]])
    assert mean_active(LatentState.single(values), LatentState.single(mask)).tolist() == [1.0]


def test_R35_a_mask_of_one_channel_covers_all_channels() -> None:
    values = torch.randn(2, 4, 8, 8)
    mask = (torch.rand(2, 1, 8, 8) > 0.5).float()
    expected = torch.stack([values[i][mask[i].expand(4, 8, 8) > 0].mean() for i in range(2)])
    assert torch.allclose(mean_active(LatentState.single(values), LatentState.single(mask)), expected, atol=1e-6)


def test_R44_a_lone_component_gives_the_very_numbers_of_the_plain_formula() -> None:
    prediction = torch.randn(3, 4, 8, 8, requires_grad=True)
    target = torch.randn(3, 4, 8, 8)
    ours = mean_active(LatentState.single(prediction).combine(LatentState.single(target), lambda p, t: (p - t) ** 2))
    plain = ((prediction - target) ** 2).flatten(1).mean(1)
    assert torch.equal(ours, plain)
    ours_gradient = torch.autograd.grad(ours.sum(), prediction)[0]
    assert torch.equal(ours_gradient, torch.autograd.grad(plain.sum(), prediction)[0])


def test_R44_a_mask_of_ones_is_no_mask() -> None:
    errors = LatentState.single(torch.randn(2, 4, 8, 8).square())
    ones = LatentState.single(torch.ones(2, 1, 8, 8))
    assert torch.allclose(mean_active(errors, ones), mean_active(errors), rtol=1e-6)
