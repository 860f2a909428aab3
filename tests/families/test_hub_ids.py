"""Bases that are named by a hub id, with the real client against a hub on this machine, and without any hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.families.hub_server import files_of, serve
from tests.families.test_single_files import configuration_of, original_names

ROOT = Path(__file__).resolve().parents[2]
ALL = ["unet", "vae", "text_encoder", "tokenizer", "scheduler"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"
SECONDS = 20  # of an answer that is a refusal; the hub's own client goes on for minutes

Ask = Callable[[dict[str, dict[str, Any]]], dict[str, Any]]


@contextmanager
def asking(home: Path, log: Path, **environment: str) -> Iterator[Ask]:
    """A process that opens bases: questions by name -> answers by name."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    own = {"HF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "tests.families.hub_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=home,
            env={**inherited, **own, **environment},
        ) as process,
    ):
        assert process.stdin and process.stdout
        to, back = process.stdin, process.stdout

        def ask(questions: dict[str, dict[str, Any]]) -> dict[str, Any]:
            answers = {}
            for name, asked in questions.items():
                to.write(json.dumps(asked) + "\n")
                to.flush()
                line = back.readline()
                assert line, log.read_text()
                answers[name] = json.loads(line)
            return answers

        yield ask
        to.close()


def question(source: str, load: list[str] | None = None, **settings: str) -> dict[str, Any]:
    return {"base": {"source": source, **settings}, "load": load or []}


def shifted(folder: Path, target: Path, by: float) -> Path:
    """The same base with another UNet."""
    shutil.copytree(folder, target)
    path = target / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({key: value + by for key, value in load_file(path).items()}, path, metadata={"format": "pt"})
    return target


def only_variant(folder: Path, target: Path) -> Path:
    """The same base, whose weights are there as the variant fp16 only."""
    shutil.copytree(folder, target)
    for path in list(target.rglob("*.safetensors")):
        path.rename(path.with_name(path.name.replace(".safetensors", ".fp16.safetensors")))
    return target


def unet_sum(folder: Path) -> float:
    return sum(float(t.double().sum()) for t in load_file(next((folder / "unet").glob("*.safetensors"))).values())


# --- with a hub -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def online(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that is asked of the hub, and what the hub was asked, in one process."""
    root = tmp_path_factory.mktemp("online")
    home = root / "home"
    home.mkdir()
    first, second = base("sd15"), shifted(base("sd15"), root / "second", 0.5)
    halves = only_variant(second, root / "halves")
    single = root / "alone.safetensors"
    save_file({k: v.contiguous() for k, v in original_names(first).items()}, single)
    with ExitStack() as running:
        hub = running.enter_context(serve())
        commits = {"main": hub.add("someone/tiny", first), "v2": hub.add("someone/tiny", second, revision="v2")}
        hub.add("someone/halves", halves)
        hub.add("someone/gated", first, trouble="gated")
        hub.add("someone/down", first, trouble="down")
        hub.add("someone/silent", first, trouble="silent")
        xl = {**files_of(first), "model_index.json": b'{"_class_name": "StableDiffusionXLPipeline"}'}
        hub.add("someone/xl", xl)
        hub.add("someone/weights-only", {"README.md": b"", "model.safetensors": b""})
        pickles = {k.replace(".safetensors", ".bin"): v for k, v in files_of(first).items()}
        hub.add("someone/pickles", pickles)
        hub.add("stable-diffusion-v1-5/stable-diffusion-v1-5", configuration_of(first, root / "usual"))
        questions = {
            "main": question("someone/tiny", ALL),
            "tag": question("someone/tiny", ALL, revision="v2"),
            "commit": question("someone/tiny", ["unet"], revision=commits["v2"]),
            "variant": question("someone/halves", ALL, variant="fp16"),
            "single": question(str(single), ALL),
            "missing": question("someone/missing"),
            "gated": question("someone/gated"),
            "xl": question("someone/xl"),
            "weights-only": question("someone/weights-only"),
            "pickles": question("someone/pickles"),
            "no revision": question("someone/tiny", revision="v3"),
            "no variant": question("someone/tiny", variant="fp16"),
            "down": question("someone/down"),
            "silent": question("someone/silent"),
        }
        with asking(home, root / "log.txt", HF_ENDPOINT=hub.address) as ask:
            answers = ask(questions)
            asked = list(hub.asked)
            running.close()  # nothing listens at the hub's address any more
            answers |= ask(
                {
                    "again": question("someone/tiny", ALL),
                    "again tag": question("someone/tiny", ALL, revision="v2"),
                    "never had": question("someone/else"),
                }
            )
    return {**answers, "asked": asked, "commits": commits, "sums": (unet_sum(first), unet_sum(second))}


def test_a_hub_id_is_downloaded_and_loaded_and_its_commit_is_known(online: dict[str, Any]) -> None:
    answer = online["main"]
    assert answer["family"] == "sd15"
    assert answer["commit"] == online["commits"]["main"]
    assert Path(answer["path"]).parts[-3:] == ("models--someone--tiny", "snapshots", answer["commit"])
    assert answer["sums"]["unet"] == pytest.approx(online["sums"][0])


def test_a_revision_is_a_tag_or_a_commit(online: dict[str, Any]) -> None:
    for name in ("tag", "commit"):
        assert online[name]["commit"] == online["commits"]["v2"]
        assert online[name]["sums"]["unet"] == pytest.approx(online["sums"][1])
    assert online["tag"]["identity"] != online["main"]["identity"]


