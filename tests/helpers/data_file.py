"""A data file in LLaVA's JSON with images, and the ten kinds of faults that a row can have."""

import json
import os
from pathlib import Path

import numpy as np
from PIL import Image

from llava_norm_align.common.loading import load_processor
from tests.helpers.convert import write_processor

FOLDERS = ("coco/train2017", "gqa/images", "ocr_vqa/images", "textvqa/train_images", "vg/VG_100K")
EACH = 10


def byte_processor(folder):
    """Write LLaVA's processor with a tokenizer of one token a byte: 28 x 28 pixels, patches of 14."""
    write_processor(folder)
    made = load_processor(folder)
    made.patch_size, made.vision_feature_select_strategy, made.num_additional_image_tokens = 14, "default", 1
    made.save_pretrained(folder)
    return folder


def write(tmp_path, rows):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(rows))
    return path


def photo(path, size=(48, 36)):
    """An image of noise, so that its file is longer than its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = np.random.default_rng(sum(map(ord, path.name)))
    Image.fromarray(seed.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return path


def turns(*texts):
    return [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]


def picture_row(number, images, suffix=".jpg"):
    """A sound row with an image of its own, of one to three questions."""
    name = f"{FOLDERS[number % 5]}/{number:012d}{suffix}"
    photo(images / name)
    more = ["What else?", f"Nothing {number}."] * (number % 3)
    question = ("<image>\nWhat is it?", "What is it?\n<image>")[number % 2]
    return {"id": f"{number:012d}", "image": name, "conversations": turns(question, f"Thing {number}.", *more)}


def text_row(number):
    return {"id": f"text_{number}", "model": "", "conversations": turns("Who?", f"Person {number}.")}


def sound_rows(images, count=60):
    """Rows as in mix665k: with images and of text alone; each tenth image has a second row under its id."""
    rows = []
    for number in range(count):
        row = text_row(number) if number % 6 == 5 else picture_row(number, images, (".jpg", ".png")[number % 2])
        rows.append(row)
        if number % 10 == 0:
            rows.append({**row, "conversations": turns("<image>\nWhere is it?", f"Place {number}.")})
    return rows


def plant(rows, images, outside: Path):
    """Append EACH faulty rows of each kind to `rows`; returns the expected {(index, kind)}."""
    expected, number = set(), 1000

    def add(kind, damage):
        nonlocal number
        for variant in range(EACH):
            number += 1
            row = picture_row(number, images)
            changed = damage(row, variant, images / row["image"])
            expected.add((len(rows), kind))
            rows.append(row if changed is None else changed)

    sound = [row for row in rows if "image" in row]
    texts = [row for row in rows if "image" not in row]
    add("missing_image", _missing)
    add("broken_image", _broken)
    add("tiny_image", _tiny)
    target = photo(outside / "a.jpg")
    add("outside_folder", lambda row, variant, file: _outside(row, variant, file, images, target))
    add("image_count", _count)
    add("role_order", _roles)
    add("empty_answer", _empty)
    add("too_long", lambda row, variant, file: row["conversations"][1].update(value="far too long " * 100))
    add("duplicate_id", lambda row, variant, file: _duplicate(row, variant, sound, texts))
    add("wrong_type", _wrong_type)
    return expected


def _missing(row, variant, file):
    file.unlink()
    if variant == 0:
        file.mkdir()
    elif variant == 1:
        os.mkfifo(file)  # reading it would wait for ever
    elif variant == 2:
        file.symlink_to(images_gone := file.with_name("gone.jpg"))
        assert not images_gone.exists()


def _broken(row, variant, file):
    whole = file.read_bytes()
    content = [b"", b"text, no image", b"\xff\xd8", whole[:30], b"\0" * 500, b"<html></html>", whole[100:]]
    file.write_bytes(content[variant % len(content)])


def _tiny(row, variant, file):
    photo(file, ((27, 60), (60, 27), (1, 1), (16, 16))[variant % 4])


def _empty(row, variant, file):
    row["conversations"][1]["value"] = ("", " ", "\n\t")[variant % 3]


def _outside(row, variant, file, images, target):
    if variant < 3:
        row["image"] = (str(target), "../outside/a.jpg", "coco/../../outside/a.jpg")[variant]
    elif variant < 6:
        file.unlink()
        file.symlink_to(target if variant % 2 else os.path.relpath(target, file.parent))
    elif variant < 9:
        folder = images / f"linked-{variant}"
        folder.symlink_to(target.parent)
        row["image"] = f"{folder.name}/a.jpg"
    else:
        row["image"] = str(file)  # inside, but not by a path from the folder


def _count(row, variant, file):
    human, gpt = row["conversations"][:2]
    if variant % 5 == 0:
        human["value"] += "<image>"
    elif variant % 5 == 1:
        human["value"] = "What is it?"
    elif variant % 5 == 2:
        del row["image"]
    elif variant % 5 == 3:
        human["value"], gpt["value"] = "What is it?", "It is <image>."
    else:
        row["conversations"] += turns("Again <image>?", "Yes.")


def _roles(row, variant, file):
    first, second = row["conversations"][:2]
    row["conversations"] = [
        [first],
        [first, {**first, "value": "And?"}],
        [first, second, second],
        [first, {**second, "from": "assistant"}],
        [{**first, "from": "system"}, second],
        [first, {**second, "from": "GPT"}],
        [first, second, {**first, "value": "And?"}],
        [first, second, {**first, "value": "A"}, {**first, "value": "B"}],
        [{**first, "from": ""}, second],
        [{**first, "from": "gpt"}, {**second, "from": "human"}],
    ][variant]


def _duplicate(row, variant, sound, texts):
    if variant < 4:  # another image under the id
        row["id"] = sound[variant]["id"]
    elif variant < 7:  # a copy
        return json.loads(json.dumps(sound[variant]))
    elif variant == 7:  # a text under the id of an image
        return {**text_row(variant), "id": sound[0]["id"]}
    elif variant == 8:
        return dict(texts[0])
    else:
        return {**texts[1], "conversations": turns("Another?", "Yes.")}


def _wrong_type(row, variant, file):
    if variant == 0:
        return "a row"
    if variant == 1:
        del row["id"]
    elif variant == 2:
        row["id"] = True
    elif variant == 3:
        row["image"] = ["a.jpg"]
    elif variant == 4:
        row["image"] = ""
    elif variant == 5:
        row["conversations"] = {"human": "What?", "gpt": "That."}
    elif variant == 6:
        row["conversations"][1] = ["gpt", "That."]
    elif variant == 7:
        row["conversations"][1]["value"] = None
    elif variant == 8:
        row["conversations"][1]["value"] = "half a pair: \ud83d"
    else:
        row["image"] += "\0"
