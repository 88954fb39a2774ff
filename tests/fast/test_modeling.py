import copy
import math

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration, LlavaNormAlignModel
from llava_norm_align.modeling.modeling_llava_norm_align import NormAlignLayerNorm
from tests.helpers import tiny

T, D = 1.75, 32
GAIN = T / math.sqrt(D)
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def config(**fields):
    return tiny.llava_config(LlavaNormAlignConfig, norm_align_target=T, **fields)


def norm_of(model):
    return model.get_submodule(
        "multi_modal_projector.align_norm"
        if type(model) is LlavaNormAlignModel
        else "model.multi_modal_projector.align_norm"
    )


def assert_norm_at_start(model):
    norm = norm_of(model)
    assert norm.weight.dtype == norm.bias.dtype == torch.float32
    torch.testing.assert_close(norm.weight.detach(), torch.full((D,), GAIN), rtol=1e-6, atol=0)
    assert norm.bias.eq(0).all()


def test_the_gain_starts_at_target_over_sqrt_d_in_the_constructor():
    assert_norm_at_start(LlavaNormAlignForConditionalGeneration(config()))
    assert_norm_at_start(LlavaNormAlignModel(config()))


@pytest.mark.parametrize("dtype", HALF)
def test_the_gain_starts_at_target_over_sqrt_d_in_from_config(dtype):
    model = AutoModelForImageTextToText.from_config(config(), dtype=HALF[dtype])
    assert_norm_at_start(model)
    assert model.lm_head.weight.dtype == HALF[dtype]
    assert_norm_at_start(AutoModel.from_config(config(), dtype=HALF[dtype]))


@pytest.mark.parametrize("saved", HALF)
@pytest.mark.parametrize("loaded", [*HALF, "auto"])
@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}])
def test_from_pretrained_keeps_the_norm_in_fp32(saved, loaded, device_map, tmp_path):
    model = LlavaNormAlignForConditionalGeneration(config()).to(HALF[saved])
    norm = norm_of(model).to(torch.float32)
    with torch.no_grad():
        norm.weight += torch.linspace(0, 1e-4, D)  # fp32 detail that half precision would lose
    model.save_pretrained(tmp_path)
    dtype = loaded if loaded == "auto" else HALF[loaded]
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=dtype, device_map=device_map)
    assert again.lm_head.weight.dtype == HALF[saved if loaded == "auto" else loaded]
    assert norm_of(again).weight.dtype == torch.float32
    assert norm_of(again).weight.equal(norm.weight)
    other = again.model.language_model.layers[0].input_layernorm.weight
    assert other.dtype == again.lm_head.weight.dtype  # only this norm is pinned, not the language model's


def test_target_none_is_the_default_start():
    model = LlavaNormAlignForConditionalGeneration(tiny.llava_config(LlavaNormAlignConfig))
    assert norm_of(model).weight.eq(1).all()


def test_only_the_two_norm_tensors_are_new():
    ours = LlavaNormAlignForConditionalGeneration(config()).state_dict()
    stock = transformers.LlavaForConditionalGeneration(tiny.llava_config()).state_dict()
    prefix = "model.multi_modal_projector.align_norm."
    assert set(ours) - set(stock) == {
        prefix + "weight",
        prefix + "bias",
    }  # under the projector, which LLaVA's tools save
    assert not set(stock) - set(ours)


def random_tokens(dtype=torch.float32):
    return (torch.randn(3, 5, D, generator=torch.Generator().manual_seed(1)) * 7 + 1).to(dtype)


