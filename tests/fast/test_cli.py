"""The command line as a user calls it: exit codes, one message an error, JSON alone on stdout."""

import json

import pytest
import torch
from PIL import Image
from transformers import LlavaForConditionalGeneration

from llava_norm_align import cli
from llava_norm_align.common.errors import InputError
from tests.helpers import tiny


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "stock"
    tiny.stock_llava().save_pretrained(folder)
    tiny.processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "photo.png"
    tiny.photo().save(path)
    return path


def greedy(folder, image, question):
    """The answer computed without the package's own code."""
    model, processor = LlavaForConditionalGeneration.from_pretrained(folder).eval(), tiny.processor()
    inputs = processor(text=f"USER: <image> {question} ASSISTANT:", images=Image.open(image), return_tensors="pt")
    ids = inputs["input_ids"]
    for _ in range(5):
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        if ids[0, -1] == 2:
            break
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_ask_prints_the_greedy_answer(run, stock, image):
    code, out, _ = run("ask", stock, image, "what is a cat ?", "--max-new-tokens", 5)
    assert code == 0
    assert out.strip() == greedy(stock, image, "what is a cat ?")


def test_ask_compares_a_converted_model_with_its_source(run, stock, image, tmp_path):
    converted = tmp_path / "converted"
    code, out, _ = run("convert", stock, converted, "--no-report", "--json")
    assert code == 0 and json.loads(out)["norm"]["norm_align_type"] == "layer_norm"  # stdout is JSON alone
    code, out, _ = run("ask", converted, image, "what is a cat ?", "--baseline", stock, "--max-new-tokens", 5)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(f"{converted}: ")
    assert lines[1] == f"{stock}: {greedy(stock, image, 'what is a cat ?')}"


def test_convert_ends_with_the_advice_to_train(run, stock, image, tmp_path):
    code, out, _ = run("convert", stock, tmp_path / "out", "--images", image, "--report")
    assert code == 0
    assert out.splitlines()[-1].startswith("Train this model before use: top-1 agreement with the source is ")


def not_an_image(folder):
    path = folder / "notes.png"
    path.write_text("no image")
    return path


def huge_image(folder):
    path = folder / "huge.png"
    Image.new("1", (20_000, 20_000)).save(path)
    return path


def endless_image(folder):
    path = folder / "endless.png"
    Image.new("L", (1, 60_000)).save(path)
    return path


def cut_image(folder):
    path = folder / "cut.png"
    tiny.photo().save(path)
    path.write_bytes(path.read_bytes()[:200])
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: folder / "missing.png", "no image file"),
        (lambda folder: folder, "no image file"),
        (not_an_image, "not an image"),
        (huge_image, "pixels"),
        (endless_image, "100 to 1"),
        (cut_image, "broken image"),
    ],
    ids=["missing", "folder", "text", "huge", "endless", "cut"],
)
def test_ask_refuses_a_bad_image(run, stock, tmp_path, make, says):
    code, out, err = run("ask", stock, make(tmp_path), "what is a cat ?")
    assert (code, out) == (2, "")
    assert err.startswith("Error: ") and says in err and "Traceback" not in err
    assert err.count("\n") == 1


def test_ask_refuses_a_bad_model(run, image, tmp_path):
    empty, broken, lone = tmp_path / "empty", tmp_path / "broken", tmp_path / "lone"
    for folder in (empty, broken, lone):
        folder.mkdir()
    (broken / "config.json").write_text("{")
    (lone / "config.json").write_text('{"model_type": "llava"}')
    for model, says in (
        (empty, "is empty"),
        (broken, "is broken"),
        (lone, "could not be loaded"),
        (tmp_path / "nowhere", "no folder"),
        (image, "is a file"),
        ("nobody/nothing", "no folder"),
    ):
        code, out, err = run("ask", model, image, "what is a cat ?")
        assert (code, out) == (2, ""), model
        assert err.startswith("Error: ") and says in err, err


def test_a_bad_baseline_is_found_before_the_first_answer(run, stock, image, tmp_path):
    code, out, err = run("ask", stock, image, "what is a cat ?", "--baseline", tmp_path)
    assert (code, out) == (2, "") and "is empty" in err


def test_an_empty_folder_of_images_is_refused(run, stock, tmp_path):
    (tmp_path / "images").mkdir()
    code, _, err = run("convert", stock, tmp_path / "out", "--images", tmp_path / "images")
    assert code == 2 and "is empty" in err and not (tmp_path / "out").exists()


def test_a_second_demo_replaces_only_a_demo(run, tmp_path):
    (tmp_path / "photo.jpg").touch()
    code, _, err = run("demo", "--out", tmp_path, "--overwrite")
    assert code == 2 and "holds no model" in err and (tmp_path / "photo.jpg").exists()


def test_an_empty_question_is_refused(run, stock, image):
    code, _, err = run("ask", stock, image, " ")
    assert code == 2 and "question is empty" in err


def test_debug_shows_the_traceback(run, stock, tmp_path):
    with pytest.raises(InputError):
        run("ask", stock, tmp_path / "no.png", "what", "--debug")


def test_the_verbs():
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} == {
        "assemble",
        "diagnose",
        "convert",
        "check-data",
        "ask",
        "demo",
        "doctor",
        "evaluate",
        "extract-lm",
        "merge",
        "release",
        "train",
    }


@pytest.mark.parametrize(
    "arguments", [["ask"], ["nonsense"], ["convert", "a"], ["ask", "a", "b", "c", "--temperature", "-1"]]
)
def test_usage_errors_exit_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2 and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--vision", "x"], "--vision and --text"),
        (["--preset", "macro"], "'micro'"),
        (["--vision", "a", "--text", "b", "--wheels", "c"], "--preset micro"),
        (["--preset", "micro", "--text", "x"], "leave out"),
    ],
)
def test_assemble_names_what_it_needs(run, tmp_path, arguments, says):
    code, _, err = run("assemble", tmp_path / "out", *arguments)
    assert code == 2 and says in err
    assert not (tmp_path / "out").exists()
