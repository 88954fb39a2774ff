"""check-data: every planted fault is found and nothing else; clean files; kept verdicts; bad input."""

import json
import os

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import load_processor
from llava_norm_align.data.check import bad_indices, cached_verdict, check_data
from llava_norm_align.data.check_report import describe
from tests.helpers.data_file import EACH, byte_processor, photo, picture_row, plant, sound_rows, text_row, turns, write

MAX_LENGTH = 400


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checks"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return byte_processor(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    images = root / "images"
    rows = sound_rows(images)
    sound = len(rows)
    expected = plant(rows, images, root / "outside")
    order = sorted(range(len(rows)), key=lambda index: index % 7)  # faults among sound rows, each after its model
    order = list(range(sound)) + [index for index in order if index >= sound]
    rows = [rows[index] for index in order]
    expected = {(order.index(index), kind) for index, kind in expected}
    return write(root, rows), images, rows, expected, sound


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_planted_fault_is_found_and_nothing_else(planted, model, jobs):
    path, images, rows, expected, sound = planted
    report = check_data(path, images, model, max_length=MAX_LENGTH, jobs=jobs)
    assert {(row["index"], row["kind"]) for row in report["rows"]} == expected
    assert len(report["rows"]) == len(expected) == 10 * EACH
    assert report["counts"] == {kind: EACH for _, kind in expected} | {"stage_1": 0}
    assert [row["index"] for row in report["rows"]] == sorted(index for index, _ in expected)
    for row in report["rows"]:
        entry = rows[row["index"]]
        assert row["id"] == (entry.get("id") if isinstance(entry, dict) and entry.get("id") is not True else None)
        assert row["sentence"].endswith((".", ".)")) and "\n" not in row["sentence"]
    assert report["totals"]["rows"] == sound + 10 * EACH
    assert report["totals"]["good"] == sound
    assert report["totals"]["bad"] == 10 * EACH
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    text = describe(report)
    assert f"Bad rows: {10 * EACH}" in text and all(kind in text for _, kind in expected)


def test_decode_finds_images_that_are_cut(planted, model, tmp_path):
    images = tmp_path / "images"
    rows = [picture_row(number, images, (".jpg", ".png")[number % 2]) for number in range(30)]
    for row in rows[10:20]:
        file = images / row["image"]
        file.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 4])
    path = write(tmp_path, rows)
    assert check_data(path, images)["totals"]["bad"] == 0  # the headers are whole, and no pixel is read
    report = check_data(path, images, decode=True)
    assert [(row["index"], row["kind"]) for row in report["rows"]] == [(n, "broken_image") for n in range(10, 20)]

    path, images, _, expected, _ = planted
    report = check_data(path, images, model, max_length=MAX_LENGTH, decode=True)
    assert {(row["index"], row["kind"]) for row in report["rows"]} == expected


def test_a_row_can_have_several_faults(tmp_path):
    photo(tmp_path / "a.jpg", (20, 60))
    rows = [
        {"id": 1, "image": "a.jpg", "conversations": turns("What?", " ", "And?")},
        {"id": 1, "image": "a.jpg", "conversations": turns("What?", " ", "And?")},  # bad already, so no copy
        text_row(0),
    ]
    report = check_data(write(tmp_path, rows), tmp_path)
    kinds = ["role_order", "empty_answer", "tiny_image"]  # the roles must be right before <image> is counted
    assert [(row["index"], row["id"], row["kind"]) for row in report["rows"]] == [
        (index, "1", kind) for index in range(2) for kind in kinds
    ]
    assert report["totals"]["bad"] == 2


def test_which_ids_may_come_again(tmp_path):
    for name in ("gqa/images/1.jpg", "vg/VG_100K/1.jpg", "vg/VG_100K/2.jpg"):
        photo(tmp_path / name)

    def row(image, answer):
        return {"id": "1", "image": image, "conversations": turns("<image>", answer)}

    rows = [
        {**row("none.jpg", "a"), "id": "1"},  # bad, so it takes no id
        row("gqa/images/1.jpg", "a"),
        row("gqa/images/1.jpg", "b"),  # another text about the image
        row("vg/VG_100K/1.jpg", "c"),  # the same picture in Visual Genome's folder
        row("vg/VG_100K/2.jpg", "d"),  # another image
        row("gqa/images/1.jpg", "b"),  # a copy of row 2
    ]
    report = check_data(write(tmp_path, rows), tmp_path)
    found = {row["index"]: row for row in report["rows"]}
    assert {index: row["kind"] for index, row in found.items()} == {
        0: "missing_image",
        4: "duplicate_id",
        5: "duplicate_id",
    }
    assert "row 1" in found[4]["sentence"]
    assert "copy of row 2" in found[5]["sentence"]


