"""Presets: settings without the things that are one's own, so that they can be given to somebody else.

A preset is a TOML file with the settings' own names. It never says which base, which pictures or what name, and never
contains a path or a secret. A preset from someone else is data: read, validated, never executed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from . import settings
from .errors import Problem, SettingsError
from .workspace import Workspace, clean_name, expand, write_atomic

OWN = ("base.source", "base.revision", "dataset.folder", "dataset.folder_repeats", "name")
"""Settings that a preset cannot have: they are about one person's files."""

_SECRET_NAME = re.compile(r"(token|password|passwd|secret|api_?key|credential)", re.IGNORECASE)
_SECRET = re.compile(r"\b(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16})\b")
_PATH = re.compile(r"^(~?[/\\]|[A-Za-z]:[/\\]|\.\.?[/\\]|file:)|[/\\]\.\.([/\\]|$)")


@dataclass(frozen=True)
class Preset:
    """A preset: its name, its plain data, and the comment at the top of its file."""

    name: str
    data: Mapping[str, Any]
    about: str
    shipped: bool


def shipped() -> list[str]:
    """Names of the presets that come with the program."""
    names = [item.name for item in _shipped_folder().iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def available(workspace: Workspace) -> list[Preset]:
    """The shipped presets, then the user's own. Raises SettingsError for a file that is not a preset."""
    own = sorted(workspace.presets.glob("*.toml"))
    return [load(name) for name in shipped()] + [load(path) for path in own]


def load(name_or_path: str | Path, workspace: Workspace | None = None) -> Preset:
    """A preset by the name of a shipped one, of one in the workspace, or by its file.

    Raises SettingsError, and WorkspaceError for what cannot be looked up.
    """
    text = str(name_or_path)
    if text in shipped():
        return _read(text, _shipped_folder() / f"{text}.toml", shipped=True)
    path = expand(text)
    if path.suffix == ".toml":
        return _read(path.stem, path, shipped=False)
    own = {item.stem: item for item in workspace.presets.glob("*.toml")} if workspace is not None else {}
    if text in own:
        return _read(text, own[text], shipped=False)
    near = difflib.get_close_matches(text, [*shipped(), *own], n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join([*shipped(), *own])}"
    raise SettingsError(f"there is no preset '{text}'", hint)


def merge(preset: Preset | Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's values with `data` over them; a section that names another variant replaces the preset's section."""
    under = preset.data if isinstance(preset, Preset) else preset
    own = data.get("train")
    lengths = set(own) & set(settings.LENGTHS) if isinstance(own, Mapping) else ()
    return _merge(settings.without_other_length(under, lengths), data)


def from_settings(chosen: settings.Settings) -> dict[str, Any]:
    """What of these settings may go into a preset: what differs from the defaults, without what is one's own."""
    data = chosen.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    _name_variants(data, chosen)
    for name in OWN:
        section, _, key = name.rpartition(".")
        (data.get(section, {}) if section else data).pop(key, None)
    return {key: value for key, value in data.items() if value != {}}


def _name_variants(data: dict[str, Any], section: BaseModel) -> None:
    """Say which variant each section is: `type` is its variant's default, and so is not among what differs."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not isinstance(value, BaseModel):
            continue
        inner = data.get(name, {})
        if field.discriminator is not None:
            inner = {field.discriminator: getattr(value, str(field.discriminator)), **inner}
        _name_variants(inner, value)
        if inner:
            data[name] = inner


def save(workspace: Workspace, name: str, chosen: settings.Settings) -> Path:
    """Write the settings as one of the user's own presets.

    Raises SettingsError when they hold paths or secrets, or when a shipped preset has the name.
    """
    data = from_settings(chosen)
    if clean_name(name) in shipped():
        raise SettingsError(f"a preset '{clean_name(name)}' comes with the program", "give yours another name")
    check(data, clean_name(name))
    path = workspace.preset(clean_name(name))
    write_atomic(path, tomli_w.dumps(data))
    return path


def to_toml(preset: Preset) -> str:
    """The preset as the text of a file, comment first."""
    comment = f"# {preset.about}\n\n" if preset.about else ""
    return comment + tomli_w.dumps(dict(preset.data))


def check(data: Mapping[str, Any], name: str) -> None:
    """Raise SettingsError listing everything that keeps this data from being a preset."""
    problems = [
        Problem(own, "is about your own files, so it cannot be in a preset", "remove it; give it with the settings")
        for own in OWN
        if _has(data, own)
    ]
    for where, value in _texts(data):
        key = where.rpartition(".")[2]
        if _SECRET_NAME.search(key) or _SECRET.search(value):
            problems.append(Problem(where, "looks like a secret", "remove it, and renew it if the file was shared"))
        elif _PATH.search(value):
            problems.append(Problem(where, f"'{value}' is a path on someone's computer", "remove it"))
    if problems:
        hint = "a preset holds no paths and no secrets"
        raise SettingsError(f"'{name}' cannot be used as a preset", hint, problems=problems)
    stand_in = {"base": {"source": "embedded/unet"}, "dataset": {"folder": "pictures"}}
    settings.parse(_merge(stand_in, data), origin=f"preset {name}")


# --- reading ----------------------------------------------------------------------------------------------------------


def _shipped_folder() -> Traversable:
    installed = resources.files("engine") / "_presets"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[1] / "presets"


def _read(name: str, file: Traversable, *, shipped: bool) -> Preset:
    with resources.as_file(file) as path:
        data = settings.read_toml(path)
        text = path.read_text(encoding="utf-8-sig")
    check(data, name)
    return Preset(name, data, _opening_comment(text), shipped)


def _opening_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines).strip()


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if not isinstance(value, Mapping):
            merged[key] = value
        elif isinstance(below, Mapping) and value.get("type", below.get("type")) == below.get("type"):
            merged[key] = _merge(below, value)
        else:
            merged[key] = dict(value)
    return merged


def _has(data: Mapping[str, Any], dotted: str) -> bool:
    value: Any = data
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every text in the data with the dotted name of where it is; keys of free-form tables count as names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, where)
    elif isinstance(value, str):
        yield where, value
