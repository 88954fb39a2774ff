"""assemble: what cannot become a LLaVA is one clear error, and nothing is written."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.assemble import assemble
from tests.helpers.parts import TEXT_TOWER, write_text, write_vision


def edit_json(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def misname(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_tensor(folder, name):
    weights = load_file(folder / "model.safetensors")
    del weights[next(key for key in weights if name in key)]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def replace_model(folder, model):
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


BAD = {
    "vision no .bin": ("vision/pytorch_model.bin is not in the zip format", lambda v, t: misname(v)),
    "text no .bin": ("text/pytorch_model.bin is not in the zip format", lambda v, t: misname(t)),
    "text quantised": (
        "quantised .gptq",
        lambda v, t: edit_json(t / "config.json", quantization_config={"quant_method": "gptq"}),
    ),
    "text a BERT": (
        "type bert",
        lambda v, t: replace_model(t, BertModel(BertConfig(**{**TEXT_TOWER, "bos_token_id": None}))),
    ),
    "vision a ResNet": (
        "type resnet",
        lambda v, t: replace_model(v, ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))),
    ),
    "vision empty": ("empty", lambda v, t: [path.unlink() for path in v.iterdir()]),
    "text without config": ("no config.json", lambda v, t: (t / "config.json").unlink()),
    "config broken": ("broken", lambda v, t: (t / "config.json").write_text("{")),
    "unknown text type": ("transformers cannot read", lambda v, t: edit_json(t / "config.json", model_type="nobody")),
    "text without tokenizer": ("no tokenizer", lambda v, t: [path.unlink() for path in t.glob("tokenizer*")]),
    "tokenizer broken": ("tokenizer.json is broken", lambda v, t: (t / "tokenizer.json").write_text("{}")),
    "vision without image processor": (
        "preprocessor_config.json",
        lambda v, t: (v / "preprocessor_config.json").unlink(),
    ),
    "image size of another tower": ("56 x 56", lambda v, t: edit_json(v / "preprocessor_config.json", crop_size=56)),
    "vision cut": ("cut or damaged", lambda v, t: cut(v)),
    "text cut": ("cut or damaged", lambda v, t: cut(t)),
    "text tensor missing": ("missing keys: 1", lambda v, t: drop_tensor(t, "layers.1.mlp.up_proj")),
    "vision tensor missing": ("missing keys: 1", lambda v, t: drop_tensor(v, "layers.2.mlp.fc1.weight")),
    "head missing": ("no lm_head.weight", lambda v, t: drop_tensor(t, "lm_head")),
    "other sizes in the config": ("mismatched", lambda v, t: edit_json(t / "config.json", intermediate_size=96)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parts_are_refused_and_nothing_is_written(tmp_path, case):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text")
    message, damage = BAD[case]
    damage(vision, text)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        assemble(tmp_path / "llava", str(vision), str(text))
    assert sorted(tmp_path.rglob("*")) == before


def test_bad_projectors_and_targets_are_refused(tmp_path):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text")
    file = tmp_path / "projector.safetensors"
    with pytest.raises(InputError, match="missing"):
        assemble(tmp_path / "llava", str(vision), str(text), file)
    shapes = {"linear_1.weight": (3, 3), "linear_1.bias": (3,), "linear_2.weight": (3, 3), "linear_2.bias": (3,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, file)
    with pytest.raises(InputError, match=r"linear_1.weight.*\(3, 3\)"):
        assemble(tmp_path / "llava", str(vision), str(text), file)
    file.write_text("not safetensors")
    with pytest.raises(InputError, match="cut or damaged"):
        assemble(tmp_path / "llava", str(vision), str(text), file)
    with pytest.raises(InputError, match="not empty"):
        assemble(text, str(vision), str(text))
    with pytest.raises(InputError, match="overlap"):
        assemble(text, str(vision), str(text), overwrite=True)
    assert not (tmp_path / "llava").exists() and (text / "config.json").is_file()
    shutil.rmtree(vision)
    with pytest.raises(InputError, match="no folder"):
        assemble(tmp_path / "llava", str(vision), str(text))
