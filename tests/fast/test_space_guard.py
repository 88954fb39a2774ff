"""Errors in one sentence, what an input may hold, and what the server refuses before Gradio sees it."""

import asyncio
import itertools
import logging

import pytest
import torch

pytest.importorskip("gradio")

import gradio as gr

from llava_norm_align.space import guard
from llava_norm_align.space.guard import FILE, check_upload, check_value, one_sentence
from llava_norm_align.space.limits import Refused
from llava_norm_align.space.middleware import Doorkeeper, refusal
from tests.helpers import tiny


@pytest.mark.parametrize(
    ("error", "said", "logged"),
    [
        (Refused("Type a question."), "Type a question.", False),
        (ValueError("/home/me/secret: <b>"), guard.FAILED, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), guard.NO_MEMORY, False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), guard.NO_MEMORY, False),
        (gr.Error("Value 3 is greater than maximum value 2."), "Value 3 is greater than maximum value 2.", False),
    ],
)
def test_every_error_is_one_sentence(error, said, logged, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(gr.Error) as told, one_sentence():
        raise error
    assert told.value.message == said and told.value.print_exception is False  # else Gradio prints a traceback
    assert ("Traceback" in caplog.text) is logged


def test_leaving_a_generator_is_no_error():
    def work():
        with one_sentence():
            yield 1

    stream = work()
    next(stream)
    stream.close()


@pytest.mark.parametrize(
    "value",
    [
        {"path": "http://127.0.0.1/x.png"},
        {"path": "https://example.com/x.png", "url": "https://example.com/x.png"},
        {"path": "/etc/passwd"},
        {"path": "{folder}/../outside.png"},
        {"path": "{folder}/link.png"},
        {"path": None, "url": "data:image/png;base64,AAAA"},
        {"path": ["x"]},
        {"path": "{folder}/inside.png", "meta": None},
        {"path": "{folder}/inside.png", "meta": {"_type": "x", "y": {"path": "http://127.0.0.1/x.png", "meta": FILE}}},
        "{folder}/inside.png",
        17,
    ],
)
def test_only_uploaded_files_are_taken(value, tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    tiny.photo().save(folder / "inside.png")
    tiny.photo().save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    inside = {"path": str(folder / "inside.png"), "url": "http://127.0.0.1:7860/gradio_api/file=x", "meta": FILE}
    check_upload(inside, str(folder))
    if isinstance(value, dict) and isinstance(value["path"], str):
        value = {"meta": FILE} | value | {"path": value["path"].replace("{folder}", str(folder))}
    with pytest.raises(Refused) as refused:
        check_upload(value, str(folder))
    assert str(refused.value) == guard.UPLOADED_ONLY


@pytest.mark.parametrize(
    "value",
    [{"path": "http://127.0.0.1/x.png", "meta": FILE}, [{"path": "http://127.0.0.1/x.png", "meta": FILE}], {}, []],
    ids=["file", "list", "dict", "empty"],
)
def test_nothing_but_a_picture_is_a_file(value):
    with gr.Blocks():
        blocks = [gr.Textbox(), gr.Slider(), gr.HTML(), gr.Dataset(components=["textbox"], samples=[["a"]])]
        state = gr.State()
    check_value(state, value)  # which Gradio does not take from the client
    for block in blocks:
        check_value(block, 1)
        with pytest.raises(Refused) as refused:
            check_value(block, value)
        assert str(refused.value) == guard.NOT_READ
    for plain in ("text", 0.5, True, None):
        check_value(blocks[0], plain)
    with pytest.raises(Refused):
        check_value(blocks[3], None)


ADDRESSES, NOT_OFFERED = "Addresses are not fetched.", "This page does not offer that."


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gradio_api/file=https://example.com/x.png", ADDRESSES),
        ("/gradio_api/file=HTTP%3A//example.com", ADDRESSES),
        ("/gradio_api/file/http://example.com", ADDRESSES),
        ("/gradio_api/proxy=https://me.hf.space/x", ADDRESSES),
        ("/gradio_api/process_recording", NOT_OFFERED),
        ("/gradio_api/process%5Frecording/", NOT_OFFERED),
        ("/deep_link", NOT_OFFERED),
        ("/gradio_api/stream/a/b/3/playlist-file", NOT_OFFERED),
        ("/gradio_api/component_server", NOT_OFFERED),
        ("/gradio_api/vibe-code/", NOT_OFFERED),
        ("/gradio_api/undo-vibe-edit", NOT_OFFERED),
        ("/gradio_api/file=/tmp/gradio/abc/http.png", None),
        ("/gradio_api/file=/tmp/gradio/abc/deep_link", None),
        ("/gradio_api/upload", None),
        ("/assets/stream.js", None),
    ],
)
def test_what_the_page_does_not_need_is_refused(path, said):
    assert refusal(path) == said
    sent, reached = asked(path, 0)
    assert (sent == [(403, said)]) is bool(said) and bool(reached) is not bool(said)


def asked(path, megabytes, app=None):
    """What a request of so many MB, told in no header, gets: (what was sent, the bytes that the app has read)."""
    sent, reached = [], []
    left = [True] * (megabytes - 1) + [False]

    async def read(scope, receive, send):
        more = True
        reached.append(0)
        while more:
            message = await receive()
            reached[0] += len(message["body"])
            more = message["more_body"]

    async def receive():
        return {"type": "http.request", "body": bytes(1_000_000 if megabytes else 0), "more_body": left.pop(0)}

    async def send(message):
        sent.append(message)

    asyncio.run(Doorkeeper(app or read)({"type": "http", "path": path}, receive, send))
    return [(start["status"], body["body"].decode()) for start, body in itertools.pairwise(sent)][::2], reached


def test_large_requests_are_cut_off():
    assert asked("/gradio_api/queue/join", 1) == ([], [1_000_000])
    assert asked("/gradio_api/upload", 10) == ([], [10_000_000])
    for path, megabytes, read in (("/gradio_api/queue/join", 2, 1_000_000), ("/gradio_api/upload", 12, 11_000_000)):
        counted = []

        async def app(scope, receive, send, counted=counted):
            while True:
                counted.append(len((await receive())["body"]))

        asked(path, megabytes, app)
        assert sum(counted) == read


def test_a_broken_request_is_one_line_in_the_log(caplog):
    async def app(scope, receive, send):
        raise KeyError("/home/me")

    assert asked("/gradio_api/queue/join", 0, app)[0] == [(500, guard.NOT_READ)]
    assert caplog.messages == ["A request could not be answered (KeyError)"] and "Traceback" not in caplog.text
