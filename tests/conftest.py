"""Fixtures that several tests share: tiny bases and a small data set, each made once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors are slower on several threads; processes inherit it


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny base: "sd15" predicts epsilon, "sd15-v" velocity; "flux1-dev" embeds guidance."""
    from tests.tiny import tiny_flux1, tiny_sd15

    root = tmp_path_factory.mktemp("bases")
    makers: dict[str, Callable[[Path], Path]] = {
        "sd15": tiny_sd15,
        "sd15-v": lambda folder: tiny_sd15(folder, "v_prediction"),
        "flux1": tiny_flux1,
        "flux1-dev": lambda folder: tiny_flux1(folder, guidance_embeds=True),
    }

    def find(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else makers[name](folder)

    return find


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of nine captioned pictures in three shapes."""
    import numpy as np
    from PIL import Image

    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for index, (height, width) in enumerate([(64, 64)] * 4 + [(72, 108)] * 3 + [(120, 80)] * 2):
        colour = random.integers(0, 255, 3)
        noise = random.integers(-25, 25, (height, width, 3))
        Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(folder / f"picture-{index}.png")
        (folder / f"picture-{index}.txt").write_text(f"a cloth of colour {index}\n", encoding="utf-8")
    return folder
