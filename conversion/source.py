"""The stock LLaVA checkpoint that is converted, read and checked without loading a tensor."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import first_line, load_config
from llava_norm_align.common.weights import StoredTensor, StoredWeights, is_alias, read_weights, same_bytes
from llava_norm_align.modeling.families import FAMILIES

# old layout: language_model.model.* and vision_tower.*; new layout: model.language_model.* and model.vision_tower.*
TABLE_NAME = re.compile(
    r"(model\.)?language_model\.(model\.|transformer\.)?(embed_tokens|word_embeddings|wte|embed_in)\.weight"
)
PROJECTOR_NAME = re.compile(r"((?:model\.)?multi_modal_projector\.)linear_1\.weight")
HEAD_NAME = re.compile(r"(language_model\.)?lm_head\.weight")
QUANTISED_DTYPE = re.compile(r"[IU](8|16|32)|F[468]_.*")
VIDEO_MODELS = ("video_llava", "llava_next_video")
EXAMPLES = {
    "llava": "llava-hf/llava-1.5-7b-hf",
    "llava_next": "llava-hf/llava-v1.6-mistral-7b-hf",
    "llava_onevision": "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    "vipllava": "llava-hf/vip-llava-7b-hf",
}


@dataclass(frozen=True)
class Source:
    """A stock LLaVA folder: its config.json as it is, as a config object, and where its tensors lie."""

    folder: Path
    kind: str  # its model_type, a key of FAMILIES
    raw_config: dict[str, Any]
    config: PretrainedConfig  # of our class, with norm_align_type "none": the stock model
    weights: StoredWeights
    table: StoredTensor  # the text embeddings
    projector_prefix: str  # the norm's tensors follow the layout of the others
    head_is_tied: bool  # the files hold no lm_head of its own
    projector: Path | None = None  # the file that the projector lies in, if it is not the folder's own
    rewritten: frozenset[Path] = frozenset()  # weight files of which only some tensors are wanted

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """Our class for this family."""
        return FAMILIES[self.kind]

    @property
    def norm(self) -> dict[str, StoredTensor]:
        """The norm's tensors, "weight" and "bias", that came with a projector; a stock folder has none."""
        prefix = f"{self.projector_prefix}align_norm."
        return {n.removeprefix(prefix): t for n, t in self.weights.tensors.items() if n.startswith(prefix)}

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.weights.files)


def read_source(folder: Path) -> Source:
    """Read the headers of a LLaVA folder. InputError for all but a stock, unquantised model of one of FAMILIES."""
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds a PEFT adapter (adapter_config.json). Merge it into its base model first "
            "(llava-norm-align merge), then convert the result."
        )
    raw_config = load_config(folder)
    kind = _check_kind(folder, raw_config)
    config = parse_config(folder, raw_config, norm_align_type="none")
    _check_image_token(folder, config)
    _check_feature_layer(folder, config)
    weights = read_weights(folder)
    _check_not_quantised(folder, raw_config, weights)
    table = _find(
        weights, TABLE_NAME, folder, "text embedding table (such as language_model.model.embed_tokens.weight)"
    )
    projector = _find(weights, PROJECTOR_NAME, folder, "projector (multi_modal_projector.linear_1.weight)")
    prefix = PROJECTOR_NAME.fullmatch(projector)[1]
    table = weights.tensors[table]
    head_is_tied = check_head(folder, raw_config, config, weights, table)
    if head_is_tied:  # 4.57 reads only the flag in text_config
        config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    return Source(folder, kind, raw_config, config, weights, table, prefix, head_is_tied)


