"""The program's release to a Hub over real HTTP, and the model loaded back from there with one line in both lines."""

import json
import os
import subprocess
import sys

import pytest

from llava_norm_align.conversion.convert import convert
from tests.helpers import hub, lines
from tests.helpers.convert import tiny_llava

LICENSE = ("--license", "apache-2.0")
# Run where the package cannot be imported: what a repository, or a folder, answers to a picture.
LOAD = """
import json, sys, warnings
sys.modules["llava_norm_align"] = None
warnings.filterwarnings("error", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*AutoModelForVision2Seq.*")  # 4.57.6 always gives it
import numpy, torch, transformers
from PIL import Image
name, auto, out = sys.argv[1:]
torch.set_num_threads(1)
model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True)
processor = transformers.AutoProcessor.from_pretrained(name, trust_remote_code=True)
pixels = numpy.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=numpy.uint8)
question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is a cat"}]}]
prompt = processor.apply_chat_template(question, add_generation_prompt=True)
inputs = processor(text=prompt, images=Image.fromarray(pixels), return_tensors="pt")
with torch.no_grad():
    model.eval()(**inputs).logits.float().numpy().tofile(out)
print(type(model).__name__, type(model).__module__)
"""


def program(server, home, *arguments, **variables):
    """The program on the Hub: exit code, standard output, standard error."""
    command = [sys.executable, "-m", "llava_norm_align", *map(str, arguments)]
    options = hub.client(server, home, os.environ, lines.ROOT, **variables)
    done = subprocess.run(command, **options, capture_output=True, timeout=1200)
    for text in (done.stdout, done.stderr):
        assert hub.TOKEN not in text and "Traceback" not in text
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    convert(str(tiny_llava(place / "stock")), place / "aligned", report=False)
    return place / "aligned"


@pytest.fixture(scope="module", params=["lfs", "xet"])
def released(request, folder, tmp_path_factory):
    """The Hub, the home folder of its user, and what the first release printed."""
    home = tmp_path_factory.mktemp("home")
    with hub.running(home / "hub", xet=request.param == "xet") as server:
        options = (*LICENSE, "--python", lines.PYTHONS["4"], "--verify-load", "--json")
        code, out, err = program(server, home, "release", folder, "me/x", *options)
        assert code == 0, err
        yield server, home, json.loads(out)


def test_what_is_told_and_what_is_there(released, folder):
    server, _, result = released
    files = server.files("me/x")
    assert {name: len(data) for name, data in files.items() if name != ".gitattributes"} == result["files"]
    for name in result["files"]:
        assert name == "README.md" or files[name] == (folder / name).read_bytes()
    assert files["README.md"].decode() == result["card"] and "license: apache-2.0" in result["card"]
    assert str(folder) not in result["card"] and not (folder / "README.md").exists()
    assert [name.split(",")[1].split()[0] for name in result["tried"]] == ["transformers"] * 2
    for tried in result["tried"]:  # the versions that the doctor loaded it with, and no other
        assert tried.split(", ")[1].removeprefix("transformers ") in result["card"]
    assert server.repositories["model", "me/x"].private and result["card_validated_by_the_hub"]
    assert result["pushed"]["created"] and sorted(result["pushed"]["uploaded"]) == sorted(result["files"])
    assert [row["transformers"][0] for row in result["loaded"]] == ["5", "4"]
    assert all(row["answer"] for row in result["loaded"])


@pytest.mark.parametrize(("line", "auto"), [("5", "AutoModelForImageTextToText"), ("4", "AutoModelForVision2Seq")])
def test_it_loads_with_one_line_bit_for_bit(released, folder, tmp_path, line, auto):
    server, _, _ = released
    for name, out in (("me/x", "remote"), (folder, "local")):
        command = [lines.PYTHONS[line], "-c", LOAD, name, auto, tmp_path / out]
        said = hub.run(command, server, tmp_path / "empty", os.environ, tmp_path)
        assert said.split()[0] == "LlavaNormAlignForConditionalGeneration" and "transformers_modules" in said
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "local").read_bytes()


def test_a_second_release_uploads_nothing(released, folder):
    server, home, first = released
    before = len(server.requests("^(POST|PUT) "))
    code, out, err = program(server, home, "release", folder, "me/x", *LICENSE, "--python", lines.PYTHONS["4"])
    assert code == 0, err
    assert "nothing to upload" in out and f"0 files uploaded, {len(first['files'])} unchanged" in out
    wrote = [row for row in server.requests("^(POST|PUT) ")[before:] if "validate" not in row["path"]]
    assert not [row for row in wrote if "commit" in row["path"] or "_lfs" in row["path"]]
    assert server.titles("me/x") == ["initial commit", "Release of a norm-aligned LLaVA"]


def test_a_pull_request(released, folder):
    server, home, _ = released
    code, out, err = program(server, home, "release", folder, "me/x", *LICENSE, "--language", "en", "--create-pr")
    assert code == 0, err
    assert "/me/x/discussions/1" in out and 'revision="refs/pr/1"' in out
    assert b"language:" in server.files("me/x", "refs/pr/1")["README.md"]
    assert b"language:" not in server.files("me/x")["README.md"]


def test_check_needs_no_token_and_sends_nothing(released, folder, tmp_path):
    server, home, _ = released
    before = len(server.requests("^(POST|PUT) "))
    options = (*LICENSE, "--check", "--card", tmp_path / "card.md")
    code, out, err = program(server, home, "release", folder, "me/new", *options, HF_TOKEN="")
    assert code == 0, err
    assert "model.safetensors" in out and "calibration.json" in out
    assert (tmp_path / "card.md").read_text().startswith("---\n")
    wrote = [row["path"] for row in server.requests("^(POST|PUT) ")[before:]]
    assert all("validate" in path for path in wrote) and ("model", "me/new") not in server.repositories


def test_a_folder_that_fails_the_doctor_stays_here(released, folder, tmp_path):
    server, home, _ = released
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", folder, broken], check=True)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"image_token_id": 5, "image_token_index": 5}))
    code, _, err = program(server, home, "release", broken, "me/broken", *LICENSE)
    assert code == 1 and "doctor's checks" in err and "nothing was uploaded" in err
    assert ("model", "me/broken") not in server.repositories


def test_offline_and_without_a_token(folder, tmp_path):
    with hub.running(tmp_path / "hub") as server:
        code, _, err = program(server, tmp_path, "release", folder, "me/x", *LICENSE, HF_TOKEN="")
        assert code == 2 and "hf auth login" in err and err.count("\n") == 1
    code, _, err = program(server, tmp_path, "release", folder, "me/x", *LICENSE)  # it is gone now
    assert code == 2 and err.startswith("Error: ")
    code, out, err = program(server, tmp_path, "release", folder, "me/x", *LICENSE, "--check")
    assert code == 0 and "could not be asked" in out
