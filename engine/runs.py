"""Runs: create, start, queue, ask, and say how they are. The only place that starts processes.

A run is a folder. Its process is the only writer of the events in it; whoever wants something of the process leaves a
request as a file. How a run is doing is read from its events and from whether its process lives, so a page, a second
page and a terminal agree, and nothing is lost when any of them goes away.
"""

from __future__ import annotations

import difflib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import psutil
from filelock import FileLock, Timeout

from . import events, settings
from .errors import RunError, SettingsError, WorkspaceError
from .events import RunState
from .workspace import Workspace, checked_name, clean_name, disk_errors, expand, make_folder, write_atomic

WATCH_S = 0.3
HEARTBEAT_S = 30.0  # how often a process says that it lives
STALE_S = 180.0  # a process on another machine that was silent this long is taken for dead
LOCK_TIMEOUT_S = 60.0  # for locks that are held for milliseconds
CREATED_TOLERANCE_S = 2.0  # the clock of process creation times may be adjusted a little after a start
Request = Literal["stop", "abort", "save", "sample", "pause", "resume"]
REQUESTS: tuple[Request, ...] = get_args(Request)
_OPPOSITE: dict[Request, Request] = {"pause": "resume", "resume": "pause"}


# --- the folder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """Names every path in a run's folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def settings(self) -> Path:
        return self.path / "settings.toml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """Everything the process prints, and the traceback of a fault."""
        return self.path / "log.txt"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def process(self) -> Path:
        """Which process runs it: pid, creation time and host. Its modification time is the process's heartbeat."""
        return self.path / "process.json"

    @property
    def lock(self) -> Path:
        """Held by the process as long as it lives, so that a folder never has two writers."""
        return self.path / ".lock"


class Requests:
    """What the user wants of a running process, as files in one folder: written, then renamed.

    The process gives its event log, so that each request it takes up is answered by an event.
    """

    def __init__(self, folder: Path, log: events.EventLog | None = None) -> None:
        self.folder = folder
        self._log = log
        self._asked_here: set[Request] = set()

    def ask(self, kind: Request) -> None:
        """Leave a request. Asking twice is asking once; "pause" and "resume" replace each other."""
        if kind not in REQUESTS:
            raise ValueError(f"no such request: {kind}")
        make_folder(self.folder)
        with disk_errors(self.folder / kind):
            if kind in _OPPOSITE:
                (self.folder / _OPPOSITE[kind]).unlink(missing_ok=True)
            draft = self.folder / f".{kind}-{os.getpid()}"
            draft.touch()
            draft.replace(self.folder / kind)

    def ask_here(self, kind: Request) -> None:
        """Ask within the process itself, writing nothing: a signal handler may call it at any moment."""
        self._asked_here.add(kind)

    def pending(self) -> list[Request]:
        """Requests that nobody took up yet."""
        try:
            with os.scandir(self.folder) as entries:
                names = {entry.name for entry in entries}
        except FileNotFoundError:
            names = set()
        names |= self._asked_here
        return [kind for kind in REQUESTS if kind in names] if names else []

    def take(self) -> list[Request]:
        """Take up the waiting requests. Called after every step: a few microseconds when there are none."""
        waiting = self.pending()
        for kind in waiting:
            self._asked_here.discard(kind)
            (self.folder / kind).unlink(missing_ok=True)
            if self._log is not None:
                self._log.append(events.Asked(kind))
        return waiting

    def clear(self) -> None:
        """Forget requests left over from an earlier process."""
        for kind in self.pending():
            (self.folder / kind).unlink(missing_ok=True)


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessId:
    """A process for good: its pid may be given to another one later, but not with the same creation time.

    `created` is what the system says (Unix s, to about a second). `since` is how many bytes of the run's event log are
    of earlier processes; no clock is compared, since clocks are set back.
    """

    pid: int
    created: float
    host: str
    since: int


