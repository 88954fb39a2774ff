"""A release over real HTTP: what the Hub holds afterwards, and what is not sent a second time."""

import json
import re

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.release.release import describe_pushed
from tests.helpers import hub
from tests.helpers.hub_release import CARD, CONFIG, MESSAGE, contents, in_process, release, shard, write_folder

MODES = {"lfs": {}, "parts": {"part_size": 25_000}, "xet": {"xet": True}}
WRITES = "^(POST|PUT|DELETE) "


@pytest.fixture(params=MODES)
def server(request, tmp_path, monkeypatch):
    options = MODES[request.param]
    with hub.running(tmp_path / "hub", **options) as running:
        in_process(monkeypatch, tmp_path, xet="xet" in options)
        yield running


@pytest.fixture
def lfs(tmp_path, monkeypatch):
    with hub.running(tmp_path / "hub") as running:
        in_process(monkeypatch, tmp_path)
        yield running


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def on_hub(server, name="me/x", revision="main"):
    files = server.files(name, revision)
    del files[".gitattributes"]
    return files


def write_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))


def change(folder):
    write_config(folder, norm_align_target=2.0)


def test_a_new_repository(server, folder):
    pushed = release(server, folder)
    repository = server.repositories["model", "me/x"]
    assert repository.private and pushed.created
    assert on_hub(server) == contents(folder)
    assert server.titles("me/x") == ["initial commit", MESSAGE]
    assert (pushed.commit, pushed.revision) == (repository.refs["refs/heads/main"], "main")
    assert pushed.url == f"{server.address}/me/x" and pushed.private
    assert sorted(pushed.uploaded) == sorted(contents(folder)) and not pushed.unchanged
    puts = server.requests("PUT /_lfs/")  # three files, or three parts of each
    assert len(puts) == (0 if server.xet else 9 if server.storage.part_size else 3)
    assert {row["host"] for row in puts} <= {"localhost"}


def test_the_second_release_sends_nothing(server, folder):
    first = release(server, folder)
    server.log.clear()
    said = []
    second = release(server, folder, said=said)
    assert not server.requests(WRITES)
    assert second.commit == first.commit and not second.created
    assert not second.uploaded and sorted(second.unchanged) == sorted(contents(folder))
    assert said == ["me/x has all 7 files: nothing to upload, so there is no new commit"]


def test_only_what_changed_goes(server, folder):
    release(server, folder)
    server.log.clear()
    change(folder)
    (folder / shard(2, 3)).write_bytes(b"\0other")
    pushed = release(server, folder)
    assert on_hub(server) == contents(folder)
    assert pushed.uploaded == ["config.json", shard(2, 3)] and len(pushed.unchanged) == 5
    assert len(server.requests("PUT /_lfs/")) == (0 if server.xet else 1)


def test_who_sees_it_is_said_before_the_first_byte(lfs, folder):
    for public, seen in ((True, "public"), (False, "private")):
        name, said = f"org/{seen}", []
        pushed = release(lfs, folder, name, public=public, said=said)
        assert said[0] == f"Created {name} ({seen})"
        change(folder)
        again = release(lfs, folder, name, said=said)  # without --public
        assert re.fullmatch(f"Uploading 1 of 7 files, [0-9]+ bytes, to the {seen} repository {name}", said[-1])
        assert lfs.repositories["model", name].private == pushed.private == again.private == (not public)
        assert f"{lfs.address}/{name} ({seen}): 1 files uploaded" in describe_pushed(again)
        write_config(folder)


def test_what_an_earlier_release_left_goes_in_the_same_commit(lfs, folder, tmp_path):
    release(lfs, folder)
    files = lfs.repositories["model", "me/x"].files("main")
    files["photo.png"] = files["model.gguf"] = files["docs/tokenizer.json"] = files["README.md"]
    files["preprocessor_config.json"] = files["adapter_config.json"] = files["config.json"]
    other = write_folder(tmp_path / "again", shards=2)
    (other / "norm_align" / "training.json").rename(other / "norm_align" / "evaluation.json")
    said = []
    pushed = release(lfs, other, said=said)
    old = [shard(1, 3), shard(2, 3), shard(3, 3), "norm_align/training.json"]
    assert pushed.deleted == sorted([*old, "preprocessor_config.json", "adapter_config.json"])
    assert pushed.kept == ["docs/tokenizer.json", "model.gguf", "photo.png"]
    assert set(on_hub(lfs)) == {*contents(other), *pushed.kept}
    for text in (said[-1], describe_pushed(pushed)):
        assert ", ".join(pushed.deleted) in text and "this release no longer has" in text
    assert lfs.titles("me/x") == ["initial commit", MESSAGE, MESSAGE]


