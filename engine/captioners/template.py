"""Captions from a pattern, such as '{trigger}, a photo of {name}'. Needs no model."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import PurePosixPath

from ..errors import Problem, SettingsError
from .captioner import Picture

FIELDS = {
    "name": "the file name without its ending, '_' as a space",
    "folder": "the name of the folder the image is in",
    "trigger": "the trigger words",
    "width": "width in px",
    "height": "height in px",
    "index": "1, 2, 3, … in the order of the names; {index:03d} gives 001",
}
# Patterns come from forms: attribute access and widths that fill the memory must not get through str.format.
_PADDING = re.compile(r"0?[0-9]{0,2}d?")
_NUMBERS = frozenset({"width", "height", "index"})


class TemplateCaptioner:
    """Fills the fields of FIELDS into `template`. Raises SettingsError, naming every unknown field."""

    def __init__(self, template: str, *, trigger: str = "") -> None:
        _check(template)
        self.template = template
        self.trigger = trigger

    def prepare(self) -> None:
        pass

    def caption(self, pictures: Sequence[Picture]) -> list[str]:
        return [self._fill(picture) for picture in pictures]

    def close(self) -> None:
        pass

    def _fill(self, picture: Picture) -> str:
        path = PurePosixPath(picture.item.name)
        height, width = picture.item.size
        return self.template.format(
            name=path.stem.replace("_", " "),
            folder=path.parent.name or picture.item.path.parent.name,
            trigger=self.trigger,
            width=width,
            height=height,
            index=picture.index,
        )


def _check(template: str) -> None:
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise SettingsError(f"the caption template is malformed: {error}", "write {{ and }} for braces") from error
    problems: list[Problem] = []
    for _, name, padding, conversion in parts:
        if name is None:
            continue
        if name not in FIELDS:
            problems.append(Problem("template", f"there is no field {{{name}}}", f"use {known}"))
        elif conversion or (padding and not (name in _NUMBERS and _PADDING.fullmatch(padding))):
            problems.append(Problem("template", f"{{{name}}} has a format that is not allowed", "write {index:03d}"))
    if problems:
        raise SettingsError("the caption template cannot be used", problems=problems)
