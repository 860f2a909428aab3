"""What the trainer costs over the shortest loop that does the same work.

    python benchmarks/trainer_overhead.py [--base embedded/unet] [--batch-size 4] [--steps 8] [--blocks 6]

One process holds one base with one LoRA. Two loops train it by turns, in blocks (ours, bare, ours, bare, …), so that
whatever else the machine does falls on both:

- ours: `Trainer._serve_requests` and `Trainer._train_step`, as `Trainer.run` calls them: reads each sample from the
  cache, draws, predicts, checks, clips, steps, writes one event;
- bare: about fifteen lines of PyTorch over the same batches, which it finds in memory.

Both use AdamW with the same figures, the same gradient clipping and one thread. Prints one JSON object: the middle step
of each in ms, by the clock (`wall_ms`) and by the processor time of this process (`cpu_ms`), and ours / bare. Processor
time hardly moves when other programs run; `ratio` is made from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine import runs, settings
from engine.embedded.scenes import demo_dataset
from engine.events import EventLog
from engine.noise import Diffusion
from engine.plan import plan_run
from engine.roles import POLICY
from engine.trainer import Trainer
from engine.workspace import Workspace

PICTURES = 16
Batches = list[tuple[Tensor, Mapping[str, Tensor]]]


def measure(base: str = "embedded/unet", *, batch_size: int = 4, steps: int = 8, blocks: int = 6) -> dict[str, Any]:
    """Time both loops; `steps` in a block, `blocks` of each. Only for bases that predict noise."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, _trainer(Path(folder), base, batch_size, steps * blocks) as trainer:
        bare_step = bare_loop(trainer)
        bare_step(0)  # first calls choose kernels
        ours_step(trainer, 0)
        ours: list[tuple[float, float]] = []
        bare: list[tuple[float, float]] = []
        for block in range(blocks):
            for step in range(block * steps, (block + 1) * steps):
                ours.append(_timed(lambda step: ours_step(trainer, step), step))
            for step in range(block * steps, (block + 1) * steps):
                bare.append(_timed(bare_step, step))
        wall = {"ours": _middle_ms(ours, 0), "bare": _middle_ms(bare, 0)}
        cpu = {"ours": _middle_ms(ours, 1), "bare": _middle_ms(bare, 1)}
        return {
            "base": Path(base).name if Path(base).exists() else base,
            "batch_size": batch_size,
            "trained_weights": sum(p.numel() for p in trainer.weights.parameters(POLICY).values()),
            "steps": steps * blocks,
            "threads": torch.get_num_threads(),
            "wall_ms": wall,
            "cpu_ms": cpu,
            "wall_ratio": round(wall["ours"] / wall["bare"], 3),
            "ratio": round(cpu["ours"] / cpu["bare"], 3),
        }


@contextmanager
def _trainer(folder: Path, base: str, batch_size: int, steps: int) -> Iterator[Trainer]:
    """Our trainer, ready for its first step, with everything in the cache."""
    demo_dataset(folder / "pictures", seed=1, count=PICTURES)
    chosen = settings.parse(
        {
            "base": {"source": base},
            "dataset": {"folder": str(folder / "pictures")},
            "captions": {"dropout": 0.0},
            "method": {"type": "lora", "rank": 8},
            "train": {"steps": steps + 1, "batch_size": batch_size, "precision": "fp32", "device": "cpu"},
            "samples": {"every": 0},
        }
    )
    workspace = Workspace(folder / "workspace")
    run = runs.create(workspace, chosen)
    with EventLog(run.events) as log:
        yield Trainer(plan_run(chosen), run, log, runs.Requests(run.requests, log), workspace, None)


def ours_step(trainer: Trainer, step: int) -> None:
    trainer._serve_requests()
    trainer._train_step(step)


def bare_loop(trainer: Trainer) -> Callable[[int], float]:
    """The step that someone would write by hand for this model and these batches."""
    parameterisation = trainer.plan.base.parameterisation
    if not isinstance(parameterisation, Diffusion):
        raise SystemExit("the bare loop is written for bases that predict noise, such as embedded/unet")
    alphas = parameterisation.alphas_cumprod
    unet = trainer.bundle.denoiser
    weights = list(trainer.weights.parameters(POLICY).values())
    chosen = trainer.settings.optimizer
    assert chosen.type == "adamw"
    optimizer = torch.optim.AdamW(
        weights, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps, weight_decay=chosen.weight_decay
    )
    batches = _in_memory(trainer)

    def step(index: int) -> float:
        latents, text = batches[index % len(batches)]
        timesteps = torch.randint(0, len(alphas), (len(latents),))
        noise = torch.randn_like(latents)
        alpha = alphas[timesteps].view(-1, 1, 1, 1)
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        prediction = unet(noisy, timesteps, encoder_hidden_states=text["hidden"], return_dict=False)[0]
        loss = functional.mse_loss(prediction, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, trainer.settings.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _in_memory(trainer: Trainer) -> Batches:
    """The batches of one epoch, as the trainer sees them."""
    generator = torch.Generator().manual_seed(0)
    found: Batches = []
    for step in range(trainer.plan.sampler.steps_per_epoch):
        for micro in trainer.source.window(step):
            batch = trainer.source.load(micro, generator, live_text=False)
            assert isinstance(batch.text, Mapping)
            found.append((batch.clean.latent, batch.text))
    return found


def _timed(step: Callable[[int], object], index: int) -> tuple[float, float]:
    """Seconds by the clock and by the processor."""
    clock, processor = time.perf_counter(), time.process_time()
    step(index)
    return time.perf_counter() - clock, time.process_time() - processor


def _middle_ms(times: list[tuple[float, float]], which: int) -> float:
    return round(statistics.median(time[which] for time in times) * 1000, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="embedded/unet", help="an embedded base, or a folder in diffusers format")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of each loop")
    given = parser.parse_args()
    result = measure(given.base, batch_size=given.batch_size, steps=given.steps, blocks=given.blocks)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
