"""Answers as they come, from two models at once.

Not among the fast tests, some of which fork: models that computed in threads would block the child.
"""

import threading
from contextlib import closing

import pytest
import torch
from PIL import Image

pytest.importorskip("gradio")

from llava_norm_align.evaluation.answer import answer
from llava_norm_align.space.answers import check_fits, stream_answers
from llava_norm_align.space.desk import Desk, Visit
from llava_norm_align.space.limits import Refused
from llava_norm_align.space.settings import Settings
from tests.helpers import answers, space, tiny

QUESTION = answers.QUESTIONS[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def models(root):
    return space.load(root)


@pytest.fixture
def desk(models):
    return Desk(models, Settings(max_new_tokens=64))


def test_the_last_update_is_what_each_model_says_alone(models, root):
    image = Image.open(root / "0.png").convert("RGB")
    updates = list(stream_answers(models, image, QUESTION, 12, 0.0))
    expected = [answer(one.model, one.processor, image, QUESTION, max_new_tokens=12) for one in models]
    assert (
        updates[-1]
        == expected
        == [answers.said_alone(one.model, one.processor, QUESTION, root / "0.png", 12) for one in models]
    )
    assert expected[0] != expected[1] and len(updates) >= 13
    for position in (0, 1):
        column = [update[position] for update in updates]
        assert all(later.startswith(earlier) for earlier, later in zip(column, column[1:-1], strict=False))
        assert len(set(column)) >= 12  # word by word


def test_both_columns_grow_at_the_same_time(models):
    updates = list(stream_answers(models, tiny.photo(), QUESTION, 40, 0.0))
    assert any(0 < len(first) < len(updates[-1][0]) and 0 < len(second) for first, second in updates)


def test_closing_ends_the_generation(models):
    steps = []
    hooks = [one.model.lm_head.register_forward_hook(lambda *_: steps.append(1)) for one in models]
    with closing(stream_answers(models, tiny.photo(), QUESTION, 200, 0.0)) as stream:
        next(stream)
    for hook in hooks:
        hook.remove()
    assert len(steps) < 100  # of 400
    for one in models:  # the thread is free again: what is sent to it runs at once
        assert one.worker.submit(threading.get_ident).result(timeout=5)


def test_an_error_of_one_model_ends_both(models, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(models[1].model.model.language_model.layers[0], "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        list(stream_answers(models, tiny.photo(), QUESTION, 40, 0.0))


def test_a_question_beyond_the_context_is_refused(models):
    check_fits(models[0], tiny.photo(), "cat " * 30, 200)
    with pytest.raises(Refused, match="do not fit into the model's context"):
        check_fits(models[0], tiny.photo(), "cat " * 60, 200)


def test_a_closed_question_is_not_answered_further(desk, root):
    asked = desk.accept(str(root / "0.png"), f" {QUESTION} ", 64, 0)
    assert asked.question == QUESTION and asked.small.startswith("data:image/jpeg;base64,")
    stream = desk.ask(asked)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert list(desk.ask(asked))[-1] == [
        answer(one.model, one.processor, Image.open(root / "0.png"), QUESTION, max_new_tokens=64)
        for one in desk.models
    ]


def test_questions_are_remembered_for_a_visitor(desk, root):
    visit = Visit()

    def ask(picture, question, answers):
        visit.asked = desk.accept(str(root / picture), question, 4, 0)
        visit.keep(answers)
        return [entry["answers"] for entry in visit.entries]

    ask("0.png", "a", ["x", "y"])
    assert ask("1.png", "a", ["x", "z"]) == [["x", "y"], ["x", "z"]]  # another picture: another question
    assert ask("1.png", " a ", ["w", "v"]) == [["x", "y"], ["w", "v"]]
    assert ask("1.png", "b", ["", ""]) == [["x", "y"], ["w", "v"]]  # stopped before the first word
    for number in range(30):
        ask("1.png", str(number), ["x", "y"])
    assert [entry["question"] for entry in visit.entries] == [str(number) for number in range(10, 30)]
    assert len(visit.entries[0]["picture"]) < 8000
    visit.clear()
    visit.keep(["x", "y"])
    assert visit.entries == []
