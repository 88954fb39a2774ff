"""evaluate refuses: damaged predictions, other settings, models that do not compare."""

import contextlib
import json
import shutil

import pytest

pytest.importorskip("statsmodels")

from llava_norm_align.common.errors import InputError
from llava_norm_align.evaluation.evaluate import evaluate
from tests.helpers import tiny
from tests.helpers.answers import build, lines_of, run


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models a, b and c, and set.json: 20 rows about 10 images."""
    return build(tmp_path_factory.mktemp("evaluate"))


@pytest.fixture(scope="module")
def answered(root, tmp_path_factory):
    """Complete predictions of a."""
    folder = tmp_path_factory.mktemp("answered")
    run(root, out=folder)
    return folder / "predictions.jsonl"


def broken(path, change):
    lines = path.read_text().splitlines(keepends=True)
    change(lines)
    path.write_text("".join(lines))


BROKEN = {
    "not JSON": (lambda lines: lines.__setitem__(5, lines[5][:20] + "\n"), r"Line 6 of .* not a JSON object"),
    "no object": (lambda lines: lines.__setitem__(20, "3\n"), r"Line 21 of .* not a JSON object"),
    "twice": (lambda lines: lines.append(lines[4]), "Line 22 of .* answers r3 of set a second time"),
    "another set": (lambda lines: lines.__setitem__(5, lines[5].replace('"r4"', '"x"')), "Line 6 of .* no answer to"),
    "no head": (lambda lines: lines.pop(0), "first line of .* not the head"),
}


@pytest.mark.parametrize("change, message", BROKEN.values(), ids=BROKEN)
def test_broken_predictions_are_refused(root, tmp_path, answered, change, message):
    shutil.copy(answered, tmp_path / "predictions.jsonl")
    broken(tmp_path / "predictions.jsonl", change)
    before = (tmp_path / "predictions.jsonl").read_bytes()
    with pytest.raises(InputError, match=message) as told:
        run(root, out=tmp_path)
    assert "--overwrite" in str(told.value) and (tmp_path / "predictions.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 6}, "test_sets.set.rows: 20 there, 6 now"),
        ({"max_new_tokens": 5}, "generation.max_new_tokens: 4 there, 5 now"),
        ({"batch_size": 2}, "batch_size: 3 there, 2 now"),
        ({"dtype": "bfloat16"}, 'generation.dtype: "float32" there, "bfloat16" now'),
        ({"model": "b"}, "model.weights_sha256"),
        ({"images": "moved"}, "test_sets.set.sha256"),
    ],
)
def test_other_settings_are_not_mixed(root, tmp_path, answered, options, message):
    shutil.copy(answered, tmp_path / "predictions.jsonl")
    if "images" in options:
        options = {"images": tmp_path / "moved"}
        options["images"].mkdir()
        for index in range(10):
            tiny.photo(index + 1).save(options["images"] / f"{index}.png")
    with pytest.raises(InputError, match=f"another {message}"):
        run(root, out=tmp_path, **options)


def changed(root, tmp_path, file, **fields):
    """Model b with other fields in one of its files, and weights that nobody can read."""
    target = shutil.copytree(root / "b", tmp_path / "changed")
    content = json.loads((target / file).read_text())
    nested = content.get("image_processor", content) if "processor" in file else content
    nested.update(fields)
    (target / file).write_text(json.dumps(content))
    (target / "model.safetensors").write_bytes(b"broken")
    return target


def image_file(root):
    return (
        "preprocessor_config.json" if (root / "b" / "preprocessor_config.json").exists() else "processor_config.json"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"image_mean": [0.5, 0.5, 0.5]},
            r"image_processing.image_mean is \[0.48.* and \[0.5, 0.5, 0.5\] in the second",
        ),
        ({"do_center_crop": False}, "image_processing.crop_size is .* and missing in the second"),
        ({"do_normalize": False}, "image_processing.do_normalize is true in the first and missing"),
    ],
)
def test_other_image_preprocessing_is_refused(root, tmp_path, fields, message):
    other = changed(root, tmp_path, image_file(root), **fields)
    with pytest.raises(InputError, match=message):
        run(root, "a", str(other), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_prompts_and_generation_are_refused(root, tmp_path):
    other = changed(root, tmp_path, "generation_config.json", eos_token_id=[2, 5])
    with pytest.raises(InputError, match=r"generation.eos_token_id is \[2\] in the first and \[2, 5\] in the second"):
        run(root, "a", str(other), out=tmp_path / "out")
    shutil.rmtree(other)
    other = changed(root, tmp_path, "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    with pytest.raises(InputError, match='generation.dtype is "float32" in the first and "bfloat16".*Pass --dtype'):
        run(root, "a", str(other), out=tmp_path / "out")
    shutil.rmtree(other)
    other = changed(root, tmp_path, "config.json")
    (other / "chat_template.jinja").write_text(tiny.TEMPLATE.replace("USER: ", "QUESTION: "))
    with pytest.raises(InputError, match="prompt.with_image is .*USER.* and .*QUESTION"):
        run(root, "a", str(other), out=tmp_path / "out")


def test_what_has_no_effect_may_differ(root, tmp_path):
    other = changed(root, tmp_path, image_file(root), pad_size={"height": 9, "width": 9})
    shutil.copy(root / "b" / "model.safetensors", other)
    assert run(root, "a", str(other), out=tmp_path / "out", limit=8)["differences"]


def test_bad_models(root, tmp_path):
    def refused(message, model, *baselines, **options):
        with pytest.raises(InputError, match=message):
            run(root, model, *baselines, out=tmp_path / "out", **options)

    refused("are the same model", "a", "b", "a")
    refused("are the same model", "a,a")
    (tmp_path / "x").symlink_to(root / "a")  # Python shares a string of one letter
    with pytest.raises(InputError, match="are the same model"), contextlib.chdir(tmp_path):
        evaluate("x", [str(root / "set.json")], baselines=["x"], out=tmp_path / "out")
    refused("There is no folder .*/none", "a", "none")
    refused("names an empty model", "a,,b")
    refused("--batch-size is 0", "a", batch_size=0)
    shutil.copytree(root / "a", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"cut")
    refused("cut or damaged|broken|no safetensors", tmp_path / "cut")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_image_is_bad_input(root, tmp_path):
    rows = json.loads((root / "set.json").read_text())
    (root / "none.png").write_bytes(b"no image")
    (root / "none.json").write_text(json.dumps([*rows, rows[0] | {"id": "last", "image": "none.png"}]))
    with pytest.raises(InputError, match=r"none.png, of row last .* no image that can be read"):
        run(root, out=tmp_path / "out", tasks="none.json")


def test_a_prompt_that_only_one_model_starts_with_bos_is_another(root, tmp_path):
    """This tokenizer adds no BOS by itself, so what the template writes is what the model reads."""
    other = changed(root, tmp_path, "config.json")
    (other / "chat_template.jinja").write_text("<s>" + tiny.TEMPLATE)
    assert tiny.processor().tokenizer("").input_ids == []
    with pytest.raises(InputError, match="prompt.with_image is .* and .*<s>USER"):
        run(root, "a", str(other), out=tmp_path / "out")


def test_failed_rows_are_asked_again(root, tmp_path, answered):
    path = tmp_path / "predictions.jsonl"
    shutil.copy(answered, path)
    lines = path.read_text().splitlines(keepends=True)
    lines[7] = json.dumps(json.loads(lines[7]) | {"prediction": None, "error": "x"}) + "\n"
    path.write_text("".join(lines))
    run(root, out=tmp_path)
    assert len(lines_of(path)) == 21 and not any("error" in line for line in lines_of(path))
    assert sorted(line["id"] for line in lines_of(path)[1:]) == sorted(f"r{index}" for index in range(20))
