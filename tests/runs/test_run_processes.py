"""Runs as real processes: they outlive whoever started them, wait their turn, stop when asked, and never lie.

The trainer is a stand-in that is found before the real one in the started processes: `sitecustomize` on PYTHONPATH
answers the import of `engine.trainer`. What it does is told by `captions.trigger`.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine import runs, settings, worker
from engine.errors import RunError, SafelightError, WorkspaceError
from engine.events import RunState, fold, read
from engine.runs import ProcessId, RunFolder
from engine.workspace import Workspace

TRAINER = """
import os, subprocess, sys, time
from engine import events
from engine.errors import TrainingError


def train(settings, run, log, requests, *, workspace, resume):
    behave = settings.captions.trigger
    if behave == "stubborn":
        try:
            while True:
                time.sleep(0.02)
        finally:
            print("left the loop", flush=True)
    begin = max(int(path.name[5:]) for path in run.checkpoints.iterdir()) if resume else 0
    log.append(events.Started(
        os.getpid(), 0.0, "anywhere", "cpu", {}, settings.train.steps, begin if resume else None, {}
    ))
    if behave == "error":
        raise TrainingError("the loss is not finite", "lower the learning rate")
    if behave == "memory":
        raise MemoryError
    if behave == "cuda memory":
        raise RuntimeError("CUDA error: out of memory")
    if behave == "bug":
        raise KeyError("oh no")
    if behave == "silent":
        return
    if behave == "exit":
        os._exit(7)
    if behave == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (run.path / "child.txt").write_text(str(child.pid))
    paused = False
    for step in range(begin + 1, settings.train.steps + 1):
        time.sleep(0.02)
        log.append(events.Loss(step, 0, 1.0 / step, {"denoiser": 1e-4}, {"denoiser": 1.0}, 0.02))
        asked = requests.take()
        while "pause" in asked or paused:
            if not paused:
                paused = True
                log.append(events.Paused())
            time.sleep(0.02)
            asked = requests.take()
            if "resume" in asked:
                paused = False
                log.append(events.Resumed())
        if "abort" in asked:
            log.append(events.Finished(step, "stopped"))
            return
        if "save" in asked or "stop" in asked:
            (run.checkpoints / f"step-{step:06}").mkdir()
            log.append(events.Checkpoint(step, f"checkpoints/step-{step:06}"))
        if "stop" in asked:
            log.append(events.Finished(step, "stopped"))
            return
    log.append(events.Finished(settings.train.steps, "finished", {"moved": 1}))
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
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    (stand_in / "trainer.py").write_text(TRAINER)
    (stand_in / "sitecustomize.py").write_text(FINDER.format(trainer=str(stand_in / "trainer.py")))
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    (tmp_path / "photos").mkdir()
    place = Workspace(tmp_path / "the workspace")
    yield place
    for item in runs.list_runs(place):
        runs.kill(item.run)


def create(workspace: Workspace, name: str = "", steps: int = 3, behave: str = "", **sections: object) -> RunFolder:
    data = {
        "base": {"source": "embedded/unet"},
        "dataset": {"folder": str(workspace.root.parent / "photos")},
        "captions": {"trigger": behave},
        "train": {"steps": steps, "device": "cpu"},
    }
    return runs.create(workspace, settings.parse(data | sections), name=name)


def wait(run: RunFolder, until: Callable[[RunState], bool], seconds: float = 20.0) -> RunState:
    follower = runs.Follower(run)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        state = follower.poll()
        if until(state):
            return state
        time.sleep(0.02)
    raise AssertionError(f"still {state.status} at step {state.step} after {seconds} s\n{runs.tail(run)}")


def ended(state: RunState) -> bool:
    return state.ended


def trains(state: RunState) -> bool:
    return state.status == "running" and state.step > 1


