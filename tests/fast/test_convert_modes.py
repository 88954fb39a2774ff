"""convert: hard links, the gain's start, a folded factor, a dry run, pickled weights, the families."""

import hashlib
import json
import math
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.describe import describe
from llava_norm_align.conversion.report import QUESTIONS, run_job
from tests.helpers import original, parts, tiny
from tests.helpers.convert import HIDDEN, VOCAB, tiny_llava, write_json, write_photos

LINEAR_2 = ("multi_modal_projector.linear_2.weight", "multi_modal_projector.linear_2.bias")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Imports take seconds; the report in a process of its own is test_convert_report's."""
    monkeypatch.setattr(conversion, "run_in_fresh_process", run_job)


@pytest.fixture
def photos(tmp_path):
    return write_photos(tmp_path / "photos")


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def all_tensors(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def projector_norm(source, processor, photos):
    """Mean norm of the stock projector's output over the visual tokens of all photos, by stock transformers."""
    model, norms = LlavaForConditionalGeneration.from_pretrained(source, dtype="auto").eval(), []
    for photo in photos:
        pixels = processor.image_processor(Image.open(photo).convert("RGB"), return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            states = model.model.vision_tower(pixels.to(model.dtype), output_hidden_states=True).hidden_states[-2]
            norms.append(model.model.multi_modal_projector(states[:, 1:]).double().norm(dim=-1).flatten())
    return torch.cat(norms).mean().item()


def test_link_shares_the_weight_files_and_nothing_else(tmp_path):
    source, target = tiny_llava(tmp_path / "source", shards=2), tmp_path / "target"
    before = digests(source)
    summary = convert(str(source), target, report=False, link=True)
    shared = {path.name for path in target.iterdir() if path.is_file() and path.stat().st_nlink > 1}
    assert shared == {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"}
    for number in (1, 2):
        ours, theirs = (
            target / f"model-0000{number}-of-00003.safetensors",
            source / f"model-0000{number}-of-00002.safetensors",
        )
        assert os.path.samefile(ours, theirs)
    assert digests(source) == before
    assert summary["verification"]["linked"] == 2 and summary["verification"]["sha256"] == {}
    assert "Linked weight files: 2, the source's own" in describe(summary)
    convert(str(source), tmp_path / "copied", report=False)
    copied = digests(tmp_path / "copied")
    assert {name: digest for name, digest in digests(target).items() if not name.startswith("norm_align")} == {
        name: digest for name, digest in copied.items() if not name.startswith("norm_align")
    }


@pytest.mark.parametrize("norm_type", ["layer_norm", "none"])  # saved under another name, and under the same one
def test_saving_a_model_into_a_linked_folder_leaves_the_source_alone(tmp_path, monkeypatch, norm_type):
    source, target = tiny_llava(tmp_path / "source"), tmp_path / "target"
    convert(str(source), target, report=False, link=True, norm_type=norm_type)
    before = digests(source)

    def write_in_place(tensors, filename, metadata=None):  # as safetensors did before 0.8
        Path(filename).write_bytes(save(tensors, metadata))

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", write_in_place)
    model = AutoModelForImageTextToText.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(target)
    assert digests(source) == before
    again = AutoModelForImageTextToText.from_pretrained(target)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_link_takes_the_blob_behind_a_link_of_the_hub_cache(tmp_path):
    source = tiny_llava(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / path.name)
    convert(str(snapshot), tmp_path / "target", report=False, link=True)
    linked = tmp_path / "target" / "model-00001-of-00002.safetensors"
    assert not linked.is_symlink() and os.path.samefile(linked, source / "model.safetensors")


def test_link_across_file_systems_is_refused(tmp_path):
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.fail("/dev/shm is expected to be a file system of its own")
    source = tiny_llava(tmp_path / "source")
    target = other / f"llava-norm-align-{os.getpid()}" / "target"
    for dry_run in (True, False):
        with pytest.raises(InputError, match="different file systems.*Leave out --link"):
            convert(str(source), target, report=False, link=True, dry_run=dry_run)
    assert not target.parent.exists()


def test_start_visual_is_the_mean_norm_of_the_projectors_output(tmp_path, photos):
    source, target = tiny_llava(tmp_path / "source"), tmp_path / "target"
    summary = convert(str(source), target, images=photos, start="visual")
    expected = projector_norm(source, AutoProcessor.from_pretrained(target), photos)
    assert summary["norm"]["norm_align_target"] == pytest.approx(expected, rel=1e-6)
    gain = all_tensors(target)["multi_modal_projector.align_norm.weight"]
    torch.testing.assert_close(gain, torch.full((HIDDEN,), expected / HIDDEN**0.5))
    assert json.loads((target / "config.json").read_text())["norm_align_target"] == pytest.approx(expected, rel=1e-6)
    calibration = json.loads((target / "norm_align" / "calibration.json").read_text())
    assert calibration["target_from"] == "visual" and calibration["target_norm"] == pytest.approx(expected, rel=1e-6)
    table = all_tensors(source)["language_model.model.embed_tokens.weight"].double().norm(dim=1)
    starts = summary["report"]["starts"]
    assert starts["text"]["target_norm"] == pytest.approx(table[table > 0].mean().item(), rel=1e-6)
    assert starts["visual"]["target_norm"] == pytest.approx(expected, rel=1e-6)
    assert starts["visual"]["kl_nats"] == pytest.approx(summary["report"]["kl_nats"], rel=1e-4)
    assert starts["text"]["kl_nats"] != pytest.approx(starts["visual"]["kl_nats"], rel=1e-2)
    assert f"Started at the visual norm, {expected:.2f}" in describe(summary)


def test_the_report_compares_both_starts_whichever_was_written(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    text = convert(str(source), tmp_path / "text", images=photos)["report"]["starts"]
    visual = convert(str(source), tmp_path / "visual", images=photos, start="visual")["report"]["starts"]
    for name in ("text", "visual"):
        assert text[name] == pytest.approx(visual[name], rel=1e-5)
        assert 0 <= text[name]["same_answers"] <= len(photos) * len(QUESTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("link", [False, True])
def test_fold_makes_a_stock_llava_with_the_factor_in_linear_2(tmp_path, photos, dtype, link):
    source, target = tiny_llava(tmp_path / "source", shards=3, dtype=dtype), tmp_path / "target"
    before = digests(source)
    summary = convert(str(source), target, norm_type="scale", fold=True, images=photos, report=False, link=link)
    factor = summary["norm"]["norm_align_scale"]
    assert factor == pytest.approx(
        summary["calibration"]["target_norm"] / projector_norm(source, AutoProcessor.from_pretrained(target), photos),
        rel=2e-3 if dtype == torch.float16 else 1e-6,
    )
    old, new = all_tensors(source), all_tensors(target)
    assert set(old) == set(new)
    for name, tensor in old.items():
        expected = (tensor.double() * factor).to(dtype) if name in LINEAR_2 else tensor
        assert torch.equal(new[name], expected) and new[name].dtype == dtype, name
    assert digests(source) == before
    assert not list(target.glob("*.py"))
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == "llava" and "auto_map" not in config and "norm_align_type" not in config
    model = LlavaForConditionalGeneration.from_pretrained(target, dtype="auto").eval()
    assert type(model) is LlavaForConditionalGeneration
    assert projector_norm(target, AutoProcessor.from_pretrained(target), photos) == pytest.approx(
        summary["calibration"]["target_norm"], rel=1e-2 if dtype == torch.float16 else 1e-5
    )
    if link:
        shared = sum(path.stat().st_nlink > 1 for path in target.glob("*.safetensors"))
        with_linear_2 = {file for file in source.glob("*.safetensors") if set(LINEAR_2) & set(load_file(file))}
        assert shared == 3 - len(with_linear_2) == summary["verification"]["linked"]


def test_a_folded_model_answers_as_the_one_with_the_factor_beside(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    for name, fold in (("beside", False), ("folded", True)):
        convert(str(source), tmp_path / name, norm_type="scale", fold=fold, images=photos)
    beside, folded = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name).eval() for name in ("beside", "folded")
    )
    ids = torch.tensor([[1, 40, *[VOCAB - 1] * 4, 50, 60]])
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        one, other = (model(input_ids=ids, pixel_values=pixels).logits for model in (beside, folded))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"link": True}, {"norm_type": "scale", "fold": True}, {"start": "visual"}, {"norm_type": "none"}]
)
def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path, photos, options):
    source = tiny_llava(tmp_path / "source", shards=2)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    planned = convert(str(source), tmp_path / "new" / "target", images=photos, dry_run=True, **options)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    done = convert(str(source), tmp_path / "new" / "target", images=photos, report=False, **options)
    for key in ("norm", "calibration", "weights", "family", "notes"):
        assert planned[key] == done[key], key
    how = "link" if options.get("link") else "copy"
    text = describe(planned)
    assert f"Would {how}: model-00001-of-00002.safetensors" in text
    written = sorted(
        str(path.relative_to(tmp_path / "new" / "target"))
        for path in (tmp_path / "new" / "target").rglob("*")
        if path.is_file()
    )
    assert planned["files"] == written and "Files: chat_template.json, config.json" in text
    assert text.splitlines()[-1] == f"Nothing was written to {tmp_path / 'new' / 'target'} (--dry-run)."


