"""convert: a converted folder gives the token ids of its source, as a user loads both without this package."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers.utils import is_torchvision_available

from llava_norm_align.conversion.convert import convert
from tests.helpers import published_tokenizers, tiny
from tests.helpers.convert import write_json
from tests.helpers.lines import run_alone
from tests.helpers.published import NAMES, write_published

FAMILIES = {
    "llava": "llava-1.5-7b-hf",
    "llava_next": "llava-v1.6-mistral-7b-hf",
    "llava_onevision": "llava-onevision-qwen2-0.5b-ov-hf",
    "vipllava": "vip-llava-7b-hf",
}
TEXTS = [
    "USER: <image>\nWhat is in the picture? ASSISTANT:",
    "<image>What do you see",
    "<image> What<image>\n\n  was this ",
    " one", "  two  spaces <image>  ten", "\n", "",
    "caf\u00e9 \u2192 <image>\u00e9e\u0301 \u65e5\u672c\u8a9e", "def f(x):\n\treturn 1234 + 5.67",
    "USER</s>USER: one <s>two<pad> <unk>ten", "<|im_start|>user\nWhat<|im_end|>\n<|im_start|>assistant\n",
]  # fmt: skip
FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def edit(folder, name="tokenizer_config.json", **fields):
    """Set fields of a JSON file; those that are None are taken out."""
    content = json.loads((folder / name).read_text(encoding="utf-8")) | fields
    write_json(folder / name, {key: value for key, value in content.items() if value is not None})


def exchange(folder, backend, special, **settings):
    """Give a LLaVA another tokenizer, whose last token is `<image>`."""
    for name in ("added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model"):
        (folder / name).unlink(missing_ok=True)
    special = [*special, "<image>"]
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    decoder = {str(backend.token_to_id(token)): {"content": token, **FLAGS} for token in special}
    kept = {"processor_class": json.loads((folder / "tokenizer_config.json").read_text())["processor_class"]}
    write_json(folder / "tokenizer_config.json", {**kept, **settings, "added_tokens_decoder": decoder})
    edit(folder, "config.json", image_token_index=backend.token_to_id("<image>"))


def llama(folder):
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {"add_bos_token": True, "add_eos_token": False, "legacy": False, "padding_side": "left"}
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    exchange(folder, published_tokenizers.llama2(), special, tokenizer_class="LlamaTokenizer", **settings, **names)


def qwen2(folder):
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    exchange(folder, published_tokenizers.qwen2(), special, tokenizer_class="Qwen2Tokenizer", **names)


def smollm2(folder):
    """GPT2Tokenizer by name, but every digit is a token of its own, although "12" and "Ġ1" stand in the vocabulary."""
    content = json.loads(published_tokenizers.byte_level(510, "").to_str())
    content["model"]["vocab"] |= {"12": 510, "Ġ1": 511}
    content["model"]["merges"] += [["1", "2"], ["Ġ", "1"]]
    backend = Tokenizer.from_str(json.dumps(content))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {"add_prefix_space": False, "clean_up_tokenization_spaces": False, "tokenizer_class": "GPT2Tokenizer"}
    exchange(folder, backend, special, unk_token="<|endoftext|>", **settings, **names)


def fast(folder):
    backend = published_tokenizers.qwen2()
    named = {"eos_token": "</s>", "pad_token": "<pad>", "model_input_names": ["input_ids", "attention_mask"]}
    exchange(folder, backend, ["</s>", "<pad>"], tokenizer_class="PreTrainedTokenizerFast", **named)


def no_class(folder):
    edit(folder, tokenizer_class=None)


def no_settings(folder):
    """Its tokenizer_config.json is gone, as of a folder that was put together by hand."""
    (folder / "tokenizer_config.json").unlink()


def fast_by_name(folder):
    edit(folder, tokenizer_class="LlamaTokenizerFast")


def byte_level_bos(folder):
    """As Llama-3's: `<s>` is put by one of several steps of tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    step = json.loads(processors.ByteLevel(trim_offsets=False).__getstate__())
    both = {"type": "Sequence", "processors": [step, content["post_processor"]]}
    edit(folder, "tokenizer.json", post_processor=both)


