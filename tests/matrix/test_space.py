"""app.py as a process of its own: its endpoints by gradio_client and by plain HTTP, and what it refuses."""

import json
import re
import threading

import pytest
from PIL import Image

pytest.importorskip("gradio")

import httpx
from gradio_client import Client, handle_file

from llava_norm_align.common.images import open_image
from llava_norm_align.evaluation.answer import answer
from tests.helpers import answers, space

QUESTION = answers.QUESTIONS[0]
UPLOADED_ONLY = "Pictures are taken as uploaded files only, not as addresses or paths; upload the file."
NOT_READ = "The picture cannot be read; send a whole PNG, JPEG, WebP, GIF or BMP file."
OTHER_HOST = re.compile(r"(?:src|href|url)\s*[=(:]\s*[\"']?https?://(?!127\.0\.0\.1)[^\"')\s]+")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return space.build(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def models(root):
    return space.load(root)


@pytest.fixture(scope="module")
def server(root):
    with space.served(root) as (address, process):
        yield address, process


@pytest.fixture(scope="module")
def address(server):
    return server[0]


@pytest.fixture(scope="module")
def uploaded(address, root):
    """The path on the server of 0.png."""
    return space.upload(address, root / "0.png").json()[0]


def expected(models, picture, question, tokens):
    return [answer(one.model, one.processor, open_image(picture), question, max_new_tokens=tokens) for one in models]


def test_models_are_told(address):
    told = Client(address, **space.PATIENT).predict(api_name="/models")
    assert [(one["name"], one["kind"]) for one in told["models"]] == [("base", "stock"), ("aligned", "norm-aligned")]
    assert told["limits"]["max_new_tokens"] == 256


def test_answers_stream_in_order_to_what_each_model_says(address, root, models):
    job = Client(address, **space.PATIENT).submit(handle_file(root / "1.png"), QUESTION, 24, 0, api_name="/ask")
    updates = list(job)
    assert list(updates[-1]) == expected(models, root / "1.png", QUESTION, 24)
    assert len(updates) > 3
    for column in zip(*updates, strict=True):
        assert all(later.startswith(earlier) for earlier, later in zip(column, column[1:-1], strict=False))


def test_see_gives_the_diagnosis_of_both(address, root):
    base, aligned = Client(address, **space.PATIENT).predict(handle_file(root / "1.png"), QUESTION, api_name="/see")
    assert (base["model"], aligned["model"], len(base["layers"])) == ("base", "aligned", 2)
    assert base["ratio"]["mean"] == pytest.approx(base["norms"]["visual"]["mean"] / base["norms"]["text"]["mean"])
    assert str(root) not in json.dumps([base, aligned])


def test_eight_at_once_get_their_own_answers(address, root, models):
    said, clients = {}, [Client(address, **space.PATIENT) for _ in range(8)]
    asked = [(root / f"{number}.png", answers.QUESTIONS[number % 5], 4 + number) for number in range(8)]

    def ask(number):
        picture, question, tokens = asked[number]
        said[number] = clients[number].predict(handle_file(picture), question, tokens, 0, api_name="/ask")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {number: expected(models, *asked[number]) for number in range(8)}
    assert {number: list(texts) for number, texts in said.items()} == wanted
    assert len({tuple(texts) for texts in wanted.values()}) == 8


def test_more_than_may_wait_are_turned_away(root):
    with space.served(root, "--base", root / "base", "--queue", "2") as (address, _):
        picture = space.picture(space.upload(address, root / "0.png").json()[0])
        sent = [
            httpx.post(f"{address}/gradio_api/call/ask", json={"data": [picture, QUESTION, 200, 0]}, timeout=60)
            for _ in range(12)
        ]
        refused = [answered for answered in sent if answered.status_code == 503]
        assert 0 < len(refused) < 10
        assert all(re.fullmatch(r"Queue is full\.[^/]*", answered.json()["detail"]) for answered in refused)
        for answered in sent:
            if answered.status_code == 200:  # those that wait are answered
                event = answered.json()["event_id"]
                assert "event: complete" in httpx.get(f"{address}/gradio_api/call/ask/{event}", timeout=120).text
        one = space.ask(address, picture["path"], QUESTION, 3)  # one model, one column
        assert isinstance(one, list) and len(one) == 1 and one[0]


BAD = {
    "no picture": (None, QUESTION, 4, 0),
    "no question": ("0.png", "  ", 4, 0),
    "a long question": ("0.png", "a " * 600, 4, 0),
    "an image tag": ("0.png", "what is <image> ?", 4, 0),
    "a lone surrogate": ("0.png", "\ud800", 4, 0),
    "too many tokens": ("0.png", QUESTION, 257, 0),
    "no number": ("0.png", QUESTION, "many", 0),
    "a high temperature": ("0.png", QUESTION, 4, 9),
    "beyond the context": ("0.png", "cat " * 200, 256, 0),
    "text named .png": ("text.png", QUESTION, 4, 0),
    "a cut file": ("cut.png", QUESTION, 4, 0),
    "an SVG": ("x.svg", QUESTION, 4, 0),
    "many pixels": ("many.png", QUESTION, 4, 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name, address, root):
    (root / "text.png").write_text("hello")
    (root / "cut.png").write_bytes((root / "0.png").read_bytes()[:400])
    (root / "x.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    if not (root / "many.png").exists():
        Image.new("1", (6000, 5000)).save(root / "many.png")
    file, *values = BAD[name]
    sent = file and space.picture(space.upload(address, root / file).json()[0])
    events, text = space.call(address, "ask", sent, *values)
    assert events[-1][0] == "error", text
    said = events[-1][1]["error"]
    assert re.fullmatch(r"[A-Z][^.\n]*(\d\.\d[^.\n]*)*\.", said), said
    assert not re.search(r"Traceback|File \"|/tmp|/home|\.py", text)
    if file in ("text.png", "cut.png", "x.svg"):
        assert said == NOT_READ


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../../../../etc/passwd", "{cwd}/setup.cfg", "http://127.0.0.1:9/x.png", "https://example.com/x.png",
     "file:///etc/passwd", "data:image/png;base64,AAAA"],
)  # fmt: skip
def test_paths_and_addresses_are_refused(path, address, uploaded):
    path = path.replace("{cwd}", str(space.ROOT))
    assert space.ask(address, path, QUESTION) == UPLOADED_ONLY
    assert isinstance(space.ask(address, uploaded, QUESTION), list)


def test_files_of_the_machine_are_not_served(address, uploaded):
    assert space.get(f"{address}/gradio_api/file={uploaded}").status_code == 200
    for path in ("/etc/passwd", f"{space.ROOT}/setup.cfg", f"{uploaded}/../../../../../../etc/passwd"):
        answered = space.get(f"{address}/gradio_api/file={path}")
        assert answered.status_code in (403, 404) and "root:" not in answered.text
    for path in ("file=https://example.com/x.png", "file=http%3A//127.0.0.1:9/", "proxy=https://example.com/x"):
        assert space.get(f"{address}/gradio_api/{path}").text == "Addresses are not fetched."


def test_fifty_megabytes_are_not_taken(address, tmp_path):
    (tmp_path / "big.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50_000_000))
    answered = space.upload(address, tmp_path / "big.png")
    assert answered.status_code == 413
    assert answered.text == "File size exceeded maximum allowed size of 10485760 bytes."


def test_the_page_asks_no_other_host(address):
    page = space.get(address).text
    head = re.sub(r"<meta[^>]*>|<script>window.gradio_config.*?</script>", "", page, flags=re.DOTALL)
    assert OTHER_HOST.findall(head) == []
    config = space.get(f"{address}/config").json()
    assert config["analytics_enabled"] is False and config["stylesheets"] == []
    theme = space.get(f"{address}/theme.css").text
    assert "http" not in theme.replace("http://www.w3.org/2000/svg", "") and "system-ui" in theme


def test_nothing_but_the_named_endpoints_is_public(address):
    named = space.get(f"{address}/gradio_api/info").json()["named_endpoints"]
    assert set(named) == {"/ask", "/see", "/models"}


def test_it_ends_by_sigterm_and_leaves_no_uploads(root):
    with space.served(root, "--aligned", root / "aligned") as (address, process):
        path = space.upload(address, root / "0.png").json()[0]
        assert re.match(r".*/llava-norm-align-[^/]+/", path)
    assert process.returncode in (0, 143)
    assert not open_folder(path).exists()
    assert "Traceback" not in (root / "server.log").read_text()


def open_folder(path):
    return next(parent for parent in space.Path(path).parents if parent.name.startswith("llava-norm-align-"))


def test_what_cannot_start_says_so(root, tmp_path):
    said, code = space.start_fails("--aligned", tmp_path / "nothing")
    assert code == 2 and said.startswith("Error: --aligned (LLAVA_NORM_ALIGN_ALIGNED): There is no folder")
    assert said.count("\n") == 0
    said, code = space.start_fails(
        LLAVA_NORM_ALIGN_BASE=str(root / "base"), LLAVA_NORM_ALIGN_ALIGNED=str(root / "base")
    )
    assert code == 2 and "a llava without a norm after its projector" in said
    with space.served(root) as (address, _):
        port = address.rpartition(":")[2]
        said, code = space.start_fails("--base", root / "base", GRADIO_SERVER_PORT=port)
    assert (
        code == 2 and said == f"Error: Port {port} is in use by another program. Set GRADIO_SERVER_PORT to a free one."
    )
