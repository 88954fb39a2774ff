"""The page against those who do not use it as a page: past the queue, with addresses, with much, with nonsense."""

import json
import re
import socket
import threading
import time

import pytest

pytest.importorskip("gradio")

import httpx
from gradio_client import Client, handle_file

from tests.helpers import answers, space

QUESTION = answers.QUESTIONS[0]
NOT_READ = "The request cannot be read; reload the page, then try again."
UPLOADED_ONLY = "Pictures are taken as uploaded files only, not as addresses or paths; upload the file."
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """The folder where the server's programs put what is temporary."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def address(root, temporary):
    with space.served(root, TMPDIR=str(temporary)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def picture(address, root):
    return space.picture(space.upload(address, root / "0.png").json()[0])


@pytest.fixture
def logged(address, root):
    """The lines that the server has logged since the test began."""
    log = root / "server.log"
    begun = len(log.read_text())
    return lambda: log.read_text()[begun:].splitlines()


@pytest.fixture
def listener():
    """A port of this machine, and who has connected there so far."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connected = []

        def listen():
            while True:
                try:
                    caller, address = server.accept()
                except OSError:  # closed
                    return
                caller.close()
                connected.append(address)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1], connected
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def index(address, name):
    """The number of the function behind an endpoint."""
    dependencies = space.get(f"{address}/config").json()["dependencies"]
    return next(one["id"] for one in dependencies if one["api_name"] == name)


def post(address, route, **body):
    return httpx.post(f"{address}/gradio_api/{route}", json=body, timeout=60)


def test_nobody_passes_by_the_queue(address, root, picture):
    asked, seen = [picture, QUESTION, 6, 0], [picture, QUESTION]
    for route, data in (("run/see", seen), ("run/ask", asked), ("api/ask", asked), ("api/see/", seen)):
        answered = post(address, route, data=data)
        assert answered.status_code == 404 and "join the queue" in answered.json()["detail"], route
    for name, data in (("see", seen), ("ask", asked)):
        answered = post(address, "run/predict", data=data, fn_index=index(address, name), session_hash="x")
        assert answered.status_code == 404, name
    client = Client(address, **space.PATIENT)
    assert all(client.predict(handle_file(root / "0.png"), QUESTION, 6, 0, api_name="/ask"))
    assert len(client.predict(handle_file(root / "0.png"), QUESTION, api_name="/see")) == 2


def test_an_address_in_the_place_of_anything_is_not_fetched(address, picture, listener, logged):
    port, connected = listener
    file = space.picture(f"http://127.0.0.1:{port}/x.png")
    for values in (
        (picture, file, 6, 0),
        (picture, [file], 6, 0),
        (picture, {"x": file}, 6, 0),
        (picture, QUESTION, file, 0),
        (picture, QUESTION, 6, file),
        ({"path": picture["path"], "x": file}, QUESTION, 6, 0),
        ({"path": picture["path"], "meta": {"_type": "x", "y": file}}, QUESTION, 6, 0),
    ):
        events, text = space.call(address, "ask", *values)
        assert events[-1][0] == "error" and events[-1][1]["error"] in (NOT_READ, UPLOADED_ONLY), text
    assert logged() == []  # Gradio was not even asked to read them: what it cannot read is logged
    socket.create_connection(("127.0.0.1", port)).close()
    wait_for(lambda: len(connected) == 1)  # by this test, and by nobody before


def wait_for(done):
    for _ in range(100):
        if done():
            return
        time.sleep(0.05)
    pytest.fail("It did not happen within 5 s.")


def test_large_requests_are_not_taken(address, picture):
    content = json.dumps({"data": [picture, "a" * 2 * MEGABYTE, 6, 0]}).encode()
    head = {"Content-Type": "application/json"}
    for route in ("call/ask", "queue/join", "run/predict", "call/v2/ask"):
        for body in (content, chunks(content)):  # the second tells no length
            answered = httpx.post(f"{address}/gradio_api/{route}", content=body, headers=head, timeout=60)
            assert answered.status_code == 413, route
    field = {"x": (None, b"a" * 20 * MEGABYTE)}  # no file, so that Gradio keeps it in memory
    answered = httpx.post(f"{address}/gradio_api/upload", files=field, timeout=60)
    assert (answered.status_code, answered.text) == (413, "The request exceeds the maximum allowed size.")


def chunks(content):
    for begin in range(0, len(content), 50_000):
        yield content[begin : begin + 50_000]


def test_what_the_page_does_not_need_is_not_there(address, temporary, picture):
    client = Client(address, **space.PATIENT)
    client.predict(picture, QUESTION, 6, 0, api_name="/ask")  # so that there is something to link to
    before = sorted(temporary.rglob("*"))
    recording = {"video": ("x.webm", bytes(1000), "video/webm")}
    for prefix in ("/gradio_api", ""):
        for name in ("process_recording", "process%5Frecording", "process_recording/"):
            answered = httpx.post(f"{address}{prefix}/{name}", files=recording, timeout=60)
            assert (answered.status_code, answered.text) == (403, "This page does not offer that.")
        for name in ("deep_link", "deep%5flink"):
            link = f"{address}{prefix}/{name}?session_hash={client.session_hash}"
            assert space.get(link).status_code == 403
    assert post(address, "component_server", data=1).status_code == 403
    assert sorted(temporary.rglob("*")) == before


def test_nonsense_is_one_line_in_the_log_at_most(address, picture, logged):
    for values in (
        (picture, QUESTION, 257, 0),
        (picture, QUESTION, "many", 0),
        (picture, QUESTION, 6, 3),
        (picture,),
        (picture | {"path": picture["path"] + "\0"}, QUESTION, 6, 0),
        (picture | {"path": picture["path"] + "\ud800"}, QUESTION, 6, 0),
    ):
        events, text = space.call(address, "ask", *values)
        assert events[-1][0] == "error", text
    for number in (-1, 10_000):
        answered = post(address, "queue/join", data=[], fn_index=number, session_hash="x")
        assert (answered.status_code, answered.text) == (500, NOT_READ)
    lines = logged()  # of all but the numbers that are out of range, which the visitor is told of
    assert len(lines) == 6
    assert all(re.fullmatch(r"WARNING: A request could not be (read|answered) \(\w+\)", line) for line in lines)


def test_a_temperature_near_0_is_0(address, picture):
    said = space.ask(address, picture["path"], QUESTION)
    assert isinstance(said, list) and space.ask(address, picture["path"], QUESTION, temperature=1e-42) == said


def test_a_start_that_fails_leaves_nothing(root, tmp_path):
    said, code = space.start_fails("--aligned", tmp_path / "nothing", TMPDIR=str(tmp_path))
    assert code == 2 and "There is no folder" in said
    assert list(tmp_path.glob("llava-norm-align-*")) == []


@pytest.mark.parametrize("port", ["80x", "0", "65536", "-1"])
def test_a_port_that_is_none_is_told_first(port, tmp_path):
    said, code = space.start_fails("--aligned", tmp_path / "nothing", GRADIO_SERVER_PORT=port)
    assert (code, said) == (2, f"Error: GRADIO_SERVER_PORT is '{port}', but a number from 1 to 65535 was expected.")
