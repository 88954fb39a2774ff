"""Tiny random models of many vision-language families, each with model inputs for one image: VLMS.

The inputs come from the family's processor where that can be built without torchvision; elsewhere a comment says why
not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

from llava_norm_align.modeling.families import FAMILIES
from tests.helpers import tiny

TRANSFORMERS_5 = Version(transformers.__version__) >= Version("5")
D, VOCABULARY = 32, 64
SPECIAL = 4 + len(tiny.WORDS)  # the id of a tokenizer's first special token
IMAGE = SPECIAL
QUESTION = "what is in the picture ? ASSISTANT:"
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=D, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
MROPE = dict(rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]}, rope_theta=10_000.0)


@dataclass(frozen=True)
class Vlm:
    """A family, and what a diagnosis of its tiny model must find."""

    build: Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]  # a model and its inputs
    projector: str  # its name in the model
    last: tuple[str, ...]  # the parameters of the projector that scale its output
    visual: int  # visual tokens
    features: int  # vectors that the projector is given
    placeholder: int = IMAGE
    newlines: tuple[int, ...] = ()  # which of the placeholders are image_newline rows
    norm_follows: bool = False  # a norm in the projector comes after `last`
    replaced: tuple[int, ...] = ()  # ids that are no placeholders, but whose embeddings the model replaces
    adds: tuple[int, ...] = ()  # decoder layers after which visual features are added (DeepStack)
    since_5: bool = False  # transformers 4.57 does not have it


def text(model_type, **fields):
    return {"model_type": model_type, **TEXT, **fields}


def tower(model_type="siglip_vision_model", image_size=56, **fields):
    """A vision transformer that sees `image_size` px in patches of 14 px."""
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return {"model_type": model_type, "image_size": image_size, "patch_size": 14, **sizes, **fields}


def random_model(config, **fields):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**fields)
    return tiny.randomize(AutoModelForImageTextToText.from_config(config)).eval()


def tokenizer(*specials, cls=PreTrainedTokenizerFast, **named):
    """One word, one token; the special tokens have the ids SPECIAL, SPECIAL + 1, ...; `named` are its attributes."""
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *tiny.WORDS, *specials])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(specials))
    return cls(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"], extra_special_tokens=named,
    )  # fmt: skip


def pil(name, **fields):
    """An image processor of transformers; 5 has one without torchvision under a name of its own."""
    return getattr(transformers, f"{name}Pil" if TRANSFORMERS_5 else name)(**fields)


def square(size):
    return {"height": size, "width": size}


def processed(processor, prompt):
    return dict(processor(text=prompt, images=[tiny.photo()], return_tensors="pt"))


def by_hand(before, count, after, **others):
    """Ids with `count` image tokens, all of them attended to, beside `others`."""
    ids = torch.tensor([[*before, *[IMAGE] * count, *after, 4, 5, 6, 7, 8, 9, 15]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **others}


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def llava(kind, aligned=False):
    # by hand: LlavaOnevisionProcessor needs a video processor, which needs torchvision
    inputs = tiny.tiled_inputs(seed=1) if kind == "llava_onevision" else tiny.inputs(kind)
    if not aligned:
        return tiny.stock_llava(kind=kind), inputs
    torch.manual_seed(0)
    config = tiny.llava_config(FAMILIES[kind].config_class, norm_align_target=1.75)
    return tiny.randomize(FAMILIES[kind](config)).eval(), inputs


def grid(image_processor, **sizes):
    """Inputs of the families that follow Qwen2-VL: 32 x 48 px in patches of 8 px, four of which are one token.

    The image processor is real, the ids are not: their processors need a video processor, which needs torchvision.
    """
    image = dict(pil(image_processor, **sizes, patch_size=8)(images=[tiny.photo()], return_tensors="pt"))
    assert image["image_grid_thw"].tolist() == [[1, 4, 6]]
    inputs = by_hand([14, SPECIAL + 2], 6, [SPECIAL + 3], **image)
    if TRANSFORMERS_5:  # 5's processors give it
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    return inputs


def qwen(config, text_type, **vision):
    ids = dict(video_token_id=SPECIAL + 1, vision_start_token_id=SPECIAL + 2, vision_end_token_id=SPECIAL + 3)
    vision = dict(depth=3, num_heads=2, patch_size=8, **vision)
    model = random_model(
        config, text_config=text(text_type, **MROPE), vision_config=vision, image_token_id=IMAGE, **ids
    )
    return model, grid("Qwen2VLImageProcessor", min_pixels=256, max_pixels=4096)  # 4.57 ignores size


def qwen2_vl():
    return qwen("Qwen2VLConfig", "qwen2_vl_text", embed_dim=16, hidden_size=D, mlp_ratio=2)


def qwen2_5_vl():
    sizes = dict(hidden_size=16, out_hidden_size=D, intermediate_size=32)
    return qwen("Qwen2_5_VLConfig", "qwen2_5_vl_text", **sizes, window_size=16, fullatt_block_indexes=[2])


def qwen3_vl():
    sizes = dict(hidden_size=16, out_hidden_size=D, intermediate_size=32, num_position_embeddings=16)
    return qwen("Qwen3VLConfig", "qwen3_vl_text", **sizes, deepstack_visual_indexes=[0, 1])


def glm4v():
    ids = dict(image_start_token_id=SPECIAL + 2, image_end_token_id=SPECIAL + 3)
    ids |= dict(video_token_id=SPECIAL + 1, video_start_token_id=SPECIAL + 4, video_end_token_id=SPECIAL + 5)
    vision = dict(depth=2, hidden_size=16, out_hidden_size=D, intermediate_size=32, num_heads=2, image_size=32)
    model = random_model(
        "Glm4vConfig",
        text_config=text("glm4v_text", partial_rotary_factor=1.0, **MROPE),
        vision_config={**vision, "patch_size": 8},
        image_token_id=IMAGE,
        **ids,
    )
    return model, grid("Glm4vImageProcessor", size={"shortest_edge": 256, "longest_edge": 4096})


def internvl():
    model = random_model(
        "InternVLConfig", text_config=text("qwen2"), vision_config=tower("internvl_vision"), image_token_id=IMAGE,
        image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    # by hand: its processor needs a video processor, which needs torchvision
    return model, by_hand([14], 2 * 4, [], pixel_values=noise(2, 3, 56, 56))


def idefics2():
    latents = dict(hidden_size=D, resampler_n_latents=3, resampler_depth=1)
    latents |= dict(resampler_n_heads=4, resampler_head_dim=8, num_key_value_heads=2)
    model = random_model(
        "Idefics2Config", text_config=text("mistral"), vision_config=tower("idefics2_vision", 28),
        perceiver_config=latents, image_token_id=IMAGE,
    )  # fmt: skip
    sizes = dict(do_image_splitting=False, size={"shortest_edge": 28, "longest_edge": 28})
    processor = transformers.Idefics2Processor(
        pil("Idefics2ImageProcessor", **sizes),
        tokenizer("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
        image_seq_len=3,
    )
    return model, processed(processor, f"<s> USER: <image> {QUESTION}")


def idefics3(config="Idefics3Config", vision="idefics3_vision"):
    """112 px in four tiles of 56 px and the whole image, each 4 tokens."""
    model = random_model(
        config, text_config=text("llama"), vision_config=tower(vision), image_token_id=IMAGE, pad_token_id=0
    )
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    specials = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *tiles]
    processor = transformers.Idefics3Processor(
        pil("Idefics3ImageProcessor", size={"longest_edge": 112}, max_image_size={"longest_edge": 56}),
        tokenizer(*specials),
        image_seq_len=4,
    )
    return model, processed(processor, f"<s> USER: <image> {QUESTION}")


def smolvlm():
    # Idefics3's processor: SmolVLM's own needs torchvision and num2words, and gives the same for an image
    return idefics3("SmolVLMConfig", "smolvlm_vision")


def gemma3():
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model = random_model(
        "Gemma3Config", text_config=text("gemma3_text", sliding_window=8, layer_types=layer_types),
        vision_config=tower(), mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=SPECIAL + 1,
        eoi_token_index=SPECIAL + 2,
    )  # fmt: skip
    named = dict(image_token="<image>", boi_token="<start>", eoi_token="<end>")
    processor = transformers.Gemma3Processor(
        pil("Gemma3ImageProcessor", size=square(56)),
        tokenizer("<image>", "<start>", "<end>", **named),
        image_seq_length=4,
    )
    return model, processed(processor, f"<s> USER: <start> {QUESTION}")


def paligemma():
    model = random_model(
        "PaliGemmaConfig", text_config=text("gemma"), vision_config=tower(image_size=28, vision_use_head=False),
        projection_dim=D, hidden_size=D, image_token_index=IMAGE,
    )  # fmt: skip
    image_processor = pil("SiglipImageProcessor", size=square(28))
    image_processor.image_seq_length = 4
    words = tokenizer("<image>", cls=transformers.GemmaTokenizerFast, image_token="<image>")  # 4.57 asks for Gemma's
    processor = transformers.PaliGemmaProcessor(image_processor, words)
    # numpy first: with tensors, transformers 5's processor calls numpy in a way that numpy deprecates
    arrays = processor(text=f"<image> {QUESTION}", images=[tiny.photo()], return_tensors="np")
    arrays.pop("labels", None)  # transformers 5's: all of them -100
    return model, {name: torch.as_tensor(array) for name, array in arrays.items()}


def mistral3():
    model = random_model(
        "Mistral3Config", text_config=text("mistral"), vision_config=tower("pixtral", head_dim=8),
        image_token_index=IMAGE,
    )  # fmt: skip
    # by hand: its processor needs torchvision in transformers 5. Each of two rows of two tokens has a token at its end
    ids = [1, 14, IMAGE, IMAGE, SPECIAL + 1], 2, [SPECIAL + 2]
    return model, by_hand(*ids, pixel_values=noise(1, 3, 56, 56), image_sizes=torch.tensor([[56, 56]]))


def aya_vision():
    """Two tiles and the whole image, each 4 tokens."""
    model = random_model(
        "AyaVisionConfig", text_config=text("cohere2", sliding_window=8), vision_config=tower(vision_use_head=False),
        image_token_index=IMAGE, alignment_intermediate_size=64,
    )  # fmt: skip
    specials = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_1", "TILE_2", "TILE_GLOBAL", "<image>"]
    processor = transformers.AyaVisionProcessor(
        pil("GotOcr2ImageProcessor", size=square(56), crop_to_patches=True, min_patches=2, max_patches=2),
        tokenizer(*specials),
        patch_size=14,
        img_size=56,
        downsample_factor=2,
    )
    return model, processed(processor, f"<s> USER: <image> {QUESTION}")


def cohere2_vision():
    model = random_model(
        "Cohere2VisionConfig", text_config=text("cohere2", sliding_window=8),
        vision_config=tower(vision_use_head=False), image_token_id=IMAGE, alignment_intermediate_size=64,
    )  # fmt: skip
    # by hand: its image processor needs torchvision
    return model, by_hand([1, 14], 2 * 4, [], pixel_values=noise(2, 3, 56, 56))


def ovis2():
    """A visual vocabulary of 17 words, the last five of which are the markers around an image."""
    markers = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    model = random_model(
        "Ovis2Config", text_config=text("qwen2"), vocab_size=VOCABULARY, hidden_size=D, image_token_id=IMAGE,
        vision_config=tower("ovis2_vision", 28, vocab_size=17, num_visual_indicator_tokens=5),
        visual_indicator_token_ids=[SPECIAL + 1 + number for number in range(5)],
    )  # fmt: skip
    processor = transformers.Ovis2Processor(
        pil("Ovis2ImageProcessor", size=square(28)),
        tokenizer("<IMG_ATOM>", *markers, "<image>"),
        image_seq_length=4,
    )
    return model, processed(processor, f"USER: <image> {QUESTION}")


def deepseek_vl():
    model = random_model(
        "DeepseekVLConfig", text_config=text("llama"), vision_config=tower(image_size=28), image_token_id=IMAGE
    )
    processor = transformers.DeepseekVLProcessor(
        pil("DeepseekVLImageProcessor", size=square(28)),
        tokenizer("<image>", image_token="<image>"),
        num_image_tokens=4,
    )
    return model, processed(processor, f"<s> USER: <image> {QUESTION}")


def fast_vlm():
    # its tower needs timm, which needs torchvision: ConvNeXt V2 gives features of the same kind [images, D, h, w].
    # by hand, as a tower of other sizes has no processor
    stages = dict(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], hidden_size=16, image_size=64)
    model = random_model(
        "FastVlmConfig", text_config=text("qwen2"), vision_config={"model_type": "convnextv2", **stages},
        image_token_index=IMAGE,
    )  # fmt: skip
    return model, by_hand([14], 4, [], pixel_values=noise(1, 3, 64, 64))


def mllama():
    """Reads the image through cross-attention in layer 1: to be refused."""
    vision = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=2)
    vision |= dict(image_size=28, patch_size=14, vision_output_dim=32, intermediate_layers_indices=[0])
    rope = {"rope_scaling": {"rope_type": "default"}}
    model = random_model(
        "MllamaConfig", text_config=text("mllama_text_model", cross_attention_layers=[1], **rope),
        vision_config=vision, image_token_index=IMAGE,
    )  # fmt: skip
    inputs = by_hand([1, 14], 1, [], pixel_values=noise(1, 1, 4, 3, 28, 28))
    inputs |= dict(aspect_ratio_ids=torch.ones(1, 1, dtype=torch.long), aspect_ratio_mask=torch.ones(1, 1, 4).long())
    return model, {**inputs, "cross_attention_mask": torch.ones(1, inputs["input_ids"].shape[1], 1, 4).long()}


LINEAR_2 = ("linear_2.weight", "linear_2.bias")
MERGER = ("mlp.2.weight", "mlp.2.bias")
PROJECTOR, VISUAL, CONNECTOR = "model.multi_modal_projector", "model.visual.merger", "model.connector"
# image_newline ends each of 4 rows of 4 tokens that follow 4 of the whole image, or 2 rows
NEXT, ONEVISION = (8, 13, 18, 23), (8, 13)
VLMS = {
    "llava": Vlm(functools.partial(llava, "llava"), PROJECTOR, LINEAR_2, 4, 4),
    "llava_next": Vlm(functools.partial(llava, "llava_next"), PROJECTOR, LINEAR_2, 20, 20, newlines=NEXT),
    "llava_onevision": Vlm(
        functools.partial(llava, "llava_onevision"), PROJECTOR, LINEAR_2, 12, 12, newlines=ONEVISION
    ),
    "vipllava": Vlm(functools.partial(llava, "vipllava"), PROJECTOR, LINEAR_2, 4, 4),
    "llava_norm_align": Vlm(
        functools.partial(llava, "llava", aligned=True), PROJECTOR, LINEAR_2, 4, 4, norm_follows=True
    ),
    "llava_next_norm_align": Vlm(
        functools.partial(llava, "llava_next", aligned=True),
        PROJECTOR,
        LINEAR_2,
        20,
        20,
        newlines=NEXT,
        norm_follows=True,
    ),
    "qwen2_vl": Vlm(qwen2_vl, VISUAL, MERGER, 6, 24),
    "qwen2_5_vl": Vlm(qwen2_5_vl, VISUAL, MERGER, 6, 24),
    "qwen3_vl": Vlm(qwen3_vl, VISUAL, ("linear_fc2.weight", "linear_fc2.bias"), 6, 24, adds=(0, 1)),
    "glm4v": Vlm(glm4v, VISUAL, ("down_proj.weight",), 6, 6),
    "internvl": Vlm(internvl, PROJECTOR, LINEAR_2, 8, 8),
    "idefics2": Vlm(idefics2, CONNECTOR, ("modality_projection.down_proj.weight",), 3, 4, norm_follows=True),
    "idefics3": Vlm(idefics3, CONNECTOR, ("modality_projection.proj.weight",), 20, 80),
    "smolvlm": Vlm(smolvlm, CONNECTOR, ("modality_projection.proj.weight",), 20, 80),
    "gemma3": Vlm(gemma3, PROJECTOR, ("mm_input_projection_weight",), 4, 16),
    "paligemma": Vlm(paligemma, PROJECTOR, ("linear.weight", "linear.bias"), 4, 4),
    "mistral3": Vlm(mistral3, PROJECTOR, ("linear_2.weight",), 4, 16),
    "aya_vision": Vlm(aya_vision, PROJECTOR, LINEAR_2, 12, 48),
    "cohere2_vision": Vlm(cohere2_vision, PROJECTOR, LINEAR_2, 8, 32),
    "ovis2": Vlm(
        ovis2, "model.visual_embeddings_table", ("weight",), 4, 4, replaced=(SPECIAL + 1, SPECIAL + 2, SPECIAL + 5)
    ),
    "deepseek_vl": Vlm(deepseek_vl, "model.aligner", ("linear2.weight", "linear2.bias"), 4, 4),
    "fast_vlm": Vlm(fast_vlm, PROJECTOR, LINEAR_2, 4, 4, since_5=True),
}
