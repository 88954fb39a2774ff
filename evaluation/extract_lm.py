"""The language model of a LLaVA as a plain folder, its weights copied byte for byte: for tools that know text only."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from tqdm import tqdm
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.loading import first_line, load_config, resolve_weights
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import (
    SINGLE_FILE,
    StoredTensor,
    StoredWeights,
    check_written,
    read_json,
    read_weights,
    write_index,
    write_renamed,
)
from llava_norm_align.configuration.configuration_llava_norm_align import with_rope_theta
from llava_norm_align.conversion.config_file import DTYPE_NAMES
from llava_norm_align.conversion.processor_files import write_generation_config
from llava_norm_align.conversion.source import HEAD_NAME, QUANTISED_DTYPE, TABLE_NAME, check_head, parse_config
from llava_norm_align.conversion.verify import quiet_transformers
from llava_norm_align.evaluation.extract_tokenizer import check_tokenizer_files, settle_tokenizer, write_tokenizer
from llava_norm_align.modeling.families import FAMILIES

SUFFIX = "_norm_align"  # of our model types
HEAD = "lm_head.weight"
# old layout: language_model.model.*, as the causal language model has it; new layout: model.language_model.*
OLD_NAME = re.compile(r"language_model\.(.+)")
NEW_NAME = re.compile(r"model\.language_model\.(.+)")
OUTER_HEAD = re.compile(r"lm_head\..+")
OLD_BUFFER = "rotary_emb.inv_freq"  # saved by old versions


def extract_lm(model: str, target: Path, *, revision: str | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Write the language model of the LLaVA `model` to the folder `target`; returns a summary for JSON.

    `model`: a folder or Hub id (at `revision`) of one of FAMILIES, stock or norm-aligned, with either key layout, in
    shards or not; `.bin` files become safetensors. The folder loads with AutoModelForCausalLM and AutoTokenizer and
    nothing else. Its text table keeps all of its rows [V, D], those added for `<image>` too, so logits on text are the
    model's own, bit for bit. The tokenizer reads text as the model's own does, and its chat template takes strings.
    InputError for bad input, CheckFailed if the result does not hold what it must; both leave no folder behind.
    """
    began = time.perf_counter()
    target = Path(target)
    check_target(target, overwrite)
    source = resolve_weights(model, revision)
    raw_config, config = read_llava_config(source)
    family = raw_config["model_type"].removesuffix(SUFFIX)
    check_tokenizer_files(source)
    weights = read_weights(source)
    _check_not_quantised(source, raw_config, weights)
    model_class = _causal_class(source, config.text_config)
    tied = _is_tied(source, raw_config, config, weights)
    pairs = dict(_renamed(weights, model_class.base_model_prefix))
    if tied:
        pairs.pop(HEAD, None)

    with new_folder(target, overwrite, (source,)) as folder:
        _write_config(folder, source, raw_config, config, model_class, pairs, tied)
        write_tokenizer(folder, source)
        notes = settle_tokenizer(folder, source, family, config.text_config.model_type)
        files = _write_weights(folder, pairs)
        _check_loads(folder, source)
        written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    token, rows = config.image_token_id, config.text_config.vocab_size
    return {
        "source": str(model),
        "target": str(target),
        "family": family,
        "model_type": config.text_config.model_type,
        "class": model_class.__name__,
        "tied": tied,
        "rows": rows,
        "image_token_id": token,
        "dtypes": sorted({tensor.dtype for tensor in pairs.values()}),
        "tensors": len(pairs),
        "left_out": len(weights.tensors) - len(pairs),
        "bytes": sum(tensor.nbytes for tensor in pairs.values()),
        "weights": files,
        "files": written,
        "notes": [
            f"The text table keeps all {rows} rows, so token {token} (the image token) stays; it has a logit, as in "
            "the model itself",
            *notes,
        ],
        "seconds": time.perf_counter() - began,
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary of an extraction in words."""
    return "\n".join(
        [
            *(f"Note: {note}" for note in summary["notes"]),
            f"Language model of {summary['source']}: {summary['class']}, {summary['bytes'] / 1e9:.2f} GB in "
            f"{', '.join(summary['dtypes'])}",
            f"Tensors: {summary['tensors']}, byte for byte the model's; {summary['left_out']} left out",
            f"Written: {summary['target']} in {summary['seconds']:.1f} s",
        ]
    )


def is_llava(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a LLaVA of one of FAMILIES, stock or norm-aligned."""
    return config["model_type"].removesuffix(SUFFIX) in FAMILIES


def read_llava_config(folder: Path) -> tuple[dict[str, Any], PretrainedConfig]:
    """config.json of a LLaVA, stock or norm-aligned: as it is, and as a config object. InputError for any other."""
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds a PEFT adapter (adapter_config.json). Merge it into its base model first "
            "(llava-norm-align merge), then extract from the result."
        )
    raw = load_config(folder)
    kind = raw["model_type"]
    if not is_llava(raw):
        found = "has no vision tower to leave out" if "vision_config" not in raw else "is no LLaVA"
        raise InputError(
            f"{folder} {found}: its config.json says model_type {kind}, but one of {', '.join(FAMILIES)} was "
            "expected, stock or norm-aligned. Name such a model."
        )
    return raw, parse_config(folder, raw)


