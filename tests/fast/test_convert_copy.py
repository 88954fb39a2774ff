"""convert: what a copy leaves behind when it is killed, stopped or faulty, and the files' permissions."""

import errno
import hashlib
import json
import os
import signal
import stat
import warnings
import zlib
from types import SimpleNamespace

import pytest

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion import files, weight_files
from llava_norm_align.conversion.convert import convert
from tests.helpers.convert import tiny_llava


def test_a_kill_during_the_copy_leaves_the_old_folder_and_no_obstacle(tmp_path, monkeypatch):
    source, target = tiny_llava(tmp_path / "source"), tmp_path / "target"
    convert(str(source), target, report=False)
    before = {path.name: path.read_bytes() for path in target.rglob("*") if path.is_file()}

    def killed(copies, folder):
        name = next(iter(copies))
        (folder / name).write_bytes(copies[name].read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside torch's threads
        child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(weight_files, "copy_with_checksums", killed)
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
    copy = weight_files.copy_with_checksums

    def faulty_disk(copies, folder):
        digests = copy(copies, folder)
        file = folder / next(iter(copies))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return digests

    monkeypatch.setattr(weight_files, "copy_with_checksums", faulty_disk)
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


def test_ctrl_c_stops_a_copy_within_a_block(tmp_path, interrupts, monkeypatch):
    (tmp_path / "target").mkdir()
    with (tmp_path / "source").open("wb") as file:
        file.truncate(64 * files.BLOCK)
    copied, copy_block = [], files._copy_block

    def copy_and_interrupt(*args):
        copied.append(copy_block(*args))
        if len(copied) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return copied[-1]

    monkeypatch.setattr(files, "_copy_block", copy_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.copy_with_checksums({"copy": tmp_path / "source"}, tmp_path / "target")
    assert len(copied) < 32


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOSYS])
def test_a_copy_that_the_kernel_refuses_is_read_and_written(tmp_path, monkeypatch, error):
    content = os.urandom(3 * 2**20 + 7)
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "target").mkdir()

    def refuse(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    checksums = files.copy_with_checksums({"copy": tmp_path / "source"}, tmp_path / "target")
    assert (tmp_path / "target" / "copy").read_bytes() == content
    assert checksums == {"copy": zlib.crc32(content)}
    assert files.check_copies(tmp_path / "target", checksums) == {"copy": hashlib.sha256(content).hexdigest()}


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