LEFT = {  # what somebody may have put on the Hub, whether a release deletes it
    "LICENSE": False,
    "LICENSE-llama.txt": False,
    "NOTICE": False,
    "USE_POLICY.md": False,
    "COPYING": False,
    "norm_align/mynotes.txt": False,
    "norm_align/photos/cat.png": False,
    "norm_align/weights.safetensors": False,
    "additional_chat_templates/notes.md": False,
    "norm_align/norms.png": True,
    "norm_align/diagnosis-base/diagnosis.json": True,
    "additional_chat_templates/tool.jinja": True,
    "recipe.yaml": True,
}


def test_what_is_deleted_and_what_is_not(lfs, folder):
    release(lfs, folder)
    files = lfs.repositories["model", "me/x"].files("main")
    files |= {name: files["config.json"] for name in LEFT}
    pushed = release(lfs, folder)
    assert pushed.deleted == sorted(name for name, deleted in LEFT.items() if deleted)
    assert pushed.kept == sorted(name for name, deleted in LEFT.items() if not deleted)
    assert set(on_hub(lfs)) == {*contents(folder), *pushed.kept}


def test_a_gitignore_there_leaves_nothing_out(lfs, folder):
    release(lfs, folder)
    files = lfs.repositories["model", "me/x"].files("main")
    files[".gitignore"] = {**files["config.json"], "data": b"*.safetensors\nnorm_align/\n"}
    change(folder)
    (folder / shard(1, 3)).write_bytes(b"\0other")
    (folder / "norm_align" / "training.json").write_text("{}")
    assert len(release(lfs, folder).uploaded) == 3  # and check_remote finds them
    assert lfs.files("me/x")[shard(1, 3)] == b"\0other"


def test_a_pull_request(server, folder):
    release(server, folder)
    before = on_hub(server)
    assert release(server, folder, create_pr=True).pull_request is None  # nothing changed
    assert not server.repositories["model", "me/x"].discussions
    change(folder)
    pushed = release(server, folder, create_pr=True)
    assert pushed.pull_request == f"{server.address}/me/x/discussions/1"
    assert pushed.revision == "refs/pr/1" and pushed.uploaded == ["config.json"]
    assert on_hub(server) == before and on_hub(server, revision="refs/pr/1") == contents(folder)
    again = release(server, folder, create_pr=True)  # it is open already
    assert (again.pull_request, again.commit, again.uploaded) == (pushed.pull_request, pushed.commit, [])
    change(folder)
    (folder / "generation_config.json").write_text("{}")
    release(server, folder, revision="refs/pr/1")  # more commits to it
    assert on_hub(server, revision="refs/pr/1") == contents(folder) and on_hub(server) == before


def test_no_second_pull_request_when_the_list_of_them_fails_once(lfs, folder):
    release(lfs, folder)
    change(folder)
    lfs.fault("GET .*/discussions", skip=1, status=503)  # before the upload they are listed, too
    lfs.fault("POST .*/commit/", lost=True)
    pushed = release(lfs, folder, create_pr=True)
    lfs.fault("GET .*/discussions", status=503)
    assert release(lfs, folder, create_pr=True).pull_request == pushed.pull_request
    assert list(lfs.repositories["model", "me/x"].discussions) == [1]


@pytest.mark.parametrize("xet", [False, True])
def test_a_pull_request_of_somebody_else(tmp_path, folder, monkeypatch, xet):
    with hub.running(tmp_path / "hub", xet=xet) as server:
        in_process(monkeypatch, tmp_path, xet)
        release(server, folder, public=True)
        (folder / shard(1, 3)).write_bytes(b"\0better")
        pushed = release(server, folder, token="hf_other", create_pr=True)
        assert server.repositories["model", "me/x"].discussions[1]["author"] == {"name": "stranger"}
        assert on_hub(server, revision=pushed.revision)[shard(1, 3)] == b"\0better"
        assert len(server.titles("me/x")) == 2


