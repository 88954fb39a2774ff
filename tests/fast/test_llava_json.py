"""LLaVA's JSON: both real layouts become rows and TRL's conversations, other files one sentence."""

import json
from pathlib import Path

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.llava_json import Row, Turn, as_messages, entries, read_llava_json

# the shapes of blip_laion_cc_sbu_558k.json, and of each part of llava_v1_5_mix665k.json
PRETRAIN = {
    "id": "004539375",
    "image": "00453/004539375.jpg",
    "conversations": [
        {"from": "human", "value": "Render a clear and concise summary of the photo.\n<image>"},
        {"from": "gpt", "value": "select luxury furniture 3 - inch gel memory foam mattress topper"},
    ],
}
COCO = {
    "id": "000000033471",
    "image": "coco/train2017/000000033471.jpg",
    "conversations": [
        {"from": "human", "value": "<image>\nWhat are the colors of the bus in the image?"},
        {"from": "gpt", "value": "The bus in the image is white and red."},
        {"from": "human", "value": "Is it moving? "},
        {"from": "gpt", "value": " It stands still."},
    ],
}
TEXT = {
    "id": "wgByO4Y_0",
    "model": "",
    "conversations": [{"from": "human", "value": "Who wrote it?"}, {"from": "gpt", "value": "Nobody knows."}],
}
LATER = {
    "id": 7,
    "image": "vg/VG_100K/7.jpg",
    "conversations": [
        {"from": "human", "value": "Hello."},
        {"from": "gpt", "value": "Hi."},
        {"from": "human", "value": "Look: <image> What is it?"},
        {"from": "gpt", "value": "A cat."},
    ],
}


def write(tmp_path, content, name="data.json"):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def read(tmp_path, *content):
    return list(read_llava_json(write(tmp_path, list(content)), "/images"))


def test_both_layouts(tmp_path):
    assert read(tmp_path, PRETRAIN, COCO, TEXT, LATER) == [
        Row(
            "004539375",
            (
                Turn("user", "Render a clear and concise summary of the photo.", image=True),
                Turn("assistant", "select luxury furniture 3 - inch gel memory foam mattress topper"),
            ),
            Path("/images/00453/004539375.jpg"),
        ),
        Row(
            "000000033471",
            (
                Turn("user", "What are the colors of the bus in the image?", image=True),
                Turn("assistant", "The bus in the image is white and red."),
                Turn("user", "Is it moving? "),  # a turn without the image stays as it is
                Turn("assistant", " It stands still."),
            ),
            Path("/images/coco/train2017/000000033471.jpg"),
        ),
        Row("wgByO4Y_0", (Turn("user", "Who wrote it?"), Turn("assistant", "Nobody knows.")), None),
        Row(
            "7",
            (
                Turn("user", "Hello."),
                Turn("assistant", "Hi."),
                Turn("user", "Look:  What is it?", image=True),
                Turn("assistant", "A cat."),
            ),
            Path("/images/vg/VG_100K/7.jpg"),
        ),
    ]


def test_an_image_of_null_is_none(tmp_path):
    assert read(tmp_path, {**TEXT, "image": None})[0].image is None


def test_a_byte_order_mark_and_letters_beyond_ascii(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps([{**TEXT, "id": "é"}], ensure_ascii=False).encode())
    assert next(read_llava_json(path, ".")).id == "é"


def part(text):
    return {"type": "text", "text": text}


def test_conversations(tmp_path):
    coco, text, later = read(tmp_path, COCO, TEXT, LATER)
    assert as_messages(coco) == [
        {"role": "user", "content": [{"type": "image"}, part("What are the colors of the bus in the image?")]},
        {"role": "assistant", "content": [part("The bus in the image is white and red.")]},
        {"role": "user", "content": [part("Is it moving? ")]},
        {"role": "assistant", "content": [part(" It stands still.")]},
    ]
    assert as_messages(text) == [
        {"role": "user", "content": [part("Who wrote it?")]},
        {"role": "assistant", "content": [part("Nobody knows.")]},
    ]
    assert [len(message["content"]) for message in as_messages(later)] == [1, 1, 2, 1]


def test_rows_can_be_left_out(tmp_path):
    path = write(tmp_path, [COCO, {**TEXT, "conversations": 1}, TEXT])
    assert [row.id for row in read_llava_json(path, "/images", skip={1})] == [COCO["id"], TEXT["id"]]


def test_rows_come_before_the_first_bad_one(tmp_path):
    rows = read_llava_json(write(tmp_path, [COCO, {**TEXT, "conversations": 1}]), "/images")
    assert next(rows).id == "000000033471"
    with pytest.raises(InputError, match=r"Row 1 of .*data.json \(from 0, id wgByO4Y_0\).*conversations are 1"):
        next(rows)


ROW = json.dumps(TEXT)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("[]", "empty list"),
        ("[ \n ]", "empty list"),
        (ROW, "holds an object"),
        (ROW + "\n" + ROW + "\n", "holds JSON lines"),
        ("3", "holds a int"),
        ("hello", "is not JSON: Expecting value"),
        ("[" + ROW, "is not JSON: after row 0"),
        ("[" + ROW + ROW + "]", "a comma or ] was expected"),
        ("[" + ROW + ",]", r"is not JSON in row 1 \(from 0\)"),
        ("[" + ROW + "] x", "goes on after the end"),
        ('[{"id": ' + "9" * 5000 + "}]", "is not JSON in row 0"),
        ("[" * 100_000, r"nested too deeply in row 0"),
        ('{"a": ' * 100_000, "nested too deeply"),
        (b'["\xff"]', r"is not UTF-8 \(byte 2\)"),
    ],
)
def test_what_is_no_llava_json(tmp_path, content, said):
    path = write(tmp_path, content)
    with pytest.raises(InputError, match=said) as caught:
        list(read_llava_json(path, "."))
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message


def test_one_line_in_a_file_of_lines(tmp_path):
    with pytest.raises(InputError, match="holds JSON lines"):
        list(read_llava_json(write(tmp_path, ROW, "data.jsonl"), "."))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="none.json is not there"):
        list(read_llava_json(tmp_path / "none.json", "."))
    with pytest.raises(InputError, match="is a folder"):
        list(read_llava_json(tmp_path, "."))


def test_entries_say_where_each_row_stands():
    text = ' [ {"a": 1},\n\t[2]  ,"x" ] \n'
    assert [(text[start:end], value) for start, end, value in entries(text, "x")] == [
        ('{"a": 1}', {"a": 1}),
        ("[2]", [2]),
        ('"x"', "x"),
    ]