def test_a_variant_is_downloaded_by_its_name(online: dict[str, Any]) -> None:
    assert online["variant"]["sums"]["unet"] == pytest.approx(online["sums"][1])
    weights = [path for path in online["asked"] if "someone/halves" in path and path.endswith(".safetensors")]
    assert weights and all(".fp16." in path for path in weights)


def test_a_single_file_without_configuration_takes_the_usual_one_and_says_so(online: dict[str, Any]) -> None:
    answer = online["single"]
    assert answer["sums"]["unet"] == pytest.approx(online["sums"][0])
    (note,) = answer["notes"]
    assert "taken to be like stable-diffusion-v1-5/stable-diffusion-v1-5, which predicts epsilon" in note
    assert str(Path(answer["path"]).with_suffix("")) in note


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("missing", "there is no model someone/missing on the hub, or it is private", "check the spelling"),
        ("gated", "someone/gated is gated", "hf auth login"),
        ("xl", "StableDiffusionXLPipeline, which cannot be trained here yet", "StableDiffusionPipeline"),
        ("weights-only", "it has no model_index.json", "look for a model that has that file"),
        ("pickles", "cannot be had from the hub", "only safetensors weights are taken"),
        ("no revision", "has no such revision", "a branch, a tag or a commit"),
        ("no variant", "cannot be had from the hub", "check base.variant"),
        ("down", "the hub gives no answer: Server error '500", "check the network"),
        ("silent", "the hub gives no answer", "check the network"),
        ("never had", "the hub gives no answer", "check the network"),
    ],
)
def test_what_cannot_be_had_is_said_soon_and_with_a_remedy(
    name: str, message: str, hint: str, online: dict[str, Any]
) -> None:
    answer = online[name]
    assert message in answer["error"]
    assert hint in answer["hint"]
    assert answer["seconds"] < SECONDS


def test_no_weights_are_downloaded_of_a_model_that_cannot_be_trained(online: dict[str, Any]) -> None:
    assert not [path for path in online["asked"] if "someone/xl" in path and path.endswith(".safetensors")]


def test_pickles_are_never_downloaded(online: dict[str, Any]) -> None:
    assert not [path for path in online["asked"] if path.endswith(".bin")]


def test_what_was_downloaded_once_opens_without_the_hub(online: dict[str, Any]) -> None:
    for now, before in (("again", "main"), ("again tag", "tag")):
        assert online[now]["commit"] == online[before]["commit"]
        assert online[now]["identity"] == online[before]["identity"]
        assert online[now]["seconds"] < SECONDS


# --- without a hub ----------------------------------------------------------------------------------------------------


def cached(home: Path, name: str, commit: str, folder: Path, *, links: bool = False, branch: str = "main") -> None:
    """The hub's cache as its client leaves it: refs/<branch>, snapshots/<commit>, and blobs that these link to."""
    root = home / "hub" / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    snapshot = root / "snapshots" / commit
    if not links:
        shutil.copytree(folder, snapshot)
        return
    (root / "blobs").mkdir()
    for index, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        blob = Path(shutil.copy(file, root / "blobs" / f"{index:040x}"))
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


@pytest.fixture(scope="module")
def offline(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("offline")
    home = root / "home"
    home.mkdir()
    first, second = base("sd15"), shifted(base("sd15"), root / "second", 0.5)
    cached(home, "owner/name", COMMIT, first, links=True)
    cached(home, "owner/name", OTHER, second, branch="v2")
    cached(home, "owner/halves", COMMIT, only_variant(second, root / "halves"))
    cached(home, "owner/flux", COMMIT, base("flux1"))
    torn = Path(shutil.copytree(first, root / "torn"))
    shutil.rmtree(torn / "vae")
    cached(home, "owner/torn", COMMIT, torn)
    flux = ["transformer", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae", "scheduler"]
    questions = {
        "main": question("owner/name", ALL),
        "tag": question("owner/name", ALL, revision="v2"),
        "commit": question("owner/name", ["unet"], revision=OTHER),
        "variant": question("owner/halves", ["unet"], variant="fp16"),
        "flux": question("owner/flux", flux),
        "no variant": question("owner/name", ["unet"], variant="fp16"),
        "torn": question("owner/torn", ["vae"]),
        "missing": question("owner/other"),
        "no revision": question("owner/name", revision="v3"),
    }
    with asking(home, root / "log.txt", HF_HUB_OFFLINE="1") as ask:
        answers = ask(questions)
    return {**answers, "sums": (unet_sum(first), unet_sum(second))}


def test_a_cache_filled_elsewhere_is_enough(offline: dict[str, Any]) -> None:
    assert offline["main"]["commit"] == COMMIT
    assert offline["main"]["sums"]["unet"] == pytest.approx(offline["sums"][0])
    for name in ("tag", "commit"):
        assert offline[name]["commit"] == OTHER
        assert offline[name]["sums"]["unet"] == pytest.approx(offline["sums"][1])
    assert offline["variant"]["sums"]["unet"] == pytest.approx(offline["sums"][1])
    assert offline["flux"]["family"] == "flux1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "owner/other is not on this machine, or not all of it, and the hub gives no answer: HF_HUB_"),
        ("no revision", "owner/name is not on this machine"),
        ("no variant", "no weights of the variant 'fp16'"),
        ("torn", "no folder for the component 'vae'"),
    ],
)
def test_what_the_cache_lacks_is_said_at_once(name: str, message: str, offline: dict[str, Any]) -> None:
    assert message in offline[name]["error"]
    assert offline[name]["hint"]
    assert offline[name]["seconds"] < SECONDS
