"""Whichever transformers line wrote, converted and saved a checkpoint: both load it, whole, with the same answers.

Each row is written by one line, converted under one, saved again under both, and read by both, one process a step.
"""

import itertools
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers.lines import PYTHONS, ROOT, run_alone

COLUMNS = ("tower", "family", "tied", "weights", "writer", "converter", "kind")
# Every pair of values of two columns stands in some row of these.
LLAVA_ROWS = [
    ("clip", "llama", True, "shards", "5", "5", "llava"),
    ("clip", "mistral", True, "single", "4", "4", "llava"),
    ("clip", "qwen2", False, "single", "5", "4", "llava"),
    ("dinov2", "llama", True, "shards", "5", "4", "llava"),
    ("dinov2", "mistral", False, "shards", "5", "4", "llava"),
    ("dinov2", "qwen2", True, "single", "4", "5", "llava"),
    ("siglip", "llama", False, "single", "4", "4", "llava"),
    ("siglip", "mistral", True, "shards", "4", "5", "llava"),
    ("siglip", "qwen2", False, "shards", "5", "5", "llava"),
]
# For every other kind: two towers, both writers and converters, tied and untied.
KIND_ROWS = [
    ("clip", "mistral", False, "shards", "5", "4", "llava_next"),
    ("siglip", "llama", True, "single", "4", "5", "llava_next"),
    ("clip", "llama", False, "single", "4", "5", "llava_onevision"),
    ("siglip", "qwen2", True, "shards", "5", "4", "llava_onevision"),
    ("clip", "llama", True, "single", "4", "5", "vipllava"),
    ("dinov2", "qwen2", False, "shards", "5", "4", "vipllava"),
]
ROWS = LLAVA_ROWS + KIND_ROWS
CLASSES = {
    "llava": "LlavaNormAlignForConditionalGeneration",
    "llava_next": "LlavaNextNormAlignForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionNormAlignForConditionalGeneration",
    "vipllava": "VipLlavaNormAlignForConditionalGeneration",
}
SAVERS = ("converted", "saved by 4", "saved by 5")
SHARD = {"shards": "30KB", "single": "5GB"}
CONVERT = """
import json, sys
from pathlib import Path
from llava_norm_align.conversion.convert import convert
for source, target in json.load(open(sys.argv[1])):
    convert(source, Path(target), report=False)
"""

pytestmark = pytest.mark.skipif(
    not all(python.exists() for python in PYTHONS.values()), reason="needs .venv and .venv-tf4: run `make test`"
)


def name(row):
    return "-".join(map(str, row))


def in_both_lines(step):
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PYTHONS, pool.map(step, PYTHONS), strict=True))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """The answers of both lines about every folder, and the reference of every row."""
    root = tmp_path_factory.mktemp("matrix")
    folder = {(row, saver): root / name(row) / saver.replace(" ", "_") for row in ROWS for saver in ("stock", *SAVERS)}
    work = {line: root / f"line{line}" for line in PYTHONS}
    for path in [*work.values(), *(root / name(row) for row in ROWS)]:
        path.mkdir()

    def alone(line, tasks):
        return run_alone(tasks, work[line], PYTHONS[line])

    def write(line):
        alone(
            line,
            [
                {
                    **dict(zip(COLUMNS, row, strict=True)),
                    "do": "write_stock",
                    "folder": str(folder[row, "stock"]),
                    "out": str(root / name(row) / "reference.pt"),
                    "shard": SHARD[row[3]],
                }
                for row in ROWS
                if row[4] == line
            ],
        )

    def convert(line):
        jobs = [(str(folder[row, "stock"]), str(folder[row, "converted"])) for row in ROWS if row[5] == line]
        (work[line] / "jobs.json").write_text(json.dumps(jobs))
        command = [PYTHONS[line], "-c", CONVERT, work[line] / "jobs.json"]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def save(line):
        tasks = [
            {
                "do": "save_again",
                "folder": str(folder[row, "converted"]),
                "out": str(folder[row, f"saved by {line}"]),
                "shard": SHARD[row[3]],
            }
            for row in ROWS
        ]
        alone(line, tasks)

    def read(line):
        classes = ["AutoModelForImageTextToText", *(["AutoModelForVision2Seq"] if line == "4" else [])]
        keys = list(itertools.product(ROWS, SAVERS, classes))
        out = {key: str(root / f"{line}-{name(key[0])}-{key[1]}-{key[2]}.pt") for key in keys}
        tasks = [
            {
                "do": "read",
                "kind": row[6],
                "folder": str(folder[row, saver]),
                "class": cls,
                "out": out[row, saver, cls],
            }
            for row, saver, cls in keys
        ]
        answers = alone(line, tasks)
        return {key: {**answer, **torch.load(out[key])} for key, answer in zip(keys, answers, strict=True)}

    for step in (write, convert, save):
        in_both_lines(step)
    references = {row: torch.load(root / name(row) / "reference.pt")["logits"] for row in ROWS}
    return in_both_lines(read), references


