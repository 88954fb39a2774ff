"""The guard of the file that ships, in a process without the package: damaged weights raise, with their names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration
from tests.helpers import tiny
from tests.helpers.lines import run_alone

# PEFT asks transformers 5 for a name that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

OUTER = "modeling_llava_norm_align.LlavaNormAlignForConditionalGeneration"
LORA = "lora on sound base"


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def delete_one(tensors):
    del tensors[next(key for key in tensors if key.endswith("layers.1.mlp.up_proj.weight"))]


def delete_head(tensors):
    del tensors[next(key for key in tensors if key.endswith("lm_head.weight"))]


def delete_bias(tensors):
    del tensors[next(key for key in tensors if key.endswith("align_norm.bias"))]


def add_one(tensors):
    tensors["language_model.model.layers.9.extra"] = torch.zeros(3)


def reshape_one(tensors):
    key = next(key for key in tensors if key.endswith("linear_2.bias"))
    tensors[key] = torch.zeros(7)


def write_adapter(folder, base):
    from peft import LoraConfig, get_peft_model

    model = LlavaNormAlignForConditionalGeneration.from_pretrained(base)
    targets = r"model\.language_model\.layers\.\d+\.self_attn\.[qv]_proj"
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    peft_model.save_pretrained(folder)
    with torch.no_grad():
        return peft_model.eval()(**tiny.prompt_with_image(tiny.processor())).logits.double().sum().item()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Every case, loaded in one process; and what the sound model answers."""
    root = tmp_path_factory.mktemp("guard")
    sound, stock, tied = root / "sound", root / "stock", root / "tied"
    model = tiny.randomize(
        LlavaNormAlignForConditionalGeneration(tiny.llava_config(LlavaNormAlignConfig, norm_align_target=1.0))
    ).eval()
    model.save_pretrained(sound)
    tiny.stock_llava().save_pretrained(stock)
    LlavaNormAlignForConditionalGeneration(tiny.llava_config(LlavaNormAlignConfig, tied=True)).save_pretrained(tied)
    headless = root / "headless"
    shutil.copytree(sound, headless)
    rewrite(headless, delete_head)
    with torch.no_grad():
        sums = {"sound": model(**tiny.prompt_with_image(tiny.processor())).logits.double().sum().item()}

    tasks = {
        "sound": {"folder": sound},
        "tied": {"folder": tied},
        "untied without head": {"folder": headless},
        "inner model of a full checkpoint": {"folder": sound, "class": "AutoModel"},
        "stock": {"folder": stock, "class": OUTER, "code": str(sound)},
    }
    for name, change in {
        "one deleted": delete_one,
        "bias deleted": delete_bias,
        "one added": add_one,
        "one reshaped": reshape_one,
    }.items():
        folder = root / name.replace(" ", "_")
        shutil.copytree(sound, folder)
        rewrite(folder, change)
        tasks[name] = {"folder": folder}
    shards = root / "cut"
    model.save_pretrained(shards, max_shard_size="20KB")
    cut = sorted(shards.glob("model-*.safetensors"))[2]
    cut.write_bytes(cut.read_bytes()[:-100])
    tasks["shard cut"] = {"folder": shards}

    sums[LORA] = write_adapter(root / "adapter", sound)
    tasks[LORA] = {"folder": root / "adapter"}
    tasks["lora through our class"] = {"folder": root / "adapter", "class": OUTER, "code": str(sound)}
    for name, base in (("lora on damaged base", "one_deleted"), ("lora on added tensor", "one_added")):
        folder = root / name.replace(" ", "_")
        shutil.copytree(root / "adapter", folder)
        settings = json.loads((folder / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = str(root / base)
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        tasks[name] = {"folder": folder}
    both = root / "model_and_adapter"
    shutil.copytree(root / "one_deleted", both)
    shutil.copytree(root / "adapter", both, dirs_exist_ok=True)
    settings = json.loads((both / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(both)
    (both / "adapter_config.json").write_text(json.dumps(settings))
    tasks["model and adapter in one folder"] = {"folder": both}

    requests = [{"do": "check", **task, "folder": str(task["folder"])} for task in tasks.values()]
    return dict(zip(tasks, run_alone(requests, root), strict=True)), sums, cut


def test_sound_checkpoints_load(loaded):
    results, sums, _ = loaded
    for name in ("sound", "tied", "inner model of a full checkpoint"):
        assert results[name]["error"] is None, results[name]
    assert results["sound"]["logits"] == pytest.approx(sums["sound"], abs=1e-4)


def test_an_adapter_loads_on_its_guarded_base(loaded):
    results, sums, _ = loaded
    for name in (LORA, "lora through our class"):
        assert results[name]["error"] is None, results[name]
        assert results[name]["logits"] == pytest.approx(sums[LORA], abs=1e-4)
    assert abs(sums[LORA] - sums["sound"]) > 1e-2


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("one deleted", ["1 missing", "layers.1.mlp.up_proj.weight", "incomplete"]),
        ("bias deleted", ["align_norm"]),
        ("untied without head", ["1 missing", "lm_head.weight"]),
        ("one reshaped", ["1 of another shape", "linear_2.bias"]),
        ("one added", ["1 unexpected", "layers.9.extra"]),
        ("lora on damaged base", ["1 missing", "layers.1.mlp.up_proj.weight"]),
        ("lora on added tensor", ["1 unexpected", "layers.9.extra"]),
        ("model and adapter in one folder", []),
        ("stock", ["not converted", "llava-norm-align convert"]),
    ],
)
def test_damage_raises_and_names_tensor_and_cause(loaded, case, parts):
    result = loaded[0][case]
    assert result["error"] == "RuntimeError", result
    for part in parts:
        assert part in result["message"]


def test_a_head_that_only_the_config_ties_is_missed(tmp_path):
    """4.57 ties by text_config alone: with the flag at the top only, its head would be random."""
    config = tiny.llava_config(LlavaNormAlignConfig, tied=True)
    LlavaNormAlignForConditionalGeneration(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["tie_word_embeddings"] = True
    content["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(content))
    try:
        model = LlavaNormAlignForConditionalGeneration.from_pretrained(tmp_path)
    except RuntimeError as error:
        assert "lm_head.weight" in str(error)
    else:
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_cut_shard_is_named(loaded):
    results, _, cut = loaded
    assert results["shard cut"]["error"] == "RuntimeError", results["shard cut"]
    assert str(cut) in results["shard cut"]["message"] and "cut or damaged" in results["shard cut"]["message"]
