"""Pulling the plug costs nothing but time: a killed and resumed run is, bit for bit, the run that nobody disturbed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoints, events, runs, settings
from engine.errors import CheckpointError
from engine.plan import plan_run
from engine.runs import RunFolder
from engine.trainer import _resume_point
from engine.workspace import Workspace
from tests.training import DieAfter, DieWhileWriting, choose, make_trainer, read_events, train_in_process

# Everything random or stateful at once: dropout of adapters and captions, mirrored images, windows of several batches.
BUSY = (
    "checkpoints.every=3",
    "train.batch_size=2",
    "train.accumulation=2",
    "train.seed=5",
    "captions.dropout=0.4",
    "dataset.flip=true",
    "schedule.type='cosine'",
)
WAYS = {
    "sd15": ("sd15", ("method.dropout=0.2", "method.alpha=1.0", "samples.every=2", "train.ema_decay=0.9")),
    "flux1": ("flux1", ("method.dropout=0.2", "method.alpha=3.0", "objective.noise_offset=0.1")),
    "full": ("sd15", ("method.type='full'", "train.ema_decay=0.9", "optimizer.lr=1e-3")),
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def start(base: Callable[[str], Path], pictures: Path, workspace: Workspace) -> Callable[[str, str], RunFolder]:
    """A fresh run of one of the ways to train."""

    def create(way: str, name: str) -> RunFolder:
        family, overrides = WAYS[way]
        return runs.create(workspace, choose(base(family), pictures, *BUSY, *overrides), name=name)

    return create


@pytest.fixture(scope="module")
def undisturbed(start: Callable[[str, str], RunFolder]) -> Callable[[str], RunFolder]:
    done: dict[str, RunFolder] = {}

    def get(way: str) -> RunFolder:
        if way not in done:
            done[way] = start(way, f"{way}-whole")
            assert train_in_process(done[way]) == 0
        return done[way]

    return get


def manifest(run: RunFolder, step: int) -> checkpoints.Manifest:
    return checkpoints.read_manifest(checkpoints.step_folder(run.checkpoints, step))


def losses(run: RunFolder) -> dict[int, object]:
    """Loss, gradient norm and learning rate by step; a step that was done twice counts as it was done last."""
    return {event.step: (event.loss, event.grad_norm, event.lr) for event in read_events(run, events.Loss)}


def exported(run: RunFolder) -> dict[str, dict[str, torch.Tensor]]:
    return {
        path.relative_to(run.exports).as_posix().replace(run.name, "NAME"): load_file(path)
        for path in sorted(run.exports.rglob("*.safetensors"))
    }


def require_same(run: RunFolder, reference: RunFolder) -> None:
    ours, theirs = manifest(run, 6), manifest(reference, 6)
    assert ours.entries == theirs.entries  # with the hash of every file: weights, optimizer state, average
    assert (ours.optimizer, ours.scaler, ours.epoch) == (theirs.optimizer, theirs.scaler, theirs.epoch)
    assert losses(run) == losses(reference)
    assert set(losses(run)) == {1, 2, 3, 4, 5, 6}
    files, expected = exported(run), exported(reference)
    assert files.keys() == expected.keys() and files
    for name in files:
        assert all(torch.equal(files[name][key], expected[name][key]) for key in expected[name])


@pytest.mark.parametrize("way", WAYS)
def test_R77_a_run_killed_between_checkpoints_and_resumed_equals_the_undisturbed_run_bit_for_bit(
    way: str, start: Callable[[str, str], RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    run = start(way, f"{way}-killed")
    assert train_in_process(run, dying=DieAfter("loss", 5)) == -9
    assert runs.status(run).status == "died"
    assert checkpoints.list_steps(run.checkpoints) == [3]
    assert train_in_process(run, resume=True) == 0
    assert read_events(run, events.Started)[-1].resumed_from == 3
    require_same(run, undisturbed(way))


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(
    start: Callable[[str, str], RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    run = start("sd15", "killed-writing")
    assert train_in_process(run, dying=DieWhileWriting(6)) == -9
    assert checkpoints.list_steps(run.checkpoints) == [3], "half a checkpoint does not count"
    assert [path.name for path in run.checkpoints.glob(".*")] == [".writing-step-000006"]
    assert train_in_process(run, resume=True) == 0
    assert not list(run.checkpoints.glob(".*")), "what the killed process left behind is cleaned up"
    require_same(run, undisturbed("sd15"))


def test_a_run_killed_after_its_last_step_still_ends_with_a_verified_file(
    start: Callable[[str, str], RunFolder], undisturbed: Callable[[str], RunFolder]
) -> None:
    run = start("sd15", "killed-exporting")
    assert train_in_process(run, dying=DieAfter("checkpoint", 6)) == -9
    assert not read_events(run, events.Export)
    assert train_in_process(run, resume=True) == 0
    require_same(run, undisturbed("sd15"))
    proof = read_events(run, events.Finished)[-1].proof
    assert proof["weights"]["moved"] == proof["weights"]["of"] > 0, (
        "the proof covers the run, not only its last process"
    )


def test_a_run_killed_before_its_first_checkpoint_starts_over(start: Callable[[str, str], RunFolder]) -> None:
    run = start("flux1", "killed-early")
    assert train_in_process(run, dying=DieAfter("loss", 1)) == -9
    assert train_in_process(run, resume=True, dying=DieAfter("checkpoint", 3)) == -9
    assert read_events(run, events.Started)[-1].resumed_from == 0
    assert [event.step for event in read_events(run, events.Loss)] == [1, 1, 2, 3]
    first, second = read_events(run, events.Loss)[:2]
    assert first.loss == second.loss


def test_R78_the_average_is_kept_apart_and_the_live_weights_are_resumed(
    undisturbed: Callable[[str], RunFolder],
) -> None:
    for way in ("sd15", "full"):
        folder = checkpoints.step_folder(undisturbed(way).checkpoints, 6)
        found = manifest(undisturbed(way), 6)
        live = load_file(checkpoints.entry_file(folder, found.entry("policy", "weights")))
        average = load_file(checkpoints.entry_file(folder, found.entry("ema", "lagging")))
        assert live.keys() == average.keys()
        assert any(not torch.equal(live[name], average[name]) for name in live)


def test_R72_each_file_is_read_into_its_own_role(base: Callable[[str], Path], pictures: Path, tmp_path: Path) -> None:
    chosen = choose(base("sd15"), pictures, "train.ema_decay=0.5", "train.steps=4")
    trainer = make_trainer(chosen, tmp_path)
    for step in range(3):
        trainer._train_step(step)
    trainer.step = 3
    trainer._save()
    again = make_trainer(chosen, tmp_path, resume=trainer.run_folder)
    live, average = again.weights.parameters("policy"), again.weights.lagging("ema")
    assert all(torch.equal(live[name], tensor) for name, tensor in trainer.weights.parameters("policy").items())
    assert all(torch.equal(average[name], tensor) for name, tensor in trainer.weights.lagging("ema").items())
    assert any(not torch.equal(live[name], average[name]) for name in live)


# --- what must not be resumed -----------------------------------------------------------------------------------------

FOUR_STEPS = ("train.steps=4", "captions.dropout=0.4")


@pytest.fixture(scope="module")
def saved(base: Callable[[str], Path], pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was saved after two steps."""
    trainer = make_trainer(choose(base("sd15"), pictures, *FOUR_STEPS), tmp_path_factory.mktemp("saved"))
    for step in range(2):
        trainer._train_step(step)
    trainer.step = 2
    trainer._save()
    return trainer.run_folder  # type: ignore[no-any-return]


