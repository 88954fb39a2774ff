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
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    PreTrainedModel,
    ProcessorMixin,
)

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.folders import check_utf8
from llava_norm_align.common.weights import read_header, read_json

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's, besides a device
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


def check_vision_language(folder: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """config.json of a vision-language model's folder; InputError if it is of another kind of model, or of code that
    the folder brings and that is not trusted.
    """
    config = load_config(folder)
    model_type, own_code = config["model_type"], config.get("auto_map") or {}
    known = model_type in CONFIG_MAPPING
    if known and CONFIG_MAPPING[model_type] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return config
    if not known and not own_code:
        raise InputError(
            f"The model type {model_type} of {folder / 'config.json'} is not known to transformers "
            f"{transformers.__version__}, and the folder brings no code for it. Install a newer transformers, or name "
            "another model."
        )
    if "AutoModelForImageTextToText" not in own_code:
        raise InputError(
            f"{folder} is a {model_type}, which AutoModelForImageTextToText does not load; a vision-language model, "
            "with an image processor and a vision tower, was expected. Name another model."
        )
    if not trust_remote_code:
        raise InputError(
            f"{folder} brings its own code for its model type {model_type}. Read that code and, if you "
            "trust it, pass --trust-remote-code."
        )
    return config


def check_placement(
    dtype: str, device: str | None = None, device_map: str | dict[str, Any] | None = None, four_bit: bool = False
) -> None:
    """InputError unless load_model can do what these ask for on this machine."""
    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}; one of {', '.join(DTYPES)} was expected. Pass one of them.")
    if device is not None and device_map is not None:
        raise InputError(f"--device {device} and --device-map {device_map} exclude each other. Leave one out.")
    if device is not None:
        _check_device("--device", device, "one such as cpu, cuda or cuda:1")
    if isinstance(device_map, str) and device_map not in DEVICE_MAPS:
        _check_device("--device-map", device_map, f"one of {', '.join(DEVICE_MAPS)}, or a device")
    if four_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise missing_extra("bitsandbytes", "train", "Loading in 4 bits")


def _check_device(option: str, device: str, expected: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each device has its own way to fail
        reason = first_line(error).partition(". ")[0].rstrip(".")
        raise InputError(
            f"{option} is {device!r}, which PyTorch cannot use here ({reason}). Pass {expected}, or leave it out."
        ) from error


def load_model(
    folder: Path,
    dtype: str = "auto",
    device: str | None = None,
    *,
    device_map: str | dict[str, Any] | None = None,
    four_bit: bool | BitsAndBytesConfig = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A vision-language model in eval mode. A norm-aligned one loads under its guard: InputError if it is damaged.

    `dtype`: a key of DTYPES; "auto" is the one that config.json names. `device_map`: as accelerate's, such as "auto";
    `four_bit`: NF4 by bitsandbytes, or as a configuration says, unless the checkpoint is quantised already.
    InputError, too, if a tensor is missing or has another shape, as it would be left random.
    """
    check_placement(dtype, device, device_map, bool(four_bit))
    config = check_vision_language(folder, trust_remote_code)
    # with "auto", 4.57 gives each part the dtype that its own config names, which may not be the one it is stored in
    named = DTYPES.get(config.get("dtype") or config.get("torch_dtype"), "auto")
    options: dict[str, Any] = {"dtype": named if dtype == "auto" else DTYPES[dtype]}
    if four_bit and "quantization_config" not in config:
        compute = options["dtype"] if isinstance(options["dtype"], torch.dtype) else torch.bfloat16
        options["quantization_config"] = (
            four_bit
            if isinstance(four_bit, BitsAndBytesConfig)
            else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
        )
    if four_bit:
        device_map = device_map or (device and {"": device})  # a quantised model cannot be moved afterwards
    if device_map is not None:
        options["device_map"] = device_map
    try:
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below, with their names
            **options,
        )
    except ImportError as error:
        raise InputError(f"The model in {folder} cannot be loaded: {_needed(error)} Install it first.") from error
    except (RuntimeError, ValueError, OSError, SafetensorError, KeyError) as error:
        if out_of_memory(error):
            raise
        for file in sorted(folder.glob("*.safetensors")):
            read_header(file)  # if it is cut, it is named
        raise InputError(
            f"{folder} could not be loaded as a vision-language model: {first_line(error).rstrip('.')}. "
            "Name another model, or download it again."
        ) from error
    # in 4.57 names, in 5 names and shapes
    reshaped = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    for what, names in (("missing in", sorted(info["missing_keys"])), ("of the wrong shape in", sorted(reshaped))):
        if names:
            raise InputError(
                f"Tensors are {what} {folder} ({len(names)}, such as {names[0]}), and transformers "
                f"{transformers.__version__} would leave them random. Download the model again, or load it with the "
                "version of transformers that wrote it."
            )
    if device_map is None and not four_bit:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.eval()


def out_of_memory(error: Exception) -> bool:
    """Whether it says that the memory of a GPU or of the process did not suffice."""
    said = str(error)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in said for words in ("out of memory", "not enough memory", "allocate memory")
    )


def load_processor(folder: Path, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor of a vision-language model. InputError if the folder has none."""
    try:
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError as error:
        raise InputError(f"The processor of {folder} cannot be loaded: {_needed(error)} Install it first.") from error
    except Exception as error:  # every processor and tokenizer class has its own way to fail
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{folder} brings its own code for its processor. Read that code and, if you trust it, pass "
                "--trust-remote-code."
            ) from error
        raise InputError(
            f"{folder} has no processor that can be loaded: "
            f"{first_line(error).partition(' If you were trying')[0].rstrip('.,')}. Repair or replace its files."
        ) from error
    if not isinstance(processor, ProcessorMixin):  # transformers falls back to the tokenizer alone
        raise InputError(
            f"{folder} has a {type(processor).__name__}, but no processor for images. Add its files, such as "
            "preprocessor_config.json."
        )
    return processor


def _needed(error: ImportError) -> str:
    """The sentence of transformers that says which library a class needs."""
    while isinstance(error.__cause__, ImportError):  # the outer one may name the class alone
        error = error.__cause__
    return first_line(error).partition(" Check out")[0].rstrip(".") + "."


def first_line(error: Exception) -> str:
    """The first line of an error's message that says something, cut where it becomes a list of everything."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first = " ".join(lines[:2]) if lines[0].endswith((":", ",")) else lines[0]
    return textwrap.shorten(first, 300, placeholder=" ...")
