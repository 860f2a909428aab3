"""What can go wrong for a user. Each error says what, where and what to do.

Anything that is not a `SafelightError` is a fault of the program itself and is shown as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One finding in the settings or in a data set.

    `where` is a dotted setting name or a file path, `reason` says what is wrong, `remedy` what to do about it.
    """

    where: str
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" + (f" ({self.remedy})" if self.remedy else "")


class SafelightError(Exception):
    """A refusal with a remedy. `code` is stable and can be tested; `problems` lists all findings."""

    code = "error"

    def __init__(self, message: str, hint: str = "", *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [self.message, *(f"  - {problem}" for problem in self.problems)]
        if self.hint:
            lines.append(f"Hint: {self.hint}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The error as plain data for event logs and `--json` output."""
        return {
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "problems": [{"where": p.where, "reason": p.reason, "remedy": p.remedy} for p in self.problems],
        }


class SettingsError(SafelightError):
    """A setting is unknown, out of range, or conflicts with another one."""

    code = "settings"


class DatasetError(SafelightError):
    """Images or captions cannot be used as they are."""

    code = "dataset"


class BaseModelError(SafelightError):
    """The base model is missing, of an unknown family, unsafe or broken."""

    code = "base-model"


class CheckpointError(SafelightError):
    """A checkpoint is missing, partial or belongs to something else."""

    code = "checkpoint"


class ExportError(SafelightError):
    """A weight file cannot be written, or does not read back as what was trained."""

    code = "export"


class LoraFileError(SafelightError):
    """A LoRA file cannot be read or does not fit the base."""

    code = "lora-file"


class TrainingError(SafelightError):
    """Training cannot start or go on: nothing trains, the loss is not finite, the gradient scale collapsed."""

    code = "training"


class PictureError(SafelightError):
    """A picture came out as numbers that are no colours."""

    code = "picture"


class RunError(SafelightError):
    """A run does not exist, cannot be started, or is not in the state that was asked for."""

    code = "run"


class WorkspaceError(SafelightError):
    """The workspace cannot be written: a bad name, a read-only or a full disk."""

    code = "workspace"


class MissingPackage(SafelightError):
    """An optional package is not installed. The hint names the command that installs it."""

    code = "missing-package"
