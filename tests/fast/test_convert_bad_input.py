"""Bad input on the command line: exit code 2, one line that says what, where and what to do, and nothing written."""

import json
import math
import os
import re
import shutil
import sys

import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from PIL import Image

from llava_norm_align import cli
from llava_norm_align.common import loading
from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from tests.helpers import original
from tests.helpers.convert import HIDDEN, VOCAB, tiny_llava, write_json
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
from tests.helpers.parts import write_vision
from tests.helpers.safety import pickle_weights

# what a message may advise, by its first word
REMEDY = re.compile(
    r"\b(Check|Choose|Convert|Correct|Crop|Download|Give yourself|Install|Leave|Load|Log in|Make|Merge|Name|Omit|Pass|"
    r"Put|Remove|Run|Save|Set|Use|Wait|Write|to match the two there, pass)\b"
)

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
        lambda f: ((f / "config.json").unlink(), (f / WEIGHTS).rename(f / "adapter_model.safetensors"))
        and write_json(f / "adapter_config.json", {}),
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
    "unknown dtype": (lambda f: change_config(f, torch_dtype="float7"), "cannot (build|read) .*float7"),
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
    "a shard cut": (lambda f: cut(f / "model-00002-of-00002.safetensors"), "00002-of-00002.safetensors is cut or damaged"),
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
        lambda f: change_pickled(f, lambda tensors: tensors.update({TABLE: tensors[TABLE].t().clone().t()})),
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

# of a sound folder: arguments -> what the message says
ARGUMENTS = {
    "--vision {parts}/tower": "is a whole model in the transformers layout, so --vision and --text have no use",
    "--text x/y": "is a whole model in the transformers layout",
    "--norm layernorm": "--norm is 'layernorm'; one of layer_norm",
    "--start middle": "--start is 'middle'; text .*or visual was expected",
    "--start visual --target 2": "--start visual measures .*--target 2",
    "--start visual --norm scale": "--start visual is for a norm with a gain.*--norm is scale",
    "--start visual --norm none": "--start visual is for a norm with a gain.*--norm is none",
    "--fold": "--fold is for --norm scale.*--norm is layer_norm",
    "--target 0": "--target is 0.0; an L2 norm was expected",
    "--target=-1": "--target is -1.0",
    "--target nan": "--target is nan",
    "--target inf": "--target is inf",
    "--target 1e-40": "makes a gain of .*float32 holds .*--target",
    "--target 1e300": "makes a gain of .*--target",
    "--images {root}/none.png": "There is no image file at .*none.png",
    "--images {root}/text.png": "text.png is not an image",
    "--images {root}/huge.png": "huge.png is 12000 x 9000",
    "--images {root}/cut.png": "cut.png is a broken image",
    "--images {root}/empty": "The folder .*empty of --images is empty",
    "--report --dry-run --images {root}/none.png": "There is no image file at .*none.png",
}

# another SRC or DST, and verbs -> what the message says
CALLS = {
    "convert {root}/empty {root}/target": "The folder .*empty is empty",
    "convert {root}/text.png {root}/target": "text.png is a file",
    "convert {root}/nothing {root}/target": "There is no folder .*nothing",
    "convert a/b/c {root}/target": "There is no folder a/b/c",
    "convert someone/some-llava {root}/target": "no folder someone/some-llava, and the Hub cannot be asked",
    "convert some--llava..x {root}/target": "neither a folder nor a Hub id",
    "convert {source} {source}": "overlap",
    "convert {source} {source}/inside": "overlap",
    "convert {source} {root} --overwrite": "overlap",
    "convert {source} {root}/link/inside": "overlap",
    "convert {source} {root}/link": "overlap",
    "convert {source} {root}/filled": "filled is not empty.*--overwrite",
    "convert {source} {root}/filled --overwrite": "filled holds no model .*so --overwrite does not replace it",
    "convert {source} {root}/text.png": "text.png exists and is not a folder",
    "convert {source} {root}/text.png/target": "text.png is not a folder that you may write to",
    "convert {source} {root}/{long}": "has more than 240 bytes",
    "convert {source} .": "holds the working folder",
    "convert {source} / --overwrite": "holds your home|overlap",
    "doctor {source}": "is a stock model .*llava-norm-align convert",
    "doctor {root}/text.png": "text.png",
    "doctor {root}/nothing": "There is no folder .*nothing",
    "doctor {root}/empty": "The folder .*empty is empty",
    "doctor {root}/filled": "There is no config.json in .*filled",
    "doctor {root}/link --python {root}/nothing": "link is a stock model",
    "doctor {source} --repair": "is a stock model",
    "assemble {root}/target --vision {parts}/tower": "assemble needs --vision and --text",
    "assemble {root}/target --vision {parts}/tower --text {root}/nothing": "There is no folder .*nothing",
    "ask {root}/empty {root}/text.png what": "text.png is not an image",
}