def pickled(source, folder, shards=1, tied_alias=False):
    """The checkpoint `source` with its weights in .bin files."""
    folder.mkdir()
    tensors = all_tensors(source)
    if tied_alias:
        tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
    for path in source.iterdir():
        if not path.name.startswith("model"):
            (folder / path.name).write_bytes(path.read_bytes())
    names = sorted(tensors)
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save({name: tensors[name] for name in names[number::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[number::shards], file)
    write_json(folder / "pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pickled_weights_become_safetensors_of_the_same_bytes(tmp_path, shards, dtype):
    stock = tiny_llava(tmp_path / "stock", dtype=dtype)
    source = pickled(stock, tmp_path / "source", shards)
    summary = convert(str(source), tmp_path / "target", report=False)
    old, new = all_tensors(stock), all_tensors(tmp_path / "target")
    assert set(new) - set(old) == {f"multi_modal_projector.align_norm.{name}" for name in ("weight", "bias")}
    assert all(torch.equal(new[name], tensor) and new[name].dtype == dtype for name, tensor in old.items())
    assert not list((tmp_path / "target").glob("*.bin*"))
    assert {file["how"] for file in summary["weights"]} == {"rewrite"}
    found = {
        name: hashlib.sha256((tmp_path / "target" / name).read_bytes()).hexdigest()
        for name in summary["verification"]["sha256"]
    }
    assert found == summary["verification"]["sha256"] and len(found) == shards
    with pytest.raises(InputError, match="are not safetensors of a transformers LLaVA. Leave out --link"):
        convert(str(source), tmp_path / "linked", report=False, link=True)


def test_the_tied_alias_of_a_pickled_head_is_dropped(tmp_path, photos):
    stock = tiny_llava(tmp_path / "stock", tied=True)
    source = pickled(stock, tmp_path / "source", tied_alias=True)
    summary = convert(str(source), tmp_path / "target", images=photos)
    assert "language_model.lm_head.weight" not in all_tensors(tmp_path / "target")
    assert summary["report"]["text_logits_equal"]
    assert summary["verification"]["untouched"] == len(all_tensors(stock))


def test_safetensors_win_over_pickled_weights_beside_them(tmp_path):
    source = tiny_llava(tmp_path / "source")
    torch.save({"wrong": torch.zeros(2)}, source / "pytorch_model.bin")
    summary = convert(str(source), tmp_path / "target", report=False)
    assert summary["weights"][0]["from"] == "model.safetensors"
    assert not (tmp_path / "target" / "pytorch_model.bin").exists()
    assert "pytorch_model.bin was left out: the safetensors beside it are used" in summary["notes"]


def test_an_original_llava_is_converted_and_a_dry_run_of_it_writes_nothing(tmp_path):
    made = original.build(tmp_path, kind="llama")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    source, options = made.folder, {"vision": str(made.vision), "report": False}
    planned = convert(str(source), tmp_path / "target", dry_run=True, **options)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    done = convert(str(source), tmp_path / "target", **options)
    assert planned["norm"] == done["norm"] and planned["weights"] == done["weights"]
    assert {file["how"] for file in done["weights"]} == {"rewrite"}
    assert {file["from"] for file in done["weights"]} == {source.name}
    norms = made.llm.get_input_embeddings().weight.detach().double().norm(dim=1)  # without the rows that are added
    assert done["norm"]["norm_align_target"] == pytest.approx(norms.mean().item(), rel=1e-6)
    assert done["calibration"]["table"]["rows_left_out"] == done["calibration"]["table"]["rows"] - len(norms) > 0
    assert "tensors were rewritten and read back" in describe(done)


@pytest.mark.parametrize("inside", ["projector", "tower", "text", "photo"])
def test_no_input_may_lie_in_the_target(tmp_path, photos, inside):
    """--overwrite would replace it together with the folder."""
    made = original.build(tmp_path / "made", kind="llama")
    tower, text = made.vision, parts.write_text(tmp_path / "text")
    projector = tmp_path / "stage1" / "mm_projector.bin"
    projector.parent.mkdir()
    names = {f"model.mm_projector.{name}": tensor for name, tensor in made.projector.state_dict().items()}
    torch.save(names, projector)
    write_json(projector.parent / "config.json", {"mm_vision_tower": "a/tower"})
    source, target, options = str(projector), tmp_path / "target", {"vision": str(tower), "text": str(text)}
    if inside == "photo":
        source, options = str(tiny_llava(tmp_path / "source")), {"images": photos}
        write_json(photos[0].parent / "config.json", {})
        target = photos[0].parent
    elif inside != "projector":
        target = tower if inside == "tower" else text
    else:
        target = projector.parent
    before = digests(tmp_path)
    with pytest.raises(InputError, match="overlap"):
        convert(source, target, overwrite=True, report=False, **options)
    assert digests(tmp_path) == before


def test_a_model_with_nan_is_not_reported_on(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["multi_modal_projector.linear_1.weight"][0] = math.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for options in ({}, {"start": "visual"}, {"norm_type": "scale"}):
        with pytest.raises(InputError, match="visual tokens of .*source have NaN or inf .*Download or train it again"):
            convert(str(source), tmp_path / "target", images=photos, **options)
    assert not (tmp_path / "target").exists()


def test_a_template_that_only_the_tokenizer_has_is_carried_to_the_processor(tmp_path):
    source = tiny_llava(tmp_path / "source")
    (source / "chat_template.json").unlink()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
    write_json(source / "tokenizer_config.json", settings | {"chat_template": template})
    notes = convert(str(source), tmp_path / "target", report=False)["notes"]
    assert any(note.startswith("chat_template.jinja: written from tokenizer_config.json") for note in notes)
    content = [{"type": "image"}, {"type": "text", "text": "why?"}]
    processor = AutoProcessor.from_pretrained(tmp_path / "target")
    assert processor.apply_chat_template([{"role": "user", "content": content}]) == "[user] <image>\nwhy?"


def test_a_processor_of_another_kind_is_a_note_unless_a_report_was_asked_for(tmp_path, photos):
    source = tiny_llava(tmp_path / "source")
    path = source / "preprocessor_config.json"
    write_json(path, json.loads(path.read_text()) | {"processor_class": "CLIPProcessor"})
    summary = convert(str(source), tmp_path / "target", images=photos)
    assert summary["report"] is None
    assert any("name CLIPProcessor, which has no image token" in note for note in summary["notes"])
    with pytest.raises(InputError, match="CLIPProcessor"):
        convert(str(source), tmp_path / "other", images=photos, report=True)


@pytest.mark.parametrize("kind", ["llava_next", "llava_onevision", "vipllava"])
def test_the_families_convert(tmp_path, kind, photos):
    stock = tiny.stock_llava(kind=kind)
    stock.save_pretrained(tmp_path / "source")
    if kind != "llava_onevision":  # its video processor needs torchvision
        tiny.processor(kind=kind).save_pretrained(tmp_path / "source")
    summary = convert(str(tmp_path / "source"), tmp_path / "target", images=photos)
    assert summary["family"] == kind and (summary["report"] is None) == (kind == "llava_onevision")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "target").eval()
    assert model.config.model_type == f"{kind}_norm_align"
    table = stock.get_input_embeddings().weight.detach().double().norm(dim=1)
    target = table[table > 1e-6].mean().item()

    def align(module, args, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * target / x.shape[-1] ** 0.5

    stock.model.multi_modal_projector.register_forward_hook(align)
    batch = tiny.inputs(kind)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, stock(**batch).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "image"}, "--start is 'image'. Pass text .* or visual"),
        ({"start": "visual", "target_norm": 2.0}, "--start visual measures .* --target 2.0 gives one"),
        ({"start": "visual", "norm_type": "scale"}, "--start visual is for a norm with a gain .* --norm is scale"),
        ({"start": "visual", "norm_type": "none"}, "--norm is none"),
        ({"fold": True}, "--fold is for --norm scale, .* --norm is layer_norm"),
        ({"vision": "some/tower"}, "is a whole model in the transformers layout"),
        ({"target_norm": math.nan}, "--target is nan"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, options, message):
    source = tiny_llava(tmp_path / "source")
    with pytest.raises(InputError, match=message):
        convert(str(source), tmp_path / "target", report=False, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
