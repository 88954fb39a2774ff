"""kill -9 at ten moments of a release: the Hub never holds half of it, and the same command goes on from there.

What can be caught (SIGTERM) says besides what the Hub holds.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections import Counter

import pytest

from tests.helpers import hub
from tests.helpers.hub_release import MESSAGE, SHARD, contents, in_process, release, write_folder

MOMENTS = [
    ("POST /api/repos/create", {"lost": True}),  # it is there, and the answer on its way
    ("POST .*/preupload/", {"after": 0}),
    ("POST .*/objects/batch", {"after": 0}),
    *[("PUT /_lfs/", {"after": SHARD // 2, "skip": number}) for number in range(4)],
    ("POST /_lfs_verify", {"after": 0}),
    ("POST .*/commit/", {"after": 0}),
    ("POST .*/commit/", {"lost": True}),
]
SHARDS = 40  # five go up at once, so that some twenty of them are whole before the last kill of a PUT


def run(server, folder, match=None, number=signal.SIGKILL, **fault):
    """A release in a process of its own (a fork, which need not import), killed at a moment: how it ended."""
    process = multiprocessing.get_context("fork").Process(target=work, args=[server, folder])
    if match:
        server.fault(match, call=lambda: os.kill(process.pid, number), **fault)
    process.start()
    process.join(60)
    server.faults.clear()
    return process.exitcode


def work(server, folder):
    gc.freeze()  # the garbage of the tests before: a finalizer of it would swallow the exit that comes with a signal
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as the program does
    release(server, folder)


def state(server):
    """What main holds, without the file that the Hub itself makes."""
    if ("model", "me/x") not in server.repositories:
        return {}
    return {name: content for name, content in server.files("me/x").items() if name != ".gitattributes"}


def test_ten_kills(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path)
    folder = write_folder(tmp_path / "model", shards=SHARDS)
    with hub.running(tmp_path / "hub") as server:
        for match, fault in MOMENTS:
            assert run(server, folder, match, **fault) == -signal.SIGKILL
            landed = match.endswith("/commit/") and "lost" in fault
            assert state(server) == (contents(folder) if landed else {})
        assert server.repositories["model", "me/x"].private
        assert run(server, folder) == 0
        assert state(server) == contents(folder)
        assert server.titles("me/x") == ["initial commit", MESSAGE]
        whole = Counter(row["path"] for row in server.requests("PUT") if row["status"] == 200)
        assert set(whole.values()) == {1} and len(whole) == SHARDS  # no shard went twice
        assert len(server.requests("PUT")) > SHARDS  # those that were cut


def test_a_kill_of_an_upload_in_parts(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path)
    folder = write_folder(tmp_path / "model", shards=6)
    with hub.running(tmp_path / "hub", part_size=SHARD // 3) as server:
        assert run(server, folder, "POST /_lfs_complete", after=0) == -signal.SIGKILL
        whole = {path.name for path in server.storage.folder.iterdir() if path.suffix == ""}
        assert state(server) == {}
        assert run(server, folder) == 0 and state(server) == contents(folder)
        second = {row["path"].rpartition("/")[2] for row in server.requests("POST /_lfs_complete")[-6 + len(whole) :]}
        assert not second & whole


@pytest.mark.parametrize("whole", [0, 2])
def test_a_kill_with_xet(tmp_path, monkeypatch, whole):
    """The Hub is asked for a token with each file; the files before it are whole, and stay."""
    in_process(monkeypatch, tmp_path, xet=True)
    folder = write_folder(tmp_path / "model", shards=4)
    with hub.running(tmp_path / "hub", xet=True) as server:
        assert run(server, folder, "xet-write-token", skip=whole, after=0) == -signal.SIGKILL
        server.xet.scan()
        assert len(server.xet.files) == whole and state(server) == {}
        assert run(server, folder) == 0 and state(server) == contents(folder)
        assert server.titles("me/x") == ["initial commit", MESSAGE]


TERMINATED = {
    "POST /api/repos/create": "Whether the new repository me/x (private) was created is not known: look at ",
    "POST .*/preupload/": "The new repository me/x (private) is there, without the model; ",
    "POST .*/commit/": "Whether the commit is there is not known: look at ",
}


@pytest.mark.parametrize("match", TERMINATED)
def test_a_termination_says_what_is_there(tmp_path, monkeypatch, capfd, match):
    in_process(monkeypatch, tmp_path)
    folder = write_folder(tmp_path / "model", shards=1)
    with hub.running(tmp_path / "hub") as server:
        assert run(server, folder, match, signal.SIGTERM, lost=True) == 128 + signal.SIGTERM
        assert TERMINATED[match] in capfd.readouterr().err
        assert ("model", "me/x") in server.repositories
        assert run(server, folder) == 0 and state(server) == contents(folder)
