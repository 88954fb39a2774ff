"""Result files written by hand for the tests of a release's card, and that card taken apart."""

import copy

import yaml
from safetensors.torch import load_file, save_file

from llava_norm_align.common.results import weights_sha256, write_json
from llava_norm_align.diagnosis.markdown import markdown
from llava_norm_align.release.card import build_card
from tests.helpers.diagnosis_result import FULL

REPO = "me/my-model"
HEAD = {"schema_version": 1, "versions": {"transformers": "5.24.0", "torch": "2.13.0", "python": "3.11.7"}}


def build(folder, license="apache-2.0", **options):
    return build_card(folder, repo_id=REPO, license=license, **options)


def front(card):
    return yaml.safe_load(card.text.split("---\n")[1])


def section(card, title):
    return card.text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def result(folder, name, **content):
    write_json(folder / "norm_align" / f"{name}.json", HEAD | content)


def move_norm(folder):
    """As a training does: the norm of a converted model is no longer where it was inserted."""
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("align_norm.weight"))
    tensors[name][3] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})


def add_evaluation(folder, **changes):
    """This model right in 6 of 8, a baseline in 7; the difference is not resolved."""
    digest = weights_sha256(folder)

    def model(label, weights, name):
        one = {"name": name, "revision": None, "weights_sha256": weights, "predictions": "p", "failed": 0, "empty": 1}
        return {"label": label, "role": "model", "method": "norm + GWC", "folders": [one | {"seconds": 1.0}]}

    def score(number, accuracy, kind=None):
        where = {"task": "easy-vqa", "type": kind, "model": number, "n": 8}
        return where | {"accuracy": accuracy, "interval": [0.25, 0.95], "seeds": [accuracy]}

    content = {
        "command": "llava-norm-align evaluate /home/annika/model",
        "settings": {"limit": 8, "batch_size": 8, "generation": {"max_new_tokens": 16, "dtype": "float32"}},
        "tasks": {"easy-vqa": {"rows": 8, "sha256": "0" * 64}},
        "models": [
            model("model", digest, "/home/annika/model"),
            model("/data/annika/stock", "1" * 64, "/data/annika/stock"),
        ],
        "scores": [score(0, 0.75), score(1, 0.875), score(0, 0.5, "shape"), score(1, 1.0, "shape")],
        "differences": [
            {"task": "easy-vqa", "type": None, "baseline": 1, "n": 8, "images": 8, "difference": -0.125,
             "interval": [-0.4, 0.1], "only_first_right": 1, "only_second_right": 2, "mcnemar_p": 1.0,
             "resolved": False},
        ],
        "average": None,
        "diagnoses": [],
    }  # fmt: skip
    result(folder, "evaluation", **(content | changes))


def add_training(folder, **changes):
    content = {
        "model": "../somewhere/aligned",
        "model_type": "llava_norm_align",
        "completed": True,
        "steps": 30,
        "recipe": {"data_path": "/home/annika/secret-project/rows.json", "learning_rate": 2e-5, "bf16": True,
                   "output_dir": "/home/annika/out", "hub_model_id": "ann/x", "optim": "adamw_torch"},
        "groups": [
            {"part": "projector", "parameters": 1152, "learning_rate": 2e-5, "weight_decay": 0.0},
            {"part": "vision", "parameters": 22056576, "frozen": True},
        ],
        "alarms": [{"name": "gain", "step": 20, "message": "The gain of the norm has not moved in 20 steps."}],
        "history": [{"step": 1, "loss": 1.875}, {"step": 30, "loss": 0.25}, {"step": 30, "train_loss": 1.0}],
    }  # fmt: skip
    result(folder, "training", **(content | changes))


def add_diagnosis(folder):
    content = copy.deepcopy(FULL)
    content["model"] |= {"weights_sha256": weights_sha256(folder), "name": str(folder)}
    write_json(folder / "norm_align" / "diagnosis.json", content)
    for name in ("layer0_norms.png", "norms_by_layer.png", "attention_map.png"):
        (folder / "norm_align" / name).write_bytes(b"x")
    (folder / "norm_align" / "diagnosis.md").write_text(markdown(content, ["layer0_norms.png", "attention_map.png"]))


def add_harness(folder, name, **changes):
    own, other = str(folder), "/data/x/stock"
    rows = [
        {"model": own, "task": "arc_easy", "metric": "acc, none", "value": 0.625, "stderr": 0.0125, "n": 240},
        {"model": other, "task": "arc_easy", "metric": "acc, none", "value": 0.5, "stderr": None, "n": 240},
    ]
    content = {
        "models": [own, other],
        "weights_sha256": {own: weights_sha256(folder), other: "3" * 64},
        "harness": "a-harness 1.2.3",
        "settings": {"tasks": ["arc_easy"], "limit": None, "dtype": "bfloat16", "llava_prompts": []},
        "rows": rows,
    }
    if name == "text":
        content["untouched"] = None
    else:
        numbers = {"n": 240, "difference": 0.125, "interval": [-0.01, 0.26], "mcnemar_p": 0.06, "resolved": False}
        content["differences"] = [
            {"baseline": other, "task": "arc_easy", "metric": "acc", **numbers},
            {"baseline": other, "task": "gqa", "metric": None, "reason": "no score of each question is logged"},
        ]
    result(folder, f"evaluation-{name}", **(content | changes))
