"""The check of a release from the Hub: hashes of what it lists, and a fresh process that loads it in either line."""

import importlib.util

import pytest
from huggingface_hub import HfApi

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.release.verify import check_loading, check_remote
from tests.helpers import doctor, hub, lines
from tests.helpers.hub_release import in_process, items_of, release, shard, write_folder


@pytest.fixture
def server(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path)
    with hub.running(tmp_path / "hub") as running:
        yield running


def other_bytes(files):
    first, second = files[shard(1, 3)], files[shard(2, 3)]
    files[shard(1, 3)] = {**first, "sha256": second["sha256"], "oid": second["oid"]}


def shorter(files):
    files[shard(1, 3)] = {**files[shard(1, 3)], "size": 7}


def other_text(files):
    files["config.json"] = {**files["config.json"], "oid": "1" * 40}


def missing(files):
    del files["norm_align/training.json"]


def not_deleted(files):
    files["vocab.json"] = files["config.json"]


WRONG = {
    other_bytes: r"model-00001-of-00003.safetensors has the hash [0-9a-f]{12} there and [0-9a-f]{12} here",
    shorter: "model-00001-of-00003.safetensors has 7 bytes there and 60,000 here",
    other_text: "config.json has the hash 111111111111 there and [0-9a-f]{12} here",
    missing: "norm_align/training.json is missing",
    not_deleted: "vocab.json is still there",
}


@pytest.mark.parametrize("change", WRONG)
def test_the_hub_has_something_else(server, tmp_path, change):
    folder, api = write_folder(tmp_path / "model"), HfApi(endpoint=server.address, token="hf_write")
    pushed = release(server, folder)
    pushed.deleted.append("vocab.json")
    check_remote(api, pushed, items_of(folder))
    change(server.repositories["model", "me/x"].files("main"))
    with pytest.raises(CheckFailed, match=f"me/x at {pushed.commit[:12]} is not what was uploaded: {WRONG[change]}"):
        check_remote(api, pushed, items_of(folder))


def test_a_file_that_changed_here_meanwhile(server, tmp_path):
    folder = write_folder(tmp_path / "model")
    pushed, items = release(server, folder), items_of(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckFailed, match="config.json has [0-9]+ bytes there and 2 here"):
        check_remote(HfApi(endpoint=server.address, token="hf_write"), pushed, items)


def test_nobody_answers(server, tmp_path):
    folder = write_folder(tmp_path / "model")
    pushed = release(server, folder)
    with pytest.raises(InputError, match="The upload is there, and was not checked."):
        check_remote(HfApi(endpoint="http://127.0.0.1:9", token="hf_write"), pushed, items_of(folder))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A private model that loads, as a branch beside an empty main, and its processor."""
    folder = tmp_path_factory.mktemp("released")
    doctor.sound(folder / "model")
    with pytest.MonkeyPatch.context() as monkeypatch, hub.running(folder / "hub") as server:
        in_process(monkeypatch, folder)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # of the fresh process
        yield server, folder / "model", release(server, folder / "model", revision="paper")


@pytest.mark.parametrize("line", ["4", "5"])
def test_it_loads_alone(released, line):
    server, _, pushed = released
    server.log.clear()
    api = HfApi(endpoint=server.address, token="hf_write")
    result = check_loading(api, "me/x", pushed.commit, python=lines.PYTHONS[line], weights=True)
    assert result["transformers"].startswith(line)
    assert result["config"] == "LlavaNormAlignConfig" and result["processor"] == "LlavaProcessor"
    assert {"LlavaNormAlignForConditionalGeneration", "LlavaNormAlignModel"} <= set(result["classes"])
    assert isinstance(result["answer"], str) and result["note"] == ""
    fetched = {row["path"].rpartition("/")[2] for row in server.requests(f"GET .*/{pushed.commit}/")}
    assert {"config.json", "modeling_llava_norm_align.py", "tokenizer.json", "processor_config.json"} <= fetched
    assert server.requests("GET /_lfs/")  # the caches were empty


def test_without_weights_none_are_fetched(released):
    server, _, pushed = released
    server.log.clear()
    api = HfApi(endpoint=server.address, token="hf_write")
    result = check_loading(api, "me/x", pushed.commit, python=lines.PYTHONS["5"], weights=False)
    assert "answer" not in result and "LlavaNormAlignForConditionalGeneration" in result["classes"]
    assert not server.requests("safetensors|/_lfs/")


def test_code_that_does_not_load(released, tmp_path):
    server, folder, _ = released
    assert importlib.util.find_spec("llava_norm_align")  # it is not to help
    code = folder / "modeling_llava_norm_align.py"
    whole = code.read_text()
    try:
        code.write_text(whole + "\nimport llava_norm_align\n")
        pushed = release(server, folder, "me/broken")
    finally:
        code.write_text(whole)
    api = HfApi(endpoint=server.address, token="hf_write")
    with pytest.raises(CheckFailed) as error:
        check_loading(api, "me/broken", pushed.commit, python=lines.PYTHONS["5"], weights=False)
    assert "me/broken at" in str(error.value) and "llava_norm_align" in str(error.value)
    assert "hf_write" not in str(error.value)
