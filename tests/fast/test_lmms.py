"""lmms-eval: what is read from its logs, paired by question, and put into tables. tests/lmms runs the program."""

import json
import sys

import pytest

pytest.importorskip("statsmodels")

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.harness import score_rows
from llava_norm_align.evaluation.lmms import _error_in as error_in
from llava_norm_align.evaluation.lmms import evaluate_lmms, lmms_table
from llava_norm_align.evaluation.lmms_samples import RIGHT_ANSWERS, paired_differences, read_samples, score_of
from tests.helpers.refusals import REMEDY

# lmms-eval 0.7.3's results, cut to what is read
RESULTS = {
    "results": {
        "pictures": {
            "alias": "pictures",
            "exact_match,none": 0.75,
            "exact_match_stderr,none": 0.125,
            "exact_match_stderr_clt,none": 0.1,
            "exact_match_stderr_clustered,none": "N/A",
            "submission,none": None,
        }
    },
    "n-samples": {"pictures": {"original": 100, "effective": 12}},
}


def test_rows_leave_out_lmms_evals_other_errors():
    assert list(score_rows(RESULTS, "pictures", "mine")) == [
        {"model": "mine", "task": "pictures", "metric": "exact_match", "value": 0.75, "stderr": 0.125, "n": 12}
    ]


def logged(metric, values, **more):
    """Samples as lmms-eval logs them: a value each, of another metric too with `more`."""
    return {
        number: {"doc_id": number, "input": f"q{number}", "target": "yes", "doc_hash": "same", metric: value}
        | {name: others[number] for name, others in more.items()}
        for number, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (1, 1.0),
        (0.3, 0.3),
        (True, 1.0),
        ({"score": 1.0, "question_id": "3"}, 1.0),
        ({"pred": "A", "answer": "A", "question_id": 3}, 1.0),
        ({"pred": "B", "answer": "A"}, 0.0),
        ({"prediction": "A", "answer": "A", "index": 3}, None),  # mmbench: a judge decides
        ("1", None),
        (float("nan"), None),
        ([1], None),
        (None, None),
    ],
)
def test_the_score_of_an_answer(value, score):
    assert score_of(value) == score


FIRST = [1, 1, 1, 1, 1, 1, 0, 1, 0, 1]
OTHER = [0, 0, 1, 0, 1, 0, 1, 0, 0, 0]  # 6 right in the first alone, 1 in this alone


def test_differences_of_right_answers_by_hand():
    [one] = paired_differences("t", logged("acc", FIRST), logged("acc", OTHER), {"acc": (0.8, 0.3)})
    assert (one["task"], one["metric"], one["n"], one["images"]) == ("t", "acc", 10, 10)
    assert one["difference"] == pytest.approx(0.5)
    assert (one["only_first_right"], one["only_second_right"]) == (6, 1)
    assert one["mcnemar_p"] == pytest.approx(2 * (1 + 7) / 2**7)  # the binomial tail of 1 or fewer of 7
    low, high = one["interval"]
    assert 0 < low < 0.5 < high <= 1 and one["resolved"] is False  # p is 0.125


def test_scores_that_are_no_right_or_wrong_have_no_mcnemar_p():
    first, other = [0.9, 0.6, 0.3] * 4, [0.0, 0.3, 0.3] * 4
    [one] = paired_differences("t", logged("vqa", first), logged("vqa", other), {"vqa": (0.6, 0.2)})
    assert one["difference"] == pytest.approx(0.4) and one["mcnemar_p"] is None and one["resolved"] is True


def test_questions_with_the_same_files_are_drawn_together():
    both = [logged("acc", values) for values in (FIRST, OTHER)]
    for samples in both:
        for number, sample in samples.items():
            sample["input_media"] = [f"{number // 5}.png"]
    [one] = paired_differences("t", *both, {"acc": (0.8, 0.3)})
    assert one["images"] == 2 and one["interval"] is None  # of two images there is none


def test_of_metrics_with_the_same_scores_the_one_that_is_their_mean_is_paired():
    """pope: accuracy, precision, recall and F1 are all computed of the same `score`s."""
    values = [[{"score": float(score)} for score in row] for row in (FIRST, OTHER)]
    both = [logged("pope_accuracy", row, pope_f1_score=row) for row in values]
    found = paired_differences("pope", *both, {"pope_f1_score": (0.9, 0.4), "pope_accuracy": (0.8, 0.3)})
    assert [(one["metric"], one["only_first_right"]) for one in found] == [("pope_accuracy", 6)]


def test_metrics_that_weigh_questions_are_paired_as_right_answers():
    """mme: a sum of points, with a metric for each half of the questions."""
    both = []
    for row in (FIRST, OTHER):
        samples = logged("mme_perception_score", [{"score": float(score)} for score in row])
        for number in range(5, 10):
            samples[number]["mme_cognition_score"] = samples[number].pop("mme_perception_score")
        both.append(samples)
    [one] = paired_differences(
        "mme", *both, {"mme_perception_score": (150.0, 60.0), "mme_cognition_score": (200.0, 90.0)}
    )
    assert (one["metric"], one["n"], one["only_first_right"]) == (RIGHT_ANSWERS, 10, 6)
    assert one["difference"] == pytest.approx(0.5)


