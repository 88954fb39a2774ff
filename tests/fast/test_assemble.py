"""assemble: parts keep their bits, both transformers lines load the result, processor and model count alike."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    PreTrainedTokenizerFast,
)

from llava_norm_align.conversion import assemble as module
from llava_norm_align.conversion.assemble import assemble
from tests.helpers import reader, tiny
from tests.helpers.lines import PYTHONS
from tests.helpers.parts import TOWERS, write_text, write_vision
from tests.helpers.reader import run_reader

OTHER = PYTHONS["5" if transformers.__version__.startswith("4.") else "4"]


@pytest.fixture
def photo(tmp_path):
    tiny.photo().save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


# tower, language model, tied, rows of its table (16: none is left for <image>), largest shard
PAIRS = [
    ("clip", "llama", False, 16, "5GB"),
    ("siglip", "qwen2", True, 16, "20KB"),
    ("dinov2", "mistral", True, 64, "5GB"),
    ("clip+text", "mistral", False, 16, "20KB"),
    ("siglip+text", "llama", True, 16, "5GB"),
    ("dinov2", "qwen2", False, 64, "20KB"),
]


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """All pairs, assembled in this transformers line and read in the other one, in one process."""
    root = tmp_path_factory.mktemp("assembled")
    tiny.photo().save(root / "photo.png")
    for number, (tower, *text) in enumerate(PAIRS):
        vision = write_vision(root / f"vision-{number}", tower)
        llm = write_text(root / f"text-{number}", *text)
        assemble(root / f"llava-{number}", str(vision), str(llm))
    if OTHER.is_file():
        folders = [root / f"llava-{number}" for number in range(len(PAIRS))]
        run_reader(OTHER, root / "photo.png", [], folders)
    return root


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: "-".join(map(str, PAIRS[number])))
def test_parts_keep_their_bits_in_both_lines(assembled, number):
    tower = PAIRS[number][0].removesuffix("+text")
    report, tensors = reader.read(assembled / f"llava-{number}", assembled / "photo.png")
    assert report["class"] == "LlavaForConditionalGeneration"
    assert report["missing"] == report["unexpected"] == []
    assert report["image_tokens"] == report["image_features"] == 4  # (28 / 14) ** 2: no CLS, no patch lost

    llm = AutoModelForCausalLM.from_pretrained(assembled / f"text-{number}").eval()
    eyes = TOWERS[tower].from_pretrained(assembled / f"vision-{number}").eval()
    with torch.no_grad():
        expected = llm(torch.tensor([report["text_ids"]])).logits
        features = eyes(tensors["pixel_values"], output_hidden_states=True).hidden_states[-2]
    assert torch.equal(tensors["text_logits"][..., : llm.config.vocab_size], expected)
    assert torch.equal(tensors["vision"], features)

    if not OTHER.is_file():
        pytest.skip(f"the other transformers line is not installed ({OTHER})")
    assert json.loads((assembled / f"llava-{number}.json").read_text()) == report
    other = torch.load(assembled / f"llava-{number}.pt")
    for name in ("text_logits", "logits", "vision"):
        torch.testing.assert_close(other[name], tensors[name], rtol=1e-5, atol=1e-5)


def test_weights_are_copied_under_published_names(tmp_path):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text", vocabulary=16)
    folder = assemble(tmp_path / "llava", str(vision), str(text))
    weights, llm = load_file(folder / "model.safetensors"), load_file(text / "model.safetensors")
    roots = {name.split(".")[0] + "." + name.split(".")[1] for name in weights}
    assert roots == {
        "vision_tower.vision_model",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
        "language_model.model",
        "language_model.lm_head",
    }
    for name, tensor in llm.items():
        assert torch.equal(weights[f"language_model.{name}"][: tensor.shape[0]], tensor)
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
    ):  # <image> is token 16: one row, the mean of the others
        assert weights[f"language_model.{name}"].shape == (17, 32)
        torch.testing.assert_close(weights[f"language_model.{name}"][16], llm[name].mean(0), rtol=1e-5, atol=1e-6)
    config = json.loads((folder / "config.json").read_text())
    assert config["image_token_index"] == 16 and config["text_config"]["vocab_size"] == 17
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert config["vision_feature_layer"] == -2 and config["vision_feature_select_strategy"] == "default"
    assert not list(folder.glob(".*"))


def test_half_precision_keeps_its_bytes(tmp_path):
    text = write_text(tmp_path / "text", "llama", tied=True, vocabulary=16)
    AutoModelForCausalLM.from_pretrained(text, dtype=torch.bfloat16).save_pretrained(text)
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    weights, llm = load_file(folder / "model.safetensors"), load_file(text / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert torch.equal(weights[f"language_model.{name}"][:16].view(torch.int16), llm[name].view(torch.int16))
    assert weights["multi_modal_projector.linear_1.weight"].dtype == torch.bfloat16
    assert weights["vision_tower.vision_model.post_layernorm.weight"].dtype == torch.float32
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight


def test_large_models_keep_shards(tmp_path, monkeypatch, photo):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text", shard="20KB")
    one = assemble(tmp_path / "one", str(vision), str(text))
    monkeypatch.setattr(module, "MAX_SINGLE_FILE", 1000)
    many = assemble(tmp_path / "many", str(vision), str(text))
    shards = sorted(path.name for path in many.glob("*.safetensors"))
    assert len(shards) == len(list(text.glob("model-*.safetensors"))) + 1 > 2
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    assert torch.equal(reader.read(one, photo)[1]["logits"], reader.read(many, photo)[1]["logits"])


def test_fresh_projector_is_transformers_own_start(tmp_path):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text")
    config = json.loads((text / "config.json").read_text())
    (text / "config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    name = "multi_modal_projector.linear_2"
    first, second, other = (
        load_file(assemble(tmp_path / f"llava-{i}", str(vision), str(text), seed=seed) / "model.safetensors")
        for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(first[f"{name}.weight"], second[f"{name}.weight"])
    assert not torch.equal(first[f"{name}.weight"], other[f"{name}.weight"])
    assert first[f"{name}.weight"].std().item() == pytest.approx(0.5, rel=0.1)  # 1,024 draws
    assert first[f"{name}.bias"].abs().max() == 0


@pytest.mark.parametrize("prefix", ["multi_modal_projector.", "", "model.multi_modal_projector."])
def test_projector_from_a_file(tmp_path, prefix):
    weights = {
        "linear_1.weight": (32, 16),
        "linear_1.bias": (32,),
        "linear_2.weight": (32, 32),
        "linear_2.bias": (32,),
    }
    weights = {name: torch.randn(shape) for name, shape in weights.items()}
    save_file({prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "projector.safetensors")
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text")
    folder = assemble(tmp_path / "llava", str(vision), str(text), tmp_path / "projector.safetensors")
    written = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        assert torch.equal(written[f"multi_modal_projector.{name}"], tensor)


def test_an_image_token_that_is_there_is_kept(tmp_path):
    text = write_text(tmp_path / "text", image_token=True)
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    config = json.loads((folder / "config.json").read_text())
    assert config["image_token_index"] == tiny.IMAGE_TOKEN_ID
    assert config["text_config"]["vocab_size"] == 64
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert weights.get_slice("language_model.model.embed_tokens.weight").get_shape() == [64, 32]


OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [(OWN_TEMPLATE, "[user]<image>\na cat ?[assistant]"), (None, "USER: <image>\na cat ? ASSISTANT:")],
)
def test_chat_template_takes_image_parts_and_strings(tmp_path, template, expected):
    text = write_text(tmp_path / "text", template=template)
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{"type": "text", "text": "a cat ?"}, {"type": "image"}]  # images come first all the same
    for content in (parts, "<image>\na cat ?"):
        messages = [{"role": "user", "content": content}]
        assert processor.apply_chat_template(messages, add_generation_prompt=True) == expected
    answered = processor.apply_chat_template(
        [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    )
    assert answered.startswith(expected.removesuffix("[assistant]").removesuffix(" ASSISTANT:"))
    assert "yes" in answered and "type" not in answered


def test_generation_config_saves_again(tmp_path):
    text = write_text(tmp_path / "text")
    settings = {"eos_token_id": [2, 5], "temperature": 0.6, "top_p": 0.9, "do_sample": False}
    (text / "generation_config.json").write_text(json.dumps(settings))
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 5], "do_sample": False}
    model = transformers.LlavaForConditionalGeneration.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [2, 5]
    model.save_pretrained(tmp_path / "again")  # refuses a temperature that is not used
    sampled = {**settings, "do_sample": True}
    (text / "generation_config.json").write_text(json.dumps(sampled))
    assemble(folder, str(tmp_path / "vision"), str(text), overwrite=True)
    assert json.loads((folder / "generation_config.json").read_text()) == sampled


def test_image_processor_of_siglip_has_a_crop_size_and_old_configs_load(tmp_path):
    vision, text = write_vision(tmp_path / "vision", "siglip"), write_text(tmp_path / "text")
    folder = assemble(tmp_path / "llava", str(vision), str(text))
    written = json.loads((folder / "preprocessor_config.json").read_text())
    assert written["crop_size"] == written["size"] == {"height": 28, "width": 28}
    clip = write_vision(tmp_path / "clip")
    old = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 28, "crop_size": 28, "resample": 2}
    (clip / "preprocessor_config.json").write_text(json.dumps({**old, "image_mean": [0.1, 0.2, 0.3]}))
    folder = assemble(tmp_path / "old", str(clip), str(text))
    written = json.loads((folder / "preprocessor_config.json").read_text())
    assert written["size"] == {"shortest_edge": 28} and written["crop_size"] == {"height": 28, "width": 28}
    assert written["image_mean"] == [0.1, 0.2, 0.3] and written["resample"] == 2
    assert AutoProcessor.from_pretrained(folder)(text="<image>", images=tiny.photo()).input_ids[0].count(16) == 4


def test_a_tokenizer_saved_by_this_line_loads(tmp_path, photo):
    text = write_text(tmp_path / "text")
    PreTrainedTokenizerFast.from_pretrained(text, additional_special_tokens=["<extra>"]).save_pretrained(text)
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<extra>", "<image>"]
    assert reader.read(folder, photo)[0]["image_tokens"] == 4


def test_a_tokenizer_without_a_fast_file_is_converted(tmp_path, photo):
    text = write_text(tmp_path / "text", "qwen2")
    (text / "tokenizer.json").unlink()
    letters = sorted({*"USER:ASSISTANT:whatisacat?<im>ge", "Ġ", "Ċ", "."})
    words = {word: index for index, word in enumerate(["</s>", "<pad>", *letters, "at"])}
    (text / "vocab.json").write_text(json.dumps(words))
    (text / "merges.txt").write_text("#version: 0.2\na t\n")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"}
    (text / "tokenizer_config.json").write_text(json.dumps(settings))
    folder = assemble(tmp_path / "llava", str(write_vision(tmp_path / "vision")), str(text))
    report, _ = reader.read(folder, photo)
    assert report["image_tokens"] == 4
    assert report["text_ids"].count(words["at"]) == 2  # what, cat
    assert not (folder / ".tokenizer").exists()
    if OTHER.is_file():
        run_reader(OTHER, photo, [], [folder])
        assert json.loads((tmp_path / "llava.json").read_text()) == report


def test_pickled_parts_make_the_same_files(tmp_path):
    vision, text = write_vision(tmp_path / "vision"), write_text(tmp_path / "text", vocabulary=16, shard="20KB")
    safe = assemble(tmp_path / "safe", str(vision), str(text))
    for folder in (vision, text):
        tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    pickled = assemble(tmp_path / "pickled", str(vision), str(text))
    expected, written = load_file(safe / "model.safetensors"), load_file(pickled / "model.safetensors")
    assert set(written) == set(expected)
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
