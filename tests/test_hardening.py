"""What someone tried to break: each test is one way in which the program once lied, lost something or fell over."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine import checkpoints, cli, events, presets, runs, settings
from engine.data.manifest import scan
from engine.errors import ExportError, PictureError, RunError, SettingsError, TrainingError, WorkspaceError
from engine.events import EventLog
from engine.export import export_run
from engine.exports.formats import describe, read_lora, write_lora
from engine.plan import plan_run
from engine.preview import Request, preview
from engine.sampling import to_image
from engine.settings import Settings, changed
from engine.terminal import describe as describe_run
from engine.terminal import print_json
from engine.trainer import NOT_FINITE_HINT
from engine.worker import explain_out_of_memory
from engine.workspace import Workspace, locate
from tests.tiny import random_lora_layer
from tests.training import choose, make_trainer, read_events
from webui import main as entry

TOO_LONG = "a" * 5000
NOT_TEXT = "\udcff"  # how Python shows a byte that is no UTF-8


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a workspace and a folder of one captioned picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFELIGHT_HOME", str(tmp_path / "workspace"))
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "a.txt").write_text("a wall", encoding="utf-8")
    return tmp_path


def small(**sections: object) -> Settings:
    return settings.parse({"base": {"source": "embedded/unet"}, "dataset": {"folder": "photos"}, **sections})


def a_run(workspace: Workspace, name: str = "mine", *happened: events.Event) -> runs.RunFolder:
    run = runs.create(workspace, small(train={"steps": 4}), name=name)
    with EventLog(run.events) as log:
        for event in happened:
            log.append(event)
    return run


# --- arguments and settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TOO_LONG, "~nobody-of-this-name/x"])
@pytest.mark.parametrize(
    "command",
    [
        "runs {}", "scan {}", "buckets photos --base {}", "presets {}", "verify {}", "runs --workspace {}",
        "settings --set dataset.folder=photos --set base.source={}", "train --preset {}",
    ],
)  # fmt: skip
def test_a_path_that_no_system_has_is_refused_in_words(
    command: str, text: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([part.format(text) for part in command.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and len(told) < 1000


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", TOO_LONG])
def test_the_page_refuses_such_a_workspace_too(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--no-browser", "--workspace", folder]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("port", ["0", "-1", "65536", "x"])
def test_a_port_that_cannot_be_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["--no-browser", "--port", port])
    assert ended.value.code == 2 and "ports are 1 to 65535" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="has no /dev/zero")
def test_a_settings_file_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(SettingsError, match="at most"):
        settings.read_toml(Path("/dev/zero"))


def test_a_setting_given_before_the_variant_it_belongs_to_is_kept(place: Path) -> None:
    given = ["optimizer.lr=0.5", "optimizer.type=lion", "base.source=embedded/unet", "dataset.folder=photos"]
    chosen = cli.read_settings(locate(), None, "embedded-lora", given)
    assert (chosen.optimizer.type, chosen.optimizer.lr) == ("lion", 0.5)


def test_a_run_can_be_measured_in_epochs_over_a_preset_that_counts_steps(place: Path) -> None:
    own = ["base.source=embedded/unet", "dataset.folder=photos"]
    by_option = cli.read_settings(locate(), None, "embedded-lora", [*own, "train.epochs=2"]).train
    by_file = settings.parse(
        presets.merge(presets.load("embedded-lora"), small(train={"epochs": 2}).model_dump(exclude_none=True))
    ).train
    assert (by_option.epochs, by_option.steps) == (by_file.epochs, by_file.steps) == (2, None)
    assert by_option.batch_size == presets.load("embedded-lora").data["train"]["batch_size"]
    with pytest.raises(SettingsError, match="not both"):
        cli.read_settings(locate(), None, None, [*own, "train.epochs=2", "train.steps=2"])


def test_nothing_after_a_line_end_in_a_setting_is_dropped() -> None:
    data: dict[str, Any] = {}
    settings.set_dotted(data, "train.steps=5\nx=6")
    assert data == {"train": {"steps": "5\nx=6"}}


@pytest.mark.parametrize("depth", [150, 900, 5000])
def test_settings_nested_without_sense_are_refused(depth: int) -> None:
    value: object = []
    for _ in range(depth):
        value = [value]
    data: dict[str, Any] = {"base": {"source": "x"}, "dataset": {"folder": "x"}, "samples": {"prompts": value}}
    with pytest.raises(SettingsError, match=r"nested too deeply|valid string"):
        settings.parse(data)
    settings.set_dotted(data, "x=" + "[" * depth)


def test_a_refused_value_does_not_fill_the_screen() -> None:
    with pytest.raises(SettingsError) as refused:
        small(captions={"trigger": TOO_LONG})
    assert "trigger" in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("arguments", ["preview x.safetensors --prompt {}", "caption photos --template {}"])
def test_text_that_is_not_Unicode_is_refused(arguments: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([part.format(NOT_TEXT) for part in arguments.split()]) == 2
    assert "not Unicode" in capsys.readouterr().err


def test_a_workspace_that_weight_files_cannot_be_written_under_is_refused_at_once() -> None:
    with pytest.raises(WorkspaceError, match="not UTF-8"):
        locate("/tmp/" + NOT_TEXT)


def test_json_stays_JSON_in_a_terminal_that_shows_few_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace"))
    print_json({"name": "Füße 😀"})
    sys.stdout.flush()
    assert json.loads(raw.getvalue()) == {"name": "Füße 😀"}


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uniform", "logit_normal"])
def test_a_preset_keeps_every_variant_that_was_chosen(kind: str, place: Path) -> None:
    chosen = small(objective={"levels": {"type": kind}}, schedule={"type": "linear"}, optimizer={"type": "lion"})
    presets.save(locate(), "mine", chosen)
    data = presets.merge(presets.load("mine", locate()), {})
    again = settings.parse({**data, "base": {"source": "embedded/unet"}, "dataset": {"folder": "photos"}})
    assert again == chosen


def test_a_preset_cannot_hide_behind_a_shipped_one_of_its_name(place: Path) -> None:
    with pytest.raises(SettingsError, match="comes with the program"):
        presets.save(locate(), presets.shipped()[0], small())


# --- data -------------------------------------------------------------------------------------------------------------


def test_masks_by_transparency_say_when_there_is_none(place: Path) -> None:
    found = scan(small(dataset={"folder": "photos", "masks": "alpha"}).dataset, 16)
    assert any(note.where == "dataset.masks" for note in found.notes)
    Image.new("RGBA", (64, 64), (9, 9, 9, 128)).save(place / "photos" / "a.png")
    found = scan(small(dataset={"folder": "photos", "masks": "alpha"}).dataset, 16)
    assert not any(note.where == "dataset.masks" for note in found.notes)


def test_a_picture_that_is_cut_to_pieces_is_told_before_training(place: Path) -> None:
    assert not any("lose more than" in doubt for doubt in plan_run(small()).doubts())
    Image.new("RGB", (2000, 32), "red").save(place / "photos" / "a.png")
    plan = plan_run(small())
    (doubt,) = [doubt for doubt in plan.doubts() if "lose more than" in doubt]
    assert "a.png" in doubt and doubt in plan.summary()["notes"]  # type: ignore[operator]


def test_pictures_of_a_run_are_drawn_with_the_words_that_it_learns(place: Path) -> None:
    assert plan_run(small(captions={"trigger": "zwx"})).prompts == ("zwx, a wall",)


def test_buckets_report_problems_to_other_programs_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "photos" / "b.png").write_text("no picture")
    assert cli.main(["buckets", "photos", "--json"]) == 2
    assert [problem["where"] for problem in json.loads(capsys.readouterr().out)["problems"]] == ["b.png"]


def test_undo_is_not_offered_when_no_caption_was_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["caption", "photos", "--template", "x"]) == 0
    assert "undo" not in capsys.readouterr().out


# --- what comes out at the end is refused at the beginning ------------------------------------------------------------


def test_a_DoRA_ends_with_a_file_and_not_with_an_error(place: Path) -> None:
    assert plan_run(small(method={"dora": True})).formats == ("diffusers",)
    with pytest.raises(SettingsError, match="cannot carry DoRA"):
        plan_run(small(method={"dora": True}, export={"formats": ["diffusers", "kohya"]}))


def test_formats_of_LoRA_files_are_not_ignored_by_full_training(place: Path) -> None:
    assert plan_run(small(method={"type": "full"})).formats == ()
    with pytest.raises(SettingsError, match=r"export\.formats"):
        plan_run(small(method={"type": "full"}, export={"formats": ["kohya"]}))


# --- pictures and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish",
    [
        Request(prompts=("x",), strengths=(float("nan"),)),
        Request(prompts=("x",), strengths=(1.0, 1.0)),
        Request(prompts=("x",), strengths=(0.5,)),  # a base has no LoRA that could be weaker
        Request(prompts=("x",), seed=2**70),
        Request(prompts=("x",), steps=10**12),
        Request(prompts=("x",), size=(80_000, 80_000)),
    ],
)
def test_a_preview_that_could_not_be_what_it_says_is_refused(
    wish: Request, base: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError):
        preview(base("sd15"), wish, workspace=Workspace(tmp_path), out=tmp_path / "out")
    assert not list(tmp_path.rglob("*.png"))


def test_strengths_are_not_given_in_two_ways(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preview", "x.safetensors", "--strength", "0.5", "--sweep", "0,1"]) == 2
    assert "--sweep" in capsys.readouterr().err


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_picture_that_is_not_finite_is_an_error_and_not_black(odd: float) -> None:
    pixels = torch.zeros(3, 8, 8)
    pixels[1, 2, 3] = odd
    with pytest.raises(PictureError, match="not finite"):
        to_image(pixels)


def test_a_LoRA_that_does_not_fit_is_no_success(base: Callable[[str], Path], tmp_path: Path) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    path = tmp_path / "lora.safetensors"
    weights = {"unet": {name: random_lora_layer((16, 16))}}
    write_lora(weights, path, format="kohya", family="sd15", metadata={}, dtype=torch.float32)
    verify = ["verify", str(path), "--base", str(base("sd15")), "--json"]
    assert cli.main(verify) == 0
    tensors = {f"lora_unet_nowhere.lora_{side}.weight": torch.ones(4, 4) for side in ("up", "down")}
    file = read_lora(path)
    layer = file.weights["unet"][name]
    stem = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors |= {f"{stem}.lora_up.weight": layer.up, f"{stem}.lora_down.weight": layer.down}
    save_file(tensors, path)
    assert cli.main(verify) == 2


def test_a_LoRA_in_8_bit_numbers_can_be_described(tmp_path: Path) -> None:
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    path = tmp_path / "lora.safetensors"
    weights = {"unet": {name: random_lora_layer((16, 16))}}
    write_lora(weights, path, format="diffusers", family="sd15", metadata={}, dtype=torch.float32)
    file = read_lora(path)
    layer = file.weights["unet"][name]
    short = {f"unet.{name}.lora_A.weight": layer.down, f"unet.{name}.lora_B.weight": layer.up}
    save_file({key: tensor.to(torch.float8_e4m3fn) for key, tensor in short.items()}, path)
    assert "float8_e4m3fn" in str(describe(read_lora(path)))


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_makes_no_run_look_finished(place: Path) -> None:
    run = a_run(locate(), "mine", events.Finished(4, "finished", time=time.time() + 1e6))
    assert runs.status(run).status == "finished"
    _, size = events.read(run.events)
    runs.write_process(run, runs.identify(os.getpid(), size))  # goes on, and has written nothing yet
    assert runs.status(run).status == "starting"
    with EventLog(run.events) as log:
        log.append(events.Loss(5, 0, 0.1, {}, {}, 0.1))
    assert runs.status(run).status != "starting"


def test_a_damaged_line_in_the_queue_keeps_nobody_from_starting(place: Path) -> None:
    workspace = locate()
    run = a_run(workspace)
    mine = runs.identify(os.getpid())
    workspace.queue.write_bytes(b'{"run": junk\n[]\n\xff\n')
    runs.enter_queue(workspace, run, mine, "cpu")
    assert runs.ahead_in_queue(workspace, mine) == 0
    runs.leave_queue(workspace, mine)


def test_a_workspace_that_cannot_hold_the_lock_is_refused_in_words(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: FileLock, *arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system")

    run = a_run(locate(), "mine", events.Finished(2, "stopped"))
    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(WorkspaceError, match="Read-only"):
        runs.start(locate(), run, resume=True)


@pytest.mark.parametrize("change", ["export.dtype='fp16'", "train.steps=4", "train.steps=2"])
def test_settings_that_do_not_let_a_run_go_on_do_not_change_it(change: str, place: Path) -> None:
    run = a_run(locate(), "mine", events.Checkpoint(4, "checkpoints/step-000004"), events.Finished(4, "finished"))
    before = run.settings.read_bytes()
    with pytest.raises(RunError, match="is finished"):
        runs.change_settings(run, [change])
    assert run.settings.read_bytes() == before


def test_a_run_cannot_be_made_shorter_than_it_is(place: Path) -> None:
    run = a_run(locate(), "mine", events.Checkpoint(3, "checkpoints/step-000003"), events.Finished(3, "stopped"))
    with pytest.raises(SettingsError, match="a checkpoint of step 3"):
        runs.change_settings(run, ["train.steps=2"])
    runs.change_settings(run, ["train.steps=3"])


def test_checkpoints_that_were_removed_are_not_listed(place: Path) -> None:
    kept, removed = (events.Checkpoint(step, f"checkpoints/step-00000{step}") for step in (1, 2))
    run = a_run(locate(), "mine", kept, removed)
    (run.path / kept.path).mkdir()
    assert describe_run(run, runs.status(run))["checkpoints"] == [kept.path]


def test_a_run_that_cannot_be_created_leaves_nothing_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(locate(), "first")
    make = Path.mkdir

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "samples":
            raise OSError(28, "No space left on device")
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(WorkspaceError, match="No space left"):
        a_run(locate(), "second")
    assert [path.name for path in locate().runs("default").iterdir()] == ["first"]


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainer(base: Callable[[str], Path], pictures: Path, tmp_path: Path) -> Callable[..., Any]:
    return lambda *overrides: make_trainer(choose(base("sd15"), pictures, *overrides), tmp_path)


def test_weights_that_are_not_finite_are_never_saved(trainer: Callable[..., Any]) -> None:
    training = trainer()
    parameter = next(iter(training.weights.parameters("policy").values()))
    parameter.data.view(-1)[0] = float("nan")
    with pytest.raises(TrainingError, match="not finite"):
        training._save()
    assert not list(training.run_folder.checkpoints.iterdir())


def test_a_checkpoint_that_does_not_fit_on_the_disk_gives_its_space_back(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    training = trainer()
    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(WorkspaceError, match="No space left"):
        training._save()
    assert not list(training.run_folder.checkpoints.iterdir())


def test_a_picture_that_cannot_be_drawn_is_told_and_does_not_end_the_run(
    trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def black(*arguments: object) -> None:
        raise PictureError("the picture is not finite: it would be black")

    training = trainer("samples.every=2", "samples.prompts=['a', 'b']")
    monkeypatch.setattr("engine.trainer.sample", black)
    training._sample()
    assert len([w for w in read_events(training.run_folder, events.Warning) if w.code == "sample"]) == 2
    assert not read_events(training.run_folder, events.Sample)


def test_a_checkpoint_at_the_end_of_an_epoch_is_of_that_epoch(trainer: Callable[..., Any]) -> None:
    training = trainer("train.epochs=1", "train.batch_size=9")
    training.run()
    folder = checkpoints.newest(training.run_folder.checkpoints)
    assert folder is not None
    last = read_events(training.run_folder, events.Loss)[-1]
    assert checkpoints.read_manifest(folder).epoch == last.epoch == 0


def test_pictures_that_a_kill_took_are_drawn_when_the_run_goes_on(
    base: Callable[[str], Path], pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = EventLog.append

    def die(log: EventLog, event: events.Event) -> None:
        append(log, event)
        if isinstance(event, events.Sample) and (event.step, event.index) == (2, 0):
            raise KeyboardInterrupt

    busy = ("train.steps=4", "samples.every=2", "checkpoints.every=2", "samples.prompts=['a', 'b']")
    chosen = choose(base("sd15"), pictures, *busy)
    killed = make_trainer(chosen, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EventLog, "append", die)
        killed.run()
    again = make_trainer(chosen, tmp_path, resume=killed.run_folder)
    assert again.step == 2
    again.run()
    drawn = {(item.step, item.index) for item in events.fold(events.read(again.run_folder.events)[0]).samples}
    assert drawn == {(step, index) for step in (0, 2, 4) for index in (0, 1)}
    assert len(list(again.run_folder.samples.iterdir())) == 6


# --- exports ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_export_is_never_replaced_by_one(trainer: Callable[..., Any], tmp_path: Path) -> None:
    training = trainer("method.type='full'", "train.steps=1")
    training.run()
    run = training.run_folder
    export_run(run)  # over its own earlier export
    assert [path.name for path in run.exports.iterdir()] == [run.name]
    mine = tmp_path / "out" / run.name
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ExportError, match="is no export"):
        export_run(run, out=tmp_path / "out")
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_an_export_that_fails_leaves_no_folder_that_looks_like_one(
    trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trainer("method.type='full'", "train.steps=1")
    training.run()
    monkeypatch.setattr("engine.export.TOLERANCE", {"fp32": -1.0})
    with pytest.raises(ExportError, match="predicts otherwise"):
        export_run(training.run_folder, out=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_no_hint_asks_for_what_a_run_may_not_change() -> None:
    hints = [NOT_FINITE_HINT, explain_out_of_memory(MemoryError(), None, "train").hint]
    assert all("start a new run" in hint for hint in hints)
    assert changed({"optimizer": {"lr": 1.0}}, {"optimizer": {"lr": 0.5}})