def test_a_branch_is_made(lfs, folder):
    pushed = release(lfs, folder, revision="paper/v1")
    assert pushed.revision == "paper/v1" and pushed.url.endswith("/me/x/tree/paper/v1") and pushed.created
    assert on_hub(lfs) == {} and on_hub(lfs, revision="paper/v1") == contents(folder)
    change(folder)
    assert release(lfs, folder, revision="paper/v1").uploaded == ["config.json"]
    assert release(lfs, folder, revision="v2").commit == lfs.repositories["model", "me/x"].refs["refs/heads/v2"]
    assert on_hub(lfs) == {} and on_hub(lfs, revision="v2") == contents(folder)


def test_a_branch_with_the_files_of_main_is_made_without_a_commit(lfs, folder):
    first = release(lfs, folder)
    pushed = release(lfs, folder, revision="v1")
    assert (pushed.commit, pushed.uploaded, pushed.created) == (first.commit, [], False)
    assert lfs.repositories["model", "me/x"].refs["refs/heads/v1"] == first.commit


ANOTHER = {
    "type": ({"model_type": "llava"}, "model_type is 'llava' there and 'llava_norm_align' here"),
    "width": (
        {"text_config": {**CONFIG["text_config"], "hidden_size": 64}},
        "text_config.hidden_size is 64 there and",
    ),
    "layers": ({"vision_config": {"num_hidden_layers": 3}}, "vision_config.num_hidden_layers is 3"),
    "words": ({"text_config": {"vocab_size": 65}}, "text_config.vocab_size is 65"),
    "list": ({"text_config": [1]}, "its config.json is no model's"),
}


@pytest.mark.parametrize("case", ANOTHER)
def test_another_model_is_there(lfs, folder, tmp_path, case):
    fields, said = ANOTHER[case]
    other = write_folder(tmp_path / "other", shards=2, **fields)
    (other / "vocab.json").write_text("{}")
    (other / "notes.txt").write_text("by hand")
    release(lfs, other)
    before = on_hub(lfs)
    lfs.log.clear()
    with pytest.raises(InputError) as error:
        release(lfs, folder)
    assert "me/x on the Hub holds another model: " + said in str(error.value) and "--overwrite" in str(error.value)
    assert on_hub(lfs) == before and not lfs.requests(WRITES)
    pushed = release(lfs, folder, overwrite=True)
    assert on_hub(lfs) == {**contents(folder), "notes.txt": b"by hand"} and pushed.kept == ["notes.txt"]
    assert {shard(1, 2), shard(2, 2), "vocab.json"} <= set(pushed.deleted)
    assert lfs.titles("me/x") == ["initial commit", MESSAGE, MESSAGE]


def test_weights_without_a_config_are_another_model(lfs, folder):
    release(lfs, folder)
    repository = lfs.repositories["model", "me/x"]
    del repository.files("main")["config.json"]
    with pytest.raises(InputError, match=r"has weights \(model-00001-of-00003.safetensors\) and no config.json"):
        release(lfs, folder)
    assert "config.json" in release(lfs, folder, overwrite=True).uploaded


BY_HAND = "---\nlicense: mit\n---\n\nMy own words.\n"
READMES = {  # what is there, whether it is kept from a generated card
    BY_HAND: True,
    "no front matter": True,
    "---\nlicense: [\n---\nbroken": True,
    "---\nlicense: mit\n---\n": False,
    "---\ntags:\n- generated_from_trainer\n- trl\n---\n# Model card\n": False,
    CARD.replace("A model", "An older card"): False,
}


@pytest.mark.parametrize("readme", READMES)
def test_a_readme_that_is_there(lfs, folder, readme):
    release(lfs, folder)
    files = lfs.repositories["model", "me/x"].files("main")
    files["README.md"] = {**files["README.md"], "data": readme.encode(), "oid": "0" * 40, "size": len(readme)}
    if READMES[readme]:
        with pytest.raises(InputError, match="README.md that somebody wrote by hand"):
            release(lfs, folder)
        assert lfs.files("me/x")["README.md"] == readme.encode()
    release(lfs, folder, overwrite=READMES[readme])
    assert lfs.files("me/x")["README.md"] == CARD.encode()


def test_a_readme_by_hand_replaces_one_by_hand(lfs, folder):
    (folder / "README.md").write_text(BY_HAND)
    release(lfs, folder)
    (folder / "README.md").write_text(BY_HAND + "More.\n")
    assert release(lfs, folder).uploaded == ["README.md"]
