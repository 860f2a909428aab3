"""What a run reports: one JSON object a line in `events.jsonl`, written by the run's process and by nobody else.

Everything that is shown about a run is `fold(events)`, a pure function, so a page, a terminal and a test see the same.
Metric names are the field names below; charts and tests bind to them. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time as clock
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar

from .errors import WorkspaceError

AnyEvent = TypeVar("AnyEvent", bound="Event")
LAST_STEP = -1  # an event made with this step gets the step of the event before it


# --- event types ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """`time` is Unix seconds and is set by the log; `step` is the number of finished optimizer steps.

    Events that are about one step redeclare it with `field()`, which takes the default and the keyword away.
    """

    type: ClassVar[str] = ""
    step: int = field(default=LAST_STEP, kw_only=True)
    time: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Started(Event):
    """Training begins. `process_created` (Unix s) tells the process from a later one that got the same pid."""

    type: ClassVar[str] = "started"
    pid: int
    process_created: float
    host: str
    device: str
    versions: Mapping[str, str]
    total_steps: int
    resumed_from: int | None
    plan: Mapping[str, object]


@dataclass(frozen=True)
class Progress(Event):
    """`done` of `total` in a phase such as "starting", "queued", "scan" or "export"; total 0 means unknown."""

    type: ClassVar[str] = "progress"
    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Loss(Event):
    """One optimizer step. `lr` and `grad_norm` are by role; `scale` is the fp16 loss scale, None without one.

    Numbers that were not finite read back as None.
    """

    type: ClassVar[str] = "loss"
    step: int = field()
    epoch: int
    loss: float | None
    lr: Mapping[str, float | None]
    grad_norm: Mapping[str, float | None]
    seconds: float
    scale: float | None = None
    extra: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample(Event):
    """A picture. `path` is relative to the run folder, with forward slashes."""

    type: ClassVar[str] = "sample"
    step: int = field()
    index: int
    prompt: str
    seed: int
    path: str
    strength: float = 1.0


@dataclass(frozen=True)
class Checkpoint(Event):
    """`path` is relative to the run folder."""

    type: ClassVar[str] = "checkpoint"
    step: int = field()
    path: str


@dataclass(frozen=True)
class Export(Event):
    """A file for other programs, and what loading it back showed. `path` is relative to the run folder."""

    type: ClassVar[str] = "export"
    path: str
    format: str
    verified: Mapping[str, object]


@dataclass(frozen=True)
class Warning(Event):
    """Something the user should know that does not stop the run."""

    type: ClassVar[str] = "warning"
    code: str
    message: str


@dataclass(frozen=True)
class Asked(Event):
    """The run took up a request: "stop", "save" and so on. Written by `runs.Requests.take`."""

    type: ClassVar[str] = "asked"
    request: str


@dataclass(frozen=True)
class Paused(Event):
    type: ClassVar[str] = "paused"


@dataclass(frozen=True)
class Resumed(Event):
    """Training goes on after a pause."""

    type: ClassVar[str] = "resumed"


@dataclass(frozen=True)
class Failed(Event):
    """The run ended with an error: `SafelightError.as_dict()`, or code "bug" for a fault of the program."""

    type: ClassVar[str] = "failed"
    error: Mapping[str, object]


@dataclass(frozen=True)
class Finished(Event):
    """The run ended as it should: all steps done, or stopped because someone asked."""

    type: ClassVar[str] = "finished"
    step: int = field()
    outcome: Literal["finished", "stopped"]
    proof: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Unknown(Event):
    """A line that this version cannot read: another version's event, or a damaged line. Counted, never fatal."""

    type: ClassVar[str] = "unknown"
    name: str


TYPES: dict[str, type[Event]] = {
    kind.type: kind
    for kind in (
        Started, Progress, Loss, Sample, Checkpoint, Export, Warning, Asked, Paused, Resumed, Failed, Finished,
    )
}  # fmt: skip
_FIELDS: dict[type[Event], tuple[str, ...]] = {
    kind: tuple(item.name for item in fields(kind) if item.name not in ("step", "time")) for kind in TYPES.values()
}


# --- writing ----------------------------------------------------------------------------------------------------------


class EventLog:
    """The one writer of an `events.jsonl`. Use as a context manager or call `close`.

    Opening repairs a last line that a crash cut off. Each event is one write of one whole line straight to the
    operating system, so a killed process loses nothing that was appended; the events that end a run are also flushed to
    the disk. `ended` says whether the last event ends the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0
        self.ended = False
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o666)
            self._size = _repair(self._file)
        except OSError as error:
            raise _refused(path, error) from error
        events, _ = read(path)
        if events:
            self.step = events[-1].step
            self.ended = isinstance(events[-1], Failed | Finished)

    def append(self, event: Event) -> None:
        """Write one event, whole or not at all. Numbers that are not finite become null. Raises WorkspaceError."""
        step = self.step if event.step == LAST_STEP else event.step
        stamp = event.time or clock.time()
        record = {"type": event.type, "time": round(stamp, 3), "step": step}
        record |= {name: getattr(event, name) for name in _FIELDS[type(event)]}
        line = _encode(record)
        try:
            written = os.write(self._file, line)
            if written != len(line):
                written += os.write(self._file, line[written:])
            if isinstance(event, Failed | Finished):
                os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # a full disk may have taken part of the line
            raise _refused(self.path, error) from error
        self._size += len(line)
        self.step = step
        self.ended = isinstance(event, Failed | Finished)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _repair(file: int) -> int:
    """End or cut off a torn last line; the size of the file afterwards."""
    size = os.lseek(file, 0, os.SEEK_END)
    tail = b""
    start = size
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        os.lseek(file, start, os.SEEK_SET)
        tail = os.read(file, size - start)
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return size
    if isinstance(_decode(torn), Unknown):
        os.ftruncate(file, size - len(torn))
        return size - len(torn)
    os.write(file, b"\n")  # whole, only its line end is missing
    return size + 1


def _encode(record: dict[str, object]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _refused(path: Path, error: OSError) -> WorkspaceError:
    hint = "free some disk space, or check that the folder can be written to"
    return WorkspaceError(f"cannot write {path}: {error.strerror or error}", hint)


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """The events from a byte offset on, and the offset to read from next time. A line still being written waits.

    A file that does not exist has no events. Lines that cannot be read are `Unknown`, which `fold` counts.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return [_decode(line) for line in whole.splitlines() if line.strip()], offset + len(whole)


