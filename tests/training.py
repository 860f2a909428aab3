"""Training runs for tests: settings for tiny bases, trainers in this process, and processes that die on time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import checkpoints, events, runs, settings
from engine.events import Event, EventLog
from engine.runs import Requests, RunFolder
from engine.settings import Settings
from engine.workspace import Workspace

SMALL = (
    "buckets.resolutions=[64]",
    "buckets.step=16",
    "samples.every=0",
    "samples.size=[64, 64]",
    "samples.steps=2",
    "checkpoints.every=100",
    "train.device='cpu'",
    "train.steps=6",
    "method.rank=2",
    "optimizer.lr=1e-2",
    "schedule.warmup_steps=0",
)


def choose(base: Path, pictures: Path, *overrides: str) -> Settings:
    """Settings of a small run, with overrides as on the command line."""
    data: dict[str, Any] = {"base": {"source": str(base)}, "dataset": {"folder": str(pictures)}}
    unfit = {"method.type='full'": "method.", "train.epochs": "train.steps"}  # defaults that do not go with an override
    without = [default for given, default in unfit.items() if any(line.startswith(given) for line in overrides)]
    for line in (*(line for line in SMALL if not line.startswith(tuple(without))), *overrides):
        settings.set_dotted(data, line)
    return settings.parse(data)


def make_trainer(chosen: Settings, root: Path, *, resume: RunFolder | None = None) -> Any:
    """A trainer before its first step, or at the newest checkpoint of the run to resume."""
    from engine.plan import plan_run
    from engine.trainer import Trainer, _resume_point

    workspace = Workspace(root)
    run = resume or runs.create(workspace, chosen)
    log = EventLog(run.events)
    plan = plan_run(chosen)
    point = _resume_point(run, plan) if resume else None
    return Trainer(plan, run, log, Requests(run.requests, log), workspace, point)


def read_events(run: RunFolder, kind: type[Event]) -> list[Any]:
    found, _ = events.read(run.events)
    return [event for event in found if isinstance(event, kind)]


# --- processes --------------------------------------------------------------------------------------------------------


def train_in_process(run: RunFolder, *, resume: bool = False, dying: Callable[[], None] | None = None) -> int:
    """Run the worker in a process of its own; its exit code, -9 when it was killed. `dying` is called in it first."""
    if sys.platform == "win32":
        context: Any = multiprocessing.get_context("spawn")
    else:  # a server that has imported the heavy packages forks each process, instead of 15 s of imports for each
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.warm"])
    process = context.Process(target=_work, args=(str(run.path), resume, dying))
    process.start()
    process.join(240)
    assert process.exitcode is not None, "the run hangs"
    return int(process.exitcode)


def _work(folder: str, resume: bool, dying: Callable[[], None] | None) -> None:
    from engine import worker

    if dying is not None:
        dying()
    sys.exit(worker.main([folder, *(["--resume"] if resume else [])]))


@dataclass(frozen=True)
class DieAfter:
    """kill -9 right after this event of this step was written."""

    kind: str
    step: int

    def __call__(self) -> None:
        append = EventLog.append

        def append_and_die(log: EventLog, event: Event) -> None:
            append(log, event)
            if event.type == self.kind and log.step == self.step:
                os.kill(os.getpid(), signal.SIGKILL)

        EventLog.append = append_and_die  # type: ignore[method-assign]


@dataclass(frozen=True)
class DieWhileWriting:
    """kill -9 in the middle of writing the manifest of this step's checkpoint."""

    step: int

    def __call__(self) -> None:
        commit = checkpoints.Writer.commit

        def die(writer: checkpoints.Writer, manifest: checkpoints.Manifest) -> Path:
            if manifest.step == self.step:
                text = json.dumps({"step": manifest.step, "settings": dict(manifest.settings)})
                (writer.folder / checkpoints.MANIFEST).write_text(text[: len(text) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return commit(writer, manifest)

        checkpoints.Writer.commit = die  # type: ignore[method-assign]
