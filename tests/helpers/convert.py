"""Tiny stock LLaVA checkpoints in every key layout, written file by file as the Hub has them."""

import json
import shutil
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from tests.helpers import tiny

IMAGE, PATCH = 28, 14
HIDDEN, VOCAB = 32, 300
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=PATCH)
TEXT = dict(
    hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, vocab_size=VOCAB, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
VISION_TYPES = {"clip": "clip_vision_model", "siglip": "siglip_vision_model", "dinov2": "dinov2"}


def tiny_config(vision: str = "clip", text: str = "llama", tied: bool = False, **changes) -> LlavaConfig:
    """A LLaVA of about 60,000 weights; `text` is any model type of a causal LM."""
    return LlavaConfig(
        vision_config={"model_type": VISION_TYPES[vision], "image_size": IMAGE, **VISION},
        text_config={"model_type": text, "tie_word_embeddings": tied, **TEXT},
        vision_feature_select_strategy="full" if vision == "siglip" else "default",
        image_token_index=VOCAB - 1,
        tie_word_embeddings=tied,
        **changes,
    )


def tiny_llava(
    folder: Path, layout: str = "old", shards: int = 1, dtype=torch.float32, processor: bool = True, **kind
) -> Path:
    """Write a stock LLaVA with random weights into `folder`, its keys in the "old" or the "new" layout."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    config = tiny_config(**kind)
    model = tiny.randomize(LlavaForConditionalGeneration(config)).to(dtype).eval()
    model.get_input_embeddings().weight.data[0] = 0  # an unused row, as Llama 3 has many
    tensors = stored_tensors(model, layout, folder / "scratch")
    if config.tie_word_embeddings:
        tensors.pop(stored_name("lm_head.weight", layout), None)
    write_tensors(folder, tensors, shards)
    content = config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"], "torch_dtype": str(dtype)[6:]}
    content["house_note"] = {"kept": True}  # a field that transformers does not know
    write_json(folder / "config.json", content)
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    if processor:
        write_processor(folder)
    return folder


def stored_tensors(model: torch.nn.Module, layout: str, scratch: Path) -> dict[str, torch.Tensor]:
    """The tensors of `model` under the names of a published checkpoint, whatever save_pretrained writes today."""
    model.save_pretrained(scratch)
    tensors = {stored_name(name, layout): tensor for name, tensor in load_file(scratch / "model.safetensors").items()}
    shutil.rmtree(scratch)
    return tensors


def stored_name(name: str, layout: str) -> str:
    """A name that transformers 4.57 or 5 saved, in the "old" or the "new" layout."""
    name = name.removeprefix("model.").replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "language_model.")
    level = "vision_tower.vision_model."  # of CLIP and SigLIP; transformers 5 leaves it out
    if name.startswith("vision_tower.") and not name.startswith((level, "vision_tower.encoder.layer.", *DINOV2_NAMES)):
        name = level + name.removeprefix("vision_tower.")
    if layout == "new":
        return name if name.startswith("lm_head") else f"model.{name}"
    return (
        f"language_model.{name}"
        if name.startswith("lm_head")
        else name.replace("language_model.", "language_model.model.")
    )


DINOV2_NAMES = (
    "vision_tower.layernorm.", "vision_tower.embeddings.cls_token", "vision_tower.embeddings.mask_token",
    "vision_tower.embeddings.position_embeddings", "vision_tower.embeddings.patch_embeddings.",
)  # fmt: skip


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """One model.safetensors, or `shards` files and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map, names = {}, sorted(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 0}, "weight_map": weight_map})


def write_processor(folder: Path) -> None:
    """Tokenizer, image processor and a chat template as separate files, with no LLaVA field in any of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<extra{number}>" for number in range(VOCAB - 1 - len(vocabulary))] + ["<image>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
    )
    assert tokenizer.convert_tokens_to_ids("<image>") == VOCAB - 1
    tokenizer.save_pretrained(folder)
    image_processor = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": IMAGE},
        "resample": 3,
        "do_center_crop": True, "crop_size": {"height": IMAGE, "width": IMAGE}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "processor_class": "LlavaProcessor",
    }  # fmt: skip
    write_json(folder / "preprocessor_config.json", image_processor)
    template = (
        "{% for message in messages %}{{ message['role'] | upper }}: {% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    write_json(folder / "chat_template.json", {"chat_template": template})


def write_photos(folder: Path) -> list[Path]:
    """Two images of noise."""
    folder.mkdir()
    for seed in range(2):
        pixels = torch.randint(0, 256, (40, 52, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{seed}.png")
    return sorted(folder.iterdir())


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
