"""Settings from TOML and back, with every problem of a file reported together."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from ..errors import Problem, SettingsError
from .schema import Settings

_UNION_MEMBER = re.compile(r"str|float|int|bool|tuple|list|function|literal|constrained")
LENGTHS = ("steps", "epochs")  # of `train`: a run has one of them
MAX_FILE_BYTES = 64 * 1024  # a settings file is a page of text; more is a mistake or an attack


def load(path: Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a TOML file and apply `section.field=value` overrides.

    A relative data set or base folder is taken relative to the file. Raises SettingsError listing every problem.
    """
    data = read_toml(path)
    apply(data, overrides)
    resolve_paths(data, path.parent)
    return parse(data, origin=path.name)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data. Raises SettingsError when it is missing, too large, not UTF-8 or not TOML."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise SettingsError(f"cannot read settings file {shown(path)}: {_reason(error)}", "check the path") from error
    if len(raw) > MAX_FILE_BYTES:
        raise SettingsError(f"settings file {shown(path)} is too large: at most {MAX_FILE_BYTES} bytes are read")
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"settings file {path} is not UTF-8 text", "save it as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"settings file {path} is not valid TOML: {error or 'nested too deeply'}") from error


def parse(data: Mapping[str, Any], *, origin: str = "settings") -> Settings:
    """Validate plain data. No coercion: "16" is not a number and True is not 1. Raises SettingsError."""
    try:
        # JSON mode: strict about types, yet lists may become tuples and 1 may become 1.0, as in TOML.
        return Settings.model_validate_json(json.dumps(_with_variants(data, Settings), default=str), strict=True)
    except RecursionError as error:
        raise SettingsError(f"{origin}: the settings are nested too deeply", "no setting is a list of lists") from error
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors(include_url=False)]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SettingsError(
            f"{origin}: {count} in the settings", "`safelight settings` lists every setting", problems=problems
        ) from error


def to_toml(settings: Settings) -> str:
    """The complete settings as TOML. `parse(tomllib.loads(to_toml(s))) == s`; unset (None) values are left out."""
    return tomli_w.dumps(settings.model_dump(mode="json", exclude_none=True))


def apply(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply several `section.field=value` to plain data, whatever their order: those that choose a variant come first.

    One length takes the place of the other. Raises SettingsError for one that is not of that form.
    """
    overrides = list(overrides)
    lengths = [name for name in LENGTHS if any(text.partition("=")[0].strip() == f"train.{name}" for text in overrides)]
    data.update(without_other_length(data, lengths))
    for override in sorted(overrides, key=lambda text: not text.partition("=")[0].strip().endswith(".type")):
        set_dotted(data, override)


def without_other_length(data: Mapping[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """The data without the length, steps or epochs, that gives way when only the other one is `given` over it."""
    train, named = data.get("train"), set(given)
    if not isinstance(train, Mapping) or len(named) != 1:
        return dict(data)
    return {**data, "train": {key: value for key, value in train.items() if key not in LENGTHS or key in named}}


def set_dotted(data: dict[str, Any], override: str) -> None:
    """Apply one `section.field=value` to plain data; the value is read as TOML, or as text when it is not TOML.

    Changing `section.type` starts that section afresh, since its other fields belong to another variant. Raises
    SettingsError for anything that is not of that form.
    """
    name, equals, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise SettingsError(f"'{override}' is not of the form section.field=value", "for example optimizer.lr=1e-4")
    try:
        read = tomllib.loads(f"value = {text.strip()}")
        value = read["value"] if len(read) == 1 else text.strip()  # a line end inside begins another key
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()
    target = data
    for key in keys[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise SettingsError(f"'{override}': {key} is not a section")
        target = inner
    if keys[-1] == "type" and target.get("type", value) != value:
        target.clear()
    target[keys[-1]] = value


def resolve_paths(data: dict[str, Any], folder: Path) -> None:
    """Make a relative data set folder, and a base that is a file or folder here, absolute; in place.

    Raises SettingsError for what cannot be a path on this system.
    """
    for section, key in (("dataset", "folder"), ("base", "source")):
        values = data.get(section)
        if not isinstance(values, dict) or not isinstance(values.get(key), str) or not values[key]:
            continue
        try:
            path = (folder / Path(values[key]).expanduser()).absolute()
            there = path.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, no permission, a NUL, no such home folder
            text = f"{section}.{key}: '{shown(values[key])}' cannot be used: {_reason(error)}"
            raise SettingsError(text, "check the path") from error
        if section == "dataset" or there:  # another base may be a hub id or an embedded one
            values[key] = str(path)


def _with_variants(data: Any, section: type[BaseModel]) -> Any:
    """Name the default variant where a section leaves `type` out, so that `[optimizer] lr = 1e-3` means AdamW."""
    if not isinstance(data, Mapping):
        return data
    filled = dict(data)
    for name, field in section.model_fields.items():
        value = data.get(name)
        if not isinstance(value, Mapping):
            continue
        choices = sections_in(field.annotation)
        if field.discriminator == "type":
            value = {"type": field.get_default(call_default_factory=True).type, **value}
            choices = [c for c in choices if c.model_fields["type"].default == value["type"]]
        filled[name] = _with_variants(value, choices[0]) if len(choices) == 1 else value
    return filled


# --- messages ---------------------------------------------------------------------------------------------------------


def _problem(item: Mapping[str, Any]) -> Problem:
    keys, sections = _settings_path(item["loc"])
    where = ".".join(keys) or "settings"
    reason = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        names = sorted({name for section in sections for name in section.model_fields})
        near = difflib.get_close_matches(keys[-1], names, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(names)}"
        return Problem(where, "there is no such setting", remedy)
    if item["type"] == "missing":
        return Problem(where, "is required", "add it to the file or give it with --set")
    if item["type"] in ("union_tag_invalid", "literal_error", "union_tag_not_found"):
        expected = item.get("ctx", {}).get("expected_tags") or item.get("ctx", {}).get("expected") or "'type'"
        return Problem(where + (".type" if item["type"].startswith("union") else ""), f"must be one of {expected}")
    if item["type"] == "json_invalid":  # it was JSON that we made, so a value is what JSON cannot hold
        surrogate = "surrogate" in reason
        return Problem(where, "hold text that is not Unicode" if surrogate else "are nested too deeply")
    received = item.get("input")
    given = "" if isinstance(received, dict) else f", got {shown(json.dumps(received, default=str))}"
    return Problem(where, reason[:1].lower() + reason[1:] + given)


def shown(text: object, length: int = 200) -> str:
    """A value in a message: one that fills the screen is cut."""
    whole = str(text)
    return whole if len(whole) <= length else f"{whole[:length]}… ({len(whole)} characters)"


def _reason(error: Exception) -> str:
    """What the system says, without its number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _settings_path(loc: tuple[int | str, ...]) -> tuple[list[str], list[type[BaseModel]]]:
    """The setting's dotted name without pydantic's union tags, and the sections the last key may belong to."""
    keys: list[str] = []
    sections: list[type[BaseModel]] = [Settings]
    for part in loc:
        fields = {name: info for section in sections for name, info in section.model_fields.items()}
        tagged = [s for s in sections if "type" in s.model_fields and s.model_fields["type"].default == part]
        if tagged and part not in fields:
            sections = tagged
            continue
        if part not in fields and isinstance(part, str) and _UNION_MEMBER.match(part):
            continue  # pydantic's name of a union member, not a key
        keys.append(str(part))
        if part in fields:
            sections = sections_in(fields[part].annotation) or []
    return keys, sections


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in sections_in(argument)]
