"""convert --projector: the result has the tensors of that file, and all others bit for bit from the source."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.describe import describe
from llava_norm_align.conversion.doctor import examine
from llava_norm_align.conversion.projector_file import save_projector
from llava_norm_align.conversion.report import run_job
from tests.helpers import original, tiny
from tests.helpers.convert import HIDDEN, stored_name, tiny_llava, write_photos
from tests.helpers.parts import write_text, write_vision
from tests.helpers.refusals import state
from tests.helpers.safety import pickle_weights

SHAPES = {
    "linear_1.weight": (HIDDEN, 32),
    "linear_1.bias": (HIDDEN,),
    "linear_2.weight": (HIDDEN, HIDDEN),
    "linear_2.bias": (HIDDEN,),
}
NORM = {"align_norm.weight": (HIDDEN,), "align_norm.bias": (HIDDEN,)}
ORIGINAL = {"linear_1": "model.mm_projector.0", "linear_2": "model.mm_projector.2"}


def write_projector(file, shapes=SHAPES, metadata=None, **changes):
    generator = torch.Generator().manual_seed(11)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | changes
    if file.suffix == ".bin":
        names = {name: f"{ORIGINAL[name.split('.')[0]]}.{name.split('.')[1]}" for name in tensors}
        torch.save({names[name]: tensor for name, tensor in tensors.items()}, file)
    else:
        named = {f"multi_modal_projector.{name}": tensor for name, tensor in tensors.items()}
        save_file(named, file, metadata=metadata)
    return tensors


def stored(folder):
    """All tensors of a folder, under old names; each stands in one file only."""
    found = {}
    for file in folder.glob("model*.safetensors"):
        tensors = {stored_name(name, "old"): tensor for name, tensor in load_file(file).items()}
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def check_result(source, target, tensors, norm_from_file):
    """The file's tensors, the rest of the source, and a sound folder; the norm is the file's or the calibrated one."""
    before, after = stored(source), stored(target)
    prefix = "multi_modal_projector."
    norm = {name: after.pop(f"{prefix}align_norm.{name}") for name in ("weight", "bias")}
    assert set(before) == set(after)
    for name, tensor in after.items():
        expected = tensors[name.removeprefix(prefix)] if name.startswith(prefix) else before[name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
    if norm_from_file:
        assert all(torch.equal(norm[name], tensors[f"align_norm.{name}"]) for name in norm)
    else:
        table = before["language_model.model.embed_tokens.weight"].double().norm(dim=1)
        gain = table[table > 0].mean() / math.sqrt(HIDDEN)
        torch.testing.assert_close(norm["weight"], torch.full((HIDDEN,), gain).float())
    assert [check for check in examine(target, load=False) if check.status == "failed"] == []
    model, info = AutoModelForImageTextToText.from_pretrained(target, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    loaded = model.model.multi_modal_projector.state_dict()
    assert torch.equal(loaded["linear_1.weight"], tensors["linear_1.weight"].to(loaded["linear_1.weight"].dtype))


@pytest.mark.parametrize("file", ["projector.safetensors", "mm_projector.bin", "norm.safetensors"])
@pytest.mark.parametrize(
    ("shards", "layout", "link"), [(1, "old", False), (3, "new", False), (3, "old", True), (1, "new", True)]
)
def test_the_projector_is_the_files_and_the_rest_the_sources(tmp_path, shards, layout, link, file):
    source = tiny_llava(tmp_path / "source", layout=layout, shards=shards, dtype=torch.bfloat16)
    before = state(source)
    with_norm = file == "norm.safetensors"
    tensors = write_projector(tmp_path / file, SHAPES | NORM if with_norm else SHAPES)
    summary = convert(str(source), tmp_path / "target", projector=tmp_path / file, link=link, report=False)
    check_result(source, tmp_path / "target", tensors, with_norm)
    assert state(source) == before
    linked = sum(path.stat().st_nlink > 1 for path in (tmp_path / "target").glob("*.safetensors"))
    holding = {path for path in source.glob("*.safetensors") if any("projector" in name for name in load_file(path))}
    assert linked == (shards - len(holding) if link else 0) == summary["verification"]["linked"]
    verified = summary["verification"]
    assert verified["replaced"] == len(tensors)
    assert verified["untouched"] == len(stored(source)) - 4
    assert (
        f"{verified['untouched']} tensors are byte for byte the source's, {len(tensors)} those of {file}"
        in describe(summary)
    )
    told = json.loads((tmp_path / "target/norm_align/calibration.json").read_text())["projector"]
    assert told["file"] == file and told["norm"] is with_norm and len(told["sha256"]) == 64


def test_what_a_training_saves_goes_in_with_its_norm(tmp_path):
    """projector.safetensors of a norm-aligned model: type and start of the norm come with it."""
    source = tiny_llava(tmp_path / "source")
    convert(str(source), tmp_path / "aligned", report=False, target_norm=2.5)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "aligned")
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        for parameter in projector.parameters():
            parameter.mul_(1.5).add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_projector(model, tmp_path / "projector.safetensors")
    summary = convert(str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False)
    check_result(source, tmp_path / "target", projector.state_dict(), True)
    assert (summary["norm"]["norm_align_target"], summary["calibration"]["target_from"]) == (2.5, "projector file")
    assert "Projector and norm are those of projector.safetensors" in describe(summary).splitlines()[-1]


def test_an_untrained_norm_keeps_its_start_or_says_how(tmp_path):
    source = tiny_llava(tmp_path / "source")
    untrained = {"align_norm.weight": torch.full((HIDDEN,), 0.25), "align_norm.bias": torch.zeros(HIDDEN)}
    tensors = write_projector(tmp_path / "projector.safetensors", SHAPES | NORM, **untrained)
    with pytest.raises(InputError, match=r"is untrained and starts at the L2 norm 1.41421356.*--target 1.41421356"):
        convert(str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False)
    given = {"projector": tmp_path / "projector.safetensors", "target_norm": 1.41421356, "report": False}
    convert(str(source), tmp_path / "target", **given)
    check_result(source, tmp_path / "target", tensors, True)


def test_a_norm_without_a_bias_stays_without(tmp_path):
    source = tiny_llava(tmp_path / "source")
    write_projector(tmp_path / "projector.safetensors", SHAPES | {"align_norm.weight": (HIDDEN,)})
    summary = convert(str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False)
    assert summary["norm"]["norm_align_bias"] is False
    assert [name for name in stored(tmp_path / "target") if "align_norm" in name] == [
        "multi_modal_projector.align_norm.weight"
    ]
    AutoModelForImageTextToText.from_pretrained(tmp_path / "target")


def test_a_shard_of_the_source_that_is_its_projector(tmp_path):
    source = tiny_llava(tmp_path / "source", shards=2)
    tensors = stored(source)
    own = {name: tensor for name, tensor in tensors.items() if "projector" in name}
    for number, part in ((1, tensors.keys() - own.keys()), (2, own.keys())):
        save_file({name: tensors[name] for name in part}, source / f"model-0000{number}-of-00002.safetensors")
    index = source / "model.safetensors.index.json"
    weight_map = {name: f"model-0000{1 + (name in own)}-of-00002.safetensors" for name in tensors}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    bare = {name.removeprefix("multi_modal_projector."): tensor for name, tensor in own.items()}
    file = source / "model-00002-of-00002.safetensors"
    convert(str(source), tmp_path / "same", projector=file, report=False)
    check_result(source, tmp_path / "same", bare, False)
    tensors = write_projector(tmp_path / "projector.safetensors")
    summary = convert(str(source), tmp_path / "new", projector=tmp_path / "projector.safetensors", report=False)
    check_result(source, tmp_path / "new", tensors, False)
    assert len(summary["weights"]) == 2  # a shard of the old projector alone is left out


def test_the_row_between_lines_of_patches_is_part_of_the_projector(tmp_path):
    source = tmp_path / "source"
    tiny.stock_llava(kind="llava_next").save_pretrained(source)
    tiny.processor(kind="llava_next").save_pretrained(source)
    other = tiny.stock_llava(kind="llava_next", seed=5)
    save_projector(other, tmp_path / "projector.safetensors")
    convert(str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False)
    written = stored(tmp_path / "target")
    assert torch.equal(written["image_newline"], other.model.image_newline)
    assert torch.equal(written["multi_modal_projector.linear_1.bias"], other.model.multi_modal_projector.linear_1.bias)
    assert not [check for check in examine(tmp_path / "target", load=False) if check.status == "failed"]


def test_pickled_sources_and_dry_runs(tmp_path):
    source = tiny_llava(tmp_path / "source", shards=2)
    pickled = pickle_weights(shutil.copytree(source, tmp_path / "pickled")) or tmp_path / "pickled"
    tensors = write_projector(tmp_path / "mm_projector.bin")
    convert(str(pickled), tmp_path / "target", projector=tmp_path / "mm_projector.bin", report=False)
    check_result(source, tmp_path / "target", tensors, False)
    convert(str(source), tmp_path / "dry", projector=tmp_path / "mm_projector.bin", dry_run=True)
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize(("fold", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_factor_is_measured_on_the_new_projector(tmp_path, monkeypatch, fold, dtype):
    monkeypatch.setattr(conversion, "run_in_fresh_process", run_job)
    source, photos = tiny_llava(tmp_path / "source", dtype=dtype), write_photos(tmp_path / "photos")
    tensors = write_projector(tmp_path / "mm_projector.bin")
    options = dict(norm_type="scale", fold=fold, images=photos, target_norm=0.75, report=False)
    summary = convert(str(source), tmp_path / "target", projector=tmp_path / "mm_projector.bin", **options)
    stock = LlavaForConditionalGeneration.from_pretrained(source, dtype=dtype).eval()
    stock.model.multi_modal_projector.load_state_dict(tensors)
    norms = []
    projector = stock.model.multi_modal_projector
    projector.register_forward_hook(lambda module, args, x: norms.append(x.double().norm(dim=-1)))
    pixels = conversion.load_processor(tmp_path / "target").image_processor
    with torch.no_grad():
        for photo in photos:
            stock.model.get_image_features(pixels(open_image(photo), return_tensors="pt").pixel_values.to(dtype))
    factor = 0.75 / torch.cat(norms).mean().item()
    assert summary["norm"]["norm_align_scale"] == pytest.approx(factor, rel=1e-5)
    written = stored(tmp_path / "target")["multi_modal_projector.linear_2.weight"]
    torch.testing.assert_close(written, tensors["linear_2.weight"] * (factor if fold else 1))
    assert summary["verification"]["replaced"] == (2 if fold else 4)


def test_the_report_compares_the_written_model_with_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "run_in_fresh_process", run_job)
    source, photos = tiny_llava(tmp_path / "source"), write_photos(tmp_path / "photos")
    write_projector(tmp_path / "projector.safetensors", SHAPES | NORM)
    given = {"projector": tmp_path / "projector.safetensors", "images": photos[:1], "report": True}
    summary = convert(str(source), tmp_path / "target", **given)
    assert summary["report"]["text_logits_equal"] and summary["report"]["starts"] == {}
    assert "of projector.safetensors: top-1 agreement with the source is" in describe(summary)


BAD = {
    "shape": (SHAPES | {"linear_1.weight": (HIDDEN, 8)}, {}, r"linear_1.weight in .* is \[32, 8\].*it is \[32, 32\]"),
    "norm's shape": (SHAPES | {"align_norm.weight": (8,)}, {}, r"align_norm.weight in .* is \[8\].* 32 channels"),
    "scale": (SHAPES | NORM, {"norm_type": "scale"}, "holds a norm.*--norm scale asks for another one"),
    "none": (SHAPES | NORM, {"norm_type": "none"}, "--norm none asks for another one"),
    "visual": (SHAPES | NORM, {"start": "visual"}, "--start visual asks for another one"),
    "no bias": (SHAPES | NORM, {"bias": False}, "with a bias, but --no-bias"),
    "no layer": ({"linear_1.weight": (HIDDEN, 32)}, {}, "were expected"),
    "newline": (SHAPES | {"image_newline": (HIDDEN,)}, {}, r"image_newline in .* is \[32\], but .* it is absent"),
}


@pytest.mark.parametrize("case", BAD)
def test_projectors_that_do_not_fit_are_refused(tmp_path, case):
    shapes, options, message = BAD[case]
    source = tiny_llava(tmp_path / "source")
    write_projector(tmp_path / "projector.safetensors", shapes)
    before = state(tmp_path)
    with pytest.raises(InputError, match=message):
        convert(
            str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False, **options
        )
    assert state(tmp_path) == before


@pytest.mark.parametrize(("values", "message"), [(0.0, "is all zero"), (math.nan, "has NaN or inf")])
def test_a_norm_of_zeros_or_nan_is_refused(tmp_path, values, message):
    source = tiny_llava(tmp_path / "source")
    gain = {"align_norm.weight": torch.full((HIDDEN,), values)}
    write_projector(tmp_path / "projector.safetensors", SHAPES | NORM, **gain)
    with pytest.raises(InputError, match=message):
        convert(str(source), tmp_path / "target", projector=tmp_path / "projector.safetensors", report=False)


def test_another_type_and_the_original_layout_are_refused(tmp_path):
    source = tiny_llava(tmp_path / "source")
    file = tmp_path / "projector.safetensors"
    write_projector(file, SHAPES | NORM, {"norm_align_type": "rms_norm"})
    with pytest.raises(InputError, match="a norm of the type rms_norm, but the model's is layer_norm"):
        convert(str(source), tmp_path / "target", projector=file, report=False)
    convert(str(source), tmp_path / "target", projector=file, norm_type="rms_norm", report=False)
    parts = original.build(tmp_path / "original")
    with pytest.raises(
        InputError, match="layout of the original LLaVA repository, for which --projector is not taken"
    ):
        convert(str(parts.folder), tmp_path / "other", projector=file, vision=str(parts.vision))


def test_the_options_of_the_program(tmp_path, run):
    source, vision, text = tiny_llava(tmp_path / "source"), tmp_path / "vision", write_text(tmp_path / "text")
    write_vision(vision)
    file, narrow = tmp_path / "projector.safetensors", tmp_path / "mm_projector.bin"
    tensors = write_projector(file, SHAPES | NORM)
    own = write_projector(narrow, SHAPES | {"linear_1.weight": (HIDDEN, 16)})
    for arguments in (
        ["convert", source, tmp_path / "converted", "--no-report", "--projector", file],
        ["assemble", tmp_path / "assembled", "--vision", vision, "--text", text, "--projector", narrow],
    ):
        code, _, err = run(*arguments)
        assert code == 0, err
    check_result(source, tmp_path / "converted", tensors, True)
    assembled = load_file(tmp_path / "assembled/model.safetensors")
    assert all(torch.equal(assembled[f"multi_modal_projector.{name}"], tensor) for name, tensor in own.items())
    code, _, err = run("convert", source, tmp_path / "none", "--projector", tmp_path / "nothing.bin")
    assert code == 2 and str(tmp_path / "nothing.bin") in err
