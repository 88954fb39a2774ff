"""lmms-eval itself, in a process of its own: its scores are evaluate's on the same rows, and errors end it."""

import json
import shutil

import numpy as np
import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.evaluate import evaluate
from llava_norm_align.evaluation.lmms import evaluate_lmms, lmms_table
from tests.helpers import lmms, tiny
from tests.helpers.answers import said_alone


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("lmms")


@pytest.fixture(scope="module")
def docs(root):
    return lmms.build(root)


@pytest.fixture(autouse=True)
def datasets_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def test_scores_and_differences_are_those_of_evaluate(root, docs, tmp_path, capfd):
    names = [str(root / name) for name in lmms.models()]
    result = evaluate_lmms(
        names,
        tasks=["own_pictures", "own_choices"],
        batch_size=3,
        device="cpu",
        scratch=tmp_path,
        include_path=root / "tasks",
    )
    assert capfd.readouterr().out == ""  # stdout is for JSON
    assert [path.name for path in tmp_path.iterdir()] == ["datasets"]
    scores = {(row["model"], row["task"]): row for row in result["rows"]}
    assert "own\\_choices: acc" in lmms_table(result)
    assert len(result["rows"]) == 4 and {row["n"] for row in result["rows"]} == {lmms.COUNT}

    # by transformers' own loop
    processor, said, chosen = tiny.processor(), {}, {}
    for name, model in zip(names, lmms.models().values(), strict=True):
        images = [tiny.photo(index // 2) for index in range(lmms.COUNT)]
        said[name] = np.array(
            [said_alone(model, processor, doc["question"], doc["image"]) == doc["answer"] for doc in docs]
        )
        losses = [
            [lmms.loss_of(model, processor, doc["question"], [image], choice)[0] for choice in doc["choices"]]
            for doc, image in zip(docs, images, strict=True)
        ]
        chosen[name] = np.array([int(np.argmin(row)) == doc["right"] for row, doc in zip(losses, docs, strict=True)])
        for task, right in (("own_pictures", said[name]), ("own_choices", chosen[name])):
            assert 0 < right.mean() < 1
            assert scores[name, task]["value"] == pytest.approx(right.mean(), abs=1e-12)

    own = evaluate(
        names[0],
        [str(root / "set.json")],
        baselines=names[1:],
        batch_size=3,
        max_new_tokens=4,
        device="cpu",
        out=tmp_path / "own",
    )
    for position, name in enumerate(names):
        assert scores[name, "own_pictures"]["value"] == own["scores"][position]["accuracy"]
    of_pictures, of_choices = result["differences"]
    [expected] = own["differences"]
    assert of_pictures.pop("metric") == "exact_match" and of_pictures.pop("baseline") == names[1]
    assert of_pictures.pop("task") == "own_pictures" and expected.pop("task") == "set"
    assert of_pictures == {key: value for key, value in expected.items() if key not in ("type", "baseline")}

    first, other = chosen[names[0]], chosen[names[1]]
    assert of_choices["only_first_right"] == (first & ~other).sum()
    assert of_choices["only_second_right"] == (other & ~first).sum()
    assert of_choices["difference"] == pytest.approx(first.mean() - other.mean())


def test_a_broken_processor_ends_the_program_without_a_score(root, docs, tmp_path):
    broken = shutil.copytree(root / "stock", tmp_path / "broken")
    settings = json.loads((broken / "processor_config.json").read_text())
    (broken / "processor_config.json").write_text(json.dumps(settings | {"patch_size": 7}))
    arguments = ["--tasks", "own_pictures", "--include_path", str(root / "tasks")]
    done = lmms.run_lmms_eval(tmp_path, "--model_args", "pretrained=broken,device=cpu", *arguments)
    assert done.returncode == 1
    assert "Error: ValueError: " in done.stderr.splitlines()[-1] and "own_pictures|none" not in done.stdout
    assert not list((tmp_path / "results").rglob("*.json*"))

    with pytest.raises(InputError, match=r"lmms-eval failed on .*broken \(own_pictures; exit code 1\): ValueError: "):
        evaluate_lmms([str(broken)], tasks=["own_pictures"], include_path=root / "tasks", scratch=tmp_path)
    assert not list(tmp_path.glob("lmms-*"))


def test_an_error_of_lmms_eval_itself_is_told(root, docs, tmp_path):
    """It ends with exit code 0 after it, and no results."""
    tasks = shutil.copytree(root / "tasks", tmp_path / "tasks")
    task = (tasks / "own_pictures.yaml").read_text()
    (tasks / "own_pictures.yaml").write_text(task.replace("rows.jsonl", "nothing.jsonl"))
    with pytest.raises(
        InputError, match=r"\(own_pictures; exit code 0\): FileNotFoundError: Unable to find .*nothing\.jsonl"
    ):
        evaluate_lmms([str(root / "stock")], tasks=["own_pictures"], include_path=tasks, scratch=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pretrained={root}/nothing", "There is no folder"),
        ("pretrained={root}/stock,batch_size_=3", "unexpected keyword argument 'batch_size_'"),
    ],
)
def test_wrong_arguments_end_the_program(root, docs, tmp_path, arguments, message):
    tasks = ["--tasks", "own_pictures", "--include_path", str(root / "tasks")]
    done = lmms.run_lmms_eval(tmp_path, "--model_args", arguments.format(root=root), *tasks)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]
