"""A release that may not or cannot go on: one sentence, no secrets, and what the Hub holds is said and true."""

import io
import logging
import re

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.release.card import Card
from llava_norm_align.release.release import _validate
from llava_norm_align.release.upload import Target
from tests.helpers import hub
from tests.helpers.hub_release import MESSAGE, contents, in_process, release, shard, write_folder

UNTOUCHED = "Nothing was created or changed on the Hub."
NEW = "The new repository me/x (private) is there, without the model; files that went up whole are not sent again"
AS_IT_WAS = "me/x is as it was; files that went up whole are not sent again by the same command."


@pytest.fixture
def waits(monkeypatch, tmp_path):
    return in_process(monkeypatch, tmp_path)


@pytest.fixture
def server(tmp_path, waits):
    with hub.running(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model")


def refusal(caplog, *arguments, **options):
    """The message; neither it nor the log has the token, or the signature of an address."""
    said = []
    with pytest.raises(InputError) as error:
        release(*arguments, **options, said=said)
    for text in (str(error.value), *said, caplog.text):
        assert (options.get("token") or "hf_write") not in text and "X-Amz" not in text and "Bearer" not in text
    assert error.value.__context__ is None or error.value.__suppress_context__  # no traceback of a request
    assert "\n" not in str(error.value)
    return str(error.value)


def has_all(message, *parts):
    for part in parts:
        assert part in message, message


NAMES = [
    "x",
    "me/x\ny",
    "me/x/y",
    "me/x--y",
    "me/..x",
    "me/x.git",
    "me/-x",
    "me/" + 97 * "x",
    "me/x y",
    "",
    "https://hf.co/me/x",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_none(server, folder, caplog, name):
    has_all(refusal(caplog, server, folder, name), repr(name), "user/name")
    assert not server.log


REVISIONS = {
    "": "is no name of a branch",
    "a b": "is no name of a branch",
    "../a": "is no name of a branch",
    "a.lock": "is no name of a branch",
    "refs/heads/a": "is no name of a branch",
    "0123456789abcdef0123456789abcdef01234567": "is a commit, which cannot change",
}


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_revision_that_is_none(server, folder, caplog, revision):
    has_all(refusal(caplog, server, folder, revision=revision), revision, REVISIONS[revision])
    assert not server.log


def test_a_revision_that_cannot_change(server, folder, caplog):
    pushed = release(server, folder)
    repository = server.repositories["model", "me/x"]
    repository.refs["refs/tags/v1"] = pushed.commit
    has_all(refusal(caplog, server, folder, revision="v1"), "v1 is a tag of me/x, which stays. Name a branch.")
    has_all(refusal(caplog, server, folder, revision="refs/pr/7"), "no such revision of me/x (404", UNTOUCHED)
    has_all(refusal(caplog, server, folder, revision="v2", create_pr=True), "no such revision of me/x (404", UNTOUCHED)
    has_all(refusal(caplog, server, folder, revision="refs/pr/7", create_pr=True), "Leave one of the two out")
    assert set(repository.refs) == {"refs/heads/main", "refs/tags/v1"}


def test_no_token(server, folder, caplog):
    has_all(refusal(caplog, server, folder, token=None), "there is none", "hf auth login", UNTOUCHED)


def test_a_token_that_is_not_valid(server, folder, caplog):
    message = refusal(caplog, server, folder, token="hf_" + 30 * "a")
    has_all(message, "(401", "hf auth login --force", UNTOUCHED)


@pytest.mark.parametrize("there", [False, True])
def test_a_token_that_may_only_read(server, folder, caplog, there):
    if there:
        release(server, folder)
    count = len(server.repositories)
    has_all(refusal(caplog, server, folder, token="hf_read"), "The token of me may only read.", "settings/tokens")
    assert len(server.repositories) == count


def test_a_role_that_only_the_hub_knows(server, folder, caplog, monkeypatch):
    """As of a fine-grained token: whoami says nothing, and the right to write is asked for."""
    release(server, folder)
    monkeypatch.setattr("llava_norm_align.release.upload_access.check_role", lambda user, target: None)
    has_all(refusal(caplog, server, folder, token="hf_read"), "(403", "Use a token that may write to me/x", UNTOUCHED)
    has_all(refusal(caplog, server, folder, "me/new", token="hf_read"), "(403", "may write to me/new", UNTOUCHED)
    assert set(server.repositories) == {("model", "me/x")}


@pytest.mark.parametrize("name", ["stranger/x", "nobody/x"])
def test_the_name_of_somebody_else(server, folder, caplog, name):
    message = refusal(caplog, server, folder, name)
    has_all(message, f"{name} is not under a name that me may write to (me, org)", "--create-pr", UNTOUCHED)
    assert not server.repositories


def test_a_pull_request_to_nothing(server, folder, caplog):
    has_all(refusal(caplog, server, folder, create_pr=True), "me/x is not on the Hub", UNTOUCHED)
    release(server, folder)  # private
    has_all(refusal(caplog, server, folder, token="hf_other", create_pr=True), "the token may not see it", UNTOUCHED)
    assert not server.repositories["model", "me/x"].discussions


def test_public_counts_for_a_new_one(server, folder, caplog):
    release(server, folder)
    has_all(refusal(caplog, server, folder, public=True), "me/x is there and private", UNTOUCHED)
    assert server.repositories["model", "me/x"].private


def test_a_token_with_a_character_that_no_token_has(server, folder, caplog):
    message = refusal(caplog, server, folder, token="hf_write\N{EURO SIGN}")
    has_all(message, "The token has a character that no token has. Log in with", UNTOUCHED)
    assert not server.log


def test_offline(server, folder, caplog, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    has_all(refusal(caplog, server, folder), "HF_HUB_OFFLINE is set. Unset it", UNTOUCHED)


def test_nobody_answers(server, folder, caplog, waits):
    server.address = "http://127.0.0.1:9"
    has_all(refusal(caplog, server, folder), "http://127.0.0.1:9 could not be reached", "HF_ENDPOINT", UNTOUCHED)
    assert waits == [1, 2, 4, 8]


FAULTS = {  # of the upload of a new repository: request, status, more; what is said; whether the repository is there
    "create": ("POST /api/repos/create", 403, {}, ["(403", "may write to me/x", UNTOUCHED], False),
    "pay": ("POST /api/repos/create", 402, {}, ["(402", "billing", UNTOUCHED], False),
    "conflict": ("POST /api/repos/create", 409, {}, ["me/x is on the Hub (409)", "Nothing of this release"], False),
    "seldom": ("GET /api/whoami", 429, {"times": 9}, ["fewer requests (429", UNTOUCHED], False),
    "ended": ("POST .*/preupload/", 401, {}, ["(401", "hf auth login", NEW], True),
    "gone": ("POST .*/preupload/", 404, {}, ["(404", "me/x is not there", NEW], True),
    "busy": ("POST .*/preupload/", 503, {"times": 9}, ["failed at the upload to me/x (503", "later", NEW], True),
    "limit": ("POST .*/batch", 429, {"times": 9}, ["fewer requests (429", NEW], True),
    "storage": ("PUT /_lfs/", 403, {"times": 9}, ["refused the upload to me/x (403", NEW], True),
    "storage busy": ("PUT /_lfs/", 503, {"times": 99}, ["(503", NEW], True),
    "card": ("POST /api/validate-yaml", 400, {}, ["README.md", NEW], True),
    "bad": ("POST .*/commit/", 400, {}, ["refused the upload to me/x (400", "injected", NEW], True),
    "conflict at the end": ("POST .*/commit/", 409, {}, ["(409", "Something else is changing me/x", NEW], True),
    "commit busy": ("POST .*/commit/", 503, {"times": 9}, ["failed at the upload to me/x (503", NEW], True),
}


@pytest.mark.parametrize("case", FAULTS)
def test_the_hub_refuses(server, folder, caplog, case):
    match, status, more, parts, there = FAULTS[case]
    server.fault(match, status=status, **more)
    has_all(refusal(caplog, server, folder), *parts)
    assert (("model", "me/x") in server.repositories) == there
    if there:
        assert server.titles("me/x") == ["initial commit"]
    server.faults.clear()
    release(server, folder)  # the same command goes on
    assert server.titles("me/x") == ["initial commit", MESSAGE]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(server, folder, waits, status):
    for match in (
        "GET /api/whoami",
        "POST /api/repos",
        "POST .*/preupload",
        "POST .*/batch",
        "PUT ",
        "POST .*/commit",
    ):
        server.fault(match, status=status, headers={"Retry-After": "3"})
    said = []
    release(server, folder, said=said)
    assert server.titles("me/x") == ["initial commit", MESSAGE]
    assert waits == 6 * [4]
    assert said[0] == f"The Hub answered {status}; trying again in 4 s"


def test_how_long_to_wait_by_the_limit_of_the_hub(server, folder, waits):
    server.fault("GET /api/whoami", status=429, headers={"ratelimit": '"api";r=0;t=55'})
    release(server, folder)
    assert waits == [56]


@pytest.mark.parametrize("create_pr", [False, True])
def test_the_answer_to_the_commit_is_lost(server, folder, waits, create_pr):
    release(server, folder)
    (folder / shard(1, 3)).write_bytes(b"\0new")
    server.fault("POST .*/commit/", lost=True)
    said = []
    pushed = release(server, folder, create_pr=create_pr, said=said)
    assert said[-1] == "The answer to the commit was lost; the commit is there"
    assert len(server.requests("POST .*/commit/")) == 2 and not waits
    assert server.titles("me/x", pushed.revision) == ["initial commit", MESSAGE, MESSAGE]
    assert len(server.repositories["model", "me/x"].discussions) == create_pr
    assert (pushed.pull_request is not None) == create_pr and pushed.uploaded == [shard(1, 3)]


def test_nobody_knows_whether_the_pull_request_is_there(server, folder, caplog):
    release(server, folder)
    (folder / shard(1, 3)).write_bytes(b"\0new")
    server.fault("GET .*/discussions", skip=1, status=503, times=99)
    server.fault("POST .*/commit/", lost=True)
    message = refusal(caplog, server, folder, create_pr=True)
    place = f"{server.address}/me/x/discussions"
    has_all(message, "(503", f"Whether the pull request is there is not known: look at {place}, or run again.")
    assert len(server.repositories["model", "me/x"].discussions) == 1


def test_the_connection_ends_before_the_commit(server, folder, waits):
    server.fault("POST .*/commit/", after=10, times=2)
    release(server, folder)
    assert server.titles("me/x") == ["initial commit", MESSAGE] and waits == [1, 2]


def test_nobody_knows_whether_the_commit_is_there(server, folder, caplog):
    def stop():
        server.fault("GET /api/models/me/x", status=503, times=99)

    server.fault("POST .*/commit/", lost=True, call=stop)
    message = refusal(caplog, server, folder)
    has_all(message, f"Whether the commit is there is not known: look at {server.address}/me/x, or run again.")
    assert server.titles("me/x") == ["initial commit", MESSAGE]
    server.faults.clear()
    assert not release(server, folder).uploaded


def test_the_answer_to_create_is_lost(server, folder):
    server.fault("POST /api/repos/create", lost=True)
    assert release(server, folder).created
    assert server.repositories["model", "me/x"].private


@pytest.mark.parametrize("branch", [None, "v1"])
def test_nobody_knows_whether_it_was_created(server, folder, caplog, branch):
    match, what = "POST /api/repos/create", "new repository me/x (private)"
    if branch:
        release(server, folder)
        match, what = "POST .*/branch/", "new branch v1 of me/x"
    server.fault(match, lost=True)
    server.fault(match, status=503, times=9)
    message = refusal(caplog, server, folder, revision=branch)
    has_all(message, "(503", f"Whether the {what} was created is not known: look at {server.address}/me/x.")
    assert UNTOUCHED not in message
    assert f"refs/heads/{branch or 'main'}" in server.repositories["model", "me/x"].refs
    server.faults.clear()
    release(server, folder, revision=branch)
    assert contents(folder).items() <= server.files("me/x", branch or "main").items()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_branch_that_is_refused_was_not_created(server, folder, caplog, fresh):
    if not fresh:
        release(server, folder)
    server.fault("POST .*/branch/", status=403)
    has_all(refusal(caplog, server, folder, revision="v1"), "(403", NEW if fresh else UNTOUCHED)
    assert set(server.repositories["model", "me/x"].refs) == {"refs/heads/main"}


def test_somebody_else_commits_meanwhile(server, folder, caplog):
    release(server, folder)
    repository = server.repositories["model", "me/x"]
    (folder / shard(1, 3)).write_bytes(b"\0new")

    def commit():
        files = dict(repository.files("main"))
        repository.refs["refs/heads/main"] = repository.add_commit(files, "another", [repository.find("main")])

    server.fault("PUT /_lfs", after=0, call=commit)
    message = refusal(caplog, server, folder)
    has_all(message, "Somebody else has committed to me/x since this upload began (412)", AS_IT_WAS)
    assert server.titles("me/x")[-1] == "another"
    release(server, folder)
    assert server.titles("me/x")[-2:] == ["another", MESSAGE]
    assert server.files("me/x")[shard(1, 3)] == b"\0new"


def test_an_interruption_says_what_is_there(server, folder, capsys):
    """On standard error, as with --json no line of `said` is shown."""

    def stop(line):
        if line.startswith("Uploading"):
            raise KeyboardInterrupt

    said = type("Lines", (list,), {"append": lambda self, line: stop(line)})()
    with pytest.raises(KeyboardInterrupt):
        release(server, folder, said=said)
    assert capsys.readouterr().err.startswith(NEW)


def test_a_file_that_goes_meanwhile(server, folder, caplog):
    server.fault("POST .*/preupload/", after=0, call=(folder / shard(2, 3)).unlink)
    has_all(refusal(caplog, server, folder), f"{folder / shard(2, 3)} cannot be read", NEW)


@pytest.mark.parametrize("part_size", [0, 25_000])
def test_a_file_that_changes_meanwhile(server, folder, caplog, part_size):
    server.storage.part_size = part_size

    def change():
        (folder / shard(1, 3)).write_bytes(b"\1" * 60_000)

    server.fault("POST .*/objects/batch", call=change, after=0)
    has_all(refusal(caplog, server, folder), "A file of the folder changed here", "(400", "Run again.", NEW)
    assert server.titles("me/x") == ["initial commit"]
    release(server, folder)
    assert server.files("me/x")[shard(1, 3)] == b"\1" * 60_000


def test_xet_here_and_none_there(tmp_path, folder, caplog, monkeypatch):
    in_process(monkeypatch, tmp_path, xet=True)
    with hub.running(tmp_path / "hub") as server:
        message = refusal(caplog, server, folder)
        has_all(message, "has no xet storage (404)", "Set HF_HUB_DISABLE_XET=1, and run again.", NEW)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        release(server, folder)
        assert {**contents(folder)}.items() <= server.files("me/x").items()


@pytest.mark.parametrize(("status", "said"), [(401, "(401"), (403, "may write to me/x")])
def test_xet_refuses(tmp_path, folder, caplog, monkeypatch, status, said):
    in_process(monkeypatch, tmp_path, xet=True)
    with hub.running(tmp_path / "hub", xet=True) as server:
        server.fault("xet-write-token", status=status)
        has_all(refusal(caplog, server, folder), said, NEW)


def test_the_log_of_the_library_keeps_its_words(server, folder, caplog):
    server.fault("PUT /_lfs/", status=503)
    release(server, folder)
    words = r"HTTP Error 503 thrown while requesting PUT http://localhost:\d+/_lfs/[0-9a-f]{64}\n"
    assert re.search(words, caplog.text)


def test_each_line_of_the_log_is_shown_once(server, folder, monkeypatch):
    """The command line gives the root logger a handler; the library's own has to wait meanwhile, and no longer."""
    shown = io.StringIO()
    handler, root, library = logging.StreamHandler(shown), logging.getLogger(), logging.getLogger("huggingface_hub")
    for logger in (root, library):
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    server.fault("PUT /_lfs/", status=503)
    release(server, folder)
    assert shown.getvalue().count("HTTP Error 503") == 1 and handler in library.handlers


@pytest.mark.parametrize("status", [429, 503])
def test_the_validator_is_asked_three_times(server, waits, monkeypatch, status):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    card, said, target = Card("---\nlicense: mit\n---\n# A model\n", []), [], Target("me/x")
    server.fault("POST /api/validate-yaml", status=status, times=2)
    assert _validate(card, target, False, said.append)
    assert waits == [1, 2] and [line.split(" Trying")[1] for line in said] == [" again in 1 s", " again in 2 s"]
    server.fault("POST /api/validate-yaml", status=status, times=9)
    with pytest.raises(InputError, match=f"cannot be asked.*{status}"):
        _validate(card, target, False, said.append)
    asked = len(server.requests("validate-yaml"))
    assert not _validate(card, target, True, said.append)
    assert (asked, len(server.requests("validate-yaml"))) == (6, 7)
