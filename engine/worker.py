"""The process of a run: `python -m engine.worker <run folder> [--resume]`.

It holds the run's folder and the device, hands over to the trainer, and is the edge at which every way to end becomes
an event. Exit code 0: ended as it should; 2: an error of the user's, with a remedy; 1: a fault of the program.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout

from . import events, runs
from .errors import Problem, RunError, SafelightError
from .events import EventLog
from .runs import Requests, RunFolder
from .settings import Settings, load
from .workspace import Workspace

QUEUE_POLL_S = 0.5
CHILDREN_GRACE_S = 3.0


class Aborted(BaseException):
    """Leaves the run at once. Not an Exception, so that nothing between here and the trainer takes it for an error."""


class NeverBegan(Aborted):
    """Asked to stop while it waited for the device, so there is nothing that could have been saved."""


class OutOfMemory(SafelightError):
    """The device or the machine has too little memory. The problems are the settings to change, best first."""

    code = "out-of-memory"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="engine.worker")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args(argv)
    run = RunFolder(given.folder.resolve())
    try:
        with _hold_folder(run), EventLog(run.events) as log:
            return _run(run, log, resume=given.resume)
    except SafelightError as error:  # the event log itself cannot be written
        print(error, file=sys.stderr)
        return 2
    finally:
        runs.end_processes(psutil.Process().children(recursive=True), CHILDREN_GRACE_S)


def _run(run: RunFolder, log: EventLog, *, resume: bool) -> int:
    requests = Requests(run.requests, log)
    _requests_from_signals(requests)
    settings: Settings | None = None
    try:
        with _announced(run) as process:
            log.append(events.Progress("starting", 0, 0))
            workspace = runs.workspace_of(run)
            settings = load(run.settings)
            with _device(workspace, run, process, settings.train.device, log, requests):
                _train(settings, run, log, requests, workspace, resume)
        return 0
    except NeverBegan:
        log.append(events.Finished(log.step, "stopped"))
        return 0
    except Aborted:
        log.append(events.Warning("aborted", "ended at once without saving; the last checkpoint is the newest state"))
        log.append(events.Finished(log.step, "stopped"))
        return 0
    except SafelightError as error:
        log.append(events.Failed(error.as_dict()))
        return 2
    except Exception as error:  # the edge of the process: whatever it is must end as an event
        if is_out_of_memory(error):
            log.append(events.Failed(explain_out_of_memory(error, settings, _phase(run)).as_dict()))
            return 2
        with suppress(OSError), run.log.open("a", encoding="utf-8") as file:  # the disk may be full
            traceback.print_exc(file=file)
        log.append(events.Failed(_bug(f"{type(error).__name__}: {error}")))
        return 1


def _train(
    settings: Settings, run: RunFolder, log: EventLog, requests: Requests, workspace: Workspace, resume: bool
) -> None:
    log.append(events.Progress("starting", 0, 0))
    from .trainer import train

    train(settings, run, log, requests, workspace=workspace, resume=resume)
    if not log.ended:
        raise RuntimeError("the trainer returned without saying how the run ended")


def _bug(message: str) -> dict[str, object]:
    hint = "this is a fault of the program, not yours; log.txt has the details for a bug report"
    return {"code": "bug", "message": message, "hint": hint, "problems": []}


# --- being the process of a run ---------------------------------------------------------------------------------------


@contextmanager
def _hold_folder(run: RunFolder) -> Iterator[None]:
    if not run.settings.is_file():
        raise RunError(f"{run.path} is not a run", "give the folder of a run, which has a settings.toml")
    try:
        with FileLock(run.lock, blocking=False):
            yield
    except Timeout as error:
        raise RunError(f"run '{run.name}' already has a process", "`safelight runs` shows it") from error
    except OSError as error:
        raise RunError(f"cannot write to {run.path}: {error.strerror or error}", "check the disk") from error


@contextmanager
def _announced(run: RunFolder) -> Iterator[runs.ProcessId]:
    """Say which process runs this, and keep saying that it lives."""
    process = runs.read_process(run)
    if process is None or process.pid != os.getpid() or not runs.lives(process):
        # Not started by `runs.start`, which has noted it already.
        process = runs.identify(os.getpid(), events.read(run.events)[1])
        runs.write_process(run, process)
    over = threading.Event()
    beating = threading.Thread(target=_beat, args=(run.process, over), daemon=True)
    beating.start()
    try:
        yield process
    finally:
        over.set()


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(runs.HEARTBEAT_S):
        try:
            os.utime(path)
        except OSError:  # the folder is gone or the disk is: the trainer will find out when it writes
            return


def _requests_from_signals(requests: Requests) -> None:
    """The first signal asks to save and stop, the second ends at once, the third does not even clean up."""
    received = 0

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1:
            requests.ask_here("stop")
        elif received == 2:
            raise Aborted
        else:
            os._exit(128 + number)

    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")  # the last two exist on some systems only
    for name in names:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), receive)


# --- the device -------------------------------------------------------------------------------------------------------


@contextmanager
def _device(
    workspace: Workspace,
    run: RunFolder,
    process: runs.ProcessId,
    wanted: str,
    log: EventLog,
    requests: Requests,
) -> Iterator[None]:
    """Wait until this run is first in the queue and the device is free, and hold the device."""
    device = device_name(wanted)
    lock = runs.device_lock(workspace, device)
    runs.enter_queue(workspace, run, process, device)
    shown = 0
    try:
        while (before := _runs_before(workspace, process, lock)) > 0:
            if {"stop", "abort"} & set(requests.pending()):
                requests.take()
                raise NeverBegan
            if before != shown:
                log.append(events.Progress("queued", 0, before))
                shown = before
            time.sleep(QUEUE_POLL_S)
    finally:
        runs.leave_queue(workspace, process)
    try:
        yield
    finally:
        lock.release()


def _runs_before(workspace: Workspace, process: runs.ProcessId, lock: FileLock) -> int:
    """How many runs come first; at 0 the lock is held. Only the first in the queue tries, so the order is kept."""
    ahead = runs.ahead_in_queue(workspace, process)
    if ahead > 0:
        return ahead + 1
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return 1
    return 0


def device_name(wanted: str) -> str:
    """The device that a run will use, as the name of its lock. Only 'auto' needs to ask torch."""
    if wanted == "auto":
        from .precision import pick_device

        wanted = pick_device(wanted).type
    if wanted != "cuda":
        return wanted
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return f"cuda-{visible or '0'}"


# --- memory -----------------------------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out: Python's, the accelerator's, or torch's CPU allocator's."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def explain_out_of_memory(error: BaseException, settings: Settings | None, phase: str) -> OutOfMemory:
    """What to change, best first: what costs no quality before what costs some."""
    where = f" during '{phase}'" if phase else ""
    first = (str(error).splitlines() or [""])[0]
    return OutOfMemory(
        f"out of memory{where}" + (f": {first}" if first else ""),
        "close other programs and resume, or start a new run with the first of these that you can accept",
        problems=_memory_remedies(settings) if settings is not None else (),
    )


def _memory_remedies(settings: Settings) -> list[Problem]:
    train, method, found = settings.train, settings.method, []
    if not train.gradient_checkpointing:
        found.append(Problem("train.gradient_checkpointing", "is off", "true: much less memory, a third slower"))
    if train.batch_size > 1:
        half = max(1, train.batch_size // 2)
        same = train.accumulation * train.batch_size // half
        remedy = f"{half}, with train.accumulation = {same} for the same result"
        found.append(Problem("train.batch_size", f"is {train.batch_size}", remedy))
    if train.precision == "fp32":
        found.append(Problem("train.precision", "is fp32", "'auto': half the memory on an accelerator"))
    if method.type == "full" and settings.optimizer.type == "adamw" and settings.optimizer.bits == 32:
        found.append(Problem("optimizer.bits", "is 32", "8: a quarter of the optimizer's memory (CUDA)"))
    if train.encode_batch_size > 1:
        remedy = "1, if it was filling the cache"
        found.append(Problem("train.encode_batch_size", f"is {train.encode_batch_size}", remedy))
    if method.type == "lora" and method.text_encoder:
        remedy = "false: then it is not needed while training"
        found.append(Problem("method.text_encoder", "is on", remedy))
    if method.type == "lora" and method.rank > 4:
        found.append(Problem("method.rank", f"is {method.rank}", f"{method.rank // 2}: a smaller adapter"))
    found.append(Problem("buckets.resolutions", "decide most of it", "smaller pictures, for instance 3/4 of the side"))
    return found


def _phase(run: RunFolder) -> str:
    return events.fold(events.read(run.events)[0]).phase


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
