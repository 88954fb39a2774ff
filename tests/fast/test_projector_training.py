"""The plain projector training: what it trains, what it counts, what it leaves alone."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from llava_norm_align import LlavaNormAlignConfig, LlavaNormAlignForConditionalGeneration
from llava_norm_align.data.easy_vqa import Row
from llava_norm_align.trl_recipes import projector as module
from llava_norm_align.trl_recipes.projector import answer_loss, encode, train_projector
from tests.helpers import tiny

ANSWERS = ["cat", "red dog", "dog"]


@pytest.fixture
def rows(tmp_path):
    for seed in range(3):
        tiny.photo(seed).save(tmp_path / f"{seed}.png")
    return [Row(tmp_path / f"{i}.png", "what is in the picture ?", answer) for i, answer in enumerate(ANSWERS)]


def norm_aligned(**fields):
    torch.manual_seed(0)
    config = tiny.llava_config(LlavaNormAlignConfig, norm_align_target=1.0, **fields)
    return tiny.randomize(LlavaNormAlignForConditionalGeneration(config))


def test_the_loss_is_on_the_answers_and_their_end_only(rows):
    model, processor = tiny.stock_llava(), tiny.processor()
    inputs, lengths = encode(processor, rows)
    assert lengths == [2, 3, 2]
    end = processor.tokenizer.eos_token
    for ids, length, answer in zip(inputs["input_ids"], lengths, ANSWERS, strict=True):
        assert processor.tokenizer.decode(ids[-length:]) == f"{answer} {end}"
    with torch.no_grad():
        losses = []
        for ids, mask, pixels, length in zip(*inputs.values(), lengths, strict=True):  # one row at a time, no padding
            kept = ids[mask.bool()][None]
            logits = model(input_ids=kept, pixel_values=pixels[None]).logits[0]
            losses += F.cross_entropy(logits[-length - 1 : -1], kept[0, -length:], reduction="none").tolist()
        # the loss runs in bfloat16
        assert answer_loss(model, inputs, lengths).item() == pytest.approx(sum(losses) / len(losses), rel=0.02)


@pytest.mark.parametrize("kind", ["stock", "layer_norm", "rms_norm", "none"])
def test_only_the_projector_moves_and_learns(rows, kind):
    model = tiny.stock_llava() if kind == "stock" else norm_aligned(norm_align_type=kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train_projector(model, tiny.processor(), rows, steps=20, learning_rate=0.02, batch_size=3)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".multi_modal_projector." in name}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert len(result["losses"]) == len(result["visual_norms"]) == result["steps"] == 20
    assert result["losses"][-1] < 0.85 * result["losses"][0]
    assert result["parameters"] == sum(p.numel() for p in model.model.multi_modal_projector.parameters())
    assert ("gain" in result) == (kind in ("layer_norm", "rms_norm"))


def test_same_seed_same_weights_and_bfloat16_keeps_its_dtypes(rows):
    trained = []
    for seed in (0, 0, 1):
        model = norm_aligned().bfloat16()
        model.model.multi_modal_projector.align_norm.float()
        train_projector(model, tiny.processor(), rows, steps=3, batch_size=2, seed=seed)
        trained.append(model.model.multi_modal_projector.state_dict())
    assert {name: str(tensor.dtype) for name, tensor in trained[0].items()} == {
        "linear_1.weight": "torch.bfloat16",
        "linear_1.bias": "torch.bfloat16",
        "linear_2.weight": "torch.bfloat16",
        "linear_2.bias": "torch.bfloat16",
        "align_norm.weight": "torch.float32",
        "align_norm.bias": "torch.float32",
    }
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert not torch.equal(trained[0]["linear_1.weight"], trained[2]["linear_1.weight"])


def test_weight_decay_leaves_the_norm_and_the_biases_alone(rows, monkeypatch):
    model = norm_aligned()
    projector = model.model.multi_modal_projector
    before = {name: tensor.clone() for name, tensor in projector.state_dict().items()}
    monkeypatch.setattr(module, "answer_loss", lambda *_: 0.0 * projector(torch.ones(1, 4, 16)).sum())
    train_projector(model, tiny.processor(), rows, steps=1, learning_rate=0.1, warmup_ratio=0, weight_decay=0.5)
    for name, tensor in projector.state_dict().items():
        decayed = before[name] * (1 - 0.1 * 0.5) if name in ("linear_1.weight", "linear_2.weight") else before[name]
        torch.testing.assert_close(tensor, decayed)


def test_a_gain_that_has_not_moved_is_reported(rows, caplog):
    with caplog.at_level(logging.WARNING):
        train_projector(norm_aligned(), tiny.processor(), rows, steps=2, learning_rate=1e-2)
        assert "gain" not in caplog.text
        train_projector(norm_aligned(), tiny.processor(), rows, steps=2, learning_rate=0.0)
    assert "gain of the norm has not moved in 2 steps" in caplog.text


def test_saved_weights_load_as_a_projector(rows, tmp_path):
    model = tiny.stock_llava()
    train_projector(model, tiny.processor(), rows, steps=2, save_to=tmp_path / "projector.safetensors")
    saved = load_file(tmp_path / "projector.safetensors")
    state = model.state_dict()
    assert sorted(saved) == [f"multi_modal_projector.linear_{i}.{kind}" for i in (1, 2) for kind in ("bias", "weight")]
    assert all(torch.equal(saved[name], state[f"model.{name}"]) for name in saved)
