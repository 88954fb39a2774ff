"""Whether the models that a Space is to show are there, and can be shown."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import HfApi, ModelInfo
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.revisions import split_revision
from llava_norm_align.common.weights import INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE, SINGLE_FILE
from llava_norm_align.modeling.families import has_norm
from llava_norm_align.release.card_license import is_hub_id
from llava_norm_align.release.upload_errors import UNTOUCHED, patiently

WEIGHTS = (SINGLE_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE)  # one of which transformers starts with
CONFIG = "config.json"


def check_model_names(model: str, base: str | None) -> None:
    """InputError unless both have the form ID or ID@REVISION."""
    for name in filter(None, (model, base)):
        if not is_hub_id(split_revision(name)[0]):
            raise InputError(
                f"{name!r} is no model on the Hub. Name it user/name or user/name@COMMIT; release it first."
            )


def check_models(api: HfApi, model: str, base: str | None, echo: Callable[[str], Any]) -> None:
    """Ask the Hub for the norm-aligned `model` and for `base`. InputError if the page could not show them."""
    for option, name in (("--model", model), ("--base", base)):
        if name is not None:
            info = _find(api, option, name, echo)
            _check_files(option, name, info)
            _check_type(option, name, _read_config(api, info, echo))
            if info.private or info.gated:
                kind = "private" if info.private else "gated"
                echo(f"Note: {info.id} is {kind}: the Space needs a token of its own (secret HF_TOKEN) to read it")


def _find(api: HfApi, option: str, name: str, echo: Callable[[str], Any]) -> ModelInfo:
    repo_id, revision = split_revision(name)
    try:
        return patiently(api.model_info, repo_id, revision=revision, echo=echo)
    except RepositoryNotFoundError:
        raise InputError(
            f"The Hub has no model {repo_id}, or the token may not see it ({option}). Check the name, or release it "
            f"first. {UNTOUCHED}"
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"The model {repo_id} on the Hub has no revision {revision} ({option}). Write a commit, tag or branch "
            f"of it after the @, or leave both out for its main branch. {UNTOUCHED}"
        ) from None


def _check_files(option: str, name: str, info: ModelInfo) -> None:
    there = {file.rfilename for file in info.siblings or []}
    lacks = CONFIG if CONFIG not in there else None if there & set(WEIGHTS) else f"weights such as {SINGLE_FILE}"
    if lacks:
        raise InputError(
            f"{option} {name} has no {lacks} at {info.sha[:12]}, so that the page could not load it. Name a "
            f"repository or a revision with a whole model. {UNTOUCHED}"
        )


def _read_config(api: HfApi, info: ModelInfo, echo: Callable[[str], Any]) -> dict[str, Any]:
    """What config.json says; empty if that is no config."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"revision": info.sha, "local_dir": folder}
        try:
            path = patiently(api.hf_hub_download, info.id, CONFIG, echo=echo, **options)
        except GatedRepoError:
            raise InputError(
                f"{info.id} is gated, and this token's account may not read it. Ask for access on its page on the "
                f"Hub, or name another model. {UNTOUCHED}"
            ) from None
        text = Path(path).read_text(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("model_type"), str) else {}


def _check_type(option: str, name: str, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if option == "--model" and not has_norm(config):
        raise InputError(
            f"--model {name} is a {kind} without a norm after its projector, by its config.json, but a norm-aligned "
            f"one was expected. Convert it with `llava-norm-align convert` and release the result. {UNTOUCHED}"
        )
    if option == "--base" and has_norm(config):
        raise InputError(
            f"--base {name} has a norm after its projector, by its config.json, but a model without one was expected, "
            f"such as what --model was made of. {UNTOUCHED}"
        )
    known = kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not known:
        raise InputError(
            f"{option} {name} has the model type {kind} in its config.json, but one of a vision-language model in "
            f"transformers {transformers.__version__} was expected. Name another model. {UNTOUCHED}"
        )
