"""convert on a machine that gets in its way: kills, a full disk, no permission, a second run, odd paths."""

import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

import huggingface_hub.constants
import pytest
from safetensors.torch import save_file

from llava_norm_align.conversion.convert import convert
from tests.helpers import safety, tiny
from tests.helpers.convert import tiny_llava

WEIGHTS = "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same LLaVA of 4 MB in three shards, as safetensors and as .bin; the program is warm for children."""
    root = tmp_path_factory.mktemp("sources")
    made = {"safetensors": safety.write_llava(root / "safetensors", hidden=64, rows=8192)}
    made["bin"] = shutil.copytree(made["safetensors"], root / "bin")
    safety.pickle_weights(made["bin"])
    for kind, source in made.items():
        safety.run_here(["convert", source, root / "warm" / kind, "--no-report"])
    return made


@pytest.mark.parametrize(
    ("kind", "options"), [("safetensors", []), ("safetensors", ["--link"]), ("bin", [])], ids=["copy", "link", "bin"]
)
def test_a_kill_at_any_moment_leaves_the_old_state_or_the_new(sources, tmp_path, kind, options):
    target, log = tmp_path / "models" / "target", tmp_path / "log"
    began = time.perf_counter()
    assert safety.run(["convert", sources[kind], target, "--no-report", *options], log)[0] == 0
    seconds = time.perf_counter() - began
    met = Counter()
    for number, moment in enumerate(safety.moments(3, seconds, random.Random(kind))):
        if number == 1:
            shutil.rmtree(target)
        met[safety.break_off_and_go_on(sources[kind], target, moment, log, number, options)] += 1
    assert met["ended"] < 3


def assert_refused(code, output, *says):
    """Exit code 2 and one line, without a traceback, that says all of `says`."""
    assert code == 2, output
    assert output.startswith("Error: ") and output.count("\n") == 1, output
    for text in says:
        assert str(text) in output
    assert ".writing" not in output


