"""Errors in one sentence, and no requests on a visitor's behalf."""

import asyncio
import logging

import pytest
import torch

pytest.importorskip("gradio")

import gradio as gr

from llava_norm_align.space import guard
from llava_norm_align.space.guard import NoAddresses, check_upload, fetches_address, one_sentence
from llava_norm_align.space.limits import Refused
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
    assert told.value.message == said
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
    check_upload({"path": str(folder / "inside.png"), "url": "http://127.0.0.1:7860/gradio_api/file=x"}, str(folder))
    if isinstance(value, dict) and isinstance(value["path"], str):
        value = value | {"path": value["path"].replace("{folder}", str(folder))}
    with pytest.raises(Refused) as refused:
        check_upload(value, str(folder))
    assert str(refused.value) == guard.UPLOADED_ONLY


@pytest.mark.parametrize(
    ("path", "fetches"),
    [
        ("/gradio_api/file=https://example.com/x.png", True),
        ("/gradio_api/file=HTTP%3A//example.com", True),
        ("/gradio_api/file/http://example.com", True),
        ("/gradio_api/proxy=https://me.hf.space/x", True),
        ("/gradio_api/file=/tmp/gradio/abc/http.png", False),
        ("/assets/index.js", False),
    ],
)
def test_addresses_are_not_fetched(path, fetches):
    assert fetches_address(path) is fetches
    sent, reached = [], []

    async def app(scope, receive, send):
        reached.append(scope["path"])

    async def send(message):
        sent.append(message.get("status"))

    asyncio.run(NoAddresses(app)({"type": "http", "path": path}, None, send))
    assert (sent[:1] == [403]) is fetches and bool(reached) is not fetches
