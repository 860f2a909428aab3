"""Where batches come from: a data set, encoded once, kept in the content-addressed cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .data import captions
from .data.batches import MicroBatch, Sample
from .data.cache import TensorCache, fill, fingerprint
from .data.manifest import load_image
from .data.masks import load_mask
from .data.pixels import crop_and_resize, pixel_facts, to_tensor
from .families.family import Conditioning, Parts
from .objectives.objective import Batch
from .plan import Plan
from .seeds import seed_of
from .state import LatentState

ReportProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class EncodeJob:
    """One cache entry of pictures: a sample of the plan."""

    sample: Sample
    bucket: tuple[int, int]


class DatasetSource:
    """Latents and conditioning of the plan's samples.

    `encode_images` and `encode_texts` fill the cache; afterwards the encoders are not needed any more.
    """

    gives: frozenset[str] = frozenset({"clean", "text", "mask", "files"})

    def __init__(self, plan: Plan, cache: TensorCache) -> None:
        self.plan = plan
        self.cache = cache
        settings = plan.settings
        self.captions = [captions.expand(item.caption, settings.captions.trigger) for item in plan.manifest.items]
        self._placements = plan.buckets.placements
        family, located = plan.base.family, plan.base.located
        self._latent_facts = {
            "kind": "latents",
            "family": family.spec.id,
            "space": family.spec.latent_space_version,
            "sampling": family.spec.latent_sampling,
            "encoder": located.identity(family.media_components()),
            "dtype": "float32",
            "masks": settings.dataset.masks,
        }
        self._text_facts = {
            "kind": "text",
            "family": family.spec.id,
            "space": family.spec.text_space_version,
            "encoder": located.identity(family.text_components()),
            "dtype": str(text_dtype(plan)),
        }
        self._keys = {
            Sample(index, flipped): self._latent_key(Sample(index, flipped))
            for index in range(len(self._placements))
            for flipped in ((False, True) if settings.dataset.flip else (False,))
        }
        self._text_keys = [self.text_key(text) for text in self.captions]

    def identity(self) -> str:
        """Changes with any picture, crop, mask, caption or encoder: what the batches of a seed depend on."""
        return fingerprint(pictures=list(self._keys.values()), captions=self._text_keys)

    # --- filling the cache -------------------------------------------------------------------------------------------

    def encode_images(self, parts: Parts, progress: ReportProgress) -> int:
        """Encode what the cache lacks; returns how many pictures that were."""
        jobs = {key: EncodeJob(sample, self._placements[sample.placement].bucket) for sample, key in self._keys.items()}
        return fill(
            self.cache,
            jobs,
            lambda batch: self._encode(parts, batch),
            batch_size=self.plan.settings.train.encode_batch_size,
            group=lambda job: job.bucket,
            name=lambda job: self.plan.manifest.items[self._placements[job.sample.placement].item].name,
            progress=progress,
        )

    def encode_texts(self, parts: Parts, extra: Sequence[str], progress: ReportProgress) -> int:
        """Encode captions, the empty caption and the extra prompts; returns how many were missing."""
        texts = dict.fromkeys([*self.captions, "", *extra])
        jobs = {self.text_key(text): text for text in texts}
        return fill(
            self.cache,
            jobs,
            lambda batch: [dict(c) for c in self.plan.base.family.encode_text(parts, batch)],
            batch_size=32,
            progress=progress,
        )

    def text_key(self, text: str) -> str:
        return fingerprint(**self._text_facts, text=text)

    def conditioning(self, text: str) -> Conditioning:
        """The cached conditioning of a prompt."""
        return self.cache.read(self.text_key(text))

    def _latent_key(self, sample: Sample) -> str:
        placement = self._placements[sample.placement]
        item = self.plan.manifest.items[placement.item]
        facts = pixel_facts(item, placement, flipped=sample.flipped, background=self.plan.settings.dataset.background)
        return fingerprint(**self._latent_facts, **facts, mask=item.mask_hash)

    def _encode(self, parts: Parts, jobs: list[EncodeJob]) -> list[dict[str, torch.Tensor]]:
        family = self.plan.base.family
        pixels = torch.stack([self._pixels(job.sample) for job in jobs])
        # The draw belongs to the picture, so that encoding it again, alone or in company, gives the same latents.
        generators = [torch.Generator().manual_seed(seed_of("latents", self._keys[job.sample])) for job in jobs]
        latents = family.encode_media(parts, pixels, generators).cpu()
        entries = [{"latents": row} for row in latents]
        if self.plan.settings.dataset.masks != "none":
            size = (int(latents.shape[-2]), int(latents.shape[-1]))
            for entry, job in zip(entries, jobs, strict=True):
                entry["mask"] = self._mask(job.sample, size)
        return entries

    def _pixels(self, sample: Sample) -> torch.Tensor:
        placement = self._placements[sample.placement]
        image = load_image(self.plan.manifest.items[placement.item], self.plan.settings.dataset.background)
        tensor = to_tensor(crop_and_resize(image, placement))
        return tensor.flip(-1) if sample.flipped else tensor

    def _mask(self, sample: Sample, latent_size: tuple[int, int]) -> torch.Tensor:
        placement = self._placements[sample.placement]
        mask = load_mask(self.plan.manifest.items[placement.item], placement, self.plan.settings.dataset, latent_size)
        return mask.flip(-1) if sample.flipped else mask

    # --- batches -----------------------------------------------------------------------------------------------------

    def window(self, step: int) -> list[MicroBatch]:
        """The micro-batches of one optimizer step."""
        return self.plan.sampler.window(step)

    def load(self, micro: MicroBatch, generator: torch.Generator, *, live_text: bool) -> Batch:
        """Tensors of a micro-batch on the device. Caption dropout draws one number per sample from the generator."""
        device = self.plan.base.device
        entries = [self.cache.read(self._keys[sample]) for sample in micro.samples]
        items = [self._placements[sample.placement].item for sample in micro.samples]
        dropped = torch.rand(len(items), generator=generator) < self.plan.settings.captions.dropout
        if live_text:
            text: object = ["" if gone else self.captions[i] for i, gone in zip(items, dropped.tolist(), strict=True)]
        else:
            empty = self.text_key("")
            keys = [empty if gone else self._text_keys[i] for i, gone in zip(items, dropped.tolist(), strict=True)]
            text = self.plan.base.family.collate([self.cache.read(key) for key in keys], device)
        mask = None
        if "mask" in entries[0]:
            mask = LatentState.single(torch.stack([entry["mask"] for entry in entries]).to(device))
        return Batch(
            clean=LatentState.single(torch.stack([entry["latents"] for entry in entries]).to(device)),
            text=text,  # type: ignore[arg-type]
            mask=mask,
            files=tuple(self.plan.manifest.items[i].name for i in items),
        )


def text_dtype(plan: Plan) -> torch.dtype:
    """Text encoders are never run in fp16, in which T5 overflows."""
    return torch.bfloat16 if plan.base.dtype == torch.float16 else plan.base.dtype
