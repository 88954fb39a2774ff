"""extract_lm: a plain causal language model, its bytes, logits and tokens those of the LLaVA that it came from."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.convert import convert
from llava_norm_align.evaluation.extract_lm import describe, extract_lm
from tests.helpers import tiny
from tests.helpers.convert import tiny_llava, write_json
from tests.helpers.published import NAMES, write_published
from tests.helpers.refusals import REMEDY, state
from tests.helpers.safety import pickle_weights

TEXTS = ["What is in the picture?\nA dog  and 12 cats.", "Count from one to ten: <image> and </s> too", ""]
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
# what the text renders to when it is asked alone, by hand from the published templates
PROMPTS = {
    "llava-1.5-7b-hf": "USER: Hello there ASSISTANT:",
    "llava-interleave-qwen-0.5b-hf": "<|im_start|>user\n\nHello there<|im_end|><|im_start|>assistant\n",
    "llava-v1.6-mistral-7b-hf": "[INST] Hello there [/INST]",
    "llava-onevision-qwen2-0.5b-ov-hf": "<|im_start|>user\nHello there<|im_end|><|im_start|>assistant\n",
    "vip-llava-7b-hf": "USER: Hello there ASSISTANT:",
}


def tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read(folder):
    return json.loads((folder / "config.json").read_text())


def change_config(folder, **fields):
    write_json(folder / "config.json", read(folder) | fields)


def check_logits(source, folder, dtype):
    """Bit-equal over the whole vocabulary, of which the tokenizer need not have every row."""
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype=dtype).eval()
    alone, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {parameter.dtype for parameter in alone.parameters()} == {dtype}
    ids = torch.randint(0, alone.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    ids[ids == whole.config.image_token_id] = 0  # without its image
    with torch.no_grad():
        logits = alone.eval()(input_ids=ids).logits
        assert logits.isfinite().all() and logits.std() > 0
        assert logits.equal(whole(input_ids=ids).logits)
    return alone


@pytest.fixture(scope="module", params=NAMES)
def published(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    source = write_published(request.param, folder / "source")
    return request.param, source, folder / "lm", extract_lm(str(source), folder / "lm")


def test_a_published_checkpoint_gives_its_logits_and_tokens(published):
    _, source, folder, summary = published
    alone = check_logits(source, folder, {"F16": torch.float16, "BF16": torch.bfloat16}[summary["dtypes"][0]])
    assert type(alone).__name__ == summary["class"] == read(folder)["architectures"][0]
    own, tokenizer = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer(text).input_ids == own(text).input_ids
    assert tokenizer.eos_token_id == own.eos_token_id and tokenizer.bos_token_id == own.bos_token_id
    assert "token_type_ids" not in tokenizer("a")


def test_a_converted_published_checkpoint_gives_the_same_folder(published, tmp_path):
    """Also its tokenizer: AutoTokenizer of transformers 5 takes another class for our model types."""
    name, source, folder, _ = published
    convert(str(source), tmp_path / "aligned", report=False)
    extract_lm(str(tmp_path / "aligned"), tmp_path / "lm")
    first, second = ({p.name: p.read_bytes() for p in sorted(f.iterdir())} for f in (folder, tmp_path / "lm"))
    assert first.keys() == second.keys()
    # convert made xtuner's template, which takes strings, take images
    expected = ["chat_template.jinja"] if name.startswith("llava-llama-3") else []
    assert [name for name in first if first[name] != second[name]] == expected


def test_a_published_checkpoints_bytes_are_copied(published):
    _, source, folder, summary = published
    prefix = "language_model."
    expected = {n.removeprefix(prefix): t for n, t in tensors(source).items() if n.startswith(prefix)}
    found = tensors(folder)
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert summary["tensors"] == len(found) and summary["left_out"] == len(tensors(source)) - len(found)
    assert summary["rows"] == expected["model.embed_tokens.weight"].shape[0] == read(folder)["vocab_size"]


def test_a_published_chat_template_takes_strings(published):
    name, _, folder, summary = published
    added = "lines were added before it" in describe(summary)
    assert added is (name in PROMPTS)
    if not added:  # it took strings before
        return
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for content in ("Hello there", [{"type": "text", "text": "Hello there"}]):
        messages = [{"role": "user", "content": content}]
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == PROMPTS[name]


def test_nothing_of_the_images_is_left(published):
    _, _, folder, summary = published
    names = {path.name for path in folder.rglob("*")}
    assert names == set(summary["files"]) and not [name for name in names if "processor" in name]
    config = read(folder)
    assert not [field for field in config if "vision" in field or "image" in field or "norm_align" in field]
    assert "auto_map" not in config and config["rope_theta"] > 0
    assert "processor_class" not in (folder / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("text", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize(("layout", "shards", "tied"), [("old", 3, True), ("new", 1, False), ("new", 3, True)])
def test_layouts_shards_and_tied_heads(tmp_path, text, layout, shards, tied):
    source = tiny_llava(tmp_path / "source", layout, shards, torch.bfloat16, text=text, tied=tied)
    summary = extract_lm(str(source), tmp_path / "lm")
    alone = check_logits(source, tmp_path / "lm", torch.bfloat16)
    assert type(alone).__name__ == CLASSES[text]
    assert summary["tied"] is read(tmp_path / "lm")["tie_word_embeddings"] is tied
    names = {name for name, _ in alone.named_parameters()}  # a tied head is not among them
    assert set(tensors(tmp_path / "lm")) == names and ("lm_head.weight" in names) is not tied
    assert len(list((tmp_path / "lm").glob("*.safetensors"))) == len(summary["weights"]) <= shards
    assert "299 (the image token) stays" in describe(summary)


@pytest.mark.parametrize("kind", tiny.STOCK)
def test_the_norm_aligned_model_gives_the_same_folder(tmp_path, kind):
    stock = tiny.stock_llava(kind=kind)
    stock.save_pretrained(tmp_path / "stock")
    tiny.processor(kind=kind).tokenizer.save_pretrained(tmp_path / "stock")
    convert(str(tmp_path / "stock"), tmp_path / "aligned", report=False)
    folders = [tmp_path / "of-stock", tmp_path / "of-aligned"]
    for source, folder in zip(("stock", "aligned"), folders, strict=True):
        extract_lm(str(tmp_path / source), folder)
    check_logits(tmp_path / "aligned", folders[1], torch.float32)
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert first == second
    config = read(folders[0])  # the rotary settings of tiny.text_config, under the names that 4.57 reads
    assert config["rope_theta"] == 50_000.0
    assert {k: config["rope_scaling"][k] for k in tiny.LLAMA3_ROPE} == tiny.LLAMA3_ROPE
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(("shards", "tied"), [(1, True), (3, False)])
def test_pickled_weights_become_the_same_safetensors(tmp_path, shards, tied):
    source = tiny_llava(tmp_path / "source", shards=shards, tied=tied)
    extract_lm(str(source), tmp_path / "safe")
    if tied:  # torch.save keeps the tied head as a second name
        weights = load_file(source / "model.safetensors")
        weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"]
        torch.save(weights, source / "pytorch_model.bin")
        (source / "model.safetensors").unlink()
    else:
        pickle_weights(source)
    extract_lm(str(source), tmp_path / "pickled")
    expected, found = tensors(tmp_path / "safe"), tensors(tmp_path / "pickled")
    assert set(found) == set(expected) and all(found[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_stored_head_of_equal_bytes_goes_only_if_it_is_tied(tmp_path, tied):
    source = tiny_llava(tmp_path / "source", tied=tied)
    weights = load_file(source / "model.safetensors")
    weights["language_model.lm_head.weight"] = weights["language_model.model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    extract_lm(str(source), tmp_path / "lm")
    assert ("lm_head.weight" in tensors(tmp_path / "lm")) is not tied
    check_logits(source, tmp_path / "lm", torch.float32)


def test_a_head_of_its_own_stays_though_the_top_of_the_config_ties(tmp_path):
    source = tiny_llava(tmp_path / "source")
    change_config(source, tie_word_embeddings=True)
    extract_lm(str(source), tmp_path / "lm")
    assert read(tmp_path / "lm")["tie_word_embeddings"] is False
    head = load_file(source / "model.safetensors")["language_model.lm_head.weight"]
    assert tensors(tmp_path / "lm")["lm_head.weight"].equal(head)
    check_logits(source, tmp_path / "lm", torch.float32)


def test_buffers_of_old_versions_are_left_out(tmp_path):
    source = tiny_llava(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    extract_lm(str(source), tmp_path / "lm")
    assert not [name for name in tensors(tmp_path / "lm") if "inv_freq" in name]
    check_logits(source, tmp_path / "lm", torch.float32)


def test_what_the_text_part_leaves_out_is_filled_in(tmp_path):
    """As in published checkpoints: ids at the top or in generation_config.json, sizes left to the config class."""
    source = tiny_llava(tmp_path / "source")
    text = read(source)["text_config"]
    for name in ("bos_token_id", "eos_token_id", "rope_theta", "rope_parameters", "rope_scaling", "rms_norm_eps"):
        text.pop(name, None)
    change_config(source, text_config=text, eos_token_id=7)
    write_json(source / "generation_config.json", {"bos_token_id": 5, "eos_token_id": [7, 9], "temperature": 0.2})
    extract_lm(str(source), tmp_path / "lm")
    found = read(tmp_path / "lm")
    assert (found["bos_token_id"], found["eos_token_id"]) == (5, 7)
    assert (found["rope_theta"], found["rms_norm_eps"]) == (10_000.0, 1e-6)  # LlamaConfig's
    # temperature is refused by save_pretrained where nothing is sampled
    generation = json.loads((tmp_path / "lm/generation_config.json").read_text())
    assert generation == {"bos_token_id": 5, "eos_token_id": [7, 9]}
    check_logits(source, tmp_path / "lm", torch.float32).save_pretrained(tmp_path / "again")


def test_licences_come_along_and_the_model_card_does_not(tmp_path):
    source = tiny_llava(tmp_path / "source")
    for name in ("LICENSE.txt", "NOTICE", "README.md"):
        (source / name).write_text(name)
    summary = extract_lm(str(source), tmp_path / "lm")
    assert {"LICENSE.txt", "NOTICE"} <= set(summary["files"]) and "README.md" not in summary["files"]


def test_a_template_that_fails_on_text_is_kept_and_told(tmp_path):
    source = tiny_llava(tmp_path / "source")
    template = "{{ raise_exception('needs an image') }}"
    write_json(source / "chat_template.json", {"chat_template": template})
    assert "does not render text alone" in describe(extract_lm(str(source), tmp_path / "lm"))
    assert (tmp_path / "lm/chat_template.jinja").read_text() == template
    (source / "chat_template.json").unlink()
    assert "no chat template" in describe(extract_lm(str(source), tmp_path / "lm", overwrite=True))
    assert not (tmp_path / "lm/chat_template.jinja").exists()


def test_a_tokenizer_that_would_read_otherwise_is_refused(tmp_path):
    """transformers 5 takes Qwen2's own rules for every tokenizer of a qwen2."""
    tiny.stock_llava(family="qwen2").save_pretrained(tmp_path / "source")
    tiny.processor().tokenizer.save_pretrained(tmp_path / "source")
    if transformers.__version__.startswith("4."):
        extract_lm(str(tmp_path / "source"), tmp_path / "lm")
        return
    with pytest.raises(InputError, match="takes Qwen2Tokenizer, which reads it as"):
        extract_lm(str(tmp_path / "source"), tmp_path / "lm")
    assert not (tmp_path / "lm").exists()


