"""What a training logs against hidden states and gradients, its alarms with twins that are quiet, its result files."""

import json
import logging
import math
import sys

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from PIL import Image
from transformers import TrainerCallback

from llava_norm_align.common.errors import CheckFailed
from llava_norm_align.trl_recipes import checkpoints, monitor
from llava_norm_align.trl_recipes.monitor import Layer0Norms
from tests.helpers import tiny
from tests.helpers.training import norm_aligned, row, rows, trainer


class Call(TrainerCallback):
    """Calls `action` at the events given by name, in the step `step` only if it is given."""

    def __init__(self, event, action, step=None):
        def call(args, state, control, **kwargs):
            if step in (None, state.global_step):
                action(**kwargs)

        setattr(self, event, call)


def mixed_rows():
    """Rows of different lengths, one of them without an image."""
    return Dataset.from_list([row(0), row(3), row(1, image=False)])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_norms_of_tokens_are_those_of_the_hidden_states(tmp_path, checkpointing):
    logged = []
    run = trainer(
        norm_aligned(), tmp_path, [Call("on_log", lambda logs, **_: logged.append(dict(logs)))], data=mixed_rows(),
        per_device_train_batch_size=3, max_steps=1, save_strategy="no", activation_checkpointing=checkpointing,
    )  # fmt: skip
    run.train()
    inputs = run.data_collator(list(mixed_rows()))
    labels = inputs.pop("labels")
    assert (inputs["attention_mask"] == 0).any() and (labels == -100).any()
    with torch.no_grad():
        states = norm_aligned().train()(**inputs, output_hidden_states=True).hidden_states[0].double()
    norms = states.norm(dim=-1)
    visual = inputs["input_ids"] == tiny.IMAGE_TOKEN_ID
    text = ~visual & inputs["attention_mask"].bool()
    assert logged[0]["visual_norm"] == pytest.approx(norms[visual].mean().item(), rel=1e-5)
    assert logged[0]["text_norm"] == pytest.approx(norms[text].mean().item(), rel=1e-5)
    assert logged[0]["norm_ratio"] == pytest.approx(norms[visual].mean().item() / norms[text].mean().item(), rel=1e-5)
    assert logged[0]["tokens_per_second"] > 0


def test_bos_padding_and_newlines_are_left_out():
    model = tiny.stock_llava(kind="llava_next").train()
    inputs = tiny.tiled_inputs()
    inputs["attention_mask"][0, -1] = 0
    tap = Layer0Norms(model)
    with torch.no_grad():
        states = model.model(**inputs, output_hidden_states=True).hidden_states[0][0].double()
    visual_norm, visual, text_norm, text, tokens = tap.take()
    ids = inputs["input_ids"][0]
    assert (visual, text, tokens) == (12, 7, 22)  # 14 placeholders less 2 newlines; 9 others less BOS and padding
    at_placeholders = states[ids == tiny.IMAGE_TOKEN_ID].norm(dim=-1)
    newline = model.model.image_newline.detach().double().norm().item()
    assert visual_norm == pytest.approx(at_placeholders.sum().item() - 2 * newline, rel=1e-5)
    others = states[(ids != tiny.IMAGE_TOKEN_ID)].norm(dim=-1)[1:-1]
    assert text_norm == pytest.approx(others.sum().item(), rel=1e-5)
    assert tap.take() is None
    model.eval()(**inputs)
    assert tap.take() is None  # an evaluation
    tap.remove()
    assert not model.model._forward_pre_hooks and not model.model.multi_modal_projector._forward_hooks


def test_a_checkpointed_step_counts_once():
    model = norm_aligned().train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    tap, inputs = Layer0Norms(model), tiny.inputs()
    model(**inputs, use_cache=False).logits.sum().backward()
    assert tap.take()[4] == inputs["input_ids"].numel()


def test_gain_bias_and_the_projectors_share(tmp_path):
    run = trainer(norm_aligned(), tmp_path, save_strategy="no")
    run.train()
    last = [entry for entry in run.state.log_history if "loss" in entry][-1]
    norm = run.model.model.multi_modal_projector.align_norm
    assert last["gain"] == pytest.approx(norm.weight.abs().mean().item())
    assert last["bias_norm"] == pytest.approx(norm.bias.norm().item())
    squares = {part: last[f"gradient_norm_{part}"] ** 2 for part in ("llm", "projector", "norm")}
    assert last["projector_gradient_share"] == pytest.approx(squares["projector"] / sum(squares.values()))
    assert last["grad_norm"] == pytest.approx(math.sqrt(sum(squares.values())))
    assert not run.model.model._forward_pre_hooks  # it watches no longer


def test_a_stock_llava_logs_no_gain(tmp_path):
    run = trainer(tiny.stock_llava(), tmp_path, save_strategy="no", max_steps=1)
    run.train()
    first = run.state.log_history[0]
    assert "visual_norm" in first and "gain" not in first and "gradient_norm_norm" not in first


def alarms(folder):
    return [alarm["name"] for alarm in json.loads((folder / "norm_align/training.json").read_text())["alarms"]]


def quiet_run(folder, caplog, model=None, **fields):
    with caplog.at_level(logging.WARNING, monitor.__name__):
        trainer(model or norm_aligned(), folder, save_strategy="no", **fields).train()
    return alarms(folder)


