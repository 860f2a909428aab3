"""The loop itself, with real parts: what a step does, what it refuses, and the proof at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from engine import checkpoints, events, plan
from engine.data.batches import MicroBatch, Sample
from engine.errors import SafelightError, TrainingError
from engine.exports.formats import read_lora
from engine.families import loading
from engine.loss_run import LossRun
from engine.methods.lora import weights_from_parameters
from engine.objectives.objective import Phase
from engine.state import LatentState
from tests.training import choose, make_trainer, read_events

POLICY = Phase("policy")
EVERY_FAMILY = pytest.mark.parametrize("name", ["sd15", "flux1"])


@pytest.fixture
def trainer(base: Callable[[str], Path], pictures: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(name: str, *overrides: str, folder: Path = pictures) -> Any:
        return make_trainer(choose(base(name), folder, *overrides), tmp_path / "workspace")

    return make


def snapshot(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.weights.parameters("policy").items()}


def moved(trainer: Any, before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in trainer.weights.parameters("policy").items() if not torch.equal(p, before[name])}


def steps(trainer: Any, count: int) -> None:
    for _ in range(count):
        trainer._train_step(trainer.step)
        trainer.step += 1


# --- a step -----------------------------------------------------------------------------------------------------------


@EVERY_FAMILY
def test_R80_the_first_step_moves_the_ups_only_and_the_second_everything(
    name: str, trainer: Callable[..., Any]
) -> None:
    ours = trainer(name, "optimizer.weight_decay=0.0")  # which moves weights without any gradient
    start = snapshot(ours)
    steps(ours, 1)
    assert moved(ours, start) == {n for n in start if ".lora_B." in n}, "the ups start at zero and hide the downs"
    first = snapshot(ours)
    steps(ours, 1)
    assert moved(ours, first) == set(start)
    report = ours.movement.report()
    changes = [float((p.detach() - start[n]).abs().max()) for n, p in ours.weights.parameters("policy").items()]
    assert (report["moved"], report["of"]) == (len(start), len(start))
    assert report["max_change"] == pytest.approx(max(changes))


@EVERY_FAMILY
def test_training_an_adapter_leaves_every_weight_of_the_base_as_it_was(name: str, trainer: Callable[..., Any]) -> None:
    ours = trainer(name)
    frozen = {n: p.detach().clone() for n, p in ours.bundle.named_parameters() if "lora_" not in n}
    steps(ours, 3)
    now = dict(ours.bundle.named_parameters())
    assert len(frozen) > 50 and all(torch.equal(now[n], value) for n, value in frozen.items())
    assert ours._proof()["base_unchanged"]
    now[next(iter(frozen))].data.view(-1)[0] += 1e-7
    assert not ours._proof()["base_unchanged"], "and the proof would have seen it"


@EVERY_FAMILY
def test_full_training_moves_every_weight(name: str, trainer: Callable[..., Any]) -> None:
    ours = trainer(name, "method.type='full'", "optimizer.lr=1e-3")
    start = snapshot(ours)
    steps(ours, 2)
    assert moved(ours, start) == set(start) == {n for n, _ in ours.bundle.named_parameters()}


def test_R104_a_step_is_loss_backward_clip_update_average_and_then_the_record(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer("sd15", "train.accumulation=2", "train.ema_decay=0.9")
    calls: list[str] = []

    def spy(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def record(*given: Any, **named: Any) -> Any:
            calls.append(label)
            return original(*given, **named)

        monkeypatch.setattr(owner, name, record)

    spy(ours.objective, "loss", "loss")
    spy(ours.precision, "backward", "backward")
    spy(ours.accelerator, "clip_grad_norm_", "clip")
    spy(ours.optimizers["policy"].optimizer, "step", "step")
    spy(ours.weights, "advance", "average")
    spy(ours.log, "append", "record")
    assert ours.bundle.training and len(ours.source.window(0)) == 2
    steps(ours, 1)
    assert calls == ["loss", "backward"] * 2 + ["clip", "step", "average", "record"]
    assert all(p.grad is None for p in ours.bundle.parameters())


def test_R65_gradients_are_clipped_over_the_whole_root_and_the_norm_is_from_before(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer("sd15", "train.max_grad_norm=1e-3", "optimizer.lr=1e-3")
    given: list[list[Tensor]] = []
    clip = ours.accelerator.clip_grad_norm_
    norms: list[float] = []

    def record(parameters: Any, limit: float) -> Any:
        given.append(list(parameters))
        norms.append(float(torch.stack([p.grad.norm() for p in given[-1] if p.grad is not None]).norm()))
        result = clip(given[-1], limit)
        left = torch.stack([p.grad.norm() for p in given[-1] if p.grad is not None]).norm()
        assert float(left) == pytest.approx(1e-3, rel=1e-3)
        return result

    monkeypatch.setattr(ours.accelerator, "clip_grad_norm_", record)
    steps(ours, 1)
    assert [id(p) for p in given[0]] == [id(p) for p in ours.root.parameters()]
    (event,) = read_events(ours.run_folder, events.Loss)
    assert event.grad_norm["policy"] == pytest.approx(norms[0])


def test_R101_the_record_of_a_step_has_fixed_names_by_role(trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15", "train.batch_size=2", "schedule.warmup_steps=1")
    steps(ours, 2)
    first, second = read_events(ours.run_folder, events.Loss)
    assert (first.step, second.step, first.epoch) == (1, 2, 0)
    assert (first.lr, second.lr) == ({"policy": 0.005}, {"policy": 0.01})
    assert first.grad_norm.keys() == {"policy"} and first.loss > 0 and first.seconds > 0 and first.scale is None


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fixed_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels and noise that belong to the sample, so that a window may be cut in any way."""

    def levels(run: LossRun, batch: Any) -> Tensor:
        wanted = torch.sigmoid(batch.clean.latent.flatten(1).sum(1)).double().clamp(0.1, 0.9)
        return run.denoiser.parameterisation.snap(wanted)

    def noise(run: LossRun, like: LatentState, offset: float = 0.0) -> LatentState:
        return like.map(lambda x: torch.cos(97 * x))

    monkeypatch.setattr(LossRun, "levels", levels)
    monkeypatch.setattr(LossRun, "noise", noise)


