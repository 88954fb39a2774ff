"""A LLaVA in the original repository's layout becomes a stock one that computes the same."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoProcessor, AutoTokenizer, CLIPImageProcessor, LlavaForConditionalGeneration

from llava_norm_align.common.weights import read_weights
from llava_norm_align.conversion.original import is_original, stage_original
from tests.helpers import original, reader, tiny
from tests.helpers.lines import PYTHONS
from tests.helpers.parts import write_text, write_vision
from tests.helpers.reader import run_reader

OTHER = PYTHONS["5" if transformers.__version__.startswith("4.") else "4"]
QUESTION = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is in the picture ?"}]}]
PROMPT = "USER: <image>\nwhat is in the picture ? ASSISTANT:"


def read(folder, image=None):
    """Stock model, processor and the inputs of one question."""
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    processor = AutoProcessor.from_pretrained(folder)
    prompt = processor.apply_chat_template(QUESTION, add_generation_prompt=True)
    return model.eval(), processor, processor(text=prompt, images=image or tiny.photo(), return_tensors="pt")


def check_parity(parts, stage, before, after, image=None, tolerance=1e-5, feature="patch"):
    """The stock model on the written processor's inputs gives what the parts give by hand."""
    model, processor, inputs = read(stage, image)
    patches = 4 + (feature == "cls_patch")
    image_token = model.config.image_token_index
    assert inputs["input_ids"][0].tolist() == [*before, *[image_token] * patches, *after]
    pixels = CLIPImageProcessor.from_pretrained(parts.vision)(image or tiny.photo(), return_tensors="pt")[
        "pixel_values"
    ]
    torch.testing.assert_close(inputs["pixel_values"], pixels, rtol=0, atol=1e-6)
    expected = parts.logits(before, pixels, after, feature)
    with torch.no_grad():
        logits = model(**inputs).logits
    torch.testing.assert_close(logits[..., : expected.shape[-1]], expected, rtol=tolerance, atol=tolerance)
    return model, processor, logits


CASES = {
    "llama, shards": dict(kind="llama"),
    "llama, one .bin, tower trained along": dict(kind="llama", layout="bin", train_tower=True),
    "mistral, safetensors": dict(kind="mistral", layout="safetensors"),
    "qwen2, tied, shards": dict(kind="qwen2", tied=True),
    "qwen2, tied, safetensors, tower trained along": dict(
        kind="qwen2", tied=True, layout="safetensors", train_tower=True
    ),
    "every state of the tower": dict(kind="llama", mm_vision_select_feature="cls_patch"),
    "newer type": dict(kind="llama", model_type="llava_llama", architectures="absent"),
}


@pytest.mark.parametrize("case", CASES)
def test_stock_llava_computes_the_same(tmp_path, case):
    parts = original.build(tmp_path, **CASES[case])
    assert is_original(parts.folder)
    before, after = original.encode(parts.folder, PROMPT)
    stage = tmp_path / "stage"
    notes, _ = stage_original(parts.folder, stage, str(parts.vision), None)
    feature = CASES[case].get("mm_vision_select_feature", "patch")
    model, processor, logits = check_parity(parts, stage, before, after, feature=feature)
    assert model.config.text_config.model_type == CASES[case]["kind"]
    assert model.config.image_token_index == processor.tokenizer.convert_tokens_to_ids("<image>") == 300
    assert (
        logits.shape[-1] == model.get_input_embeddings().weight.shape[0] == model.config.text_config.vocab_size == 320
    )
    assert processor.tokenizer.pad_token == "<unk>"
    best = logits[..., :300].max(-1).values
    assert (logits[..., 300:] < best[..., None]).all()  # none of the added rows is ever generated
    assert any("300 -> 320" in note for note in notes) and any("chat template" in note for note in notes)
    assert not list(stage.glob(".*"))


