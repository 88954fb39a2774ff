"""LLaVA-NeXT, LLaVA-OneVision and ViP-LLaVA: what their norm-aligned classes have in common with LLaVA's, and not."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

import llava_norm_align
from llava_norm_align.modeling.families import FAMILIES
from llava_norm_align.modeling.modeling_llava_norm_align import NormAlignPreTrainedMixin, save_code
from tests.helpers import tiny
from tests.helpers.lines import ROOT, run_alone

T, D = 1.75, 32
GAIN = T / math.sqrt(D)
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {"llava_next": "LlavaNext", "llava_onevision": "LlavaOnevision", "vipllava": "VipLlava"}
PREFIX = "model.multi_modal_projector.align_norm."

each_kind = pytest.mark.parametrize("kind", NAMES)


def config(kind, **fields):
    return tiny.llava_config(FAMILIES[kind].config_class, norm_align_target=T, **fields)


def aligned(kind, **fields):
    torch.manual_seed(0)
    return tiny.randomize(FAMILIES[kind](config(kind, **fields))).eval()


def assert_norm_at_start(norm):
    assert norm.weight.dtype == norm.bias.dtype == torch.float32
    torch.testing.assert_close(norm.weight.detach(), torch.full((D,), GAIN), rtol=1e-6, atol=0)
    assert norm.bias.eq(0).all()


def answer(model, kind):
    with torch.no_grad():
        return model(**tiny.inputs(kind)).logits


def test_every_stock_family_has_a_class():
    assert set(FAMILIES) == {"llava", *NAMES}


@each_kind
def test_names_and_registration(kind):
    name = f"{NAMES[kind]}NormAlign"
    outer = getattr(llava_norm_align, f"{name}ForConditionalGeneration")
    inner, config_class = getattr(llava_norm_align, f"{name}Model"), getattr(llava_norm_align, f"{name}Config")
    assert (FAMILIES[kind], outer.model_class, outer.config_class, inner.config_class) == (
        outer,
        inner,
        config_class,
        config_class,
    )
    assert type(AutoConfig.for_model(f"{kind}_norm_align")) is config_class
    assert type(AutoModel.from_config(config(kind))) is inner
    assert type(AutoModelForImageTextToText.from_config(config(kind))) is outer
    modeling = f"modeling_{kind}_norm_align.{name}"
    assert config(kind).auto_map == {
        "AutoConfig": f"configuration_{kind}_norm_align.{name}Config",
        "AutoModel": modeling + "Model",
        "AutoModelForImageTextToText": modeling + "ForConditionalGeneration",
        "AutoModelForVision2Seq": modeling + "ForConditionalGeneration",
    }


@each_kind
def test_only_the_two_norm_tensors_are_new(kind):
    ours, stock = aligned(kind).state_dict(), tiny.stock_llava(kind=kind).state_dict()
    assert set(ours) - set(stock) == {PREFIX + "weight", PREFIX + "bias"} and not set(stock) - set(ours)


@each_kind
@pytest.mark.parametrize("dtype", HALF)
def test_the_gain_starts_at_target_over_sqrt_d(kind, dtype):
    assert_norm_at_start(FAMILIES[kind](config(kind)).model.multi_modal_projector.align_norm)
    outer = AutoModelForImageTextToText.from_config(config(kind), dtype=HALF[dtype])
    assert_norm_at_start(outer.model.multi_modal_projector.align_norm)
    assert outer.lm_head.weight.dtype == HALF[dtype]
    inner = AutoModel.from_config(config(kind), dtype=HALF[dtype])
    assert_norm_at_start(inner.multi_modal_projector.align_norm)


def toggle_vision_level(folder):
    """Give CLIP's and SigLIP's tensors the names of the other transformers line."""
    level, tensors = "vision_tower.vision_model.", load_file(folder / "model.safetensors")
    written = any(level in name for name in tensors)
    old, new = (level, "vision_tower.") if written else ("vision_tower.", level)
    tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@each_kind
@pytest.mark.parametrize(
    ("tower", "line"),
    [("clip", "this"), ("clip", "other"), ("siglip", "this"), ("siglip", "other"), ("dinov2", "this")],
)
def test_the_norm_alone_is_missing_from_a_stock_checkpoint(kind, tower, line, tmp_path):
    """Read without the guard. Every other tensor is found, and the norm has its start."""
    tiny.stock_llava(tower, kind=kind).save_pretrained(tmp_path)
    if line == "other":
        toggle_vision_level(tmp_path)
    for cls, prefix in ((FAMILIES[kind], PREFIX), (FAMILIES[kind].model_class, PREFIX.removeprefix("model."))):
        load = super(NormAlignPreTrainedMixin, cls).from_pretrained
        model, info = load(tmp_path, config=config(kind, tower=tower), output_loading_info=True)
        assert set(info["missing_keys"]) == {prefix + "weight", prefix + "bias"}
        head = {"lm_head.weight", "language_model.lm_head.weight"} if cls is FAMILIES[kind].model_class else set()
        assert set(info["unexpected_keys"]) <= head
        assert_norm_at_start(model.get_submodule(prefix[:-1]))


@each_kind
@pytest.mark.parametrize("dtype", HALF)
def test_the_norm_alone_stays_in_fp32(kind, dtype, tmp_path):
    model = aligned(kind)  # its gain has fp32 detail that half precision would lose
    model.save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=HALF[dtype])
    in_fp32 = {name for name, tensor in again.state_dict().items() if tensor.dtype == torch.float32}
    assert in_fp32 == {PREFIX + "weight", PREFIX + "bias"}
    assert again.state_dict()[PREFIX + "weight"].equal(model.state_dict()[PREFIX + "weight"])


@each_kind
def test_answers_like_the_stock_model_with_a_norm_by_hand(kind):
    stock, ours = tiny.stock_llava(kind=kind), FAMILIES[kind](config(kind)).eval()
    ours.load_state_dict(stock.state_dict(), strict=False)
    plain = answer(stock, kind)

    def align(module, inputs, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * GAIN

    stock.model.multi_modal_projector.register_forward_hook(align)
    torch.testing.assert_close(answer(ours, kind), answer(stock, kind), rtol=1e-5, atol=1e-5)
    assert (answer(ours, kind) - plain).abs().max() > 0.1


def layer_0_input(model, inputs):
    """[positions, D]: what the language model is given."""
    seen = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"][0]), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    return seen[0]


def with_constant_norm(kind):
    """A model whose norm gives every token the same vector, and that vector."""
    model = aligned(kind)
    norm, ramp = model.model.multi_modal_projector.align_norm, torch.linspace(-1, 1, D)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.copy_(ramp)
    return model, ramp


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision"])
def test_image_newline_does_not_pass_the_norm(kind):
    model, ramp = with_constant_norm(kind)
    inputs = tiny.tiled_inputs()
    rows = layer_0_input(model, inputs)[inputs["input_ids"][0] == tiny.IMAGE_TOKEN_ID]
    newline = torch.zeros(14, dtype=torch.bool)
    newline[[8, 13]] = True  # after 4 tokens of the whole image, at the end of two rows of 4
    assert rows[newline].equal(model.model.image_newline.detach().expand(2, D))
    assert rows[~newline].equal(ramp.expand(12, D))


def test_videos_pass_the_norm_too():
    model, ramp = with_constant_norm("llava_onevision")
    video = tiny.IMAGE_TOKEN_ID + 1
    inputs = {
        "input_ids": torch.tensor([[1, video, video, video, 4, 5]]),  # 2 frames of 2 x 2 patches, pooled; the end
        "pixel_values_videos": torch.randn(1, 2, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }
    rows = layer_0_input(model, inputs)[1:4]
    torch.testing.assert_close(rows, torch.stack([ramp, ramp, model.model.image_newline.detach()]))


@each_kind
def test_gradient_compensation_divides_the_projectors_gradient_alone(kind):
    gradients = {}
    for compensated in (True, False):
        model = aligned(kind, norm_align_gradient_compensation=compensated).train()
        inputs = tiny.inputs(kind)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients[compensated] = {name: parameter.grad for name, parameter in model.named_parameters()}
        mu = model.model.multi_modal_projector.align_norm.weight.detach().abs().mean()
    for name in ("linear_1.weight", "linear_2.bias"):
        with_gwc, without = (gradients[key][f"model.multi_modal_projector.{name}"] for key in (True, False))
        torch.testing.assert_close(with_gwc, without / mu, rtol=1e-4, atol=1e-6)
        assert without.abs().max() > 0
    for name in (PREFIX + "weight", PREFIX + "bias", "lm_head.weight"):
        torch.testing.assert_close(gradients[True][name], gradients[False][name], rtol=1e-4, atol=1e-6)


@each_kind
def test_generates(kind):
    inputs = tiny.inputs(kind)
    out = aligned(kind).generate(**inputs, max_new_tokens=3, do_sample=False)
    assert inputs["input_ids"].shape[1] < out.shape[1] <= inputs["input_ids"].shape[1] + 3


def delete(ending):
    def change(tensors):
        del tensors[next(key for key in tensors if key.endswith(ending))]

    return change


def add(tensors):
    tensors["language_model.model.layers.9.extra"] = torch.zeros(3)


def reshape(tensors):
    tensors[next(key for key in tensors if key.endswith("linear_2.bias"))] = torch.zeros(7)


@each_kind
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (delete("layers.1.mlp.up_proj.weight"), ["1 missing", "layers.1.mlp.up_proj.weight", "incomplete"]),
        (delete("align_norm.bias"), ["no align_norm tensors"]),
        (delete("lm_head.weight"), ["1 missing", "lm_head.weight"]),
        (add, ["1 unexpected", "layers.9.extra"]),
        (reshape, ["1 of another shape", "linear_2.bias"]),
    ],
    ids=["deleted", "no norm bias", "no head", "added", "reshaped"],
)
def test_damaged_weights_raise_and_are_named(kind, change, parts, tmp_path):
    aligned(kind).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError) as error:
        FAMILIES[kind].from_pretrained(tmp_path)
    for part in parts:
        assert part in str(error.value)


@each_kind
def test_config_round_trip(kind, tmp_path):
    fields = {
        "norm_align_type": "rms_norm",
        "norm_align_bias": False,
        "norm_align_eps": 1e-6,
        "norm_align_gradient_compensation": False,
        "norm_align_compensation_floor": 1e-4,
        "projector_hidden_act": "relu",
    }
    before = config(kind, **fields)
    before.save_pretrained(tmp_path)
    after = AutoConfig.from_pretrained(tmp_path)
    assert type(after) is type(before) is FAMILIES[kind].config_class
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"{kind}_norm_align"
    own = {**fields, **tiny.KIND_FIELDS[kind], "norm_align_target": T, "image_token_id": tiny.IMAGE_TOKEN_ID}
    for field, value in own.items():
        assert getattr(after, field) == value, field

    def public(config):
        return {name: value for name, value in config.to_dict().items() if not name.startswith("_")}

    assert public(after) == public(before)


@each_kind
def test_bad_config_fields_are_refused(kind, tmp_path):
    cls = FAMILIES[kind].config_class
    with pytest.raises(ValueError, match="norm_align_typ is not a field of " + cls.__name__):
        cls(norm_align_typ="none")
    with pytest.raises(ValueError, match="norm_align_eps is 0; allowed: a positive number"):
        cls(norm_align_eps=0)
    changed = cls()
    changed.norm_align_scale = 2.0
    with pytest.raises(ValueError, match="norm_align_scale is 2.0"):
        changed.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@each_kind
def test_text_settings_written_by_either_line_are_read(kind):
    """4.57 knows rope_theta and ties by text_config; transformers 5 knows rope_parameters and ties by the top."""
    text = {"model_type": "llama", "rope_parameters": {"rope_theta": 50_000.0, "rope_type": "default"}}
    config = FAMILIES[kind].config_class(text_config={**text, "tie_word_embeddings": True})
    read = config.text_config
    assert (getattr(read, "rope_parameters", None) or {"rope_theta": read.rope_theta})["rope_theta"] == 50_000.0
    assert config.tie_word_embeddings is True
    assert FAMILIES[kind].config_class(text_config=text, tie_word_embeddings=False).tie_word_embeddings is False


@pytest.mark.parametrize("name", ["vision_feature_layer", "vision_feature_layers"])
def test_vipllava_reads_both_names_of_its_layers(name):
    config = FAMILIES["vipllava"].config_class(**{name: [-2, -3]})
    assert config.vision_feature_layer == config.vision_feature_layers == [-2, -3]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Per kind: the folder that the package saved, the one that its code saved again, and what each task answered."""
    root = tmp_path_factory.mktemp("alone")
    tasks, folders = {}, {}
    for kind in NAMES:
        saved, again, stock = folders[kind] = tuple(root / f"{kind}-{name}" for name in ("saved", "again", "stock"))
        aligned(kind).save_pretrained(saved)
        tiny.stock_llava(kind=kind).save_pretrained(stock)
        outer = f"modeling_{kind}_norm_align.{FAMILIES[kind].__name__}"
        # the modeling file comes first, when its configuration has not been imported
        tasks[kind, "stock"] = {"do": "check", "folder": stock, "class": outer, "code": str(saved)}
        tasks[kind, "outer"] = {"do": "check", "folder": saved}
        tasks[kind, "inner"] = {"do": "check", "folder": saved, "class": "AutoModel"}
        tasks[kind, "save"] = {"do": "save_again", "folder": saved, "out": str(again), "shard": "30KB"}
        tasks[kind, "again"] = {"do": "check", "folder": again}
    requests = [{**task, "kind": kind, "folder": str(task["folder"])} for (kind, _), task in tasks.items()]
    return folders, dict(zip(tasks, run_alone(requests, root), strict=True))


