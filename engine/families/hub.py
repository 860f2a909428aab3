"""Files of the Hugging Face hub: fetched into its cache on this machine, or found there when there is no connection."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from ..errors import BaseModelError

TIMEOUT_S = 5.0  # for the hub's first answer; after it, huggingface_hub repeats what fails for minutes
CONFIGURATION_FILES = ["*.json", "**/*.json", "*.txt", "**/*.txt", "**/*.model"]
HTTP_LIBRARIES = ("httpx2", "httpx")  # huggingface_hub changed from one to the other, and diffusers catches only one

T = TypeVar("T")


def file(repository: str, name: str, revision: str | None) -> Path:
    """One file: …/snapshots/<commit>/<name>. Raises BaseModelError saying what is wrong."""
    from huggingface_hub import hf_hub_download

    def fetch(local: bool) -> str:
        return hf_hub_download(repository, name, revision=revision, local_files_only=local)

    return Path(_ask(repository, revision, fetch))


def pipeline(repository: str, *, commit: str, variant: str | None) -> Path:
    """The folder of a pipeline in diffusers format; which of its files are needed is diffusers' own rule.

    Raises BaseModelError saying what is wrong.
    """
    import diffusers

    def fetch(local: bool) -> str:
        return str(
            diffusers.DiffusionPipeline.download(
                repository, revision=commit, variant=variant, use_safetensors=True, local_files_only=local
            )
        )

    return Path(_ask(repository, commit, fetch))


def configuration(repository: str) -> Path:
    """The folder of a pipeline without its weights. Raises BaseModelError saying what is wrong."""
    from huggingface_hub import snapshot_download

    def fetch(local: bool) -> str:
        return snapshot_download(repository, allow_patterns=CONFIGURATION_FILES, local_files_only=local)

    return Path(_ask(repository, None, fetch))


def _ask(repository: str, revision: str | None, fetch: Callable[[bool], T]) -> T:
    """fetch(False) asks the hub; fetch(True), where it gives no answer, takes what is on this machine."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return _from_cache(repository, fetch, "HF_HUB_OFFLINE is set")
    try:
        HfApi().model_info(repository, revision=revision, timeout=TIMEOUT_S)
        return fetch(False)
    except errors.GatedRepoError as error:
        raise BaseModelError(
            f"{repository} is gated: its owner gives it only to those who accepted the terms",
            f"accept them on https://huggingface.co/{repository}, then run `hf auth login`",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise BaseModelError(
            f"there is no model {repository} on the hub, or it is private",
            "check the spelling; for a private model run `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise BaseModelError(
            f"{repository} has no such revision", "base.revision is a branch, a tag or a commit"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise BaseModelError(
            f"{repository} is not a pipeline in diffusers format: it has no model_index.json",
            "look for a model that has that file",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, *_http_errors()) as error:
        return _from_cache(repository, fetch, first_line(error.__cause__ or error))
    except (OSError, ValueError) as error:
        _refuse(repository, error)


def _from_cache(repository: str, fetch: Callable[[bool], T], why: str) -> T:
    from huggingface_hub import errors

    try:
        return fetch(True)
    except errors.LocalEntryNotFoundError as error:
        raise BaseModelError(
            f"{repository} is not on this machine, or not all of it, and the hub gives no answer: {why}",
            "check the network, or give a folder on this machine",
        ) from error
    except (OSError, ValueError) as error:
        _refuse(repository, error)


def _refuse(repository: str, error: Exception) -> NoReturn:
    raise BaseModelError(
        f"{repository} cannot be had from the hub: {first_line(error)}",
        "check base.variant and the free disk space; only safetensors weights are taken",
    ) from error


def _http_errors() -> tuple[type[Exception], ...]:
    """What the HTTP libraries that are in use raise when there is no connection or no proper answer."""
    return tuple(sys.modules[name].HTTPError for name in HTTP_LIBRARIES if name in sys.modules)


def first_line(error: BaseException) -> str:
    """What another library has to say, short enough for a sentence."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