def test_bytes_names_and_config(tmp_path):
    parts = original.build(tmp_path, "llama", dtype=torch.float16, train_tower=True)
    stage = tmp_path / "stage"
    stage_original(parts.folder, stage, str(parts.vision), None)
    written, source = load_file(stage / "model.safetensors"), read_weights(parts.folder).tensors
    names = {
        "model.mm_projector.0.": "multi_modal_projector.linear_1.",
        "model.mm_projector.2.": "multi_modal_projector.linear_2.",
        "model.vision_tower.vision_tower.": "vision_tower.",
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    del source["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert len(written) == len(source)
    for name, stored in source.items():
        old = next(prefix for prefix in names if name.startswith(prefix))
        tensor = written[names[old] + name.removeprefix(old)]
        assert tensor.dtype == torch.float16
        with stored.file.open("rb") as file:
            file.seek(stored.offset)
            assert tensor.numpy().tobytes()[: stored.nbytes] == file.read(stored.nbytes), name
    for name, table in (("model.embed_tokens", parts.llm.get_input_embeddings()), ("lm_head", parts.llm.lm_head)):
        rows = written[f"language_model.{name}.weight"]
        assert rows.shape == (320, 32)
        torch.testing.assert_close(rows[300:], table.weight.mean(0).expand(20, 32), rtol=1e-3, atol=1e-4)

    config = json.loads((stage / "config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], text["model_type"], config["vision_config"]["model_type"]) == (
        "llava",
        "llama",
        "clip_vision_model",
    )
    assert not [
        key
        for key in text
        if key.startswith(("mm_", "tune_", "image_", "freeze_", "use_mm", "unfreeze_", "max_length"))
    ]
    assert text["rope_theta"] == 50_000.0 and text["rope_scaling"]["factor"] == 8.0
    assert config["dtype"] == "float16" and config["vision_feature_layer"] == -2
    assert config["vision_feature_select_strategy"] == "default"


def test_projector_keeps_its_own_dtype(tmp_path):
    parts = original.build(tmp_path, "llama", layout="bin")
    tensors = torch.load(parts.folder / "pytorch_model.bin", weights_only=True)
    tensors |= {n: t.to(torch.bfloat16) for n, t in tensors.items() if "mm_projector" in n}
    torch.save(tensors, parts.folder / "pytorch_model.bin")
    stage_original(parts.folder, tmp_path / "stage", str(parts.vision), None)
    written = load_file(tmp_path / "stage" / "model.safetensors")
    assert written["multi_modal_projector.linear_1.weight"].dtype == torch.bfloat16
    assert written["language_model.lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("as_file", [True, False])
def test_a_projector_alone(tmp_path, as_file, config):
    """What LLaVA's first stage saves, with the language model and the tower that it was trained between."""
    parts = original.build(tmp_path, "llama", image_aspect_ratio="absent")
    text = tmp_path / "text"
    parts.llm.save_pretrained(text)
    for path in parts.folder.glob("*token*"):
        shutil.copy(path, text)
    source = tmp_path / "projector"
    source.mkdir()
    states = {f"model.mm_projector.{name}": tensor for name, tensor in parts.projector.state_dict().items()}
    torch.save(states, source / "mm_projector.bin")
    if config:
        shutil.copy(parts.folder / "config.json", source)
    assert is_original(source) and is_original(source / "mm_projector.bin")
    source = source / "mm_projector.bin" if as_file else source
    notes, _ = stage_original(source, tmp_path / "stage", str(parts.vision), str(text))
    check_parity(parts, tmp_path / "stage", *original.encode(parts.folder, PROMPT))
    assert any("-2, patches" in note for note in notes) is not config


def test_images_are_padded_as_in_training(tmp_path):
    parts = original.build(tmp_path, "llama", image_aspect_ratio="pad")
    stage = tmp_path / "stage"
    notes, _ = stage_original(parts.folder, stage, str(parts.vision), None)
    assert any("padded to a square" in note for note in notes)
    photo = tiny.photo()  # 52 x 40
    tower_processor = CLIPImageProcessor.from_pretrained(parts.vision)
    expected = tower_processor(original.pad_to_square(photo, tower_processor.image_mean), return_tensors="pt")
    plain = tower_processor(photo, return_tensors="pt")
    pixels = read(stage)[2]["pixel_values"]
    torch.testing.assert_close(pixels, expected["pixel_values"], rtol=0, atol=1e-6)
    assert (pixels - plain["pixel_values"]).abs().max() > 0.1
    _, _, inputs = read(stage, photo.transpose(method=2))  # 40 x 52
    turned = original.pad_to_square(photo.transpose(method=2), tower_processor.image_mean)
    torch.testing.assert_close(
        inputs["pixel_values"], tower_processor(turned, return_tensors="pt")["pixel_values"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("legacy", [True, False])
def test_prompts_are_split_as_in_training(tmp_path, legacy):
    parts = original.build(tmp_path, "llama")
    original.write_slow_tokenizer(parts.folder, legacy=legacy)
    stage_original(parts.folder, tmp_path / "stage", str(parts.vision), None)
    processor = AutoProcessor.from_pretrained(tmp_path / "stage")
    for prompt in (PROMPT, "<image>\na cat", "USER: a\nb <image>\n\nred é ? ASSISTANT:", "a <image>\n"):
        before, after = original.encode(parts.folder, prompt)
        before = before[: len(before) if prompt.partition("<image>")[0] else 1]
        ids = processor(text=prompt, images=tiny.photo()).input_ids[0]
        assert ids == [*before, *[300] * 4, *after], prompt
        assert (
            processor.tokenizer.decode(ids, skip_special_tokens=True).split() == prompt.replace("<image>", "").split()
        )
    turns = processor.tokenizer("ASSISTANT: a cat</s>USER: a dog").input_ids
    second = processor.tokenizer.convert_ids_to_tokens(turns[turns.index(2) + 1 :])
    assert "".join(second) == ("▁USER:▁a▁dog" if legacy else "USER:▁a▁dog")
    config = json.loads((tmp_path / "stage" / "config.json").read_text())
    (tmp_path / "stage" / "config.json").write_text(json.dumps(config | {"model_type": "unknown"}))
    alone = AutoTokenizer.from_pretrained(tmp_path / "stage")  # as of a converted model without its code
    assert alone(PROMPT).input_ids == processor.tokenizer(PROMPT).input_ids


def test_a_tokenizer_without_padding_gets_a_token(tmp_path):
    parts = original.build(tmp_path, "llama", pad_token_id="absent")
    original.write_slow_tokenizer(parts.folder, pad=None)
    stage = tmp_path / "stage"
    notes, _ = stage_original(parts.folder, stage, str(parts.vision), None)
    assert any("<image> 300, <pad> 301" in note for note in notes)
    model, processor, _ = read(stage)
    assert processor.tokenizer.pad_token == "<pad>" and processor.tokenizer.pad_token_id == 301
    assert model.generation_config.pad_token_id == model.config.text_config.pad_token_id == 301
    batch = processor(text=["a cat", "a red cat and a dog"], padding=True)
    assert 301 in batch["input_ids"][0] and batch["attention_mask"][0].count(0) > 0


def test_own_tokenizer_and_rows_are_kept(tmp_path):
    """A fast tokenizer with a template of its own, an `<image>` token that it has, and rows enough for it."""
    parts = original.build(tmp_path, "qwen2", layout="bin")
    for path in parts.folder.glob("*token*"):
        path.unlink()
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    text = write_text(tmp_path / "text", "qwen2", template=template, image_token=True)
    shutil.copy(text / "tokenizer.json", parts.folder)
    settings = json.loads((text / "tokenizer_config.json").read_text())
    special = settings | {"pad_token": "<unk>"}
    del settings["pad_token"]
    (parts.folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (parts.folder / "special_tokens_map.json").write_text(json.dumps(special))
    stage = tmp_path / "stage"
    notes, _ = stage_original(parts.folder, stage, str(parts.vision), None)
    model, processor, inputs = read(stage)
    assert model.config.image_token_index == tiny.IMAGE_TOKEN_ID
    assert processor.tokenizer.pad_token == "<unk>" and processor.tokenizer.pad_token_id == 3
    assert model.get_input_embeddings().weight.shape[0] == original.VOCABULARY
    assert processor.apply_chat_template(QUESTION) == "<user><image>\nwhat is in the picture ?"
    assert not any("chat template" in note for note in notes)
    assert (inputs["input_ids"] == tiny.IMAGE_TOKEN_ID).sum() == 4


def test_both_lines_read_it_alike(tmp_path):
    tiny.photo().save(tmp_path / "photo.png")
    folders = []
    for number, case in enumerate((dict(kind="llama", image_aspect_ratio="pad"), dict(kind="qwen2", tied=True))):
        parts = original.build(tmp_path / str(number), **case)
        stage_original(parts.folder, tmp_path / f"stage-{number}", str(parts.vision), None)
        folders.append(tmp_path / f"stage-{number}")
    here = [reader.read(folder, tmp_path / "photo.png") for folder in folders]
    for report, _ in here:
        assert report["missing"] == report["unexpected"] == [] and report["image_tokens"] == 4
    if not OTHER.is_file():
        pytest.skip(f"the other transformers line is not installed ({OTHER})")
    run_reader(OTHER, tmp_path / "photo.png", [], folders)
    for folder, (report, tensors) in zip(folders, here, strict=True):
        assert json.loads(folder.with_suffix(".json").read_text()) == report
        other = torch.load(folder.with_suffix(".pt"))
        for name in ("pixel_values", "logits", "text_logits"):
            torch.testing.assert_close(other[name], tensors[name], rtol=1e-5, atol=1e-5)


def test_other_folders_are_not_original(tmp_path):
    assert not is_original(write_vision(tmp_path / "vision"))
    assert not is_original(write_text(tmp_path / "text"))
    (tmp_path / "hf").mkdir()
    content = {"model_type": "llava", "text_config": {}, "vision_config": {}, "mm_vision_tower": "kept by a fork"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(content))
    assert not is_original(tmp_path / "hf")
