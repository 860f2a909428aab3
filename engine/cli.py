"""The commands. Each one reads its arguments, calls the engine, and shows what came back.

Exit codes: 0 ended as it should; 2 something to be changed by the user, said in one line with a hint; 1 a fault of the
program, with its traceback in a file.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import __version__, presets, runs, settings
from .errors import DatasetError, Problem, RunError, SafelightError, SettingsError
from .runs import RunFolder
from .settings import reference
from .terminal import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_USER,
    Bar,
    describe,
    exit_code,
    figures,
    follow,
    print_json,
    print_problems,
    print_state,
    problem_rows,
    show_any_text,
)
from .worker import is_out_of_memory
from .workspace import Workspace, expand, locate, write_atomic

if TYPE_CHECKING:
    from .data.buckets import BucketPlan
    from .data.manifest import Manifest

app = typer.Typer(
    name="safelight",
    help="Teach image diffusion models something new. Without a command, the page opens in the browser; it takes "
    "--port, --no-browser and --workspace.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WorkspaceOption = Annotated[
    Path | None, typer.Option("--workspace", help="Folder for everything; otherwise SAFELIGHT_HOME or ~/safelight.")
]
UnusedWorkspace = Annotated[
    Path | None, typer.Option("--workspace", help="Accepted by every command; this one touches no workspace.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, for example --set optimizer.lr=1e-4. Repeatable.")
]
PresetOption = Annotated[str | None, typer.Option("--preset", help="Start from a preset: a name, or a .toml file.")]
RunArgument = Annotated[str, typer.Argument(help="The run: its name, 'project/name', or its folder.")]
FolderArgument = Annotated[Path, typer.Argument(help="Folder with images, or the name of a data set in the workspace.")]
DetachOption = Annotated[bool, typer.Option("--detach", help="Return at once; the run goes on by itself.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors go to stderr, in one line with a hint, never as a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_any_text()
    try:
        app(args=arguments, prog_name="safelight")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_OK if ended.code is None else EXIT_USER
    except SafelightError as error:
        if "--json" in arguments:
            print_json({"error": error.as_dict()})
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # the edge of the program: our fault, shown as one
        if is_out_of_memory(error):
            print(f"error: out of memory: {(str(error).splitlines() or [''])[0]}", file=sys.stderr)
            print("Hint: draw or train smaller, or close other programs", file=sys.stderr)
            return EXIT_USER
        print(f"this is a bug in safelight: {type(error).__name__}: {error}", file=sys.stderr)
        print(f"the details for a bug report are in {_write_traceback()}", file=sys.stderr)
        return EXIT_BUG
    return EXIT_OK


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and end.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"safelight {__version__}")
        raise typer.Exit


# --- data -------------------------------------------------------------------------------------------------------------


@app.command()
def scan(
    folder: FolderArgument,
    change: SetOption = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Look at every image and caption of a folder and say what is wrong.

    Example: safelight scan photos
    """
    manifest = _scan(_data_settings(_folder(folder, workspace), "embedded/unet", change))
    if json_output:
        print_json(
            {
                "folder": manifest.folder,
                "images": len(manifest.items),
                "captioned": manifest.captioned,
                "formats": manifest.formats,
                "sizes": {f"{height}x{width}": count for (height, width), count in manifest.sizes.items()},
                "samples_per_epoch": manifest.samples_per_epoch,
                **{name: problem_rows(getattr(manifest, name)) for name in ("problems", "notes", "left_out")},
            }
        )
    else:
        print(f"{len(manifest.items)} usable images in {manifest.folder}, {manifest.captioned} with a caption")
        formats = ", ".join(f"{count} {name}" for name, count in manifest.formats.items())
        common = ", ".join(f"{height}x{width} ({count})" for (height, width), count in [*manifest.sizes.items()][:5])
        print(f"formats: {formats or '-'}; sizes (height x width): {common or '-'}")
        print_problems("Problems", manifest.problems)
        print_problems("Left out", manifest.left_out)
        print_problems("Notes", manifest.notes)
    raise typer.Exit(EXIT_USER if manifest.problems or not manifest.items else EXIT_OK)