TOKENIZERS = [llama, qwen2, smollm2, fast]
ODD = [no_class, no_settings, fast_by_name, byte_level_bos]
CASES = {name: (name, None) for name in NAMES}
CASES |= {f"{kind} {change.__name__}": (FAMILIES[kind], change) for kind in FAMILIES for change in TOKENIZERS}
CASES |= {change.__name__: ("llava-1.5-7b-hf", change) for change in ODD}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """{case: (of the source, of the converted folder)}, all from one process; and where the folders are."""
    root, tasks = tmp_path_factory.mktemp("tokenizers"), []
    stock = {name: write_published(name, root / name) for name in NAMES}
    folders = {}
    for case, (name, change) in CASES.items():
        source = shutil.copytree(stock[name], root / case / "source")
        if change:
            change(source)
        convert(str(source), root / case / "target", report=False)
        folders[case] = source, root / case / "target"
        # these two processors need torchvision in transformers 5, for videos and for Pixtral's images
        alone = not is_torchvision_available() and ("onevision" in name or "pixtral" in name)
        tasks += [
            {"do": "token_ids", "folder": str(folder), "texts": TEXTS, "only_tokenizer": alone}
            for folder in folders[case]
        ]
    found = run_alone(tasks, root)
    return dict(zip(CASES, zip(found[::2], found[1::2], strict=True), strict=True)), folders


@pytest.mark.parametrize("case", CASES)
def test_a_converted_folder_reads_texts_as_its_source_does(answers, case):
    before, after = answers[0][case]
    if case == "no_settings":  # 4.57 pads on the left there, 5 on the right
        del before["batch"], after["batch"]
    assert after == before


@pytest.mark.parametrize("case", ["llava-1.5-7b-hf", "llava-v1.6-mistral-7b-hf", "vip-llava-7b-hf"])
def test_the_text_after_an_image_starts_with_a_space_piece(answers, case):
    """As a text of its own does, and as LLaVA was trained; by hand from the fixture's merges."""
    ids = answers[0][case][1]["ids"][TEXTS.index("<image>What do you see")]
    content = json.loads((answers[1][case][1] / "tokenizer.json").read_text(encoding="utf-8"))
    image = next(token["id"] for token in content["added_tokens"] if token["content"] == "<image>")
    words = [content["model"]["vocab"][piece] for piece in ("\u2581What", "\u2581do", "\u2581you", "\u2581see")]
    assert ids == [1, image, *words]


def test_what_a_named_class_does_by_itself_is_written_out(tmp_path):
    """LlamaTokenizer of 4.57 pads on the left, PreTrainedTokenizerFast on the right and with token_type_ids."""
    source = write_published("llava-1.5-7b-hf", tmp_path / "source")
    edit(source, padding_side=None)
    convert(str(source), tmp_path / "target", report=False)
    before, after = (
        json.loads((tmp_path / name / "tokenizer_config.json").read_text()) for name in ("source", "target")
    )
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    assert after == before | inputs | {"padding_side": "left", "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize("name", ["llava-1.5-7b-hf", "llava-onevision-qwen2-0.5b-ov-hf"])
def test_a_source_without_tokenizer_json_is_said(tmp_path, name):
    source = write_published(name, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    notes = convert(str(source), tmp_path / "target", report=False)["notes"]
    assert any("there is no tokenizer.json" in note for note in notes) == (name == "llava-1.5-7b-hf")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "target" / file).read_bytes() == (source / file).read_bytes()


def test_a_folded_model_is_a_stock_one_and_keeps_its_class(tmp_path):
    source, photo = write_published("llava-1.5-7b-hf", tmp_path / "source"), tmp_path / "photo.png"
    tiny.photo().save(photo)
    convert(str(source), tmp_path / "target", norm_type="scale", fold=True, images=[photo], report=False)
    name = "tokenizer_config.json"
    assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("llava_onevision", "pixtral"))])
def test_what_transformers_5_reads_by_its_class_in_a_stock_folder_is_copied(answers, case):
    source, target = answers[1][case]
    for name in ("tokenizer_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "made"),
    [
        ({"add_bos_token": False}, "['<s>', 'word']"),
        ({"add_eos_token": True}, "['<s>', 'word']"),
        ({"post_processor": None}, "['word']"),
    ],
    ids=str,
)
def test_settings_that_tokenizer_json_does_not_follow_are_said(tmp_path, change, made):
    """The two lines read such a stock model differently; the converted one is read as 5 does, by the file."""
    source = write_published("llava-1.5-7b-hf", tmp_path / "source")
    if "post_processor" in change:
        content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        write_json(source / "tokenizer.json", content | change)
    else:
        edit(source, **change)
    notes = convert(str(source), tmp_path / "target", report=False)["notes"]
    assert sum(f"tokenizer.json makes {made} of a word" in note for note in notes) == 1
    assert (tmp_path / "target/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
