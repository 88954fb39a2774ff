"""Headless Chromium, and what a visitor does on the page in it."""

import importlib.util
import os
import shutil
from contextlib import contextmanager

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = {"gradio": "app", "playwright": "browser"}  # and the extra that brings each
# Without the sandbox, which root cannot have, and a GPU; the rest keeps Chromium itself from asking other hosts.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
# Notes what a box shows whenever a frame is drawn: a look from outside now and then would miss some of it.
RECORD = """selector => {
    const box = document.querySelector(selector), seen = window.seen = [];
    const look = () => {
        if (box.value !== seen.at(-1)) seen.push(box.value);
        requestAnimationFrame(look);
    };
    look();
}"""
# Counts the answers that have ended, well or not, which may run too short to be seen from outside: by what Gradio lays
# over the box while it waits for one.
COUNT = """(() => {
    window.ended = 0;
    let runs = false;
    const look = () => {
        const over = document.querySelector("#answer-base [data-testid=status-tracker]");
        const running = Boolean(over) && !over.classList.contains("hide") && !over.querySelector(".error");
        if (runs && !running) window.ended += 1;
        runs = running;
    };
    new MutationObserver(look).observe(document, {subtree: true, childList: true, attributes: true});
})()"""
WAIT = 180_000  # milliseconds
ERROR = ".toast-body.error"


def missing():
    """What to install before a browser can be tested, as a sentence; None if all is there."""
    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} is missing; install it with `pip install -e '.[{extra}]'`."
    if not program():
        return "There is no Chromium; install it with `make browser`, or as Debian's package chromium."
    return None


def program():
    """The path of Chromium, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


def needed():
    """Skip the test without a browser; with CI set, fail it: there, a skipped test is one that nobody reads about."""
    sentence = missing()
    if sentence and os.environ.get("CI"):
        pytest.fail(f"{sentence} With CI set, the browser's tests are not skipped.", pytrace=False)
    if sentence:
        pytest.skip(sentence)


@contextmanager
def chromium():
    """A headless Chromium; `needed` goes before."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """One visitor in a context of their own: what they do, see, and what their browser complains of or asks for."""

    def __init__(self, browser, address):
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.page.set_default_timeout(WAIT)
        self.page.add_init_script(COUNT)
        self.errors, self.addresses, self.asked = [], [], 0
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("#question textarea")

    def upload(self, path):
        """Put a picture in the place of the last one, and wait until it is shown."""
        if self.page.locator("#picture img").count():
            self.page.click("#picture button[aria-label='Remove Image']")
            self.page.wait_for_selector("#picture img", state="detached")
        self.page.set_input_files("#picture input[type=file]", str(path))
        self.page.wait_for_selector("#picture img", state="attached")

    def set_tokens(self, number):
        if not self.page.is_visible("#tokens input[type=number]"):
            self.page.click("#settings button")
        self.page.fill("#tokens input[type=number]", str(number))
        self.page.press("#tokens input[type=number]", "Tab")

    def press_ask(self, question):
        self.page.fill("#question textarea", question)
        self.page.click("#ask")
        self.asked += 1

    def wait(self):
        """Until the answers are there, or the error; the answers (base, aligned)."""
        self.page.wait_for_function("asked => window.ended === asked", arg=self.asked)
        return self.texts()

    def texts(self):
        return [self.page.input_value(f"#answer-{name} textarea") for name in ("base", "aligned")]

    def stop(self):
        """Press Stop, and wait until the server has ended the answer: a question before that is not taken."""
        with self.page.expect_response("**/cancel"):
            self.page.click("#stop")
        return self.wait()

    def ask(self, question):
        self.press_ask(question)
        return self.wait()

    def error(self):
        """The sentence of the error that is shown; it is closed."""
        self.page.wait_for_selector(ERROR)
        sentence = self.page.inner_text(f"{ERROR} .toast-message-text")
        self.page.click(f"{ERROR} .toast-close")
        self.page.wait_for_selector(ERROR, state="detached")
        return sentence

    def other_hosts(self, address):
        own = (f"{address}/", f"blob:{address}/", "data:")
        return [url for url in self.addresses if not url.startswith(own)]
