"""Tiny random LLaVAs, the same in every transformers version: towers, language models, processor, photo.

Imports transformers only, so that processes without the package can use it too.
"""

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    Dinov2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
    VipLlavaForConditionalGeneration,
)

WORDS = ["what", "is", "in", "the", "picture", "?", "a", "cat", "dog", "red", "USER:", "ASSISTANT:"]
IMAGE_TOKEN_ID = len(WORDS) + 4
VOCABULARY = 64  # the table is padded beyond the tokenizer, as in published checkpoints
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% else %}{{ message['content'][0]['text'] }} </s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# a rotary base and scaling that are nobody's default, so that a reader that ignores them is seen
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VISION_CONFIGS = {
    "clip": lambda **sizes: CLIPVisionConfig(image_size=28, patch_size=14, **sizes),
    "siglip": lambda **sizes: SiglipVisionConfig(image_size=28, patch_size=14, **sizes),
    "dinov2": lambda hidden_size, intermediate_size, **sizes: Dinov2Config(
        image_size=28, patch_size=14, hidden_size=hidden_size, mlp_ratio=intermediate_size // hidden_size, **sizes
    ),
}
TEXT_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}
STOCK = {
    "llava": LlavaForConditionalGeneration,
    "llava_next": LlavaNextForConditionalGeneration,
    "llava_onevision": LlavaOnevisionForConditionalGeneration,
    "vipllava": VipLlavaForConditionalGeneration,
}
GRIDS = [[28, 56], [56, 28], [56, 56]]
# what the configuration of a kind has beyond LLaVA's
KIND_FIELDS = {
    "llava": {},
    "llava_next": {"image_grid_pinpoints": GRIDS},
    "llava_onevision": {"image_grid_pinpoints": GRIDS, "video_token_index": IMAGE_TOKEN_ID + 1},
    "vipllava": {"vision_feature_layers": [-2, -3, 1]},  # 4.57's name; transformers 5 reads it too
}


def vision_config(tower="clip"):
    return VISION_CONFIGS[tower](hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2)


def text_config(family="llama", tied=False):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    rope = {"rope_theta": 50_000.0}
    if family == "llama":
        rope["rope_scaling"] = dict(LLAMA3_ROPE)
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return TEXT_CONFIGS[family](**sizes, **heads, **rope, **tokens, tie_word_embeddings=tied)


def llava_config(cls=LlavaConfig, tower="clip", family="llama", tied=False, **fields):
    """A configuration of the class `cls`, of any kind in STOCK, norm-aligned or not."""
    defaults = dict(
        vision_config=vision_config(tower),
        text_config=text_config(family, tied),
        image_token_index=IMAGE_TOKEN_ID,
        image_seq_length=4,
        vision_feature_select_strategy="full" if tower == "siglip" else "default",
        tie_word_embeddings=tied,
        **KIND_FIELDS[cls.model_type.removesuffix("_norm_align")],
    )
    return cls(**{**defaults, **fields})


def randomize(model, seed=0):
    """Give every tensor values that transformers' own start does not have: no zero biases, no unit norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.add_(noise.to(parameter.dtype))
    return model


def stock_llava(tower="clip", family="llama", tied=False, seed=0, kind="llava"):
    torch.manual_seed(seed)
    cls = STOCK[kind]
    return randomize(cls(llava_config(cls.config_class, tower, family, tied)), seed).eval()


def processor(tower="clip", kind="llava"):
    """LlavaProcessor, or LlavaNextProcessor; LlavaOnevisionProcessor needs torchvision in transformers 5."""
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS, "<image>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        model_input_names=["input_ids", "attention_mask"],
    )
    sizes = dict(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    tiled = kind == "llava_next"
    image_processor = (
        LlavaNextImageProcessor(**sizes, image_grid_pinpoints=GRIDS) if tiled else CLIPImageProcessor(**sizes)
    )
    return (LlavaNextProcessor if tiled else LlavaProcessor)(
        image_processor=image_processor,
        tokenizer=fast,
        patch_size=14,
        vision_feature_select_strategy="full" if tower == "siglip" else "default",
        num_additional_image_tokens=0 if tower == "siglip" else 1,
        chat_template=TEMPLATE,
    )


def photo(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 52, 3), dtype=np.uint8))


def prompt_with_image(llava_processor, seed=0):
    text = "USER: <image> what is in the picture ? ASSISTANT:"
    return llava_processor(text=text, images=photo(seed), return_tensors="pt")


def tiled_inputs(seed=0):
    """What a processor of LLaVA-NeXT or LLaVA-OneVision gives for an image of 28 x 56 px, in three tiles.

    Image tokens: 4 of the whole image, then 2 rows of 4 patches, each row followed by image_newline.
    """
    pixels = torch.randn(1, 3, 3, 28, 28, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[1, 14, *[IMAGE_TOKEN_ID] * 14, 4, 5, 6, 7, 8, 9, 15]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": pixels,
        "image_sizes": torch.tensor([[28, 56]]),
    }


def inputs(kind="llava", tower="clip"):
    """A prompt with an image for a tiny model of `kind`."""
    return tiled_inputs() if kind == "llava_onevision" else prompt_with_image(processor(tower, kind))
