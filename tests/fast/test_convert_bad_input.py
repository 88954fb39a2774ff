"""convert: bad input is one InputError that says what was found, and writes nothing."""

import json
import math
import os
import struct

import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from PIL import Image
from safetensors.torch import load_file, save_file

from llava_norm_align.common import loading
from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from tests.helpers.convert import HIDDEN, VOCAB, tiny_llava, write_json

TABLE = "language_model.model.embed_tokens.weight"
WEIGHTS = "model.safetensors"


def change_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        content.pop(name) if value is None else content.update({name: value})
    write_json(folder / "config.json", content)


def set_config(folder, **fields):
    """As change_config, but None becomes null."""
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | fields)


def change_text_config(folder, **fields):
    content = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=content | fields)


def change_tensors(folder, **tensors):
    content = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        content.pop(name) if tensor is None else content.update({name: tensor})
    save_file(content, folder / WEIGHTS, metadata={"format": "pt"})


def change_table(folder, change):
    table = load_file(folder / WEIGHTS)[TABLE]
    change_tensors(folder, **{TABLE: change(table)})


def with_value(value):
    def change(table):
        table[5, 2] = value
        return table

    return change


def cut(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def lie(folder):
    """The header promises one more row than its bytes can hold."""
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[TABLE]["shape"][0] += 1
    changed = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])


def lose_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def number_shard(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][TABLE] = 5
    write_json(folder / "model.safetensors.index.json", index)


def misplace(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][TABLE] = "model-00001-of-00002.safetensors"
    other = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    with_table = next(file.name for file in folder.glob("model-*") if TABLE in load_file(file))
    index["weight_map"][TABLE] = (other - {with_table}).pop()
    write_json(folder / "model.safetensors.index.json", index)