def identify(pid: int, since: int = 0) -> ProcessId:
    """The identity of a living process of this machine."""
    return ProcessId(pid, psutil.Process(pid).create_time(), platform.node(), since)


def lives(process: ProcessId) -> bool:
    """Whether this very process runs on this machine. False for a process of another machine."""
    if process.host != platform.node():
        return False
    try:
        found = psutil.Process(process.pid)
        same = abs(found.create_time() - process.created) < CREATED_TOLERANCE_S
        return bool(same and found.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def write_process(run: RunFolder, process: ProcessId) -> None:
    write_atomic(run.process, json.dumps(asdict(process)) + "\n")


def read_process(run: RunFolder) -> ProcessId | None:
    """Who runs it or ran it last. None when it never ran."""
    try:
        record = json.loads(run.process.read_bytes())
        return ProcessId(int(record["pid"]), float(record["created"]), str(record["host"]), int(record["since"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _process_lives(run: RunFolder, process: ProcessId | None) -> bool:
    if process is None:
        return False
    if process.host == platform.node():
        return lives(process)
    try:  # pids of another machine say nothing here; its heartbeat does
        return time.time() - run.process.stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False


# --- state ------------------------------------------------------------------------------------------------------------


class Follower:
    """The state of one run, kept up to date by reading only what was added. Holds nothing that cannot be read again."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.offset = 0  # bytes of the event log that were read
        self._folded = RunState()

    def poll(self) -> RunState:
        process = read_process(self.run)
        alive = _process_lives(self.run, process)  # asked before reading: a process that is gone has written everything
        if self.run.events.exists() and self.run.events.stat().st_size < self.offset:
            self.offset, self._folded = 0, RunState()
        new, self.offset = events.read(self.run.events, self.offset)
        if new:
            self._folded = events.fold(new, self._folded)
        silent = process is not None and self.offset <= process.since
        return _observed(self.run, self._folded, process, alive, silent)


def status(run: RunFolder) -> RunState:
    """How the run is: its events, and whether its process lives. Reads all events; use `Follower` to ask again."""
    return Follower(run).poll()


def watch(run: RunFolder, every_s: float = WATCH_S) -> Iterator[RunState]:
    """The run's state, again and again, until it has ended; the last one is the end."""
    follower = Follower(run)
    while True:
        state = follower.poll()
        yield state
        if state.ended:
            return
        time.sleep(every_s)


def _observed(run: RunFolder, state: RunState, process: ProcessId | None, alive: bool, silent: bool) -> RunState:
    if alive:
        if silent:  # it has written nothing yet: what the events say is of an earlier one
            state = replace(state, status="starting", error=None)
        if not state.ended and {"stop", "abort"} & set(Requests(run.requests).pending()):
            return replace(state, status="stopping")
        return state
    if state.ended or (state.status == "created" and process is None):
        return state
    return replace(state, status="died", error=_death(run, process))


def _death(run: RunFolder, process: ProcessId | None) -> dict[str, object]:
    lines = tail(run, 5)
    if process is not None and process.host != platform.node():
        message = f"the machine that ran it ({process.host}) is gone"
    else:
        message = "its process ended without saying why; it was killed, or the system ran out of memory"
    hint = "`safelight resume` goes on from the last checkpoint"
    hint += f". Last lines of log.txt:\n{lines}" if lines else ""
    return {"code": "died", "message": message, "hint": hint, "problems": []}


def tail(run: RunFolder, lines: int = 20) -> str:
    """The last lines of what the process printed."""
    try:
        with run.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400 * lines))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


# --- creating and finding ---------------------------------------------------------------------------------------------


def create(workspace: Workspace, wanted: settings.Settings, project: str = "default", name: str = "") -> RunFolder:
    """A fresh run folder with a frozen copy of the settings. Never writes into a folder that is already there.

    An empty name takes `settings.name`, else one made from the data set and the time. Relative paths in the settings
    are taken relative to the current folder. Raises RunError when the name is taken.
    """
    given = name or wanted.name
    run = workspace.run(project, checked_name(given, "run") if given else _free_name(workspace, wanted, project))
    if run.exists():
        raise RunError(f"project '{project}' already has a run '{run.name}'", "give another name, or none")
    frozen = _absolute_paths(wanted).model_copy(update={"name": run.name})
    draft = run.parent / f".new-{uuid.uuid4().hex[:8]}"
    try:
        write_atomic(RunFolder(draft).settings, settings.to_toml(frozen))
        with disk_errors(run):
            for folder in ("requests", "checkpoints", "samples", "exports"):
                (draft / folder).mkdir()
            try:
                draft.rename(run)
            except OSError as error:
                raise RunError(f"project '{project}' already has a run '{run.name}'", "give another name") from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return RunFolder(run)


def _free_name(workspace: Workspace, wanted: settings.Settings, project: str) -> str:
    subject = clean_name(Path(wanted.dataset.folder).name, fallback="run")[:48]
    stem = f"{subject}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(name for name in candidates if not workspace.run(project, name).exists())


def _absolute_paths(wanted: settings.Settings) -> settings.Settings:
    """The process of a run works in the run's folder, so nothing may depend on the current one."""
    folder = os.path.abspath(expand(wanted.dataset.folder))
    source = expand(wanted.base.source)
    base = wanted.base.model_copy(update={"source": os.path.abspath(source)}) if source.exists() else wanted.base
    return wanted.model_copy(update={"dataset": wanted.dataset.model_copy(update={"folder": folder}), "base": base})


@dataclass(frozen=True)
class Listed:
    """One run in a list."""

    run: RunFolder
    project: str
    state: RunState


def list_runs(workspace: Workspace, followers: dict[Path, Follower] | None = None) -> list[Listed]:
    """All runs, newest first. A caller that asks repeatedly keeps `followers`, so that logs are not read anew."""
    followers = {} if followers is None else followers
    files = [path for path in workspace.projects.glob("*/runs/*/settings.toml") if not path.parent.name.startswith(".")]
    listed = []
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        folder = path.parent
        follower = followers.setdefault(folder, Follower(RunFolder(folder)))
        listed.append(Listed(follower.run, folder.parents[1].name, follower.poll()))
    return listed


def find(workspace: Workspace, name: str | Path) -> RunFolder:
    """A run by its folder, by 'project/run', or by its name alone.

    Raises RunError naming what is near, WorkspaceError for what cannot be looked up.
    """
    folder = expand(name)
    if (folder / "settings.toml").is_file():
        return RunFolder(Path(os.path.abspath(folder)))
    known = {path.parent for path in workspace.projects.glob("*/runs/*/settings.toml")}
    by_name = {f"{path.parents[1].name}/{path.name}": path for path in sorted(known) if not path.name.startswith(".")}
    text = str(name)
    matches = [key for key in by_name if text in (key, key.partition("/")[2])]
    if len(matches) == 1:
        return RunFolder(by_name[matches[0]])
    if matches:
        raise RunError(f"several runs are called '{text}'", f"say which: {', '.join(matches)}")
    names = {key.partition("/")[2]: key for key in by_name}
    near = difflib.get_close_matches(text, [*by_name, *names], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`safelight runs` lists the runs of this workspace"
    raise RunError(f"there is no run '{text}' in {workspace.root}", hint)


def workspace_of(run: RunFolder) -> Workspace:
    """The workspace that a run's folder lies in. Raises RunError for a folder elsewhere."""
    parents = run.path.parents
    if len(parents) < 4 or (parents[0].name, parents[2].name) != ("runs", "projects"):
        raise RunError(f"{run.path} is not in a workspace", "runs lie in <workspace>/projects/<project>/runs/")
    return Workspace(parents[3])


# --- starting and asking ----------------------------------------------------------------------------------------------


def start(workspace: Workspace, run: RunFolder, *, resume: bool = False, foreground: bool = False) -> ProcessId:
    """Start the run's process and return at once.

    The process belongs to no terminal and outlives whoever started it. With `foreground` it stays in the terminal's
    session, so that Ctrl-C and closing the terminal reach it as a request to save and stop. A device that is busy makes
    it wait its turn. `resume` goes on from the last checkpoint, or from the beginning when nothing was saved yet.
    Raises RunError when the run is alive, has ended well, or has begun and `resume` is not given.
    """
    make_folder(workspace.root)
    with _queue_lock(workspace):  # nobody else starts it, or looks at the queue, in between
        follower = Follower(run)
        _refuse_start(run, follower.poll(), resume)
        Requests(run.requests).clear()
        command = [sys.executable, "-P", "-m", "engine.worker", str(run.path)]
        if resume and has_checkpoint(run):
            command.append("--resume")
        with disk_errors(run.log), run.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=run.path,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=not foreground,
                creationflags=_detached_flags(foreground),
            )
        identity = identify(process.pid, follower.offset)
        write_process(run, identity)
        _write_queue(workspace, [*_read_queue(workspace), Waiting(str(run.path), None, identity)])
    return identity


def _refuse_start(run: RunFolder, state: RunState, resume: bool) -> None:
    if state.status == "finished" and not (resume and _goes_further(settings.load(run.settings), state)):
        raise _finished(run)
    if not state.ended and state.status != "created":
        raise RunError(f"run '{run.name}' is already {state.status}", "`safelight runs` shows it")
    if state.started is not None and not resume:
        raise RunError(f"run '{run.name}' has begun before", "resume it, or create a new run; nothing is overwritten")


def _finished(run: RunFolder) -> RunError:
    hint = f"go further with `safelight resume {run.name} --set train.steps=…`, or train anew"
    return RunError(f"run '{run.name}' is finished", hint)


def _goes_further(chosen: settings.Settings, state: RunState) -> bool:
    """Whether these settings give a finished run more steps."""
    train = chosen.train
    return (train.steps is not None and train.steps > state.step) or (
        train.epochs is not None and state.losses[-1:] != () and train.epochs > state.losses[-1].epoch + 1
    )


def change_settings(run: RunFolder, changes: Iterable[str]) -> None:
    """Apply `section.field=value` to a run that is not going on at the moment. What is refused changes nothing.

    Raises RunError when it is going on, or is finished and would not go further, and SettingsError for a setting that
    would make it another run.
    """
    state = status(run)
    if not state.ended:
        raise RunError(f"run '{run.name}' is {state.status}", "stop it first")
    then = settings.load(run.settings)
    data = settings.read_toml(run.settings)
    settings.apply(data, changes)
    now = settings.parse(data, origin=run.settings.name)
    problems = settings.changed(then.model_dump(mode="json"), now.model_dump(mode="json"))
    if problems:
        raise SettingsError(f"run '{run.name}' cannot go on with other settings", problems=problems)
    if state.status == "finished" and not _goes_further(now, state):
        raise _finished(run)
    saved = max((item.step for item in state.checkpoints), default=0)
    if now.train.steps is not None and now.train.steps < saved:
        raise SettingsError(
            f"train.steps: run '{run.name}' has a checkpoint of step {saved} already", "give as many steps, or more"
        )
    write_atomic(run.settings, settings.to_toml(now))


def resumable(run: RunFolder) -> bool:
    """Whether `start(resume=True)` would go on with it: it began, and was stopped, failed or died."""
    return status(run).status in ("stopped", "failed", "died")


def has_checkpoint(run: RunFolder) -> bool:
    return any(run.checkpoints.glob("step-*"))


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    source = Path(__file__).resolve().parents[1]
    if (source / "pyproject.toml").is_file():  # run from a source tree: the process must take the same code
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
    return environment


def _detached_flags(foreground: bool) -> int:
    if sys.platform != "win32" or foreground:
        return 0
    return subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW


def ask(run: RunFolder, kind: Request) -> None:
    """Ask something of a run that is alive. Raises RunError when it is not, since nobody would ever answer."""
    state = status(run)
    if state.ended or state.status == "created":
        what = "has not been started" if state.status == "created" else f"is not running any more ({state.status})"
        raise RunError(f"run '{run.name}' {what}", f"there is nothing to {kind}")
    Requests(run.requests).ask(kind)


def kill(run: RunFolder) -> bool:
    """End the run's process and its children now, saving nothing. False when it was not alive on this machine."""
    process = read_process(run)
    if process is None or not lives(process):
        return False
    end_processes([psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)], grace_s=0.0)
    return True


def end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Ask processes to end, wait, and end by force what is left."""
    for process in processes if grace_s else []:
        _send(process, signal.SIGTERM)
    _, left = psutil.wait_procs(processes, timeout=grace_s)
    for process in left:
        _send(process, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    psutil.wait_procs(left, timeout=5.0)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


# --- the queue --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting:
    """A process that waits for a device; None until it knows which. Gone when it holds the device, or when it dies."""

    run: str
    device: str | None
    process: ProcessId


def enter_queue(workspace: Workspace, run: RunFolder, process: ProcessId, device: str) -> None:
    """Say which device this process waits for, keeping its place; a process without a place goes to the end."""
    with _queue_lock(workspace):
        queue = _read_queue(workspace)
        mine = Waiting(str(run.path), device, process)
        known = any(entry.process == process for entry in queue)
        _write_queue(workspace, [mine if e.process == process else e for e in queue] + ([] if known else [mine]))


def leave_queue(workspace: Workspace, process: ProcessId) -> None:
    """Give the place up, and clear away processes of this machine that died waiting."""
    with _queue_lock(workspace):
        others = [entry for entry in _read_queue(workspace) if entry.process != process]
        _write_queue(workspace, [e for e in others if e.process.host != platform.node() or lives(e.process)])


def ahead_in_queue(workspace: Workspace, process: ProcessId) -> int:
    """How many living processes of this machine come first at the same device, or do not know their device yet."""
    queue = [entry for entry in _read_queue(workspace) if entry.process.host == process.host]
    place = next((i for i, entry in enumerate(queue) if entry.process == process), len(queue))
    device = queue[place].device if place < len(queue) else None
    rivals = [entry for entry in queue[:place] if entry.device in (None, device)]
    return sum(lives(entry.process) for entry in rivals)


def device_lock(workspace: Workspace, device: str) -> FileLock:
    """The lock of a device of this machine, not yet taken. The system frees it when its holder dies."""
    make_folder(workspace.locks)
    return FileLock(workspace.locks / f"{clean_name(platform.node(), fallback='host')}-{clean_name(device)}.lock")


@contextmanager
def _queue_lock(workspace: Workspace) -> Iterator[None]:
    make_folder(workspace.locks)
    lock = FileLock(workspace.locks / "queue.lock", timeout=LOCK_TIMEOUT_S)
    with disk_errors(workspace.locks):
        try:
            lock.acquire()
        except Timeout as error:
            raise WorkspaceError("the queue of runs is locked by another process", "try again in a moment") from error
        except NotImplementedError as error:
            raise WorkspaceError(f"{workspace.locks} cannot hold locks", "put the workspace on a local disk") from error
    try:
        yield
    finally:
        lock.release()


def _read_queue(workspace: Workspace) -> list[Waiting]:
    """A damaged line is passed over: whoever lost its place enters at the end."""
    try:
        lines = workspace.queue.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    queue: list[Waiting] = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            queue.append(Waiting(record["run"], record["device"], ProcessId(**record["process"])))
    return queue


def _write_queue(workspace: Workspace, queue: list[Waiting]) -> None:
    write_atomic(workspace.queue, "".join(json.dumps(asdict(entry)) + "\n" for entry in queue))
