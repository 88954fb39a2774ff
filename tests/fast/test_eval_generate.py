"""Greedy answers in batches, against transformers' own loop without padding."""

import pytest
import torch
from PIL import Image

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.generate import answer_batch, answer_rows, greedy
from tests.helpers import tiny
from tests.helpers.answers import QUESTIONS, said_alone


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for index in range(10):
        tiny.photo(index).save(folder / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def loaded():
    return tiny.stock_llava(seed=0), tiny.processor()


def test_batches_of_one_and_of_eight_answer_alike(root, loaded):
    model, processor = loaded
    prompts = [QUESTIONS[index % 5] for index in range(18)]
    images = [root / f"{index % 10}.png" if index % 3 else None for index in range(18)]

    def asked(batch_size):
        with greedy(model, processor, 4):
            return [pair for batch in answer_rows(model, processor, prompts, images, batch_size) for pair in batch]

    one, eight = ({index: said.text for index, said in asked(size)} for size in (1, 8))
    assert one == eight and len(one) == 18 and len(set(one.values())) > 5
    assert one == {i: said_alone(model, processor, prompts[i], images[i]) for i in range(18)}


def test_greedy_whatever_the_checkpoint_asks_for(root, loaded):
    model, processor = loaded
    expected = said_alone(model, processor, QUESTIONS[0], root / "1.png", 12)
    own = model.generation_config
    try:
        model.generation_config = type(own)(
            eos_token_id=2, pad_token_id=0, repetition_penalty=9.0, do_sample=True, temperature=5.0, max_length=3
        )
        assert said_alone(model, processor, QUESTIONS[0], root / "1.png", 12) != expected
        asked = model.generation_config
        with greedy(model, processor, 12):
            found = answer_batch(model, processor, [QUESTIONS[0]], [Image.open(root / "1.png").convert("RGB")])
        assert found == [expected] and model.generation_config is asked
        assert not model.lm_head._forward_pre_hooks
    finally:
        model.generation_config = own


def test_want_of_memory_ends_the_run(root, loaded, monkeypatch):
    model, processor = loaded

    def full(**inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(model, "generate", full)
    with pytest.raises(InputError, match="2 questions at once.*Lower --batch-size"):
        list(answer_rows(model, processor, QUESTIONS, [root / "0.png"] * 5, 2))