def gradients(trainer: Any, *sizes: int, weights: tuple[float, ...] | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the first samples of the largest bucket, cut into batches of these sizes."""
    bucket = max(trainer.plan.buckets.buckets, key=lambda bucket: len(bucket.placements))
    samples = [Sample(i, False) for i, p in enumerate(trainer.plan.buckets.placements) if p.bucket == bucket.size]
    assert len(samples) >= sum(sizes)
    window, start = [], 0
    for size in sizes:
        window.append(MicroBatch(bucket.size, tuple(samples[start : start + size]), weights or (1.0,) * size))
        start += size
    value, seen = trainer._accumulate(POLICY, 0, 0, window)
    assert len(seen) == sum(sizes)
    found = {n: p.grad.clone() for n, p in trainer.weights.parameters("policy").items()}
    trainer.optimizers["policy"].zero_grad()
    return value, found


def require_close(first: tuple[float, dict[str, Tensor]], second: tuple[float, dict[str, Tensor]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    for name, gradient in first[1].items():
        assert torch.allclose(gradient, second[1][name], rtol=1e-3, atol=1e-6), name


@EVERY_FAMILY
def test_a_window_weighs_every_sample_the_same_however_it_is_cut(
    name: str, trainer: Callable[..., Any], fixed_draws: None
) -> None:
    ours = trainer(name, "captions.dropout=0.0")
    steps(ours, 1)
    whole = gradients(ours, 4)
    require_close(gradients(ours, 2, 2), whole)
    require_close(gradients(ours, 3, 1), whole)
    require_close(gradients(ours, 1, 1, 1, 1), whole)
    assert whole[1].keys() == snapshot(ours).keys()


def test_a_sample_that_only_fills_up_a_batch_does_not_count(trainer: Callable[..., Any], fixed_draws: None) -> None:
    ours = trainer("sd15", "captions.dropout=0.0")
    steps(ours, 1)
    require_close(gradients(ours, 2, weights=(1.0, 0.0)), gradients(ours, 1))


def test_every_picture_is_seen_once_an_epoch_also_in_partial_batches(trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15", "train.batch_size=4", "train.accumulation=2", "train.epochs=2")
    sampler = ours.plan.sampler
    assert ours.plan.total_steps == 2 * sampler.steps_per_epoch
    for epoch in range(2):
        seen = [
            sample.placement
            for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
            for micro in ours.source.window(step)
            for sample in micro.samples
        ]
        assert sorted(seen) == list(range(9))


# --- what a batch holds -----------------------------------------------------------------------------------------------


def load(trainer: Any, *, seed: int = 0) -> Any:
    window = trainer.source.window(0)
    return trainer.source.load(window[0], torch.Generator().manual_seed(seed), live_text=False)


@EVERY_FAMILY
def test_a_dropped_caption_is_the_cached_empty_prompt(name: str, trainer: Callable[..., Any]) -> None:
    ours = trainer(name, "train.batch_size=4", "captions.dropout=1.0")
    empty = ours.source.conditioning("")
    batch = load(ours)
    for key, value in batch.text.items():
        assert all(torch.equal(row, empty[key]) for row in value)
        assert not value.requires_grad


@EVERY_FAMILY
def test_a_kept_caption_is_the_pictures_own(name: str, trainer: Callable[..., Any]) -> None:
    ours = trainer(name, "train.batch_size=4", "captions.dropout=0.0", "captions.trigger='zwx'")
    batch = load(ours)
    for index, file in enumerate(batch.files):
        number = Path(file).stem.removeprefix("picture-")
        own = ours.source.conditioning(f"zwx, a cloth of colour {number}")
        assert all(torch.equal(batch.text[key][index], own[key]) for key in own)


def test_captions_are_dropped_as_often_as_asked(trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15", "train.batch_size=4", "captions.dropout=0.3")
    empty = ours.source.conditioning("")["hidden"]
    rows = [row for seed in range(150) for row in load(ours, seed=seed).text["hidden"]]
    share = sum(torch.equal(row, empty) for row in rows) / len(rows)
    assert share == pytest.approx(0.3, abs=0.08)


def test_masked_training_does_not_look_at_what_is_hidden(
    trainer: Callable[..., Any], tmp_path: Path, fixed_draws: None
) -> None:
    folder = tmp_path / "masked"
    folder.mkdir()
    random = np.random.default_rng(1)
    for index in range(2):
        Image.fromarray(random.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a cloth", encoding="utf-8")
        mask = np.zeros((64, 64), dtype=np.uint8)
        mask[:, :32] = 255
        Image.fromarray(mask).save(folder / f"{index}.mask.png")
    ours = trainer("sd15", "dataset.masks='file'", "train.batch_size=2", folder=folder)
    batch = load(ours)
    assert batch.mask.latent.shape == (2, 1, 8, 8)
    assert batch.mask.latent[..., :4].eq(1).all() and batch.mask.latent[..., 4:].eq(0).all()
    plain, _ = ours.objective.loss(POLICY, batch, ours.loss_run)
    target = ours.loss_run.target

    def poisoned(*given: Any) -> LatentState:
        def poison(x: Tensor) -> Tensor:
            hidden = torch.zeros_like(x)
            hidden[..., 4:] = 1e6
            return x + hidden

        return target(*given).map(poison)

    ours.loss_run.target = poisoned
    hidden, _ = ours.objective.loss(POLICY, batch, ours.loss_run)
    assert torch.equal(plain, hidden) and plain.grad_fn is not None
    steps(ours, 1)


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    ("flux1", "objective.min_snr_gamma=5.0", "objective.min_snr_gamma"),
    ("sd15", "objective.shift='resolution'", "objective.shift"),
    ("sd15", "optimizer.bits=8", "optimizer.bits"),
    ("sd15", "optimizer.type='schedule_free' schedule.type='cosine'", "schedule_free"),
    ("sd15", "base.dtype='bf16'", "base.dtype"),
    ("sd15", "samples.size=[65, 64]", "samples.size"),
    ("sd15", "base.family='flux1'", "base.family"),
    ("sd15", "base.source='/nowhere/at/all'", "does not exist"),
    ("sd15", "base.source='model.ckpt'", "pickle"),
    ("sd15", "dataset.folder='/nowhere/at/all'", "/nowhere/at/all"),
    ("sd15", "method.targets=['nothing']", "method.targets"),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_R67_what_cannot_work_is_refused_before_any_weight_is_loaded(
    name: str,
    overrides: str,
    message: str,
    base: Callable[[str], Path],
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for loader in ("load", "_load_component", "_load_single_file"):
        monkeypatch.setattr(loading, loader, lambda *a, **k: pytest.fail("weights were loaded"))
    parts = overrides.split(" ") if "schedule" in overrides else [overrides]
    with pytest.raises(SafelightError, match=message):
        plan.plan_run(choose(base(name), pictures, *parts))


def test_R67_a_device_that_is_not_there_is_refused(base: Callable[[str], Path], pictures: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SafelightError, match=r"train\.device: there is no cuda"):
        plan.plan_run(choose(base("sd15"), pictures, "train.device='cuda'"))


@EVERY_FAMILY
def test_R86_gradient_checkpointing_reaches_the_blocks_and_changes_no_number(
    name: str, trainer: Callable[..., Any]
) -> None:
    plain, saving = trainer(name), trainer(name, "train.gradient_checkpointing=true", "name='saving'")
    flagged = [m for m in saving.bundle.denoiser.modules() if getattr(m, "gradient_checkpointing", False)]
    assert flagged and not any(getattr(m, "gradient_checkpointing", False) for m in plain.bundle.denoiser.modules())
    for ours in (plain, saving):
        steps(ours, 3)
    losses = [[event.loss for event in read_events(ours.run_folder, events.Loss)] for ours in (plain, saving)]
    assert losses[0] == losses[1]
    other = saving.weights.parameters("policy")
    assert all(torch.equal(p, other[n]) for n, p in plain.weights.parameters("policy").items())


def test_R86_a_denoiser_that_cannot_recompute_fails_before_the_first_step(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import UNet2DConditionModel

    monkeypatch.setattr(UNet2DConditionModel, "_supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="gradient checkpointing"):
        trainer("sd15", "train.gradient_checkpointing=true")


# --- numbers that are not finite --------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_file(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer("sd15", "train.batch_size=4", "train.accumulation=2")
    steps(ours, 1)
    ours._save()
    before, state = snapshot(ours), ours.optimizers["policy"].state()[0]
    loss = ours.objective.loss
    spoiled: list[str] = []

    def spoil(phase: Phase, batch: Any, run: Any) -> Any:
        values, metrics = loss(phase, batch, run)
        factor = torch.ones_like(values)
        if not spoiled:
            spoiled.append(batch.files[-1])
            factor[-1] = float("nan")
        return values * factor, metrics

    monkeypatch.setattr(ours.objective, "loss", spoil)
    with pytest.raises(TrainingError, match="loss of step 2 is not finite") as caught:
        ours._train_step(1)
    assert [problem.where for problem in caught.value.problems] == spoiled
    assert not moved(ours, before)
    assert all(torch.equal(value, state[key]) for key, value in ours.optimizers["policy"].state()[0].items())
    assert checkpoints.list_steps(ours.run_folder.checkpoints) == [1], "the last good checkpoint stays"
    assert [event.step for event in read_events(ours.run_folder, events.Loss)] == [1]


def test_a_gradient_that_is_not_finite_stops_before_the_update_too(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer("sd15")
    steps(ours, 1)
    before = snapshot(ours)
    backward = ours.precision.backward

    def spoil(loss: Tensor) -> None:
        backward(loss)
        next(iter(ours.weights.parameters("policy").values())).grad.view(-1)[0] = float("inf")

    monkeypatch.setattr(ours.precision, "backward", spoil)
    with pytest.raises(TrainingError, match="gradient of step 2 is not finite") as caught:
        ours._train_step(1)
    assert [problem.where for problem in caught.value.problems] == [
        ours.plan.manifest.items[ours.plan.buckets.placements[s.placement].item].name
        for micro in ours.source.window(1)
        for s in micro.samples
    ]
    assert not moved(ours, before)


def test_a_run_that_moved_nothing_is_no_success(trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = trainer("sd15", "train.steps=1")
    monkeypatch.setattr(ours.optimizers["policy"].optimizer, "step", lambda *a: None)
    with pytest.raises(TrainingError, match="no trained weight has moved"):
        ours.run()


# --- the whole run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [(), ("train.ema_decay=0.9",), ("optimizer.type='schedule_free'",)], ids=repr)
def test_what_is_exported_is_what_is_shown(overrides: tuple[str, ...], trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15", *overrides, "export.formats=['diffusers']", "train.steps=4")
    wanted: dict[str, Tensor] = {}
    finish = ours._finish

    def remember() -> None:
        with ours.evaluation():
            wanted.update(snapshot(ours))
        live = snapshot(ours)
        assert any(not torch.equal(live[n], value) for n, value in wanted.items()) == bool(overrides)
        finish()

    ours._finish = remember
    ours.run()
    (export,) = read_events(ours.run_folder, events.Export)
    read = read_lora(ours.run_folder.path / export.path, "sd15").weights["unet"]
    expected = weights_from_parameters(wanted, ours.settings.method)["unet"]
    assert read.keys() == expected.keys()
    assert all(torch.allclose(read[module].delta(), layer.delta(), atol=1e-6) for module, layer in expected.items())


def test_a_full_run_ends_with_a_pipeline_that_predicts_alike_and_keeps_the_rest_of_the_base(
    trainer: Callable[..., Any], base: Callable[[str], Path]
) -> None:
    ours = trainer("sd15", "method.type='full'", "optimizer.lr=1e-3", "train.ema_decay=0.5", "train.steps=3")
    ours.run()
    (finished,) = read_events(ours.run_folder, events.Finished)
    weights = finished.proof["weights"]
    assert weights["moved"] == weights["of"] == len(list(ours.bundle.parameters()))
    (export,) = finished.proof["exports"]
    assert export["format"] == "pipeline" and export["max_prediction_error"] < 1e-4
    folder = ours.run_folder.path / export["path"]
    saved = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    average = ours.weights.lagging("ema")
    assert {f"members.unet.{n}" for n in saved} == average.keys()
    assert all(torch.equal(value, average[f"members.unet.{n}"]) for n, value in saved.items())
    for part in ("vae", "text_encoder"):
        for file in (base("sd15") / part).iterdir():
            assert (folder / part / file.name).read_bytes() == file.read_bytes()


def test_a_baseline_stands_beside_later_samples_and_making_them_changes_no_loss(trainer: Callable[..., Any]) -> None:
    small = ("train.steps=4", "optimizer.lr=5e-2", "method.dropout=0.2", "samples.prompts=['a red cat', 'a house']")
    shown, silent = trainer("sd15", *small, "samples.every=2"), trainer("sd15", *small, "name='silent'")
    for ours in (shown, silent):
        ours.run()
    samples = read_events(shown.run_folder, events.Sample)
    assert [(event.step, event.index, event.seed) for event in samples] == [
        (step, index, index) for step in (0, 2, 4) for index in (0, 1)
    ]
    pixels = [np.asarray(Image.open(shown.run_folder.path / event.path)) for event in samples]
    assert {picture.shape for picture in pixels} == {(64, 64, 3)}
    assert not np.array_equal(pixels[0], pixels[-2]), "the same seed and prompt shows what was learned"
    assert not read_events(silent.run_folder, events.Sample)
    losses = [[event.loss for event in read_events(ours.run_folder, events.Loss)] for ours in (shown, silent)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_checkpoints_come_as_often_as_asked_and_only_the_newest_stay(trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15", "checkpoints.every=2", "checkpoints.keep=2", "train.steps=5")
    ours.run()
    assert [event.step for event in read_events(ours.run_folder, events.Checkpoint)] == [2, 4, 5]
    assert checkpoints.list_steps(ours.run_folder.checkpoints) == [4, 5]


def test_stopping_saves_and_aborting_does_not(trainer: Callable[..., Any]) -> None:
    stopped, aborted = trainer("sd15"), trainer("sd15", "name='aborted'")
    for ours, wish in ((stopped, "stop"), (aborted, "abort")):
        steps(ours, 1)
        ours.requests.ask(wish)
        ours.run()
        (finished,) = read_events(ours.run_folder, events.Finished)
        assert (finished.outcome, finished.step) == ("stopped", 1)
    assert checkpoints.list_steps(stopped.run_folder.checkpoints) == [1]
    assert checkpoints.list_steps(aborted.run_folder.checkpoints) == []
    again = make_trainer(stopped.settings, stopped.run_folder.path.parents[3], resume=stopped.run_folder)
    assert again.step == 1


def test_a_request_to_save_twice_at_one_step_keeps_the_checkpoint_that_is_there(trainer: Callable[..., Any]) -> None:
    ours = trainer("sd15")
    steps(ours, 1)
    ours._save()
    manifest = checkpoints.step_folder(ours.run_folder.checkpoints, 1) / checkpoints.MANIFEST
    written = manifest.stat().st_mtime_ns
    ours._save()
    assert manifest.stat().st_mtime_ns == written
    assert len(read_events(ours.run_folder, events.Checkpoint)) == 2, "whoever asked is answered"


def test_the_guidance_of_the_settings_reaches_bases_that_embed_it(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = trainer("flux1-dev", "objective.guidance=2.5", "train.batch_size=2")
    given: list[Tensor] = []
    forward = ours.bundle.denoiser.forward

    def record(**inputs: Any) -> Any:
        given.append(inputs["guidance"])
        return forward(**inputs)

    monkeypatch.setattr(ours.bundle.denoiser, "forward", record)
    steps(ours, 1)
    assert given[0].tolist() == [2.5] * len(given[0])


def test_training_lowers_the_loss(trainer: Callable[..., Any], fixed_draws: None) -> None:
    ours = trainer("flux1", "train.batch_size=4", "captions.dropout=0.0", "optimizer.lr=2e-2")
    before = gradients(ours, 4)[0]
    for _ in range(15):
        steps(ours, 1)
    assert gradients(ours, 4)[0] < before


def test_the_proof_says_so_when_a_logged_loss_was_not_finite(trainer: Callable[..., Any]) -> None:
    run = trainer("sd15")
    steps(run, 2)
    assert run._proof()["loss_finite"] is True
    run.log.append(
        events.Loss(step=3, epoch=0, loss=float("nan"), lr={"policy": 1.0}, grad_norm={"policy": 1.0}, seconds=0.1)
    )
    assert run._proof()["loss_finite"] is False
