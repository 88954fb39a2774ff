"""LoRA: where the adapters sit, what is trained and saved, and that a run is resumed with exactly its adapter."""

import os
import signal

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, TrainerCallback

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes import monitor
from llava_norm_align.trl_recipes.lora import four_bit_config, lora_config
from tests.helpers import tiny
from tests.helpers.training import norm_aligned, trainer

# PEFT 0.21 asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Each takes as long as a tiny training."""
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)


def with_lora(folder, model=None, callbacks=(), **fields):
    model = model or norm_aligned()
    return trainer(model, folder, callbacks, peft_config=lora_config(model, rank=4, alpha=8), **fields)


class EndAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def adapter(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapters_sit_in_the_language_model_and_the_projector_is_trained_whole(tmp_path):
    run = with_lora(tmp_path)
    trained = adapter(run.model)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name}
    assert layers == LAYERS
    assert all(".language_model.layers." in name for name in trained if ".lora_" in name)
    whole = {name for name in trained if ".lora_" not in name}
    saved = "base_model.model.model.multi_modal_projector.modules_to_save.default."
    parts = ("linear_1", "linear_2", "align_norm")
    assert whole == {f"{saved}{part}.{kind}" for part in parts for kind in ("weight", "bias")}


def test_adapters_in_the_vision_tower_are_refused(tmp_path):
    everywhere = LoraConfig(target_modules="all-linear", r=2)
    with pytest.raises(InputError, match="LoRA's target_modules hit .* vision tower or the projector, such as"):
        trainer(norm_aligned(), tmp_path, peft_config=everywhere)


def test_the_norm_stays_float32_in_a_bfloat16_base(tmp_path):
    model = norm_aligned().bfloat16()
    start = model.model.multi_modal_projector.align_norm.weight.detach().float()
    run = with_lora(tmp_path, model)
    norms = {name: tensor for name, tensor in run.model.named_parameters() if "align_norm.weight" in name}
    assert len(norms) == 2
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, start) for tensor in norms.values())


def test_four_bits_leave_the_norm_float32_and_resume_exactly(tmp_path):
    """TRL makes all that is trained bfloat16 in a quantized model, which would round the gain."""
    pytest.importorskip("bitsandbytes")
    model = norm_aligned()
    norm = model.model.multi_modal_projector.align_norm
    assert not torch.equal(norm.weight, norm.weight.bfloat16().float())
    model.save_pretrained(tmp_path / "base")

    def run(**fields):
        options = dict(dtype=torch.bfloat16, quantization_config=four_bit_config())
        base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", **options)
        return with_lora(tmp_path, base, bf16=True, max_steps=3, **fields)

    whole = run(save_steps=2)
    four_bits = {name for name, tensor in whole.model.named_parameters() if tensor.dtype == torch.uint8}
    assert four_bits and all(".language_model.layers." in name for name in four_bits)
    trained = adapter(whole.model)
    assert torch.equal(next(trained[name] for name in trained if "align_norm.weight" in name), norm.weight)
    whole.train()
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    one, other = adapter(whole.model), adapter(resumed.model)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_adapter_is_the_one_of_the_whole_run(tmp_path):
    whole = with_lora(tmp_path / "whole", max_steps=4)
    whole.train()
    with pytest.raises(SystemExit):
        with_lora(tmp_path / "ended", callbacks=[EndAt(1)], max_steps=4).train()
    resumed = with_lora(tmp_path / "ended", max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    one, other = adapter(whole.model), adapter(resumed.model)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    rates = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (whole, resumed)]
    assert rates[0] == rates[1] and len(rates[0]) == 4
    assert resumed.state.log_history[0]["gain"] != resumed.state.log_history[3]["gain"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    run = with_lora(folder, save_steps=2)
    run.train()
    return folder / "checkpoint-2", run.model


def test_a_checkpoint_holds_the_adapter_with_projector_and_norm(trained):
    folder, model = trained
    tensors = load_file(folder / "adapter_model.safetensors")
    norm = model.base_model.model.model.multi_modal_projector.modules_to_save.default.align_norm
    assert torch.equal(tensors["base_model.model.model.multi_modal_projector.align_norm.weight"], norm.weight)
    assert not (folder / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(norm_aligned(), folder).eval()
    inputs = tiny.inputs()
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_an_adapter_that_does_not_fit_is_refused(trained, tmp_path, fault):
    run = with_lora(tmp_path, save_steps=1, max_steps=1)
    run.train()
    file = tmp_path / "checkpoint-1/adapter_model.safetensors"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[next(name for name in tensors if "align_norm" in name)]
    else:
        tensors["base_model.model.model.language_model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="The adapter in .* is not this one: 1 tensors"):
        with_lora(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
