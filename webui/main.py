"""The `safelight` command: the page by default, the engine's commands otherwise."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine import cli
from engine.errors import SafelightError
from engine.terminal import EXIT_OK, EXIT_USER
from engine.workspace import locate, make_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes are those of `engine.cli`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help", "--version")):
        return cli.main(arguments)
    given = _page_arguments(arguments)
    try:
        _open_page(given.workspace, given.port, browser=not given.no_browser)
    except SafelightError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    return EXIT_OK


def _page_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="safelight", description="Open the page. `safelight --help` lists commands.")
    parser.add_argument("--workspace", type=Path, help="folder for everything; otherwise SAFELIGHT_HOME or ~/safelight")
    parser.add_argument("--port", type=_port, help="port of the page; otherwise the first free one from 7860 on")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; ports are 1 to 65535")
    return int(text)


def _open_page(folder: Path | None, port: int | None, *, browser: bool) -> None:
    workspace = locate(folder)
    make_folder(workspace.root)
    from .app import build, launch  # importing Gradio takes a second or two, which the commands need not wait for

    launch(build(workspace), port=port, browser=browser)


if __name__ == "__main__":
    sys.exit(main())
