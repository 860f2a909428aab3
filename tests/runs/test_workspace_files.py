"""Names stay inside the workspace; files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import WorkspaceError
from engine.workspace import MAX_NAME, Workspace, checked_name, clean_name, locate, write_atomic


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("My Dog!", "My-Dog"),
        ("../../etc/passwd", "etc-passwd"),
        ("a/b\\c:d", "a-b-c-d"),
        ("  .hidden ", "hidden"),
        ("Füße 写真", "Füße-写真"),
        ("con", "con_"),
        ("NUL.txt", "NUL_.txt"),
        ("a\0b\nc", "a-b-c"),
        ("x" * 300, "x" * MAX_NAME),
        ("v1.2", "v1.2"),
    ],
)
def test_names_are_cleaned(text: str, name: str) -> None:
    assert clean_name(text) == name


@given(st.text(max_size=200))
def test_a_cleaned_name_is_one_path_component_and_clean(text: str) -> None:
    name = clean_name(text, fallback="fallback")
    assert name == clean_name(name) == checked_name(name, "run")
    assert name not in ("", ".", "..") and not set(name) & set('/\\:\0*?"<>|') and len(name) <= MAX_NAME + 1
    folder = Workspace(Path("/w")).run("default", name)
    assert Path(os.path.normpath(folder)).parent == Path("/w/projects/default/runs")


@pytest.mark.parametrize("name", ["..", "a/b", "", "/etc", "a\0", ".x", "a b", "C:\\x"])
def test_a_name_that_is_not_clean_is_refused_with_a_better_one(name: str) -> None:
    workspace = Workspace(Path("/w"))
    for place in (workspace.project, workspace.dataset, workspace.preset, workspace.runs):
        with pytest.raises(WorkspaceError, match="cannot be the name of") as caught:
            place(name)
        assert "for example" in caught.value.hint
    with pytest.raises(WorkspaceError):
        workspace.run("default", name)


def test_nothing_left_of_a_name_is_an_error() -> None:
    with pytest.raises(WorkspaceError, match="cannot be used as a name"):
        clean_name("///")


def test_the_workspace_is_the_option_then_the_environment_then_the_home_folder(tmp_path: Path) -> None:
    assert locate(tmp_path / "a", {"SAFELIGHT_HOME": "/b"}).root == tmp_path / "a"
    assert locate(None, {"SAFELIGHT_HOME": "/b"}).root == Path("/b")
    assert locate(None, {}).root == Path.home() / "safelight"
    (tmp_path / "file").touch()
    with pytest.raises(WorkspaceError, match="is a file"):
        locate(tmp_path / "file")


def test_captions_of_two_folders_of_one_name_have_two_journals(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.caption_journal(Path("/a/photos")) != workspace.caption_journal(Path("/b/photos"))
    assert workspace.caption_journal(Path("/a/photos/../photos")) == workspace.caption_journal(Path("/a/photos"))


def test_a_file_is_replaced_whole_and_leaves_no_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.toml"
    write_atomic(path, "one\n")
    write_atomic(path, "zwei ü\n")
    assert path.read_bytes() == "zwei ü\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="limits of file sizes are a matter of POSIX")
    script = """
import resource, sys
from pathlib import Path
from engine.errors import WorkspaceError
from engine.workspace import write_atomic
path = Path(sys.argv[1])
write_atomic(path, "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomic(path, "n" * 5000)
except WorkspaceError as error:
    print(error.message, error.hint)
"""
    path = tmp_path / "file"
    ran = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "the disk is full" in ran.stdout and str(path) in ran.stdout
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="cannot write"):
        write_atomic(Path("/proc/safelight/file") if sys.platform == "linux" else Path("/nowhere/file"), "x")
    folder = tmp_path / "read-only"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(WorkspaceError) as caught:
        write_atomic(folder / "file", "x")
    assert "read-only" in caught.value.hint
