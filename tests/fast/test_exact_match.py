"""Exact match: batching changes no answer, the interval is Wilson's."""

import pytest
import torch
from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.data.easy_vqa import Row
from llava_norm_align.evaluation.exact_match import exact_match, wilson_interval
from tests.helpers import tiny


@pytest.fixture
def rows(tmp_path):
    for seed in range(4):
        tiny.photo(seed).save(tmp_path / f"{seed}.png")
    questions = ["what is in the picture ?", "what is a cat ?", "red", "is the dog in the red picture ?"]
    return [Row(tmp_path / f"{i}.png", question, "cat") for i, question in enumerate(questions)]


def test_batches_and_padding_change_no_answer(rows):
    model, processor = tiny.stock_llava(), tiny.processor()
    said = exact_match(model, processor, rows, batch_size=3, max_new_tokens=4)["predictions"]
    for row, words in zip(rows, said, strict=True):  # one by one, without padding, and transformers' own loop
        prompt = f"USER: <image> {row.question} ASSISTANT:"
        inputs = processor(text=prompt, images=Image.open(row.image).convert("RGB"), return_tensors="pt")
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True).strip() == words
    assert len(set(said)) > 1 and not model.lm_head._forward_pre_hooks

    right = [Row(row.image, row.question, f" {words.upper()}. ") for row, words in zip(rows, said, strict=True)]
    result = exact_match(model, processor, [*right[:3], rows[3]], batch_size=2, max_new_tokens=4)
    assert (result["correct"], result["total"], result["accuracy"]) == (3, 4, 0.75)
    assert result["interval"] == wilson_interval(3, 4)


@pytest.mark.parametrize(  # scipy 1.17, binomtest(correct, total).proportion_ci(method="wilson")
    ("correct", "total", "low", "high"),
    [(50, 100, 0.403832, 0.596168), (0, 10, 0.0, 0.277533), (10, 10, 0.722467, 1.0), (211, 256, 0.772897, 0.865954)],
)
def test_wilson_interval(correct, total, low, high):
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-6)


def test_no_rows_is_an_error():
    with pytest.raises(InputError, match="no questions"):
        exact_match(torch.nn.Identity(), None, [])