def test_links_inside_the_folder_and_links_that_are_allowed(tmp_path):
    images = tmp_path / "images"
    photo(images / "a.jpg")
    (images / "b.jpg").symlink_to("a.jpg")
    photo(tmp_path / "disk" / "c.jpg")
    (images / "coco").symlink_to(tmp_path / "disk")
    photo(tmp_path / "images-2" / "d.jpg")
    (images / "d.jpg").symlink_to("../images-2/d.jpg")
    names = ("b.jpg", "coco/c.jpg", "d.jpg")
    rows = [{"id": name, "image": name, "conversations": turns("<image>", "x")} for name in names]
    path = write(tmp_path, rows)
    found = check_data(path, images)["rows"]
    assert [(row["index"], row["kind"]) for row in found] == [(1, "outside_folder"), (2, "outside_folder")]
    assert check_data(path, images, follow_links=True)["rows"] == []
    (tmp_path / "linked").symlink_to(images)  # the folder itself may be a link
    assert [row["index"] for row in check_data(path, tmp_path / "linked")["rows"]] == [1, 2]


def test_dots_in_paths(tmp_path):
    for name in ("..a.jpg", "b.jpg"):
        photo(tmp_path / "images" / name)
    (tmp_path / "images" / "c").mkdir()
    names = ("..a.jpg", "./c/../b.jpg", "c/../../gone.jpg", "..", ".")
    rows = [{"id": name, "image": name, "conversations": turns("<image>", "x")} for name in names]
    report = check_data(write(tmp_path, rows), tmp_path / "images")
    assert [(row["index"], row["kind"]) for row in report["rows"]] == [
        (2, "outside_folder"),
        (3, "outside_folder"),
        (4, "missing_image"),
    ]


def test_images_above_the_limits_are_broken(tmp_path):
    photo(tmp_path / "images" / "a.png", (28, 2801))
    photo(tmp_path / "images" / "b.png", (28, 2800))
    rows = [{"id": name, "image": name, "conversations": turns("<image>", "x")} for name in ("a.png", "b.png")]
    for decode in (False, True):
        report = check_data(write(tmp_path, rows), tmp_path / "images", decode=decode)
        assert [(row["index"], row["kind"]) for row in report["rows"]] == [(0, "broken_image")]
        assert "100 to 1" in report["rows"][0]["sentence"]


def test_clean_is_the_input_without_the_bad_rows(planted, model, tmp_path):
    path, images, rows, expected, sound = planted
    before, clean = path.read_bytes(), tmp_path / "clean.json"
    report = check_data(path, images, model, max_length=MAX_LENGTH, clean=clean)
    bad = {index for index, _ in expected}
    assert json.loads(clean.read_text()) == [row for index, row in enumerate(rows) if index not in bad]
    assert bad_indices(report) == bad
    assert path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "clean.json"]
    assert report["clean"] == str(clean) and f"Written: {clean} ({sound} rows)" in describe(report)
    again = check_data(clean, images, model, max_length=MAX_LENGTH, decode=True)
    assert (again["totals"]["rows"], again["rows"]) == (sound, [])
    assert "No row has a fault" in describe(again)


def test_clean_keeps_each_row_byte_for_byte(tmp_path):
    good = '{"id":1,  "x": 1.50, "conversations":[{"from":"human","value":"\\u00e9é"},{"from":"gpt","value":"b"}]}'
    path = tmp_path / "data.json"
    path.write_text(f'[{good} , {{"id": 2}}]', encoding="utf-8")
    check_data(path, tmp_path, clean=tmp_path / "clean.json")
    assert (tmp_path / "clean.json").read_text(encoding="utf-8") == f"[\n{good}\n]\n"


@pytest.mark.parametrize("kind", ["itself", "link", "hard link", "another", "dangling link", "folder", "nowhere"])
def test_clean_never_replaces_a_file(tmp_path, kind):
    path = write(tmp_path, [text_row(0)])
    other = tmp_path / "other.json"
    if kind == "itself":
        other = tmp_path / "x" / ".." / "data.json"
        (tmp_path / "x").mkdir()
    elif kind == "link":
        other.symlink_to(path)
    elif kind == "hard link":
        os.link(path, other)
    elif kind == "another":
        other.write_text("mine")
    elif kind == "dangling link":
        other.symlink_to(tmp_path / "none")
    elif kind == "folder":
        other.mkdir()
    else:
        other = tmp_path / "no folder" / "other.json"
    before = sorted((file.name, file.is_file() and file.read_text()) for file in tmp_path.iterdir())
    with pytest.raises(InputError, match="cannot be written" if kind == "nowhere" else "The clean file"):
        check_data(path, tmp_path, clean=other)
    assert sorted((file.name, file.is_file() and file.read_text()) for file in tmp_path.iterdir()) == before


