"""A small model that comes with its own code, written into a folder for trust_remote_code."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.helpers import tiny
from tests.helpers.vlms import IMAGE, by_hand, noise, text

CODE = Path(__file__).parent / "remote_vlm"


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
