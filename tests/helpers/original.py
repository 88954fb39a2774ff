"""Tiny LLaVAs in the layout of the original repository, built from parts, and what they compute by hand.

Nothing here uses transformers' LLaVA: the reference is a language model, a CLIP tower and three lines of maths.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, CLIPVisionModel, PreTrainedModel

from tests.helpers import tiny
from tests.helpers.parts import write_vision

SELECT_LAYER = -2
VOCABULARY = 300  # of the sentencepiece model: 3 special tokens, 256 bytes, pieces
TEXT = [
    "USER: what is in the picture ? ASSISTANT: a red cat and a dog",
    "the cat is red",
    "what is a dog in a house ?",
]
MISTRAL, QWEN = "LlavaMistralForCausalLM", "LlavaQwenForCausalLM"
KINDS = {
    "llama": ("llava", "LlavaLlamaForCausalLM"),
    "mistral": ("llava_mistral", MISTRAL),
    "qwen2": ("llava_qwen", QWEN),
}


@dataclass
class Parts:
    """An original LLaVA as modules, and the folders it was written to."""

    folder: Path
    vision: Path
    tower: PreTrainedModel
    projector: nn.Sequential
    llm: PreTrainedModel

    def logits(self, before: list[int], pixels: torch.Tensor, after: list[int], feature: str = "patch"):
        """Logits of one prompt: text, the patches of one image [1, 3, H, W], text."""
        with torch.no_grad():
            states = self.tower(pixels, output_hidden_states=True).hidden_states[SELECT_LAYER]
            states = states[:, 1:] if feature == "patch" else states
            first, second = self.projector[0], self.projector[2]
            hidden = states @ first.weight.T + first.bias
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))  # GELU
            visual = hidden @ second.weight.T + second.bias
            table = self.llm.get_input_embeddings().weight
            spliced = torch.cat([table[before][None], visual, table[after][None]], dim=1)
            return self.llm(inputs_embeds=spliced).logits


def build(
    root: Path,
    kind: str = "llama",
    tied: bool = False,
    layout: str = "bin shards",
    dtype: torch.dtype = torch.float32,
    train_tower: bool = False,
    **fields,
) -> Parts:
    """Write an original LLaVA to root/model and its CLIP tower to root/tower; `fields` change its config.json."""
    folder, vision = root / "model", write_vision(root / "tower")
    folder.mkdir()
    tower = CLIPVisionModel.from_pretrained(vision).eval()
    config = tiny.text_config(kind, tied)
    config.vocab_size, config.pad_token_id = VOCABULARY, 0
    llm = tiny.randomize(AutoModelForCausalLM.from_config(config), seed=1).to(dtype).eval()
    projector = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
    projector = tiny.randomize(projector, seed=2).to(dtype)
    if train_tower:
        tower = tiny.randomize(tower, seed=3).to(dtype)
    tensors = dict(llm.state_dict())
    if tied and layout == "safetensors":
        del tensors["lm_head.weight"]
    tensors |= {f"model.mm_projector.{name}": tensor for name, tensor in projector.state_dict().items()}
    if train_tower:
        states = {
            n if n.startswith("vision_model.") else f"vision_model.{n}": t for n, t in tower.state_dict().items()
        }
        tensors |= {f"model.vision_tower.vision_tower.{name}": tensor for name, tensor in states.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # a buffer that old versions saved
    write_weights(folder, tensors, layout)
    write_config(folder, config, kind, **fields)
    write_slow_tokenizer(folder)
    return Parts(folder, vision, tower, projector, llm)


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], layout: str) -> None:
    """ "bin", "bin shards" (two and an index) or "safetensors"."""
    if layout == "safetensors":
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        return
    if layout == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_config(folder: Path, text_config, kind: str, **fields) -> None:
    """config.json with the fields of liuhaotian/llava-v1.5-7b, in the sizes of `text_config`."""
    model_type, architecture = KINDS[kind]
    content = {
        "_name_or_path": "llava-v1.5-7b", "architectures": [architecture], "bos_token_id": 1, "eos_token_id": 2,
        "freeze_mm_mlp_adapter": False, "freeze_mm_vision_resampler": False, "hidden_act": "silu", "hidden_size": 32,
        "image_aspect_ratio": "square", "initializer_range": 0.02, "intermediate_size": 64, "max_length": 4096,
        "max_position_embeddings": 256, "mm_hidden_size": 16, "mm_projector_type": "mlp2x_gelu",
        "mm_resampler_type": None, "mm_use_im_patch_token": False, "mm_use_im_start_end": False,
        "mm_vision_select_feature": "patch", "mm_vision_select_layer": SELECT_LAYER,
        "mm_vision_tower": "openai/clip-vit-large-patch14-336", "model_type": model_type, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": 0, "pretraining_tp": 1,
        "rms_norm_eps": text_config.rms_norm_eps, "rope_theta": 50_000.0,  # as tiny.text_config has it
        "rope_scaling": tiny.LLAMA3_ROPE if kind == "llama" else None,
        "tie_word_embeddings": text_config.tie_word_embeddings, "torch_dtype": "float16",
        "transformers_version": "4.31.0", "tune_mm_mlp_adapter": False, "tune_mm_vision_resampler": False,
        "unfreeze_mm_vision_tower": False, "use_cache": True, "use_mm_proj": True, "vocab_size": VOCABULARY,
    }  # fmt: skip
    content = {key: value for key, value in (content | fields).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(content, indent=2))


def write_slow_tokenizer(folder: Path, pad: str | None = "<unk>", legacy: bool = False) -> None:
    """A sentencepiece tokenizer with the three files that vicuna's has, and no tokenizer.json."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 30),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=VOCABULARY,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": legacy,
        "model_max_length": 2048, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        **{name: {"__type": "AddedToken", "content": token, **flags} for name, token in special.items()},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    special = {name: {"content": token, **flags} for name, token in special.items()} | (
        {"pad_token": pad} if pad else {}
    )
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


def encode(folder: Path, prompt: str) -> tuple[list[int], list[int]]:
    """The ids before and after `<image>`: each side is a text of its own, as in llava/mm_utils.py."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    before, after = prompt.split("<image>")
    return [1, *pieces.encode(before)], pieces.encode(after)


def pad_to_square(image: Image.Image, mean: list[float]) -> Image.Image:
    """The image in the middle of a square of the mean colour, as in llava/mm_utils.py."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
