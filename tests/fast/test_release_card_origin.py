"""The license and the base model that a card names, and a README.md that lies in the folder already."""

import json
import logging
import shutil
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, constants, utils

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.results import write_json
from llava_norm_align.conversion.convert import convert
from llava_norm_align.release import card_license
from llava_norm_align.release.card import MARK, build_card, check_card, validate_card_online
from tests.helpers.convert import tiny_llava
from tests.helpers.release_card import (
    REPO,
    add_training,
    build,
    front,
    section,
)

CARD = "---\nlicense: apache-2.0\n---\n\n# A norm-aligned model\n"
STOCK = "---\nlicense: llama2\nlanguage: en\n---\n# Stock LLaVA\n"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("card")
    convert(str(tiny_llava(root / "stock")), root / "model", report=False)
    return root / "model"


@pytest.fixture
def folder(converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(converted, tmp_path / "model")


def asked(monkeypatch, cards):
    """The Hub, which has `cards`: id to front matter."""
    seen = []

    def model_info(self, name, timeout=None):
        seen.append(name)
        if name not in cards:
            raise OSError("no such model")
        return type("Info", (), {"card_data": ModelCard(f"---\n{yaml.safe_dump(cards[name])}---\n").data})

    monkeypatch.setattr(HfApi, "model_info", model_info)
    return seen


@contextmanager
def serving(status):
    """A Hub that gives this answer alone."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            if status == 401:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def add_source(folder, source, **more):
    path = folder / "norm_align" / "calibration.json"
    write_json(path, json.loads(path.read_text()) | {"source": source, "source_on_hub": None} | more)


def test_an_unknown_license_is_asked_for(folder):
    with pytest.raises(InputError, match="license of .* is not known.* --license apache-2.0"):
        build(folder, license=None)


def test_the_license_of_a_local_base(folder, tmp_path):
    """Over the folder that the training started from, which has no card, to the stock one."""
    aligned = shutil.copytree(folder, tmp_path / "aligned")
    stock = tmp_path / "stock"
    stock.mkdir()
    (stock / "README.md").write_text("---\nlicense: llama3.2\nlanguage: [en, de]\n---\n# Stock\n")
    add_source(aligned, "stock")
    add_training(folder, model=str(aligned))
    card = build(folder, license=None)
    assert front(card)["license"] == "llama3.2" and front(card)["language"] == ["en", "de"]
    assert "base_model" not in front(card) and str(tmp_path) not in card.text
    assert "license llama3.2, from the README.md of stock" in card.notes
    assert front(build(folder, license="mit"))["license"] == "mit"
    assert front(build(folder, license="mit", language=["fr"]))["language"] == ["fr"]


def test_the_license_of_a_base_on_the_hub(folder, monkeypatch):
    seen = asked(monkeypatch, {"owner/base": {"license": "gemma"}})
    add_source(folder, "owner/base", source_on_hub=True)
    card = build(folder, license=None)
    assert (front(card)["license"], front(card)["base_model"]) == ("gemma", "owner/base")
    assert "[owner/base](https://huggingface.co/owner/base)" in card.text and seen == ["owner/base"]


def test_offline_a_base_on_the_hub_gives_no_license(folder, monkeypatch):
    asked(monkeypatch, {})
    add_source(folder, "owner/base", source_on_hub=True)
    with pytest.raises(InputError, match=r"is not known: the Hub could not be asked .*owner/base \(OSError\)\. Pass"):
        build(folder, license=None)
    assert front(build(folder))["base_model"] == "owner/base"


def test_a_hub_that_answers_503_and_a_base_that_is_private(folder, monkeypatch):
    """Not that no card says it: nobody could look."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    new_session = getattr(utils, "close_session", None) or utils.reset_sessions  # 1.x or 0.x
    new_session()
    for status in (503, 401):
        with serving(status) as address:
            monkeypatch.setattr(card_license, "HfApi", lambda address=address: HfApi(endpoint=address, token="hf_x"))
            with pytest.raises(InputError, match=rf"could not be asked .*owner/base \(\w+, status {status}\)"):
                build(folder, license=None, base_model="owner/base")
    monkeypatch.undo()
    new_session()


def test_a_name_that_may_have_been_a_folder_is_no_base_model(folder, monkeypatch):
    """out/aligned has the form of an id on the Hub."""
    add_source(folder, "out/aligned")
    asked(monkeypatch, {})
    card = build(folder)
    assert "base_model" not in front(card) and any("base_model is left out" in note for note in card.notes)
    seen = asked(monkeypatch, {"out/aligned": {"license": "mit"}})
    assert front(build(folder))["base_model"] == "out/aligned" and seen == ["out/aligned"]
    add_source(folder, "out/aligned", source_on_hub=False)
    assert "base_model" not in front(build(folder)) and seen == ["out/aligned"]


def test_a_base_in_the_cache_of_the_hub(folder, monkeypatch):
    asked(monkeypatch, {"owner/base": {"license": "mit"}})
    add_source(folder, "/home/annika/.cache/huggingface/hub/models--owner--base/snapshots/0a1b")
    card = build(folder, license=None)
    assert (front(card)["license"], front(card)["base_model"]) == ("mit", "owner/base") and "annika" not in card.text


def test_base_model_as_it_is_given(folder, monkeypatch):
    asked(monkeypatch, {"owner/base": {"license": "mit"}})
    card = build(folder, license=None, base_model="owner/base")
    assert (front(card)["license"], front(card)["base_model"]) == ("mit", "owner/base")
    for name in ("/home/annika/base", "base", "a/b/c", "out/../x", ""):
        with pytest.raises(InputError, match="--base-model is .*id of a model on the Hub"):
            build(folder, base_model=name)


@pytest.mark.parametrize("name", ["no-slash", "a/b/c", "a/b c", "a/--b", "../x", "a/b\n"])
def test_a_name_that_the_hub_does_not_take(folder, name):
    with pytest.raises(InputError, match="no name of a model on the Hub"):
        build_card(folder, repo_id=name, license="mit")


def test_licenses_without_an_identifier(folder, monkeypatch):
    for wrong in ("other", " ", "Other"):
        with pytest.raises(InputError, match="names no license"):
            build(folder, license=wrong)
    with pytest.raises(InputError, match="My License 1.0.*there is no LICENSE"):
        build(folder, license="My License 1.0")
    (folder / "LICENSE.txt").write_text("You may.")
    told = front(build(folder, license="My License 1.0"))
    assert (told["license"], told["license_name"], told["license_link"]) == ("other", "my-license-1.0", "LICENSE.txt")
    assert front(build(folder, license="Apache-2.0"))["license"] == "apache-2.0"
    for base, link in (("LICENSE.txt", "LICENSE.txt"), ("LICENSE", "https://huggingface.co/owner/base/blob/main/LICENSE"),
                       ("https://example.org/l", "https://example.org/l")):  # fmt: skip
        asked(monkeypatch, {"owner/base": {"license": "other", "license_name": "house", "license_link": base}})
        told = front(build(folder, license=None, base_model="owner/base"))
        assert (told["license"], told["license_name"], told["license_link"]) == ("other", "house", link)
    for unknown in ({"license": "unknown"}, {"license": "other"}, {"license": "made-up"}, {"license": 3}, {}):
        asked(monkeypatch, {"owner/base": unknown})
        with pytest.raises(InputError, match="is not known"):
            build(folder, license=None, base_model="owner/base")


def test_the_list_of_licenses():
    assert {"apache-2.0", "llama3.2", "gemma", "other"} < card_license.LICENSES and len(card_license.LICENSES) == 83


# Cards by hand


def test_the_card_of_the_base_model_does_not_go_up(folder):
    """convert copies it beside the model."""
    (folder / "README.md").write_text(STOCK)
    add_source(folder, "owner/base", source_on_hub=False)
    card = build(folder, license=None)
    assert front(card)["license"] == "llama2" and front(card)["language"] == ["en"] and "Stock LLaVA" not in card.text
    assert any("README.md" in note and "base model's card" in note for note in card.notes)


def test_a_readme_is_the_base_models_only_if_it_may_be(folder, tmp_path, caplog):
    """Known where the base's folder is here, over all steps; else a word on this model tells one by hand."""
    stock, aligned = tmp_path / "stock", shutil.copytree(folder, tmp_path / "aligned")
    stock.mkdir()
    (folder / "README.md").write_text(STOCK)
    add_source(aligned, "stock")
    add_training(folder, model=str(aligned))
    for text in (None, STOCK + "More."):  # it has another one, or none
        (stock / "README.md").write_text(text) if text else None
        card = build(folder, license=None)
        assert card.text == STOCK and "written by hand" in card.notes[0]
    (stock / "README.md").write_text(STOCK)
    card = build(folder, license=None)
    assert "Stock" not in card.text and any(
        "README.md in /" in n and "is the base model's card" in n for n in card.notes
    )
    shutil.rmtree(stock)
    (aligned / "norm_align" / "calibration.json").unlink()
    add_training(folder, model="gone")
    card = build(folder, license=None)
    [note] = [n for n in card.notes if "README.md in /" in n]
    assert "Stock" not in card.text and f"names neither norm-align nor {REPO}" in note and "is taken for" in note
    (folder / "README.md").write_text(STOCK + f"This is {REPO}.\n")
    assert build(folder, license=None).text.endswith(f"This is {REPO}.\n")
    (folder / "README.md").write_text("# Stock LLaVA\n")
    caplog.set_level(logging.WARNING)
    assert "Stock" not in build(folder).text and caplog.records == []


def test_the_card_of_a_trainer_does_not_go_up(folder):
    """transformers writes one that knows nothing of the norm."""
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [generated_from_trainer]\n---\n# out\n")
    assert MARK in build(folder).text


@pytest.mark.parametrize("mark", ["", MARK, "norm-align"])
def test_broken_front_matter_is_never_replaced(folder, mark):
    (folder / "README.md").write_text(f"---\nlicense: [mit\n---\n# Trained by me with love\n{mark}")
    with pytest.raises(InputError, match="no YAML at line 2 of .*README.md"):
        build(folder)


def test_a_card_that_was_made_is_made_anew(folder):
    (folder / "README.md").write_text(build(folder, license="mit").text)
    add_training(folder)
    card = build(folder, license=None)
    assert front(card)["license"] == "mit" and section(card, "Training")


def test_a_card_by_hand_is_kept(folder):
    (folder / "README.md").write_text(CARD)
    card = build(folder, license=None)
    assert card.text == CARD and "by hand" in card.notes[0]
    build(folder)
    for options in ({"license": "mit"}, {"base_model": "a/b"}, {"language": ["en"]}):
        with pytest.raises(InputError, match="was written by hand, says"):
            build(folder, **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# norm-align\n", "without front matter"),
        ("---\nlicense: mit\n\n# norm-align\n", "has no end"),
        ("---\nlicense: mit\ntags: [a\nb: c\n---\n# norm-align\n", "line 4 of .*README.md"),
        ("\n---\nlicense: mit\na: b: c\n---\n# norm-align\n", "line 4 of .*README.md: mapping values"),
        ("---\n- mit\n---\n# norm-align\n", "is a list, but fields were expected"),
        ("---\n---\n# norm-align\n", "front matter"),
        ("---\ntitle: x\n---\n# norm-align\n", "has no license"),
        ("---\nlicense: [mit, 3]\n---\n# norm-align\n", "license holds 3"),
        ("---\nlicense: my-own\n---\n# norm-align\n", "'my-own', which the Hub does not know"),
        ("---\nlicense: other\n---\n# norm-align\n", "license_name does not say which"),
        ("---\nlicense: other\nlicense_name: My One\n---\n# norm-align\n", "license_name is 'My One'"),
        ("---\nlicense: mit\nlanguage: english\n---\n# norm-align\n", "language is 'english'"),
        ("---\nlicense: mit\nlanguage:\n---\n# norm-align\n", "language has no value"),
        ("---\nlicense: mit\ntags: llava\n---\n# norm-align\n", "tags is 'llava'"),
        ("---\nlicense: mit\nbase_model: /home/x\n---\n# norm-align\n", "base_model is '/home/x'"),
        ("---\nlicense: mit\npipeline_tag: [a]\n---\n# norm-align\n", "pipeline_tag is"),
        ("---\nlicense: mit\nlibrary_name: 3\n---\n# norm-align\n", "library_name is 3"),
        ("---\nlicense: mit\nwhen: 2020-99-99\n---\n# norm-align\n", "no YAML: month must be"),
        ("---\nlicense: mit\nmodel-index: 3\n---\n# norm-align\n", "model-index is no list"),
        ("---\nlicense: mit\nmodel-index: [{name: a}]\n---\n# norm-align\n", "model-index lacks 'results'"),
    ],
)  # fmt: skip
def test_a_broken_card_by_hand_is_one_error(folder, text, words):
    (folder / "README.md").write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        build(folder, license=None)
    assert "\n" not in str(caught.value) and str(folder / "README.md") in str(caught.value)


