"""convert, on checkpoints structured as published ones."""

import functools
import json
import math

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.utils import is_torchvision_available

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.report import run_job
from tests.helpers.lines import run_alone
from tests.helpers.published import NAMES, write_published

QUESTION = "What is in the picture?"
# image tokens that the published processor gives for one photo; None: as many as the model has features
PUBLISHED_TOKENS = {"llava-1.5-7b-hf": 576, "llava-interleave-qwen-0.5b-hf": 729, "vip-llava-7b-hf": 575}
NO_PROCESSOR_FILE = "llava-llama-3-8b-v1_1-transformers"
NEED_TORCHVISION = {"llava-onevision-qwen2-0.5b-ov-hf"}  # for its video processor
if transformers.__version__[0] == "5":
    NEED_TORCHVISION |= {"pixtral-12b"}
SHARDS = dict(zip(NAMES, [3, 1, 4, 6, 4, 1, 3], strict=True))
ZERO_ROWS = {"llava-llama-3-8b-v1_1-transformers": 251}  # <|reserved_special_token_0|> to 250
LEFT_BEHIND = {"config.json", "model.safetensors.index.json"}


def has_processor(name):
    return is_torchvision_available() or name not in NEED_TORCHVISION


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """A function of the name: it, its published folder, its converted folder, and the summary of the conversion."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("published")
        source, picture = write_published(name, folder / "source"), folder / "photo.png"
        photo().save(picture)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion, "run_in_fresh_process", run_job)
            summary = convert(str(source), folder / "target", report=has_processor(name), images=[picture])
        return name, source, folder / "target", summary

    return make


@pytest.fixture(params=NAMES)
def case(request, cases):
    return cases(request.param)


def photo(width=130, height=70, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def load(folder, dtype=torch.float32):
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


@torch.no_grad()
def count_features(model, inputs):
    images = {name: inputs[name] for name in ("pixel_values", "image_sizes") if name in inputs}
    found = model.model.get_image_features(**images)
    found = found.pooler_output if hasattr(found, "pooler_output") else found
    return sum(features.reshape(-1, features.shape[-1]).shape[0] for features in found)


def chat(processor):
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def inputs_without_processor(folder, model, images):
    """Pixels, and as many placeholders as the stock model has features: what a processor should give."""
    tokenizer, config = AutoTokenizer.from_pretrained(folder), model.config
    pixels = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
    features = count_features(model, pixels)
    placeholders = torch.full((features,), config.image_token_index)
    if config.vision_config.model_type == "pixtral":  # [IMG_BREAK] after each row, [IMG_END] after the last
        size, rows = config.vision_config.patch_size, []
        for height, width in pixels["image_sizes"].tolist():
            row = torch.tensor([config.image_token_index] * (width // size) + [12])
            rows += [row] * (height // size - 1) + [torch.cat([row[:-1], torch.tensor([13])])]
        placeholders = torch.cat(rows)
        assert (placeholders == config.image_token_index).sum() == features
    text = torch.tensor(tokenizer(QUESTION).input_ids)
    ids = torch.cat([text[:2], placeholders, text])[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}


def model_inputs(name, folder, model):
    """Of one photo and a question: by the processor of `folder`, where it can be loaded."""
    if not has_processor(name):
        return inputs_without_processor(folder, model, [photo()])
    processor = AutoProcessor.from_pretrained(folder)
    text = chat(processor) if processor.chat_template else f"USER: {processor.image_token}\n{QUESTION} ASSISTANT:"
    return dict(processor(text=text, images=photo(), return_tensors="pt"))


def align(target):
    """The norm by its definition: xhat T / sqrt(D) for each token."""

    def hook(module, args, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * target / math.sqrt(x.shape[-1])

    return hook


def read_tensor(folder, name):
    """One tensor as float64, by the safetensors format alone, from the file that the index names."""
    file = folder / "model.safetensors"
    if not file.exists():
        file = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    if entry["dtype"] == "BF16":
        numbers = (np.frombuffer(content[begin:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = np.frombuffer(content[begin:end], {"F16": np.float16, "F32": np.float32}[entry["dtype"]])
    return numbers.astype(np.float64).reshape(entry["shape"])


def test_the_fixture_loads_in_stock_transformers_and_counts_image_tokens_as_published(case):
    name, source, _, _ = case
    model = load(source)
    assert type(model).__name__ == json.loads((source / "config.json").read_text())["architectures"][0]
    assert sum(file.stat().st_size for file in source.glob("*.safetensors")) < 2_000_000
    assert len(list(source.glob("*.safetensors"))) == SHARDS[name]
    tokenizer = AutoTokenizer.from_pretrained(source)
    config = model.config
    assert tokenizer.convert_ids_to_tokens(config.image_token_index) in ("<image>", "[IMG]")
    assert len(tokenizer) <= config.text_config.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert tokenizer.decode(tokenizer(QUESTION, add_special_tokens=False).input_ids) == QUESTION
    if not has_processor(name):
        return
    processor = AutoProcessor.from_pretrained(source)
    if name == NO_PROCESSOR_FILE:  # saved before LlavaProcessor had these fields
        with pytest.raises(TypeError):
            processor(text="<image>", images=photo(), return_tensors="pt")
        return
    inputs = processor(text=chat(processor), images=photo(), return_tensors="pt")
    tokens = int((inputs["input_ids"] == config.image_token_index).sum())
    features = count_features(model, inputs)
    assert tokens == PUBLISHED_TOKENS.get(name, features)
    assert (tokens == features) == (name != "vip-llava-7b-hf")


def test_everything_comes_along_and_the_norm_follows_the_projectors_names(case):
    name, source, target, _ = case
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    ours = {"architectures", "auto_map", "model_type", *(key for key in after if key.startswith("norm_align_"))}
    expected = {key: value for key, value in before.items() if key not in ours}
    for part in ("text_config", "vision_config"):
        if "torch_dtype" in expected[part]:  # of the stored weights, which is the top level's
            expected[part]["torch_dtype"] = before["torch_dtype"]
    if "qwen" in name:  # no head is stored; said at the top and in text_config, for every reader
        expected["tie_word_embeddings"] = True
        assert before["text_config"]["tie_word_embeddings"]
    assert expected == {key: value for key, value in after.items() if key not in ours}

    small = {path.name for path in source.iterdir() if path.suffix != ".safetensors"} - LEFT_BEHIND
    assert small <= {path.name for path in target.iterdir()}
    for file in small - {"preprocessor_config.json", "processor_config.json", "tokenizer_config.json"}:
        assert (target / file).read_bytes() == (source / file).read_bytes(), file
    settings = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in (source, target)]
    if "onevision" not in name and "pixtral" not in name:  # whose class transformers 5 leaves out of account
        settings[0]["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings[0].setdefault("model_input_names", ["input_ids", "attention_mask"])
    assert settings[0] == settings[1]

    shards = sorted(source.glob("*.safetensors"))
    written = sorted(target.glob("*.safetensors"))
    assert [path.name for path in written] == [f"model-{n:05d}-of-{len(shards) + 1:05d}.safetensors" for n in
                                               range(1, len(shards) + 2)]  # fmt: skip
    for old, new in zip(shards, written, strict=False):
        assert old.read_bytes() == new.read_bytes()
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    norm = {key for key, file in index.items() if file == written[-1].name}
    assert norm == {f"multi_modal_projector.align_norm.{part}" for part in ("weight", "bias")}
    for key in norm:
        assert read_tensor(target, key).shape == (after["text_config"]["hidden_size"],)


def test_the_target_is_the_mean_norm_of_all_rows_that_are_not_zero(case):
    name, source, target, summary = case
    norms = np.sqrt((read_tensor(source, "language_model.model.embed_tokens.weight") ** 2).sum(axis=1))
    vocabulary = json.loads((source / "config.json").read_text())["text_config"]["vocab_size"]
    assert len(norms) == vocabulary and (norms == 0).sum() == ZERO_ROWS.get(name, 0)
    expected = norms[norms > 0].mean()
    table = summary["calibration"]["table"]
    assert (table["rows"], table["rows_left_out"]) == (vocabulary, ZERO_ROWS.get(name, 0))
    assert summary["calibration"]["target_norm"] == pytest.approx(expected, rel=1e-12)
    gain = read_tensor(target, "multi_modal_projector.align_norm.weight")
    np.testing.assert_allclose(gain, expected / math.sqrt(len(gain)), rtol=1e-6)


def test_the_processor_gives_as_many_image_tokens_as_the_model_has_features(case):
    name, source, target, _ = case
    if not has_processor(name):
        with pytest.raises(ImportError, match="Torchvision"):
            AutoProcessor.from_pretrained(target)
        return
    processor = AutoProcessor.from_pretrained(target)
    assert type(processor).__name__ == json.loads((target / "processor_config.json").read_text())["processor_class"]
    model = load(source)
    inputs = model_inputs(name, target, model)
    assert (inputs["input_ids"] == model.config.image_token_index).sum() == count_features(model, inputs) > 0


def test_the_converted_model_is_the_stock_model_with_a_norm_after_its_projector(case):
    name, source, target, summary = case
    stock, model = load(source), load(target)
    inputs = model_inputs(name, target, stock)
    with torch.no_grad():
        plain = stock(**inputs).logits
        stock.model.multi_modal_projector.register_forward_hook(align(summary["calibration"]["target_norm"]))
        aligned = stock(**inputs).logits
        torch.testing.assert_close(model(**inputs).logits, aligned, atol=1e-5, rtol=1e-5)
    assert (aligned - plain).abs().max() > 1e-3  # the comparison can fail


def test_text_alone_gives_the_same_bits_in_the_published_dtype(case):
    name, source, target, _ = case
    dtype = getattr(torch, json.loads((source / "config.json").read_text())["torch_dtype"])
    ids = torch.tensor(AutoTokenizer.from_pretrained(source)(QUESTION).input_ids)[None]
    assert torch.equal(torch.tensor(AutoTokenizer.from_pretrained(target)(QUESTION).input_ids)[None], ids)
    with torch.no_grad():
        before, after = (load(folder, dtype)(input_ids=ids).logits for folder in (source, target))
    assert before.dtype == dtype and torch.equal(before, after)


def test_the_generation_settings_are_kept(case):
    _, source, target, _ = case
    before, after = (load(folder).generation_config for folder in (source, target))
    assert before.eos_token_id is not None
    for setting in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(before, setting) == getattr(after, setting)


def test_the_report(case, tmp_path):
    name, source, _, summary = case
    if not has_processor(name):
        assert summary["report"] is None
        photo().save(tmp_path / "photo.png")
        with pytest.raises(InputError, match="Torchvision"):
            convert(str(source), tmp_path / "target", report=True, images=[tmp_path / "photo.png"])
        assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]
        return
    report, norm = summary["report"], summary["calibration"]["target_norm"]
    assert report["text_logits_equal"] is True and report["image_prompts"] == 3
    assert report["layer0_norms"]["target"]["visual"] == pytest.approx(norm, rel=0.01)
    assert report["layer0_norms"]["source"]["visual"] > 2 * norm


def test_every_part_has_the_dtype_that_the_weights_are_stored_in(case):
    """4.57 gives each part the dtype that its own config names: stock models with other names there fail on images."""
    name, source, target, _ = case
    model = load(target, "auto")
    stored = getattr(torch, json.loads((source / "config.json").read_text())["torch_dtype"])
    dtypes = {key: tensor.dtype for key, tensor in model.named_parameters() if "align_norm" not in key}
    assert set(dtypes.values()) == {stored}
    inputs = model_inputs(name, target, model)
    inputs["pixel_values"] = inputs["pixel_values"].to(stored)
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


def test_every_converted_model_answers_alone(cases, tmp_path):
    """One process in which the package cannot be imported reads all of them."""
    tasks, expected = [], []
    for name in NAMES:
        _, source, target, summary = cases(name)
        stock = load(source)
        inputs = model_inputs(name, target, stock)
        stock.model.multi_modal_projector.register_forward_hook(align(summary["calibration"]["target_norm"]))
        with torch.no_grad():
            expected.append(stock(**inputs).logits)
        files = {"inputs": str(tmp_path / f"{name}.inputs"), "out": str(tmp_path / f"{name}.logits")}
        torch.save(inputs, files["inputs"])
        tasks.append({"do": "answer", "folder": str(target), "options": {"dtype": "float32"}, **files})
    for task, answer, logits in zip(tasks, run_alone(tasks, tmp_path), expected, strict=True):
        assert answer["missing"] == [] and "NormAlign" in answer["class"]
        torch.testing.assert_close(torch.load(task["out"]), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["pixtral-12b"], indirect=True)
def test_two_images_of_different_sizes_in_one_batch(case):
    """Pixtral's images are not cut to one size: image_sizes says which pixels are padding."""
    _, source, target, summary = case
    images = [photo(130, 70), photo(90, 200, seed=1)]
    stock, model = load(source), load(target)
    inputs = inputs_without_processor(source, stock, images)
    assert inputs["image_sizes"].tolist() == [[80, 144], [208, 96]]
    assert inputs["pixel_values"].shape == (2, 3, 208, 144)
    patches = (80 * 144 + 208 * 96) // 16**2
    if is_torchvision_available() or transformers.__version__[0] == "4":
        processor = AutoProcessor.from_pretrained(target)
        tokens = processor(text="[IMG] and [IMG]", images=images, return_tensors="pt")["input_ids"]
        assert (tokens == 10).sum() == patches and (tokens == 12).sum() == 4 + 12 and (tokens == 13).sum() == 2

    seen = []
    model.model.multi_modal_projector.align_norm.register_forward_hook(lambda module, args, x: seen.append((*args, x)))
    with torch.no_grad():
        logits = model(**inputs).logits
        ((before, after),) = seen
        norm = align(summary["calibration"]["target_norm"])
        torch.testing.assert_close(after, norm(None, None, before))
        assert after.reshape(-1, after.shape[-1]).shape[0] == patches
        stock.model.multi_modal_projector.register_forward_hook(norm)
        torch.testing.assert_close(logits, stock(**inputs).logits, atol=1e-5, rtol=1e-5)
        swapped = model(**{**inputs, "pixel_values": inputs["pixel_values"].flip(0)}).logits
    assert (swapped - logits).abs().max() > 1e-3  # the pixels and their order count