@app.command()
def buckets(
    folder: FolderArgument,
    base: Annotated[str, typer.Option(help="The base model, whose sizes count.")] = "embedded/unet",
    change: SetOption = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show which size each image is trained at, and what is cut off.

    Example: safelight buckets photos --base embedded/unet --set train.batch_size=4
    """
    chosen = _data_settings(_folder(folder, workspace), base, change)
    manifest = _scan(chosen)
    plan = _plan_buckets(chosen, manifest)
    rows = [
        {
            "height": bucket.size[0],
            "width": bucket.size[1],
            "images": len(bucket.placements),
            "batches": math.ceil(len(bucket.placements) / plan.batch_size),
            "crop_loss": sum(placement.crop_loss for placement in bucket.placements) / len(bucket.placements),
        }
        for bucket in plan.buckets
    ]
    left_out = (*manifest.left_out, *plan.left_out)
    if json_output:
        totals = {"images": plan.images, "batches_per_epoch": plan.batches_per_epoch, "crop_loss": plan.mean_crop_loss}
        findings = {"left_out": problem_rows(left_out), "problems": problem_rows(manifest.problems)}
        print_json({"buckets": rows, **totals, **findings})
        raise typer.Exit(EXIT_USER if manifest.problems else EXIT_OK)
    table = Table("height", "width", "images", "batches", "cut off")
    for row in rows:
        *counts, loss = row.values()
        table.add_row(*map(str, counts), f"{loss:.1%}")
    Console().print(table)
    print(
        f"{plan.images} images, {plan.batches_per_epoch} batches of up to {plan.batch_size} an epoch; "
        f"{plan.mean_crop_loss:.1%} of the area is cut off on average"
    )
    print_problems("Left out", left_out)
    print_problems("Problems", manifest.problems)
    raise typer.Exit(EXIT_USER if manifest.problems else EXIT_OK)


@app.command()
def caption(
    folder: FolderArgument,
    template: Annotated[
        str, typer.Option(help="Text for each image, with {name}, {folder}, {trigger}, {index}, {width}, {height}.")
    ] = "",
    trigger: Annotated[str, typer.Option(help="Words for {trigger}.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also images that have a caption.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take the last change of this folder's captions back.")] = False,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write captions from a template, into .txt files beside the images. Can be undone.

    Example: safelight caption photos --template "a photo of sks dog, {name}"
    """
    _require_unicode(template, trigger)
    folder = _folder(folder, workspace)
    journal = locate(workspace).caption_journal(folder)
    if undo:
        _undo_captions(journal, json_output)
        return
    if not template:
        raise SettingsError("say what to write", 'for example --template "a photo of sks dog", or --undo')
    from .captioners import captioner

    manifest = _scan(_data_settings(folder, "embedded/unet", ["dataset.missing_captions=empty"]))
    writer = captioner.captioner_class("template")(template, trigger=trigger)
    report = captioner.run(
        writer,
        manifest.items,
        folder=manifest.folder,
        journal=journal,
        policy="overwrite" if overwrite else "keep",
        batch_size=max(1, len(manifest.items)),  # one change, so that one --undo takes all of it back
    )
    odd = [Problem(o.name, o.reason) for o in report.outcomes if o.status != "written" and o.reason != "has a caption"]
    counts = {"written": report.count("written"), "kept": report.count("skipped"), "failed": report.count("failed")}
    if json_output:
        print_json({**counts, "problems": problem_rows([*odd, *manifest.problems])})
    else:
        print(f"{counts['written']} captions written, {counts['kept']} kept, {counts['failed']} failed")
        print_problems("Not written", odd)
        print_problems("Problems", manifest.problems)
        if counts["written"]:
            print(f"`safelight caption {folder} --undo` takes the change back")
    raise typer.Exit(EXIT_USER if counts["failed"] else EXIT_OK)


def _undo_captions(journal: Path, json_output: bool) -> None:
    from .data import captions

    history = captions.history(journal)
    if not history:
        raise DatasetError("there is no change of these captions to take back", "only changes made here can be undone")
    kept = captions.undo(journal, history[0])
    if json_output:
        print_json({"undone": history[0], "kept": problem_rows(kept)})
    else:
        print("the last change of the captions was taken back")
        print_problems("Left as they are", kept)


# --- runs -------------------------------------------------------------------------------------------------------------


@app.command()
def train(
    settings_file: Annotated[
        Path | None, typer.Argument(metavar="[SETTINGS.toml]", help="File with the settings of the run.")
    ] = None,
    change: SetOption = None,
    preset: PresetOption = None,
    project: Annotated[str, typer.Option(help="Project that the run belongs to.")] = "default",
    name: Annotated[str, typer.Option(help="Name of the run; otherwise made from the data set and the time.")] = "",
    detach: DetachOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check, and show what would be done.")] = False,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Train a model as the settings say. Ctrl-C saves and stops; `safelight resume` goes on.

    Example: safelight train --set base.source=embedded/unet --set dataset.folder=photos --preset embedded-lora
    """
    place = locate(workspace)
    chosen = read_settings(place, settings_file, preset, change or [])
    if dry_run:
        _show_plan(chosen, json_output)
        return
    run = runs.create(place, chosen, project=project, name=name)
    runs.start(place, run, foreground=not detach)
    _started(run, detach, json_output)


@app.command()
def resume(
    name: RunArgument,
    change: SetOption = None,
    detach: DetachOption = False,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Go on with a run that was stopped, failed or died, from its last checkpoint, exactly.

    --set may change how long it goes on, the schedule, samples, checkpoints and export; with a larger train.steps a
    finished run goes on too.

    Example: safelight resume photos-20260101-120000 --set train.steps=3000
    """
    place = locate(workspace)
    run = runs.find(place, name)
    if change:
        runs.change_settings(run, change)
    anew = not runs.has_checkpoint(run)
    runs.start(place, run, resume=True, foreground=not detach)
    if anew and not json_output:
        print(f"run '{run.name}' has no checkpoint, so it starts from the beginning")
    _started(run, detach, json_output)


@app.command()
def stop(
    name: RunArgument,
    abort: Annotated[bool, typer.Option("--abort", help="End without saving.")] = False,
    kill: Annotated[bool, typer.Option("--kill", help="End the process by force, when nothing else helps.")] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Ask a run to save and stop.

    Example: safelight stop photos-20260101-120000
    """
    run = runs.find(locate(workspace), name)
    if kill:
        if not runs.kill(run):
            raise RunError(f"run '{run.name}' has no process on this machine", "there is nothing to end")
        print(f"the process of run '{run.name}' was ended")
        return
    runs.ask(run, "abort" if abort else "stop")
    print(f"asked run '{run.name}' to {'end without saving' if abort else 'save and stop'}")


@app.command(name="runs")
def list_runs(
    name: Annotated[str | None, typer.Argument(help="One run only, in detail.")] = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List runs and how they are.

    Example: safelight runs --json
    """
    place = locate(workspace)
    if name is not None:
        run = runs.find(place, name)
        state = runs.status(run)
        print_json(describe(run, state)) if json_output else print_state(run, state)
        return
    listed = runs.list_runs(place)
    if json_output:
        print_json([{"project": item.project, **describe(item.run, item.state)} for item in listed])
        return
    if not listed:
        print(f"no runs in {place.root}")
        return
    table = Table("project", "run", "status", "step", "loss", "left")
    for item in listed:
        table.add_row(item.project, item.run.name, item.state.status, *figures(item.state))
    Console().print(table)


@app.command(name="settings")
def show_settings(
    settings_file: Annotated[
        Path | None, typer.Argument(metavar="[SETTINGS.toml]", help="File to check and complete.")
    ] = None,
    change: SetOption = None,
    preset: PresetOption = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Explain every setting; with a file, a preset or --set, check them and show the complete result.

    Example: safelight settings run.toml --set train.steps=500
    """
    if settings_file or preset or change:
        chosen = read_settings(locate(workspace), settings_file, preset, change or [])
        print_json(chosen.model_dump(mode="json")) if json_output else print(settings.to_toml(chosen), end="")
    elif json_output:
        print_json(settings.Settings.model_json_schema())
    else:
        for line in explain_settings():
            print(line)


@app.command(name="presets")
def list_presets(
    name: Annotated[str | None, typer.Argument(help="One preset: show what it sets.")] = None,
    save: Annotated[Path | None, typer.Option(help="Make a preset of that name from a settings file.")] = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """List presets, show one, or save one.

    Example: safelight presets my-style --save run.toml
    """
    place = locate(workspace)
    if save is not None:
        if name is None:
            raise SettingsError("give the preset a name", "for example `safelight presets my-style --save run.toml`")
        print(f"saved {presets.save(place, name, read_settings(place, save, None, []))}")
    elif name is not None:
        chosen = presets.load(name, place)
        print_json(chosen.data) if json_output else print(presets.to_toml(chosen), end="")
    elif json_output:
        found = presets.available(place)
        print_json([{"name": item.name, "about": item.about, "shipped": item.shipped} for item in found])
    else:
        for item in presets.available(place):
            print(f"{item.name}{'' if item.shipped else ' (your own)'}\n    {item.about}")


@app.command()
def doctor(workspace: WorkspaceOption = None, json_output: JsonOption = False) -> None:
    """Say what this machine can do, and what is wrong with the installation.

    Example: safelight doctor
    """
    from .doctor import as_text, examine

    report = examine(locate(workspace))
    print_json(report.as_dict()) if json_output else print(as_text(report))
    raise typer.Exit(EXIT_USER if report.problems else EXIT_OK)


# --- pictures and files -----------------------------------------------------------------------------------------------


@app.command()
def demo(
    base: Annotated[str, typer.Option(help="Which embedded base: 'unet' or 'flow'.")] = "unet",
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Train a small LoRA on pictures that are drawn for it, on a CPU in minutes, and show before and after.

    Example: safelight demo
    """
    if base not in ("unet", "flow"):
        raise SettingsError(f"--base: there is no embedded base '{base}'", "it is 'unet' or 'flow'")
    from .demo import run_demo

    with Bar(silent=json_output) as bar:
        result = run_demo(locate(workspace), base, bar.phase)
    figures = {"before": result.before, "after": result.after, "run": result.run.path}
    if json_output:
        print_json({"contact_sheet": result.contact_sheet, "lora": result.lora, **figures})
        return
    print(f"pictures in the taught style: {result.before:.0%} before, {result.after:.0%} after")
    print(f"pictures: {result.contact_sheet}\nLoRA:     {result.lora}\nrun:      {result.run.path}")
    print(f'next:     safelight preview {result.run.name} --prompt "neon style, a red heart" --sweep 0,0.5,1')
    print("          or your own pictures: safelight train --preset embedded-lora --set base.source=embedded/unet \\")
    print("          --set dataset.folder=FOLDER")


@app.command()
def preview(
    source: Annotated[str, typer.Argument(help="A run, or a LoRA file.")],
    prompt: Annotated[list[str] | None, typer.Option(help="What to draw. Repeatable; otherwise as in the run.")] = None,
    strength: Annotated[float, typer.Option(help="Strength of the LoRA; 0 draws the base.")] = 1.0,
    sweep: Annotated[str, typer.Option(help="Several strengths, for example 0,0.5,1; also makes a strip.")] = "",
    base: Annotated[str | None, typer.Option(help="The base model; otherwise the one that was trained on.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first picture.", min=0)] = 0,
    steps: Annotated[int | None, typer.Option(help="Sampler steps; otherwise the base's usual number.", min=1)] = None,
    guidance_scale: Annotated[float | None, typer.Option("--guidance", help="Guidance scale.", min=0.0)] = None,
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH in px; otherwise the base's own.")] = "",
    negative_prompt: Annotated[str, typer.Option(help="What guidance moves away from.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("previews"),
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Draw pictures with what was trained.

    Example: safelight preview my-run --prompt "a red circle" --sweep 0,0.5,1
    """
    from .preview import Request
    from .preview import preview as draw

    _require_unicode(*(prompt or ()), negative_prompt)
    if sweep and strength != 1.0:
        raise SettingsError("--strength and --sweep are both given", "name all strengths in --sweep")
    place = locate(workspace)
    request = Request(
        prompts=tuple(prompt or ()),
        negative_prompt=negative_prompt,
        seed=seed,
        steps=steps,
        guidance_scale=guidance_scale,
        size=_size(size) if size else None,
        strengths=_strengths(sweep) if sweep else (strength,),
    )
    written = draw(_source(place, source), request, workspace=place, out=out, base=base)
    if json_output:
        print_json({"pictures": written})
    else:
        for path in written:
            print(path)


@app.command()
def export(
    name: RunArgument,
    format: Annotated[str, typer.Option(help="File format; otherwise what the family's users load most.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the file; otherwise the one of the run.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; otherwise what the settings say.")] = None,
    workspace: WorkspaceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Write a run's newest checkpoint as a file for other programs, and check it by loading it back.

    Example: safelight export my-run --format kohya --dtype fp16
    """
    from .export import export_run

    result = export_run(runs.find(locate(workspace), name), format=format, out=out, dtype=dtype)
    if json_output:
        print_json({"path": result.path, "verification": result.verification})
    else:
        print(f"{result.path}\nverified: {result.verification}")


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A LoRA file.")],
    base: Annotated[str | None, typer.Option(help="The base model it should fit.")] = None,
    workspace: UnusedWorkspace = None,
    json_output: JsonOption = False,
) -> None:
    """Say what a LoRA file holds and whether it loads onto its base.

    Example: safelight verify my-lora.safetensors --base embedded/unet
    """
    from .verify import verify_file

    found = verify_file(path, base=base)
    if json_output:
        print_json(found)
    else:
        for key, value in found.items():
            print(f"{key}: {value}")
    raise typer.Exit(EXIT_USER if found["fits"] is False else EXIT_OK)


def _source(place: Workspace, text: str) -> Path | RunFolder:
    path = expand(text)
    return path if path.suffix == ".safetensors" else runs.find(place, text)


def _require_unicode(*texts: str) -> None:
    """Arguments may be any bytes; those that are no text in the terminal's encoding arrive as halves of characters."""
    for text in texts:
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise SettingsError(f"{text[:60]!r} is not Unicode text", "type it anew, or check the terminal's encoding")


def _strengths(text: str) -> tuple[float, ...]:
    try:
        strengths = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SettingsError(f"--sweep: '{text}' is not a list of numbers", "for example 0,0.5,1") from error
    return strengths


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[xX×](\d+)", text.strip())
    if not found:
        raise SettingsError(f"--size: '{text}' is not a size", "write height x width in px, for example 512x768")
    return int(found[1]), int(found[2])


# --- settings ---------------------------------------------------------------------------------------------------------


def read_settings(place: Workspace, file: Path | None, preset: str | None, changes: Iterable[str]) -> settings.Settings:
    """Settings from a preset, a file over it, and `section.field=value` changes over both. Raises SettingsError.

    Relative paths are relative to the file they stand in; those in changes to the current folder.
    """
    data: dict[str, Any] = {}
    if file is not None:
        data = settings.read_toml(file)
        settings.resolve_paths(data, file.parent)
    if preset is not None:
        data = presets.merge(presets.load(preset, place), data)
    settings.apply(data, changes)
    settings.resolve_paths(data, Path.cwd())
    return settings.parse(data, origin=file.name if file else "settings")


def explain_settings() -> list[str]:
    """Every setting with its type, default and meaning, in the order of the settings file."""
    lines: list[str] = []
    for group in reference.groups():
        if group.name:
            kind = f' type = "{group.variant}"' if group.variant else ""
            lines += ["", f"[{group.name}]{kind}  {group.about}"]
        for row in group.rows:
            bounds = f", {row.bounds}" if row.bounds else ""
            lines += [f"{row.name} = {row.default}    ({row.type}{bounds})", f"    {row.meaning}"]
    return lines


def _folder(folder: Path, workspace: Path | None) -> Path:
    """The folder, or the workspace's data set of that name where there is no such folder here."""
    folder = expand(folder)
    named = locate(workspace).datasets / folder
    return named if len(folder.parts) == 1 and not folder.exists() and named.is_dir() else folder


def _data_settings(folder: Path, base: str, changes: Iterable[str] | None) -> settings.Settings:
    """Settings for commands that only look at data."""
    data: dict[str, Any] = {"base": {"source": base}, "dataset": {"folder": str(folder)}}
    settings.apply(data, changes or [])
    return settings.parse(data)


def _scan(chosen: settings.Settings) -> Manifest:
    from .data.manifest import scan as scan_folder

    return scan_folder(chosen.dataset, chosen.buckets.min_side)


def _plan_buckets(chosen: settings.Settings, manifest: Manifest) -> BucketPlan:
    from .data.buckets import plan
    from .families.registry import open_base

    family, located = open_base(chosen.base)
    return plan(
        manifest.items,
        chosen.buckets,
        native_resolution=family.resolution(located),
        multiple=family.pixel_multiple(located),
        batch_size=chosen.train.batch_size,
    )


def _show_plan(chosen: settings.Settings, json_output: bool) -> None:
    from .plan import plan_run

    summary = plan_run(chosen).summary()
    if json_output:
        print_json(summary)
        return
    for key, value in summary.items():
        print(f"{key.replace('_', ' ')}: {value}")


# --- following a run --------------------------------------------------------------------------------------------------


def _started(run: RunFolder, detach: bool, json_output: bool) -> None:
    """Show a run that was just started until it ends, or say where it is; ends the command."""
    if detach:
        state = runs.status(run)
        print_json(describe(run, state)) if json_output else print(f"started run '{run.name}' in {run.path}")
        raise typer.Exit(EXIT_OK)
    state = follow(run, silent=json_output)
    print_json(describe(run, state)) if json_output else print_state(run, state)
    raise typer.Exit(exit_code(state))


def _write_traceback() -> Path:
    path = Path(tempfile.gettempdir()) / f"safelight-bug-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    write_atomic(path, f"safelight {__version__}, Python {sys.version}\n{traceback.format_exc()}")
    return path
