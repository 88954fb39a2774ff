"""Parts with their own learning rates, decay and clipping; what is frozen; what is refused before it trains."""

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset

from llava_norm_align.common.errors import InputError
from llava_norm_align.trl_recipes import groups, monitor
from llava_norm_align.trl_recipes.config import LlavaSFTConfig
from tests.helpers import tiny
from tests.helpers.training import arguments, norm_aligned, row, trainer

PROJECTOR = "model.multi_modal_projector."
NORM = {PROJECTOR + "align_norm.weight", PROJECTOR + "align_norm.bias"}


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Each takes as long as a tiny training."""
    monkeypatch.setattr(monitor, "write_curves", lambda *arguments: None)


def built(model, folder, **fields):
    """{name: (part, learning rate, weight decay)} from the optimizer that a trainer builds."""
    run = trainer(model, folder, **fields)
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    return {
        names[parameter]: (group["name"], group["lr"], group["weight_decay"])
        for group in run.create_optimizer().param_groups
        for parameter in group["params"]
    }


def test_each_part_has_its_learning_rate_and_norms_and_biases_no_decay(tmp_path):
    model = norm_aligned()
    found = built(
        model, tmp_path, trained_parts=["llm", "projector", "norm", "vision"], weight_decay=0.1, learning_rate=1e-3,
        projector_learning_rate=2e-3, norm_learning_rate=3e-3, vision_learning_rate=4e-3,
    )  # fmt: skip
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, (part, rate, decay) in found.items():
        if name in NORM:
            assert (part, rate) == ("norm", 3e-3)
        elif name.startswith(PROJECTOR):
            assert (part, rate) == ("projector", 2e-3)
        elif name.startswith("model.vision_tower."):
            assert (part, rate) == ("vision", 4e-3)
        else:
            assert (part, rate) == ("llm", 1e-3)
        free = name.endswith(".bias") or "norm" in name  # layer_norm1, pre_layrnorm, input_layernorm, align_norm
        assert decay == (0.0 if free or "layrnorm" in name else 0.1), name


def test_without_rates_of_their_own_all_parts_have_the_same(tmp_path):
    found = built(norm_aligned(), tmp_path, learning_rate=5e-4)
    assert {part: rate for part, rate, _ in found.values()} == {"llm": 5e-4, "projector": 5e-4, "norm": 5e-4}


def test_names_under_the_prefixes_of_wrappers():
    prefix = "module.base_model.model.model."
    assert groups.part_of(prefix + "multi_modal_projector.modules_to_save.default.align_norm.weight") == "norm"
    assert groups.part_of(prefix + "multi_modal_projector.modules_to_save.default.linear_1.weight") == "projector"
    assert groups.part_of(prefix + "language_model.layers.0.self_attn.q_proj.lora_A.default.weight") == "llm"
    assert groups.part_of("_fsdp_wrapped_module.model.vision_tower.encoder.layers.0.layer_norm1.bias") == "vision"
    assert groups.part_of("model.image_newline") == "projector"
    assert groups.part_of("model.language_model.norm.weight") == groups.part_of("lm_head.weight") == "llm"


@pytest.mark.parametrize(
    ("parts", "moved"),
    [
        (["projector", "norm"], (PROJECTOR,)),
        (["norm"], (PROJECTOR + "align_norm.",)),
        (["projector", "norm", "llm"], (PROJECTOR, "model.language_model.", "lm_head.")),
    ],
)
def test_only_the_trained_parts_move(tmp_path, parts, moved):
    model = norm_aligned()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer(model, tmp_path, trained_parts=parts, save_strategy="no").train()
    found = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert found == {name for name in before if name.startswith(moved)}


def test_a_frozen_tower_keeps_no_activations(tmp_path):
    """Also where transformers makes the outputs of the patch embedding require gradients, for checkpointing."""
    model = norm_aligned()
    run = trainer(model, tmp_path, trained_parts=["projector"], save_strategy="no", max_steps=1)
    model.enable_input_require_grads()
    seen = []
    tower = model.model.vision_tower
    tower.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state.requires_grad))
    run.train()
    assert seen == [False]
    trainable = norm_aligned()
    tower = trainable.model.vision_tower
    tower.register_forward_hook(lambda module, inputs, output: seen.append(output.last_hidden_state.requires_grad))
    trainer(trainable, tmp_path, trained_parts=["vision"], save_strategy="no", max_steps=1).train()
    assert seen == [False, True]


def test_the_norm_is_float32_also_in_a_model_made_bfloat16(tmp_path):
    model = norm_aligned().bfloat16()
    run = trainer(model, tmp_path, save_strategy="no")
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == NORM
    run.train()
    assert run.model.model.multi_modal_projector.align_norm.weight.dtype == torch.float32


def steps(folder, **fields):
    """By how much one step of SGD at learning rate 1 moved each parameter: its gradient after clipping."""
    model = norm_aligned()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run = trainer(
        model, folder, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_steps=1, save_strategy="no",
        weight_decay=0.0, trained_parts=["llm", "projector", "norm", "vision"], **fields,
    )  # fmt: skip
    run.train()
    moved = {name: before[name].double() - parameter.double() for name, parameter in model.named_parameters()}
    return moved, run.state.log_history[0]["grad_norm"], run.gradient_norms


def by_part(name):
    if name in NORM:
        return "norm"
    return next((part for text, part in ((PROJECTOR, "projector"), ("vision_tower", "vision")) if text in name), "llm")


def test_clipping_off_global_and_by_group(tmp_path):
    raw, logged, norms = steps(tmp_path)
    square = dict.fromkeys(groups.PARTS, 0.0)
    for name, gradient in raw.items():
        square[by_part(name)] += gradient.square().sum().item()
    total = sum(square.values()) ** 0.5
    expected = {part: value**0.5 for part, value in square.items()}
    assert {part: norm.item() for part, norm in norms.items()} == pytest.approx(expected, rel=1e-3)
    assert logged == pytest.approx(total, rel=1e-3)
    assert min(expected.values()) > 0

    limit = sorted(expected.values())[2]  # two parts are larger, or just as large
    for fields in (dict(), dict(clip_by_group=True)):
        moved, logged, norms = steps(tmp_path, max_grad_norm=limit, **fields)
        assert logged == pytest.approx(total, rel=1e-3)  # before clipping
        assert {part: norm.item() for part, norm in norms.items()} == pytest.approx(expected, rel=1e-3)
        for name, gradient in raw.items():
            norm = expected[by_part(name)] if fields else total
            factor = min(1.0, limit / norm)
            torch.testing.assert_close(moved[name], gradient * factor, rtol=1e-3, atol=1e-6)


def test_what_the_optimizer_holds_is_described(tmp_path):
    run = trainer(
        norm_aligned().bfloat16(), tmp_path, trained_parts=["projector", "norm"], weight_decay=0.1,
        learning_rate=1e-3, norm_learning_rate=1e-4,
    )  # fmt: skip
    run.create_optimizer()
    described = groups.describe_groups(run.model, run.optimizer)
    assert [row for row in described if "frozen" not in row] == [
        {"part": "projector", "parameters": 16 * 32 + 32 * 32, "dtypes": ["bfloat16"], "learning_rate": 1e-3,
         "weight_decay": 0.1},
        {"part": "projector", "parameters": 64, "dtypes": ["bfloat16"], "learning_rate": 1e-3, "weight_decay": 0.0},
        {"part": "norm", "parameters": 64, "dtypes": ["float32"], "learning_rate": 1e-4, "weight_decay": 0.0},
    ]  # fmt: skip
    assert [row["part"] for row in described if "frozen" in row] == ["llm", "vision"]
    total = sum(parameter.numel() for parameter in run.model.parameters())
    assert sum(row["parameters"] for row in described) == total


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(fp16=True), "Set bf16: true"),
        (dict(trained_parts=["projektor"]), "trained_parts names 'projektor'"),
        (dict(trained_parts=[]), "trained_parts names nothing"),
        (dict(clip_by_group=True), "max_grad_norm is 0.0, which clips nothing"),
        (
            dict(clip_by_group=True, max_grad_norm=1.0, deepspeed={"zero_optimization": {}}),
            "DeepSpeed clips",
        ),
        (dict(norm_ratio_band=[5.0, 0.2]), "norm_ratio_band is"),
    ],
)
def test_fields_that_are_refused_before_a_model_loads(tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        arguments(tmp_path, **fields)


def test_defaults_that_differ_from_trl(tmp_path):
    config = LlavaSFTConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (config.max_grad_norm, config.max_length) == (0.0, None)
    assert config.activation_checkpointing and config.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_models_and_data_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="The model is in float16"):
        trainer(tiny.stock_llava().half(), tmp_path)
    with pytest.raises(InputError, match="trained_parts is norm, but .* has no parameters there"):
        trainer(tiny.stock_llava(), tmp_path, trained_parts=["norm"])
    with pytest.raises(InputError, match="llama is no LLaVA"):
        trainer(tiny.stock_llava().model.language_model, tmp_path)
    empty = Dataset.from_list([row(0)]).select([])
    with pytest.raises(InputError, match="training data is empty"):
        trainer(tiny.stock_llava(), tmp_path, data=empty)
    with pytest.raises(InputError, match="none called image or images"):
        trainer(tiny.stock_llava(), tmp_path, data=Dataset.from_list([row(0)]).remove_columns("images"))
