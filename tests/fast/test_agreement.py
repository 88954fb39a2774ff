"""KL divergence and first choices of two models."""

import math

import numpy as np
import pytest
import torch

from llava_norm_align.diagnosis.agreement import compare_answers, kl_nats, log_probabilities, read_answers
from tests.helpers import tiny


def numpy_kl(old, new):
    """KL in nats of the softmax of two rows of logits, from probabilities."""
    p, q = (np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in (old, new))
    return float((p * np.log(p / q)).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_is_that_of_numpy(dtype):
    old, new = (torch.randn(100, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    expected = numpy_kl(old.double().numpy(), new.double().numpy())
    assert kl_nats(log_probabilities(old), log_probabilities(new)) == pytest.approx(expected, rel=1e-10)
    assert kl_nats(log_probabilities(new), log_probabilities(old)) != pytest.approx(expected, rel=1e-2)
    assert kl_nats(log_probabilities(old), log_probabilities(old)) == 0


def test_a_token_that_cannot_come_adds_nothing():
    """Models mask tokens with -inf: 0 log 0 is 0, but what the second model excludes is infinitely far."""
    old, new = torch.tensor([1.0, 2.0, -math.inf]), torch.tensor([2.0, 1.0, -math.inf])
    expected = numpy_kl(np.array([1.0, 2.0]), np.array([2.0, 1.0]))
    assert kl_nats(log_probabilities(old), log_probabilities(new)) == pytest.approx(expected, rel=1e-12)
    possible = log_probabilities(torch.tensor([2.0, 1.0, 0.0]))
    assert math.isfinite(kl_nats(log_probabilities(old), possible))
    assert kl_nats(possible, log_probabilities(old)) == math.inf
    assert math.isnan(kl_nats(torch.full((3,), math.nan), possible))


def test_answers_are_read_at_the_positions_that_predict_them():
    old, new = tiny.stock_llava(), tiny.stock_llava(seed=1)
    prompts = [dict(tiny.prompt_with_image(tiny.processor(), seed)) for seed in (0, 1)]
    answers = [torch.tensor([[5, 6, 7]]), torch.tensor([[8]])]
    with torch.no_grad():
        found = compare_answers(read_answers(old, prompts, answers), read_answers(new, prompts, answers))

        kl, same = [], []
        for inputs, answer in zip(prompts, answers, strict=True):  # one more token at a time
            for length in range(answer.shape[1]):
                ids = torch.cat([inputs["input_ids"], answer[:, :length]], dim=1)
                rows = [
                    model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, -1].double().numpy()
                    for model in (old, new)
                ]
                same.append(rows[0].argmax() == rows[1].argmax())
                if length == 0:
                    kl.append(numpy_kl(*rows))
    assert found["kl_nats"] == pytest.approx(np.mean(kl), rel=1e-4) and found["kl_nats"] > 0.01
    assert (found["answer_positions"], found["top1_agreement"]) == (4, np.mean(same))
    assert found["same_answers"] == all(same[:3]) + same[3]


def test_positions_weigh_the_same_and_answers_are_counted_whole():
    row = torch.zeros(2).log_softmax(-1).double()
    before = [(row, torch.tensor([1, 2, 3])), (row, torch.tensor([4]))]
    after = [(row, torch.tensor([1, 2, 9])), (row, torch.tensor([4]))]
    assert compare_answers(before, after) == {
        "kl_nats": 0.0,
        "answer_positions": 4,
        "top1_agreement": 0.75,
        "same_answers": 1,
    }
