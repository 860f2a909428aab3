"""The pages say what the program does: generated ones are current, commands exist, examples run."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main

from engine import cli, events, runs
from engine.settings import Settings, parse, reference, set_dotted
from engine.workspace import Workspace
from tests.training import choose, make_trainer, read_events

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_settings_page_is_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference.markdown(), "run: python -m engine.settings.reference > docs/settings.md"


def test_the_reference_names_every_setting_with_a_meaning_and_every_default_is_accepted() -> None:
    rows = list(reference.rows())
    assert len(rows) > 60
    for row in rows:
        assert row.type and row.default, row
        assert row.meaning, f"{row.name} has no description"
    for group in reference.groups():
        data = {"base": {"source": "embedded/unet"}, "dataset": {"folder": "pictures"}}
        if group.variant:
            set_dotted(data, f"{group.name}.type={group.variant}")
        for row in group.rows:
            if row.default not in ("unset", "required"):
                set_dotted(data, f"{row.name}={row.default}")
        assert isinstance(parse(data), Settings)


def test_every_command_and_option_on_the_pages_exists() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    known = {name: {option for p in command.params for option in p.opts} for name, command in commands.items()}
    known[""] = {"--workspace", "--port", "--no-browser", "--help", "--version"}  # the page's own
    seen = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for call in re.findall(r"(?:^|`|&& )safelight((?: [^`\n#|]*)?)", text, flags=re.MULTILINE):
            words = call.split()
            name = words[0] if words and not words[0].startswith("-") else ""
            assert name in known, f"{page.name}: there is no command 'safelight {name}'"
            for option in re.findall(r"(?<!\S)--[a-z-]+", call):
                assert option in known[name] | {"--help"}, f"{page.name}: safelight {name} has no {option}"
            seen.add(name)
    assert set(commands) - seen == set(), "the README's table lists every command"


def test_every_setting_named_on_the_pages_exists() -> None:
    names = {row.name for row in reference.rows()} | {f"{group.name}.type" for group in reference.groups()}
    for page in PAGES:
        for name in re.findall(r"--set '?([a-z_.]+)=", page.read_text(encoding="utf-8")):
            assert name in names or name == "section.field" or name == "name", f"{page.name}: no setting {name}"


def test_links_between_pages_lead_somewhere() -> None:
    found = 0
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            if target == "docs/images/demo.png" and not (ROOT / target).exists():
                continue  # a picture of the demo, which is made where the weights are
            found += 1
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    assert found > 3


def test_the_files_page_names_what_a_run_leaves(tmp_path: Path, base: Callable[[str], Path], pictures: Path) -> None:
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    trainer = make_trainer(
        choose(base("sd15"), pictures, "train.steps=2", "samples.every=1", "train.ema_decay=0.9"), tmp_path
    )
    trainer.run()
    run = trainer.run_folder
    left = {path.name for path in run.path.rglob("*") if path.is_file() and not path.name.startswith(".")}
    shared = {name for name in left if not name.startswith(run.name)}
    generic = {re.sub(r"step-\d+-\d+", "step-000500-00", re.sub(r"step-\d+$", "step-000500", n)) for n in shared}
    missing = {name for name in generic if name not in page}
    assert missing == set()
    assert {name for name in events.TYPES if f"`{name}`" not in page} == set()
    for part in ("settings.toml", "events.jsonl", "log.txt", "process.json"):
        assert part in page
    assert isinstance(runs.status(run), events.RunState) and Workspace(tmp_path).cache.is_dir()


# --- add_a_model_family.md --------------------------------------------------------------------------------------------


def tiny_auraflow(folder: Path) -> Path:
    """An AuraFlowPipeline of random weights: 8 px a latent cell, 64 px pictures."""
    import torch
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
    from transformers import UMT5Config, UMT5EncoderModel

    from tests import tiny

    torch.manual_seed(2)
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    text = UMT5EncoderModel(UMT5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    AuraFlowPipeline(
        tokenizer=tiny._t5_tokenizer(),
        text_encoder=text.eval(),
        vae=tiny._vae(),
        transformer=tiny._without_zeros(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)
    return folder


def test_a_family_written_as_the_page_says_trains_and_draws(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.families import registry

    page = (ROOT / "docs" / "add_a_model_family.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    module = types.ModuleType("auraflow_from_the_page")
    exec(compile(source, "add_a_model_family.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.FAMILIES, "auraflow", (module.__name__, "AuraFlow"))
    monkeypatch.setitem(registry.PIPELINES, "AuraFlowPipeline", "auraflow")

    chosen = choose(tiny_auraflow(tmp_path / "base"), pictures, "train.steps=3", "samples.every=3")
    trainer = make_trainer(chosen, tmp_path / "workspace")
    trainer.run()
    run = trainer.run_folder
    assert [event.step for event in read_events(run, events.Loss)] == [1, 2, 3]
    assert {event.step for event in read_events(run, events.Sample)} == {0, 3}
    (finished,) = read_events(run, events.Finished)
    assert finished.proof["weights"]["moved"] == finished.proof["weights"]["of"] > 0
    assert finished.proof["base_unchanged"] is True
    assert [event.format for event in read_events(run, events.Export)] == ["diffusers"]
