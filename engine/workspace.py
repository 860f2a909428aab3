"""Names and paths inside the workspace, and writing files so that a crash leaves the old or the new one, never half.

Paths are made here and nowhere else: every name that becomes part of a path went through `clean_name` or is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import WorkspaceError

ENVIRONMENT = "SAFELIGHT_HOME"
MAX_SHOWN = 200  # characters of a path in a message
MAX_NAME = 80  # characters; leaves room for suffixes and for systems that limit whole paths to 260

# Windows refuses these as file names, with any extension.
_RESERVED = {"con", "prn", "aux", "nul", *(f"com{n}" for n in range(1, 10)), *(f"lpt{n}" for n in range(1, 10))}


@dataclass(frozen=True)
class Workspace:
    """The folder that holds everything the program writes. Nothing is created before it is needed."""

    root: Path

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def projects(self) -> Path:
        return self.root / "projects"

    @property
    def presets(self) -> Path:
        return self.root / "presets"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def queue(self) -> Path:
        return self.root / "queue.jsonl"

    def caption_journal(self, folder: Path) -> Path:
        """Where the undo records of a folder's captions are kept: one place for each folder, wherever that lies."""
        place = os.path.abspath(expand(folder))
        digest = hashlib.sha256(os.path.normcase(place).encode()).hexdigest()[:12]
        return self.root / "caption-edits" / f"{clean_name(Path(place).name, fallback='folder')}-{digest}"

    def dataset(self, name: str) -> Path:
        return self.datasets / checked_name(name, "data set")

    def project(self, name: str) -> Path:
        return self.projects / checked_name(name, "project")

    def runs(self, project: str) -> Path:
        return self.project(project) / "runs"

    def run(self, project: str, name: str) -> Path:
        return self.runs(project) / checked_name(name, "run")

    def preset(self, name: str) -> Path:
        return self.presets / f"{checked_name(name, 'preset')}.toml"


def locate(folder: Path | str | None = None, environment: Mapping[str, str] = os.environ) -> Workspace:
    """The workspace: the given folder, else SAFELIGHT_HOME, else ~/safelight. It need not exist yet.

    Raises WorkspaceError when it is a file, or cannot be a path here.
    """
    chosen = str(folder) if folder else environment.get(ENVIRONMENT, "") or "~/safelight"
    root = Path(os.path.abspath(expand(chosen)))
    if root.exists() and not root.is_dir():
        raise WorkspaceError(f"the workspace {root} is a file", "give a folder with --workspace or SAFELIGHT_HOME")
    if str(root) != str(root).encode("utf-8", "replace").decode():
        raise WorkspaceError(
            f"the workspace {str(root)!r} has a name that is not UTF-8, which weight files cannot be written under",
            "give another folder with --workspace or SAFELIGHT_HOME",
        )
    return Workspace(root)


def expand(path: Path | str) -> Path:
    """The path with '~' filled in. Raises WorkspaceError for one that cannot be looked up on this system."""
    try:
        full = Path(path).expanduser()
        full.exists()  # names that are too long or hold a NUL are refused only now
    except (OSError, ValueError, RuntimeError) as error:
        text = str(path) if len(str(path)) <= MAX_SHOWN else f"{str(path)[:MAX_SHOWN]}…"
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise WorkspaceError(f"'{text}' cannot be used as a path: {reason}", "check the path") from error
    return full


# --- names ------------------------------------------------------------------------------------------------------------


def clean_name(text: str, fallback: str = "") -> str:
    """A file name made from free text: letters of any script, digits, '-', '_' and '.', no path, at most MAX_NAME long.

    Raises WorkspaceError when nothing is left and there is no fallback.
    """
    normal = unicodedata.normalize("NFC", text)
    name = re.sub(r"[^\w.\-]+", "-", normal)  # \w is Unicode: 'Füße' and '写真' stay readable
    name = re.sub(r"-{2,}", "-", name).strip("-. ")[:MAX_NAME].rstrip("-. ")
    if name.split(".")[0].lower() in _RESERVED:
        name = f"{name.split('.')[0]}_{name[len(name.split('.')[0]) :]}"
    if not name:
        if not fallback:
            raise WorkspaceError(f"'{text}' cannot be used as a name", "use letters, digits, '-' or '_'")
        return clean_name(fallback)
    return name


def checked_name(name: str, what: str) -> str:
    """The name as it is. Raises WorkspaceError when it is not clean, so that no path leaves the workspace."""
    if clean_name(name, fallback="x") != name:
        raise WorkspaceError(
            f"'{name}' cannot be the name of a {what}",
            f"use letters, digits, '-', '_' and '.'; for example '{clean_name(name, fallback=what)}'",
        )
    return name


# --- writing ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write the whole file or nothing. Text is UTF-8 with newlines as given. Raises WorkspaceError.

    The data goes to a temporary name in the same folder, is flushed to the disk, and is renamed over the target.
    """
    raw = data.encode() if isinstance(data, str) else data
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-", suffix=f"-{path.name[:40]}")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _file_mode())  # mkstemp makes files that only the owner can read
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def make_folder(path: Path) -> Path:
    """Create the folder and its parents where missing. Raises WorkspaceError."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses while writing `path` into a WorkspaceError that says what to do."""
    try:
        yield
    except OSError as error:
        raise WorkspaceError(f"cannot write {path}: {error.strerror or error}", _disk_hint(error, path)) from error


def _disk_hint(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: free some space, or move the workspace with --workspace ({path.parent})"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "it is read-only here: give a folder you may write to with --workspace or SAFELIGHT_HOME"
    if error.errno == errno.ENAMETOOLONG:
        return "the path is too long for this system: use shorter names"
    return "check that the folder exists and can be written to"


def _file_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
