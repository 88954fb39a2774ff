"""A language model extracted by either transformers line loads alone in both, with the logits of its LLaVA there."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.convert import tiny_llava, write_json
from tests.helpers.lines import PYTHONS, ROOT, run_alone

# language model, tied, shard, line that saved the LLaVA, line that extracts, norm-aligned first
ROWS = [
    ("llama", False, "5GB", "4", "5", False),
    ("llama", True, "20KB", "5", "4", True),
    ("qwen2", True, "5GB", "5", "5", True),
    ("qwen2", False, "20KB", "4", "4", False),
    ("mistral", False, "20KB", "5", "4", False),
    ("mistral", True, "5GB", "4", "5", True),
    ("llama", False, "20KB", "5", "5", True),
    ("qwen2", False, "5GB", "5", "4", True),
]
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "mistral": "MistralForCausalLM"}
TEXTS = ["What is in the picture?\n A cat", ""]
EXTRACT = """
import json, sys
from pathlib import Path
from llava_norm_align.conversion.convert import convert
from llava_norm_align.evaluation.extract_lm import extract_lm
for stock, model, target in json.load(open(sys.argv[1])):
    if model != stock:
        convert(stock, Path(model), report=False)
    extract_lm(model, Path(target))
"""

pytestmark = pytest.mark.skipif(
    not all(python.exists() for python in PYTHONS.values()), reason="needs .venv and .venv-tf4: run `make test`"
)


def name(row):
    return "-".join(map(str, row))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """By line: for every row the logits of the LLaVA and of the language model, and what loading it told."""
    root = tmp_path_factory.mktemp("extract")
    work = {line: root / f"line{line}" for line in PYTHONS}
    for folder in work.values():
        folder.mkdir()
    ids = torch.randint(0, 299, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.save({"input_ids": ids}, root / "inputs.pt")

    def place(row, part):
        return str(root / name(row) / part)

    for row in ROWS:
        source = tiny_llava(root / name(row) / "source", text=row[0], tied=row[1])
        config = json.loads((source / "config.json").read_text())
        text = {key: value for key, value in config["text_config"].items() if not key.startswith("rope_")}
        text |= {"rope_theta": 50_000.0} | ({"rope_scaling": tiny.LLAMA3_ROPE} if row[0] == "llama" else {})
        write_json(source / "config.json", config | {"text_config": text})

    def save(line):
        tasks = [
            {"do": "save_again", "folder": place(row, "source"), "out": place(row, "stock"), "shard": row[2]}
            for row in ROWS
            if row[3] == line
        ]
        run_alone(tasks, work[line], PYTHONS[line])

    def extract(line):
        rows = [row for row in ROWS if row[4] == line]
        jobs = [[place(row, "stock"), place(row, "aligned" if row[5] else "stock"), place(row, "lm")] for row in rows]
        (work[line] / "jobs.json").write_text(json.dumps(jobs))
        command = [PYTHONS[line], "-c", EXTRACT, work[line] / "jobs.json"]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def read(line):
        tasks = []
        for row in ROWS:
            common = {"do": "answer", "inputs": str(root / "inputs.pt")}
            tasks += [
                # in 4.57, a stock LLaVA that 5 saved loses its rotary base, so the source is asked
                common | {"folder": place(row, "source"), "out": str(work[line] / f"{name(row)}.pt")},
                common
                | {"folder": place(row, "lm"), "out": str(work[line] / f"{name(row)}-lm.pt")}
                | {"class": "AutoModelForCausalLM", "options": {"trust_remote_code": False}},
                {"do": "tokenize", "folder": place(row, "lm"), "texts": TEXTS},
            ]
        results = iter(run_alone(tasks, work[line], PYTHONS[line]))
        return {
            row: {
                "whole": torch.load(work[line] / f"{name(row)}.pt"),
                "alone": torch.load(work[line] / f"{name(row)}-lm.pt"),
                **dict(zip(("of_whole", "of_alone", "tokens"), (next(results) for _ in range(3)), strict=True)),
            }
            for row in ROWS
        }

    def in_both_lines(step):
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(PYTHONS, pool.map(step, PYTHONS), strict=True))

    in_both_lines(save)
    in_both_lines(extract)
    return in_both_lines(read)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_logits_are_those_of_the_llava_in_each_line(answers, row):
    for line in PYTHONS:
        found = answers[line][row]
        assert found["of_alone"] == {"class": CLASSES[row[0]], "missing": []}
        assert found["alone"].equal(found["whole"]), line
        assert found["alone"].std() > 0
    torch.testing.assert_close(answers["4"][row]["alone"], answers["5"][row]["alone"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_tokenizer_is_the_same_in_each_line(answers, row):
    # tests.helpers.convert's: pad, bos and eos, then 256 byte tokens, whose order is that of their letters
    four, five = (answers[line][row]["tokens"] for line in ("4", "5"))
    assert four == five
    assert five["prompt"] == "USER: what is a cat ASSISTANT:"
    assert len(five["ids"][0]) == len(TEXTS[0]) and five["ids"][1] == []
