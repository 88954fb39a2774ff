"""Each recipe runs two steps as a user starts it, on a tiny model of its architecture; only data and steps differ."""

import json

import pytest
import torch

pytest.importorskip("trl")

from safetensors.torch import load_file

from llava_norm_align.conversion.assemble import assemble
from llava_norm_align.conversion.convert import convert
from llava_norm_align.trl_recipes.merge import merge
from llava_norm_align.trl_recipes.sft import run
from tests.helpers import data_file, lines
from tests.helpers.parts import write_text, write_vision

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% else %}{% generation %}{{ message['content'][0]['text'] }} </s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# tower, language model, and whether its head is tied: LLaVA-1.5, the paper's two set-ups, micro-LLaVA
ARCHITECTURES = {
    "stage1": ("siglip", "llama", True),
    "stage2": ("siglip", "qwen2", False),
    "stage2_lora": ("clip", "llama", False),
    "stage2_qlora": ("clip", "llama", False),
    "micro_stage1": ("dinov2", "llama", True),
    "micro_stage2": ("dinov2", "llama", True),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = data_file.sound_rows(folder / "images", 40)
    pairs = [row for row in rows if "image" in row and len(row["conversations"]) == 2]
    for name, content in (("mixed", rows), ("pairs", pairs)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def norm_aligned(folder, name):
    tower, family, tied = ARCHITECTURES[name]
    vision = write_vision(folder / "tower", tower)
    text = write_text(folder / "text", family, tied, template=TEMPLATE, width=64 if "qlora" in name else 32)
    assemble(folder / "stock", str(vision), str(text))
    convert(str(folder / "stock"), folder / "aligned", report=False)
    return folder / "aligned"


def arguments(name, model, data, out, steps=2):
    words = [name, "--model_name_or_path", str(model), "--output_dir", str(out), "--max_steps", str(steps)]
    if name.startswith("micro"):
        return words  # easy-VQA's own rows
    rows = data / ("pairs.json" if name == "stage1" else "mixed.json")
    return [*words, "--data_path", str(rows), "--image_folder", str(data / "images")]


def tensors(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: value for path in files for name, value in load_file(path).items()}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT 0.21 asks for it
@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes:UserWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_steps(tmp_path, data, name):
    model = norm_aligned(tmp_path, name)
    said = []
    out = run(arguments(name, model, data, tmp_path / "out"), said.append)
    result = json.loads((out / "norm_align/training.json").read_text())
    losses = [entry["loss"] for entry in result["history"] if "loss" in entry]
    assert result["completed"] and result["steps"] == 2 and len(losses) == 2 and all(loss > 0 for loss in losses)
    assert f"Written: {out}" in said
    assert (out / "norm_align/curves.png").is_file()

    trained = {"projector", "norm"} | ({"llm"} if "stage2" in name else set())
    rows = {row["part"]: row for row in result["groups"] if not row.get("frozen")}
    assert trained == set(rows)
    assert all(row["dtypes"] == ["float32"] for row in rows.values())
    if "lora" in name:
        named = json.loads((out / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(model) and named["modules_to_save"] == ["multi_modal_projector"]
        merge(out, tmp_path / "merged")
        out = tmp_path / "merged"
    before, after = tensors(model), tensors(out)
    assert set(before) == set(after)
    assert {key: value.dtype for key, value in before.items()} == {key: value.dtype for key, value in after.items()}
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    parts = ("multi_modal_projector", "language_model") if "llm" in trained else ("multi_modal_projector",)
    assert moved and all(key.startswith(parts) for key in moved)
    assert any("language_model" in key for key in moved) == ("llm" in trained)
    gain = next(key for key in moved if key.endswith("align_norm.weight"))
    assert after[gain].dtype == torch.float32
    assert (out / "projector.safetensors").exists() == ("llm" not in trained)
    if "llm" not in trained:
        alone = load_file(out / "projector.safetensors")
        assert all(torch.equal(value, after[key]) for key, value in alone.items()) and len(alone) == 6
        assert not list(out.glob("checkpoint-*/model*.safetensors"))
    for line, python in lines.PYTHONS.items():
        task = {"do": "read", "folder": str(out), "kind": "llava", "out": str(tmp_path / f"{line}.pt")}
        (found,) = lines.run_alone([task], tmp_path, python)
        assert (found["missing"], found["unexpected"]) == ([], [])