def test_what_is_not_a_score_of_single_questions_is_not_paired():
    letters = [{"prediction": "A", "answer": "A"}] * 10
    for first, other in ((letters, letters), ([0.5] * 10, [0.5] * 10)):
        [one] = paired_differences("t", logged("m", first), logged("m", other), {"m": (71.4, 70.0)})
        assert one == {"task": "t", "metric": None, "reason": "no score of single questions is logged"}
    [one] = paired_differences("t", None, logged("m", FIRST), {"m": (0.5, 0.5)})
    assert one["metric"] is None and "several filters" in one["reason"]


@pytest.mark.parametrize("key", ["input", "target", "input_media", None])
def test_other_questions_are_refused(key):
    first, other = logged("acc", FIRST), logged("acc", OTHER)
    if key is None:
        del other[3]
        message = "only one has number 3"
    else:
        other[3][key] = "another"
        message = f"the {key} of question 3 differs"
    with pytest.raises(InputError, match=message) as refused:
        paired_differences("t", first, other, {"acc": (0.8, 0.3)})
    assert REMEDY.search(str(refused.value))


def test_samples_are_read_by_their_number(tmp_path):
    def write(rows):
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

    path, samples = tmp_path / "samples.jsonl", logged("acc", FIRST)
    samples[3]["filtered_resps"] = "two\u2028lines\x85"  # JSON writes these as they are
    rows = [*samples.values()]
    write(reversed(rows))
    assert [*read_samples(path).items()] == [*samples.items()]  # in order, too: pairs go by position
    write([*rows, rows[0]])
    assert read_samples(path) is None


def result(limit=None):
    def row(model, task, metric, value, stderr=None):
        return {"model": model, "task": task, "metric": metric, "value": value, "stderr": stderr, "n": 1500}

    pair = {"task": "mmbench_en_dev", "metric": None, "reason": "no score of single questions is logged"}
    both = [logged("average", scores) for scores in (FIRST, OTHER)]
    differences = paired_differences("mmstar", *both, {"average": (0.5, 0.2)})  # not the means
    settings = {"tasks": ["mmbench_en_dev", "mmstar"], "dtype": "auto", "limit": limit, "llava_prompts": []}
    return {
        "models": ["my_model", "base"],
        "harness": "lmms-eval 1",
        "settings": settings,
        "rows": [
            row("my_model", "mmstar", "math", 0.125),
            row("my_model", "mmstar", "average", 0.41242, 0.01),
            row("my_model", "mmbench_en_dev", "gpt_eval_score", 72.16),
            row("base", "mmstar", "average", 0.3772),
            row("base", "mmbench_en_dev", "gpt_eval_score", 71.39),
        ],
        "differences": [{"baseline": "base", **one} for one in (pair, *differences)],
    }


def test_the_tables():
    lines = lmms_table(result(limit=8)).splitlines()
    assert lines[:4] == [
        "| model | mmbench\\_en\\_dev: gpt\\_eval\\_score | mmstar: average (%) |",
        "| --- | ---: | ---: |",
        "| my\\_model | 72.16 | 41.24 |",
        "| base | 71.39 | 37.72 |",
    ]
    unpaired = "| mmbench\\_en\\_dev |  | base |  | not paired: no score of single questions is logged |  |  |"
    [paired] = [line for line in lines if line.startswith("| mmstar | right answers | base | 10 | +0.5000 (+")]
    assert unpaired in lines and paired.endswith(" | 0.1250 | not resolved |")
    assert "| mmstar | average | my\\_model | 0.4124 +- 0.0100 | 1,500 |" in lines
    assert (
        "- lmms-eval 1, dtype auto, the first 8 questions of each task alone. +-: lmms-eval's standard error." in lines
    )
    notes = "\n".join(lines)
    for words in ("without a key", "another seed may turn the sign", "weighs them by category"):
        assert words in notes


def test_what_the_program_said_last_is_told():
    logged = "\x1b[32m2026-11-30 23:16:04\x1b[0m | \x1b[31mERROR   \x1b[0m | lmms_eval.__main__:cli_evaluate:614 - "
    tail = f"Traceback\n{logged}Error during evaluation: no-such data. Please set `--verbosity=DEBUG` to get more\n"
    assert error_in(tail + "Postprocessing:   0%|   | 0/20 [00:16<?, ?it/s]\n") == "no-such data"
    assert error_in("words\nError: There is no folder x. Name one.\n") == "There is no folder x. Name one"
    tried = f"{logged}Error during evaluation: RetryError[<x raised NoTokenError>]\n"
    tried = f"a.b.NoTokenError: log in\n\nTraceback\n{tried}"
    assert error_in(tried) == "a.b.NoTokenError: log in"
    assert error_in("killed\n\n") == "killed" and error_in("") == "it said nothing"


def test_without_lmms_eval_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lmms_eval", None)  # as Python marks what cannot be imported
    with pytest.raises(InputError, match=r"needs lmms-eval, .* environment of its own: .*constraints/lmms\.txt"):
        evaluate_lmms([str(tmp_path)], tasks=["pope"])
