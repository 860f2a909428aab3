"""The page in one `gr.Blocks`. It holds nothing that is not in the workspace."""

from __future__ import annotations

import os
import threading
from pathlib import Path

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when Gradio is imported: nothing leaves the machine

import gradio as gr

from engine import runs
from engine.errors import WorkspaceError
from engine.events import RunState
from engine.workspace import Workspace

REFRESH_S = 2.0
HEADERS = ["Project", "Run", "Status", "Step", "Loss"]
HOW_TO_START = """\
Start a run from a terminal:

```
safelight train --preset embedded-lora --set base.source=embedded/unet --set dataset.folder=photos --detach
```

`safelight stop NAME` saves and stops it, `safelight resume NAME` goes on, `safelight --help` lists the rest.
"""


def build(workspace: Workspace) -> gr.Blocks:
    """The page of a workspace, not yet served."""
    followers: dict[Path, runs.Follower] = {}
    reading = threading.Lock()  # several browsers may ask at once

    def rows() -> list[list[str]]:
        with reading:
            return [row(item) for item in runs.list_runs(workspace, followers)]

    page: gr.Blocks = gr.Blocks(title="Safelight", analytics_enabled=False)
    with page, gr.Tab("Runs"):
        gr.Markdown(HOW_TO_START)
        timer = gr.Timer(REFRESH_S)
        table = gr.Dataframe(headers=HEADERS, datatype="str", interactive=False, label=f"Runs in {workspace.root}")
        page.load(rows, outputs=table, show_progress="hidden", api_visibility="private")
        timer.tick(rows, outputs=table, show_progress="hidden", api_visibility="private")
    return page


def row(item: runs.Listed) -> list[str]:
    """One line of the table."""
    state = item.state
    step = f"{state.step}/{state.total_steps}" if state.total_steps else ""
    return [item.project, item.run.name, state.status, step, _last_loss(state)]


def launch(page: gr.Blocks, *, port: int | None, browser: bool) -> None:
    """Serve the page to this machine only, until interrupted.

    Raises WorkspaceError when the port is taken.
    """
    for name in ("NO_PROXY", "no_proxy"):  # Gradio asks its own address first, which no proxy can reach
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    try:
        _, address, _ = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            inbrowser=browser,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
        )
    except OSError as error:
        raise WorkspaceError(f"the page cannot be opened: {error}", "give a free port with --port") from error
    print(f"Safelight is at {address} (Ctrl-C ends the page; runs go on)", flush=True)
    page.block_thread()


def _last_loss(state: RunState) -> str:
    loss = state.losses[-1].loss if state.losses else None
    return "" if loss is None else f"{loss:.4f}"