@pytest.fixture
def resume(
    saved: RunFolder, base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> Callable[..., checkpoints.Manifest | None]:
    """Where a copy of the saved run would be resumed, under settings with further overrides."""
    copy = tmp_path / saved.name
    shutil.copytree(saved.path, copy)

    def find(*overrides: str) -> checkpoints.Manifest | None:
        return _resume_point(RunFolder(copy), plan_run(choose(base("sd15"), pictures, *FOUR_STEPS, *overrides)))

    find.folder = checkpoints.step_folder(RunFolder(copy).checkpoints, 2)  # type: ignore[attr-defined]
    return find


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("optimizer.lr=5e-4", "optimizer.lr"),
        ("train.seed=1", "train.seed"),
        ("train.batch_size=2", "train.batch_size"),
        ("method.rank=3", "method.rank"),
        ("objective.min_snr_gamma=5.0", "objective.min_snr_gamma"),
        ("captions.trigger='zwx'", "captions.trigger"),
        ("optimizer.type='lion'", "optimizer.type"),
    ],
)
def test_resuming_with_other_settings_is_refused_and_names_the_field(
    override: str, field: str, resume: Callable[..., checkpoints.Manifest | None]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        resume(override)
    assert field in [problem.where for problem in caught.value.problems]


@pytest.mark.parametrize(
    "override", ["train.steps=9", "samples.every=3", "checkpoints.every=1", "export.dtype='fp16'", "name='other'"]
)
def test_a_resumed_run_may_become_longer_and_may_save_and_show_otherwise(
    override: str, resume: Callable[..., checkpoints.Manifest | None]
) -> None:
    found = resume(override)
    assert found is not None and found.step == 2


def test_a_run_shorter_than_what_is_trained_already_is_refused(resume: Callable[..., object]) -> None:
    with pytest.raises(CheckpointError, match="beyond the 1 steps"):
        resume("train.steps=1")


def test_R79_a_checkpoint_with_a_missing_or_changed_file_is_refused_and_the_file_named(
    resume: Callable[..., object],
) -> None:
    weights = resume.folder / "policy" / "weights.safetensors"  # type: ignore[attr-defined]
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"policy/weights\.safetensors has changed"):
        resume()
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"policy/weights\.safetensors is missing"):
        resume()


