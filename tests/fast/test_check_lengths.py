"""check-data counts the tokens that the processor makes of a row, whatever its chat template does."""

import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing

from llava_norm_align.common.loading import load_processor
from llava_norm_align.data.check import check_data
from llava_norm_align.data.check_lengths import TokenCounter
from llava_norm_align.data.llava_json import Row, Turn
from tests.helpers import tiny
from tests.helpers.data_file import byte_processor, photo, picture_row, text_row, turns, write

IMAGE_TOKENS = 4  # (28 / 14) ** 2, a CLS token that is added and dropped


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return byte_processor(tmp_path_factory.mktemp("model"))


def test_stage_1(tmp_path, model):
    images = tmp_path / "images"
    rows = [picture_row(0, images), picture_row(1, images), text_row(2)]
    report = check_data(write(tmp_path, rows), images, model, stage=1, max_length=13)
    assert [(row["index"], row["kind"]) for row in report["rows"]] == [(1, "stage_1"), (2, "stage_1")]
    # "Thing 0." and a line end, one token a byte, and the image
    assert report["lengths"]["max"] == 9 + IMAGE_TOKENS
    rows[1]["conversations"] = turns("<image>", "longer by one")
    report = check_data(write(tmp_path, rows), images, model, stage=1, max_length=13)
    assert [row["kind"] for row in report["rows"]] == ["too_long", "stage_1"]


