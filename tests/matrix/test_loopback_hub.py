"""The loopback Hub of these tests, used by huggingface_hub itself where no other test goes."""

import pytest
from huggingface_hub import CommitOperationDelete, HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import get_session

from tests.helpers import hub
from tests.helpers.hub_release import in_process

SPACE = "---\nsdk: {sdk}\nemoji: {emoji}\ncolorFrom: red\ncolorTo: blue\n---\n"


@pytest.fixture
def server(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path)
    with hub.running(tmp_path / "hub") as running:
        yield running


def user(server, token="hf_write"):
    return HfApi(endpoint=server.address, token=token)


def put(api, name, path, content, kind="model", **options):
    return api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=name, repo_type=kind, **options)


def test_private_and_gated(server, tmp_path):
    me, stranger, nobody = user(server), user(server, "hf_other"), user(server, False)
    me.create_repo("me/base", private=True)
    put(me, "me/base", "config.json", b"{}")
    for other in (stranger, nobody):
        with pytest.raises(RepositoryNotFoundError):
            other.model_info("me/base")
    assert not list(stranger.list_models(author="me")) and len(list(me.list_models(author="me"))) == 1
    me.update_repo_settings("me/base", private=False, gated="manual")
    assert nobody.model_info("me/base").gated == "manual"
    for other in (stranger, nobody):
        with pytest.raises(GatedRepoError):
            other.hf_hub_download("me/base", "config.json", local_dir=tmp_path / "a")
    server.repositories["model", "me/base"].granted.add("stranger")
    assert stranger.hf_hub_download("me/base", "config.json", local_dir=tmp_path / "a")


def test_a_space(server):
    me = user(server)
    with pytest.raises(ValueError, match="space_sdk"):
        me.create_repo("me/demo", repo_type="space")
    me.create_repo("me/demo", repo_type="space", space_sdk="gradio")
    assert me.space_info("me/demo").sdk == "gradio"
    for sdk, emoji in [("unknown", "🏢"), ("gradio", "a")]:
        with pytest.raises(ValueError, match="Invalid metadata"):
            put(me, "me/demo", "README.md", SPACE.format(sdk=sdk, emoji=emoji).encode(), "space")
    put(me, "me/demo", "README.md", SPACE.format(sdk="gradio", emoji="🧪").encode(), "space")
    put(me, "me/demo", "weights.bin", b"\0" * 100, "space")
    files = {file.path: file for file in me.list_repo_tree("me/demo", repo_type="space")}
    assert files["weights.bin"].lfs.size == 100 and files["README.md"].lfs is None
    assert ("model", "me/demo") not in server.repositories


def test_branches_tags_and_pull_requests(server):
    me = user(server)
    me.create_repo("me/x")
    first = put(me, "me/x", "a.txt", b"1").oid
    me.create_tag("me/x", tag="v1")
    me.create_branch("me/x", branch="next")
    with pytest.raises(HfHubHTTPError, match="409"):
        me.create_branch("me/x", branch="next")
    request = put(me, "me/x", "a.txt", b"2", create_pr=True)
    assert server.files("me/x")["a.txt"] == b"1"
    me.change_discussion_status("me/x", request.pr_num, new_status="open")
    me.merge_pull_request("me/x", request.pr_num)
    assert server.files("me/x")["a.txt"] == b"2" and server.files("me/x", "v1")["a.txt"] == b"1"
    refs = me.list_repo_refs("me/x", include_pull_requests=True)
    assert [tag.target_commit for tag in refs.tags] == [first]
    assert {branch.name for branch in refs.branches} == {"main", "next"} and len(refs.pull_requests) == 1
    assert [commit.title for commit in me.list_repo_commits("me/x")] == server.titles("me/x")[::-1]
    me.delete_repo("me/x")
    assert not server.repositories


def test_what_a_commit_may_not_do(server):
    me = user(server)
    me.create_repo("me/x")
    old = me.model_info("me/x").sha
    put(me, "me/x", "a.txt", b"1")
    with pytest.raises(HfHubHTTPError, match="412"):
        put(me, "me/x", "a.txt", b"2", parent_commit=old)
    with pytest.raises(HfHubHTTPError, match="404"):
        me.create_commit("me/x", [CommitOperationDelete("b.txt")], commit_message="b")
    address = f"{server.address}/api/models/me/x/commit/main"
    header = '{"key": "header", "value": {"summary": "a"}}\n'
    file = '{"key": "lfsFile", "value": {"path": "a.bin", "algo": "sha256", "oid": "%s", "size": 1}}' % (64 * "0")
    answer = get_session().post(address, content=header + file, headers={"authorization": "Bearer hf_write"})
    assert answer.status_code == 400 and "missing file" in answer.json()["error"]


def test_the_storage(server):
    me = user(server)
    me.create_repo("me/x", private=False)
    put(me, "me/x", "a.bin", bytes(range(10)))
    address = f"{server.address}/me/x/resolve/main/a.bin"
    ranged = get_session().get(address, headers={"range": "bytes=2-4"})
    assert ranged.status_code == 206 and ranged.content == bytes([2, 3, 4])
    place = get_session().get(address, follow_redirects=False).headers["location"]
    assert place.startswith("http://localhost:")
    assert get_session().get(place, headers={"authorization": "Bearer hf_write"}).status_code == 400
    assert get_session().put(place, content=b"other").status_code == 400
    assert server.files("me/x")["a.bin"] == bytes(range(10))
