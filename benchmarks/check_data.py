"""How long check-data needs for a file of the shape of llava_v1_5_mix665k.json, in seconds per 100,000 rows.

usage: python benchmarks/check_data.py [--rows N] [--rounds N] [--folder DIR] [--decode]

The rows have mix665k's shares of its five image folders and of text alone, about its bytes a row, and several
questions about most images; their text is English (Python's own documentation). Each image is a JPEG or PNG file of
its own, a JPEG as large as a photo, so that rows share none. Tokens are counted by micro-LLaVA's processor. The files
are in the page cache: a slow disk is not measured.
"""

import argparse
import io
import json
import os
import random
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from paired import figure, seconds, write_result
from PIL import Image

from llava_norm_align.common.loading import load_processor
from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.data.check import check_data

# rows, rounds of question and answer, words of a question and of an answer
SHARES = {
    "coco/train2017/{:012d}.jpg": (364_100, 4, 12, 20),
    "vg/VG_100K/{}.jpg": (86_417, 8, 14, 6),
    "gqa/images/{}.jpg": (72_140, 8, 14, 1),
    "ocr_vqa/images/{}.jpg": (80_000, 9, 9, 4),
    "textvqa/train_images/{:016x}.png": (21_953, 1, 20, 12),
    None: (40_688, 4, 50, 200),
}
PICTURES = 16


def pictures() -> dict[str, list[bytes]]:
    """Encoded pictures of a photo's size, by suffix."""
    draw = np.random.default_rng(0)
    found: dict[str, list[bytes]] = {".jpg": [], ".png": []}
    for number in range(PICTURES):
        small = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        picture = small.resize((640 - 8 * number, 480), Image.Resampling.BICUBIC)
        for suffix, options in ((".jpg", {"format": "JPEG", "quality": 80}), (".png", {"format": "PNG"})):
            file = io.BytesIO()
            picture.resize((64, 48) if suffix == ".png" else picture.size).save(file, **options)
            found[suffix].append(file.getvalue())
    return found


def generate(folder: Path, rows: int) -> Path:
    """Write the images and the data file of `rows` rows; the same ones each time."""
    draw, encoded = random.Random(0), pictures()
    words = [word for word in " ".join(topics.values()).split() if "<" not in word]  # markup is rare in mix665k

    def say(length: int) -> str:
        length = max(1, round(length * draw.uniform(0.5, 1.5)))
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    for pattern in SHARES:
        if pattern:
            (folder / pattern).parent.mkdir(parents=True, exist_ok=True)
    patterns = draw.choices(list(SHARES), [share[0] for share in SHARES.values()], k=rows)
    content = []
    for number, pattern in enumerate(patterns):
        _, rounds, question, answer = SHARES[pattern]
        conversations = []
        for _ in range(max(1, round(rounds * draw.uniform(0.5, 1.5)))):
            conversations += [{"from": "human", "value": say(question)}, {"from": "gpt", "value": say(answer)}]
        row: dict[str, Any] = {"id": f"text_{number}", "model": ""}
        if pattern:
            name = pattern.format(number)
            (folder / name).write_bytes(encoded[Path(name).suffix][number % PICTURES])
            row = {"id": Path(name).stem, "image": name}
            conversations[0]["value"] = f"<image>\n{conversations[0]['value']}"
        content.append(row | {"conversations": conversations})
    path = folder / "data.json"
    path.write_text(json.dumps(content))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--decode", action="store_true", help="measure with --decode instead")
    options = parser.parse_args()
    name = "check_data_decode" if options.decode else "check_data"
    processor, found = load_processor(cached_micro()), []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["LLAVA_NORM_ALIGN_CACHE"] = folder  # nothing is left in the user's
        path = generate(Path(folder), options.rows)

        def check() -> None:
            report = check_data(path, folder, processor, max_length=100_000, decode=options.decode)
            found.append(report)

        rows = []
        for _ in range(options.rounds):
            rows.append({"seconds": seconds(check) * 100_000 / options.rows})
            print({"seconds": round(rows[-1]["seconds"], 2)}, flush=True)
        size = path.stat().st_size
    report = found[0]
    assert report["totals"]["bad"] == 0, report["counts"]
    write_result(
        name,
        rows,
        [figure("seconds per 100,000 rows", [row["seconds"] for row in rows], 50)],
        checked_rows=options.rows,
        images=report["images"]["files"],
        bytes_a_row=round(size / options.rows),
        tokens={name: report["lengths"][name] for name in ("p50", "p99", "max")},
    )


if __name__ == "__main__":
    main()
