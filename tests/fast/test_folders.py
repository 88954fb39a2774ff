"""Folders that appear whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from llava_norm_align.common import folders
from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import check_target, new_folder
from tests.helpers.lines import ROOT

WRITER = """
import sys, time
from pathlib import Path
from llava_norm_align.common.folders import new_folder
with new_folder(Path(sys.argv[1]), overwrite=True) as folder:
    (folder / "config.json").write_text("new")
    print("writing", flush=True)
    time.sleep(60)
"""


def fill(folder, text="old"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    (folder / "sub").mkdir()
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("state", ["missing", "empty", "filled"])
def test_the_target_appears_whole_and_nothing_is_left_beside_it(tmp_path, state):
    target = tmp_path / "parent" / "target"
    if state == "filled":
        fill(target)
    elif state == "empty":
        target.mkdir(parents=True)
    with new_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("new")
        assert not (target / "config.json").exists() or (target / "config.json").read_text() == "old"
    assert names(target) == ["config.json"] and (target / "config.json").read_text() == "new"
    assert names(tmp_path / "parent") == ["target"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_state(tmp_path, error):
    target = fill(tmp_path / "target")
    with pytest.raises(error):
        with new_folder(target, overwrite=True) as folder:
            (folder / "config.json").write_text("new")
            raise error
    assert (target / "config.json").read_text() == "old" and names(tmp_path) == ["target"]


def test_a_target_filled_meanwhile_is_kept(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(InputError, match="not empty"):
        with new_folder(target) as folder:
            (folder / "config.json").write_text("new")
            fill(target, "someone else's")
    assert (target / "config.json").read_text() == "someone else's" and names(tmp_path) == ["target"]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_exchange_with_and_without_the_system_call(tmp_path, monkeypatch, platform):
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("renameat2 is Linux's")
    monkeypatch.setattr(folders.sys, "platform", platform)
    one, other = fill(tmp_path / "one", "1"), fill(tmp_path / "other", "2")
    folders._exchange(one, other)
    assert (one / "config.json").read_text() == "2" and (other / "config.json").read_text() == "1"
    assert names(tmp_path) == ["one", "other"]


def test_one_writer_at_a_time_and_a_killed_one_blocks_nobody(tmp_path):
    target = fill(tmp_path / "target")
    command = [sys.executable, "-c", WRITER, str(target)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "writing\n"
        with pytest.raises(InputError, match="Another process is writing"):
            with new_folder(target, overwrite=True):
                pass
        assert names(tmp_path / ".target.writing") == ["config.json"]  # the refused run left it alone
        writer.kill()
    assert (target / "config.json").read_text() == "old"
    with new_folder(target, overwrite=True) as folder:
        (folder / "config.json").write_text("newer")
    assert (target / "config.json").read_text() == "newer" and names(tmp_path) == ["target"]


def test_targets_that_would_cost_data_are_refused(tmp_path, monkeypatch):
    home, work = tmp_path / "home", tmp_path / "work"
    fill(home), fill(work / "here")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work / "here")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "holiday.jpg").touch()
    link = tmp_path / "link"
    link.symlink_to(photos)
    for target, says in (
        (home, "your home"),
        (tmp_path, "your home"),
        (work, "the working folder"),
        (Path("."), "the working folder"),
        (Path("/"), "your home"),
        (photos, "holds no model"),
        (photos / "holiday.jpg", "not a folder"),
        (link, "is a link"),
        (tmp_path / ("x" * 250), "240 bytes"),
    ):
        with pytest.raises(InputError, match=says):
            check_target(target, overwrite=True)
    assert (photos / "holiday.jpg").exists()


def test_overlapping_folders_are_refused(tmp_path):
    source = fill(tmp_path / "source")
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(InputError, match="overlap"):
            check_target(target, overwrite=True, sources=(source,))
    check_target(tmp_path / "beside", sources=(source,))
