"""Checkpoints structured as published ones, with random weights of small width and a small vocabulary.

The files in published/ hold what the originals' JSON files say: every field, with the real sizes and token ids. From
them `write_published` makes a folder of the same file names, fields, shard names, key names and dtype. Smaller are
the widths, layers and the base vocabulary; token ids behind it follow. Images keep their size, so the number of image
tokens is the real one. Two fields are filled in: sizes that the originals leave to their config class's defaults, and
the added tokens of tokenizer_config.json.

Where the facts come from (the originals could not be read themselves):

llava-1.5-7b-hf: config.json from a test of harleyszhang/lite_llama, the same in a log of LLaMA-Factory (June 2024)
    that loads this checkpoint; that log also has the tokenizer files' names, the image processor, the special tokens,
    generation settings, three shards and that no stored weight is left unused (so no buffers). The three numbers in
    processor_config.json and the chat template: huggingface/transformers tests/models/llava/test_processing_llava.py;
    that they were once missing there: huggingface/transformers issue 36002. Rows behind the base vocabulary:
    src/transformers/models/llava/convert_llava_weights_to_hf.py. From memory: chat_template.jinja beside the .json,
    image_token in the tokenizer's files, `legacy`.
llava-interleave-qwen-0.5b-hf: tower, image token, feature layer and strategy, tied head and the padding to 64 from the
    same conversion script; on-disk names from a test of compressed-tensors. From memory: the rest of text_config
    (that of Qwen1.5-0.5B-Chat), processor_config.json, tokenizer settings.
llava-llama-3-8b-v1_1-transformers: config.json as quoted in xzuyn/musubi-tuner hunyuan_model/text_encoder.py; the
    tokenizer's settings and all 259 special tokens as quoted in painebenjamin/taproot; four shards from a
    downloader's list of files; no processor_config.json because InternLM/xtuner's convert_xtuner_weights_to_hf.py ran
    with transformers 4.40, and musubi-tuner brings one of its own. From memory: generation_config.json.
pixtral-12b: text_config, feature layer, strategy, image token, names of the tower's tensors and the kind of tokenizer
    from huggingface/transformers src/transformers/models/pixtral/convert_pixtral_weights_to_hf.py; ids 10, 12 and 13
    and that there is no padding token from tests/models/pixtral/test_processing_pixtral.py; image processor as in a
    test of a Swift reader for the same class, with the sizes of the class's defaults. From memory: vision_config's
    fields, names of the other special tokens, six shards. The chat template behaves as the original (quoted in
    NVIDIA's Cosmos, image_text_tokenizer.py, with the text in "content"; from memory, later also in "text").
llava-v1.6-mistral-7b-hf: config.json as quoted in NVIDIA/TensorRT-LLM tests/unittest/_torch/modeling/
    test_modeling_llava_next.py; processor, image processor, tokens and chat template from notes of
    MouYongli/DeepHallu that print them. From memory: four shards, generation_config.json.
llava-onevision-qwen2-0.5b-ov-hf: the settings of the 7B sibling as copied by a conversion script for LLaVAShield, and
    src/transformers/models/llava_onevision/convert_llava_onevision_weights_to_hf.py. From memory: text_config (that
    of Qwen2-0.5B-Instruct), video_preprocessor_config.json.
vip-llava-7b-hf: src/transformers/models/vipllava/convert_vipllava_weights_to_hf.py and the defaults of its config
    class. From memory: all of the processor's files; that num_additional_image_tokens is missing is an assumption.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.helpers import tiny
from tests.helpers.convert import stored_name
from tests.helpers.published_tokenizers import BASE, write_json, write_tokenizer

FOLDER = Path(__file__).with_name("published")
NAMES = [
    "llava-1.5-7b-hf", "llava-interleave-qwen-0.5b-hf", "llava-llama-3-8b-v1_1-transformers", "pixtral-12b",
    "llava-v1.6-mistral-7b-hf", "llava-onevision-qwen2-0.5b-ov-hf", "vip-llava-7b-hf",
]  # fmt: skip
TOKEN_IDS = {
    "image_token_index", "video_token_index", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size",
}  # fmt: skip


def write_published(name: str, folder: Path) -> Path:
    """Write the shrunk checkpoint `name` (one of NAMES) to `folder`, which is made."""
    spec = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    files, kind = dict(spec["files"]), spec["tokenizer"]
    folder.mkdir(parents=True)
    config = files["config.json"] = shrink_config(files["config.json"], kind)
    files["generation_config.json"] = shrink_ids(files["generation_config.json"], kind)
    if "added_tokens.json" in files:
        files["added_tokens.json"] = {
            token: shrink(number, kind) for token, number in files["added_tokens.json"].items()
        }
    settings = files.pop("tokenizer_config.json")
    for file, content in files.items():
        if isinstance(content, str):
            (folder / file).write_text(content, encoding="utf-8")
        else:
            write_json(folder / file, content)
    vocabulary = write_tokenizer(folder, kind, settings, files.get("added_tokens.json", {}))
    write_weights(folder, config, spec["shards"], vocabulary, shrink(spec["resized_from"], kind))
    return folder


def shrink(number: int, kind: str) -> int:
    """A token id, or a number of tokens: the base vocabulary becomes smaller, what lies behind it follows."""
    published, ours = BASE[kind]
    return number if number < published else number - published + ours


def shrink_ids(content: dict[str, Any], kind: str) -> dict[str, Any]:
    return {key: shrink(value, kind) if key in TOKEN_IDS else value for key, value in content.items()}


def shrink_config(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """Widths, layers and vocabulary of a config.json; every other field stays as it is."""
    text, vision = shrink_ids(content["text_config"], kind), dict(content["vision_config"])
    heads, shared = text.get("num_attention_heads", 32), text.get("num_key_value_heads", 32)  # 32 are Llama's
    grouped = shared < heads
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2 if grouped else 4}
    vision |= sizes | {"num_attention_heads": 2}
    if "vision_feature_layers" in content:
        vision["num_hidden_layers"] = 10  # the least that has a layer -11
    if "head_dim" in text:
        text |= {"hidden_size": 40, "head_dim": 8}  # width is not heads x head_dim, as in Mistral Nemo
    if "head_dim" in vision:
        vision["head_dim"] = 16
    return shrink_ids(content, kind) | {"text_config": text, "vision_config": vision}


def write_weights(folder: Path, config: dict[str, Any], shards: int, vocabulary: dict[str, int], first: int) -> None:
    """Random weights in the published dtype under the published names, cut into shards in the model's order."""
    torch.manual_seed(0)
    model_class = getattr(transformers, config["architectures"][0])
    model = tiny.randomize(model_class(model_class.config_class.from_dict(config)))
    for matrix in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        fill_rows(matrix.data, vocabulary, first)
    model.to(getattr(torch, config["torch_dtype"]))
    tensors = {published_name(name, config): tensor for name, tensor in model.state_dict().items()}
    if config["text_config"].get("tie_word_embeddings"):
        del tensors["language_model.lm_head.weight"]
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts = [{} for _ in range(shards)]
    for number, (name, tensor) in enumerate(tensors.items()):
        parts[number * shards // len(tensors)][name] = tensor.contiguous()
    if shards == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def fill_rows(matrix: torch.Tensor, vocabulary: dict[str, int], first: int) -> None:
    """Rows from `first` on lie about the mean, as the conversions draw them; Llama-3's reserved rows are zero."""
    mean, rest = matrix[:first].mean(0), matrix[first:]
    matrix[first:] = mean + 1e-5**0.5 * matrix[:first].std(0) * torch.randn(rest.shape)
    matrix[[number for token, number in vocabulary.items() if "reserved_special" in token]] = 0


def published_name(name: str, config: dict[str, Any]) -> str:
    name = stored_name(name, "old")
    if config["vision_config"]["model_type"] == "pixtral":
        name = name.replace("vision_tower.vision_model.", "vision_tower.")
    return name
