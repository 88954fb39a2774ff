"""The original layout: what the stock class cannot compute is one clear error, and nothing is written."""

import json
import sys

import pytest
import torch

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.original import is_original, stage_original
from tests.helpers import original
from tests.helpers.parts import write_text, write_vision


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return original.build(tmp_path_factory.mktemp("original"), layout="bin")


@pytest.fixture
def folder(built, tmp_path):
    """A copy of the original model, in hard links that a test may replace."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in built.folder.iterdir():
        (copy / path.name).hardlink_to(path)
    return copy


def rewrite(path, write):
    path.unlink()
    write(path)


def change_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text()) | fields
    rewrite(folder / "config.json", lambda path: path.write_text(json.dumps(content)))


def change_tensors(folder, change):
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    change(tensors)
    rewrite(folder / "pytorch_model.bin", lambda path: torch.save(tensors, path))


def projector_alone(folder, **more):
    """The folder of LLaVA's first stage: the language model's weights are elsewhere."""
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    tensors = {name: tensor for name, tensor in tensors.items() if "mm_projector" in name} | more
    (folder / "pytorch_model.bin").unlink()
    torch.save(tensors, folder / "mm_projector.bin")


def linear(tensors):
    for name in list(tensors):
        if "mm_projector" in name:
            tensors[name.replace("mm_projector.0.", "mm_projector.")] = tensors.pop(name)


NEXT = "LLaVA-1.6.*llava-hf/llava-v1.6-vicuna-7b-hf"
CHANGES = {
    "linear": ("mm_projector_type linear.*mlp2x_gelu", lambda f: change_config(f, mm_projector_type="linear")),
    "three layers": ("mm_projector_type mlp3x_gelu", lambda f: change_config(f, mm_projector_type="mlp3x_gelu")),
    "identity": ("mm_projector_type identity", lambda f: change_config(f, mm_projector_type="identity")),
    "ldpnet": ("mm_projector_type ldpnetv2", lambda f: change_config(f, mm_projector_type="ldpnetv2")),
    "no projector": ("projector tensors .*bias", lambda f: change_tensors(f, linear)),
    "anyres": (NEXT, lambda f: change_config(f, image_aspect_ratio="anyres")),
    "spatial": (NEXT, lambda f: change_config(f, mm_patch_merge_type="spatial_unpad")),
    "newline": (
        f"model.image_newline.*{NEXT}",
        lambda f: change_tensors(f, lambda t: t.update({"model.image_newline": torch.ones(32)})),
    ),
    "start and end": ("<im_start> and <im_end>", lambda f: change_config(f, mm_use_im_start_end=True)),
    "resampler": ("mm_resampler_type spatial_pool", lambda f: change_config(f, mm_resampler_type="spatial_pool")),
    "s2": ("says s2 true", lambda f: change_config(f, s2=True)),
    "feature": ("mm_vision_select_feature 'cls'", lambda f: change_config(f, mm_vision_select_feature="cls")),
    "layer": ("mm_vision_select_layer 'last'", lambda f: change_config(f, mm_vision_select_layer="last")),
    "MPT": (
        r"model_type llava_mpt \(LlavaMptForCausalLM\).*llama, mistral, qwen2",
        lambda f: change_config(f, model_type="llava_mpt", architectures=["LlavaMptForCausalLM"]),
    ),
    "TinyLLaVA": (
        r"model_type tiny_llava_phi \(TinyLlavaPhiForCausalLM\)",
        lambda f: change_config(f, model_type="tiny_llava_phi", architectures=["TinyLlavaPhiForCausalLM"]),
    ),
    "LoRA": ("adapter_config.json.*merge_lora_weights.py", lambda f: (f / "adapter_config.json").write_text("{}")),
    "LoRA, rest": (
        "non_lora_trainables.bin.*merge_lora_weights.py",
        lambda f: (f / "non_lora_trainables.bin").write_bytes(b""),
    ),
    "quantised": (
        "quantised .bitsandbytes",
        lambda f: change_config(f, quantization_config={"quant_method": "bitsandbytes"}),
    ),
    "no head": ("no lm_head.weight", lambda f: change_tensors(f, lambda t: t.pop("lm_head.weight"))),
    "a layer lost": (
        "missing keys: 1",
        lambda f: change_tensors(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
    ),
    "more than a model": (
        "unexpected keys: 1",
        lambda f: change_tensors(f, lambda t: t.update({"model.vision_resampler.weight": torch.ones(2)})),
    ),
    "projector's second layer": (
        r"linear_2.weight.*\[32, 31\].*\[32, 32\]",
        lambda f: change_tensors(f, lambda t: t.update({"model.mm_projector.2.weight": torch.ones(32, 31)})),
    ),
    "projector of another model": (
        "32 wide, but the projector .* makes tokens of 48",
        lambda f: change_tensors(f, lambda t: t.update({"model.mm_projector.0.weight": torch.ones(48, 16)})),
    ),
    "no tokenizer": ("no tokenizer in", lambda f: [path.unlink() for path in f.glob("*token*")]),
    "no weights": ("no weights in", lambda f: (f / "pytorch_model.bin").unlink()),
    "config broken": ("config.json is broken", lambda f: rewrite(f / "config.json", lambda p: p.write_text("{"))),
    "projector without a language model": ("Pass the language model .* --text", projector_alone),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_cannot_be_computed_is_refused(built, folder, case):
    message, change = CHANGES[case]
    change(folder)
    with pytest.raises(InputError, match=message) as caught:
        stage_original(folder, folder.parent / "stage", str(built.vision), None)
    assert str(folder) in str(caught.value) and "stage" not in str(caught.value).replace(str(folder), "")


def test_the_parts_that_are_asked_for(built, folder, tmp_path):
    stage, vision, text = tmp_path / "new", str(built.vision), write_text(tmp_path / "text")
    with pytest.raises(InputError, match="Pass --vision openai/clip-vit-large-patch14-336"):
        stage_original(folder, stage, None, None)
    with pytest.raises(InputError, match=r"holds its own language model.*--text .*text"):
        stage_original(folder, stage, vision, str(text))
    with pytest.raises(InputError, match="There is no folder"):
        stage_original(folder, stage, str(tmp_path / "gone"), None)
    with pytest.raises(InputError, match="siglip.*reads a CLIP"):
        stage_original(folder, stage, str(write_vision(tmp_path / "siglip", "siglip")), None)
    wide = write_vision(tmp_path / "wide")
    change_config(wide, hidden_size=24)
    with pytest.raises(InputError, match=r"wide is 24 wide.*takes 16 \(mm_hidden_size\).*openai/clip-vit-large"):
        stage_original(folder, stage, str(wide), None)
    assert not stage.exists()


def test_a_projector_for_another_model(built, folder, tmp_path):
    projector_alone(folder)
    text = write_text(tmp_path / "text")
    change = json.loads((text / "config.json").read_text()) | {"hidden_size": 64}
    (text / "config.json").write_text(json.dumps(change))
    with pytest.raises(InputError, match="text table of .* 64 columns"):
        stage_original(folder, tmp_path / "new", str(built.vision), str(text))
    (folder / "mm_projector.bin").unlink()
    torch.save({"model.mm_projector.weight": torch.ones(32, 16)}, folder / "mm_projector.bin")
    with pytest.raises(InputError, match="projector tensors weight below mm_projector"):
        stage_original(folder / "mm_projector.bin", tmp_path / "new", str(built.vision), str(text))


def test_a_projector_with_the_embeddings_of_its_own_tokens(built, folder, tmp_path):
    projector_alone(folder, **{"model.embed_tokens.weight": torch.ones(2, 32)})
    with pytest.raises(InputError, match="model.embed_tokens.weight.*<im_start>"):
        stage_original(folder, tmp_path / "new", str(built.vision), str(write_text(tmp_path / "text")))


@pytest.mark.parametrize(("module", "package"), [("sentencepiece", "sentencepiece"), ("google.protobuf", "protobuf")])
def test_a_missing_library_is_one_sentence(built, folder, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"tokenizer.model needs {package}.*pip install .*\[original\]"):
        stage_original(folder, folder.parent / "stage", str(built.vision), None)


def test_what_training_leaves_is_original(folder, tmp_path):
    lora = tmp_path / "lora"
    lora.mkdir()
    (lora / "non_lora_trainables.bin").write_bytes(b"")
    assert is_original(lora) and is_original(folder)
