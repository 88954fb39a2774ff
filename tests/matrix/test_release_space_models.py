"""Which models a Space is put up for: those that the page can show, at the revision that is named."""

import json

import pytest

pytest.importorskip("gradio")

import yaml
from huggingface_hub import HfApi

from llava_norm_align.common.errors import InputError
from tests.helpers.hub_release import CONFIG
from tests.matrix.test_release import program
from tests.matrix.test_release_space import put_up, server

__all__ = ["server"]
CONFIGS = {  # of the repositories below
    "me/x": CONFIG,
    "me/two": CONFIG | {"text_config": {}},
    "me/control": CONFIG | {"norm_align_type": "none"},
    "me/llava": {"model_type": "llava"},
    "me/qwen": {"model_type": "qwen2_5_vl"},
    "me/gpt": {"model_type": "gpt2"},
    "me/own": {"model_type": "my_vlm", "auto_map": {"AutoModelForImageTextToText": "modeling_my.My"}},
    "me/untyped": {"model_type": ["llava"]},
    "me/list": [],
}


@pytest.fixture
def api(server):
    return HfApi(endpoint=server.address, token="hf_write")


@pytest.fixture
def commits(api):
    """The commit of each model on the Hub; me/x has an older one, of a stock llava, as the tag `stock`."""
    found = {}
    for name, config in CONFIGS.items():
        api.create_repo(name)
        put(api, name, "model.safetensors", b"0" * 9)
        if name == "me/x":
            put(api, name, "config.json", json.dumps(CONFIGS["me/llava"]).encode())
            api.create_tag(name, tag="stock")
        found[name] = put(api, name, "config.json", json.dumps(config).encode())
    return found


def put(api, name, path, data):
    return api.upload_file(path_or_fileobj=data, path_in_repo=path, repo_id=name).oid


def refused(server, message, **options):
    with pytest.raises(InputError, match=message) as error:
        put_up(server, **options)
    assert ("space", "me/show") not in server.repositories and str(error.value).count("\n") == 0
    return str(error.value)


@pytest.mark.parametrize("name", ["model", "base"])
@pytest.mark.parametrize("value", ["me/x@", "@v1"])
def test_an_empty_revision_is_refused(server, commits, name, value):
    refused(server, f"{value} names no model or no revision. Write ID@REVISION", **{name: value})


def test_what_is_no_id_of_the_hub_is_refused(server, commits, tmp_path):
    for value in (str(tmp_path), "gpt2", "me/x@v1@v2/3 4", "https://huggingface.co/me/x"):
        refused(server, "no model on the Hub|has no revision", model=value)


def test_a_model_or_revision_that_is_not_there_is_named(server, commits):
    refused(server, r"The Hub has no model me/none, .* \(--model\)", model="me/none")
    refused(server, r"The Hub has no model me/none, .* \(--base\)", base="me/none@main")
    said = refused(server, r"me/x on the Hub has no revision deadbeef \(--model\)\. Write a", model="me/x@deadbeef")
    assert "me/show" not in said and "--revision" not in said
    refused(server, r"me/llava on the Hub has no revision v1 \(--base\)", base="me/llava@v1")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "model",
            "me/llava",
            "--model me/llava is a llava without a norm .* norm-aligned one was expected",
        ),
        ("model", "me/x@stock", "--model me/x@stock is a llava .* `llava-norm-align convert`"),
        ("model", "me/untyped", "is a None without a norm"),
        ("base", "me/gpt", "--base me/gpt has the model type gpt2 .* vision-language"),
        ("base", "me/own", "--base me/own has the model type my_vlm"),
        ("base", "me/list", "model type None"),
        ("base", "me/x", "--base me/x has a norm after its projector"),
        ("base", "me/two", "--base me/two has a norm after its projector"),
        ("model", "me/control", "--model me/control is a llava_norm_align without a norm"),
    ],
)
def test_models_that_the_page_cannot_show_are_refused(server, commits, option, value, message):
    refused(server, message, **{option: value})


def test_models_that_lack_a_file_are_refused(server, api, commits):
    lacking = api.delete_file("model.safetensors", "me/x").oid
    refused(server, f"--model me/x has no weights such as model.safetensors at {lacking[:12]}", model="me/x")
    api.delete_file("config.json", "me/llava")
    refused(server, "--base me/llava has no config.json", model=f"me/x@{commits['me/x']}", base="me/llava")
    put_up(server, model=f"me/x@{commits['me/x']}", base="me/qwen")  # of the commit before, which is whole


def test_a_gated_model_is_told(server, api, commits):
    server.repositories["model", "me/llava"].gated = "manual"
    assert any("me/llava is gated: the Space needs a token" in line for line in put_up(server, base="me/llava")[1])
    with pytest.raises(InputError, match="me/llava is gated, and this token's account may not read it"):
        put_up(server, "stranger/show", token="hf_other", base="me/llava")


def test_two_revisions_of_one_model_are_shown(server, commits):
    put_up(server, model="me/x", base="me/x@stock")
    front = yaml.safe_load(server.files("me/show", type="space")["README.md"].decode().split("---\n")[1])
    assert front["models"] == ["me/x"]


def test_a_check_looks_at_the_models_and_needs_no_token(server, commits, tmp_path):
    words = ("release", "--space", "me/show", "--check", "--out", tmp_path / "space", "--model")
    code, out, err = program(server, tmp_path, *words, "me/llava", HF_TOKEN="")
    assert (code, out) == (2, "") and "norm-aligned one was expected" in err and err.count("\n") == 1
    assert not (tmp_path / "space").exists()
    code, out, err = program(server, tmp_path, *words, "me/x", HF_TOKEN="")
    assert code == 0 and (tmp_path / "space" / "app.py").is_file(), err
    assert ("space", "me/show") not in server.repositories
