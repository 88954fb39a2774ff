"""Models and processors from a local folder or a Hub id."""

import os
import textwrap
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import check_utf8
from llava_norm_align.common.weights import read_json

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py", "*.md"]
PICKLED_FILES = ["pytorch_model*.bin", "mm_projector.bin"]


def resolve_model(model: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """The local folder of `model`: a folder, or a Hub id that is downloaded to the cache (`patterns`: which files)."""
    path = Path(model)
    check_utf8(path)
    if os.path.isdir(path):  # unlike Path.is_dir, no error below a folder that may not be read
        check_readable_folder(path)
        if revision is not None:
            raise InputError(f"{model} is a folder, which has no revision {revision}. Leave out --revision.")
        return path
    if os.path.exists(path):
        raise InputError(f"{model} is a file. Name a model folder, or a Hub id such as llava-hf/llava-1.5-7b-hf.")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InputError(
            f"There is no folder {model}. Name a model folder or a Hub id such as llava-hf/llava-1.5-7b-hf."
        )
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns or MODEL_FILES))
    except HFValidationError:
        raise InputError(
            f"{model} is neither a folder nor a Hub id. Name one, such as llava-hf/llava-1.5-7b-hf."
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"There is no folder {model}, and the Hub has no model of that name that you may read. "
            "Check the name; for a private or gated model, log in with: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"{model} has no revision {revision} on the Hub. Name a branch, tag or commit of it with --revision."
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        cache = Path(constants.HF_HUB_CACHE)
        if os.path.exists(cache) and not os.access(cache, os.R_OK | os.W_OK | os.X_OK):
            raise InputError(
                f"There is no folder {model}, and you may not use the Hub's cache {cache}. Give yourself the "
                "permission, or set HF_HUB_CACHE to another folder."
            ) from None
        raise InputError(
            f"There is no folder {model}, and the Hub cannot be asked for it ({type(error).__name__}). "
            "Check the path or the connection, or download the model first."
        ) from None


def resolve_weights(model: str, revision: str | None = None) -> Path:
    """As resolve_model; of a Hub model without safetensors also its `.bin` files."""
    folder = resolve_model(model, revision)
    if not os.path.isdir(model) and not any(folder.glob("*.safetensors")):
        folder = resolve_model(model, revision, MODEL_FILES + PICKLED_FILES)
    return folder


def check_readable_folder(folder: Path) -> None:
    """InputError if you may not read `folder`."""
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"You may not read the folder {folder}. Give yourself the permission, or name another one.")


def load_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder as a dict, with a model_type."""
    check_readable_folder(folder)
    if not any(folder.iterdir()):
        raise InputError(f"The folder {folder} is empty. Name a model folder, with config.json and weights.")
    config = read_json(folder / "config.json", "the configuration of a model")
    if not isinstance(config.get("model_type"), str):
        raise InputError(
            f"{folder / 'config.json'} has no model_type; the configuration of a model was expected. "
            "Name a model folder."
        )
    return config


def load_model(folder: Path, dtype: str = "auto", device: str | None = None) -> PreTrainedModel:
    """A vision-language model in eval mode. A norm-aligned one loads under its guard: InputError if it is damaged."""
    load_config(folder)
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=DTYPES[dtype], trust_remote_code=False)
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise InputError(
            f"{folder} could not be loaded as a vision-language model: {first_line(error).rstrip('.')}. "
            "Name another model, or download it again."
        ) from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()


def load_processor(folder: Path) -> ProcessorMixin:
    """The processor of a vision-language model. InputError if the folder has none."""
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        missing = first_line(error).partition(" Check out")[0]
        raise InputError(f"The processor of {folder} cannot be loaded: {missing} Install it first.") from error
    except Exception as error:  # every processor and tokenizer class has its own way to fail
        raise InputError(
            f"{folder} has no processor that can be loaded: {first_line(error).rstrip('.,')}. "
            "Repair or replace its files."
        ) from error
    if not isinstance(processor, ProcessorMixin):  # transformers falls back to the tokenizer alone
        raise InputError(
            f"{folder} has a {type(processor).__name__}, but no processor for images. Add its files, such as "
            "preprocessor_config.json."
        )
    return processor


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something, cut where it becomes a list of everything."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = " ".join(lines[:2]) if lines[0].endswith((":", ",")) else lines[0]
    return textwrap.shorten(first, 300, placeholder=" ...")
