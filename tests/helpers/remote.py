"""A small model that comes with its own code, written into a folder for trust_remote_code."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers import tiny
from tests.helpers.vlms import IMAGE, by_hand, noise, text

CODE = Path(__file__).parent / "remote_vlm"
# what stands beside the remote model's code, as published models of its kind have it: one id for the whole image
PROCESSOR = """
from transformers import ProcessorMixin


class RemoteProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "CLIPImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor, tokenizer, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, text, images=None, padding=True, return_tensors="pt"):
        if images is None:
            raise ValueError("Nothing to see.")
        inputs = self.tokenizer(text, return_tensors=return_tensors)
        place = inputs["input_ids"] == self.tokenizer.convert_tokens_to_ids("<image>")
        inputs["input_ids"] = inputs["input_ids"].masked_fill(place, -200)
        inputs["pixel_values"] = self.image_processor(images, return_tensors=return_tensors)["pixel_values"]
        return inputs
"""


def write_remote_vlm(folder, expands=False):
    """A folder with a model whose code is beside it; returns inputs with an image of 4 visual tokens.

    If the model `expands`, one id, which the embedding table does not have, stands for all of them.
    """
    folder.mkdir(parents=True)
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    image = -200 if expands else IMAGE
    fields = dict(model_type="remote_vlm", text_config=text("llama"), image_token_id=image, expands=expands)
    code = {"AutoConfig": "configuration_remote_vlm.RemoteVlmConfig"}
    code["AutoModelForImageTextToText"] = "modeling_remote_vlm.RemoteVlm"
    (folder / "config.json").write_text(json.dumps({**fields, "auto_map": code}))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, trust_remote_code=True)
    tiny.randomize(model).save_pretrained(folder)
    inputs = by_hand([1, 14], 1 if expands else 4, [], pixel_values=noise(1, 3, 28, 28))
    return {**inputs, "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, image)}


def write_remote(folder, change=lambda code: code, processor=PROCESSOR):
    """The remote model in which one id stands for the whole image, with a processor of its own."""
    write_remote_vlm(folder, expands=True)
    code = folder / "modeling_remote_vlm.py"
    code.write_text(change(code.read_text()))
    tiny.processor().save_pretrained(folder)
    (folder / "processing_remote_vlm.py").write_text(processor)
    name = {"AutoProcessor": "processing_remote_vlm.RemoteProcessor"}
    content = {"processor_class": "RemoteProcessor", "auto_map": name}
    config = folder / "processor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | content))
    return folder
