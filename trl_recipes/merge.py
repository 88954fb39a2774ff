"""A LoRA adapter and its base model, merged into a full model folder."""

import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from llava_norm_align.common.errors import InputError, missing_extra
from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.loading import first_line, load_config, resolve_model
from llava_norm_align.common.results import FOLDER, provenance, write_json
from llava_norm_align.common.weights import (
    StoredTensor,
    StoredWeights,
    copy_bytes,
    read_header,
    read_json,
    read_weights,
    write_header,
    write_index,
)
from llava_norm_align.conversion.doctor import check_new_model
from llava_norm_align.conversion.files import copy_small_files, small_files
from llava_norm_align.conversion.processor_fields import IMAGE_PROCESSOR_FILE, JSON_FILES, PROCESSOR_FILE
from llava_norm_align.conversion.source import read_source
from llava_norm_align.conversion.verify import check_keys, quiet_transformers
from llava_norm_align.modeling.families import FAMILIES
from llava_norm_align.modeling.modeling_llava_norm_align import save_code
from llava_norm_align.trl_recipes.checkpoints import ADAPTER_FILE, DTYPES, START_FILE, complete_folder, fingerprint

ADAPTER_CONFIG = "adapter_config.json"
# what a processor saves, beside generation_config.json, which is the model's
PROCESSOR_FILES = {*JSON_FILES, "video_preprocessor_config.json", "chat_template.jinja"}
PROCESSOR_FILES |= {"added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"}
PROCESSOR_FILES -= {"generation_config.json"}
PROCESSOR_SUFFIXES = (".model", ".spm", ".tiktoken")


