"""The commands, as they are typed: exit codes, one-line errors, and results that other programs can read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from engine import cli, runs, settings
from engine.events import RunState
from engine.workspace import Workspace
from webui import main as entry

SOURCE = Path(cli.__file__).parents[1]
COMMANDS = ["scan", "buckets", "caption", "train", "resume", "stop", "runs", "settings", "presets", "doctor"]
COMMANDS += ["demo", "preview", "export", "verify"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a workspace and a folder of three pictures, one of them with a caption."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFELIGHT_HOME", str(tmp_path / "workspace"))
    (tmp_path / "photos").mkdir()
    for index, size in enumerate(((64, 64), (96, 64), (64, 96))):
        Image.new("RGB", size, (40 * index, 90, 10)).save(tmp_path / "photos" / f"red_dog-{index}.png")
    (tmp_path / "photos" / "red_dog-0.txt").write_text("a dog\n")
    return tmp_path


def succeed(*arguments: str) -> None:
    assert cli.main(arguments) == 0


def printed(capsys: pytest.CaptureFixture[str]) -> object:
    return json.loads(capsys.readouterr().out)


# --- the command line itself ------------------------------------------------------------------------------------------


def test_every_command_explains_itself_with_an_example_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = re.findall(r"^  ([a-z]+)  ", capsys.readouterr().out, flags=re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    for command in COMMANDS:
        assert cli.main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"Example: safelight {command}" in shown
        if command not in ("scan", "buckets", "verify"):
            assert "--workspace" in shown


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--version"]) == 0
    assert re.fullmatch(r"safelight \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["train"], "base: is required", "--set"),
        (["train", "none.toml"], "cannot read settings file", "check the path"),
        (["train", "--preset", "sd15"], "there is no preset 'sd15'", "sd15-lora"),
        (["train", "--set", "optimizer.lr"], "is not of the form section.field=value", "optimizer.lr=1e-4"),
        (["train", "--set", "train.stpes=1"], "there is no such setting", "did you mean"),
        (["resume", "nothing"], "there is no run 'nothing'", "safelight runs"),
        (["stop", "nothing"], "there is no run", "safelight runs"),
        (["scan", "nowhere"], "does not exist", "dataset.folder"),
        (["caption", "photos"], "say what to write", "--template"),
        (["caption", "photos", "--template", "a {nam}"], "nam", "{name}"),
        (["caption", "photos", "--undo"], "no change of these captions", "only changes made here"),
        (["demo", "--base", "huge"], "no embedded base 'huge'", "'unet' or 'flow'"),
        (["presets", "--save", "x.toml"], "give the preset a name", "safelight presets"),
    ],
)
def test_an_error_of_the_user_is_a_message_with_a_hint_and_exit_code_2(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, hint: str
) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and message in err and hint in err and "Traceback" not in err and out == ""


def test_errors_are_json_for_programs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "nothing", "--json"]) == 2
    shown = printed(capsys)
    assert isinstance(shown, dict) and shown["error"]["code"] == "run"


def test_an_unknown_command_or_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frobnicate"]) == 2 and "frobnicate" in capsys.readouterr().err
    assert cli.main(["runs", "--frob"]) == 2 and "--frob" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_and_a_file_with_the_traceback(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Workspace) -> list[runs.Listed]:
        raise ZeroDivisionError("whoops")

    monkeypatch.setattr(runs, "list_runs", broken)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    assert cli.main(["runs"]) == 1
    error = capsys.readouterr().err
    assert "this is a bug in safelight: ZeroDivisionError: whoops" in error and "Traceback" not in error
    (report,) = place.glob("safelight-bug-*.txt")
    assert str(report) in error and "Traceback" in report.read_text()


# --- data -------------------------------------------------------------------------------------------------------------


def test_scan_counts_images_and_names_every_missing_caption(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scan", "photos", "--json"]) == 2
    shown = printed(capsys)
    assert isinstance(shown, dict) and shown["captioned"] == 1 and len(shown["problems"]) == 2
    succeed("scan", "photos", "--set", "dataset.missing_captions=file_name")
    assert "3 usable images" in capsys.readouterr().out


def test_captions_are_written_from_a_template_and_taken_back(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = place / "photos"
    succeed("caption", "photos", "--template", "a photo of sks dog, {name}", "--json")
    assert printed(capsys) == {"written": 2, "kept": 1, "failed": 0, "problems": []}
    assert (photos / "red_dog-1.txt").read_text() == "a photo of sks dog, red dog-1\n"
    assert (photos / "red_dog-0.txt").read_text() == "a dog\n", "what is there is kept"
    succeed("caption", "photos", "--template", "{trigger}, {name}", "--trigger", "sks", "--overwrite")
    assert (photos / "red_dog-0.txt").read_text() == "sks, red dog-0\n"
    succeed("caption", "photos", "--undo")
    succeed("caption", str(photos), "--undo")
    assert [path.name for path in photos.glob("*.txt")] == ["red_dog-0.txt"]
    assert (photos / "red_dog-0.txt").read_text() == "a dog\n"
    assert cli.main(["caption", "photos", "--undo"]) == 2


# --- settings and presets ---------------------------------------------------------------------------------------------


def test_preset_file_and_changes_are_laid_over_each_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "deep").mkdir()
    (place / "deep" / "run.toml").write_text(
        '[base]\nsource = "embedded/unet"\n[dataset]\nfolder = "../photos"\n[train]\nsteps = 7\n'
    )
    succeed("settings", "deep/run.toml", "--preset", "embedded-lora", "--set", "train.batch_size=2", "--json")
    shown = printed(capsys)
    assert isinstance(shown, dict)
    assert (shown["train"]["steps"], shown["train"]["batch_size"], shown["optimizer"]["lr"]) == (7, 2, 1e-3)
    assert Path(shown["dataset"]["folder"]).resolve() == (place / "photos").resolve()
    succeed("settings", "--set", "base.source=embedded/unet", "--set", "dataset.folder=photos")
    assert f'folder = "{place / "photos"}"' in capsys.readouterr().out


def test_settings_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    succeed("settings")
    shown = capsys.readouterr().out
    for name in ("base.source = required", "train.batch_size = 1", "optimizer.d_coef", "method.rank = 16"):
        assert name in shown
    succeed("settings", "--json")
    assert "$defs" in json.loads(capsys.readouterr().out)


def test_presets_are_listed_shown_and_saved(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run.toml").write_text('base.source = "embedded/unet"\ndataset.folder = "photos"\ntrain.steps = 9\n')
    succeed("presets", "mine", "--save", "run.toml")
    capsys.readouterr()
    succeed("presets", "--json")
    shown = printed(capsys)
    assert isinstance(shown, list) and [item["name"] for item in shown][-1] == "mine"
    succeed("presets", "mine")
    assert "steps = 9" in capsys.readouterr().out


def test_doctor_tries_number_formats_and_says_what_is_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    shown = printed(capsys)
    assert isinstance(shown, dict) and code == (2 if shown["problems"] else 0)
    formats = {check["dtype"]: check for check in shown["devices"][0]["dtypes"]}
    assert set(formats) == {"fp32", "bf16", "fp16"} and formats["fp32"]["works"]
    assert shown["packages"]["torch"] and shown["advice"]


# --- runs -------------------------------------------------------------------------------------------------------------

TRAINER = """
import time
from engine import events
from engine.errors import TrainingError


