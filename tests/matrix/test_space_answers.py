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
from llava_norm_align.space.desk import Desk, remember
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


def test_stop_ends_the_visitor_who_pressed_it_and_no_other(desk, root):
    picture = str(root / "0.png")
    stream = desk.ask(picture, QUESTION, 64, 0, "anna")
    next(stream)
    desk.stop("bert")
    next(stream)
    desk.stop("anna")
    assert list(stream) == []
    assert list(desk.ask(picture, QUESTION, 6, 0, "bert")) == []  # he waited when he pressed it
    assert list(desk.ask(picture, QUESTION, 6, 0, "bert"))
    desk.stop("anna")
    desk.begin("anna")
    assert list(desk.ask(picture, QUESTION, 6, 0, "anna"))


def test_who_leaves_is_not_answered_further(desk, root):
    stream = desk.ask(str(root / "0.png"), QUESTION, 64, 0, "anna")
    next(stream)
    desk.leave("bert")
    next(stream)
    desk.leave("anna")
    assert list(stream) == [] and desk._unwanted == set()


def test_questions_are_remembered_for_a_visitor(root):
    one, two = str(root / "0.png"), str(root / "1.png")
    entries = remember([], one, "a", ["x", "y"], False)
    entries = remember(entries, two, "a", ["x", "z"], True)  # another picture: no repetition
    assert [entry["answers"] for entry in entries] == [["x", "y"], ["x", "z"]]
    entries = remember(entries, two, " a ", ["w", "v"], True)
    assert [entry["answers"] for entry in entries] == [["x", "y"], ["w", "v"]]
    assert remember(entries, two, "b", ["", ""], False) == entries  # stopped before the first word
    for number in range(30):
        entries = remember(entries, two, str(number), ["x", "y"], False)
    assert [entry["question"] for entry in entries] == [str(number) for number in range(10, 30)]
    assert entries[0]["picture"].startswith("data:image/jpeg;base64,") and len(entries[0]["picture"]) < 8000
