"""Developer commands that make the embedded base; users never need them, since the weights ship with the package.

    python -m engine.embedded.bake codec --out DIR      image codec
    python -m engine.embedded.bake text --out DIR       tokenizers and text encoders
    python -m engine.embedded.bake parts --out DIR      both
    python -m engine.embedded.bake metric               the metric's shape classifier, saved in this package
    python -m engine.embedded.bake init --parts DIR --out DIR   complete folders with untrained denoisers
    python -m engine.embedded.bake data --out DIR       the pictures the denoisers learn from
    python -m engine.embedded.bake curve --run RUN      accuracy of a training run's checkpoints
    python -m engine.embedded.bake finish --run RUN --out DIR   a finished run's export in half precision

Between `data` and `finish` the denoisers are trained by the engine's ordinary full-weight method:
`safelight train engine/embedded/recipes/unet.toml`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def _log(line: str) -> None:
    print(line, flush=True)


def bake_codec(out: Path, *, steps: int) -> None:
    from engine.embedded.codec import psnr, train_codec

    codec = train_codec(steps=steps, seed=1, log=_log, save=lambda model: model.save_pretrained(out / "vae"))
    codec.save_pretrained(out / "vae")
    _log(f"codec saved, {psnr(codec):.2f} dB")


def bake_text(out: Path, *, steps: int) -> None:
    from engine.embedded.text import save_text, train_text

    save_text(train_text(steps=steps, seed=2, log=_log), out)
    _log("text encoders saved")


def finish_base(run: Path, out: Path) -> None:
    """The pipeline that a finished run exported, with all weights as fp16 safetensors, as it ships."""
    from diffusers import DiffusionPipeline

    from engine.embedded.denoisers import adopt_notes

    exported = next(path.parent for path in (run / "exports").glob("*/model_index.json"))
    pipeline = DiffusionPipeline.from_pretrained(exported, torch_dtype=torch.float16)
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(torch.float16)  # also what transformers keeps in float32, such as parts of T5
    pipeline.save_pretrained(out)
    adopt_notes(exported, out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.embedded.bake", description=__doc__)
    parser.add_argument("command", choices=("codec", "text", "parts", "metric", "init", "data", "curve", "finish"))
    parser.add_argument("--out", type=Path, help="where to write; needed by all but 'metric'")
    parser.add_argument("--parts", type=Path, help="folder written by 'parts'; needed by 'init'")
    parser.add_argument("--run", type=Path, help="folder of a training run; needed by 'curve' and 'finish'")
    parser.add_argument("--codec-steps", type=int, default=1500)
    parser.add_argument("--text-steps", type=int, default=900)
    parser.add_argument("--count", type=int, default=24_000, help="pictures written by 'data'")
    options = parser.parse_args(arguments)
    if options.command not in ("metric", "curve") and options.out is None:
        parser.error(f"{options.command} needs --out")
    if options.command in ("curve", "finish") and options.run is None:
        parser.error(f"{options.command} needs --run")
    torch.set_num_threads(1)  # two threads on a shared machine were slower than one
    if options.command in ("codec", "parts"):
        bake_codec(options.out, steps=options.codec_steps)
    if options.command in ("text", "parts"):
        bake_text(options.out, steps=options.text_steps)
    if options.command == "metric":
        from engine.embedded.measure import train_classifier

        train_classifier(steps=600, seed=5, log=_log)
    if options.command == "init":
        from engine.embedded.denoisers import write_initial_bases

        if options.parts is None:
            parser.error("init needs --parts, the folder written by 'parts'")
        write_initial_bases(options.parts, options.out)
    if options.command == "data":
        from engine.embedded.scenes import write_dataset

        write_dataset(options.out, options.count, seed=11)
    if options.command == "curve":
        from engine.embedded.measure import measure_checkpoints

        for step, results in measure_checkpoints(options.run, count=64):
            _log(f"{step}: {results}")
    if options.command == "finish":
        finish_base(options.run, options.out)


if __name__ == "__main__":
    main()