def pickle(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


ORIGINAL_LAYOUT = {"text_config": None, "vision_config": None, "mm_projector_type": "mlp2x_gelu", "mm_vision_tower": "openai/clip-vit-large-patch14-336"}
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
LLM = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
VIDEO = {"model_type": "llava_next_video", "architectures": ["LlavaNextVideoForConditionalGeneration"]}
TINY = {"model_type": "tinyllava", "architectures": ["TinyLlavaForConditionalGeneration"]}

CASES = {
    "bert": (lambda f: change_config(f, **BERT), r"not a LLaVA.*model_type bert \(BertModel\)"),
    "llm": (lambda f: change_config(f, **LLM), r"not a LLaVA.*model_type llama \(LlamaForCausalLM\)"),
    "video": (lambda f: change_config(f, **VIDEO), r"video model \(llava_next_video.*only image models are converted"),
    "TinyLLaVA": (lambda f: change_config(f, **TINY), "is a TinyLLaVA .*assemble --vision TOWER --text LLM"),
    "original": (
        lambda f: change_config(f, **ORIGINAL_LAYOUT),
        "original LLaVA repository.*Pass --vision .*such as openai/clip-vit-large-patch14-336",
    ),
    "converted": (lambda f: change_config(f, model_type="llava_norm_align"), "already converted"),
    "adapter": (lambda f: write_json(f / "adapter_config.json", {}), "PEFT adapter"),
    "no config": (lambda f: (f / "config.json").unlink(), "There is no config.json in"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json is broken"),
    "config list": (lambda f: (f / "config.json").write_text("[]"), "holds a JSON list"),
    "no model type": (lambda f: change_config(f, model_type=None), "no model_type"),
    "unknown text model": (lambda f: change_config(f, text_config={"model_type": "nobodys"}), "cannot read .*nobodys"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "no weights in .*model.safetensors"),
    "pickled": (pickle, "pytorch_model.bin is not in the zip format that torch writes"),
    "cut": (cut, "model.safetensors is cut or damaged"),
    "lying header": (lie, "model.safetensors is cut or damaged"),
    "not safetensors": (lambda f: (f / WEIGHTS).write_text("<html>"), "cut or damaged"),
    "no table": (lambda f: change_tensors(f, **{TABLE: None}), "no text embedding table"),
    "no projector": (
        lambda f: change_tensors(f, **{"multi_modal_projector.linear_1.weight": None}),
        "no projector",
    ),
    "zero table": (lambda f: change_table(f, torch.zeros_like), "all zero"),
    "nan": (lambda f: change_table(f, with_value(math.nan)), f"NaN or inf in 1 of {VOCAB} rows"),
    "inf": (lambda f: change_table(f, with_value(math.inf)), f"NaN or inf in 1 of {VOCAB} rows"),
    "table too short": (
        lambda f: change_table(f, lambda t: t[:-1].clone()),
        rf"\[{VOCAB - 1}, {HIDDEN}\].*vocab_size",
    ),
    "int8 table": (lambda f: change_table(f, lambda t: t.to(torch.int8)), f"quantised: {TABLE} is stored as I8"),
    "packed": (
        lambda f: change_tensors(f, **{"language_model.model.layers.0.mlp.up_proj.qweight": torch.ones(4, 4).int()}),
        "quantised: .*qweight is stored as I32",
    ),
    "quantised config": (
        lambda f: change_config(f, quantization_config={"quant_method": "awq"}),
        r"quantised: config.json has a quantization_config \(awq\)",
    ),
    "tensor missing": (
        lambda f: change_tensors(f, **{"language_model.model.norm.weight": None}),
        r"do not belong together.*1 missing \(model.language_model.norm.weight\)",
    ),
    "head missing": (
        lambda f: change_tensors(f, **{"language_model.lm_head.weight": None}),
        "have no lm_head.weight, and config.json does not tie it",
    ),
    "head that differs": (
        lambda f: change_text_config(f, tie_word_embeddings=True),
        "ties lm_head to the text embeddings.*language_model.lm_head.weight differs",
    ),
    "tensor unexpected": (
        lambda f: change_tensors(f, **{"language_model.model.layers.7.mlp.up_proj.weight": torch.ones(2, 2)}),
        "do not belong together.*1 unexpected",
    ),
    "tensor of another shape": (
        lambda f: change_tensors(f, **{"language_model.model.norm.weight": torch.ones(HIDDEN + 1)}),
        "do not belong together",
    ),
    "hidden_size a string": (lambda f: change_text_config(f, hidden_size="32"), "hidden_size"),
    "text_config null": (lambda f: set_config(f, text_config=None), "text_config in .*config.json is null"),
    "vision_config a name": (lambda f: set_config(f, vision_config="clip"), 'vision_config in .* is "clip"'),
    "unknown activation": (
        lambda f: change_config(f, projector_hidden_act="nope"),
        r"cannot build the model of \S+source/config.json \(KeyError: 'nope'\)",
    ),
    "architectures a number": (
        lambda f: change_config(f, model_type="bert", architectures=5),
        r"model_type bert \(no architectures named\)",
    ),
    "layer outside of the tower": (
        lambda f: change_config(f, vision_feature_layer=-99),
        "vision_feature_layer in .* is -99, but the vision tower has 2 layers: whole numbers from -3 to 2",
    ),
    "one layer of several outside": (lambda f: change_config(f, vision_feature_layer=[-2, 3]), r"is \[-2, 3\], but"),
    "config nested too deeply": (lambda f: (f / "config.json").write_text("[" * 200_000), "config.json is broken"),
    "text_config quantised": (
        lambda f: change_text_config(f, quantization_config={"quant_method": "gptq"}),
        r"quantised: config.json has a quantization_config \(gptq\)",
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
    "damaged tokenizer config": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json is broken",
    ),
}


def assert_refused(tmp_path, message, source, target=None, **options):
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message) as refusal:
        convert(str(source), target or tmp_path / "target", **{"report": False, **options})
    assert "\n" not in str(refusal.value) and ".writing" not in str(refusal.value)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("case", CASES)
def test_a_source_that_is_no_sound_llava_is_refused(tmp_path, case):
    source = tiny_llava(tmp_path / "source")
    damage, message = CASES[case]
    damage(source)
    assert_refused(tmp_path, message, source)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_shard, r"names 1 weight file\(s\) that are missing, such as model-00002-of-00002.safetensors"),
        (number_shard, rf"places {TABLE} in 5, but a file name was expected"),
        (misplace, r"places 1 tensor\(s\) in a file that does not hold them, such as " + TABLE),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, damage, message):
    source = tiny_llava(tmp_path / "source", shards=2)
    damage(source)
    assert_refused(tmp_path, message, source)


def test_a_source_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path, "is empty", tmp_path / "empty")
    assert_refused(tmp_path, "is a file", tmp_path / "file")
    assert_refused(tmp_path, "no folder", tmp_path / "nothing")