@pytest.mark.parametrize(
    ("dataset", "metric", "words"),
    [
        ("{type: a b, name: x}", "{type: acc, value: 1}", "type of a dataset .* 'a b'"),
        ("{type: a, name: x}", "{type: acc, value: .nan}", "value in model-index is nan"),
        ("{type: a, name: x}", "{type: acc, value: [1]}", r"value in model-index is \[1\]"),
        ("{type: a}", "{type: acc, value: 1}", "name"),
        ("{type: a, name: x}", "{type: acc, value: 0.5}", None),
    ],
)
def test_scores_in_the_front_matter(dataset, metric, words):
    entry = f"{{name: m, results: [{{task: {{type: t}}, dataset: {dataset}, metrics: [{metric}]}}]}}"
    text = CARD.replace("---\n\n", f"model-index: [{entry}]\n---\n\n")
    if words is None:
        check_card(text)
        return
    with pytest.raises(InputError, match=words):
        check_card(text)


def test_a_readme_that_is_no_utf8(folder):
    (folder / "README.md").write_bytes(b"---\nlicense: mit\n---\n\xff norm-align")
    with pytest.raises(InputError, match="README.md is not UTF-8"):
        build(folder)


def test_a_stock_model_has_no_such_card(tmp_path):
    with pytest.raises(InputError, match="is a llava, but a norm-aligned model was expected"):
        build(tiny_llava(tmp_path / "stock"))


def test_the_hubs_validator(monkeypatch):
    monkeypatch.setattr(ModelCard, "validate", lambda self: None)
    assert validate_card_online(CARD, REPO) is None

    def refuse(error):
        def validate(self):
            raise error

        monkeypatch.setattr(ModelCard, "validate", validate)

    refuse(ValueError('- Error: "license" must be one of [a]\n- Error: b\n'))
    with pytest.raises(InputError, match='refuses the card of me/my-model: .*"license" must be one of'):
        validate_card_online(CARD, REPO)
    refuse(ValueError(json.dumps({"errors": [{"message": "a wrong"}, {"message": "b wrong"}], "warnings": []})))
    with pytest.raises(InputError, match="refuses the card of me/my-model: a wrong; b wrong. Correct it"):
        validate_card_online(CARD, REPO)
    refuse(ConnectionError("unreachable"))
    assert "cannot be asked" in validate_card_online(CARD, REPO)
    assert "(ConnectionError: unreachable)" in validate_card_online(CARD, REPO)
