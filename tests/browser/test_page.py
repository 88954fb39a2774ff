"""The page on micro-LLaVA in headless Chromium: asking, seeing, stopping, bad files, and eight visitors at once.

The wheels come from the folder in LLAVA_NORM_ALIGN_WHEELS, or from pip.
"""

import os
import re
from pathlib import Path

import pytest

from tests.helpers import browser

POEM = "Write a long poem."  # to which micro-LLaVA does not find an end
WORDS = ("red", "yellow", "blue", "circle", "brown", "green", "rectangle", "black")  # answers of easy-VQA


@pytest.fixture(scope="module")
def needed():
    browser.needed()


@pytest.fixture(scope="module")
def wheels(needed):
    folder = os.environ.get("LLAVA_NORM_ALIGN_WHEELS")
    return Path(folder) if folder else None


@pytest.fixture(scope="module")
def say(wheels):
    """What each model says, greedily, in this process: the models that a page without configuration shows."""
    from llava_norm_align.common.images import open_image
    from llava_norm_align.evaluation.answer import answer
    from llava_norm_align.space.models import load_models
    from llava_norm_align.space.settings import Settings

    models = load_models(Settings(wheels=wheels, device="cpu"))

    def said(path, question, tokens=64):
        image = open_image(path)
        return [answer(one.model, one.processor, image, question, max_new_tokens=tokens) for one in models]

    return said


@pytest.fixture(scope="module")
def rows(needed):
    """The first test question of easy-VQA to each answer."""
    from llava_norm_align.data.easy_vqa import load_questions

    first = {}
    for row in load_questions("test"):
        first.setdefault(row.answer, row)
    return [first[word] for word in WORDS]


@pytest.fixture(scope="module")
def address(say, tmp_path_factory):
    from tests.helpers import space

    root = tmp_path_factory.mktemp("page")
    with space.served(root, "--device", "cpu") as (address, _):
        yield address
    assert "Traceback" not in (root / "server.log").read_text()


@pytest.fixture(scope="module")
def chromium(needed):
    with browser.chromium() as started:
        yield started


@pytest.fixture
def visit(chromium, address):
    """Open the page as a new visitor. In the end, no browser has complained, or asked another host for anything."""
    visitors = []

    def one():
        visitors.append(browser.Visitor(chromium, address))
        return visitors[-1]

    yield one
    for visitor in visitors:
        visitor.page.context.close()
        assert visitor.addresses and visitor.other_hosts(address) == []
        assert visitor.errors == []


def test_five_answers_are_the_greedy_ones(visit, rows, say):
    visitor = visit()
    for row in rows[:5]:
        visitor.upload(row.image)
        wanted = say(row.image, row.question)
        assert visitor.ask(row.question) == wanted
        assert wanted[0] == row.answer
    visitor.page.locator("#history tbody tr").nth(4).wait_for()


def test_an_answer_comes_word_by_word(visit, rows, say):
    visitor, wanted = visit(), say(rows[0].image, POEM, 24)
    visitor.upload(rows[0].image)
    visitor.set_tokens(24)
    visitor.page.evaluate(browser.RECORD, "#answer-base textarea")
    assert visitor.ask(POEM) == wanted
    updates = [text for text in visitor.page.evaluate("window.seen") if text]
    assert updates[-1] == wanted[0]
    assert len(updates) >= 4
    assert all(wanted[0].startswith(text.strip()) for text in updates)


def test_see_draws_the_picture_in_both_models(visit, rows):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.page.fill("#question textarea", rows[0].question)
    visitor.page.get_by_role("tab", name="See").click()
    visitor.page.wait_for_selector("#see-plots figure.plot svg")
    for name in ("norms", "layers", "rotation", "shares", "attention"):
        box = visitor.page.locator(f"#plot-{name} figure.plot svg").bounding_box()
        assert box["width"] > 300 and box["height"] > 100, name
    cells = visitor.page.locator("#see-table tbody tr", has_text="Visual / text").locator("td").all_inner_texts()
    assert float(cells[0]) > 3 and 0.8 < float(cells[1]) < 1.5