def test_a_hub_id_without_a_connection_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert_refused(tmp_path, "no folder someone/some-llava, and the Hub cannot be asked", "someone/some-llava")


def test_a_revision_that_does_not_exist_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(loading, "snapshot_download", refuse)
    assert_refused(tmp_path, "someone/some-llava has no revision v9", "someone/some-llava", revision="v9")


@pytest.mark.parametrize("name", ["source", "source/README.md"])
def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, name):
    """Asked of os.access, as root may read everything."""
    source, access = tiny_llava(tmp_path / "source"), os.access
    (source / "README.md").write_text("card")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / name and access(path, mode))
    assert_refused(tmp_path, f"You may not read .*{name}", source)


def test_overlapping_folders_are_refused(tmp_path):
    source = tiny_llava(tmp_path / "outer" / "source")
    for target in (source, source / "inside", tmp_path / "outer"):
        assert_refused(tmp_path, "overlap", source, target, overwrite=True)
    (tmp_path / "link").symlink_to(source)
    assert_refused(tmp_path, "overlap", source, tmp_path / "link" / "inside")


def test_a_target_with_content_is_refused(tmp_path):
    source = tiny_llava(tmp_path / "source")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine.txt").write_text("x")
    assert_refused(tmp_path, "not empty", source)
    (tmp_path / "file").write_text("x")
    assert_refused(tmp_path, "exists and is not a folder", source, tmp_path / "file")


@pytest.mark.parametrize("target_norm", [0, -1.0, math.nan, math.inf])
def test_a_target_norm_that_is_none_is_refused(tmp_path, target_norm):
    assert_refused(tmp_path, "--target is", tiny_llava(tmp_path / "source"), target_norm=target_norm)


def test_an_unknown_norm_is_refused(tmp_path):
    assert_refused(
        tmp_path, "--norm is 'batch_norm'.*layer_norm", tiny_llava(tmp_path / "source"), norm_type="batch_norm"
    )


def test_images_are_opened_before_anything_is_written(tmp_path):
    source = tiny_llava(tmp_path / "source")
    (tmp_path / "text.png").write_text("not an image")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "huge.png")
    for name, message in (("none.png", "no image file"), ("text.png", "not an image"), ("huge.png", "12000 x 9000")):
        assert_refused(tmp_path, message, source, images=[tmp_path / name])


def test_a_report_needs_a_processor_and_photos(tmp_path, monkeypatch):
    source = tiny_llava(tmp_path / "source", processor=False)
    assert_refused(tmp_path, "needs a processor", source, report=True)
    summary = convert(str(source), tmp_path / "target")  # not asked for: left out, and said so
    assert summary["report"] is None and "no report: the source has no processor" in summary["notes"]

    source = tiny_llava(tmp_path / "other")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert_refused(
        tmp_path, r"scikit-image.*pip install 'llava-norm-align\[samples\]'", source, tmp_path / "b", report=True
    )
    summary = convert(str(source), tmp_path / "b")
    assert summary["report"] is None and any("scikit-image" in note for note in summary["notes"])


@pytest.mark.parametrize("damage", ["no tokenizer", "unknown class"])
def test_a_report_that_was_not_asked_for_is_left_out_if_the_processor_does_not_load(tmp_path, damage):
    source = tiny_llava(tmp_path / "source")
    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    if damage == "no tokenizer":
        for file in source.glob("tokenizer*"):
            file.unlink()
    else:
        nobodys = {"image_processor_type": "NobodysImageProcessor", "size": {"shortest_edge": 28}}
        write_json(source / "preprocessor_config.json", nobodys)
    options = {"images": [tmp_path / "photo.png"]}
    message = f"{source} has no processor that can be loaded"
    assert_refused(tmp_path, message, source, report=True, **options)
    assert_refused(tmp_path, message, source, norm_type="scale", **options)
    summary = convert(str(source), tmp_path / "target", **options)
    assert summary["report"] is None
    assert any(note.startswith(f"no report: {message}") for note in summary["notes"])
    assert not any(".writing" in note for note in summary["notes"])


def test_a_full_disk_is_seen_before_the_copy(tmp_path, monkeypatch):
    source = tiny_llava(tmp_path / "source")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: conversion.shutil._ntuple_diskusage(10, 9, 1))
    assert_refused(tmp_path, "GB free", source)