def test_lengths(tmp_path, model):
    images = tmp_path / "images"
    rows = [picture_row(3, images), text_row(0)]
    rows += [{"id": f"x{n}", "conversations": turns("Who?", "x" * n)} for n in range(1, 99)]
    report = check_data(write(tmp_path, rows), images, model, max_length=119)
    # the template of write_processor: "USER: ", then <image> and a line end, the text, " "
    around = len("USER:  ") + len("ASSISTANT:  ")
    texts = sorted([around + IMAGE_TOKENS + len("\nWhat is it?") + len("Thing 3."), around + len("Who?Person 0.")]
                   + [around + len("Who?") + n for n in range(1, 99)])  # fmt: skip
    lengths = report["lengths"]
    assert (lengths["p50"], lengths["p99"], lengths["max"]) == (texts[49], texts[98], texts[99])
    assert lengths["rows"] == 100
    assert {bin["up_to"]: bin["rows"] for bin in lengths["histogram"]} == {
        bound: sum(bound // 2 < length <= bound for length in texts) for bound in (32, 64, 128)
    }
    assert report["options"]["image_tokens"] == IMAGE_TOKENS
    long = {row["index"] for row in report["rows"]}
    assert long == {index for index, row in enumerate(rows) if row["id"][1:].isdigit() and int(row["id"][1:]) > 96}


HEAD = "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
PARTS = "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
TEXTS = "{% for part in message['content'] if part['type'] == 'text' %}"
END = "{% endfor %}\n{% endfor %}"
TEMPLATES = {
    "plain": HEAD + PARTS + TEXTS + "{{ part['text'] }}" + END,
    "stripped": HEAD + PARTS + TEXTS + "{{ part['text'] | trim }}" + END,
    "half stripped": HEAD + PARTS + TEXTS + "{{ part['text'].rstrip() }}" + END,
    "shortened": HEAD + PARTS + TEXTS + "{{ part['text'].split('</think>')[-1] }}" + END,
    "silent": HEAD + PARTS + TEXTS + "{% if message['role'] == 'user' %}{{ part['text'] }}{% endif %}" + END,
    "stripped and silent": HEAD
    + PARTS
    + TEXTS
    + "{% if message['role'] == 'user' %}{{ part['text'] | trim }}{% endif %}"
    + END,
    "twice": HEAD + PARTS + TEXTS + "{{ part['text'] }}{{ part['text'] }}" + END,
    "if any": HEAD + PARTS + TEXTS + "{% if part['text'] %}[{{ part['text'] }}]{% endif %}" + END,
    "last turn": HEAD + PARTS + TEXTS + "{{ part['text'] }}{% if loop.last %}!{% endif %}" + END + "the end",
    "with BOS": "{{ bos_token }}" + HEAD + PARTS + TEXTS + "{{ part['text'] }}" + END,
}
ROWS = [
    Row("a", (Turn("user", " What is it? ", True), Turn("assistant", "A cat.\n")), "a.jpg"),
    Row("b", (Turn("user", "Hm"), Turn("assistant", "<think>long</think> short"), Turn("user", "é", True),
              Turn("assistant", "ok")), "a.jpg"),
    Row("d", (Turn("user", "", True), Turn("assistant", "ok")), "a.jpg"),
    Row("c", (Turn("user", "Who?"), Turn("assistant", "Me")), None),
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("bos", [False, True])
def test_lengths_are_those_of_the_processor(model, name, bos):
    processor = load_processor(model)
    if bos:
        post = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", processor.tokenizer.bos_token_id)])
        processor.tokenizer.backend_tokenizer.post_processor = post
    processor.chat_template = TEMPLATES[name]
    image, expected = Image.new("RGB", (60, 40)), []
    for row in ROWS:
        messages = [
            {
                "role": turn.role,
                "content": [{"type": "image", "image": image}] * turn.image + [{"type": "text", "text": turn.text}],
            }
            for turn in row.turns
        ]
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True)
        ids = inputs["input_ids"]
        expected.append(len(ids[0] if isinstance(ids[0], list) else ids))
    counter = TokenCounter(processor)
    sizes = [None if row.image is None else (60, 40) for row in ROWS]
    assert counter.count(ROWS, sizes) == expected
    processor.tokenizer(["a", "bc"], padding="max_length", max_length=9, truncation=True)  # leaves its traces
    assert counter.count(ROWS, sizes) == expected


def test_image_tokens_that_hang_on_the_size(tmp_path):
    """LLaVA-NeXT; a photo that lies on its side counts as it is turned."""
    processor = tiny.processor(kind="llava_next")
    images = tmp_path / "images"
    photo(images / "wide.jpg", (112, 56))
    photo(images / "square.jpg", (64, 64))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 60)).save(images / "turned.jpg", exif=exif)
    names = ("wide.jpg", "square.jpg", "turned.jpg")
    rows = [{"id": name, "image": name, "conversations": turns("<image>", "cat")} for name in names]
    sizes = [(112, 56), (64, 64), (60, 300)]
    expected = []
    for size in sizes:
        inputs = processor(text=["USER: <image> </s>"], images=[Image.new("RGB", size)])
        expected.append(inputs["input_ids"][0].count(tiny.IMAGE_TOKEN_ID))
    assert len(set(expected)) > 1
    report = check_data(write(tmp_path, [*rows, text_row(0)]), images, processor, max_length=5)
    assert report["options"]["image_tokens"] is None
    # "USER:", the image, "cat", "</s>"
    assert [row["sentence"].split(" with")[0] for row in report["rows"]] == [
        f"It has {n + 3} tokens" for n in expected
    ]


def test_a_text_that_spells_the_placeholder_out(tmp_path, model):
    processor = load_processor(model)
    processor.image_token, processor.chat_template = "<extra1>", TEMPLATES["plain"].replace("<image>", "<extra1>")
    processor.image_token_id = processor.tokenizer.convert_tokens_to_ids("<extra1>")
    photo(tmp_path / "a.jpg")
    rows = [
        {"id": 1, "image": "a.jpg", "conversations": turns("<image>", "x")},
        {"id": 2, "image": "a.jpg", "conversations": turns("<image>", "See <extra1>.")},
        {"id": 3, "conversations": turns("What is <extra1>?", "x")},
        {"id": 4, "conversations": turns("What is <extra2>?", "x")},
    ]
    report = check_data(write(tmp_path, rows), tmp_path, processor)
    assert [(row["index"], row["kind"]) for row in report["rows"]] == [(1, "image_count"), (2, "image_count")]
