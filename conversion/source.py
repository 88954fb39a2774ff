"""The stock LLaVA checkpoint that is converted, read and checked without loading a tensor."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig

import llava_norm_align
from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import first_line, load_config
from llava_norm_align.common.weights import BLOCK, StoredTensor, StoredWeights, read_weights
from llava_norm_align.configuration import LlavaNormAlignConfig

# old layout: language_model.model.* and vision_tower.*; new layout: model.language_model.* and model.vision_tower.*
TABLE_NAME = re.compile(
    r"(model\.)?language_model\.(model\.|transformer\.)?(embed_tokens|word_embeddings|wte|embed_in)\.weight"
)
PROJECTOR_NAME = re.compile(r"((?:model\.)?multi_modal_projector\.)linear_1\.weight")
HEAD_NAME = re.compile(r"(language_model\.)?lm_head\.weight")
QUANTISED_DTYPE = re.compile(r"[IU](8|16|32)|F[468]_.*")


@dataclass(frozen=True)
class Source:
    """A stock LLaVA folder: its config.json as it is, as a config object, and where its tensors lie."""

    folder: Path
    raw_config: dict[str, Any]
    config: PretrainedConfig  # with norm_align_type "none": the stock model
    weights: StoredWeights
    table: StoredTensor  # the text embeddings
    projector_prefix: str  # the norm's tensors follow the layout of the others
    head_is_tied: bool  # the files hold no lm_head

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights.files)


def read_source(folder: Path) -> Source:
    """Read the headers of a LLaVA folder. InputError for all but a stock, unquantised LLaVA in safetensors."""
    raw_config = load_config(folder)
    _check_kind(folder, raw_config)
    config = _parse_config(folder, raw_config)
    _check_feature_layer(folder, config)
    weights = read_weights(folder)
    _check_not_quantised(folder, raw_config, weights)
    table = _find(
        weights, TABLE_NAME, folder, "text embedding table (such as language_model.model.embed_tokens.weight)"
    )
    projector = _find(weights, PROJECTOR_NAME, folder, "projector (multi_modal_projector.linear_1.weight)")
    prefix = PROJECTOR_NAME.fullmatch(projector)[1]
    table = weights.tensors[table]
    head_is_tied = _check_head(folder, raw_config, config, weights, table)
    if head_is_tied:  # 4.57 reads only the flag in text_config
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    return Source(folder, raw_config, config, weights, table, prefix, head_is_tied)


def _check_head(
    folder: Path, raw_config: dict[str, Any], config: PretrainedConfig, weights: StoredWeights, table: StoredTensor
) -> bool:
    """Whether the text embeddings are the output head too, which must be the same for every reader.

    4.57 follows the flag in text_config alone; 5 takes a stored head, else either flag.
    """
    text_default = type(config.text_config)().tie_word_embeddings  # true for the Gemma family
    tied_in_text = bool(raw_config["text_config"].get("tie_word_embeddings", text_default))
    tied = tied_in_text or bool(raw_config.get("tie_word_embeddings"))
    head = next((tensor for name, tensor in weights.tensors.items() if HEAD_NAME.fullmatch(name)), None)
    if head is None and not tied:
        raise InputError(
            f"The weights in {folder} have no lm_head.weight, and config.json does not tie it to the text embeddings "
            "(tie_word_embeddings). Use a complete checkpoint, or set the flag if the model was trained with it."
        )
    if head is not None and tied_in_text and not _same_bytes(head, table):
        raise InputError(
            f"text_config in {folder / 'config.json'} ties lm_head to the text embeddings (tie_word_embeddings), but "
            f"{head.name} differs from them: transformers 4.57 would use the embeddings, 5 the head. Set the flag to "
            "false, or remove the head, whichever the model was trained with."
        )
    return head is None


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        left = one.nbytes
        while left:
            size = min(BLOCK, left)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    kind = config["model_type"]
    if kind == "llava_norm_align":
        raise InputError(
            f"{folder} is already converted (model_type llava_norm_align). Name the stock LLaVA it came from."
        )
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds a PEFT adapter beside the model. Merge the adapter first, then convert the result."
        )
    if kind == "llava" and ("text_config" in config and "vision_config" in config):
        for name in ("text_config", "vision_config"):
            if not isinstance(config[name], dict):
                raise InputError(
                    f"{name} in {folder / 'config.json'} is {json.dumps(config[name])[:80]}, but an object was "
                    "expected: the configuration of that part. Download the model again."
                )
        return
    if kind == "llava":
        raise InputError(
            f"{folder / 'config.json'} has no text_config or no vision_config, as in the original LLaVA "
            "repository's layout; the transformers layout was expected. Use a llava-hf checkpoint, such as "
            "llava-hf/llava-1.5-7b-hf."
        )
    names = config.get("architectures")
    classes = ", ".join(map(str, names)) if names and isinstance(names, list) else "no architectures named"
    if kind.startswith("llava") or kind in ("vipllava", "video_llava"):
        raise InputError(
            f"{folder} is a {kind} model ({classes}), a relative of LLaVA that is not supported yet: version "
            f"{llava_norm_align.__version__} converts model_type llava. Use one such as llava-hf/llava-1.5-7b-hf."
        )
    raise InputError(
        f"{folder} is not a LLaVA: its config.json says model_type {kind} ({classes}). "
        "Use a checkpoint of model_type llava, such as llava-hf/llava-1.5-7b-hf."
    )


def _parse_config(folder: Path, raw_config: dict[str, Any]) -> PretrainedConfig:
    content = {key: value for key, value in raw_config.items() if key not in ("model_type", "auto_map")}
    try:
        return LlavaNormAlignConfig.from_dict({**content, "norm_align_type": "none"})
    except Exception as error:  # config classes raise whatever their fields lead to; in 5 also validation errors
        raise InputError(
            f"transformers {transformers.__version__} cannot read {folder / 'config.json'} as a LLaVA "
            f"({type(error).__name__}: {first_line(error)}). Check text_config and vision_config, or install a newer "
            "transformers."
        ) from error


def _check_feature_layer(folder: Path, config: PretrainedConfig) -> None:
    """The hidden states that LLaVA takes must be among those of the tower: its input and one after each layer."""
    layers = getattr(config.vision_config, "num_hidden_layers", None)
    chosen = config.vision_feature_layer
    for layer in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
        if layers is not None and not (isinstance(layer, int) and -layers - 1 <= layer <= layers):
            raise InputError(
                f"vision_feature_layer in {folder / 'config.json'} is {chosen!r}, but the vision tower has {layers} "
                f"layers: whole numbers from {-layers - 1} to {layers} were expected. Correct it or download it again."
            )


def _check_not_quantised(folder: Path, raw_config: dict[str, Any], weights: StoredWeights) -> None:
    for part in (raw_config, raw_config["text_config"], raw_config["vision_config"]):
        if isinstance(part, dict) and part.get("quantization_config"):
            settings = part["quantization_config"]
            method = settings.get("quant_method", "unknown method") if isinstance(settings, dict) else settings
            found = f"config.json has a quantization_config ({method})"
            break
    else:
        quantised = [tensor for tensor in weights.tensors.values() if QUANTISED_DTYPE.fullmatch(tensor.dtype)]
        if not quantised:
            return
        found = f"{quantised[0].name} is stored as {quantised[0].dtype}"
    raise InputError(f"{folder} is quantised: {found}. Convert the unquantised checkpoint, then quantise the result.")


def _find(weights: StoredWeights, pattern: re.Pattern[str], folder: Path, what: str) -> str:
    name = next((name for name in weights.tensors if pattern.fullmatch(name)), None)
    if name is None:
        raise InputError(f"The weights in {folder} have no {what}. Use a complete llava-hf checkpoint.")
    return name
