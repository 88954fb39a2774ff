"""A Space over real HTTP: what its folder holds, that it imports alone, a second run, and what is refused."""

import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
import yaml

pytest.importorskip("gradio")

from huggingface_hub import HfApi, SpaceCardData

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.release.space import release_space
from llava_norm_align.release.upload import Target
from tests.helpers import hub, install, lines
from tests.helpers.hub_cards import COLORS
from tests.helpers.hub_release import in_process, release, write_folder
from tests.matrix.test_release import program

ALONE = """
import json, sys
import llava_norm_align
import llava_norm_align.space.page, llava_norm_align.space.start
print(json.dumps([sys.modules[name].__file__ for name in sys.modules if name.startswith("llava_norm_align.")]))
"""
LICENSE = "llava_norm_align/LICENSE"
SAME = "No files have been modified"  # a warning of huggingface_hub's


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub.running(tmp_path / "hub") as running:
        in_process(monkeypatch, tmp_path)
        yield running


def put_up(server, name="me/show", model="me/x", token="hf_write", **options):
    said = []
    kept = {key: options.pop(key) for key in ("base", "license", "check", "out") if key in options}
    api = HfApi(endpoint=server.address, token=token)
    return release_space(Target(name, **options), model, api=api, echo=said.append, **kept), said


@pytest.fixture
def model(server, tmp_path):
    """A model on the Hub, as ID@COMMIT."""
    return f"me/x@{release(server, write_folder(tmp_path / 'model')).commit}"


@pytest.fixture
def base(server, tmp_path):
    """A stock model on the Hub."""
    release(server, write_folder(tmp_path / "base", model_type="llava"), "me/base")
    return "me/base"


