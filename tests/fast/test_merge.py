"""merge: the full folder computes what base and adapter compute together, and is whole by itself."""

import json
import shutil
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.doctor import examine
from llava_norm_align.trl_recipes import checkpoints
from llava_norm_align.trl_recipes.lora import lora_config
from llava_norm_align.trl_recipes.merge import merge, plain_name
from tests.helpers.convert import tiny_llava
from tests.helpers.refusals import state

# PEFT 0.21 asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
GAIN = "multi_modal_projector.align_norm.weight"
TEMPLATE = (
    "{% for message in messages %}trained {% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def norm_aligned(root, name="base", **source):
    stock = tiny_llava(root / f"{name}-stock", **source)
    convert(str(stock), root / name, report=False)
    return root / name


def load(folder, dtype="auto"):
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    return model.eval()


def write_adapter(base, folder, dtype="auto", change=None, **options):
    """What a training leaves: random adapters that are not zero, a projector and norm that moved, a processor."""
    model = load(base, dtype)
    start = checkpoints.fingerprint(model)
    config = change(model) if change else lora_config(model, rank=4, alpha=8, **options)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(adapted.named_parameters()):
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    adapted.save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(base)
    processor.chat_template = TEMPLATE
    processor.save_pretrained(folder)
    checkpoints.complete_folder(folder, model.config)
    checkpoints.write_start(folder, model, start, {})
    (folder / "norm_align/training.json").write_text("{}")
    return folder


def inputs():
    """A prompt with an image for tests.helpers.convert's models."""
    ids = torch.tensor([[1, 40, *[299] * 4, 50, 60]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def unmerged(base, adapter, dtype="auto"):
    model = PeftModel.from_pretrained(load(base, dtype), adapter).eval()
    with torch.no_grad():
        return model(**inputs()).logits


def merged(folder, dtype="auto"):
    with torch.no_grad():
        return load(folder, dtype)(**inputs()).logits


def stored(folder):
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A norm-aligned base in two files, its adapter, and the merged folder."""
    root = tmp_path_factory.mktemp("merge")
    base = norm_aligned(root, shards=2)
    adapter = write_adapter(base, root / "adapter")
    return base, adapter, root / "merged", merge(adapter, root / "merged")


def test_the_logits_are_the_unmerged_models(built):
    base, adapter, folder, _ = built
    expected = unmerged(base, adapter)
    torch.testing.assert_close(merged(folder), expected, rtol=0, atol=2e-5)
    assert (merged(base) - expected).abs().max() > 0.1


def test_each_tensor_is_the_bases_the_adapters_or_their_sum(built):
    base, adapter, folder, summary = built
    before, after = stored(base), stored(folder)
    trained = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    names = {plain_name(name): name for name in before}
    expected = dict(before)
    for name, tensor in trained.items():
        if ".lora_A." in name:
            weight = names[plain_name(name.replace(".lora_A.", "."))]
            b = trained[name.replace(".lora_A.", ".lora_B.")].double()
            expected[weight] = before[weight].double() + 8 / 4 * b @ tensor.double()
        elif ".lora_" not in name:
            assert "multi_modal_projector" in name
            expected[names[plain_name(name)]] = tensor
    assert after.keys() == before.keys()
    changed = [name for name in before if expected[name] is not before[name]]
    assert summary["changed"] == len(changed) == 2 * 7 + 6  # seven layers in each of two blocks; projector and norm
    assert summary["untouched"] == len(before) - len(changed)
    for name, tensor in after.items():
        if expected[name].dtype == torch.float64:
            torch.testing.assert_close(tensor.double(), expected[name], rtol=0, atol=1e-6)
        else:
            assert torch.equal(tensor, expected[name]), name
    assert not torch.equal(after[GAIN], before[GAIN]) and after[GAIN].dtype == torch.float32


def test_the_folder_is_whole(built):
    base, adapter, folder, summary = built
    assert [check for check in examine(folder, load=False) if check.status == "failed"] == []
    assert json.loads((folder / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    assert (folder / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()
    assert AutoProcessor.from_pretrained(folder).chat_template == TEMPLATE
    results = {path.name for path in (folder / "norm_align").iterdir()}
    assert results == {"calibration.json", "start.json", "training.json", "merge.json"}
    assert not list(folder.glob("adapter*")) and not (folder / "README.md").exists()
    told = json.loads((folder / "norm_align/merge.json").read_text())
    assert (told["adapter"], told["base"]) == (str(adapter), str(base))
    assert summary["same_start"] is True and summary["notes"] == []


def test_a_model_that_the_training_did_not_start_from_is_noted(built, tmp_path):
    """Its tensors have the same names and shapes, so that alone the fingerprint tells."""
    base, adapter, _, _ = built
    other = shutil.copytree(base, tmp_path / "other")
    for file in other.glob("*.safetensors"):
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    summary = merge(adapter, tmp_path / "merged", base=str(other))
    assert (
        summary["same_start"] is False and "may not be the model that the training started from" in summary["notes"][0]
    )
    (shutil.copytree(adapter, tmp_path / "adapter") / "norm_align/start.json").unlink()
    assert merge(tmp_path / "adapter", tmp_path / "unknown")["same_start"] is None


def test_bfloat16_is_rounded_once(tmp_path):
    base = norm_aligned(tmp_path, dtype=torch.bfloat16)
    adapter = write_adapter(base, tmp_path / "adapter")
    merge(adapter, tmp_path / "merged")
    before, after = stored(base), stored(tmp_path / "merged")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    trained = load_file(adapter / "adapter_model.safetensors")
    layer = "language_model.layers.0.mlp.up_proj"
    a, b = (trained[f"base_model.model.model.{layer}.lora_{part}.weight"] for part in "AB")
    name = next(name for name in after if name.endswith("layers.0.mlp.up_proj.weight"))
    assert torch.equal(after[name], (before[name].float() + (b @ a) * 2).bfloat16())
    prefix = "base_model.model.model."
    assert torch.equal(after[GAIN], trained[prefix + GAIN])
    linear = "multi_modal_projector.linear_1.weight"
    assert trained[prefix + linear].dtype == torch.float32
    assert torch.equal(after[linear], trained[prefix + linear].bfloat16())
    # PEFT's layers add in float32 what the merged ones hold rounded: steps of bfloat16 apart
    torch.testing.assert_close(
        merged(tmp_path / "merged", torch.float32), unmerged(base, adapter, torch.float32), rtol=0, atol=0.1
    )


@pytest.mark.parametrize("layout", ["old", "new"])
def test_adapters_of_a_stock_llava_merge_too(tmp_path, layout):
    base = tiny_llava(tmp_path / "base", layout=layout, tied=layout == "new", vision="siglip")
    adapter = write_adapter(base, tmp_path / "adapter")
    summary = merge(adapter, tmp_path / "merged")
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs()).logits, unmerged(base, adapter), rtol=0, atol=2e-5)
    assert summary["same_start"] is True and not (tmp_path / "merged/modeling_llava_norm_align.py").exists()


CONFIGS = {
    "rslora": lambda model: lora_config(model, rank=4, alpha=8, use_rslora=True),
    "dora": lambda model: lora_config(model, rank=4, alpha=8, use_dora=True),
    "patterns": lambda model: lora_config(model, rank=4, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 1}),
    "pissa": lambda model: lora_config(model, rank=4, alpha=8, init_lora_weights="pissa"),
    "attention alone": lambda model: LoraConfig(target_modules=r".*language_model.*(q|v)_proj", task_type="CAUSAL_LM"),
    "vision": lambda model: LoraConfig(target_modules=r".*vision_tower.*(q|v)_proj"),
    "head": lambda model: LoraConfig(target_modules=r".*q_proj", modules_to_save=["lm_head"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_other_sorts_of_lora(built, tmp_path, kind):
    base = built[0]
    adapter = write_adapter(base, tmp_path / "adapter", change=CONFIGS[kind])
    merge(adapter, tmp_path / "merged")
    expected = unmerged(base, adapter)
    torch.testing.assert_close(merged(tmp_path / "merged"), expected, rtol=0, atol=5e-5)
    assert (merged(base) - expected).abs().max() > 1e-3


def test_an_adapter_trained_in_four_bits_goes_into_the_unquantised_base(built, tmp_path):
    pytest.importorskip("bitsandbytes")
    from llava_norm_align.trl_recipes.lora import four_bit_config

    base = built[0]
    options = dict(dtype=torch.bfloat16, quantization_config=four_bit_config())
    model = AutoModelForImageTextToText.from_pretrained(base, **options)
    adapted = get_peft_model(model, lora_config(model, rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.add_(0.01)
    adapted.save_pretrained(tmp_path / "adapter")
    summary = merge(tmp_path / "adapter", tmp_path / "merged")
    before, after = stored(base), stored(tmp_path / "merged")
    trained = load_file(tmp_path / "adapter/adapter_model.safetensors")
    a, b = (trained[f"base_model.model.model.language_model.layers.1.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    name = next(name for name in after if name.endswith("layers.1.mlp.up_proj.weight"))
    torch.testing.assert_close(after[name], before[name] + 2 * b.float() @ a.float(), rtol=0, atol=1e-6)
    assert any("the base's is used" in note for note in summary["notes"])
    torch.testing.assert_close(merged(tmp_path / "merged"), unmerged(base, tmp_path / "adapter"), rtol=0, atol=5e-5)


def edit(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def edit_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def lose(part):
    return lambda tensors: tensors.pop(next(name for name in tensors if part in name))


LORA_A = "base_model.model.model.language_model.layers.{}.self_attn.q_proj.lora_A.weight"
FAULTS = {
    "no adapter": (
        lambda f: (f / "adapter_config.json").unlink(),
        "holds no adapter: there is no adapter_config.json",
    ),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "cut": (
        lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-9]),
        "cut or damaged",
    ),
    "another method": (lambda f: edit(f, peft_type="IA3"), "peft_type IA3, but only LORA"),
    "tokens": (lambda f: edit(f, trainable_token_indices=[1]), "sets trainable_token_indices"),
    "no base": (lambda f: edit(f, base_model_name_or_path=None), "names no base model. Pass it as --base"),
    "base gone": (
        lambda f: edit(f, base_model_name_or_path=str(f / "gone")),
        "adapter_config.json names its base: There is no folder .*gone.* as --base",
    ),
    "base not on the Hub": (
        lambda f: edit(f, base_model_name_or_path="a/b", revision="v1"),
        "the Hub cannot be asked",
    ),
    "no norm": (lambda f: edit_tensors(f, lose("align_norm.weight")), "is not one of .*align_norm.weight"),
    "a layer lost": (lambda f: edit_tensors(f, lose("lora_B")), "is not one of .*1 tensors .*lora_B"),
    "a layer more": (
        lambda f: edit_tensors(f, lambda t: t.update({LORA_A.format(7): torch.ones(4, 32)})),
        "is not one of .*1 tensors .*layers.7",
    ),
    "another rank": (lambda f: edit(f, r=8), "is not one of .*other shapes, such as .*lora_"),
    "other layers": (lambda f: edit(f, target_modules=["c_attn"]), "is not one of .*No modules were targeted"),
    "NaN": (
        lambda f: edit_tensors(f, lambda t: t.update({LORA_A.format(1): t[LORA_A.format(1)] * torch.nan})),
        "has NaN or inf",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_adapters_that_cannot_be_merged_are_refused(built, tmp_path, case):
    damage, message = FAULTS[case]
    damage(shutil.copytree(built[1], tmp_path / "adapter"))
    before = state(tmp_path)
    with pytest.raises(InputError, match=message):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert state(tmp_path) == before


def test_bases_that_are_not_the_adapters_are_refused(built, tmp_path):
    base, adapter, folder, _ = built
    with pytest.raises(InputError, match="is not one of .*align_norm"):
        merge(adapter, tmp_path / "merged", base=str(base.with_name("base-stock")))
    wide = norm_aligned(tmp_path, "wide", text="mistral", tied=True)
    stock_adapter = write_adapter(base.with_name("base-stock"), tmp_path / "stock-adapter")
    with pytest.raises(InputError, match="is not one of .*no .*align_norm"):
        merge(stock_adapter, tmp_path / "merged", base=str(base))
    head = write_adapter(base, tmp_path / "head", change=CONFIGS["head"])
    with pytest.raises(InputError, match="changes lm_head.weight, which the files of .*wide do not hold"):
        merge(head, tmp_path / "merged", base=str(wide))
    with pytest.raises(InputError, match="a whole model, which needs no merging"):
        merge(base, tmp_path / "merged")
    with pytest.raises(InputError, match="There is no config.json"):
        merge(adapter, tmp_path / "merged", base=str(adapter))
    with pytest.raises(InputError, match="not empty"):
        merge(adapter, folder)
    with pytest.raises(InputError, match="overlap"):
        merge(adapter, base, overwrite=True)
    quantised = shutil.copytree(base, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="quantised. Pass the model before that"):
        merge(adapter, tmp_path / "merged", base=str(quantised))
    assert not (tmp_path / "merged").exists()


def test_without_peft_one_sentence_says_what_to_install(built, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        InputError, match=r"needs peft, which is not installed: pip install 'llava-norm-align\[train\]'"
    ):
        merge(built[1], tmp_path / "merged")


def test_the_verb(built, tmp_path, run):
    base, adapter, _, _ = built
    for arguments in (["--json"], ["--overwrite", "--base", base]):
        code, out, err = run("merge", adapter, tmp_path / "merged", *arguments)
        assert code == 0, err
        if "--json" in arguments:
            assert json.loads(out)["changed"] == 20
    assert out.startswith(f"Merged: {adapter} into {base}\nTensors: 20 from the adapter, in F32; ")