def layer(**fields):
    norm = NormAlignLayerNorm(config(**fields))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.5, 0.7, D))
        if norm.bias is not None:
            norm.bias.copy_(torch.linspace(0.2, -0.1, D))
    return norm.eval()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_formula(kind, bias, dtype):
    norm, x = layer(norm_align_type=kind, norm_align_bias=bias), random_tokens(HALF[dtype])
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if kind == "layer_norm" else wide
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    expected = expected + norm.bias.double() if bias else expected
    out = norm(x)
    assert out.dtype == x.dtype
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(HALF[dtype]).eps, atol=1e-6)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "scale", "none"])
def test_every_type_builds_saves_and_loads(kind, tmp_path):
    model = LlavaNormAlignForConditionalGeneration(
        config(norm_align_type=kind, norm_align_scale=0.25 if kind == "scale" else None)
    ).eval()
    tokens = 1000 * torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    projector = model.model.multi_modal_projector
    before_norm = projector.linear_2(projector.act(projector.linear_1(tokens)))
    out = projector(tokens)
    if kind == "scale":
        torch.testing.assert_close(out, before_norm * 0.25)
    elif kind == "none":
        assert out.equal(before_norm)
    else:
        torch.testing.assert_close(out.norm(dim=-1), torch.full((1, 4), T), rtol=1e-2, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert again.model.multi_modal_projector(tokens).equal(out)
    tensors = [key for key in model.state_dict() if "align_norm" in key]
    assert len(tensors) == (2 if kind.endswith("norm") else 0)


def test_push_to_hub_uploads_a_folder_that_holds_the_code(tmp_path, monkeypatch):
    """transformers' own upload inside save_pretrained would run before the code files are there."""
    model, pushed = LlavaNormAlignForConditionalGeneration(config()), []

    def push(self, repo_id, **options):
        pushed.append((repo_id, options, {path.name for path in tmp_path.iterdir()}))

    monkeypatch.setattr(LlavaNormAlignForConditionalGeneration, "push_to_hub", push)
    model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/mine", private=True)
    ((repo_id, options, files),) = pushed
    assert (repo_id, options) == ("me/mine", {"private": True})
    assert {"modeling_llava_norm_align.py", "configuration_llava_norm_align.py", "config.json"} <= files


def test_small_variance_is_damped_by_eps():
    """A channel spread of 1e-3 gives a variance below eps: the token comes out shorter than the target."""
    norm = NormAlignLayerNorm(config()).eval()
    nn.init.constant_(norm.weight, GAIN)
    x = torch.randn(D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = 1e-3 * (x - x.mean()) / x.std(correction=0)
    assert float(norm(x.float()).detach().norm()) == pytest.approx(T * math.sqrt(1e-6 / (1e-6 + 1e-5)), rel=1e-4)
    assert float(norm(1000 * x.float()).detach().norm()) == pytest.approx(T, rel=1e-4)


def test_a_constant_token_has_a_bounded_gradient():
    norm = NormAlignLayerNorm(config()).train()
    nn.init.constant_(norm.weight, GAIN)
    nn.init.zeros_(norm.bias)
    x = torch.full((1, D), 3.0, requires_grad=True)
    norm(x).backward(torch.nn.functional.one_hot(torch.tensor([0]), D).float())
    # xhat's Jacobian is at most 1 / sqrt(eps); compensation cancels the gain
    assert torch.isfinite(x.grad).all() and float(x.grad.norm()) <= 1 / math.sqrt(1e-5) + 1e-3


def test_an_inf_in_fp16_does_not_spoil_its_token():
    x = random_tokens(torch.float16)
    x[0, 0, 3] = torch.inf
    out = layer()(x)
    assert torch.isfinite(out).all()
    assert out[0, 1:].equal(layer()(x[0, 1:]))


def test_a_step_moves_the_gain_where_bf16_would_not():
    """A step of 2e-5 is below bf16's resolution at 0.0165; the fp32 norm of a bf16 model takes it."""
    model = AutoModelForImageTextToText.from_config(config(), dtype=torch.bfloat16)
    norm = norm_of(model)
    optimizer = torch.optim.AdamW(norm.parameters(), lr=2e-5, weight_decay=0.0)
    norm(random_tokens(torch.bfloat16)).float().sum().backward()
    optimizer.step()
    moved = norm.weight.detach() - GAIN
    assert moved.abs().max() > 1e-5
    lost = torch.full((D,), GAIN).bfloat16() + moved.bfloat16()
    assert lost.equal(torch.full((D,), GAIN).bfloat16())


def test_weight_decay_leaves_the_norm_alone():
    """Trainer exempts LayerNorm subclasses and parameters whose name holds `norm`."""
    from transformers.trainer_pt_utils import get_parameter_names

    model = LlavaNormAlignForConditionalGeneration(config())
    decayed = get_parameter_names(model, [nn.LayerNorm], [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)"])
    assert not [name for name in decayed if "align_norm" in name]
    assert "model.multi_modal_projector.linear_1.weight" in decayed


def test_import_registers_the_auto_classes():
    assert AutoConfig.for_model("llava_norm_align").__class__ is LlavaNormAlignConfig
    inner = AutoModel.from_config(config())
    outer = AutoModelForImageTextToText.from_config(config())
    assert type(inner) is LlavaNormAlignModel and type(outer) is LlavaNormAlignForConditionalGeneration
    if transformers.__version__.startswith("4."):
        with pytest.warns(FutureWarning, match="AutoModelForVision2Seq"):
            model = transformers.AutoModelForVision2Seq.from_config(config())
        assert type(model) is LlavaNormAlignForConditionalGeneration


def test_deepcopy_has_a_norm_of_its_own():
    """PEFT's modules_to_save copies the projector: the copy must train its own gain."""
    projector = LlavaNormAlignForConditionalGeneration(config()).model.multi_modal_projector
    twin = copy.deepcopy(projector)
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        twin.align_norm.weight.mul_(3)
    torch.testing.assert_close(twin(x), 3 * projector(x))
    twin(x).sum().backward()
    assert twin.align_norm.weight.grad is not None and projector.align_norm.weight.grad is None


def test_generates_and_trains_through_an_image():
    model, processor = tiny.randomize(LlavaNormAlignForConditionalGeneration(config())), tiny.processor()
    inputs = tiny.prompt_with_image(processor)
    out = model.eval().generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape[1] <= inputs["input_ids"].shape[1] + 3
    loss = model.train()(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    for name, parameter in model.model.multi_modal_projector.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
