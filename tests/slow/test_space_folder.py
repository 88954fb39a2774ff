"""The folder of a Space alone, in an environment of its requirements and nothing else, answers like the models do."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("gradio")

from gradio_client import Client, handle_file
from huggingface_hub import HfApi

from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.evaluation.answer import answer
from tests.helpers import hub, tiny
from tests.helpers.hub_release import in_process
from tests.helpers.space import build
from tests.matrix.test_release import program

QUESTION = "what is a cat ?"


def wait_for_page(process, log):
    for _ in range(1800):
        assert process.poll() is None, log.read_text()
        if found := re.search(r"The page is at (\S+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new one with what the folder's requirements.txt names; torch as make installs it."""
    folder = tmp_path_factory.mktemp("environment")
    with hub.running(folder / "hub") as server:
        root = build(folder)
        api = HfApi(endpoint=server.address, token=hub.TOKEN)
        with pytest.MonkeyPatch.context() as patch:
            in_process(patch, folder)
            for name in ("base", "aligned"):
                api.create_repo(f"me/{name}")
                commit = api.upload_folder(repo_id=f"me/{name}", folder_path=root / name).oid
        words = (
            "--space",
            "me/show",
            "--model",
            f"me/aligned@{commit}",
            "--base",
            "me/base",
            "--out",
            folder / "space",
        )
        code, _, err = program(server, folder / "home", "release", *words)
        assert code == 0, err
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        python = folder / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, "-r", folder / "space" / "requirements.txt"], check=True)
        yield server, root, python


def test_it_starts_and_answers(environment):
    server, root, python = environment
    assert subprocess.run([python, "-c", "import llava_norm_align"], cwd=root, capture_output=True).returncode
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = hub.client(server, root / "visitor", os.environ, root / "space", GRADIO_SERVER_PORT=port)
    log = root / "space.log"
    with log.open("w") as output:
        process = subprocess.Popen([python, "app.py"], **options, stdout=output, stderr=subprocess.STDOUT)
    try:
        client = Client(wait_for_page(process, log), verbose=False)
        picture = root / "0.png"
        said = client.predict(handle_file(str(picture)), QUESTION, 8, 0.0, api_name="/ask")
    finally:
        process.terminate()
        process.wait()
    for name, words in zip(("base", "aligned"), said, strict=True):
        model, processor = load_model(root / name), load_processor(root / name)
        assert words == answer(model, processor, tiny.photo(0), QUESTION, max_new_tokens=8), name
