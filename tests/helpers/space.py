"""The page of tiny models: their folders, app.py as a process of its own, and plain HTTP to it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx

from llava_norm_align import LlavaNormAlignForConditionalGeneration
from llava_norm_align.space.models import load_models
from llava_norm_align.space.settings import Settings
from tests.helpers import answers, tiny

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 600  # seconds that a process may take to start or to end


def build(root):
    """Folders `base` and `aligned` of models that answer in words, and pictures 0.png to 7.png."""
    answers.talkative(0).save_pretrained(root / "base")
    answers.talkative(1, LlavaNormAlignForConditionalGeneration).save_pretrained(root / "aligned")
    for name in ("base", "aligned"):
        tiny.processor().save_pretrained(root / name)
    for seed in range(8):
        tiny.photo(seed).save(root / f"{seed}.png")
    return root


def load(root, *names):
    names = names or ("base", "aligned")
    return load_models(Settings(**{name: str(root / name) for name in names}))


@cache
def environment():
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def served(root, *arguments, **variables):
    """app.py on the models of `root`: its address and process. It is ended by SIGTERM."""
    # Bound as long as the page is served, so that nobody else is given the port before the page listens there.
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the page's own, so that both may be bound
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    flags = arguments or ("--base", root / "base", "--aligned", root / "aligned")
    log = (root / "server.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, ROOT / "app.py", *map(str, flags)],
        cwd=ROOT,
        env=environment() | {"GRADIO_SERVER_PORT": str(port)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(address, process, root / "server.log")
        yield address, process
    finally:
        process.terminate()
        process.wait(LONGEST)
        log.close()
        kept.close()


def wait_for(address, process, log):
    """Until the page answers, which takes minutes where others use the cores, too."""
    deadline = time.monotonic() + LONGEST
    with httpx.Client(timeout=5) as client:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            try:
                client.get(f"{address}/config")
                return
            except httpx.TransportError:
                time.sleep(0.1)


def start_fails(*arguments, **variables):
    """What app.py says when it ends at once, and its exit code."""
    command = [sys.executable, ROOT / "app.py", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=LONGEST,
    )  # fmt: skip
    return done.stderr.strip(), done.returncode


def upload(address, path):
    """What gradio's upload route answers: the path on the server."""
    with Path(path).open("rb") as file:
        return httpx.post(f"{address}/gradio_api/upload", files={"files": (Path(path).name, file)}, timeout=60)


def call(address, endpoint, *values):
    """One call of a named endpoint by plain HTTP: (its events as (name, data), raw text)."""
    content = json.dumps({"data": list(values)})  # in ASCII, so that what is no text can be sent
    head = {"Content-Type": "application/json"}
    sent = httpx.post(f"{address}/gradio_api/call/{endpoint}", content=content, headers=head, timeout=60)
    if sent.status_code != 200:
        return [("refused", sent.json())], sent.text
    text = httpx.get(f"{address}/gradio_api/call/{endpoint}/{sent.json()['event_id']}", timeout=120).text
    events = re.findall(r"event: (\w+)\ndata: (.*)", text)
    return [(name, json.loads(data)) for name, data in events], text


# Of gradio_client's Client: alone, it gives up after 5 s, which a busy machine may need to take a question.
PATIENT = {"verbose": False, "httpx_kwargs": {"timeout": 60}}


def get(address):
    return httpx.get(address, timeout=60)


def picture(path):
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


def ask(address, path, question, tokens=6, temperature=0):
    """The answers by plain HTTP to an uploaded picture, or the sentence of the error."""
    events, _ = call(address, "ask", path and picture(path), question, tokens, temperature)
    name, data = events[-1]
    return data if name == "complete" else data["error"]
