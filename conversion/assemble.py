"""A stock LLaVA from a vision tower and a language model, its weights copied from file to file."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import check_target, new_folder
from llava_norm_align.common.loading import first_line, load_config, resolve_weights
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import (
    SINGLE_FILE,
    StoredTensor,
    check_written,
    copy_bytes,
    read_header,
    read_weights,
    write_header,
    write_index,
    write_renamed,
)
from llava_norm_align.configuration.configuration_llava_norm_align import with_rope_theta
from llava_norm_align.conversion.processor_files import (
    IMAGE_TOKEN,
    image_processor_config,
    write_generation_config,
    write_processor,
    write_tokenizer,
)
from llava_norm_align.conversion.projector_file import PROJECTOR, norm_of, read_projector
from llava_norm_align.conversion.verify import quiet_transformers

VISION_FAMILIES = {
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
    "dinov2": "dinov2",
}
# Top-level names inside a tower; what else a checkpoint holds (a text tower, a classifier) is left out.
VISION_PARTS = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.", "head.", "layernorm.")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# A sub-config has its own type; LLaVA's dtype holds for the whole model.
UNWANTED_FIELDS = ("model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "auto_map")
MAX_SINGLE_FILE = 5_000_000_000  # bytes; larger models keep the language model's shards
ROWS = 1024  # of a text table, read at a time
EMBEDDING, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


@dataclass(frozen=True)
class Part:
    """A vision tower or a language model: its config and its tensors under their names in a published LLaVA."""

    config: dict[str, Any]
    tensors: dict[str, StoredTensor]


def assemble(
    target: Path, vision: str, text: str, projector: Path | None = None, *, overwrite: bool = False, seed: int = 0
) -> Path:
    """Write a stock LLaVA (`LlavaForConditionalGeneration`) to the folder `target` and return it.

    `vision`: a CLIP, SigLIP or DINOv2 model; of a CLIP or SigLIP with a text tower the vision half is taken. `text`: a
    causal language model such as Llama, Qwen2 or Mistral. Both are folders or Hub ids, with weights that are copied as
    bytes in the key names of llava-hf's checkpoints. `projector`: a file that `read_projector` reads,
    [D, D_vision] and [D, D], without a norm; by default it is fresh, as transformers initialises it from `seed`.

    `<image>` is added to the tokenizer. Where the text table has no row for it, table and head get one more, the mean
    of their rows: its logit is the mean logit, so it is never generated, and one row leaves the mean norm of a whole
    vocabulary where it was. InputError if a part is missing, damaged, quantised or of another kind.
    """
    target = Path(target)
    check_target(target, overwrite)
    vision_folder, text_folder = resolve_weights(vision), resolve_weights(text)
    tower, llm = read_vision_tower(vision_folder), read_language_model(text_folder)
    family = tower.config["model_type"].split("_")[0]
    image_processor = image_processor_config(vision_folder, family)
    check_image_size(vision_folder, image_processor, tower.config)
    weights = None if projector is None else _read_projector(Path(projector), tower, llm)
    # "default" drops the first token, which is a patch in SigLIP
    strategy = "full" if family == "siglip" else "default"

    with new_folder(target, overwrite, sources=(vision_folder, text_folder)) as folder:
        image_token_id = write_tokenizer(folder, text_folder)[IMAGE_TOKEN]
        rows = max(llm.tensors[EMBEDDING].shape[0], image_token_id + 1)
        write_config(folder, tower, llm, image_processor, image_token_id=image_token_id, rows=rows, strategy=strategy)
        write_generation_config(folder, text_folder, llm.config)
        if weights is None:
            weights = _write_fresh_projector(folder / ".projector.safetensors", tower, llm, seed)
        write_weights(folder, tower, llm, weights, rows)
        (folder / ".projector.safetensors").unlink(missing_ok=True)
        check_loads(folder, vision, text)
    return target


def write_config(
    folder: Path,
    tower: Part,
    llm: Part,
    image_processor: dict[str, Any],
    *,
    image_token_id: int,
    rows: int,
    strategy: str,
    feature_layer: int = -2,
) -> None:
    """config.json and the processor's files of a LLaVA whose text table has `rows` rows."""
    has_cls = not tower.config["model_type"].startswith("siglip")
    patch = tower.config["patch_size"]
    patches = (image_processor["crop_size"]["height"] // patch) * (image_processor["crop_size"]["width"] // patch)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": DTYPE_NAMES[llm.tensors[EMBEDDING].dtype],
        "image_token_index": image_token_id,
        "image_seq_length": patches + (has_cls and strategy == "full"),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": feature_layer,
        "vision_feature_select_strategy": strategy,
        "tie_word_embeddings": llm.config["tie_word_embeddings"],
        "text_config": {**llm.config, "vocab_size": rows},
        "vision_config": tower.config,
    }
    write_json(folder / "config.json", config)
    write_processor(folder, image_processor, patch, strategy, int(has_cls))