def _check_not_quantised(source: Path, raw: dict[str, Any], weights: StoredWeights) -> None:
    named = any(part.get("quantization_config") for part in (raw, raw["text_config"]))
    stored = next((tensor for tensor in weights.tensors.values() if QUANTISED_DTYPE.fullmatch(tensor.dtype)), None)
    if named or stored:
        found = "config.json has a quantization_config" if named else f"{stored.name} is stored as {stored.dtype}"
        raise InputError(f"{source} is quantised: {found}. Name the unquantised checkpoint.")


def _causal_class(source: Path, text_config: PretrainedConfig) -> type[transformers.PreTrainedModel]:
    if type(text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"text_config in {source / 'config.json'} is of type {text_config.model_type}, for which transformers "
            f"{transformers.__version__} has no causal language model. Name another model."
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(text_config)]


def _is_tied(source: Path, raw: dict[str, Any], config: PretrainedConfig, weights: StoredWeights) -> bool:
    """Whether the text table is the head too; if it is, a stored head has its bytes (check_head)."""
    table = next((tensor for name, tensor in weights.tensors.items() if TABLE_NAME.fullmatch(name)), None)
    if table is None:
        raise InputError(
            f"The weights in {source} have no text embedding table (such as language_model.model.embed_tokens.weight)"
            ". Use a complete checkpoint."
        )
    without_head = check_head(source, raw, config, weights, table)
    return without_head or bool(config.text_config.tie_word_embeddings)


def _renamed(weights: StoredWeights, prefix: str) -> Iterator[tuple[str, StoredTensor]]:
    """The language model's tensors under the names that it has alone; `prefix` is that of its inner model."""
    for name, tensor in weights.tensors.items():
        if name.endswith(OLD_BUFFER):
            continue
        if HEAD_NAME.fullmatch(name):
            yield HEAD, tensor
        elif OUTER_HEAD.fullmatch(name):
            yield name, tensor
        elif found := NEW_NAME.fullmatch(name):
            yield f"{prefix}.{found[1]}", tensor
        elif found := OLD_NAME.fullmatch(name):
            inside = found[1].startswith((f"{prefix}.", "lm_head."))
            yield found[1] if inside else f"{prefix}.{found[1]}", tensor


def _write_config(
    folder: Path,
    source: Path,
    raw: dict[str, Any],
    config: PretrainedConfig,
    model_class: type[transformers.PreTrainedModel],
    pairs: dict[str, StoredTensor],
    tied: bool,
) -> None:
    """config.json and generation_config.json: every field of the text part, under the names of both lines."""
    text = with_rope_theta(config.text_config.to_diff_dict())
    text = {key: value for key, value in text.items() if key not in ("torch_dtype", "_name_or_path", "auto_map")}
    stored = {DTYPE_NAMES.get(tensor.dtype) for tensor in pairs.values()}
    named = raw["text_config"].get("dtype") or raw.get("dtype") or raw.get("torch_dtype")
    dtype = min(stored) if len(stored) == 1 and None not in stored else named
    generation = source / "generation_config.json"
    generation = read_json(generation, "a generation configuration") if generation.is_file() else {}
    ids = {}  # the text part of some checkpoints leaves them to its class
    for name in ("bos_token_id", "eos_token_id"):
        found = [part[name] for part in (raw["text_config"], raw, generation) if part.get(name) is not None]
        ids |= {name: found[0]} if found else {}
    text |= {"architectures": [model_class.__name__], "dtype": dtype, "tie_word_embeddings": tied, **ids}
    write_json(folder / "config.json", {"model_type": config.text_config.model_type, **text})
    write_generation_config(folder, source, text)


def _write_weights(folder: Path, pairs: dict[str, StoredTensor]) -> list[dict[str, Any]]:
    """A file for each of the source's that holds some of `pairs`, read back; returns what they are."""
    groups: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, tensor in sorted(pairs.items(), key=lambda pair: (pair[1].file, pair[1].offset)):
        groups.setdefault(tensor.file, []).append((name, tensor))
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(names) > 1 else [SINGLE_FILE]
    for name, group in tqdm(zip(names, groups.values(), strict=True), total=len(names), unit="file", disable=None):
        write_renamed(folder / name, group)
        check_written(folder / name, group)
    if len(names) > 1:
        write_index(folder, [folder / name for name in names])
    return [
        {"file": name, "from": file.name, "bytes": (folder / name).stat().st_size}
        for name, file in zip(names, groups, strict=True)
    ]


def _check_loads(folder: Path, source: Path) -> None:
    """InputError unless every tensor has its place and every place its tensor; on the meta device."""
    try:
        with quiet_transformers():
            _, info = AutoModelForCausalLM.from_pretrained(
                folder, device_map="meta", dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
            )
        wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if kind.endswith("_keys") and names}
        reason = "; ".join(
            f"{kind.replace('_', ' ')}: {len(names)}, such as {names[0]}" for kind, names in wrong.items()
        )
    except Exception as error:  # whatever a class raises for values that it was not made for
        reason = f"{type(error).__name__}: {first_line(error)}"
    if reason:
        raise InputError(
            f"The language model's weights in {source} do not match its text_config ({reason}). Download the model "
            "again."
        )