@pytest.mark.parametrize("case", ["copy", "bin", "link"])
def test_a_disk_that_fills_up(sources, tmp_path, case):
    """Past the check of the space before: the small files are not counted there, nor is a link."""
    source = sources["bin" if case == "bin" else "safetensors"]
    before = safety.digests(source)
    size = sum(file.stat().st_size for file in source.iterdir())
    weights = sum(file.stat().st_size for file in source.glob("*model*-of-*"))
    with safety.full_disk(tmp_path / "disk", -(-weights // 4096) * 4096 + 8 * 4096) as fill:
        disk, options = tmp_path / "disk", []
        if case == "link":
            source, options = shutil.copytree(source, disk / "source"), ["--link"]
            (disk / "filler").write_bytes(b"x" * (weights + 8 * 4096 - size))
        state = safety.names(disk)
        command = ["convert", source, disk / "models" / "target", "--no-report", *options]
        code, output = safety.run(command, tmp_path / "log", fill)
        assert_refused(code, output, disk / "models" / "target", "Make room")
        assert safety.names(disk) == state
        assert safety.digests(source) == before


@pytest.fixture
def shared():
    """A folder that everybody may enter and write to, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o777)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("models", 0o555),
        ("source", 0o000),
        (f"source/{WEIGHTS}", 0o000),
        ("source/model.safetensors.index.json", 0o000),
        ("source/config.json", 0o000),
        ("source/tokenizer.json", 0o000),
        ("source/generation_config.json", 0o000),
        ("source/README.md", 0o000),
        ("photo.png", 0o000),
    ],
)
def test_no_permission(sources, shared, name, mode):
    source = shutil.copytree(sources["safetensors"], shared / "source")
    (source / "README.md").write_text("card"), (source / "generation_config.json").write_text("{}")
    (shared / "models").mkdir(mode=0o777)
    tiny.photo().save(shared / "photo.png")
    before, state = safety.digests(shared), safety.names(shared)
    os.chmod(shared / name, mode)
    command = ["convert", source, shared / "models" / "target", "--no-report", "--images", shared / "photo.png"]
    code, output = safety.run(command, shared.with_suffix(".log"), safety.become_nobody)
    shared.with_suffix(".log").unlink()
    assert_refused(code, output, shared / name, "You may not read" if mode == 0 else "write")
    os.chmod(shared / name, 0o700)
    assert safety.digests(shared) == before and safety.names(shared) == state
    assert safety.names(shared / "models") == []


def test_no_permission_in_the_cache(sources, shared):
    cache = shared / "cache"
    cache.mkdir()
    cache.chmod(0o000)

    def prepare():
        huggingface_hub.constants.HF_HUB_CACHE = str(cache)
        safety.become_nobody()

    command = ["convert", "someone/some-llava", shared / "target", "--no-report"]
    code, output = safety.run(command, shared / "log", prepare)
    assert_refused(code, output, "someone/some-llava", cache, "HF_HUB_CACHE")
    assert safety.names(shared) == ["cache", "log"]


def test_two_runs_at_once_into_one_target(sources, tmp_path):
    target, logs = tmp_path / "models" / "target", [tmp_path / "1", tmp_path / "2"]
    children = [safety.start(["convert", sources["bin"], target, "--no-report"], log) for log in logs]
    codes = [safety.finish(child) for child in children]
    assert sorted(codes) == [0, 2]
    refused = logs[codes.index(2)].read_text()
    assert_refused(2, refused, target)
    assert "Another process is writing" in refused or "is not empty" in refused
    assert safety.faults(target) == [] and safety.names(target.parent) == ["target"]


def test_shards_may_be_links_out_of_the_folder(sources, tmp_path):
    """As in the Hub's cache."""
    source = shutil.copytree(sources["safetensors"], tmp_path / "source")
    (tmp_path / "blobs").mkdir()
    for file in source.glob("*.safetensors"):
        shutil.move(file, tmp_path / "blobs" / file.stem)
        file.symlink_to(f"../blobs/{file.stem}")
    for options in ([], ["--link"]):
        target = tmp_path / f"target{len(options)}"
        code, output = safety.run(["convert", source, target, "--no-report", *options], tmp_path / "log")
        assert code == 0, output
        copied = target / "model-00001-of-00004.safetensors"
        assert not copied.is_symlink() and safety.faults(target) == []
        assert copied.samefile(tmp_path / "blobs" / Path(WEIGHTS).stem) == bool(options)


def test_safetensors_win_over_bin(sources, tmp_path):
    source = shutil.copytree(sources["safetensors"], tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"never read")
    summary = convert(str(source), tmp_path / "target", report=False)
    assert [file["from"] for file in summary["weights"]] == sorted(file.name for file in source.glob("*.safetensors"))
    assert "pytorch_model.bin was left out: the safetensors beside it are used" in summary["notes"]
    assert not list((tmp_path / "target").glob("*.bin"))


@pytest.mark.parametrize("name", ["with space", "Größe 模型 🦙", "it's [50%] {a} \"b\" $HOME;*?", "-leading", "a\ttab"])
def test_odd_names(tmp_path, name):
    source, target, image = tmp_path / name / "source", tmp_path / name / "target", tmp_path / name / "photo.png"
    tiny_llava(source)
    tiny.photo().save(image)
    options = ["--images", image, "--report", "--norm", "scale"]
    code, output = safety.run(["convert", source, target, *options], tmp_path / "log")
    assert code == 0 and f"Written: {target}" in output, output
    assert safety.faults(target) == [] and safety.names(tmp_path / name) == ["photo.png", "source", "target"]
    code, output = safety.run(["convert", source, target, *options], tmp_path / "log")
    assert_refused(code, output, target, "--overwrite")


def test_a_name_that_is_no_unicode(tmp_path):
    source = tiny_llava(tmp_path / os.fsdecode(b"\xff"))
    code, output = safety.run(["convert", source, tmp_path / "target", "--no-report"], tmp_path / "log")
    assert code == 0, output


def test_a_link_to_the_source_on_a_path_without_writes(sources, shared):
    source = shutil.copytree(sources["safetensors"], shared / "read only" / "source")
    before = safety.digests(source)
    for path in [*source.iterdir(), source, source.parent]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    (shared / "link").symlink_to(source)
    (shared / "log").touch()
    command = ["convert", shared / "link", shared / "target", "--no-report"]
    code, output = safety.run(command, shared / "log", safety.become_nobody)
    assert code == 0, output
    assert safety.faults(shared / "target") == [] and safety.digests(source) == before
    assert json.loads((shared / "target" / "config.json").read_text())["model_type"] == "llava_norm_align"