def test_a_verdict_is_kept_until_something_changes(tmp_path, model, cache):
    images = tmp_path / "images"
    rows = [picture_row(number, images) for number in range(4)] + [{**text_row(9), "conversations": turns("a", "")}]
    rows[3]["image"] = "coco/late.jpg"
    path = write(tmp_path, rows)
    options = {"processor": model, "max_length": 100}
    assert cached_verdict(path, images, **options) is None
    report = check_data(path, images, **options)
    assert report["counts"]["missing_image"] == report["counts"]["empty_answer"] == 1
    assert cached_verdict(path, images, **options) == report
    processor = load_processor(model)
    processor.tokenizer(["a", "bc"], padding=True, truncation=True, max_length=8)  # leaves its traces
    assert cached_verdict(path, images, processor, max_length=100) == report

    others = [{}, {"processor": model}, {**options, "max_length": 99}, {**options, "decode": True}]
    others += [{**options, "stage": 1}, {**options, "follow_links": True}, {**options, "template": "vicuna_v1"}]
    assert [cached_verdict(path, images, **other) for other in others] == [None] * len(others)
    decoded = check_data(path, images, decode=True)
    assert cached_verdict(path, images) == decoded  # has seen more than was asked for

    file = images / rows[0]["image"]
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert cached_verdict(path, images, **options) is None
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_verdict(path, images, **options) == report
    photo(images / "coco" / "late.jpg")  # it was missing
    assert cached_verdict(path, images, **options) is None
    (images / "coco" / "late.jpg").unlink()
    photo(images / "unnamed.jpg")  # no row has it
    assert cached_verdict(path, images, **options) == report
    path.write_text(path.read_text() + " ")
    assert cached_verdict(path, images, **options) is None

    for file in cache.iterdir():
        file.write_text("broken")
    assert cached_verdict(write(tmp_path, rows), images, **options) is None


def test_a_cache_that_cannot_be_written_is_left_alone(tmp_path, cache):
    cache.parent.write_text("a file where the folder should be")
    assert check_data(write(tmp_path, [text_row(0)]), tmp_path)["totals"]["good"] == 1


def test_no_good_row(tmp_path):
    rows = [{**picture_row(number, tmp_path / "images"), "id": number} for number in range(3)]
    path = write(tmp_path, [*rows, 3])
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match=r"Every row .*\(1 wrong_type, 3 missing_image\), such as row 0") as caught:
        check_data(path, tmp_path / "other", clean=tmp_path / "clean.json")
    assert str(tmp_path / "other") in str(caught.value)
    assert not (tmp_path / "clean.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image_folder": "none"}, "no image folder"),
        ({"image_folder": "data.json"}, "no image folder"),
        ({"max_length": 9}, "needs a model"),
        ({"max_length": 0, "processor": "model"}, "at least 1 token"),
        ({"jobs": 0}, "jobs is 0"),
        ({"stage": 3}, "stage is 3"),
        ({"processor": "./none"}, "no folder"),
        ({"processor": "bare"}, "patch_size"),
        ({"processor": "silent"}, "no chat template"),
        ({"processor": "strings"}, "cannot render a row"),
    ],
)
def test_bad_calls(tmp_path, model, monkeypatch, options, said):
    write(tmp_path, [text_row(0)])
    monkeypatch.chdir(tmp_path)
    processor = load_processor(model)
    if options.get("processor") == "bare":
        processor.patch_size = None
    elif options.get("processor") == "silent":
        processor.chat_template = None
    elif options.get("processor") == "strings":
        processor.chat_template = "{% for message in messages %}{{ 'x' + message['content'] }}{% endfor %}"
    processors = {"model": model, "bare": processor, "silent": processor, "strings": processor}
    options = {"image_folder": ".", **options}
    if "processor" in options:
        options["processor"] = processors.get(options["processor"], options["processor"])
    with pytest.raises(InputError, match=said) as caught:
        check_data("data.json", **options)
    assert "\n" not in str(caught.value)


def test_bad_files_are_refused_before_images_are_read(tmp_path):
    with pytest.raises(InputError, match="is not there"):
        check_data(tmp_path / "none.json", tmp_path)
    with pytest.raises(InputError, match="holds an object"):
        check_data(write(tmp_path, {"id": 1}), tmp_path)