def train(settings, run, log, requests, *, workspace, resume):
    log.append(events.Started(1, 0.0, "", "cpu", {}, settings.train.steps, None, {}))
    for step in range(1, settings.train.steps + 1):
        time.sleep(0.02)
        log.append(events.Loss(step, 0, 1.0 / step, {}, {}, 0.02))
        if step == 5 and settings.captions.trigger == "fail":
            raise TrainingError("the loss is not finite", "lower the learning rate")
        if step == 5 and settings.captions.trigger == "bug":
            raise KeyError("oh no")
        if "stop" in requests.take():
            (run.checkpoints / f"step-{step:06}").mkdir()
            log.append(events.Checkpoint(step, f"checkpoints/step-{step:06}"))
            log.append(events.Finished(step, "stopped"))
            return
    log.append(events.Finished(settings.train.steps, "finished"))
"""
FINDER = """
import importlib.abc, importlib.util, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "engine.trainer":
            return importlib.util.spec_from_file_location(name, {trainer!r})


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a run whose trainer only pretends; the processes that are started find it first."""
    stand_in = place / "stand-in"
    stand_in.mkdir()
    (stand_in / "trainer.py").write_text(TRAINER)
    (stand_in / "sitecustomize.py").write_text(FINDER.format(trainer=str(stand_in / "trainer.py")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(stand_in)]))
    changes = ("base.source=embedded/unet", "dataset.folder=photos", "train.device=cpu")
    return ["train", *(word for change in changes for word in ("--set", change))]


def test_train_follows_the_run_to_its_end(trains: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    succeed(*trains, "--set", "train.steps=20", "--name", "rex")
    out, err = capsys.readouterr()
    assert "run 'rex' finished, step 20/20" in out
    assert "20/20 loss 0.0500" in err
    succeed("runs", "--json")
    shown = printed(capsys)
    assert isinstance(shown, list)
    assert [(item["name"], item["status"], item["step"]) for item in shown] == [("rex", "finished", 20)]
    assert cli.main(["resume", "rex"]) == 2 and "is finished" in capsys.readouterr().err


@pytest.mark.parametrize(("how", "code"), [("fail", 2), ("bug", 1)])
def test_the_exit_code_of_train_is_that_of_the_run(
    trains: list[str], capsys: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    assert cli.main([*trains, "--set", "train.steps=20", "--set", f"captions.trigger={how}"]) == code
    err = capsys.readouterr().err
    assert ("lower the learning rate" in err) == (how == "fail") and ("log.txt" in err) == (how == "bug")
    assert "Traceback (most" not in err


def test_detached_runs_are_stopped_and_resumed_by_name(trains: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    succeed(*trains, "--set", "train.steps=3000", "--name", "rex", "--detach", "--json")
    shown = printed(capsys)
    assert isinstance(shown, dict) and shown["status"] in ("starting", "running")
    run = runs.find(Workspace(Path(os.environ["SAFELIGHT_HOME"])), "rex")
    _wait(run, lambda state: state.step > 1)
    assert cli.main(["resume", "rex"]) == 2 and "is already running" in capsys.readouterr().err
    succeed("stop", "rex")
    assert _wait(run, lambda state: state.ended).status == "stopped"
    succeed("resume", "rex", "--detach")
    _wait(run, lambda state: state.status == "running" and state.step > 1)
    succeed("stop", "rex", "--kill")
    assert _wait(run, lambda state: state.ended).status == "died"


@pytest.mark.skipif(sys.platform == "win32", reason="sends a POSIX signal")
def test_ctrl_c_saves_and_stops(trains: list[str], place: Path) -> None:
    command = [sys.executable, "-m", "webui.main", *trains, "--set", "train.steps=3000", "--name", "rex"]
    terminal = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
    workspace = Workspace(place / "workspace")
    while not (workspace.run("default", "rex") / "events.jsonl").exists():
        time.sleep(0.05)
    run = runs.find(workspace, "rex")
    _wait(run, lambda state: state.step > 1)
    os.killpg(terminal.pid, signal.SIGINT)  # a terminal sends it to everything in front
    out, _ = terminal.communicate(timeout=20)
    assert terminal.returncode == 0 and "stopped" in out
    assert len(runs.status(run).checkpoints) == 1


def _wait(run: runs.RunFolder, until: object) -> RunState:
    assert callable(until)
    follower = runs.Follower(run)
    for _ in range(1000):
        if until(state := follower.poll()):
            return state
        time.sleep(0.02)
    raise AssertionError(f"still {state.status}\n{runs.tail(run)}")


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_lists_runs(place: Path) -> None:
    from webui import app

    workspace = Workspace(place / "workspace")
    run = runs.create(
        workspace, settings.parse({"base": {"source": "embedded/unet"}, "dataset": {"folder": "photos"}}), name="rex"
    )
    (listed,) = runs.list_runs(workspace)
    assert app.row(listed) == ["default", run.name, "created", "", ""]
    assert app.build(workspace).title == "Safelight"


def test_options_of_the_page_are_not_taken_for_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["--port", "many"])
    assert ended.value.code == 2 and "--port" in capsys.readouterr().err