def gone(process: ProcessId, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while runs.lives(process) and time.monotonic() < end:
        time.sleep(0.02)
    return not runs.lives(process)


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_run_is_a_fresh_folder_with_a_frozen_copy_of_the_settings(workspace: Workspace) -> None:
    run = create(workspace, "rex")
    assert run.path == workspace.root / "projects" / "default" / "runs" / "rex"
    assert settings.load(run.settings).name == "rex"
    folders = {"requests", "checkpoints", "samples", "exports"}
    assert {path.name for path in run.path.iterdir()} == {"settings.toml", *folders}
    assert runs.status(run).status == "created"
    with pytest.raises(RunError, match="already has a run 'rex'"):
        create(workspace, "rex")
    assert [path.name for path in run.path.parent.iterdir()] == ["rex"], "a refusal leaves nothing behind"


def test_runs_without_a_name_never_collide(workspace: Workspace) -> None:
    names = {create(workspace).name for _ in range(3)}
    assert len(names) == 3 and all(name.startswith("photos-") for name in names)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "a b"])
def test_a_name_that_leaves_the_folder_is_refused(workspace: Workspace, name: str) -> None:
    with pytest.raises(WorkspaceError, match="cannot be the name of a run"):
        create(workspace, name)


def test_relative_paths_hold_when_the_process_works_elsewhere(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root.parent)
    run = create(workspace, dataset={"folder": "photos"})
    assert settings.load(run.settings).dataset.folder == str(workspace.root.parent / "photos")


def test_a_run_is_found_by_name_project_or_folder_and_near_names_are_given(workspace: Workspace) -> None:
    run = create(workspace, "rex-1")
    for name in ("rex-1", "default/rex-1", run.path):
        assert runs.find(workspace, name) == run
    with pytest.raises(RunError) as caught:
        runs.find(workspace, "rex1")
    assert "did you mean" in caught.value.hint and "rex-1" in caught.value.hint
    runs.create(workspace, settings.load(run.settings), project="other", name="rex-1")
    with pytest.raises(RunError) as caught:
        runs.find(workspace, "rex-1")
    assert "default/rex-1, other/rex-1" in caught.value.hint


def test_taking_requests_costs_little_when_there_are_none(tmp_path: Path) -> None:
    requests = runs.Requests(tmp_path / "requests")
    requests.ask("save")
    assert requests.take() == ["save"]
    rounds = []
    for _ in range(10):
        clock = time.perf_counter()
        for _ in range(200):
            assert requests.take() == []
        rounds.append((time.perf_counter() - clock) / 200)
    assert min(rounds) < 100e-6


def test_asking_twice_is_asking_once_and_resume_replaces_pause(tmp_path: Path) -> None:
    requests = runs.Requests(tmp_path / "requests")
    for kind in ("stop", "pause", "stop", "resume"):
        requests.ask(kind)
    assert requests.pending() == ["stop", "resume"]
    assert requests.take() == ["stop", "resume"]
    assert requests.take() == [] and list((tmp_path / "requests").iterdir()) == []


# --- living and dying -------------------------------------------------------------------------------------------------


def test_a_run_outlives_the_program_that_started_it(workspace: Workspace) -> None:
    run = create(workspace, steps=40)
    script = "import sys; from pathlib import Path; from engine import runs; from engine.workspace import Workspace\n"
    script += "runs.start(Workspace(Path(sys.argv[1])), runs.find(Workspace(Path(sys.argv[1])), sys.argv[2]))"
    subprocess.run([sys.executable, "-c", script, str(workspace.root), run.name], check=True, env=_with_source())
    assert runs.status(run).status in ("starting", "running")
    state = wait(run, ended)
    assert (state.status, state.step, len(state.losses), state.proof) == ("finished", 40, 40, {"moved": 1})


def _with_source() -> dict[str, str]:
    source = str(Path(runs.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, os.environ["PYTHONPATH"]])}


