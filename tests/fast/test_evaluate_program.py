"""evaluate and extract-lm as a user calls them: options, groups of benchmarks, JSON alone on stdout, exit codes."""

import json

import pytest
import torch

pytest.importorskip("statsmodels")

from tests.helpers.answers import build, talkative
from tests.helpers.refusals import check_refused


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models a, b and c, and set.json: 20 rows about 10 images."""
    return build(tmp_path_factory.mktemp("evaluate"))


def test_a_model_and_its_baseline(run, root, tmp_path):
    options = ("--tasks", root / "set.json", "--max-new-tokens", 4, "--limit", 12, "--out", tmp_path / "out")
    code, out, err = run("evaluate", root / "a", "--baseline", root / "b", *options)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert ["a", "no", "norm"] in [row[:3] for row in rows] and ["questions", "12"] in rows
    code, out, _ = run("evaluate", root / "a", "--baseline", root / "b", *options, "--json")
    result = json.loads(out)
    assert code == 0 and result == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    # of a's own answers, every fourth was replaced (helpers.answers.build)
    assert next(score for score in result["scores"] if score["type"] is None)["accuracy"] == 9 / 12


def test_too_many_empty_answers_end_with_1(run, root, tmp_path):
    model = talkative(0)
    torch.nn.init.zeros_(model.lm_head.weight)  # token 0 is the padding
    model.save_pretrained(tmp_path / "silent")
    for path in root.joinpath("a").iterdir():
        if not (tmp_path / "silent" / path.name).exists() and path.is_file():
            (tmp_path / "silent" / path.name).write_bytes(path.read_bytes())
    code, out, err = run("evaluate", tmp_path / "silent", "--tasks", root / "set.json", "--out", tmp_path / "out")
    assert code == 1 and "more than 1 % of 20 questions without an answer" in err
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_extract_lm(run, root, tmp_path):
    code, out, err = run("extract-lm", root / "a", tmp_path / "lm", "--json")
    assert code == 0, err
    assert json.loads(out)["target"] == str(tmp_path / "lm") and (tmp_path / "lm" / "model.safetensors").is_file()
    code, out, err = run("extract-lm", root / "a", tmp_path / "lm")
    assert (code, out) == (2, "") and "--overwrite" in err
    assert "byte for byte" in run("extract-lm", root / "a", tmp_path / "lm", "--overwrite")[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("evaluate {source} --tasks txt", r"txt, which is not known\. Name easy-vqa, a JSON .*Did you mean text\?"),
        ("evaluate {source} --tasks easy-vqua", r"Did you mean easy-vqa\?"),
        (
            "evaluate {source} --tasks text --tasks {root}/set.json",
            "a group has result files of its own and runs alone",
        ),
        ("evaluate {source} --tasks text,easy-vqa", "a group runs alone"),
        ("evaluate {source} --tasks paper,llava", "a group runs alone"),
        ("evaluate {source},{source} --tasks paper", "seeds of one training, which groups .* do not pool"),
        ("evaluate {source} --tasks text --overwrite", "--overwrite belongs to test sets of our own"),
        ("evaluate {source} --baseline {source} --tasks text", "a model is named twice"),
        ("evaluate {source} --tasks lmms:,", "names no task"),
        ("evaluate {source} --tasks paper --images {root}", "--images belongs to test sets of our own"),
        ("evaluate {source} --tasks text --max-new-tokens 3", "--max-new-tokens belongs to test sets of our own"),
        ("evaluate {source} --tasks paper --untouched {source}", "--untouched belongs to tasks of text"),
        ("evaluate {source} --tasks {root}/set.json --untouched {source}", "--untouched belongs to groups"),
        ("evaluate {source} --tasks {root}/set.json --include-path {root}", "--include-path belongs to groups"),
        ("evaluate {source} --tasks text --load-in-4bit", "--load-in-4bit belongs to tasks about images"),
        ("evaluate {source} --tasks text --limit 0", "--limit is 0, but at least 1"),
        ("evaluate {source} --tasks paper --batch-size 0", "--batch-size is 0, but at least 1"),
        ("evaluate {root}/nowhere --tasks text", "no folder .*nowhere"),
        ("evaluate {source} --baseline {root}/nowhere --tasks paper", "no folder .*nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused(line, message, root, tmp_path, run):
    (tmp_path / "source").symlink_to(root / "a")
    (tmp_path / "set.json").write_text("[]")
    check_refused(line, message, tmp_path, tmp_path, run)
