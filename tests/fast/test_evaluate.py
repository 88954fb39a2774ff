"""evaluate: tiny models from answers to evaluation.json, resumed and failing."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("statsmodels")

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.results import weights_sha256
from llava_norm_align.evaluation.evaluate import evaluate
from tests.helpers import tiny
from tests.helpers.answers import build, lines_of, run, said_alone, talkative
from tests.helpers.diagnosis_result import FULL

FILES = {"evaluation.json", "evaluation.md", "predictions.jsonl"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models a, b and c, and set.json: 20 rows about 10 images."""
    return build(tmp_path_factory.mktemp("evaluate"))


def test_from_answers_to_the_table(root, tmp_path):
    told = []
    result = run(root, "a", "b", out=tmp_path, echo=told.append)
    other = next(path for path in tmp_path.glob("predictions-b-*.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == FILES | {other.name}
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result

    # the answers are those of transformers' own loop, and right or wrong by hand
    right = {}
    rows = json.loads((root / "set.json").read_text())
    for seed, path in enumerate((tmp_path / "predictions.jsonl", other)):
        head, *found = lines_of(path)
        assert head["settings"]["model"]["weights_sha256"] == weights_sha256(root / "ab"[seed])
        model = talkative(seed)
        for row, line in zip(rows, found, strict=True):
            question = row["conversations"][0]["value"].removeprefix("<image>\n")
            expected = said_alone(model, tiny.processor(), question, root / row["image"])
            answer = row["conversations"][1]["value"]
            assert line.pop("seconds") > 0 and line == {
                "task": "set",
                "id": row["id"],
                "type": row["type"],
                "prompt": question,
                "answer": answer,
                "prediction": expected,
                "correct": expected == answer,
            }
        right[seed] = np.array([line["correct"] for line in found])
    assert right[0].sum() == 15 and right[1].sum() < 10

    scores = {(s["model"], s["type"]): s for s in result["scores"]}
    [difference] = [one for one in result["differences"] if one["type"] is None]
    assert scores[0, None]["accuracy"] == 0.75 and scores[1, None]["accuracy"] == right[1].mean()
    assert scores[0, "even"]["accuracy"] == 0.5 and scores[0, "odd"]["accuracy"] == 1.0
    assert (scores[0, "even"]["n"], difference["n"], difference["images"]) == (10, 20, 10)
    assert difference["difference"] == pytest.approx(right[0].mean() - right[1].mean())
    assert difference["only_first_right"] == (right[0] & ~right[1]).sum()
    assert difference["resolved"]
    cell = "75.00 (53.13 to 88.81)"  # scipy 1.17, binomtest(15, 20).proportion_ci(method="wilson")
    report = (tmp_path / "evaluation.md").read_text()
    assert f"| a | no norm | {cell} |" in report and "| questions |  | 20 |" in report
    assert any(cell in lines for lines in told) and "higher" in report and "seed may turn the sign" in report


def test_a_run_goes_on_where_it_was_stopped(root, tmp_path):
    first = run(root, out=tmp_path)
    path = tmp_path / "predictions.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    for kept in (b"".join(whole[:8]) + whole[8][:20], b"".join(whole[:8]), whole[0][:50]):
        path.write_bytes(kept)
        told = []
        again = run(root, out=tmp_path, echo=told.append)
        assert again["scores"] == first["scores"] and len(lines_of(path)) == 21
        cut = not kept.endswith(b"\n")
        assert any("cut off" in line for line in told) == cut
        if kept.count(b"\n") == 8:  # a head and seven rows, whose seconds tell that they were not asked again
            assert path.read_bytes().splitlines(keepends=True)[1:8] == whole[1:8]
            assert any("7 of 20 answers of a; they are kept" in line for line in told)
    before = path.read_bytes().splitlines()[1:]
    run(root, out=tmp_path)
    assert path.read_bytes().splitlines()[1:] == before
    run(root, out=tmp_path, overwrite=True)
    assert path.read_bytes().splitlines()[1:] != before


def test_failing_rows_are_counted_and_too_many_end_the_run(root, tmp_path):
    for index in range(10):
        shutil.copy(root / f"{index}.png", tmp_path)
    rows = json.loads((root / "set.json").read_text())
    rows = [row | {"id": f"{row['id']}-{copy}"} for copy in range(5) for row in rows]  # 100
    (tmp_path / "one.png").write_bytes((root / "0.png").read_bytes()[:200])  # whole at its head
    rows[40]["image"] = "one.png"
    (tmp_path / "many.json").write_text(json.dumps(rows))
    result = run(root, out=tmp_path / "out", tasks=tmp_path / "many.json", batch_size=8)
    [folder] = result["models"][0]["folders"]
    assert (folder["failed"], folder["empty"]) == (1, 0)
    failed = lines_of(tmp_path / "out" / "predictions.jsonl")[41]
    assert (failed["prediction"], failed["correct"]) == (None, False) and "broken image" in failed["error"]
    assert result["scores"][0]["accuracy"] == 0.75  # row 40 asks for a fish
    assert "1 failed and 0 empty answers count as wrong" in (tmp_path / "out" / "evaluation.md").read_text()

    shutil.copy(root / "0.png", tmp_path / "one.png")  # mended, so the test set is another
    with pytest.raises(InputError, match="another test_sets.many.sha256"):
        run(root, out=tmp_path / "out", tasks=tmp_path / "many.json")

    (tmp_path / "one.png").write_bytes((root / "0.png").read_bytes()[:200])  # whole at its head
    rows[10]["image"] = "one.png"
    (tmp_path / "many.json").write_text(json.dumps(rows))
    with pytest.raises(
        CheckFailed, match=r"more than 1 % of 100 .* 2 failed and 0 were empty of the 48 .*r10-0 of many"
    ):
        run(root, out=tmp_path / "two", tasks=tmp_path / "many.json", batch_size=8)
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["predictions.jsonl"]


def test_empty_answers_fail_the_run(root, tmp_path):
    shutil.copytree(root / "a", tmp_path / "mute")
    model = tiny.stock_llava(seed=0)
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens alike: the first, <pad>, is taken
    model.save_pretrained(tmp_path / "mute")
    with pytest.raises(CheckFailed, match="0 failed and 3 were empty of the 3 asked.*no words"):
        run(root, tmp_path / "mute", out=tmp_path / "out")


def test_seeds_of_one_training(root, tmp_path):
    result = run(root, "a,b", "c", out=tmp_path)
    assert [model["label"] for model in result["models"]] == ["a (2 seeds)", "c"]
    assert len(list(tmp_path.glob("predictions*.jsonl"))) == 3
    shares = []
    for folder in result["models"][0]["folders"]:
        shares.append(np.mean([line["correct"] for line in lines_of(tmp_path / folder["predictions"])[1:]]))
    [score] = [s for s in result["scores"] if s["model"] == 0 and s["type"] is None]
    assert score["seeds"] == pytest.approx(shares) and score["accuracy"] == pytest.approx(np.mean(shares))
    assert "with few seeds they are too narrow" in (tmp_path / "evaluation.md").read_text()


def test_models_of_one_name_are_told_apart(root, tmp_path):
    shutil.copytree(root / "b", tmp_path / "a")
    result = run(root, "a", tmp_path / "a", out=tmp_path / "out", limit=8)
    assert [model["label"] for model in result["models"]] == [str(root / "a"), str(tmp_path / "a")]


def test_several_test_sets_have_a_mean(root, tmp_path):
    rows = json.loads((root / "set.json").read_text())[1:4]  # to which a's answers are right
    (root / "small.json").write_text(json.dumps(rows))
    names = [str(root / "set.json"), str(root / "small.json")]
    result = evaluate(str(root / "a"), names, baselines=[str(root / "b")], out=tmp_path, max_new_tokens=4)
    assert result["average"]["accuracy"][0] == pytest.approx((0.75 + 1.0) / 2)
    assert result["average"]["differences"][0]["interval"] is None  # 2 images
    report = (tmp_path / "evaluation.md").read_text()
    assert "| model | method | set | small | Avg |" in report
    [mean] = [line for line in report.splitlines() if line.startswith("| Avg |")]
    assert mean.endswith("| not resolved |")


def test_norms_are_told_apart_and_diagnoses_shown(root, tmp_path):
    from llava_norm_align import LlavaNormAlignForConditionalGeneration

    for name, seed in (("stock", 0), ("aligned", 1)):
        aligned = {} if name == "stock" else {"cls": LlavaNormAlignForConditionalGeneration, "norm_align_target": 2.0}
        talkative(seed, **aligned).save_pretrained(tmp_path / name)
        tiny.processor().save_pretrained(tmp_path / name)
        diagnosis = json.loads(json.dumps(FULL))
        diagnosis["model"] |= {"name": name, "weights_sha256": weights_sha256(tmp_path / name)}
        (tmp_path / name / "norm_align").mkdir(exist_ok=True)
        (tmp_path / name / "norm_align" / "diagnosis.json").write_text(json.dumps(diagnosis))
    result = run(tmp_path, "aligned", "stock", out=None, tasks=root / "set.json")
    assert [model["method"] for model in result["models"]] == ["norm + GWC", "no norm"]
    folder = tmp_path / "aligned" / "norm_align"
    [overlay] = result["diagnoses"]
    assert overlay["missing"] is None and "this: aligned" in overlay["table"] and "other: stock" in overlay["table"]
    assert "norms_by_layer.png" in str(overlay["plots"]) and all(
        (folder / path).is_file() for path in overlay["plots"]
    )
    assert overlay["plots"][0] in (folder / "evaluation.md").read_text()

    (tmp_path / "stock" / "norm_align" / "diagnosis.json").write_text(json.dumps(FULL))
    result = run(tmp_path, "aligned", "stock", out=None, tasks=root / "set.json")
    assert "of other weights" in result["diagnoses"][0]["missing"] and not result["diagnoses"][0]["plots"]