@each_kind
def test_a_saved_folder_loads_alone(alone, kind):
    answers = alone[1]
    expected = answer(aligned(kind), kind).double().sum().item()
    for task in ("outer", "again"):
        assert answers[kind, task]["error"] is None, answers[kind, task]
        assert answers[kind, task]["logits"] == pytest.approx(expected, abs=1e-4)
    assert answers[kind, "inner"]["error"] is None, answers[kind, "inner"]
    assert answers[kind, "stock"]["error"] == "RuntimeError", answers[kind, "stock"]
    assert "not converted" in answers[kind, "stock"]["message"]


@each_kind
def test_a_folder_carries_four_code_files_whoever_saved_it(alone, kind):
    for folder in alone[0][kind][:2]:
        assert {path.name for path in folder.glob("*.py")} == {
            f"{part}_{family}_norm_align.py" for part in ("configuration", "modeling") for family in ("llava", kind)
        }
        for path in folder.glob("*.py"):
            code, package = path.read_text(), (ROOT / path.name.split("_")[0] / path.name).read_text()
            assert code == re.sub(r"(?m)^from llava_norm_align\.(configuration|modeling)\.", "from .", package)
            assert not re.search(r"(?m)^\s*(from|import) llava_norm_align", code)


def test_llava_needs_its_own_two_files(tmp_path):
    save_code(tmp_path, FAMILIES["llava"])
    files = {"configuration_llava_norm_align.py", "modeling_llava_norm_align.py"}
    assert {path.name for path in Path(tmp_path).iterdir()} == files