def check_head(
    folder: Path, raw_config: dict[str, Any], config: PretrainedConfig, weights: StoredWeights, table: StoredTensor
) -> bool:
    """Whether the text embeddings are the output head too. InputError unless that is the same for every reader.

    4.57 follows the flag in text_config alone; 5 takes a stored head, else either flag.
    """
    text_default = type(config.text_config)().tie_word_embeddings  # true for the Gemma family
    tied_in_text = bool(raw_config["text_config"].get("tie_word_embeddings", text_default))
    tied = tied_in_text or bool(raw_config.get("tie_word_embeddings"))
    head = next((tensor for name, tensor in weights.tensors.items() if HEAD_NAME.fullmatch(name)), None)
    if head is not None and is_alias(head, table):  # a .bin keeps one tensor under both names
        return True
    if head is None and not tied:
        raise InputError(
            f"The weights in {folder} have no lm_head.weight, and config.json does not tie it to the text embeddings "
            "(tie_word_embeddings). Use a complete checkpoint, or set the flag if the model was trained with it."
        )
    if head is not None and tied_in_text and not same_bytes(head, table):
        raise InputError(
            f"text_config in {folder / 'config.json'} ties lm_head to the text embeddings (tie_word_embeddings), but "
            f"{head.name} differs from them: transformers 4.57 would use the embeddings, 5 the head. Set the flag to "
            "false, or remove the head, whichever the model was trained with."
        )
    return head is None


def _check_kind(folder: Path, config: dict[str, Any]) -> str:
    """The family of the model. InputError, with what to do instead, for everything else."""
    kind = config["model_type"]
    if kind.endswith("_norm_align") and kind.removesuffix("_norm_align") in FAMILIES:
        raise InputError(f"{folder} is already converted (model_type {kind}). Name the stock LLaVA it came from.")
    if kind in FAMILIES:
        return kind
    names = config.get("architectures")
    classes = ", ".join(map(str, names)) if names and isinstance(names, list) else "no architectures named"
    if kind in VIDEO_MODELS:
        raise InputError(
            f"{folder} is a video model ({kind}, {classes}), whose frames pass a pooling or merging of their own; "
            f"only image models are converted: {', '.join(FAMILIES)}. Use one such as {EXAMPLES['llava_onevision']}."
        )
    if "tinyllava" in kind.replace("_", "").lower() or "TinyLlava" in classes:
        raise InputError(
            f"{folder} is a TinyLLaVA ({kind}, {classes}), whose code and connector are its own. Put its parts "
            "together as a LLaVA with `llava-norm-align assemble --vision TOWER --text LLM`, and train that."
        )
    raise InputError(
        f"{folder} is not a LLaVA: its config.json says model_type {kind} ({classes}), but one of "
        f"{', '.join(FAMILIES)} was expected. Use a checkpoint such as {EXAMPLES['llava']}."
    )


def parse_config(folder: Path, raw_config: dict[str, Any], **fields: Any) -> PretrainedConfig:
    """config.json of a LLaVA as a config object, with `fields` beside its own. InputError if it cannot be one."""
    for name in ("text_config", "vision_config"):
        if not isinstance(raw_config.get(name), dict):
            raise InputError(
                f"{name} in {folder / 'config.json'} is {json.dumps(raw_config.get(name))[:80]}, but an object was "
                "expected: the configuration of that part. Download the model again."
            )
    content = {key: value for key, value in raw_config.items() if key not in ("model_type", "auto_map")}
    family = FAMILIES[raw_config["model_type"].removesuffix("_norm_align")]
    try:
        return family.config_class.from_dict({**content, **fields})
    except Exception as error:  # config classes raise whatever their fields lead to; in 5 also validation errors
        raise InputError(
            f"transformers {transformers.__version__} cannot read {folder / 'config.json'} as a "
            f"{raw_config['model_type']} ({type(error).__name__}: {first_line(error)}). Check text_config and "
            "vision_config, or install a newer transformers."
        ) from error


def _check_image_token(folder: Path, config: PretrainedConfig) -> None:
    """The image placeholder must be a row of the text table, which is looked up before the images take its place."""
    token, rows = config.image_token_id, config.text_config.vocab_size
    if not (isinstance(token, int) and 0 <= token < rows):
        raise InputError(
            f"The image token in {folder / 'config.json'} (image_token_index) is {token!r}, but the text table has "
            f"{rows} rows: a number from 0 to {rows - 1} was expected, the tokenizer's id of the image token. "
            "Correct it or download it again."
        )


def _check_feature_layer(folder: Path, config: PretrainedConfig) -> None:
    """The hidden states that LLaVA takes must be among those of the tower: its input and one after each layer."""
    layers = getattr(config.vision_config, "num_hidden_layers", None)
    chosen = getattr(config, "vision_feature_layers", None) or config.vision_feature_layer  # VipLLaVA in 4.57
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