def read_vision_tower(folder: Path, stored: dict[str, StoredTensor] | None = None) -> Part:
    """The vision tower in `folder`, under the names of a published LLaVA; `stored`: tensors in place of its own."""
    config = load_config(folder)
    family = VISION_FAMILIES.get(config["model_type"])
    if family is None:
        raise InputError(
            f"{folder} holds a model of type {config['model_type']}, but LLaVA's vision tower must be one of: "
            f"{', '.join(VISION_FAMILIES)}. Name such a model."
        )
    if config["model_type"] in ("clip", "siglip"):
        config = config.get("vision_config")
        if not isinstance(config, dict):
            raise InputError(f"{folder / 'config.json'} has no vision_config. Download the vision tower again.")
    config = _complete(config, "dinov2" if family == "dinov2" else f"{family}_vision_model", folder)
    stored = read_weights(folder).tensors if stored is None else stored
    for prefix in ("vision_model.", "dinov2."):
        if any(name.startswith(prefix) for name in stored):
            stored = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    prefix = "vision_tower." if family == "dinov2" else "vision_tower.vision_model."
    tensors = {
        prefix + name: tensor
        for name, tensor in stored.items()
        if name.startswith(VISION_PARTS) and not name.endswith("position_ids")  # a buffer that old versions saved
    }
    return Part(config, tensors)


def read_language_model(folder: Path) -> Part:
    """The causal language model in `folder`, under the names of a published LLaVA."""
    config = load_config(folder)
    return language_model(folder, config["model_type"], config, read_weights(folder).tensors)


def language_model(folder: Path, kind: str, config: dict[str, Any], stored: dict[str, StoredTensor]) -> Part:
    """A causal language model of type `kind` from its own config and tensors, under a published LLaVA's names."""
    tensors = {
        f"language_model.{name}": tensor
        for name, tensor in stored.items()
        if name.startswith(("model.", "lm_head.")) and not name.endswith("rotary_emb.inv_freq")  # an old buffer
    }
    if EMBEDDING not in tensors or "vision_config" in config:
        raise InputError(
            f"{folder} holds a model of type {kind}, which is not a causal language model that LLaVA can hold: it has "
            "no model.embed_tokens.weight or brings a vision tower. Name a text model such as Llama, Qwen2 or Mistral."
        )
    config = _complete(config, kind, folder)
    table = tensors[EMBEDDING]
    if table.dtype not in DTYPES or len(table.shape) != 2 or table.shape[1] != config["hidden_size"]:
        raise InputError(
            f"The text table of {folder} is {table.dtype} {list(table.shape)}, but F32, F16 or BF16 with "
            f"{config['hidden_size']} columns (hidden_size) was expected. Use the model before it was quantised."
        )
    if config["tie_word_embeddings"]:
        tensors.pop(HEAD, None)
    elif HEAD not in tensors:
        raise InputError(
            f"{folder} has no lm_head.weight, but its config.json does not tie the head to the text table "
            "(tie_word_embeddings). Download the language model again."
        )
    return Part(config, tensors)


def _complete(config: dict[str, Any], kind: str, folder: Path) -> dict[str, Any]:
    """The sub-config for LLaVA's config.json: what the source wrote, and the defaults that LLaVA or 4.57 must see."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise InputError(f"{folder} is quantised ({method or 'unknown method'}). Use the model before that.")
    config = {key: value for key, value in config.items() if key not in UNWANTED_FIELDS}
    try:
        known = AutoConfig.for_model(kind, **deepcopy(config)).to_dict()
    except Exception as error:  # remote code, unknown types, values that the class refuses
        raise InputError(
            f"transformers cannot read {folder / 'config.json'} ({type(error).__name__}: {first_line(error)}). "
            "Correct it, or download the model again."
        ) from None
    config = {"model_type": kind, **config}
    for key in ("hidden_size", "patch_size", "image_size", "vocab_size", "initializer_range"):
        if known.get(key) is not None:
            config[key] = known[key]
    if "vocab_size" in config:
        config["tie_word_embeddings"] = bool(known.get("tie_word_embeddings"))
    return with_rope_theta(config)


def check_image_size(folder: Path, image_processor: dict[str, Any], vision: dict[str, Any]) -> None:
    """InputError unless the image processor of `folder` makes images that its tower takes."""
    sides = (image_processor["crop_size"]["height"], image_processor["crop_size"]["width"])
    if vision["model_type"] != "dinov2" and set(sides) != {vision["image_size"]}:  # only DINOv2 resizes its positions
        raise InputError(
            f"The image processor in {folder} makes images of {sides[0]} x {sides[1]}, but its tower takes "
            f"{vision['image_size']} x {vision['image_size']}. Use the image processor that came with the tower."
        )
    if min(sides) < vision["patch_size"]:
        raise InputError(
            f"The image processor in {folder} makes images smaller than one patch of {vision['patch_size']} pixels. "
            "Download the vision tower again."
        )


def projector_shapes(tower: Part, llm: Part) -> dict[str, tuple[int, ...]]:
    """The shapes of LLaVA's projector between two parts, by their names in it."""
    width, dim = tower.config["hidden_size"], llm.config["hidden_size"]
    return {
        "linear_1.weight": (dim, width),
        "linear_1.bias": (dim,),
        "linear_2.weight": (dim, dim),
        "linear_2.bias": (dim,),
    }


