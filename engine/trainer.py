"""The loop. It knows phases and accumulation windows; losses, roles, data and files live elsewhere.

Read `Trainer.run` first: what happens before, in and after a step stands there in order.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor

from . import checkpoints, events
from .data.batches import MicroBatch
from .data.cache import TensorCache
from .denoiser import PlainDenoiser
from .errors import CheckpointError, PictureError, Problem, TrainingError, WorkspaceError
from .events import EventLog
from .export import ExportResult, TrainedFacts, export_full, export_lora, probe
from .families.family import Conditioning, Extras, Parts
from .families.loading import load
from .loss_run import LossRun
from .methods.lora import LoraMethod, remove_adapters
from .methods.registry import build_method
from .objectives.denoise import Denoise
from .objectives.objective import Phase
from .optim import RoleOptimizer
from .plan import Plan, plan_run
from .precision import Precision, all_finite, checksum, use_threads
from .proof import Movement
from .roles import EMA, POLICY, Bundle, Weights
from .runs import Request, Requests, RunFolder, identify
from .sampling import Shot, sample
from .seeds import seed_of
from .settings import changed
from .settings.schema import Full, Settings
from .source import DatasetSource, text_dtype
from .versions import versions
from .workspace import Workspace, disk_errors, write_atomic

PAUSE_POLL_S = 0.2
PROGRESS_EVERY_S = 0.2
# Going on would do the very same again: a run keeps its learning rate and its number format.
NOT_FINITE_HINT = "start a new run with a lower optimizer.lr, or with train.precision = 'bf16' or 'fp32'"


def train(
    settings: Settings, run: RunFolder, log: EventLog, requests: Requests, *, workspace: Workspace, resume: bool
) -> None:
    """Train as the settings say, writing everything into the run folder and every happening into the log.

    Raises SafelightError subclasses for whatever the user can mend.
    """
    plan = plan_run(settings, progress=_progress(log, "scan"))
    use_threads(plan.base.located.cpu_threads, plan.base.device)
    point = _resume_point(run, plan) if resume else None
    me = identify(os.getpid())
    log.append(
        events.Started(
            pid=me.pid,
            process_created=me.created,
            host=me.host,
            device=str(plan.base.device),
            versions=versions(),
            total_steps=plan.total_steps,
            resumed_from=point.step if point else 0 if resume else None,
            plan=plan.summary(),
        )
    )
    for note in plan.manifest.notes:
        log.append(events.Warning("dataset", str(note)))
    for doubt in plan.doubts():
        log.append(events.Warning("sizes", doubt))
    for problem in (*plan.manifest.left_out, *plan.buckets.left_out):
        log.append(events.Warning("left-out", str(problem)))
    Trainer(plan, run, log, requests, workspace, point).run()


class Trainer:
    """One run in one process: everything that lives between two steps."""

    def __init__(
        self,
        plan: Plan,
        run: RunFolder,
        log: EventLog,
        requests: Requests,
        workspace: Workspace,
        point: checkpoints.Manifest | None,
    ) -> None:
        self.plan = plan
        self.settings = plan.settings
        self.run_folder = run
        self.log = log
        self.requests = requests
        self.step = point.step if point else 0
        self._saved = point.step if point else None  # the step of the newest checkpoint
        self.family = plan.base.family
        self.precision = Precision(plan.base.precision, plan.base.device)
        self.accelerator = Accelerator(cpu=plan.base.device.type == "cpu", mixed_precision="no")
        if self.accelerator.num_processes > 1:
            raise TrainingError("training on several processes is not supported yet", "start it as a single process")
        self.method = build_method(self.settings.method, self.family)
        self.objective = Denoise(self.settings.objective)
        self.source = DatasetSource(plan, TensorCache(workspace.cache))
        if point is not None and point.data != self.source.identity():
            raise CheckpointError(
                "pictures or captions have changed since the checkpoint was written, so the run cannot go on exactly",
                "put them back as they were, or start a new run",
            )
        missing = self.objective.needs - self.source.gives
        if missing:
            raise TrainingError(f"the data set does not give what the objective needs: {', '.join(sorted(missing))}")
        self.parts = self._encode()
        self.bundle = self._attach()
        self.base_checksum = checksum(self.bundle, skip=self.weights.trainable_names)
        self.movement = Movement(self.weights.parameters(POLICY))  # since the start of the run, also in a resumed one
        if point is not None:
            self._restore(point)
        self.base_identity = plan.base.located.identity([self.family.spec.denoiser])

    # --- before the first step --------------------------------------------------------------------------------------

    def _encode(self) -> Parts:
        """Fill the cache; keep the VAE, the scheduler and, when they train, the text encoders."""
        located, device = self.plan.base.located, self.plan.base.device
        parts = load(
            self.family, located, [*self.family.media_components(), "scheduler"], dtype=torch.float32, device=device
        )
        encoded = self.source.encode_images(parts, _progress(self.log, "encode images"))
        for name in self.family.media_components():
            parts[name].to("cpu")
        text = load(self.family, located, self.family.text_components(), dtype=text_dtype(self.plan), device=device)
        self._warn_about_long_captions(text)
        prompts = (*self.plan.prompts, self.settings.samples.negative_prompt)
        captioned = self.source.encode_texts(text, prompts, _progress(self.log, "encode captions"))
        self.log.append(events.Progress("encoded", encoded + captioned, encoded + captioned))
        if self.method.text_members():
            parts.components.update(text.components)
        del text
        _release_memory()
        return parts

    def _warn_about_long_captions(self, text: Parts) -> None:
        counts = {caption: self.family.count_tokens(text, caption) for caption in dict.fromkeys(self.source.captions)}
        long = [caption for caption, (has, reads) in counts.items() if has > reads]
        if long:
            has, reads = counts[long[0]]
            self.log.append(
                events.Warning(
                    "captions",
                    f"{len(long)} captions are longer than the base reads; they are cut off after {reads} tokens, for "
                    f"instance of '{long[0][:60]}…' with {has}",
                )
            )

    def _attach(self) -> Bundle:
        """Load the denoiser, make the method's weights trainable, and build what trains them."""
        base = self.plan.base
        name = self.family.spec.denoiser
        dtype = torch.float32 if isinstance(self.settings.method, Full) else base.dtype
        self.parts.components.update(
            load(self.family, base.located, [name], dtype=dtype, device=base.device).components
        )
        bundle = Bundle(self.family, self.parts, self.method.text_members())
        torch.manual_seed(seed_of(self.settings.train.seed, "weights"))  # whatever was drawn while loading
        self.method.attach(bundle)
        bundle.to(base.device).train()
        if self.settings.train.gradient_checkpointing:
            bundle.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        self.weights = Weights(bundle, self.method.roles(self.settings.train.ema_decay))
        self.root = self.accelerator.prepare(bundle)
        self.root_parameters = list(self.root.parameters())  # finding them anew took 3 ms a step, 4 % of a small one
        self.optimizers = {
            role.name: RoleOptimizer(
                self.settings.optimizer,
                self.settings.schedule,
                self.weights.parameters(role.name),
                self.plan.total_steps,
            )
            for role in self.weights.roles.values()
            if role.kind == "trainable"
        }
        extras = Extras(guidance=self.settings.objective.guidance)
        denoiser = PlainDenoiser(self.root, self.family, base.parameterisation, self.precision, extras)
        self.loss_run = LossRun(denoiser, self.weights, self.family, base.law)
        return bundle

    def _restore(self, manifest: checkpoints.Manifest) -> None:
        folder = checkpoints.step_folder(self.run_folder.checkpoints, manifest.step)
        for role in self.weights.roles.values():
            if role.kind == "trainable":
                self._copy_in(folder, manifest.entry(role.name, "weights"), self.weights.parameters(role.name))
                state = checkpoints.read_tensors(checkpoints.entry_file(folder, manifest.entry(role.name, "optimizer")))
                self.optimizers[role.name].load_state(state, manifest.optimizer[role.name])
            elif role.kind == "lagging":
                self._copy_in(folder, manifest.entry(role.name, "lagging"), self.weights.lagging(role.name))
        self.precision.load_state(dict(manifest.scaler))

    def _copy_in(self, folder: Path, entry: checkpoints.Entry, own: Mapping[str, Tensor]) -> None:
        """Saved tensors into live ones, in place: the optimizer and the prepared root hold these very tensors."""
        saved = checkpoints.read_tensors(checkpoints.entry_file(folder, entry))
        odd = sorted(saved.keys() ^ own.keys()) or [name for name in own if saved[name].shape != own[name].shape]
        if odd:
            raise CheckpointError(
                f"{folder}: role '{entry.role}' holds other weights than this run's, such as {odd[0]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From the baseline sample to the verified file."""
        if self.step == 0 or (self._sample_is_due() and not self._was_sampled()):
            self._sample()
        while self.step < self.plan.total_steps:
            wish = self._serve_requests()
            if wish is not None:
                if wish == "stop":
                    self._save()
                self.log.append(events.Finished(self.step, "stopped", self._proof()))
                return
            self._train_step(self.step)
            self.step += 1
            last = self.step == self.plan.total_steps
            if last or self.step % self.settings.checkpoints.every == 0:
                self._save()
            if self._sample_is_due():
                self._sample()
        self._finish()

    def _train_step(self, step: int) -> None:
        """One window of micro-batches for each phase of the objective, then one optimizer step of the phase's role."""
        started = time.perf_counter()
        window = self.source.window(step)
        learning_rates: dict[str, float | None] = {}
        norms: dict[str, float | None] = {}
        value = 0.0
        for phase in self.objective.phases:
            for repeat in range(phase.repeats):
                with self.weights.training(phase.role):
                    value, seen = self._accumulate(phase, repeat, step, window)
                    self._require_finite(value, seen)
                    learning_rates[phase.role], norms[phase.role] = self._update(phase.role, step, seen)
        self.weights.advance(step + 1)
        self.log.append(
            events.Loss(
                step=step + 1,
                epoch=self.plan.sampler.position(step)[0],
                loss=value,
                lr=learning_rates,
                grad_norm=norms,
                seconds=time.perf_counter() - started,
                scale=self.precision.scale,
            )
        )

    def _accumulate(
        self, phase: Phase, repeat: int, step: int, window: Sequence[MicroBatch]
    ) -> tuple[float, list[tuple[str, Tensor]]]:
        """Backward over the window; every sample weighs the same, however the batches are cut.

        Returns the window's loss and (file, loss) of its samples for messages.
        """
        total = sum(sum(micro.weights) for micro in window)
        seen: list[tuple[str, Tensor]] = []
        value: Tensor | None = None
        for index, micro in enumerate(window):
            self.loss_run.reseed(self.settings.train.seed, step, phase.role, repeat, index)
            batch = self.source.load(micro, self.loss_run.generator, live_text=bool(self.method.text_members()))
            per_sample, _ = self.objective.loss(phase, batch, self.loss_run)
            loss = (per_sample * torch.tensor(micro.weights, device=per_sample.device)).sum() / total
            self.precision.backward(loss)
            value = loss.detach() if value is None else value + loss.detach()
            seen += zip(batch.files, per_sample.detach(), strict=True)
        assert value is not None
        return float(value), seen

    def _require_finite(self, value: float, seen: list[tuple[str, Tensor]]) -> None:
        """Stop before a NaN reaches the weights. The last good checkpoint stays."""
        if value == value and abs(value) != float("inf"):
            return
        bad = [name for name, loss in seen if not bool(torch.isfinite(loss))]
        raise TrainingError(
            f"the loss of step {self.step + 1} is not finite; training stopped before the weights were touched",
            NOT_FINITE_HINT,
            problems=[Problem(name, "its loss is not finite") for name in bad or [name for name, _ in seen]],
        )

    def _update(self, role: str, step: int, seen: list[tuple[str, Tensor]]) -> tuple[float, float]:
        """Clip through the prepared root and step; returns the learning rate and the gradient norm before clipping."""
        optimizer = self.optimizers[role]
        optimizer.set_step(step)
        self.precision.unscale(optimizer.optimizer)
        clipped = self.accelerator.clip_grad_norm_(self.root_parameters, self.settings.train.max_grad_norm)
        norm = float(clipped)
        if self.precision.scale is None and not abs(norm) < float("inf"):
            raise TrainingError(
                f"the gradient of step {step + 1} is not finite; training stopped before the weights were touched",
                NOT_FINITE_HINT,
                problems=[Problem(name, "was in the batch") for name, _ in seen],
            )
        self.precision.step(optimizer.optimizer)
        optimizer.zero_grad()
        return optimizer.effective_lr, norm

    def _serve_requests(self) -> Request | None:
        """Do what was asked; returns "stop" or "abort" when the run should end."""
        paused = False
        while True:
            for wish in self.requests.take():
                if wish in ("stop", "abort"):
                    return wish
                if wish == "save":
                    self._save()
                elif wish == "sample":
                    self._sample()
                elif wish == "pause" and not paused:
                    paused = True
                    self._save()
                    self.log.append(events.Paused())
                elif wish == "resume" and paused:
                    paused = False
                    self.log.append(events.Resumed())
            if not paused:
                return None
            time.sleep(PAUSE_POLL_S)

    # --- what a user gets -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """The weights that are shown and exported: the average where there is one, else the live ones."""
        role = EMA if EMA in self.weights.roles else POLICY
        training = self.bundle.training
        self.bundle.eval()
        try:
            with self.optimizers[POLICY].evaluation(), self.weights.using(role):
                yield
        finally:
            self.bundle.train(training)

    def _conditioning(self, prompt: str) -> Conditioning:
        """From the cache, or computed now when the text encoders train."""
        if not self.method.text_members():
            return self.source.conditioning(prompt)
        return self.family.encode_text(self.parts, [prompt])[0]

    def _sample_is_due(self) -> bool:
        every = self.settings.samples.every
        return every > 0 and (self.step == self.plan.total_steps or self.step % every == 0)

    def _was_sampled(self) -> bool:
        """Whether this step's pictures are there: a process may have died between its checkpoint and them."""
        drawn = events.fold(events.read(self.run_folder.events)[0]).samples
        return {item.index for item in drawn if item.step == self.step} >= set(range(len(self.plan.prompts)))

    def _sample(self) -> None:
        """A picture for each prompt, always from the same seeds."""
        if not self.settings.samples.every:
            return
        shot = Shot(self.plan.preview_size, self.plan.preview_steps, self.plan.preview_guidance)
        report = _progress(self.log, "sample")
        with disk_errors(self.run_folder.samples):
            self.run_folder.samples.mkdir(exist_ok=True)
        for index, prompt in enumerate(self.plan.prompts):
            seed = self.settings.samples.seed + index
            try:
                with self.evaluation():
                    negative = self._conditioning(self.settings.samples.negative_prompt)
                    positive = [self._conditioning(prompt)]
                    pictures = sample(self.family, self.parts, positive, negative, [seed], shot, self.precision)
            except PictureError as error:  # a picture tells of training, it is not training
                self.log.append(events.Warning("sample", f"no picture of '{prompt[:60]}': {error.message}"))
                continue
            path = self.run_folder.samples / f"step-{self.step:06d}-{index:02d}.png"
            data = io.BytesIO()
            pictures[0].save(data, "PNG")
            write_atomic(path, data.getvalue())
            relative = path.relative_to(self.run_folder.path).as_posix()
            self.log.append(events.Sample(step=self.step, index=index, prompt=prompt, seed=seed, path=relative))
            report(index + 1, len(self.plan.prompts))

    def _save(self) -> None:
        """Write a checkpoint; it appears whole or not at all. A step that has one keeps it: there is nothing new."""
        root = self.run_folder.checkpoints
        if self._saved != self.step:
            try:
                with disk_errors(root), checkpoints.tidy(root):
                    self._write_checkpoint(root)
                    self._saved = self.step
                    checkpoints.prune(root, self.settings.checkpoints.keep)
            except SafetensorError as error:  # how safetensors reports a full disk
                raise WorkspaceError(
                    f"cannot write a checkpoint to {root}: {error}", "free some space on the disk"
                ) from error
        relative = checkpoints.step_folder(root, self.step).relative_to(self.run_folder.path).as_posix()
        self.log.append(events.Checkpoint(step=self.step, path=relative))

    def _write_checkpoint(self, root: Path) -> None:
        if not all_finite(p for name in self.optimizers for p in self.weights.parameters(name).values()):
            raise TrainingError(
                f"the trained weights are not finite after step {self.step}; they were not saved",
                NOT_FINITE_HINT,
            )
        writer = checkpoints.Writer(root, self.step)
        plain: dict[str, Mapping[str, Any]] = {}
        component = self.family.spec.denoiser
        for role in self.weights.roles.values():
            if role.kind == "trainable":
                writer.add_tensors(role.name, "weights", self.weights.parameters(role.name), component=component)
                tensors, plain[role.name] = self.optimizers[role.name].state()
                writer.add_tensors(role.name, "optimizer", tensors, component=component)
            elif role.kind == "lagging":
                writer.add_tensors(role.name, "lagging", self.weights.lagging(role.name), component=component)
        writer.commit(
            checkpoints.Manifest(
                step=self.step,
                epoch=self.plan.sampler.position(max(0, self.step - 1))[0],  # as in the events: of the last step
                seed=self.settings.train.seed,
                base=self.base_identity,
                data=self.source.identity(),
                settings=self.settings.model_dump(mode="json"),
                entries=tuple(writer.entries),
                optimizer=plain,
                scaler=self.precision.state(),
            )
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def _proof(self) -> dict[str, object]:
        """Evidence that the policy moved, that the base did not, and that every loss in the run's log was finite."""
        after = checksum(self.bundle, skip=self.weights.trainable_names)
        losses = events.fold(events.read(self.run_folder.events)[0]).losses  # one that was not finite reads as None
        return {
            "weights": self.movement.report(),
            "base_unchanged": after == self.base_checksum,
            "loss_finite": all(item.loss is not None for item in losses),
        }

    def _finish(self) -> None:
        proof = self._proof()
        if not proof["base_unchanged"]:
            raise TrainingError(
                "the base's frozen weights changed during training", "report this as a fault of the program"
            )
        if not self.movement.happened():
            raise TrainingError("no trained weight has moved", "is optimizer.lr far too small, or the run too short?")
        self.log.append(events.Progress("export", 0, 1))
        exported = []
        for result in self._export():
            path = result.path.relative_to(self.run_folder.path).as_posix()
            self.log.append(events.Export(path=path, format=result.format, verified=result.verification))
            exported.append({"path": path, "format": result.format, **result.verification})
        self.log.append(events.Finished(self.step, "finished", {**proof, "exports": exported}))

    def _export(self) -> Iterator[ExportResult]:
        """Files of the final weights, each loaded back and compared. Takes the adapters off the base: call it last."""
        base, folder = self.plan.base, self.run_folder.exports
        epochs, _ = self.plan.sampler.position(max(0, self.step - 1))
        facts = TrainedFacts(self._named_settings(), self.step, epochs + 1, len(self.plan.manifest.items))
        text = self.source.conditioning(self.plan.prompts[0])
        self.bundle.eval()
        predict = probe(base, self.parts, text)
        if not isinstance(self.method, LoraMethod):
            with self.evaluation():
                yield export_full(
                    self.bundle.denoiser, folder, facts=facts, base=base, live_prediction=predict(), text=text
                )
            return
        with self.evaluation():
            weights, live = self.method.collect(self.bundle), predict()
        for member in self.bundle.members.values():
            remove_adapters(member)
        for format in self.plan.formats:
            yield export_lora(
                weights,
                folder,
                format=format,
                facts=facts,
                base=base,
                parts=self.parts,
                predict=predict,
                live_prediction=live,
            )

    def _named_settings(self) -> Settings:
        return self.settings.model_copy(update={"name": self.settings.name or self.run_folder.name})


def _resume_point(run: RunFolder, plan: Plan) -> checkpoints.Manifest | None:
    """The newest checkpoint, checked against what would be trained; None when the run died before its first one."""
    folder = checkpoints.newest(run.checkpoints)
    if folder is None:
        return None
    manifest = checkpoints.read_manifest(folder)
    problems = changed(manifest.settings, plan.settings.model_dump(mode="json"))
    if problems:
        raise CheckpointError(f"{folder} was trained with other settings", problems=problems)
    if manifest.base != plan.base.located.identity([plan.base.family.spec.denoiser]):
        raise CheckpointError(f"the base {plan.settings.base.source} has changed since {folder.name} was written")
    if manifest.step > plan.total_steps:
        raise CheckpointError(f"{folder.name} is beyond the {plan.total_steps} steps of this run", "raise train.steps")
    return manifest


def _progress(log: EventLog, phase: str) -> Callable[[int, int], None]:
    """A callback that writes progress events, a few a second at most."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last > PROGRESS_EVERY_S:
            last = now
            log.append(events.Progress(phase, done, total))

    return report


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
