"""Models and processors from a local folder or a Hub id."""

import importlib.util
import os
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from llava_norm_align.common.errors import InputError, missing_extra
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


def load_model(
    folder: Path,
    dtype: str = "auto",
    device: str | None = None,
    *,
    device_map: str | None = None,
    four_bit: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A vision-language model in eval mode. A norm-aligned one loads under its guard: InputError if it is damaged.

    `dtype`: a key of DTYPES; "auto" is the one that config.json names. `device_map`: as accelerate's, such as "auto";
    `four_bit`: NF4 by bitsandbytes. InputError, too, if a tensor is missing, which would be left random.
    """
    config = load_config(folder)
    if "auto_map" in config and config["model_type"] not in CONFIG_MAPPING and not trust_remote_code:
        raise InputError(
            f"{folder} brings its own code for its model type {config['model_type']}. Read that code and, if you "
            "trust it, pass --trust-remote-code."
        )
    # with "auto", 4.57 gives each part the dtype that its own config names, which may not be the one it is stored in
    named = DTYPES.get(config.get("dtype") or config.get("torch_dtype"), "auto")
    options: dict[str, Any] = {"dtype": named if dtype == "auto" else DTYPES[dtype]}
    if four_bit:
        options["quantization_config"] = _four_bit(options["dtype"])
    if device_map is not None:
        options["device_map"] = device_map
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, trust_remote_code=trust_remote_code, output_loading_info=True, **options
        )
    except ImportError as error:
        raise InputError(f"The model in {folder} cannot be loaded: {_needed(error)} Install it first.") from error
    except (RuntimeError, ValueError, OSError, SafetensorError, KeyError) as error:
        if "out of memory" in str(error) or "not enough memory" in str(error):
            raise
        if "Unrecognized configuration class" in str(error):
            raise InputError(
                f"{folder} is a {config['model_type']}, which transformers does not know as a vision-language model; "
                "one with an image processor and a vision tower was expected. Name another model."
            ) from error
        raise InputError(
            f"{folder} could not be loaded as a vision-language model: {first_line(error).rstrip('.')}. "
            "Name another model, or download it again."
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{len(missing)} tensors are missing in {folder}, such as {missing[0]}, and transformers "
            f"{transformers.__version__} would leave them random. Download the model again, or load it with the "
            "version of transformers that wrote it."
        )
    if device_map is None and not four_bit:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def _four_bit(dtype: torch.dtype | str) -> BitsAndBytesConfig:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("bitsandbytes", "train", "Loading in 4 bits")
    compute = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def load_processor(folder: Path, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a vision-language model. InputError if the folder has none."""
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise InputError(f"The processor of {folder} cannot be loaded: {_needed(error)} Install it first.") from error
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


def _needed(error: ImportError) -> str:
    """The sentence of transformers that says which library a class needs."""
    return first_line(error).partition(" Check out")[0]


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something, cut where it becomes a list of everything."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = " ".join(lines[:2]) if lines[0].endswith((":", ",")) else lines[0]
    return textwrap.shorten(first, 300, placeholder=" ...")
