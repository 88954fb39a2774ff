"""The post-hoc probe: visual tokens scaled at the input of decoder layer 0."""

import copy
import json

import numpy as np
import pytest
import torch

from llava_norm_align.diagnosis.probe import SWEEP, probe
from llava_norm_align.diagnosis.structure import find_structure
from llava_norm_align.diagnosis.tokens import Prompt
from tests.helpers import tiny

MATCHING = 0.3


def prompts(kind="llava", images=3):
    if kind == "llava_onevision":
        return [Prompt(tiny.tiled_inputs(seed)) for seed in range(1, images + 1)]
    processor = tiny.processor(kind=kind)
    return [Prompt(dict(tiny.prompt_with_image(processor, seed))) for seed in range(images)]


def scaled_by_hand(model, factor):
    """A copy whose projector's last layer, the only source of visual tokens, gives `factor` times as much."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.linear_2.parameters():
            parameter.mul_(factor)
    return model


def numpy_kl(old, new):
    p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (old, new))
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("kind", ["llava", "llava_onevision"])  # the second has rows that are not to be scaled
def test_a_factor_is_a_projector_that_is_scaled_by_hand(kind):
    model, asked = tiny.stock_llava(kind=kind), prompts(kind)
    found = probe(model, find_structure(model, asked[0].inputs), asked, MATCHING)
    assert (found["images"], found["matching_factor"]) == (3, MATCHING)
    assert [row["factor"] for row in found["factors"]] == sorted([*SWEEP, MATCHING])
    assert min(SWEEP) == 1 / 64 and max(SWEEP) == 4
    with torch.no_grad():
        logits = [model(**prompt.inputs).logits[0, -1].double().numpy() for prompt in asked]
        norms = []
        for prompt in asked:
            hidden = model(**prompt.inputs, output_hidden_states=True).hidden_states[0][0]
            places = prompt.inputs["input_ids"][0] == tiny.IMAGE_TOKEN_ID
            if kind != "llava":
                places &= (hidden != model.model.image_newline).any(dim=-1)
            norms.append(hidden[places].norm(dim=-1).mean().item())
        for row in found["factors"]:
            scaled = scaled_by_hand(model, row["factor"])
            other = [scaled(**prompt.inputs).logits[0, -1].double().numpy() for prompt in asked]
            kl = np.mean([numpy_kl(*pair) for pair in zip(logits, other, strict=True)])
            assert row["kl_nats"] == pytest.approx(kl, rel=1e-3, abs=1e-9)
            same = [old.argmax() == new.argmax() for old, new in zip(logits, other, strict=True)]
            assert row["top1_agreement"] == np.mean(same)
            assert row["visual_norm"] == pytest.approx(row["factor"] * np.mean(norms), rel=1e-5)
            assert row["interval"] is None  # under 8 images
    assert all(row["kl_nats"] > 1e-6 for row in found["factors"] if row["factor"] != 1)


def test_factor_one_is_the_reference_and_eight_images_have_an_interval():
    model, asked = tiny.stock_llava(), prompts(images=8)
    found = probe(model, find_structure(model, asked[0].inputs), asked, matching_factor=1.0)
    assert [row["factor"] for row in found["factors"]] == list(SWEEP)
    one = next(row for row in found["factors"] if row["factor"] == 1)
    assert (one["kl_nats"], one["interval"], one["top1_agreement"]) == (0.0, [0.0, 0.0], 1.0)
    for row in found["factors"]:
        low, high = row["interval"]
        assert low <= row["kl_nats"] <= high and (low < high or row["factor"] == 1)
    json.dumps(found, allow_nan=False)


def test_the_model_is_as_before_also_after_an_error():
    model, asked = tiny.stock_llava(), prompts()
    structure = find_structure(model, asked[0].inputs)
    with torch.no_grad():
        before = model(**asked[0].inputs).logits

    def broken():
        yield asked[0]
        raise KeyboardInterrupt

    probe(model, structure, asked[:1], MATCHING)
    with pytest.raises(KeyboardInterrupt):
        probe(model, structure, broken(), MATCHING)
    with torch.no_grad():
        assert torch.equal(model(**asked[0].inputs).logits, before)
    assert not structure.layers[0]._forward_pre_hooks


def test_an_overflow_of_fp16_is_no_number():
    model, asked = tiny.stock_llava(), prompts(images=1)
    with torch.no_grad():
        largest = model(**asked[0].inputs, output_hidden_states=True).hidden_states[0].abs().max().item()
    large = scaled_by_hand(model, 3e4 / largest).half()  # fp16 ends at 65504
    asked[0].inputs["pixel_values"] = asked[0].inputs["pixel_values"].half()
    found = probe(large, find_structure(large, asked[0].inputs), asked, MATCHING)
    rows = {row["factor"]: row for row in found["factors"]}
    assert rows[4.0]["kl_nats"] is None and rows[4.0]["top1_agreement"] is None
    assert rows[1 / 64]["kl_nats"] is not None
    json.dumps(found, allow_nan=False)


def test_without_visual_tokens_there_is_nothing_to_probe():
    model, asked = tiny.stock_llava(), prompts(images=1)
    ids = torch.tensor([[1, 5, 6]])
    text = Prompt({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    structure = find_structure(model, asked[0].inputs)
    assert probe(model, structure, [text], MATCHING) is None
    assert probe(model, structure, [text, *asked], MATCHING)["images"] == 1
