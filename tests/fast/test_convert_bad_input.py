"""Sources that are no sound LLaVA: exit code 2, one line that says what, where and what to do, nothing written."""

import math
import shutil

import pytest
import torch

from tests.helpers.convert import HIDDEN, VOCAB, write_json
from tests.helpers.faults import (
    INDEX,
    PICKLED,
    TABLE,
    WEIGHTS,
    Runs,
    change_config,
    change_index,
    change_pickled,
    change_table,
    change_tensors,
    change_text_config,
    compress,
    cut,
    lie,
    misplace,
    move_out,
    set_config,
    with_inf,
    with_value,
)
from tests.helpers.refusals import build, check_refused, lay_traps

# of one model.safetensors: name -> (fault, what the message says)
FOLDERS = {
    "bert": (
        lambda f: change_config(f, model_type="bert", architectures=["BertModel"]),
        r"not a LLaVA.*model_type bert \(BertModel\)",
    ),
    "llm": (
        lambda f: change_config(f, model_type="llama", architectures=["LlamaForCausalLM"]),
        r"not a LLaVA.*model_type llama \(LlamaForCausalLM\)",
    ),
    "video": (
        lambda f: change_config(f, model_type="llava_next_video", architectures=["LlavaNextVideo"]),
        r"video model \(llava_next_video.*only image models are converted",
    ),
    "Video-LLaVA": (lambda f: change_config(f, model_type="video_llava"), r"video model \(video_llava"),
    "TinyLLaVA": (
        lambda f: change_config(f, model_type="tinyllava", architectures=["TinyLlavaForConditionalGeneration"]),
        "is a TinyLLaVA .*assemble --vision TOWER --text LLM",
    ),
    "converted": (lambda f: change_config(f, model_type="llava_norm_align"), "already converted"),
    "adapter": (lambda f: write_json(f / "adapter_config.json", {}), "PEFT adapter.*Merge"),
    "adapter alone": (
        lambda f: (
            ((f / "config.json").unlink(), (f / WEIGHTS).rename(f / "adapter_model.safetensors"))
            and write_json(f / "adapter_config.json", {})
        ),
        "PEFT adapter.*Merge",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "There is no config.json in"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is broken"),
    "config no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "config.json is broken"),
    "config list": (lambda f: (f / "config.json").write_text("[]"), "holds a JSON list"),
    "config nested too deeply": (lambda f: (f / "config.json").write_text("[" * 200_000), "config.json is broken"),
    "no model type": (lambda f: change_config(f, model_type=None), "no model_type"),
    "architectures a number": (
        lambda f: change_config(f, model_type="bert", architectures=5),
        r"model_type bert \(no architectures named\)",
    ),
    "unknown text model": (lambda f: change_config(f, text_config={"model_type": "nobodys"}), "cannot read .*nobodys"),
    "text_config null": (lambda f: set_config(f, text_config=None), "text_config in .*config.json is null"),
    "vision_config a name": (lambda f: set_config(f, vision_config="clip"), 'vision_config in .* is "clip"'),
    "hidden_size a string": (lambda f: change_text_config(f, hidden_size="32"), "hidden_size"),
    "hidden_size of another": (lambda f: change_text_config(f, hidden_size=48), r"\[300, 32\].*hidden_size 48"),
    "unknown activation": (
        lambda f: change_config(f, projector_hidden_act="nope"),
        r"cannot build the model of \S+source/config.json \(KeyError: 'nope'\)",
    ),
    "unknown dtype": (
        lambda f: change_config(f, dtype="float7", torch_dtype="float7"),
        r"cannot read \S+source/config.json as a llava .*float7",
    ),
    "dtype of whole numbers": (
        lambda f: change_config(f, dtype="int8", torch_dtype="int8"),
        r"cannot build the model of \S+source/config.json .*torch.int8",
    ),
    "layer outside of the tower": (
        lambda f: change_config(f, vision_feature_layer=-99),
        "vision_feature_layer in .* is -99, but the vision tower has 2 layers: whole numbers from -3 to 2",
    ),
    "one layer of several outside": (lambda f: change_config(f, vision_feature_layer=[-2, 3]), r"is \[-2, 3\], but"),
    "image token outside": (
        lambda f: change_config(f, image_token_index=VOCAB),
        rf"image_token_index\) is {VOCAB}, but the text table has {VOCAB} rows: .* 0 to {VOCAB - 1}",
    ),
    "image token below zero": (lambda f: change_config(f, image_token_index=-1), r"image_token_index\) is -1, but"),
    "image token of another": (
        lambda f: change_config(f, image_token_index=7),
        rf"<image> the id {VOCAB - 1}, but image_token_index in config.json is 7",
    ),
    "quantised config": (
        lambda f: change_config(f, quantization_config={"quant_method": "awq"}),
        r"quantised: config.json has a quantization_config \(awq\)",
    ),
    "text_config quantised": (
        lambda f: change_text_config(f, quantization_config={"quant_method": "gptq"}),
        r"quantised: config.json has a quantization_config \(gptq\)",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no weights in .*model.safetensors"),
    "other weights": (lambda f: (f / WEIGHTS).rename(f / "consolidated.pth"), "no weights in .*model.safetensors"),
    "named .bin": (lambda f: (f / WEIGHTS).rename(f / PICKLED), "pytorch_model.bin is not in the zip format"),
    "cut": (lambda f: cut(f / WEIGHTS), "model.safetensors is cut or damaged"),
    "empty file": (lambda f: (f / WEIGHTS).write_bytes(b""), "model.safetensors is cut or damaged"),
    "lying header": (lie, "model.safetensors is cut or damaged"),
    "not safetensors": (lambda f: (f / WEIGHTS).write_text("<html>"), "cut or damaged"),
    "no table": (lambda f: change_tensors(f, **{TABLE: None}), "no text embedding table"),
    "no projector": (
        lambda f: change_tensors(f, **{"multi_modal_projector.linear_1.weight": None}),
        "no projector",
    ),
    "zero table": (lambda f: change_table(f, torch.zeros_like), "all zero"),
    "nan": (lambda f: change_table(f, with_value(math.nan)), f"NaN or inf in 1 of {VOCAB} rows"),
    "inf": (lambda f: change_table(f, with_inf), f"NaN or inf in 1 of {VOCAB} rows"),
    "table too short": (
        lambda f: change_table(f, lambda t: t[:-1].clone()),
        rf"\[{VOCAB - 1}, {HIDDEN}\].*vocab_size",
    ),
    "int8 table": (lambda f: change_table(f, lambda t: t.to(torch.int8)), f"quantised: {TABLE} is stored as I8"),
    "fp8 table": (
        lambda f: change_table(f, lambda t: t.to(torch.float8_e4m3fn)),
        f"quantised: {TABLE} is stored as F8_E4M3",
    ),
    "boolean table": (lambda f: change_table(f, lambda t: t > 0), "stored as BOOL"),
    "packed": (
        lambda f: change_tensors(f, **{"language_model.model.layers.0.mlp.up_proj.qweight": torch.ones(4, 4).int()}),
        "quantised: .*qweight is stored as I32",
    ),
    "tensor missing": (
        lambda f: change_tensors(f, **{"language_model.model.norm.weight": None}),
        r"do not belong together.*1 missing \(model.language_model.norm.weight\)",
    ),
    "tensor unexpected": (
        lambda f: change_tensors(f, **{"language_model.model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}),
        "do not belong together.*1 unexpected",
    ),
    "tensor of another shape": (
        lambda f: change_tensors(f, **{"language_model.model.norm.weight": torch.ones(HIDDEN + 1)}),
        "do not belong together",
    ),
    "head missing": (
        lambda f: change_tensors(f, **{"language_model.lm_head.weight": None}),
        "have no lm_head.weight, and config.json does not tie it",
    ),
    "head that differs": (
        lambda f: change_text_config(f, tie_word_embeddings=True),
        "ties lm_head to the text embeddings.*language_model.lm_head.weight differs",
    ),
    "image size a list": (
        lambda f: write_json(f / "preprocessor_config.json", {"size": [28, 28]}),
        r"source/preprocessor_config.json has the size \[28, 28\], but a number or an object",
    ),
    "nested image processor a list": (
        lambda f: write_json(f / "processor_config.json", {"image_processor": [1]}),
        r"image_processor in \S+source/processor_config.json is \[1\]",
    ),
    "broken image processor": (
        lambda f: (f / "preprocessor_config.json").write_text("{"),
        "source/preprocessor_config.json is broken",
    ),
    "image processor a list": (
        lambda f: (f / "preprocessor_config.json").write_text("[]"),
        "source/preprocessor_config.json holds a JSON list",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "source/tokenizer.json is broken"),
    "tokenizer without words": (lambda f: (f / "tokenizer.json").write_text("{}"), "source/tokenizer.json is broken"),
    "broken tokenizer config": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        "source/tokenizer_config.json is broken",
    ),
}

SHARDS = {
    "a shard missing": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"names 1 weight file\(s\) that are missing, such as model-00002-of-00002.safetensors",
    ),
    "a shard cut": (
        lambda f: cut(f / "model-00002-of-00002.safetensors"),
        "00002-of-00002.safetensors is cut or damaged",
    ),
    "a number for a name": (
        lambda f: change_index(f, lambda places: places.update({TABLE: 5})),
        rf"places {TABLE} in 5, but a file name was expected",
    ),
    "the wrong shard": (misplace, r"places 1 tensor\(s\) in a file that does not hold them, such as " + TABLE),
    "a tensor left out": (
        lambda f: change_index(f, lambda places: places.pop(TABLE)),
        rf"leaves out 1 tensor\(s\) of its shards, such as {TABLE}",
    ),
    "a shard above": (move_out, r"names '\.\./model-00001-of-00002.safetensors'"),
    "a shard elsewhere": (lambda f: move_out(f, absolute=True), "names '/.*/model-00001-of-00002.safetensors'"),
    "index broken": (lambda f: (f / INDEX).write_text("{"), f"{INDEX} is broken"),
    "index empty": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
}

BIN = {
    "a pickle that runs code": (
        lambda f: torch.save({"a": Runs(f / "trace")}, f / PICKLED),
        r"pytorch_model.bin holds more than tensors \(.*mkdir\).*nothing of it was run",
    ),
    "the format before 1.6": (
        lambda f: change_pickled(f, lambda tensors: None, _use_new_zipfile_serialization=False),
        "pytorch_model.bin is not in the zip format",
    ),
    "a pointer of Git LFS": (lambda f: (f / PICKLED).write_text("version https://git-lfs"), "a pointer of Git LFS"),
    "cut .bin": (lambda f: cut(f / PICKLED), "pytorch_model.bin is cut or damaged"),
    "compressed .bin": (compress, "pytorch_model.bin is cut or damaged"),
    "a training checkpoint": (
        lambda f: change_pickled(f, lambda tensors: tensors.update(epoch=1)),
        "holds 'epoch': int, but only tensors by name were expected",
    ),
    "transposed": (
        lambda f: change_pickled(f, lambda tensors: tensors.update({TABLE: tensors[TABLE].t().contiguous().t()})),
        rf"holds {TABLE} with transposed",
    ),
    "complex": (
        lambda f: change_pickled(f, lambda tensors: tensors.update({TABLE: tensors[TABLE] + 1j})),
        rf"holds {TABLE} as torch.complex64",
    ),
    "a list": (lambda f: torch.save([1], f / PICKLED), "pytorch_model.bin holds a list"),
    "--link": (lambda f: None, "are not safetensors.*--link", "--link"),
}

VISION = ["--vision", "{parts}/tower"]
ORIGINAL = {
    "no --vision": (lambda f: None, "original LLaVA repository.*Pass --vision openai/clip-vit-large-patch14-336"),
    "tiles": (lambda f: change_config(f, image_aspect_ratio="anyres"), "LLaVA-1.6.*llava-v1.6-vicuna-7b-hf", *VISION),
    "another projector": (
        lambda f: change_config(f, mm_projector_type="linear"),
        "mm_projector_type linear.*mlp2x_gelu",
        *VISION,
    ),
    "LoRA": (lambda f: write_json(f / "adapter_config.json", {}), "adapter_config.json.*merge_lora", *VISION),
    "--text too": (lambda f: None, "holds its own language model.*--text .*Leave it out", *VISION, "--text", "x/y"),
    "SigLIP": (lambda f: None, "siglip.*reads a CLIP as its vision tower", "--vision", "{parts}/siglip"),
    "no such tower": (lambda f: None, "There is no folder .*none", "--vision", "{parts}/none"),
    "--link of it": (lambda f: None, "--link", *VISION, "--link"),
}

CASES = {
    **{("safetensors", name): case for name, case in FOLDERS.items()},
    **{("shards", name): case for name, case in SHARDS.items()},
    **{("bin", name): case for name, case in BIN.items()},
    **{("original", name): case for name, case in ORIGINAL.items()},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("built"))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_source_that_is_no_sound_llava(built, tmp_path, monkeypatch, run, case):
    lay_traps(tmp_path, monkeypatch)
    source = shutil.copytree(built / case[0], tmp_path / "source")
    damage, message, *options = CASES[case]
    damage(source)
    line = " ".join(["convert", "{source}", "{root}/target", "--no-report", *options])
    check_refused(line, message, tmp_path, built / "parts", run)
