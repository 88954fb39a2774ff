"""Two diagnoses side by side, the paper's rows beside one, and the documentation of diagnosis.json."""

import json
import re

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis import published
from llava_norm_align.diagnosis.compare import compare, read_diagnosis
from llava_norm_align.diagnosis.published import published_row
from tests.helpers import diagnosis_result
from tests.helpers.lines import ROOT


def write(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "diagnosis.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / "diagnosis.json"


def test_compare():
    other = diagnosis_result.with_layers(8)
    other["model"]["name"] = "out/aligned"
    other["norms"]["visual"]["mean"] = 1.21
    other["ratio"] = {"mean": 1.13, "interval": None, "median": 1.1}
    other["verdicts"]["a1"] = {"holds": 5, "fails": 2, "undecided": 1, "none": 0}
    text = compare(diagnosis_result.full(), other)
    assert "this: llava-" in text and "other: out/aligned" in text
    assert diagnosis_result.row(text, "mean norm: visual, layer 0") == ["41.08", "1.21"]
    assert diagnosis_result.row(text, "ratio visual / text, layer 0") == "38.29 (36.10 to 40.60) 1.13".split()
    assert diagnosis_result.row(text, "decoder layers") == ["4", "8"]
    assert diagnosis_result.row(text, "A1: holds, fails, undecided") == "1, 2, 1 5, 2, 1".split()
    assert (
        diagnosis_result.row(text, "mean rotation of visual tokens")
        == "6.7 degrees (layer 0) 5.8 degrees (layers 0 to 1)".split()
    )
    assert "differ" not in text
    other["prompt"], other["images"]["names"] = "Another?", ["z.png"]
    assert "The images differ" in compare(diagnosis_result.full(), other)
    assert "The prompts differ" in compare(diagnosis_result.full(), other)
    few = compare(diagnosis_result.few_images(), other)
    assert diagnosis_result.row(few, "A2: holds, fails, undecided") == "no verdict (3 images) 1, 2, 1".split()


@pytest.mark.parametrize("value", [None, "words", [], {}, True])
def test_compare_bears_what_others_wrote(value):
    for path in diagnosis_result.paths(diagnosis_result.FULL):
        assert compare(diagnosis_result.full(), diagnosis_result.changed(path, value))


def test_read_diagnosis_from_a_file_or_a_folder(tmp_path):
    expected = diagnosis_result.with_layers(7)
    file = write(tmp_path / "model" / "norm_align", expected)
    for path in (file, file.parent, tmp_path / "model"):
        assert read_diagnosis(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is broken .* the diagnosis that --compare takes"),
        ("[1]", "holds a JSON list"),
        ({"model": {}}, "has no schema_version, but 1 was expected"),
        (diagnosis_result.FULL | {"schema_version": 2}, "has schema_version 2, but 1 was expected.* again"),
        (
            {key: diagnosis_result.FULL[key] for key in ("schema_version", "model")},
            "lacks norms, layers, verdicts, ratio",
        ),
        (diagnosis_result.FULL | {"layers": {}}, "lacks layers, or holds something else"),
    ],
)
def test_read_diagnosis_refuses(content, message, tmp_path):
    with pytest.raises(InputError, match=message) as error:
        read_diagnosis(write(tmp_path, content))
    assert "diagnosis.json" in str(error.value) and str(tmp_path) in str(error.value)


def test_read_diagnosis_of_nothing(tmp_path):
    with pytest.raises(InputError, match=r"There is no diagnosis.json in .* or its folder norm_align"):
        read_diagnosis(tmp_path)
    with pytest.raises(InputError, match="There is no other.json"):
        read_diagnosis(tmp_path / "other.json")


# published rows


@pytest.mark.parametrize(
    ("name", "model_type", "model"),
    [
        ("llava-hf/llava-1.5-7b-hf", "llava", "LLaVA-v1.5"),
        ("llava-1.5-13b-hf", "llava", "LLaVA-v1.5"),
        ("/data/models/llava-1.5-7b-hf/", "llava", "LLaVA-v1.5"),
        ("/cache/models--llava-hf--llava-1.5-7b-hf/snapshots/0a1b", "llava", "LLaVA-v1.5"),
        ("liuhaotian/llava-v1.5-7b", "llava", "LLaVA-v1.5"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", "Qwen-2.5-VL"),
        ("moonshotai/Kimi-VL-A3B-Instruct", "kimi_vl", "Kimi-VL"),
        ("zai-org/GLM-4.1V-9B-Thinking", "glm4v", "GLM-4.1V"),
        ("THUDM/GLM-4.1V-9B-Base", "glm4v", "GLM-4.1V"),
        ("llava-hf/llava-v1.6-mistral-7b-hf", "llava_next", None),
        ("llava-hf/llava-1.5-7b-hf", "llava_norm_align", None),
        ("llava-hf/llava-1.5-7b-hf", "llava_next", None),
        ("me/llava-1.5-7b-hf", "llava", None),
        ("me/llava-1.5-7b-aligned", "llava", None),
        ("/data/llava-1.5-7b-hf-lora", "llava", None),
        ("/cache/models--me--llava-1.5-7b-hf/snapshots/0a1b", "llava", None),
        ("llava-hf/bakLlava-v1-hf", "llava", None),
        ("Qwen/Qwen2-VL-7B-Instruct", "qwen2_vl", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct-AWQ", "qwen2_5_vl", None),
        ("zai-org/GLM-4.5V", "glm4v_moe", None),
        ("", "llava", None),
    ],
)
def test_published_row_is_of_the_publisher_alone(name, model_type, model):
    found = published_row(name, model_type)
    assert (found and found["model"]) == model


def test_published_row_of_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert published_row("models/llava-1.5-7b-hf", "llava") is None  # reads as a Hub id
    (tmp_path / "models" / "llava-1.5-7b-hf").mkdir(parents=True)
    assert published_row("models/llava-1.5-7b-hf", "llava") == diagnosis_result.FULL["published"]


# documentation


def documentation():
    return (ROOT / "docs" / "diagnose.md").read_text()


@pytest.mark.parametrize("top", diagnosis_result.FULL)
def test_every_key_is_documented(top):
    sections = re.split(r"^##+ ", documentation(), flags=re.MULTILINE)
    (section,) = [section for section in sections if f"`{top}`" in section.partition("\n")[0]]
    documented = {name for code in re.findall("`([^`]+)`", section) for name in code.split(".")}
    keys = {key for path in diagnosis_result.paths(diagnosis_result.FULL[top]) for key in path if isinstance(key, str)}
    assert keys - documented == set()


def test_documented_rows_are_the_published_ones():
    text = documentation()
    for name, row in published.MODELS.items():
        before, after = (f"{mean:.2f} +- {std:.2f}" for mean, std in (row["before_projector"], row["after_projector"]))
        assert f"| {name} | {before} | {after} | {row['text']:.2f} | {row['ratio']} |" in text
    for name, (mean, std) in published.ENCODERS.items():
        assert f"| {name} | {mean:.2f} +- {std:.2f} |" in text
