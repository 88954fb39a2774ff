"""convert: the processor's files count image tokens as the model does and load in both transformers lines."""

import json

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.processor_fields import (
    complete_processor_files,
    count_additional_tokens,
    make_tokenizer_portable,
)
from tests.helpers.convert import IMAGE, PATCH, VISION, tiny_config, tiny_llava, write_json

FIELDS = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")


def read(folder, name="processor_config.json"):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    ("vision", "expected"),
    [("clip", (PATCH, "default", 1)), ("siglip", (PATCH, "full", 0)), ("dinov2", (PATCH, "default", 1))],
)
def test_the_processor_counts_the_image_tokens_of_the_model(tmp_path, vision, expected):
    """Missing patch_size is a TypeError, a missing num_additional_image_tokens one image token too few."""
    source = tiny_llava(tmp_path / "source", vision=vision)
    convert(str(source), tmp_path / "target", report=False)
    assert tuple(read(tmp_path / "target")[field] for field in FIELDS) == expected

    processor = AutoProcessor.from_pretrained(tmp_path / "target")
    batch = processor(text="USER: <image>\nhello", images=Image.new("RGB", (60, 40)), return_tensors="pt")
    assert (batch["input_ids"] == processor.image_token_id).sum() == (IMAGE // PATCH) ** 2
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "target").eval()
    with torch.no_grad():
        model(**batch)  # raises if features and placeholders differ in number
    assert "token_type_ids" not in batch
    assert processor.chat_template is not None


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("clip_vision_model", {}, 1),
        ("siglip_vision_model", {}, 0),
        ("dinov2", {}, 1),
        ("dinov2_with_registers", {"num_register_tokens": 4}, 5),
    ],
)
def test_tokens_beside_the_patches_are_counted_on_the_tower_itself(kind, fields, expected):
    config = AutoConfig.for_model(kind, **{"image_size": IMAGE, **VISION, **fields})
    assert count_additional_tokens(config) == expected


def test_a_tower_that_takes_no_plain_pixels_is_not_counted():
    config = AutoConfig.for_model("siglip2_vision_model", num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    assert count_additional_tokens(config) is None


def test_wrong_fields_are_corrected_and_said(tmp_path):
    source = tiny_llava(tmp_path / "source")
    wrong = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "vision_feature_select_strategy": "default"}
    write_json(source / "processor_config.json", {**wrong, "num_additional_image_tokens": 0, "image_token": "<image>"})
    summary = convert(str(source), tmp_path / "target", report=False)
    assert "processor_config.json: num_additional_image_tokens 0 -> 1" in summary["notes"]
    assert not any("patch_size" in note for note in summary["notes"])
    assert read(tmp_path / "target") == {**wrong, "num_additional_image_tokens": 1, "image_token": "<image>"}


def test_an_image_processor_without_crop_size_gets_one(tmp_path):
    """vLLM's Transformers backend counts image tokens from crop_size, which SigLIP's processor does not have."""
    for style in ("own file", "nested"):
        folder = tmp_path / style
        folder.mkdir()
        image_processor = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 42}}
        if style == "own file":
            write_json(folder / "preprocessor_config.json", image_processor)
        else:
            write_json(folder / "processor_config.json", {"image_processor": image_processor})
        notes = complete_processor_files(folder, tiny_config("siglip"))
        found = read(folder)["image_processor"] if style == "nested" else read(folder, "preprocessor_config.json")
        assert found == image_processor | {"crop_size": {"height": 28, "width": 42}}
        assert any("crop_size null ->" in note for note in notes)
        assert complete_processor_files(folder, tiny_config("siglip")) == []  # nothing left to do


def test_the_processor_of_another_class_is_left_alone(tmp_path):
    write_json(tmp_path / "processor_config.json", {"processor_class": "PixtralProcessor", "patch_size": 16})
    write_json(tmp_path / "preprocessor_config.json", {"size": {"longest_edge": 64}})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert complete_processor_files(tmp_path, tiny_config()) == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_default_strategy_on_a_tower_without_cls_is_kept_and_said(tmp_path):
    """It drops a real patch; a checkpoint that was trained so must not change silently."""
    source = tiny_llava(tmp_path / "source", vision="siglip")
    config = read(source, "config.json")
    write_json(source / "config.json", config | {"vision_feature_select_strategy": "default"})
    summary = convert(str(source), tmp_path / "target", report=False)
    assert any("drops the first patch" in note for note in summary["notes"])
    assert read(tmp_path / "target", "config.json")["vision_feature_select_strategy"] == "default"
    processor = AutoProcessor.from_pretrained(tmp_path / "target")
    batch = processor(text="<image>", images=Image.new("RGB", (60, 40)), return_tensors="pt")
    assert (batch["input_ids"] == processor.image_token_id).sum() == (IMAGE // PATCH) ** 2 - 1
    with torch.no_grad():
        AutoModelForImageTextToText.from_pretrained(tmp_path / "target")(**batch)

    good = convert(str(tiny_llava(tmp_path / "clip")), tmp_path / "good", report=False)
    assert not any("drops the first patch" in note for note in good["notes"])


def test_a_tokenizer_that_5_saved_loads_in_457_too(tmp_path):
    """4.57 knows no TokenizersBackend and reads extra_special_tokens as a dict; with its own default class it would
    add token_type_ids, which LLaVA does not take."""
    saved = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<image>"],
        "bos_token": "<s>",
        "padding_side": "left",
    }
    write_json(tmp_path / "tokenizer_config.json", saved)
    assert len(make_tokenizer_portable(tmp_path)) == 2
    assert read(tmp_path, "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<image>"],
        "model_input_names": ["input_ids", "attention_mask"],
        "bos_token": "<s>",
        "padding_side": "left",
    }
    assert make_tokenizer_portable(tmp_path) == []


def test_a_tokenizer_that_both_load_is_copied_as_it_is(tmp_path):
    source = tiny_llava(tmp_path / "source")
    config = read(source, "tokenizer_config.json") | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": {"image_token": "<image>"},
    }
    write_json(source / "tokenizer_config.json", config)
    convert(str(source), tmp_path / "target", report=False)
    for name in ("tokenizer_config.json", "tokenizer.json", "chat_template.json"):
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()