def test_a_gain_that_has_not_moved(tmp_path, caplog):
    assert quiet_run(tmp_path / "twin", caplog) == []
    assert caplog.text == ""
    # updates that float32 rounds away
    assert quiet_run(tmp_path / "still", caplog, norm_learning_rate=1e-12) == ["gain"]
    assert "The gain of the norm has not moved in 2 steps" in caplog.text


def test_a_gain_is_checked_early_in_a_long_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(monitor, "GAIN_STEPS", 2)
    run = trainer(norm_aligned(), tmp_path, save_strategy="no", norm_learning_rate=1e-12, max_steps=4, warmup_steps=1)
    run.train()
    assert [(alarm["name"], alarm["step"]) for alarm in run.monitor.alarms] == [("gain", 3)]  # the first has rate 0


def test_a_ratio_out_of_band(tmp_path, caplog):
    def model(**fields):
        made = norm_aligned(**fields)
        made.model.multi_modal_projector.align_norm.weight.data.mul_(20)
        return made

    assert quiet_run(tmp_path / "out", caplog, model()) == ["ratio"]
    assert "outside of 0.2 to 5: the model is no longer norm-aligned" in caplog.text
    caplog.clear()
    assert quiet_run(tmp_path / "wide", caplog, model(), norm_ratio_band=[0.2, 100]) == []
    stock = tiny.stock_llava()
    stock.model.multi_modal_projector.linear_2.weight.data.mul_(100)  # a stock model has the gap
    assert quiet_run(tmp_path / "stock", caplog, stock) == []
    assert caplog.text == ""


def test_a_gradient_that_is_zero(tmp_path, caplog):
    cut = norm_aligned()
    cut.model.multi_modal_projector.align_norm.weight.data.zero_()  # nothing of the projector passes
    assert quiet_run(tmp_path / "cut", caplog, cut) == ["zero gradient: projector"]
    assert "No gradient reached the projector at step 1" in caplog.text
    caplog.clear()
    text = Dataset.from_list([row(number, image=False) for number in range(4)])
    assert quiet_run(tmp_path / "text", caplog, data=text) == []  # no image, so none is due
    assert caplog.text == ""


def test_a_loss_of_zero_ends_the_run(tmp_path):
    text = Dataset.from_list([row(number, image=False) for number in range(4)])
    with pytest.raises(CheckFailed, match="Step 1: The loss is 0: no token of its rows is trained"):
        trainer(norm_aligned(), tmp_path, data=text, max_length=4).train()  # cuts the answers off
    assert alarms(tmp_path) == ["loss"]
    twin = trainer(norm_aligned(), tmp_path / "twin", data=text, max_length=40)
    twin.train()
    assert alarms(tmp_path / "twin") == []


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_is_not_finite_ends_the_run_and_leaves_the_weights(tmp_path, fault):
    model = norm_aligned()
    bias = model.model.multi_modal_projector.linear_1.bias

    def spoil(**kwargs):
        if fault == "loss":
            model.model.language_model.norm.weight.data[0] = math.inf
        else:
            bias.register_hook(lambda gradient: gradient * math.inf)

    before = {}
    callbacks = [
        Call("on_step_begin", spoil, 1),
        Call("on_step_begin", lambda **_: before.update({"bias": bias.detach().clone()}), 1),
    ]
    found = r"nan\. Train" if fault == "loss" else r"[\d.]+, but the gradient of the projector is (nan|inf)"
    with pytest.raises(CheckFailed, match=f"Step 2: The loss is {found}.*the last good checkpoint is .*checkpoint-1"):
        trainer(model, tmp_path, callbacks, save_steps=1).train()
    assert torch.equal(bias, before["bias"])
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-0", "checkpoint-1"]
    checkpoints.check_whole(tmp_path / "checkpoint-1")
    result = json.loads((tmp_path / "norm_align/training.json").read_text())
    assert result["completed"] is False and [alarm["step"] for alarm in result["alarms"]] == [2]


def test_the_result_files(tmp_path):
    run = trainer(norm_aligned(), tmp_path, save_steps=2, max_steps=4, projector_learning_rate=2e-3)
    run.train()
    resumed = trainer(norm_aligned(), tmp_path, max_steps=4, projector_learning_rate=2e-3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    result = json.loads((tmp_path / "norm_align/training.json").read_text())
    assert result["schema_version"] == 1 and result["versions"]["torch"] == torch.__version__
    assert (result["completed"], result["steps"], result["model_type"]) == (True, 4, "llava_norm_align")
    assert result["recipe"]["projector_learning_rate"] == 2e-3
    assert [entry["step"] for entry in result["history"] if "loss" in entry] == [1, 2, 3, 4]  # also those before
    rates = {entry["part"]: entry.get("learning_rate") for entry in result["groups"]}
    assert rates == {"llm": 1e-2, "projector": 2e-3, "norm": 1e-2, "vision": None}
    with Image.open(tmp_path / "norm_align/curves.png") as picture:
        assert picture.width == 960 and picture.height > 1000
        assert len(picture.convert("RGB").resize((96, 160)).getcolors(100_000)) > 5


def test_without_matplotlib_there_is_no_picture_and_a_sentence(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer(norm_aligned(), tmp_path, save_strategy="no", data=rows(2), max_steps=1).train()
    assert [path.name for path in (tmp_path / "norm_align").iterdir()] == ["training.json"]
    assert "The picture of the training needs matplotlib" in caplog.text
