"""Whole journeys of a user, with the real command, on the embedded bases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

COMMAND = [sys.executable, "-m", "webui.main"]
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "camera", "coins", "page", "text")  # RGB and grey, mixed sizes


def safelight(*arguments: object, workspace: Path, code: int = 0) -> Any:
    """Run the command; returns its JSON when it was asked for, else its output."""
    environment = {**os.environ, "SAFELIGHT_HOME": str(workspace), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=1500, check=False
    )
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ordinary photographs of mixed sizes that come with scikit-image, each with a caption."""
    import skimage

    source = Path(skimage.__file__).parent / "data"
    folder = tmp_path_factory.mktemp("photos")
    for name in PHOTOS:
        file = next(source.glob(f"{name}.*"))
        shutil.copy(file, folder / file.name)
        (folder / f"{name}.txt").write_text(f"a photo of {name}", encoding="utf-8")
    assert len({Image.open(p).size for p in folder.glob("*.*") if p.suffix != ".txt"}) >= 5
    return folder


def plain_diffusers_image(base: str, lora: Path, prompt: str, seed: int, steps: int, guidance: float) -> np.ndarray:
    """The picture that a script with nothing but diffusers gets."""
    import diffusers
    import torch

    import engine

    folder = Path(engine.__file__).parent / "embedded" / base
    cls = diffusers.StableDiffusionPipeline if base == "unet" else diffusers.FluxPipeline
    pipeline = cls.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
    guided: dict[str, Any] = {"guidance_scale": guidance}
    if base == "flow":
        length = pipeline.tokenizer_2.model_max_length
        guided = {"true_cfg_scale": guidance, "negative_prompt": "", "max_sequence_length": length}
    picture = pipeline(
        prompt,
        height=48,
        width=48,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **guided,
    ).images[0]
    return np.asarray(picture)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("base", ["unet", "flow"])
def test_a_folder_of_photos_and_a_base_are_enough_to_train_a_lora_that_plain_diffusers_loads(
    base: str, photos: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "photos.toml"
    lines = ["[base]", f'source = "embedded/{base}"', "[dataset]", f'folder = "{photos.as_posix()}"']
    settings.write_text("\n".join(lines), encoding="utf-8")
    overrides = ["train.steps=300", "method.rank=4", "method.alpha=8.0", "optimizer.lr=1e-3", "samples.every=150"]
    safelight("train", settings, *(x for o in overrides for x in ("--set", o)), workspace=tmp_path / "home")
    (run,) = safelight("runs", "--json", workspace=tmp_path / "home")
    assert run["status"] == "finished" and run["step"] == 300
    folder = Path(run["path"])
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [event["loss"] for event in events if event["type"] == "loss"]
    assert len(losses) == 300 and np.isfinite(losses).all()
    proof = events[-1]["proof"]
    assert proof["base_unchanged"] and proof["weights"]["moved"] == proof["weights"]["of"] > 0
    samples = {event["step"] for event in events if event["type"] == "sample"}
    assert samples == {0, 150, 300}

    for file in sorted((folder / "exports").glob("*.safetensors")):
        if base == "flow" and "kohya" in file.name:
            continue  # diffusers' reader of this format has the width of the released FLUX.1 built in
        report = safelight("verify", file, "--base", f"embedded/{base}", "--json", workspace=tmp_path / "home")
        assert report["fits"] and not report["leftover"] and not report["unread_by_diffusers"]
        shown = safelight(
            "preview", file, "--base", f"embedded/{base}", "--prompt", "a photo of coffee", "--seed", 5,
            "--steps", 8, "--guidance", 2, "--out", tmp_path / file.stem, "--json", workspace=tmp_path / "home",
        )  # fmt: skip
        ours = np.asarray(Image.open(shown["pictures"][0]), dtype=np.float64) / 255
        theirs = plain_diffusers_image(base, file, "a photo of coffee", 5, 8, 2.0)
        assert np.abs(ours - theirs).max() < 1e-3 + 0.5 / 255  # ours went through 8 bits
        off = safelight(
            "preview", file, "--base", f"embedded/{base}", "--prompt", "a photo of coffee", "--seed", 5, "--strength",
            0, "--steps", 8, "--guidance", 2, "--out", tmp_path / f"{file.stem}-off", "--json",
            workspace=tmp_path / "home",
        )  # fmt: skip
        assert np.abs(np.asarray(Image.open(off["pictures"][0]), dtype=np.float64) / 255 - ours).max() > 0.05


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_demo_shows_its_style_far_more_often_with_the_lora_than_without(tmp_path: Path) -> None:
    shown = safelight("demo", "--json", workspace=tmp_path)
    sheet = Image.open(shown["contact_sheet"])
    assert sheet.width > 800 and len(sheet.getcolors(1 << 24) or []) > 1000
    assert shown["before"] <= 0.1, "the base already draws outlines"
    assert shown["after"] >= shown["before"] + 0.5, "an untrained LoRA would leave the share as it was"
    report = safelight("verify", shown["lora"], "--base", "embedded/unet", "--json", workspace=tmp_path)
    assert report["fits"]