def test_every_pair_of_values_is_in_the_matrix():
    values = [sorted({row[i] for row in LLAVA_ROWS}, key=str) for i in range(len(COLUMNS))]
    for i, j in itertools.combinations(range(len(COLUMNS)), 2):
        assert {(row[i], row[j]) for row in LLAVA_ROWS} == set(itertools.product(values[i], values[j]))


def test_every_kind_has_both_values_of_every_column():
    for kind in CLASSES:
        rows = [row for row in ROWS if row[6] == kind]
        assert all(len({row[i] for row in rows}) > 1 for i in range(6))


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_nothing_is_missing_or_unexpected(matrix, row):
    for line, answers in matrix[0].items():
        for key, answer in answers.items():
            if key[0] == row:
                assert (answer["missing"], answer["unexpected"]) == ([], []), (line, key)
                assert answer["class"] == CLASSES[row[6]]
                assert answer["norm_dtype"] == "torch.float32"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_logits_are_the_references_in_every_line(matrix, row):
    """Bit-equal within a line whoever saved; within 1e-5 of stock LLaVA with the norm written by hand."""
    answers, references = matrix
    for line in PYTHONS:
        logits = [answer["logits"] for key, answer in answers[line].items() if key[0] == row]
        assert len(logits) == len(SAVERS) * (2 if line == "4" else 1)
        assert all(other.equal(logits[0]) for other in logits)
        torch.testing.assert_close(logits[0], references[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_config_is_the_same_everywhere(matrix, row):
    every = [answer["config"] for line in PYTHONS for key, answer in matrix[0][line].items() if key[0] == row]
    assert all(config == every[0] for config in every)
    expected = {"norm_align_type": "layer_norm", "image_token_index": 16, "image_token_id": 16, "image_seq_length": 4}
    expected["vision_feature_layer"] = [-2, -3, 1] if row[6] == "vipllava" else every[0]["vision_feature_layer"]
    assert every[0].items() >= expected.items() and every[0]["norm_align_target"] > 0


@pytest.mark.parametrize("row", [row for row in ROWS if row[6] != "llava_onevision"], ids=name)
def test_the_processor_is_the_same_everywhere(matrix, row):
    every = [answer for line in PYTHONS for key, answer in matrix[0][line].items() if key[0] == row]
    # 28 px in patches of 14; LLaVA-NeXT adds a grid of 4 x 4 patches, less what pads a photo of 40 x 52, and its rows
    image_tokens = 24 if row[6] == "llava_next" else 4
    for answer in every:
        assert answer["input_ids"] == every[0]["input_ids"]
        assert answer["input_ids"].count(16) == image_tokens  # tiny.IMAGE_TOKEN_ID
        assert answer["prompt"] == every[0]["prompt"] == "USER: <image> what is a cat ASSISTANT:"
        torch.testing.assert_close(answer["pixel_values"], every[0]["pixel_values"], rtol=0, atol=1e-6)
