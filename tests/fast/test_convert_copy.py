"""convert: what a copy leaves behind when it is killed, stopped or faulty, and the files' permissions."""

import contextlib
import json
import os
import signal
import stat
import threading
import warnings
from types import SimpleNamespace

import pytest

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.weights import BLOCK
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.files import copy_with_digests
from tests.helpers.convert import tiny_llava


def test_a_kill_during_the_copy_leaves_the_old_folder_and_no_obstacle(tmp_path, monkeypatch):
    source, target = tiny_llava(tmp_path / "source"), tmp_path / "target"
    convert(str(source), target, report=False)
    before = {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}

    def killed(copies, folder):
        name = next(iter(copies))
        (folder / name).unlink()
        (folder / name).write_bytes(copies[name].read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside torch's threads
        child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(conversion, "copy_with_digests", killed)
            convert(str(source), target, report=False, overwrite=True, target_norm=2.0)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before

    convert(str(source), target, report=False, overwrite=True, target_norm=2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    assert json.loads((target / "config.json").read_text())["norm_align_target"] == 2.0


def test_a_copy_that_differs_from_its_source_leaves_no_folder(tmp_path, monkeypatch):
    """One bit of one block is flipped on the way to the disk, after it was read and hashed."""
    copy = conversion.copy_with_digests

    def faulty_disk(copies, folder):
        digests = copy(copies, folder)
        file = folder / next(iter(copies))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return digests

    monkeypatch.setattr(conversion, "copy_with_digests", faulty_disk)
    source = tiny_llava(tmp_path / "source")
    with pytest.raises(CheckFailed, match="differs from its source"):
        convert(str(source), tmp_path / "target", report=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.fixture
def interrupts():
    """Ctrl-C raises KeyboardInterrupt also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_a_copy_within_a_block(tmp_path, interrupts):
    os.mkfifo(tmp_path / "endless")
    (tmp_path / "target").mkdir()
    written = 0

    def feed():
        nonlocal written
        with (tmp_path / "endless").open("wb", buffering=0) as pipe, contextlib.suppress(BrokenPipeError):
            for number in range(500):
                written += pipe.write(bytes(BLOCK))
                if number == 20:
                    os.kill(os.getpid(), signal.SIGINT)

    feeder = threading.Thread(target=feed)
    feeder.start()
    with pytest.raises(KeyboardInterrupt):
        copy_with_digests({"copy": tmp_path / "endless"}, tmp_path / "target")
    feeder.join()
    assert written < 400 * BLOCK


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_follows_the_umask(tmp_path, mask):
    source, before = tiny_llava(tmp_path / "source"), os.umask(mask)
    try:
        convert(str(source), tmp_path / "target", report=False)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "target").rglob("*") if path.is_file()}
    assert modes == {0o666 & ~mask}


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    source = tiny_llava(tmp_path / "source")
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="GB free"):
        convert(str(source), tmp_path / "target", report=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
