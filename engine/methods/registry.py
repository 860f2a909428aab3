"""Settings of a method -> the method. A new method is one file and one case here."""

from __future__ import annotations

from ..families.family import Family
from ..settings.schema import Full, Lora
from ..settings.schema import Method as MethodSettings
from .full import FullMethod
from .lora import LoraMethod
from .method import Method


def build_method(settings: MethodSettings, family: Family) -> Method:
    match settings:
        case Lora():
            return LoraMethod(settings, family)
        case Full():
            return FullMethod()
