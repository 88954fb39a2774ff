"""The page's server on micro-LLaVA keeps its memory: 200 requests, of which every tenth is a measurement."""

import os

import psutil
import pytest

pytest.importorskip("gradio")

from gradio_client import Client, handle_file

from llava_norm_align.data.easy_vqa import load_questions
from tests.helpers import space


def resident(process):
    """Bytes of the server and its children."""
    server = psutil.Process(process.pid)
    return sum(one.memory_info().rss for one in (server, *server.children(recursive=True)))


def test_memory_stays_after_the_first_requests(tmp_path):
    rows = load_questions("test")[:200]
    variables = {"LLAVA_NORM_ALIGN_CACHE": os.environ.get("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))}
    with space.served(tmp_path, "--max-new-tokens", "64", **variables) as (address, process):
        clients, memory = [Client(address, **space.PATIENT) for _ in range(4)], {}
        for number, row in enumerate(rows, start=1):
            client, picture = clients[number % 4], handle_file(str(row.image))
            client.predict(picture, row.question, 16, 0, api_name="/ask")
            if number % 10 == 0:
                client.predict(picture, row.question, api_name="/see")
            if number in (50, 200):
                memory[number] = resident(process)
    assert memory[200] <= 1.05 * memory[50], memory
