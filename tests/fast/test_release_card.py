"""The model card of a release: what it says, and where that comes from."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import weights_sha256, write_json
from llava_norm_align.conversion.convert import convert
from llava_norm_align.release.card import MARK
from llava_norm_align.release.card_evaluation import score
from llava_norm_align.release.card_results import short
from llava_norm_align.release.contents import find_contents
from tests.helpers.convert import tiny_llava, write_photos
from tests.helpers.release_card import (
    REPO,
    add_diagnosis,
    add_evaluation,
    add_harness,
    add_training,
    build,
    front,
    move_norm,
    result,
    section,
)

CARD = "---\nlicense: apache-2.0\n---\n\n# A norm-aligned model\n"
NAME = "accuracy, 8 questions, 95 % interval 0.25 to 0.95"
EVIL = "a|b <script>alert(1)</script> [x](http://evil) @you\n---\nlicense: mit\n```"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("card")
    convert(str(tiny_llava(root / "stock")), root / "model", report=False)
    return root / "model"


@pytest.fixture
def folder(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(converted, tmp_path / "model")


def test_an_untrained_model_says_so_first(folder):
    card = build(folder, tried=["Python 3.11.7, transformers 4.57.6, torch 2.13.0"])
    assert front(card) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "tags": ["llava", "llava-norm-align", "vision-language-model"],
    }
    title, first = re.split(r"\n\n+", card.text.partition(MARK)[2].strip())[:2]
    assert title == "# my-model" and first.startswith("> **Train this model before use.**")
    assert "no evaluation" in section(card, "Evaluation").lower()
    assert "- Python 3.11.7, transformers 4.57.6, torch 2.13.0" in section(card, "Loading")
    calibration = json.loads((folder / "norm_align" / "calibration.json").read_text())
    norms = load_file(folder / "model-00001-of-00002.safetensors")["language_model.model.embed_tokens.weight"].norm(
        dim=1
    )
    target = norms[norms > 1e-6].mean().item()
    assert calibration["target_norm"] == pytest.approx(target)
    assert f"target norm T: {target:.4f} (the mean L2 norm of the text embeddings)" in section(card, "Calibration")
    assert f"T / sqrt(32) = {target / 32**0.5:.4g} on every channel; bias 0" in section(card, "Calibration")
    assert "2512.08374" in section(card, "Citation") and "llama.cpp" in section(card, "Limits")
    for title in ("Training", "Norms of visual and text tokens"):
        assert section(card, title) == ""


def test_measured_agreement_is_told_with_the_warning(folder):
    path = folder / "norm_align" / "calibration.json"
    content = json.loads(path.read_text())
    content["report"] = {"kl_nats": 0.507, "top1_agreement": 0.85, "image_prompts": 12}
    write_json(path, content)
    assert "> Measured at the conversion, 12 prompts with an image: KL 0.507 nats" in build(folder).text


def test_a_norm_that_moved_counts_as_trained_and_nothing_is_claimed_of_how(folder):
    move_norm(folder)
    card = build(folder)
    assert "> **" not in card.text and "how is not recorded here" in section(card, "Training")
    assert "it has moved since" in section(card, "Calibration")


def test_a_recorded_training_of_a_norm_that_did_not_move_is_doubted(folder):
    """training.json names no weights: it may have been left over from others."""
    add_training(folder)
    card = build(folder)
    assert "> **Train this model before use.**" in card.text and "although a training is recorded" in card.text
    doubt, claim = section(card, "Training").split("Trained for 30 steps")
    assert "these may not be the weights" in doubt and "needs training before use" in section(card, "Limits")
    assert any("training.json" in note and "norm has not moved" in note for note in card.notes)


def test_training_by_its_result_file(folder):
    add_training(folder)
    move_norm(folder)
    card = build(folder)
    assert "> **" not in card.text and "may not be" not in card.text
    assert not any("training.json" in note for note in card.notes)
    told = section(card, "Training")
    assert "Trained for 30 steps on rows.json." in told
    assert "| projector | 1,152 | 2e-05 | 0 |" in told and "| vision | 22,056,576 | frozen |  |" in told
    assert "Loss of the first logged step: 1.875; of the last: 0.25." in told
    assert "learning\\_rate 2e-05" in told and "- The gain of the norm has not moved in 20 steps" in told
    assert not re.search("annika|secret|hub|output_dir", card.text)
    add_training(folder, completed=False)
    assert "> **This training ended early**, at step 30." in build(folder).text


def test_evaluation_in_metadata_and_text(folder):
    add_evaluation(folder)
    card = build(folder)
    [entry] = front(card)["model-index"]
    assert entry == {
        "name": "my-model",
        "results": [
            {
                "task": {"type": "image-text-to-text"},
                "dataset": {"name": "easy-vqa, the first 8 only", "type": "easy-vqa"},
                "metrics": [{"type": "accuracy", "value": 0.75, "name": NAME}],
            }
        ],
    }
    told = section(card, "Evaluation")
    assert "| this model | norm + GWC | 75.00 (25.00 to 95.00) |" in told
    assert "| easy-vqa | stock | 8 | -12.50 (-40.00 to +10.00) | 1 / 2 | 1.0000 | not resolved |" in told
    assert "Only the first 8 rows of each test set were asked" in told and "1 empty answers count as wrong" in told
    assert "annika" not in card.text and "lower" not in told
    assert "/home" not in card.text and "/data" not in card.text


def test_a_score_of_one_seed_is_that_seed(folder):
    add_evaluation(folder)
    content = json.loads((folder / "norm_align" / "evaluation.json").read_text())
    content["models"][0]["folders"].insert(0, content["models"][1]["folders"][0] | {"weights_sha256": "2" * 64})
    content["scores"][0] |= {"accuracy": 0.5, "seeds": [0.25, 0.75]}
    add_evaluation(folder, models=content["models"], scores=content["scores"])
    card = build(folder)
    metric = front(card)["model-index"][0]["results"][0]["metrics"][0]
    # the interval is that of the mean of both
    assert metric == {"type": "accuracy", "value": 0.75, "name": "accuracy, 8 questions"}
    assert "this training (2 seeds)" in section(card, "Evaluation")


def test_harness_results(folder):
    for name in ("text", "lmms"):
        add_harness(folder, name)
    card = build(folder)
    found = front(card)["model-index"][0]["results"]
    assert [(one["task"]["type"], one["dataset"]["type"]) for one in found] == [
        ("text-generation", "arc_easy"),
        ("image-text-to-text", "arc_easy"),
    ]
    assert [one["metrics"] for one in found] == 2 * [
        [{"type": "acc-none", "value": 0.625, "name": "acc, none, 240 questions, standard error 0.0125"}]
    ]
    told = section(card, "Evaluation")
    assert told.count("a-harness 1.2.3") == 4
    assert "| arc\\_easy | acc, none | this model | 0.6250 +- 0.0125 | 240 |" in told
    assert "| arc\\_easy | acc, none | untouched language model | missing | |" in told
    assert "| arc\\_easy | acc | stock | 240 | +0.1250 (-0.0100 to +0.2600) | 0.0600 | not resolved |" in told
    assert "not paired: no score of each question is logged" in told
    assert str(folder) not in card.text and "/data" not in card.text


def test_differences_of_another_model_are_left_out(folder):
    add_harness(folder, "lmms")
    content = json.loads((folder / "norm_align" / "evaluation-lmms.json").read_text())
    add_harness(folder, "lmms", models=content["models"][::-1])
    told = section(build(folder), "Evaluation")
    assert "this model" in told and "resolved" not in told


def test_numbers_of_numpy_are_plain_in_the_metadata():
    text = ModelCard(CARD).data
    text.eval_results, text.model_name = [score("t", "d", "m", np.float64(0.1), np.int64(3), np.int64(2))], "x"
    assert yaml.safe_load(text.to_yaml())["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.1


def test_diagnosis_with_the_plots_that_belong_to_it(folder):
    add_diagnosis(folder)
    told = section(build(folder), "Norms of visual and text tokens")
    assert "Ratio of mean norms at layer 0, visual / text: 38.29 (95 % interval" in told
    assert "| visual, layer 0 | 6,912 | 41.08 |" in told
    assert re.findall(r"!\[.*\]\((.*)\)", told) == ["norm_align/layer0_norms.png"]
    assert "[norm_align/diagnosis.md](norm_align/diagnosis.md)" in told and "contested" in told
    assert folder.parent.name not in told


@pytest.mark.parametrize("name", ["diagnosis", "evaluation", "evaluation-text", "evaluation-lmms"])
def test_results_of_other_weights_are_left_out_and_told(folder, name):
    add_diagnosis(folder)
    add_evaluation(folder)
    add_harness(folder, "text")
    add_harness(folder, "lmms")
    path = folder / "norm_align" / f"{name}.json"
    path.write_text(path.read_text().replace(weights_sha256(folder), "9" * 64))
    [note] = build(folder).notes[:1]
    assert f"{name}.json is of other weights" in note and "not in the card, though the file goes up" in note
    assert f"norm_align/{name}.json" in {item.name for item in find_contents(folder).items}
    for other in {"diagnosis", "evaluation", "evaluation-text", "evaluation-lmms"} - {name}:
        (folder / "norm_align" / f"{other}.json").unlink()
    card = build(folder)
    assert "model-index" not in front(card) and "38.29" not in card.text and "75.00" not in card.text


def test_result_files_of_another_schema_or_broken(folder):
    result(folder, "training", schema_version=2)
    assert any("training.json has schema_version 2" in note for note in build(folder).notes)
    add_evaluation(folder, scores=None)
    with pytest.raises(InputError, match="evaluation.json is not as evaluate writes it .*Run evaluate again"):
        build(folder)
    (folder / "norm_align" / "evaluation.json").write_text("{")
    with pytest.raises(InputError, match="evaluation.json is broken"):
        build(folder)


@pytest.mark.parametrize("recipe", [[1], "x"])
def test_a_recipe_that_is_none(folder, recipe):
    add_training(folder, recipe=recipe)
    with pytest.raises(InputError, match="training.json is not as train writes it .*Run train again"):
        build(folder)


@pytest.mark.parametrize("hashes", ["x", [1], {"a": ["x"]}, None])
@pytest.mark.parametrize("name", ["text", "lmms"])
def test_hashes_of_weights_that_are_none(folder, name, hashes):
    add_harness(folder, name, weights_sha256=hashes)
    card = build(folder)
    assert "model-index" not in front(card) and any(f"evaluation-{name}.json is of other" in n for n in card.notes)


def test_words_of_result_files_cannot_become_markup(folder):
    add_training(folder, recipe={"data_path": EVIL, "optim": EVIL, EVIL: EVIL}, alarms=[{"message": EVIL}],
                 groups=[{"part": EVIL, "parameters": 1}])  # fmt: skip
    add_evaluation(folder)
    for name in ("evaluation", "training"):
        path = folder / "norm_align" / f"{name}.json"
        text = path.read_text()
        for word in ("easy-vqa", "norm + GWC", "5.24.0"):
            text = text.replace(json.dumps(word), json.dumps(EVIL))
        path.write_text(text)
    add_harness(folder, "text", harness=EVIL)
    add_harness(folder, "lmms", harness=EVIL)
    card = build(folder)
    body = card.text.partition(MARK)[2]
    assert front(card)["license"] == "apache-2.0" and "\n---\n" not in body
    assert (
        "<script" not in re.sub(r"\\<", "", body) and "](http://evil" not in body and not re.search(r"[^\\]@you", body)
    )
    assert body.count("```") == 4  # the code and the citation
    kinds = {one["dataset"]["type"] for one in front(card)["model-index"][0]["results"]}
    assert all(re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", kind) for kind in kinds)
    tables = [line for line in body.splitlines() if line.startswith("|")]
    assert tables and not any(re.search(r"[^\\]\|b", line) for line in tables)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/annika/x/stock/", "stock"),
        ("../stock", "stock"),
        ("~/stock", "stock"),
        ("a/b/c", "c"),
        ("C:\\Users\\annika\\stock", "stock"),
        ("owner/model", "owner/model"),
        ("/c/hub/models--owner--model/snapshots/0a1b", "owner/model"),
    ],
)
def test_short_names(name, shown):
    assert short(name) == shown


def test_the_loading_lines_load_it(folder, tmp_path):
    """Run as they stand, but for the place of the model, without this package."""
    [photo, _] = write_photos(tmp_path / "photos")
    code = re.search(r"```python\n(.*?)```", build(folder).text, re.DOTALL)[1]
    assert f'model_id = "{REPO}"' in code
    code = code.replace(f'"{REPO}"', repr(str(folder))).replace('"photo.jpg"', repr(str(photo)))
    block = "import sys\nsys.modules['llava_norm_align'] = None  # an import of it fails\n"
    ran = subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout.endswith("\n"), ran.stderr