def test_stop_ends_the_answers(visit, rows, say):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.set_tokens(256)
    visitor.press_ask(POEM)
    visitor.page.wait_for_function("document.querySelector('#answer-base textarea').value.length > 20")
    stopped = visitor.stop()
    assert 20 < len(stopped[0]) < 800  # of some 1,600 signs
    visitor.set_tokens(64)
    assert visitor.ask(rows[0].question) == say(rows[0].image, rows[0].question)  # and the next one is whole


def test_a_question_is_kept_as_it_was_asked(visit, rows, say):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.set_tokens(256)
    visitor.press_ask(POEM)
    visitor.page.wait_for_function("document.querySelector('#answer-base textarea').value.length > 20")
    visitor.page.fill("#question textarea", rows[0].question)
    visitor.page.press("#question textarea", "Enter")  # while one is answered, another one is not begun
    stopped = visitor.stop()
    kept = visitor.page.locator("#history tbody tr")
    kept.wait_for()
    assert kept.locator("td").all_inner_texts() == ["", POEM, *map(str.strip, stopped)]
    visitor.set_tokens(8)
    visitor.asked += 1
    visitor.page.click("#retry")  # asks what was asked, not what is written by now
    assert visitor.wait() == say(rows[0].image, POEM, 8)
    assert visitor.ask(rows[0].question) == say(rows[0].image, rows[0].question, 8)
    assert kept.count() == 2


def test_stop_gives_the_place_in_the_queue_back(visit, rows, say):
    first, second = visit(), visit()
    for visitor in (first, second):
        visitor.upload(rows[0].image)
    first.set_tokens(256)
    first.press_ask(POEM)
    first.page.wait_for_function("document.querySelector('#answer-base textarea').value.length > 20")
    second.press_ask(rows[0].question)
    second.page.wait_for_selector("#answer-base .meta-text, #answer-base .progress-text")
    assert second.stop() == ["", ""]
    assert first.page.evaluate("window.ended") == 0  # whose answer goes on
    assert second.page.locator("#history tr").count() == 0
    first.stop()
    assert second.ask(rows[0].question) == say(rows[0].image, rows[0].question)


def test_clear_empties_the_page_while_an_answer_comes(visit, rows, say):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.press_ask(POEM)
    visitor.page.wait_for_function("document.querySelector('#answer-base textarea').value.length > 20")
    with visitor.page.expect_response("**/cancel"):
        visitor.page.click("#clear")
    visitor.page.wait_for_selector("#picture img", state="detached")
    visitor.page.wait_for_timeout(500)
    assert visitor.wait() == ["", ""] and visitor.page.input_value("#question textarea") == ""
    assert visitor.page.locator("#history tr").count() == 0
    visitor.page.click("#retry")  # there is nothing to ask again
    assert visitor.error() == "There is no picture; add one, then ask again."
    visitor.asked += 1
    visitor.upload(rows[0].image)
    assert visitor.ask(rows[0].question) == say(rows[0].image, rows[0].question)


