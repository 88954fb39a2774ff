"""The demo and the commands around it on micro-LLaVA, as a user runs them."""

import json
import os

import pytest
import torch
from safetensors import safe_open

from llava_norm_align.conversion.micro import cached_micro
from llava_norm_align.data.easy_vqa import load_questions
from tests.helpers.lines import PYTHONS, run

NAMES = ("stock", "converted")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    wheels = os.environ.get("LLAVA_NORM_ALIGN_WHEELS")
    out = run("demo", "--out", folder, "--steps", 3, "--questions", 32, *(["--wheels", wheels] if wheels else []))
    return folder, out, json.loads((folder / "demo.json").read_text())


@pytest.fixture(scope="module")
def table_norm():
    """Mean L2 norm of micro-LLaVA's text table, in plain torch."""
    with safe_open(cached_micro() / "model.safetensors", framework="pt") as weights:
        table = weights.get_tensor("language_model.model.embed_tokens.weight").double()
    return (table * table).sum(1).sqrt().mean().item()


def test_the_demo_measures_converts_trains_and_asks(demo, table_norm):
    folder, out, result = demo
    rows = {row["model"]: row for row in result["rows"]}
    assert list(rows) == ["stock", "stock + training", "converted", "converted + training"]
    for name, row in rows.items():
        assert row["total"] == len(row["predictions"]) == 32
        assert row["interval"][0] <= row["accuracy"] <= row["interval"][1]
        assert ("training_seconds" in row) == name.endswith("training")
        assert f"{row['visual_norm']:.2f}" in out and name in out
    assert rows["stock"]["accuracy"] > 0.9  # 0.99 on all test questions
    assert rows["stock"]["visual_norm"] > 3 * rows["stock"]["text_norm"]
    assert rows["converted"]["visual_norm"] == pytest.approx(table_norm, rel=5e-3)
    assert rows["converted"]["text_norm"] == rows["stock"]["text_norm"]  # text does not pass the projector
    models = {"converted", "converted-trained", "stock-trained"}
    assert {path.name for path in folder.iterdir()} == {*models, "diagnosis", "demo.json"}


def test_the_demo_diagnoses_before_and_after(demo):
    folder, out, result = demo
    names = {"diagnosis.json", "diagnosis.md", "attention_map.png", "norms_by_layer.png", "cosine_by_layer.png"}
    for path in ("diagnosis/stock", "diagnosis/converted", "stock-trained/norm_align", "converted-trained/norm_align"):
        assert names <= {file.name for file in (folder / path).iterdir()}
    before, after = (json.loads((folder / "diagnosis" / name / "diagnosis.json").read_text()) for name in NAMES)
    assert before["ratio"]["interval"][0] > 3
    assert after["ratio"]["interval"][1] < 1.5
    assert len(before["layers"]) == len(after["layers"]) == 30
    assert before["layers"][0]["text"]["hidden_norm"] == after["layers"][0]["text"]["hidden_norm"]
    for found in (before, after):
        assert all(sum(found["verdicts"][name].values()) == 30 for name in ("a1", "a2"))
        assert found["verdicts"]["a1"]["none"] == 0
        assert len(found["attention"]["image_share"]) == 30
        assert found["attention"]["map"]["rows"] == found["attention"]["map"]["columns"] == 8


def test_training_moved_the_projector_and_kept_the_rest(demo):
    folder, _, _ = demo

    def tensors(name):
        found = {}
        for path in sorted((folder / name).glob("*.safetensors")):
            with safe_open(path, framework="pt") as weights:
                found |= {key: weights.get_tensor(key) for key in weights.keys()}
        return found

    before, after = tensors("converted"), tensors("converted-trained")
    assert set(before) == set(after)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved and all("multi_modal_projector" in key for key in moved)
    gain = next(key for key in moved if key.endswith("align_norm.weight"))
    assert after[gain].dtype == torch.float32


def test_both_lines_give_the_same_answers(demo):
    """What the demo trained, and the stock model beside it."""
    folder, _, _ = demo
    row = next(row for row in load_questions("test") if row.answer == "red")
    arguments = ["ask", folder / "converted-trained", row.image, row.question, "--baseline", cached_micro()]
    said = {line: run(*arguments, line=line) for line in PYTHONS}
    assert said["4"] == said["5"]
    trained, stock = (line.rpartition(": ")[2] for line in said["5"].splitlines())
    assert stock == "red"
    assert trained in {row.answer for row in load_questions("train")}


def test_convert_reports_on_the_sample_photos(tmp_path, table_norm):
    summary = json.loads(run("convert", cached_micro(), tmp_path / "out", "--json"))
    assert summary["calibration"]["target_norm"] == pytest.approx(table_norm, rel=1e-9)
    report = summary["report"]
    assert report["text_logits_equal"] is True and report["image_prompts"] >= 4
    assert report["layer0_norms"]["target"]["visual"] == pytest.approx(table_norm, rel=1e-2)
    assert report["layer0_norms"]["source"]["visual"] > 1.3 * report["layer0_norms"]["target"]["visual"]
    assert 0 <= report["top1_agreement"] <= 1 and report["kl_nats"] > 0
    stored = json.loads((tmp_path / "out/norm_align/calibration.json").read_text())
    assert stored["target_norm"] == summary["calibration"]["target_norm"]