def _write_fresh_projector(file: Path, tower: Part, llm: Part, seed: int) -> dict[str, StoredTensor]:
    """A new projector in the language model's dtype."""
    generator = torch.Generator().manual_seed(seed)
    std = llm.config.get("initializer_range", 0.02)
    fresh = {name: torch.zeros(shape) for name, shape in projector_shapes(tower, llm).items()}
    for name in ("linear_1.weight", "linear_2.weight"):
        fresh[name].normal_(0.0, std, generator=generator)
    dtype = DTYPES[llm.tensors[EMBEDDING].dtype]
    save_file({PROJECTOR + name: tensor.to(dtype) for name, tensor in fresh.items()}, file)
    return {tensor.name: tensor for tensor in read_header(file)}


def _read_projector(file: Path, tower: Part, llm: Part) -> dict[str, StoredTensor]:
    found = read_projector(file)
    if norm_of(found):
        raise InputError(
            f"{file} holds a norm beside the projector, but assemble writes a stock LLaVA. Leave out --projector "
            f"here, then convert the result with --projector {file}."
        )
    shapes, found_shapes = projector_shapes(tower, llm), {name: tensor.shape for name, tensor in found.items()}
    if found_shapes != shapes:
        raise InputError(
            f"{file} holds {found_shapes}, but the projector between these two models is {shapes}. "
            "Name the projector that was trained for them, or leave it out."
        )
    return {PROJECTOR + name: found[name] for name in shapes}


def write_weights(
    folder: Path, tower: Part, llm: Part, projector: dict[str, StoredTensor], rows: int, dry_run: bool = False
) -> None:
    """One file, or above 5 GB a shard for tower and projector and one for each file of the language model.

    All bytes are copied as they are and read back; a text table or head with fewer than `rows` rows gets more, the
    mean of its rows. With `dry_run`, holes stand in for the bytes of all but the text table.
    """
    scratch = folder / ".parts"
    scratch.mkdir()
    text = dict(llm.tensors)
    for name in (EMBEDDING, HEAD):
        if name in text and text[name].shape[0] < rows:
            text[name] = _write_padded(scratch / f"{name}.safetensors", text[name], rows)
    groups: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, tensor in text.items():
        groups.setdefault(llm.tensors[name].file, []).append((name, tensor))
    shards = [[*tower.tensors.items(), *projector.items()], *groups.values()]
    files = [folder / f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if sum(tensor.nbytes for shard in shards for _, tensor in shard) <= MAX_SINGLE_FILE:
        shards, files = [[pair for shard in shards for pair in shard]], [folder / SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        write_renamed(file, shard, {EMBEDDING} if dry_run else None)
        if not dry_run:
            check_written(file, shard)
    if len(files) > 1:
        write_index(folder, files)
    for file in scratch.iterdir():
        file.unlink()
    scratch.rmdir()


def _write_padded(path: Path, tensor: StoredTensor, rows: int) -> StoredTensor:
    """`tensor` [V, D] with rows V..rows-1 added, each the mean of its rows; read and written in blocks."""
    vocabulary, dim = tensor.shape
    total = torch.zeros(dim, dtype=torch.float64)
    row_bytes = tensor.nbytes // vocabulary
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        for start in range(0, vocabulary, ROWS):
            block = bytearray(file.read(min(ROWS, vocabulary - start) * row_bytes))
            total += torch.frombuffer(block, dtype=DTYPES[tensor.dtype]).view(-1, dim).double().sum(0)
    mean = (total / vocabulary).to(DTYPES[tensor.dtype])
    tail = mean.view(torch.uint8).numpy().tobytes() * (rows - vocabulary)
    padded = replace(tensor, shape=(rows, dim), nbytes=tensor.nbytes + len(tail))
    with path.open("wb") as out:
        write_header(out, [("padded", padded)])
        copy_bytes(tensor, out)
        out.write(tail)
    return read_header(path)[0]


def check_loads(folder: Path, vision: str, text: str) -> None:
    """Every tensor has its place in the model and every place its tensor; on the meta device, so nothing is read."""
    with quiet_transformers():
        _, info = LlavaForConditionalGeneration.from_pretrained(
            folder, device_map="meta", dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
        )
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if kind.endswith("_keys") and names}
    if wrong:
        listed = "; ".join(
            f"{kind.replace('_', ' ')}: {len(names)}, such as {names[0]}" for kind, names in wrong.items()
        )
        raise InputError(
            f"The weights of {vision} and {text} do not match their config.json ({listed}). Download both again, or "
            "use a model that transformers' LLaVA can hold."
        )