def test_stop_and_clear_count_before_the_server_has_answered(visit, rows, say):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.set_tokens(256)
    network = visitor.page.context.new_cdp_session(visitor.page)
    network.send("Network.enable")
    slow = {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    for button in ("#stop", "#clear"):
        network.send("Network.emulateNetworkConditions", slow | {"latency": 500})
        visitor.press_ask(POEM)
        visitor.page.wait_for_timeout(350)
        visitor.page.click(button)
        visitor.page.wait_for_timeout(4000)
        texts = visitor.texts()
        assert len(texts[0]) < 100 if button == "#stop" else texts == ["", ""]
        visitor.page.wait_for_timeout(1000)
        assert visitor.texts() == texts
        network.send("Network.emulateNetworkConditions", slow | {"latency": 0})
    assert visitor.page.locator("#history tr").count() == 0
    visitor.upload(rows[0].image)
    visitor.asked = visitor.page.evaluate("window.ended")
    assert visitor.ask(rows[0].question) == say(rows[0].image, rows[0].question)
    # what Gradio's page says when it cancels what has no number yet
    visitor.errors = [error for error in visitor.errors if "422" not in error]


def test_see_says_whose_numbers_it_shows(visit, rows):
    visitor = visit()
    visitor.upload(rows[0].image)
    visitor.page.fill("#question textarea", rows[0].question)
    visitor.page.get_by_role("tab", name="See").click()
    assert visitor.page.locator("#see-table .seen").inner_text() == rows[0].question
    assert visitor.page.locator("#see-table .seen img").get_attribute("src").startswith("data:image/jpeg;base64,")
    visitor.page.get_by_role("tab", name="Ask").click()
    visitor.page.click("#clear")
    visitor.page.wait_for_selector("#picture img", state="detached")
    visitor.page.get_by_role("tab", name="See").click()
    visitor.page.wait_for_selector("#see-table .hint")
    assert visitor.page.locator("#see-plots figure").count() == 0


def test_the_boxes_have_their_labels(visit):
    visitor = visit()
    for label in ("Base: micro-LLaVA", "Norm-aligned: micro-LLaVA with a norm", "Question"):
        assert visitor.page.get_by_label(label, exact=True).count() == 1, label


def test_bad_files_are_refused_in_one_sentence(visit, rows, say, tmp_path):
    (tmp_path / "corrupt.png").write_bytes(rows[0].image.read_bytes()[:200])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "text.txt").write_text("hello")
    visitor = visit()
    for name in ("corrupt.png", "text.png"):
        visitor.upload(tmp_path / name)
        visitor.press_ask(rows[0].question)
        assert visitor.error() == "The picture cannot be read; send a whole PNG, JPEG, WebP, GIF or BMP file."
        assert visitor.wait() == ["", ""]
    visitor.page.click("#clear")
    visitor.page.wait_for_selector("#picture img", state="detached")
    visitor.page.set_input_files("#picture input[type=file]", str(tmp_path / "text.txt"))
    assert re.fullmatch(r"Invalid file type: text\.txt\.[^\n]*", visitor.error())  # Gradio's own words
    visitor.press_ask(rows[0].question)
    assert visitor.error() == "There is no picture; add one, then ask again."
    visitor.wait()
    visitor.upload(rows[0].image)  # and a good one is still answered
    assert visitor.ask(rows[0].question) == say(rows[0].image, rows[0].question)


def test_eight_visitors_get_their_own_answers(visit, rows, say):
    wanted = [say(row.image, row.question) for row in rows]
    assert len({base for base, _ in wanted}) == 8  # a mixed answer would be seen
    visitors = [visit() for _ in rows]
    for visitor, row in zip(visitors, rows, strict=True):
        visitor.upload(row.image)
    for visitor, row in zip(visitors, rows, strict=True):
        visitor.press_ask(row.question)
    assert [visitor.wait() for visitor in visitors] == wanted
    for visitor, row in zip(visitors, rows, strict=True):
        assert row.question in visitor.page.inner_text("#history")
        assert visitor.page.locator(browser.ERROR).count() == 0


@pytest.mark.parametrize("absent", ["There is no Chromium;", "playwright is missing;"])
def test_without_a_browser_it_is_skipped_but_fails_in_ci(absent, monkeypatch):
    if "Chromium" in absent:
        monkeypatch.setattr(browser, "PACKAGES", {})
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setattr(browser.importlib.util, "find_spec", lambda name: name != "playwright" or None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{absent} install it with"):
        browser.needed()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"{absent} install it with"):
        browser.needed()
