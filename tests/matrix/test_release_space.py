"""A Space over real HTTP: what its folder holds, that it imports alone, and what is refused."""

import json
import os
import subprocess
import sys

import pytest
import yaml

pytest.importorskip("gradio")

from huggingface_hub import HfApi

from llava_norm_align.common.errors import InputError
from llava_norm_align.release.space import release_space
from llava_norm_align.release.upload import Target
from tests.helpers import hub, lines
from tests.helpers.hub_release import in_process, release, write_folder
from tests.matrix.test_release import program

ALONE = """
import json, sys
import llava_norm_align
import llava_norm_align.space.page, llava_norm_align.space.start
print(json.dumps([sys.modules[name].__file__ for name in sys.modules if name.startswith("llava_norm_align.")]))
"""


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


def test_the_space_is_there_and_imports_alone(server, model, tmp_path):
    result, said = put_up(server, model=model, base="me/x", license="apache-2.0")
    repository = server.repositories["space", "me/show"]
    assert repository.private and result["url"] == f"{server.address}/spaces/me/show"
    assert any("is private" in line for line in said)
    files = server.files("me/show", type="space")
    assert set(result["files"]) == set(files) - {".gitattributes"}
    front = yaml.safe_load(files["README.md"].decode().split("---\n")[1])
    assert front["sdk"] == "gradio" and front["models"] == ["me/x", "me/x"] and front["license"] == "apache-2.0"
    pins = dict(line.split("==") for line in files["requirements.txt"].decode().split())
    assert pins["gradio"] == front["sdk_version"] and "llava-norm-align" not in pins and "+" not in pins["torch"]
    assert f'"LLAVA_NORM_ALIGN_ALIGNED", "{model}"'.encode() in files["app.py"]
    assert not [name for name in files if name.endswith((".safetensors", ".pyc"))]

    for name, data in files.items():
        (tmp_path / "space" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "space" / name).write_bytes(data)
    command = [sys.executable, "-c", ALONE]
    out = subprocess.run(command, cwd=tmp_path / "space", capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert len(found) > 30 and all(file.startswith(str(tmp_path / "space" / "llava_norm_align")) for file in found)

    titles = server.titles("me/show", type="space")
    put_up(server, model=model, base="me/x", license="apache-2.0")  # nothing changed, so no commit
    assert server.titles("me/show", type="space") == titles


def test_what_is_refused(server, model, tmp_path):
    def refused(message, *words, **options):
        with pytest.raises(InputError, match=message):
            put_up(server, *words, **options)

    refused("no model on the Hub", model=str(tmp_path))
    refused("The Hub has no model me/none", model="me/none")
    refused("not under a name", name="stranger/show", model=model)
    refused("may only read", token="hf_read", model=model)
    refused("token", token=False, model=model)
    refused("is there already", model=model, out=tmp_path)
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
