"""Parts for assembling: tiny random towers and language models with their image processors and tokenizers."""

import json

from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionModel,
    Dinov2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipVisionModel,
)

from tests.helpers import tiny

TOWERS = {"clip": CLIPVisionModel, "siglip": SiglipVisionModel, "dinov2": Dinov2Model}
TEXT_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
TEXT_TOWER |= dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)


def write_vision(folder, tower="clip"):
    """A tower of 28 pixels and patch 14, or with "+text" a whole CLIP or SigLIP."""
    family = tower.removesuffix("+text")
    config = tiny.vision_config(family)
    if tower == family:
        model = TOWERS[family](config)
    elif family == "clip":
        model = CLIPModel(CLIPConfig(vision_config=config.to_dict(), text_config=TEXT_TOWER, projection_dim=8))
    else:
        model = SiglipModel(SiglipConfig(vision_config=config.to_dict(), text_config=TEXT_TOWER))
    tiny.randomize(model).save_pretrained(folder)
    if family == "siglip":
        SiglipImageProcessor(size={"height": 28, "width": 28}).save_pretrained(folder)
    else:
        square = {"height": 28, "width": 28}
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=square).save_pretrained(folder)
    return folder


def write_text(
    folder, family="llama", tied=False, vocabulary=64, shard="5GB", template=None, image_token=False, width=32
):
    """A language model and a tokenizer of 16 words (17 with `<image>`)."""
    config = tiny.text_config(family, tied)
    config.vocab_size, config.hidden_size, config.head_dim = vocabulary, width, width // 4
    model = tiny.randomize(AutoModelForCausalLM.from_config(config), seed=1)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer = tiny.processor().tokenizer
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if not image_token:
        backend["added_tokens"] = [token for token in backend["added_tokens"] if token["content"] != "<image>"]
        del backend["model"]["vocab"]["<image>"]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    settings |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
