"""The page where `spaces` is installed: what computes does so in a process that ZeroGPU lends a GPU to."""

import time

import pytest

pytest.importorskip("gradio")

from gradio_client import Client, handle_file

from llava_norm_align.common.images import open_image
from llava_norm_align.evaluation.answer import answer
from tests.helpers import answers, space

QUESTION = answers.QUESTIONS[0]
FULL = """
import torch

from llava_norm_align.space import answers, see


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB at /home/user/x.")


answers.answer = see.diagnose_model = full
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


def served(root, *before):
    """The page with `spaces` to be imported, and the folders `before` ahead of it."""
    path = ":".join(map(str, (*before, space.ROOT / "tests/helpers/zero_gpu")))
    return space.served(root, PYTHONPATH=path)


def test_answers_and_numbers_come_from_the_lent_process(root):
    with served(root) as (address, process):
        client = Client(address, **space.PATIENT)
        picture = handle_file(str(root / "0.png"))
        expected = [
            answer(one.model, one.processor, open_image(root / "0.png"), QUESTION, max_new_tokens=12)
            for one in space.load(root)
        ]
        for _ in range(2):
            job = client.submit(picture, QUESTION, 12, 0.0, api_name="/ask")
            assert list(job.result()) == expected
            assert len(job.outputs()) >= 12
        assert [one["ratio"]["mean"] > 0 for one in client.predict(picture, QUESTION, api_name="/see")] == [True, True]
        job = client.submit(picture, QUESTION, 200, 0.0, api_name="/ask")
        while not job.outputs():
            time.sleep(0.01)
        job.cancel()
        assert list(client.predict(picture, QUESTION, 12, 0.0, api_name="/ask")) == expected
    log = (root / "server.log").read_text()
    assert log.count("ZeroGPU: _answers runs") == 4 and log.count("ZeroGPU: _diagnoses runs") == 1


def test_what_fails_there_is_one_sentence(root, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FULL)
    with served(root, tmp_path) as (address, process):
        path = space.upload(address, root / "0.png").json()[0]
        assert space.ask(address, path, QUESTION).startswith("The memory of the device does not suffice for this")
        events, text = space.call(address, "see", space.picture(path), QUESTION)
        assert events[-1][1]["error"].startswith("The memory of the device does not suffice") and "/home" not in text
    assert "Traceback" not in (root / "server.log").read_text()