def _decode(line: bytes) -> Event:
    try:
        record = json.loads(line)
        name = record["type"]
        kind = TYPES.get(name)
        if kind is None:
            return Unknown(str(name), step=int(record["step"]), time=float(record["time"]))
        values = {key: record[key] for key in _FIELDS[kind] if key in record}
        return kind(**values, step=int(record["step"]), time=float(record["time"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unknown("damaged line")


# --- folding ----------------------------------------------------------------------------------------------------------

Status = Literal[
    "created", "queued", "starting", "running", "paused", "stopping", "finished", "stopped", "failed", "died"
]
ENDED: frozenset[Status] = frozenset({"finished", "stopped", "failed", "died"})
RECENT_STEPS = 50  # steps that the remaining time is estimated from


@dataclass(frozen=True)
class RunState:
    """What is known about a run from its events. `status` "died" is never folded; `runs.status` adds it."""

    status: Status = "created"
    phase: str = ""
    done: int = 0
    total: int = 0
    step: int = 0
    total_steps: int = 0
    started: Started | None = None
    losses: tuple[Loss, ...] = ()
    samples: tuple[Sample, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    exports: tuple[Export, ...] = ()
    warnings: tuple[Warning, ...] = ()
    error: Mapping[str, object] | None = None
    proof: Mapping[str, object] = field(default_factory=dict)
    first_time: float = 0.0
    last_time: float = 0.0
    skipped: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def seconds_per_step(self) -> float | None:
        """Middle of the recent step times, which one slow step does not move. None before the first step."""
        recent = sorted(loss.seconds for loss in self.losses[-RECENT_STEPS:] if loss.seconds is not None)
        return recent[len(recent) // 2] if recent else None

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last step; None when unknown or when the run has ended."""
        pace = self.seconds_per_step
        if pace is None or self.ended or not self.total_steps:
            return None
        return pace * max(0, self.total_steps - self.step)


def fold(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """The state after these events. Pure and incremental: `fold(b, fold(a)) == fold(a + b)`.

    After a resume from an earlier checkpoint, what was reported of the steps done again is dropped.
    """
    state = state or RunState()
    losses = list(state.losses)  # grows in place; a new tuple for every step would make long runs quadratic
    for event in events:
        if isinstance(event, Loss):
            losses = _before(losses, event.step) if losses and losses[-1].step >= event.step else losses
            losses.append(event)
        elif isinstance(event, Started):
            losses = _before(losses, _first_redone(event))
        state = _fold_one(state, event)
    return replace(state, losses=tuple(losses))


def _fold_one(state: RunState, event: Event) -> RunState:
    if isinstance(event, Unknown):
        return replace(state, skipped=state.skipped + 1)
    state = replace(state, last_time=event.time, first_time=state.first_time or event.time)
    match event:
        case Loss():
            return replace(state, step=event.step, phase="train", status=_going(state))
        case Progress():
            return _fold_progress(state, event)
        case Started():
            return _fold_started(state, event)
        case Sample():
            kept = [item for item in state.samples if (item.step, item.index) != (event.step, event.index)]
            return replace(state, samples=(*kept, event))
        case Checkpoint():
            kept_checkpoints = [item for item in state.checkpoints if item.step != event.step]
            return replace(state, checkpoints=(*kept_checkpoints, event))
        case Export():
            kept_exports = [item for item in state.exports if item.path != event.path]
            return replace(state, exports=(*kept_exports, event))
        case Warning():
            return replace(state, warnings=(*state.warnings, event))
        case Asked():
            return replace(state, status="stopping") if event.request in ("stop", "abort") else state
        case Paused():
            return replace(state, status="paused")
        case Resumed():
            return replace(state, status="running")
        case Failed():
            return replace(state, status="failed", error=event.error)
        case Finished():
            return replace(state, status=event.outcome, step=event.step, proof=event.proof, error=None)
    return state


def _fold_progress(state: RunState, event: Progress) -> RunState:
    state = replace(state, phase=event.phase, done=event.done, total=event.total)
    if event.phase == "queued":
        return replace(state, status="queued", error=None)
    if event.phase == "starting" or state.ended or state.status in ("created", "queued"):
        return replace(state, status="starting", error=None)
    return state


def _fold_started(state: RunState, event: Started) -> RunState:
    """A process began to train: what is done again is dropped, and how the run ended before no longer holds."""
    first = _first_redone(event)
    return replace(
        state,
        status=_going(state),
        started=event,
        step=event.resumed_from or 0,
        total_steps=event.total_steps,
        samples=tuple(_before(state.samples, first)),
        checkpoints=tuple(_before(state.checkpoints, first)),
        exports=(),
        error=None,
        proof={},
    )


def _first_redone(event: Started) -> int:
    return 0 if event.resumed_from is None else event.resumed_from + 1


def _before(events: Iterable[AnyEvent], step: int) -> list[AnyEvent]:
    return [event for event in events if event.step < step]


def _going(state: RunState) -> Status:
    return "stopping" if state.status == "stopping" else "running"
