"""lm-eval itself on local tasks: its scores are those that the LLaVA's own log-probabilities give."""

import json
import math
import random
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from llava_norm_align import cli
from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.convert import convert
from llava_norm_align.evaluation.extract_lm import extract_lm
from llava_norm_align.evaluation.text_tasks import TEXT_TASKS, UNTOUCHED, evaluate_text
from tests.helpers.convert import tiny_llava

pytest.importorskip("lm_eval", reason="needs the extra eval")

COUNT = 60
QUESTIONS = [f"What is in picture {number}?" for number in range(COUNT)]
# of one length, so that the shortest does not win every time
CHOICES = [
    ["".join(random.Random(3 * number + n).choices("abcdefgh", k=3)) for n in range(3)] for number in range(COUNT)
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GROUP = """
group: pictures
task: [pictures_first, pictures_second]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture
def local_tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    folder = tmp_path / "tasks, mine"
    folder.mkdir()
    for name, numbers in (
        ("pictures", range(COUNT)),
        ("pictures_first", range(8)),
        ("pictures_second", range(8, COUNT)),
    ):
        rows = [{"question": QUESTIONS[n], "choices": CHOICES[n], "answer": n % 3} for n in numbers]
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        name = "all_pictures" if name == "pictures" else name
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data))
    (folder / "group.yaml").write_text(GROUP)
    return folder


def byte_ids(text):
    """The tokenizer of tests.helpers.convert: a token a byte, in the order of its letters, after pad, bos and eos."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in visible}
    letters |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in visible)}
    order = sorted(letters.values())
    return [3 + order.index(letters[byte]) for byte in text.encode()]


def share_right(folder):
    """By the whole LLaVA: of all answers, the one with the largest sum of log-probabilities is its choice."""
    model, right = AutoModelForImageTextToText.from_pretrained(folder).eval(), 0
    for number, question in enumerate(QUESTIONS):
        scores = []
        for choice in CHOICES[number]:
            before, after = byte_ids(question), byte_ids(" " + choice)
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([before + after])).logits[0].double().log_softmax(-1)
            places = range(len(before) - 1, len(before) + len(after) - 1)
            scores.append(sum(logits[place, token].item() for place, token in zip(places, after, strict=True)))
        right += scores.index(max(scores)) == number % 3
    return right / len(QUESTIONS)


def test_lm_eval_scores_the_llavas_own_language_model(tmp_path, local_tasks):
    stock = tiny_llava(tmp_path / "stock")
    convert(str(stock), tmp_path / "aligned, and=more", report=False)
    other = tiny_llava(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["language_model.lm_head.weight"] *= -1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    extract_lm(str(other), tmp_path / "untouched, too=1")
    expected = {"aligned": share_right(stock), UNTOUCHED: share_right(other)}
    assert expected["aligned"] != expected[UNTOUCHED]

    model = str(tmp_path / "aligned, and=more")
    result = evaluate_text(
        [model],
        untouched=str(tmp_path / "untouched, too=1"),
        tasks=["all_pictures", "pictures"],
        batch_size=4,
        device="cpu",
        scratch=tmp_path,
        include_path=local_tasks,
    )
    assert [(row["model"], row["task"], row["metric"], row["n"]) for row in result["rows"]] == [
        (name, task, "acc", COUNT) for name in (model, UNTOUCHED) for task in ("all_pictures", "pictures")
    ]
    for row in result["rows"]:
        share = expected[UNTOUCHED if row["model"] == UNTOUCHED else "aligned"]
        assert row["value"] == pytest.approx(share, abs=1e-12)
        if row["task"] == "all_pictures":
            assert row["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (COUNT - 1)), abs=1e-12)
    assert result["settings"]["dtype"] == "float32" and result["harness"].startswith("lm-eval 0.")
    assert not list(tmp_path.glob("text-tasks-*"))


def test_what_lm_eval_says_when_it_fails_is_told(tmp_path, local_tasks, capfd):
    stock = tiny_llava(tmp_path / "stock")
    (tmp_path / "pictures.jsonl").unlink()
    with pytest.raises(InputError, match=r"lm-eval failed on .*stock \(all_pictures; exit code 1\): .*pictures.jsonl"):
        evaluate_text([str(stock)], tasks=["all_pictures"], include_path=local_tasks, scratch=tmp_path)
    assert capfd.readouterr().out == ""  # stdout is for JSON
    assert not list(tmp_path.glob("text-tasks-*"))


def test_an_unknown_task_is_refused_with_near_names(tmp_path, local_tasks):
    stock = tiny_llava(tmp_path / "stock")
    with pytest.raises(InputError, match=r"no task arc_esay\. Did you mean .*arc_easy"):
        evaluate_text([str(stock)], tasks=["arc_esay"])
    with pytest.raises(InputError, match=r"no task all_picturs\. Did you mean all_pictures"):
        evaluate_text([str(stock)], tasks=["all_picturs"], include_path=local_tasks)


def test_the_program_writes_the_rows_beside_the_model(tmp_path, local_tasks, monkeypatch, capfd):
    stock = tiny_llava(tmp_path / "stock")
    convert(str(stock), tmp_path / "aligned", report=False)
    (tmp_path / "aligned" / "norm_align" / "evaluation.json").write_text("{}")  # of another run; it stays
    command = ["evaluate", tmp_path / "aligned", "--baseline", stock, "--tasks", "text:all_pictures", "--limit", "9"]
    command += ["--include-path", local_tasks, "--device", "cpu", "--json"]
    monkeypatch.setattr(sys, "argv", ["llava-norm-align", *map(str, command)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    result = json.loads(capfd.readouterr().out)
    assert [(row["model"], row["n"]) for row in result["rows"]] == [(str(tmp_path / "aligned"), 9), (str(stock), 9)]
    assert result["rows"][0]["value"] == result["rows"][1]["value"]  # the norm changes nothing on text
    assert set(result["weights_sha256"]) == {str(tmp_path / "aligned"), str(stock)}
    written = tmp_path / "aligned" / "norm_align"
    assert json.loads((written / "evaluation-text.json").read_text()) == result
    assert "untouched language model | missing" in (written / "evaluation-text.md").read_text()
    assert (written / "evaluation.json").read_text() == "{}"


def test_lm_eval_knows_every_task():
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    for task in TEXT_TASKS:
        assert manager.match_tasks([task]) == [task]
    assert "mmlu" in manager.all_groups and "mmlu_abstract_algebra" in manager.all_tasks