CASES = {
    **{("safetensors", name): case for name, case in FOLDERS.items()},
    **{("shards", name): case for name, case in SHARDS.items()},
    **{("bin", name): case for name, case in BIN.items()},
    **{("original", name): case for name, case in ORIGINAL.items()},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A sound folder of every kind, and parts for them."""
    root = tmp_path_factory.mktemp("built")
    tiny_llava(root / "safetensors")
    tiny_llava(root / "shards", shards=2)
    pickle_weights(shutil.copytree(root / "safetensors", root / "bin"))
    original.build(root / "parts", layout="bin")
    shutil.move(root / "parts" / "model", root / "original")
    write_vision(root / "parts" / "siglip", "siglip")
    return root


@pytest.fixture
def refused(built, tmp_path, monkeypatch, capsys):
    """Call the program with arguments in a folder full of traps, and check how it refuses them."""
    (tmp_path / "empty").mkdir(), (tmp_path / "filled").mkdir(), (tmp_path / "work").mkdir()
    (tmp_path / "filled" / "mine.txt").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    (tmp_path / "text.png").write_text("not an image")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def call(line, message):
        places = {"root": tmp_path, "source": tmp_path / "source", "parts": built / "parts", "long": "x" * 241}
        arguments = [word.format(**places) for word in line.split()]
        before = state(tmp_path)
        monkeypatch.setattr(sys, "argv", ["llava-norm-align", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        assert err.startswith("Error: ") and err.count("\n") == 1, err
        assert re.search(message, err), err
        named = [word for word in arguments[1:] if word != "--no-report" and word.rpartition("=")[0] + word in err]
        assert named or str(tmp_path) in err or re.search(r"--\w", err), f"says not where: {err}"
        assert REMEDY.search(err), f"says not what to do: {err}"
        assert ".writing" not in err and ".source" not in err
        assert state(tmp_path) == before

    return call


def state(folder):
    """Every file below `folder`, as far as a write would change it, and every folder."""
    return {path: path.is_dir() or (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_source_that_is_no_sound_llava(built, tmp_path, refused, case):
    source = shutil.copytree(built / case[0], tmp_path / "source")
    damage, message, *options = CASES[case]
    damage(source)
    refused(" ".join(["convert", "{source}", "{root}/target", "--no-report", *options]), message)


@pytest.mark.parametrize("options", ARGUMENTS)
def test_options_that_are_wrong_or_do_not_go_together(built, tmp_path, refused, options):
    shutil.copytree(built / "safetensors", tmp_path / "source")
    Image.new("1", (12_000, 9_000)).save(tmp_path / "huge.png")
    Image.effect_noise((60, 60), 9).save(tmp_path / "cut.png")
    cut(tmp_path / "cut.png")
    refused("convert {source} {root}/target " + options, ARGUMENTS[options])


@pytest.mark.parametrize("line", CALLS)
def test_sources_and_targets_that_are_none(built, tmp_path, refused, line):
    shutil.copytree(built / "safetensors", tmp_path / "source")
    refused(line, CALLS[line])


def test_a_revision_that_does_not_exist(refused, monkeypatch):
    def refuse(*args, **kwargs):
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(loading, "snapshot_download", refuse)
    refused("convert someone/some-llava {root}/target --revision v9", "someone/some-llava has no revision v9")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("convert a", "Missing argument 'DST'"),
        ("convert a b --target tall", "Invalid value for '--target': 'tall'"),
        ("convert a b --nrom scale", "No such option: --nrom"),
        ("doctor a b", "unexpected extra argument"),
        ("konvert a b", "No such command 'konvert'"),
    ],
)
def test_a_command_line_that_cannot_be_read(monkeypatch, capsys, line, says):
    """One error after the usage, which is the remedy."""
    monkeypatch.setattr(sys, "argv", ["llava-norm-align", *line.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    err = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in err
    assert says in err and err.startswith("Usage: ") and "--help" in err and err.count("Error: ") == 1


def test_a_report_needs_a_processor_and_photos(tmp_path, refused, monkeypatch):
    command = "convert {source} {root}/target --report"
    source = tiny_llava(tmp_path / "source", processor=False)
    refused(command, "needs a processor")
    summary = convert(str(source), tmp_path / "target")  # not asked for: left out, and said so
    assert summary["report"] is None and "no report: the source has no processor" in summary["notes"]

    shutil.rmtree(source), shutil.rmtree(tmp_path / "target")
    tiny_llava(source)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(command, r"scikit-image.*pip install 'llava-norm-align\[samples\]'")
    summary = convert(str(source), tmp_path / "target")
    assert summary["report"] is None and any("scikit-image" in note for note in summary["notes"])


@pytest.mark.parametrize("damage", ["no tokenizer", "unknown class"])
def test_a_processor_that_does_not_load(tmp_path, refused, damage):
    """An error where a report was asked for, else a note."""
    source = tiny_llava(tmp_path / "source")
    Image.new("RGB", (40, 40)).save(tmp_path / "photo.png")
    if damage == "no tokenizer":
        for file in source.glob("tokenizer*"):
            file.unlink()
    else:
        nobodys = {"image_processor_type": "NobodysImageProcessor", "size": {"shortest_edge": 28}}
        write_json(source / "preprocessor_config.json", nobodys)
    message = f"{source} has no processor that can be loaded"
    for option in ("--report", "--norm scale", "--start visual"):
        refused("convert {source} {root}/target --images {root}/photo.png " + option, message)
    summary = convert(str(source), tmp_path / "target", images=[tmp_path / "photo.png"])
    assert summary["report"] is None
    assert any(note.startswith(f"no report: {message}") for note in summary["notes"])
    assert not any(".writing" in note for note in summary["notes"])
