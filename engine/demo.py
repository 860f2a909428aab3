"""The whole journey on the embedded base: a small data set, a LoRA trained as a run, and what it changed, measured.

The concept is a drawing style: outlined shapes where the base draws filled ones. How many pictures show it is read from
their pixels, before and after, with the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from . import presets, runs, settings
from .errors import RunError
from .events import RunState
from .preview import Previewer, open_previewer, open_source, save_png, shot_for
from .runs import RunFolder
from .workspace import Workspace, make_folder

DATA_SEED = 7
PROMPT_SEED = 70
# The flow base takes the style up more slowly.
OWN_SETTINGS: Mapping[str, dict[str, object]] = {
    "unet": {},
    "flow": {"optimizer": {"lr": 4e-3}, "train": {"steps": 400}},
}
PROMPTS = 16  # held out: the base's denoiser never saw these pairs of shape and colour, the LoRA neither
SHOWN = 8
TILE_PX = 144

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoResult:
    """before and after: share of the held-out prompts that come out as outlines, without and with the LoRA."""

    contact_sheet: Path
    lora: Path
    before: float
    after: float
    run: RunFolder


def run_demo(workspace: Workspace, base: str, on_progress: OnProgress) -> DemoResult:
    """Make the data set, train, draw and measure. Raises RunError when the run did not finish."""
    from .embedded.measure import measure
    from .embedded.scenes import demo_prompts

    run = runs.create(workspace, demo_settings(workspace, base), project="demo", name=_free_name(workspace, base))
    follow(workspace, run, on_progress)
    lora = newest_export(run)
    pairs = demo_prompts(PROMPT_SEED, PROMPTS)
    prompts, scenes = [prompt for prompt, _ in pairs], [scene for _, scene in pairs]
    previewer = open_previewer(open_source(lora, f"embedded/{base}"), workspace)
    before = _draw(previewer, prompts, 0.0, "draw before", on_progress)
    after = _draw(previewer, prompts, 1.0, "draw after", on_progress)
    shares = [measure(pictures, scenes)["hollow"] for pictures in (before, after)]
    sheet = contact_sheet(before[:SHOWN], after[:SHOWN], prompts[:SHOWN], shares)
    facts: dict[str, object] = {"lora": lora.name, "base": f"embedded/{base}", "before": shares[0], "after": shares[1]}
    path = save_png(sheet, run.path / "before-after.png", facts)
    return DemoResult(path, lora, shares[0], shares[1], run)


def demo_settings(workspace: Workspace, base: str) -> settings.Settings:
    """Settings of the demo, over a data set that is written into the workspace first."""
    from .embedded.scenes import demo_dataset, demo_prompts

    folder = workspace.dataset("demo-neon")
    make_folder(folder)
    demo_dataset(folder, DATA_SEED)
    shown = [prompt for prompt, _ in demo_prompts(PROMPT_SEED, 2)]
    wanted = {
        "base": {"source": f"embedded/{base}"},
        "dataset": {"folder": str(folder)},
        "samples": {"prompts": shown},
        **OWN_SETTINGS[base],
    }
    return settings.parse(presets.merge(presets.load("embedded-lora"), wanted), origin="demo")


def follow(workspace: Workspace, run: RunFolder, on_progress: OnProgress) -> None:
    """Start the run as its own process and report its progress until it ends. Ctrl-C asks it to save and stop."""
    runs.start(workspace, run)
    state = RunState()
    try:
        for state in runs.watch(run):
            if state.phase == "train":
                on_progress("train", state.step, state.total_steps)
            elif state.phase:
                on_progress(state.phase, state.done, state.total)
    except KeyboardInterrupt:
        runs.ask(run, "stop")
        raise
    if state.status != "finished":
        reason = (state.error or {}).get("message") or f"it {state.status}"
        raise RunError(
            f"the demo's run did not finish: {reason}", f"see {run.log}; `safelight resume {run.name}` goes on"
        )


def newest_export(run: RunFolder) -> Path:
    """The run's exported file in the family's first format."""
    files = sorted(run.exports.glob("*.safetensors"), key=lambda path: len(path.name))
    if not files:
        raise RunError(f"run {run.name} exported nothing", f"see {run.log}")
    return files[0]


def _free_name(workspace: Workspace, base: str) -> str:
    taken = {listed.run.name for listed in runs.list_runs(workspace)}
    return next(name for n in range(1, 10_000) if (name := f"demo-{base}" + (f"-{n}" if n > 1 else "")) not in taken)


def _draw(
    previewer: Previewer, prompts: Sequence[str], strength: float, phase: str, on_progress: OnProgress
) -> list[Image.Image]:
    shot = shot_for(previewer.base, None, None, None)
    pictures: list[Image.Image] = []
    for index, prompt in enumerate(prompts):
        pictures += previewer.draw([prompt], [index], shot, strength=strength)
        on_progress(phase, index + 1, len(prompts))
    return pictures


def contact_sheet(
    before: Sequence[Image.Image], after: Sequence[Image.Image], prompts: Sequence[str], shares: Sequence[float]
) -> Image.Image:
    """Two rows of pictures with the same prompt and seed in each column."""
    left, top, gap, words = 150, 44, 10, 56
    width = left + len(prompts) * (TILE_PX + gap)
    sheet = Image.new("RGB", (width, top + 2 * (TILE_PX + gap) + words), "#16130f")
    pen = ImageDraw.Draw(sheet)
    pen.text((gap, 14), "Same prompts, same seeds. Nothing but the LoRA differs.", fill="#e8dfd2", font_size=16)
    for row, (title, pictures, share) in enumerate((("LoRA off", before, shares[0]), ("LoRA on", after, shares[1]))):
        y = top + row * (TILE_PX + gap)
        pen.text((gap, y + TILE_PX / 2 - 24), title, fill="#ff7a4d" if row else "#e8dfd2", font_size=20)
        pen.text((gap, y + TILE_PX / 2 + 4), f"{share:.0%} outlined", fill="#a79c8c", font_size=14)
        for column, picture in enumerate(pictures):
            tile = picture.resize((TILE_PX, TILE_PX), Image.Resampling.BICUBIC)
            sheet.paste(tile, (left + column * (TILE_PX + gap), y))
    for column, prompt in enumerate(prompts):
        x, y = left + column * (TILE_PX + gap), top + 2 * (TILE_PX + gap)
        for line, text in enumerate(_wrapped(prompt, 24)):
            pen.text((x, y + 13 * line), text, fill="#a79c8c", font_size=11)
    return sheet


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)