def test_weights_of_another_shape_are_refused(resume: Callable[..., object], tmp_path: Path) -> None:
    """A manifest that is sound but of other weights, as when files were exchanged by hand."""
    folder: Path = resume.folder  # type: ignore[attr-defined]
    weights = folder / "policy" / "weights.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(1, 1)}, weights)
    record = json.loads((folder / checkpoints.MANIFEST).read_text())
    for entry in record["entries"]:
        if (entry["role"], entry["kind"]) == ("policy", "weights"):
            entry["files"] = {"policy/weights.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()}
    (folder / checkpoints.MANIFEST).write_text(json.dumps(record))
    found = resume()
    assert found is not None
    chosen = settings.parse(found.settings)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="other weights"):
        make_trainer(chosen, tmp_path / "workspace", resume=RunFolder(folder.parents[1]))


def test_a_base_that_was_replaced_since_the_checkpoint_is_refused(
    base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    own = tmp_path / "base"
    shutil.copytree(base("sd15"), own)
    trainer = make_trainer(choose(own, pictures), tmp_path / "workspace")
    trainer._train_step(0)
    trainer.step = 1
    trainer._save()
    weights = next((own / "unet").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-4] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since step-000001"):
        make_trainer(choose(own, pictures), tmp_path / "workspace", resume=trainer.run_folder)


def test_R74_weights_are_restored_in_place_so_that_the_optimizer_still_moves_them(
    base: Callable[[str], Path], pictures: Path, tmp_path: Path
) -> None:
    chosen = choose(base("sd15"), pictures, "method.type='full'", "optimizer.lr=1e-3")
    trainer = make_trainer(chosen, tmp_path)
    trainer._train_step(0)
    trainer.step = 1
    trainer._save()
    again = make_trainer(chosen, tmp_path, resume=trainer.run_folder)
    parameters = again.weights.parameters("policy")
    assert {id(p) for p in parameters.values()} == {id(p) for p in again.optimizers["policy"].parameters}
    assert {id(p) for p in parameters.values()} == {id(p) for p in again.root.parameters()}
    for name, parameter in trainer.weights.parameters("policy").items():
        assert torch.equal(parameter, parameters[name])
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    again._train_step(1)
    assert all(not torch.equal(parameters[name], value) for name, value in before.items())