def no_tokenizer(source):
    for path in source.glob("*token*"):
        path.unlink()


def adapter(source):
    write_json(source / "adapter_config.json", {})


def quantised(source):
    change_config(source, quantization_config={"quant_method": "awq"})


def integers(source):
    weights = load_file(source / "model.safetensors")
    weights["language_model.model.norm.weight"] = weights["language_model.model.norm.weight"].to(torch.int8)
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def layer_missing(source):
    weights = load_file(source / "model.safetensors")
    del weights["language_model.model.norm.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def without_head(source):
    weights = load_file(source / "model.safetensors")
    del weights["language_model.lm_head.weight"]
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def vision_only(source):
    weights = load_file(source / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("language_model.")}
    save_file(weights, source / "model.safetensors", {"format": "pt"})


def other_width(source):
    change_config(source, text_config=read(source)["text_config"] | {"intermediate_size": 64})


def no_text_config(source):
    change_config(source, text_config=None)


def bad_field(source):
    change_config(source, text_config=read(source)["text_config"] | {"model_type": "no_such_model"})


def language_model_itself(source):
    extract_lm(str(source), source.with_name("lm"))
    shutil.rmtree(source)
    source.with_name("lm").rename(source)


def other_model(source):
    change_config(source, model_type="qwen2_vl")


def misspelt_norm(source):
    change_config(source, model_type="llava_norm_align", norm_align_type="batch_norm")


def broken_tokenizer(source):
    (source / "tokenizer.json").write_text("{}")


def cut(source):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (no_tokenizer, "no tokenizer in"),
        (adapter, "PEFT adapter"),
        (quantised, "is quantised: config.json"),
        (integers, "stored as I8"),
        (layer_missing, r"do not match its text_config \(missing keys: 1, such as model.norm.weight"),
        (without_head, "no lm_head.weight"),
        (vision_only, "no text embedding table"),
        (other_width, "mismatched keys"),
        (no_text_config, "text_config in .* is null"),
        (bad_field, "cannot read .*config.json as a llava"),
        (language_model_itself, "no vision tower to leave out: .* model_type llama"),
        (other_model, "is no LLaVA: .* model_type qwen2_vl"),
        (misspelt_norm, "norm_align_type is 'batch_norm'"),
        (broken_tokenizer, "cannot be loaded"),
        (cut, "cut or damaged"),
    ],
)
def test_bad_sources_are_refused_and_nothing_is_left(tmp_path, fault, message):
    source = tiny_llava(tmp_path / "source")
    fault(source)
    before = state(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        extract_lm(str(source), tmp_path / "below" / "lm")
    assert REMEDY.search(str(refused.value)) and ".writing" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert state(tmp_path) == before


def test_targets_are_refused_as_by_the_other_verbs(tmp_path):
    source = tiny_llava(tmp_path / "source")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("x")
    before = state(tmp_path)
    for target, overwrite, message in (
        (source, True, "overlap"),
        (source / "lm", False, "overlap"),
        (tmp_path / "full", False, "not empty"),
        (tmp_path / "full", True, "holds no model"),
    ):
        with pytest.raises(InputError, match=message):
            extract_lm(str(source), target, overwrite=overwrite)
    with pytest.raises(InputError, match="no revision main"):
        extract_lm(str(source), tmp_path / "lm", revision="main")
    assert state(tmp_path) == before
    extract_lm(str(source), tmp_path / "lm")
    with pytest.raises(InputError, match=re.escape(f"{tmp_path / 'lm'} is not empty")):
        extract_lm(str(source), tmp_path / "lm")
    extract_lm(str(source), tmp_path / "lm", overwrite=True)
