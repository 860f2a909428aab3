"""How runs and findings look in a terminal, and following a run there."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from . import runs
from .errors import Problem
from .events import RunState
from .runs import RunFolder

EXIT_OK, EXIT_BUG, EXIT_USER = 0, 1, 2


def follow(run: RunFolder, *, silent: bool) -> RunState:
    """Wait for the end of a run, showing how far it is. Ctrl-C asks it to save and stop, once more to end at once."""
    state, asked = RunState(), 0
    with Bar(silent=silent) as bar:
        while not state.ended:
            try:
                for state in runs.watch(run):
                    bar.show(state)
            except KeyboardInterrupt:
                asked += 1
                runs.Requests(run.requests).ask("stop" if asked == 1 else "abort")
                bar.say("saving and stopping; Ctrl-C again ends without saving" if asked == 1 else "ending")
    return state


def exit_code(state: RunState) -> int:
    """0 for a run that ended as it should, 2 for an error with a remedy, 1 for a fault or a death."""
    if state.status in ("finished", "stopped"):
        return EXIT_OK
    known = state.status == "failed" and state.error is not None and state.error.get("code") != "bug"
    return EXIT_USER if known else EXIT_BUG


class Bar:
    """A progress bar on stderr: moving in a terminal, a line for every tenth of the way in a file."""

    def __init__(self, *, silent: bool) -> None:
        self._console = Console(stderr=True, quiet=silent)
        columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._progress = Progress(*columns, TextColumn("{task.fields[note]}"), console=self._console, transient=True)
        self._task: TaskID | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, state: RunState) -> None:
        if state.phase == "train":
            loss, left = figures(state)[1:]
            self._draw(state.status, state.step, state.total_steps, f"loss {loss}  {left} left")
        elif state.status == "queued":
            self._draw("queued", 0, 0, f"{state.total} before it")
        else:
            self._draw(state.phase or state.status, state.done, state.total, "")

    def phase(self, phase: str, done: int, total: int) -> None:
        self._draw(phase, done, total, "")

    def say(self, text: str) -> None:
        self._console.print(text)

    def _draw(self, title: str, done: int, total: int, note: str) -> None:
        if not self._console.is_terminal:
            tenth = 10 * done // total if total else 0
            if f"{title} {tenth}" != self._last:
                self._last = f"{title} {tenth}"
                self._console.print(f"{title} {done}/{total} {note}".rstrip() if total else title)
            return
        if self._task is None:
            self._task = self._progress.add_task(title, total=total or None, note=note)
        self._progress.update(self._task, description=title, completed=done, total=total or None, note=note)


# --- showing ----------------------------------------------------------------------------------------------------------


def describe(run: RunFolder, state: RunState) -> dict[str, object]:
    """A run's state as plain data for `--json`, with the last loss instead of all of them."""
    last = state.losses[-1] if state.losses else None
    return {
        "name": run.name,
        "path": run.path,
        "status": state.status,
        "phase": state.phase,
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": last.loss if last else None,
        "eta_s": state.eta_s,
        "samples": [item.path for item in state.samples],
        "checkpoints": [item.path for item in state.checkpoints if (run.path / item.path).is_dir()],  # not removed
        "exports": [item.path for item in state.exports],
        "warnings": [{"code": item.code, "message": item.message} for item in state.warnings],
        "error": state.error,
        "proof": state.proof,
    }


def print_state(run: RunFolder, state: RunState) -> None:
    step, loss, _ = figures(state)
    print(f"run '{run.name}' {state.status}, step {step}, loss {loss}")
    for warning in state.warnings:
        print(f"  warning: {warning.message}")
    for item in state.exports:
        print(f"  file: {run.path / item.path}")
    if state.error is not None:
        print(f"error: {state.error.get('message')}", file=sys.stderr)
        problems = state.error.get("problems")
        for problem in problems if isinstance(problems, list) else []:
            print(f"  - {Problem(**problem)}", file=sys.stderr)
        if state.error.get("hint"):
            print(f"Hint: {state.error['hint']}", file=sys.stderr)
        if state.error.get("code") == "bug":
            print(f"The traceback is in {run.log}", file=sys.stderr)
    print(f"  folder: {run.path}")


def figures(state: RunState) -> tuple[str, str, str]:
    """Step, last loss and remaining time, as text."""
    loss = state.losses[-1].loss if state.losses else None
    eta = state.eta_s
    left = "" if eta is None else f"{int(eta) // 3600}:{int(eta) // 60 % 60:02}:{int(eta) % 60:02}"
    step = f"{state.step}/{state.total_steps}" if state.total_steps else "-"
    return step, "-" if loss is None else f"{loss:.4f}", left


def problem_rows(problems: Iterable[Problem]) -> list[dict[str, str]]:
    return [{"where": problem.where, "reason": problem.reason, "remedy": problem.remedy} for problem in problems]


def print_problems(title: str, problems: Sequence[Problem]) -> None:
    if problems:
        print(f"{title}:")
    for problem in problems:
        print(f"  - {problem}")


def print_json(data: object) -> None:
    """Characters that the output cannot show become JSON's own escapes."""
    text = json.dumps(data, indent=2, ensure_ascii=False, default=_plain)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2, default=_plain)
    print(text)


def show_any_text() -> None:
    """Names of files may hold what the terminal's encoding does not: that is shown escaped, and ends nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