def test_the_space_is_there_and_imports_alone(server, model, base, tmp_path):
    result, said = put_up(server, model=model, base=base)
    repository = server.repositories["space", "me/show"]
    assert repository.private and result["url"] == f"{server.address}/spaces/me/show"
    assert any("is private" in line for line in said)
    files = server.files("me/show", type="space")
    assert set(result["files"]) == set(files) - {".gitattributes"}
    assert files[LICENSE] == (lines.ROOT / "LICENSE").read_bytes()
    front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert front["models"] == ["me/x", "me/base"] and front["license"] == "apache-2.0"
    pins = dict(line.split("==") for line in files["requirements.txt"].decode().split())
    assert pins["gradio"] == front["sdk_version"] and "llava-norm-align" not in pins and "+" not in pins["torch"]
    assert {"easy-vqa", "scikit-image"} <= set(pins)  # of the examples
    assert f'"LLAVA_NORM_ALIGN_ALIGNED", "{model}"'.encode() in files["app.py"]
    assert not [name for name in files if name.endswith((".safetensors", ".pyc"))]

    for name, data in files.items():
        (tmp_path / "space" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "space" / name).write_bytes(data)
    command = [sys.executable, "-c", ALONE]
    out = subprocess.run(command, cwd=tmp_path / "space", capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert len(found) > 30 and all(file.startswith(str(tmp_path / "space" / "llava_norm_align")) for file in found)


def test_the_front_matter_is_one_that_the_hub_takes(server, model):
    """The fields of https://huggingface.co/docs/hub/spaces-config-reference, and of huggingface_hub."""
    put_up(server, model=model, license="MIT")
    front = yaml.safe_load(server.files("me/show", type="space")["README.md"].decode().split("---\n")[1])
    known = {"title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "python_version", "app_file", "pinned"}
    assert set(front) == known | {"license", "models", "short_description"}
    assert SpaceCardData(**front).to_dict() == front
    assert front["license"] == "mit" and front["sdk"] == "gradio" and front["app_file"] == "app.py"
    assert {front["colorFrom"], front["colorTo"]} <= set(COLORS) and len(front["short_description"]) <= 60
    texts = set(front) - {"pinned", "models"}
    assert all(isinstance(front[name], str) for name in texts) and re.fullmatch(r"3\.\d+", front["python_version"])


def test_a_second_run_says_what_changed(server, model, base, tmp_path):
    first, said = put_up(server, model=model, base=base)
    assert "Created the Space me/show (private)" in said and not any("is there" in line for line in said)
    titles = server.titles("me/show", type="space")
    again, said = put_up(server, model=model, base=base)
    assert again["commit"] == first["commit"] and server.titles("me/show", type="space") == titles
    assert "The Space me/show is there, private, and stays so" in said
    assert "nothing to upload, so there is no new commit" in said[-1]
    words = ("release", "--space", "me/show", "--model", model, "--base", base)
    code, out, err = program(server, tmp_path, *words)
    assert code == 0 and "nothing to upload" in out and SAME not in out + err

    server.repositories["space", "me/show"].private = False
    api = HfApi(endpoint=server.address, token="hf_write")
    old = {"path_or_fileobj": b"old = True", "repo_id": "me/show", "repo_type": "space"}
    api.upload_file(path_in_repo="llava_norm_align/old.py", **old)
    api.upload_file(path_in_repo="mine.txt", **old)
    changed, said = put_up(server, model=model, base=base)
    files = server.files("me/show", type="space")
    assert changed["commit"] != first["commit"] and "mine.txt" in files and "llava_norm_align/old.py" not in files
    assert "The Space me/show is there, public, and stays so" in said


def test_a_file_that_did_not_arrive_is_told(server, model, monkeypatch):
    upload = HfApi.upload_folder
    short = {"ignore_patterns": "llava_norm_align/space/words.py"}
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: upload(self, **options, **short))
    with pytest.raises(CheckFailed, match=r"me/show lacks llava_norm_align/space/words\.py"):
        put_up(server, model=model)


def test_the_license_is_found_in_an_installed_wheel(tmp_path):
    install.copy_checkout(install.listed_files(), tmp_path / "clone")
    wheel = install.build(tmp_path / "clone", tmp_path / "wheels")["wheel"]
    environment = install.Environment(tmp_path / "environment")
    environment.install("--no-deps", "--no-index", wheel)
    environment.see_dependencies()
    code = "import sys; from llava_norm_align.release.space_folder import license_text; print(license_text())"
    found = install.run([environment.python, "-c", code], tmp_path).split()[-1]
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert found == str(environment.site / name)
    os.remove(found)
    with pytest.raises(AssertionError, match="InputError: The LICENSE of llava-norm-align is neither in"):
        install.run([environment.python, "-c", code], tmp_path)


def test_what_is_refused(server, model, tmp_path):
    def refused(message, *words, **options):
        with pytest.raises(InputError, match=message):
            put_up(server, *words, **options)

    refused("not under a name", name="stranger/show", model=model)
    refused("may only read", token="hf_read", model=model)
    refused("token", token=False, model=model)
    refused("is there already", model=model, out=tmp_path)
    refused("--license is 'nonsense', which is none of the Hub's identifiers", model=model, license="nonsense")
    refused("--license is '', which is none", model=model, license="")
    assert ("space", "me/show") not in server.repositories
    server.fault("POST .*/repos/create", status=402)
    refused("402.*plan", model=model)
    server.fault("POST .*/repos/create", status=403)
    refused("403", model=model)
    assert ("space", "me/show") not in server.repositories

    api = HfApi(endpoint=server.address, token="hf_write")
    api.create_repo("me/show", repo_type="space", space_sdk="gradio")
    api.upload_file(path_or_fileobj=b"print()", path_in_repo="app.py", repo_id="me/show", repo_type="space")
    refused("holds another page.*--overwrite", model=model)
    server.repositories["space", "me/show"].private = True
    refused(
        "me/show is there and private, and --public counts for a new one", model=model, overwrite=True, public=True
    )
    server.repositories["space", "me/show"].private = False
    put_up(server, model=model, overwrite=True)
    assert b"llava_norm_align" in server.files("me/show", type="space")["app.py"]


def test_the_program(server, model, tmp_path):
    code, out, err = program(
        server, tmp_path, "release", "--space", "me/show", "--model", model, "--check", "--out", tmp_path / "space"
    )
    assert code == 0, err
    assert (tmp_path / "space" / "llava_norm_align" / "space" / "page.py").is_file() and "files: app.py" in out
    code, out, err = program(server, tmp_path, "release", "--space", "me/show", "--model", model, "--json")
    assert code == 0 and json.loads(out)["commit"], err
    for words, message in (
        (("--space", "me/show"), "--space needs a model"),
        (("--space", "me/show", "--model", "me/x", "--create-pr"), "--create-pr is of a model"),
        ((tmp_path, "me/x", "--model", "me/x"), "--model is of --space"),
        ((), "needs a folder and a name"),
    ):
        code, out, err = program(server, tmp_path, "release", *words)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_the_source_is_the_checkouts(tmp_path):
    """Every module that the package has here, under the name that it is imported by."""
    from llava_norm_align.release.space_folder import PARTS, copy_source

    copy_source(tmp_path / "llava_norm_align")
    copied = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=lines.ROOT, capture_output=True, text=True, check=True)
    parts = {*PARTS, "llava_norm_align"}
    expected = [
        name for name in tracked.stdout.split() if name.split("/")[0] in parts and os.path.exists(lines.ROOT / name)
    ]
    assert copied >= {
        name if name.startswith("llava_norm_align/") else f"llava_norm_align/{name}" for name in expected
    }
