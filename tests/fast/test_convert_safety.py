"""convert on a machine that gets in its way: kills, a full disk, no permission, a second run, odd paths."""

import json
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import huggingface_hub.constants
import pytest

from llava_norm_align.conversion.convert import convert
from tests.helpers import safety, tiny

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
    seconds = safety.duration(["convert", sources[kind], target, "--no-report", "--overwrite", *options], log, runs=1)
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


def room(files):
    """What `files` take on a disk, whose blocks have 4096 bytes."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in files if file.is_file())


@pytest.mark.parametrize("case", ["copy", "bin", "link", "file limit"])
def test_a_disk_that_fills_up(sources, tmp_path, case):
    """Two blocks are missing in the end: the check of the room before does not count the small files."""
    kind = "bin" if case == "bin" else "safetensors"
    source, made, disk = sources[kind], sources[kind].parent / "warm" / kind, tmp_path / "disk"
    size = room(made.rglob("*")) - 2 * 4096
    if case == "link":  # the source fills its disk almost
        size += room(source.iterdir()) - room(made.glob("*.safetensors"))
    with safety.full_disk(disk, size, mount=case != "file limit") as fill:
        if case == "link":
            source = shutil.copytree(source, disk / "source")
        options, before, state = ["--link"] if case == "link" else [], safety.digests(source), safety.names(disk)
        command = ["convert", source, disk / "models" / "target", "--no-report", *options]
        code, output = safety.run(command, tmp_path / "log", fill)
        assert_refused(code, output, "no room", disk / "models" / "target", "Make room")
        assert safety.names(disk) == state and safety.digests(source) == before


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
    for path in source.iterdir():
        path.chmod(0o644)
    (shared / "models").mkdir()
    (shared / "models").chmod(0o777)
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


ODD = ["with space", "Größe 模型 🦙", 'it\'s [50%] {a} "b" $HOME;*?', "-leading", "a\ttab", "\\back"]


@pytest.mark.parametrize("name", ODD)
def test_odd_names(sources, tmp_path, name):
    source = shutil.copytree(sources["safetensors"], tmp_path / name / f"source {name}")
    target = tmp_path / name / f"target {name}"
    command = ["convert", source, target, "--no-report"]
    code, output = safety.run(command, tmp_path / "log")
    assert code == 0 and f"Written: {target}" in output, output
    assert safety.faults(target) == [] and safety.names(tmp_path / name) == sorted([source.name, target.name])
    code, output = safety.run(command, tmp_path / "log")
    assert_refused(code, output, target, "--overwrite")
    code, output = safety.run([*command, "--images", target / f"{name}.png"], tmp_path / "log")
    assert_refused(code, output, target / f"{name}.png", "There is no image file")


def test_odd_names_reach_the_processes_of_a_report(sources, tmp_path):
    folder = tmp_path / "".join(ODD)
    shutil.copytree(sources["safetensors"], folder / "source")
    tiny.photo().save(folder / "photo 🦙.png")
    options = ["--report", "--images", folder / "photo 🦙.png"]
    code, output = safety.run(["convert", folder / "source", folder / "target", *options], tmp_path / "log")
    assert code == 0 and f"Written: {folder / 'target'}" in output, output


def test_a_name_that_is_no_unicode(sources, tmp_path):
    """transformers and safetensors cannot open such a path."""
    folder = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(sources["safetensors"], folder / "source")
    for source, target in ((folder / "source", tmp_path / "target"), (sources["bin"], folder / "target")):
        code, output = safety.run(["convert", source, target, "--no-report"], tmp_path / "log")
        assert_refused(code, output, "UTF-8", "Rename")
    assert safety.names(tmp_path) == sorted(["log", folder.name]) and safety.names(folder) == ["source"]


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