def merge(
    adapter: str | Path,
    target: Path,
    *,
    base: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the model that the LoRA `adapter` makes of its base to the folder `target`; returns a summary for JSON.

    `adapter`: a folder or Hub id, as PEFT saves it. `base`: a folder or Hub id (at `revision`) of a stock or
    norm-aligned LLaVA; by default what adapter_config.json names. What the adapter holds whole, such as the projector
    and its norm, takes the place of the base's. Each layer with LoRA is computed in float32 and rounded once, to the
    dtype that the base stores it in; everything else is copied byte for byte. Processor, tokenizer and chat template
    are the adapter's, if it has them.

    Over a float32 base the result computes what base and adapter compute together, up to the order of additions. Over
    a bfloat16 base, layers and projector are rounded to bfloat16, which PEFT adds unrounded: what an adapter changes
    by less than half a step of bfloat16 is lost. The norm is float32 always. An adapter of QLoRA was trained beside
    weights in 4 bits; it is merged into the unquantised ones, which differ from those.

    InputError if `adapter` is no LoRA adapter, or not of this base: other tensors or shapes.
    """
    began = time.perf_counter()
    target = Path(target)
    check_target(target, overwrite)
    _check_peft()
    adapter_folder = resolve_model(str(adapter))
    settings = _read_settings(adapter_folder)
    base_folder, base_name, revision = _resolve_base(adapter_folder, settings, base, revision)
    model_class, config, weights, stock = _read_base(base_folder)
    check_target(target, overwrite, (adapter_folder, base_folder))

    network = _load_base(base_folder, model_class, config, weights)
    same_start = _is_start(adapter_folder, network, stock)
    adapted = _with_adapter(network, adapter_folder, base_folder)
    changed = _changed_tensors(adapted, weights, adapter_folder, base_folder)
    with new_folder(target, overwrite, (adapter_folder, base_folder)) as folder:
        for file in tqdm(weights.files, desc="merge", unit="file", disable=None):
            _write_file(folder / file.name, [t for t in weights.tensors.values() if t.file == file], changed)
        if weights.index is not None:
            write_index(folder, [folder / file.name for file in weights.files])
        shutil.copyfile(base_folder / "config.json", folder / "config.json")
        if not stock:
            save_code(folder, model_class)
        notes = _write_small_files(folder, adapter_folder, base_folder, config)
        origin = {"adapter": str(adapter), "base": base_name, "revision": revision}
        on_hub = {"base_on_hub": not Path(base_name).exists()}
        write_json(folder / FOLDER / "merge.json", {**provenance(), **origin, **on_hub})
        notes += _check_result(folder, model_class, config if stock else None)
    if same_start is False:
        notes.append(
            f"{base_name} may not be the model that the training started from: its fingerprint differs from that in "
            f"{START_FILE}, as it does after a training in another dtype, in 4 bits, or with another projector"
        )
    return {
        **origin,
        "target": str(target),
        "family": config.model_type,
        "dtypes": sorted({tensor.dtype for tensor in weights.tensors.values()}),
        "changed": len(changed),
        "untouched": len(weights.tensors) - len(changed),
        "same_start": same_start,
        "notes": notes,
        "seconds": time.perf_counter() - began,
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary of a merge in words."""
    return "\n".join(
        [
            *(f"Note: {note}" for note in summary["notes"]),
            f"Merged: {summary['adapter']} into {summary['base']}",
            f"Tensors: {summary['changed']} from the adapter, in {', '.join(summary['dtypes'])}; "
            f"{summary['untouched']} are byte for byte the base's",
            f"Written: {summary['target']} in {summary['seconds']:.1f} s",
        ]
    )


def _check_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError:
        raise missing_extra("peft", "train", "Merging an adapter") from None


def _read_settings(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter whose weights are there."""
    if not (folder / ADAPTER_CONFIG).is_file():
        what = "a whole model, which needs no merging" if (folder / "config.json").is_file() else "no adapter"
        raise InputError(f"{folder} holds {what}: there is no {ADAPTER_CONFIG}. Name the folder of a LoRA adapter.")
    settings = read_json(folder / ADAPTER_CONFIG, "the settings of an adapter")
    if settings.get("peft_type") != "LORA":
        raise InputError(
            f"{folder / ADAPTER_CONFIG} says peft_type {settings.get('peft_type')}, but only LORA is merged. Name a "
            "LoRA adapter."
        )
    for name in ("trainable_token_indices", "target_parameters", "layer_replication"):
        if settings.get(name):
            raise InputError(
                f"{folder / ADAPTER_CONFIG} sets {name}, which is not merged. Name an adapter of whole linear layers."
            )
    if not (folder / ADAPTER_FILE).is_file():
        raise InputError(f"There is no {ADAPTER_FILE} in {folder}. Save the adapter again, as safetensors.")
    read_header(folder / ADAPTER_FILE)
    return settings


def _resolve_base(
    adapter: Path, settings: dict[str, Any], base: str | None, revision: str | None
) -> tuple[Path, str, str | None]:
    """The folder of the base model, its name and its revision."""
    if base is not None:
        return resolve_model(base, revision), base, revision
    named = settings.get("base_model_name_or_path")
    if not named:
        raise InputError(f"{adapter / ADAPTER_CONFIG} names no base model. Pass it as --base.")
    if revision is None and not os.path.isdir(named):
        revision = settings.get("revision")
    try:
        return resolve_model(named, revision), named, revision
    except InputError as error:
        raise InputError(f"{adapter / ADAPTER_CONFIG} names its base: {error} Or pass the base as --base.") from None


def _read_base(folder: Path) -> tuple[type[PreTrainedModel], PretrainedConfig, StoredWeights, bool]:
    """Our class for the base, its config there, its weights, and whether it is a stock LLaVA (then without a norm)."""
    raw_config = load_config(folder)
    weights = read_weights(folder)
    if weights.pickled:
        raise InputError(
            f"The weights of {folder} are pickled ({weights.files[0].name}), but safetensors was expected. Load the "
            "model with transformers and call save_pretrained."
        )
    quantised = raw_config.get("quantization_config")
    if quantised:
        raise InputError(f"{folder} is quantised. Pass the model before that as --base, also for an adapter of QLoRA.")
    kind = raw_config["model_type"]
    if kind in FAMILIES:
        source = read_source(folder)
        return source.model_class, source.config, weights, True
    if kind.removesuffix("_norm_align") not in FAMILIES:
        raise InputError(
            f"{folder} is a {kind}, but a base of one of {', '.join(FAMILIES)} was expected, stock or norm-aligned. "
            "Pass the model that the adapter was trained on as --base."
        )
    model_class = FAMILIES[kind.removesuffix("_norm_align")]
    return model_class, model_class.config_class.from_pretrained(folder), weights, False


def _load_base(
    folder: Path, model_class: type[PreTrainedModel], config: PretrainedConfig, weights: StoredWeights
) -> PreTrainedModel:
    """The base on the CPU, in the dtype that it is stored in; in float32 if its parts differ in that."""
    stored = {tensor.dtype for name, tensor in weights.tensors.items() if ".align_norm." not in name}
    dtype = DTYPES.get(min(stored), torch.float32) if len(stored) == 1 else torch.float32
    try:
        with quiet_transformers():
            return model_class.from_pretrained(folder, config=config, dtype=dtype).eval()
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"The base model {folder} cannot be loaded: {first_line(error)}") from error


def _is_start(adapter: Path, model: PreTrainedModel, stock: bool) -> bool | None:
    """Whether `model` is the one that the adapter's training started from; None if the adapter does not say."""
    if not (adapter / START_FILE).is_file():
        return None
    if stock:  # our class adds the fields of a norm
        model = SimpleNamespace(config=SimpleNamespace(to_dict=dict), named_parameters=model.named_parameters)
    return read_json(adapter / START_FILE, "what a training started from").get("weights") == fingerprint(model)


def _with_adapter(model: PreTrainedModel, adapter: Path, base: Path) -> nn.Module:
    """`model` in PEFT with the adapter's tensors. InputError unless it is of this base."""
    from peft import PeftConfig, PeftModel, set_peft_model_state_dict

    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT asks transformers for what it deprecates
            adapted = PeftModel(model, PeftConfig.from_pretrained(str(adapter)))
            result = set_peft_model_state_dict(adapted, load_file(adapter / ADAPTER_FILE))
        missing = {name for name in result.missing_keys if ".lora_" in name or ".modules_to_save." in name}
        differing = missing | set(result.unexpected_keys)
        reason = f"{len(differing)} tensors are in one of the two only, such as {min(differing)}" if differing else ""
    except KeyError as error:
        reason = f"the adapter has no {error.args[0]}"
    except (RuntimeError, ValueError, TypeError) as error:
        shapes = re.search(r"size mismatch for ([^\n]+)", str(error))
        reason = f"other shapes, such as {shapes[1]}" if shapes else first_line(error).partition(". ")[0]
    if reason:
        raise InputError(
            f"The adapter in {adapter} is not one of {base}: {reason.rstrip('.')}. Pass the model that it was trained "
            "on as --base."
        )
    return adapted


def _whole_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter holds whole, by the names of those in whose place they stand."""
    from peft.utils import ModulesToSaveWrapper

    return {
        name: module.modules_to_save["default"]
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    }


def _changed_tensors(
    model: nn.Module, weights: StoredWeights, adapter: Path, base: Path
) -> dict[str, Callable[[], torch.Tensor]]:
    """What computes each tensor that differs from the base's, in float32, by its name in the base's files."""
    from peft.tuners.lora import LoraLayer

    stored = {plain_name(name): name for name in weights.tensors}
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for name, module in _whole_modules(model).items():
        for key, tensor in module.state_dict().items():
            found[f"{name}.{key}"] = lambda tensor=tensor: tensor
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            for key in layer.get_base_layer().state_dict():
                found[f"{name}.{key}"] = lambda layer=layer, key=key: _merge_layer(layer)[key]
    changed = {}
    for name, compute in found.items():
        if plain_name(name) not in stored:
            raise InputError(
                f"The adapter in {adapter} changes {name}, which the files of {base} do not hold as a tensor of its "
                "own, such as a head tied to the text table. Merge it with PEFT's merge_and_unload."
            )
        changed[stored[plain_name(name)]] = compute
    return changed


def plain_name(name: str) -> str:
    """One name for a tensor under the names of llava-hf's files, of transformers 4's and 5's, and in memory."""
    name = re.sub(r"^(model\.)?(language_model\.(?=lm_head\.))?", "", name)
    name = re.sub(r"^language_model\.model\.", "language_model.", name)
    return re.sub(r"^vision_tower\.vision_model\.", "vision_tower.", name)


@torch.no_grad()
def _merge_layer(layer: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a layer with LoRA after PEFT merged them in float32; the layer stays as it is."""
    inner = layer.get_base_layer()
    before = {name: parameter.data for name, parameter in inner.named_parameters()}
    try:
        inner.float()
        layer.merge(safe_merge=True)
        return {name: parameter.data for name, parameter in inner.named_parameters()}
    except ValueError as error:
        raise InputError(f"The adapter has NaN or inf: {first_line(error)}. Use an earlier checkpoint.") from error
    finally:
        layer.merged_adapters.clear()
        for name, parameter in inner.named_parameters():
            parameter.data = before[name]


def _write_file(path: Path, tensors: Iterable[StoredTensor], changed: dict[str, Callable[[], torch.Tensor]]) -> None:
    """Write a weight file: the tensors as they are stored, but those in `changed` computed, in the stored dtype."""
    tensors = list(tensors)
    with path.open("wb") as out:
        write_header(out, [(tensor.name, tensor) for tensor in tensors])
        for tensor in tensors:
            if tensor.name not in changed:
                copy_bytes(tensor, out)
                continue
            value = changed[tensor.name]().to(DTYPES[tensor.dtype])
            if not value.isfinite().all():
                raise InputError(
                    f"{tensor.name} has NaN or inf in {tensor.dtype} once the adapter is merged. Use an earlier "
                    "checkpoint."
                )
            out.write(value.contiguous().cpu().view(torch.uint8).numpy().tobytes())


def _write_small_files(folder: Path, adapter: Path, base: Path, config: PretrainedConfig) -> list[str]:
    """Processor, tokenizer, templates, result files: the adapter's where it has them; returns notes for the user."""
    notes = copy_small_files(base, folder)
    if any((adapter / name).is_file() for name in (PROCESSOR_FILE, IMAGE_PROCESSOR_FILE)):
        for path in filter(_is_of_processor, small_files(folder)):
            path.unlink()
        for path in filter(_is_of_processor, small_files(adapter)):
            (folder / path.relative_to(adapter)).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.relative_to(adapter))
    else:
        notes.append("the adapter has no processor: the base's is used")
    with quiet_transformers():
        complete_folder(folder, config)
    (folder / FOLDER).mkdir(exist_ok=True)
    calibration = base / FOLDER / "calibration.json"
    for path in [*([calibration] if calibration.is_file() else []), *sorted((adapter / FOLDER).glob("*.json"))]:
        shutil.copyfile(path, folder / FOLDER / path.name)
    return notes


def _is_of_processor(path: Path) -> bool:
    named = path.name in PROCESSOR_FILES or path.suffix in PROCESSOR_SUFFIXES
    return named or path.parent.name == "additional_chat_templates"


def _check_result(folder: Path, model_class: type[PreTrainedModel], stock: PretrainedConfig | None) -> list[str]:
    """CheckFailed if what was written is not a whole model (`stock`: its config); notes on processor and tokenizer."""
    if stock is not None:
        check_keys(folder, model_class, stock)
        return []
    failed = check_new_model(folder, "merged", "transformers, torch and peft")
    return [f"the {check.name}: {check.detail}" for check in failed]