def test_stop_saves_and_stops_and_resume_goes_on_from_there(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    process = runs.start(workspace, run)
    wait(run, trains)
    runs.ask(run, "stop")
    runs.ask(run, "stop")
    state = wait(run, ended)
    assert state.status == "stopped"
    assert [item.step for item in state.checkpoints] == [state.step]
    assert gone(process)
    with pytest.raises(RunError, match="is not running any more"):
        runs.ask(run, "stop")
    with pytest.raises(RunError, match="has begun before"):
        runs.start(workspace, run)
    assert runs.resumable(run)
    runs.start(workspace, run, resume=True)
    assert runs.status(run).status in ("starting", "running"), "not 'stopped' any more, before any event"
    again = wait(run, trains)
    assert again.started is not None and again.started.resumed_from == state.step
    assert [loss.step for loss in again.losses] == list(range(1, again.step + 1))


def test_save_and_pause_and_resume_are_answered_by_events(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    runs.start(workspace, run)
    wait(run, trains)
    runs.ask(run, "save")
    wait(run, lambda state: len(state.checkpoints) == 1)
    runs.ask(run, "pause")
    paused = wait(run, lambda state: state.status == "paused")
    time.sleep(0.2)
    assert runs.status(run).step == paused.step
    runs.ask(run, "resume")
    wait(run, lambda state: state.status == "running" and state.step > paused.step)
    runs.ask(run, "abort")
    assert wait(run, ended).status == "stopped"


def test_a_finished_run_is_neither_resumed_nor_started_again(workspace: Workspace) -> None:
    run = create(workspace)
    runs.start(workspace, run)
    assert wait(run, ended).status == "finished"
    before = run.events.read_bytes()
    for resume in (False, True):
        with pytest.raises(RunError, match="is finished"):
            runs.start(workspace, run, resume=resume)
    assert not runs.resumable(run)
    assert run.events.read_bytes() == before


def test_a_killed_run_shows_as_died_and_can_be_resumed(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    process = runs.start(workspace, run)
    wait(run, trains)
    runs.ask(run, "save")
    saved = wait(run, lambda state: bool(state.checkpoints)).checkpoints[0].step
    psutil.Process(process.pid).kill()
    assert gone(process)
    state = runs.status(run)
    assert state.status == "died" and state.error is not None
    assert "killed" in str(state.error["message"]) and "resume" in str(state.error["hint"])
    with run.events.open("ab") as file:
        file.write(b'{"type":"loss","step":99')  # what a crash may leave
    runs.start(workspace, run, resume=True)
    again = wait(run, trains)
    assert again.started is not None and again.started.resumed_from == saved and again.skipped == 0


def test_a_process_that_dies_before_its_first_event_shows_as_died_with_its_last_words(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(workspace)
    (workspace.root.parent / "stand-in" / "filelock.py").write_text("raise ImportError('broken installation')")
    runs.start(workspace, run)
    state = wait(run, ended)
    assert state.status == "died" and state.error is not None
    assert "broken installation" in str(state.error["hint"])


def test_a_run_that_is_alive_is_not_started_twice(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    runs.start(workspace, run)
    with pytest.raises(RunError, match="already"):
        runs.start(workspace, run, resume=True)
    wait(run, trains)
    second = subprocess.run(
        [sys.executable, "-m", "engine.worker", str(run.path)], env=_with_source(), capture_output=True, text=True
    )
    assert second.returncode == 2 and "already has a process" in second.stderr
    assert runs.status(run).status == "running"


def test_a_later_process_with_the_same_pid_is_not_taken_for_the_run(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    process = runs.start(workspace, run)
    wait(run, trains)
    psutil.Process(process.pid).kill()
    assert gone(process)
    mine = runs.identify(os.getpid())
    runs.write_process(run, ProcessId(os.getpid(), mine.created - 100.0, mine.host, mine.since))
    assert runs.status(run).status == "died"


def test_a_run_of_a_machine_that_is_gone_shows_as_died(workspace: Workspace) -> None:
    run = create(workspace, steps=2000)
    process = runs.start(workspace, run)
    wait(run, trains)
    psutil.Process(process.pid).kill()
    assert gone(process)
    runs.write_process(run, ProcessId(os.getpid(), process.created, "another-host", process.since))
    assert runs.status(run).status == "running", "it wrote just now, so the other machine may well be alive"
    assert not runs.kill(run), "a process of another machine is not ours to end, whatever has its number here"
    silent_since = time.time() - runs.STALE_S - 1
    os.utime(run.process, (silent_since, silent_since))
    state = runs.status(run)
    assert state.status == "died" and state.error is not None and "another-host" in str(state.error["message"])


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_R109_a_signal_saves_and_stops(workspace: Workspace, number: signal.Signals) -> None:
    run = create(workspace, steps=2000)
    process = runs.start(workspace, run)
    wait(run, trains)
    os.kill(process.pid, number)
    state = wait(run, ended)
    assert (state.status, len(state.checkpoints)) == ("stopped", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_R109_a_second_signal_ends_a_trainer_that_does_not_listen(workspace: Workspace) -> None:
    run = create(workspace, behave="stubborn")
    process = runs.start(workspace, run)
    wait(run, lambda state: state.status == "starting" and state.last_time > 0)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert runs.lives(process)
    os.kill(process.pid, signal.SIGTERM)
    state = wait(run, ended)
    assert (state.status, state.warnings[0].code) == ("stopped", "aborted")
    assert gone(process) and "left the loop" in run.log.read_text()


def test_no_process_is_left_behind(workspace: Workspace) -> None:
    run = create(workspace, steps=2000, behave="child")
    process = runs.start(workspace, run)
    wait(run, trains)
    child = runs.identify(int((run.path / "child.txt").read_text()))
    runs.ask(run, "abort")
    assert wait(run, ended).status == "stopped"
    assert gone(process) and gone(child)


def test_kill_ends_the_process_and_its_children(workspace: Workspace) -> None:
    run = create(workspace, steps=2000, behave="child")
    process = runs.start(workspace, run)
    wait(run, trains)
    child = runs.identify(int((run.path / "child.txt").read_text()))
    assert runs.kill(run) and gone(process) and gone(child)
    assert runs.status(run).status == "died"
    assert not runs.kill(run)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behave", "code", "message", "exit_code"),
    [
        ("error", "training", "the loss is not finite", 2),
        ("memory", "out-of-memory", "out of memory", 2),
        ("cuda memory", "out-of-memory", "CUDA error", 2),
        ("bug", "bug", "KeyError: 'oh no'", 1),
        ("silent", "bug", "without saying how", 1),
    ],
)
def test_every_way_to_fail_is_an_event_and_an_exit_code(
    workspace: Workspace, behave: str, code: str, message: str, exit_code: int
) -> None:
    run = create(workspace, behave=behave, optimizer={"type": "adamw"})
    ran = subprocess.run([sys.executable, "-m", "engine.worker", str(run.path)], env=_with_source(), cwd=run.path)
    assert ran.returncode == exit_code
    state = runs.status(run)
    assert state.status == "failed" and state.error is not None
    assert state.error["code"] == code and message in str(state.error["message"]) and state.error["hint"]
    assert ("Traceback" in runs.tail(run)) == (code == "bug")
    if code == "out-of-memory":
        problems = state.error["problems"]
        assert isinstance(problems, list) and problems[0]["where"] == "train.gradient_checkpointing"
    assert runs.resumable(run)


def test_remedies_for_memory_name_settings_that_exist_and_leave_out_what_is_done_already() -> None:
    data = {"base": {"source": "x"}, "dataset": {"folder": "x"}}
    tight = settings.parse(
        {**data, "train": {"gradient_checkpointing": True, "batch_size": 1}, "method": {"type": "lora", "rank": 4}}
    )
    wide = settings.parse(
        {**data, "train": {"batch_size": 6, "precision": "fp32"}, "method": {"type": "lora", "text_encoder": True}}
    )
    names = [[p.where for p in worker.explain_out_of_memory(MemoryError(), s, "train").problems] for s in (tight, wide)]
    assert names[0] == ["train.encode_batch_size", "buckets.resolutions"]
    assert names[1][:3] == ["train.gradient_checkpointing", "train.batch_size", "train.precision"]
    for name in {*names[0], *names[1]}:
        section, field = name.split(".")
        assert field in type(getattr(wide, section)).model_fields


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert worker.main([str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_settings_that_became_invalid_fail_with_all_reasons(workspace: Workspace) -> None:
    run = create(workspace)
    run.settings.write_text("[train]\nsteps = 0\n")
    runs.start(workspace, run)
    state = wait(run, ended)
    assert state.status == "failed" and state.error is not None and state.error["code"] == "settings"
    assert len(state.error["problems"]) == 3  # type: ignore[arg-type]


# --- the queue --------------------------------------------------------------------------------------------------------


def test_runs_on_one_device_take_turns_in_the_order_they_were_started(workspace: Workspace) -> None:
    first, second, third = (create(workspace, name, steps=60) for name in ("a", "b", "c"))
    for run in (first, second, third):
        runs.start(workspace, run)
    wait(second, lambda state: state.status == "queued" and state.total == 1)
    wait(third, lambda state: state.status == "queued" and state.total == 2)
    assert [item.state.status for item in reversed(runs.list_runs(workspace))] == ["running", "queued", "queued"]
    states = [wait(run, ended) for run in (first, second, third)]
    assert [state.status for state in states] == ["finished"] * 3
    for before, after in itertools.pairwise(states):
        assert after.started is not None and after.started.time >= before.last_time
    assert workspace.queue.read_text() == ""


def test_a_run_that_waits_can_be_stopped(workspace: Workspace) -> None:
    first, second = create(workspace, "a", steps=2000), create(workspace, "b")
    runs.start(workspace, first)
    wait(first, trains)
    process = runs.start(workspace, second)
    wait(second, lambda state: state.status == "queued")
    runs.ask(second, "stop")
    state = wait(second, ended)
    assert (state.status, state.warnings) == ("stopped", ())
    assert gone(process)
    assert runs.status(first).status == "running"
    assert workspace.queue.read_text() == ""


def test_processes_killed_while_they_hold_the_device_or_wait_hold_nobody_up(workspace: Workspace) -> None:
    first, second, third = (create(workspace, name, steps=2000) for name in ("a", "b", "c"))
    runs.start(workspace, first)
    wait(first, trains)
    runs.start(workspace, second)
    wait(second, lambda state: state.status == "queued")
    runs.start(workspace, third)
    wait(third, lambda state: state.status == "queued")
    assert runs.kill(second) and runs.kill(first)
    wait(third, trains)
    assert [item.state.status for item in reversed(runs.list_runs(workspace))] == ["died", "died", "running"]


def test_devices_do_not_wait_for_each_other(workspace: Workspace) -> None:
    first = create(workspace, "a", steps=2000)
    second = create(workspace, "b", steps=2000, train={"steps": 2000, "device": "mps"})
    for run in (first, second):
        runs.start(workspace, run)
    for run in (first, second):
        wait(run, trains)


def test_the_lock_of_an_accelerator_is_that_of_the_visible_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (worker.device_name("cuda"), worker.device_name("cpu")) == ("cuda-0", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert worker.device_name("cuda") == "cuda-3"


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_ends_the_run_and_says_so(workspace: Workspace) -> None:
    if not hasattr(os, "geteuid"):
        pytest.skip("limits of file sizes are a matter of POSIX")
    run = create(workspace, steps=2000)
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
    script += "from engine.worker import main; sys.exit(main([sys.argv[1]]))"
    command = [sys.executable, "-c", script, str(run.path)]
    ran = subprocess.run(command, env=_with_source(), capture_output=True, text=True)
    assert ran.returncode == 2
    assert "cannot write" in ran.stderr and "free some disk space" in ran.stderr and "Traceback" not in ran.stderr
    assert run.events.read_bytes().endswith(b"}\n")
    assert runs.status(run).status == "died", "its last event is not an ending, and nothing more could be written"
    assert fold(read(run.events)[0]).step > 1


def test_a_workspace_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    place = Workspace(Path("/proc/safelight") if sys.platform == "linux" else tmp_path / "file" / "x")
    (tmp_path / "file").touch()
    with pytest.raises(SafelightError, match="cannot write"):
        runs.create(place, settings.parse({"base": {"source": "embedded/unet"}, "dataset": {"folder": "x"}}))


def test_the_identity_of_a_process_names_this_machine(workspace: Workspace) -> None:
    run = create(workspace)
    process = runs.start(workspace, run)
    assert process.host == platform.node()
    assert json.loads(run.process.read_text())["pid"] == process.pid
    wait(run, ended)
