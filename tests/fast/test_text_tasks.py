"""Text tasks: what is read from lm-eval's results, the table, and what is refused. tests/matrix runs lm-eval."""

import sys

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.text_tasks import TEXT_TASKS, UNTOUCHED, evaluate_text, read_results, text_table
from tests.helpers.convert import tiny_llava
from tests.helpers.refusals import REMEDY

# lm-eval 0.4.13's results, cut to what is read, with its other keys beside them
RESULTS = {
    "results": {
        "mmlu": {"alias": "mmlu", "sample_len": 5, "acc,none": 0.6, "acc_stderr,none": 0.1, "sample_count": {"a": 5}},
        "mmlu_stem": {"alias": " - stem", "acc,none": 0.5, "acc_stderr,none": 0.2},
        "mmlu_algebra": {"alias": "  - algebra", "acc,none": 0.0, "acc_stderr,none": "N/A"},
        "arc_easy": {
            "name": "arc_easy",
            "alias": "arc_easy",
            "acc,none": 0.25,
            "acc_stderr,none": float("nan"),
            "acc_norm,none": 0.5,
            "acc_norm_stderr,none": 0.25,
        },
        "gsm8k": {
            "exact_match,strict-match": 0.0,
            "exact_match_stderr,strict-match": "N/A",
            "exact_match,flexible-extract": 1,
            "exact_match_stderr,flexible-extract": 0.0,
        },
    },
    "group_subtasks": {"mmlu": ["mmlu_stem", "mmlu_law"], "mmlu_stem": ["mmlu_algebra", "mmlu_physics"]},
    "n-samples": {
        "mmlu_law": {"original": 100, "effective": 2},
        "mmlu_algebra": {"original": 100, "effective": 2},
        "mmlu_physics": {"original": 1, "effective": 1},
        "arc_easy": {"original": 2000, "effective": 4},
        "gsm8k": {"original": 3, "effective": 3},
    },
}


def row(model, task, metric, value, stderr, n):
    return {"model": model, "task": task, "metric": metric, "value": value, "stderr": stderr, "n": n}


def test_rows_are_read_with_their_errors_and_questions():
    assert list(read_results(RESULTS, ["mmlu", "arc_easy", "gsm8k"], "mine")) == [
        row("mine", "mmlu", "acc", 0.6, 0.1, 5),
        row("mine", "arc_easy", "acc", 0.25, None, 4),
        row("mine", "arc_easy", "acc_norm", 0.5, 0.25, 4),
        row("mine", "gsm8k", "exact_match, strict-match", 0.0, None, 3),
        row("mine", "gsm8k", "exact_match, flexible-extract", 1, 0.0, 3),
    ]


def test_a_task_that_is_not_in_the_results_is_told():
    with pytest.raises(InputError, match="no task hellaswag"):
        list(read_results(RESULTS, ["mmlu", "hellaswag"], "mine"))


def result(untouched, limit=None):
    models = ["mine", "base", *([UNTOUCHED] if untouched else [])]
    values = [(0.5, 0.1), (0.25, None), (0.75, 0.0)]
    rows = [
        row(model, task, "acc", value, stderr, 8)
        for model, (value, stderr) in zip(models, values, strict=False)
        for task in ("mmlu", "gsm8k")
    ]
    settings = {"tasks": ["mmlu", "gsm8k"], "dtype": "bfloat16", "limit": limit}
    return {
        "models": ["mine", "base"],
        "untouched": untouched,
        "harness": "lm-eval 1",
        "settings": settings,
        "rows": rows,
    }


def test_the_table_has_the_untouched_models_rows():
    lines = text_table(result("lmsys/vicuna-7b-v1.5", limit=8)).splitlines()
    assert lines[2:5] == [
        "| mmlu | acc | mine | 0.5000 +- 0.1000 | 8 |",
        "| mmlu | acc | base | 0.2500 | 8 |",
        "| mmlu | acc | untouched language model (lmsys/vicuna-7b-v1.5) | 0.7500 +- 0.0000 | 8 |",
    ]
    assert len(lines) == 10 and "missing" not in "".join(lines)
    assert lines[9] == (
        "lm-eval 1, bfloat16, no chat template, the first 8 questions of each task alone. +-: its standard error."
    )


def test_the_table_says_that_the_untouched_models_rows_are_missing():
    lines = text_table(result(None)).splitlines()
    assert lines[4] == "| mmlu | acc | untouched language model | missing | |"
    assert lines[7] == "| gsm8k | acc | untouched language model | missing | |"
    assert "--untouched ID" in lines[-1] and "questions of each" not in lines[-2]


def test_without_lm_eval_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as Python marks what cannot be imported
    with pytest.raises(InputError, match=r"needs lm-eval, .*pip install 'llava-norm-align\[eval\]'"):
        evaluate_text([str(tmp_path)])


def test_a_llava_as_the_untouched_model_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # it is refused before lm-eval is started
    source = tiny_llava(tmp_path / "source")
    with pytest.raises(InputError, match="--untouched .* is a LLaVA") as refused:
        evaluate_text([str(source)], untouched=str(source))
    assert REMEDY.search(str(refused.value))
    with pytest.raises(InputError, match="no folder .*/nothing"):
        evaluate_text([str(source)], untouched=str(tmp_path / "nothing"))


def test_the_tasks_are_those_that_are_promised():
    assert TEXT_TASKS == ("mmlu", "hellaswag", "arc_challenge", "arc_easy", "gsm8k")
