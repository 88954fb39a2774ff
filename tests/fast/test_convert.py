"""convert: what is written, under which names, and what the converted model computes."""

import json
import math

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.conversion import convert as conversion
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.describe import conclusion
from llava_norm_align.conversion.report import run_job
from tests.helpers.convert import HIDDEN, IMAGE, VOCAB, tiny_llava, write_json

PREFIX = {"old": "multi_modal_projector.", "new": "model.multi_modal_projector."}
WRITTEN_FOR_ALL = {
    "config.json", "generation_config.json", "chat_template.json", "tokenizer.json", "tokenizer_config.json",
    "preprocessor_config.json", "processor_config.json", "norm_align", "configuration_llava_norm_align.py",
    "modeling_llava_norm_align.py",
}  # fmt: skip


def converted(tmp_path, source=None, **options):
    source = source or tiny_llava(tmp_path / "source")
    return source, tmp_path / "target", convert(str(source), tmp_path / "target", **{"report": False, **options})


def mean_text_norm(folder):
    """T by the definition, with numpy."""
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if name.endswith("embed_tokens.weight"):
                norms = (tensor.double().numpy() ** 2).sum(axis=1) ** 0.5
                return norms[norms > 0].mean()


def inputs(patches=4, seed=0):
    pixels = torch.randn(1, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor([[1, 40, *[VOCAB - 1] * patches, 50, 60]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def load(folder, cls=AutoModelForImageTextToText):
    model, info = cls.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_are_copied_byte_for_byte_and_the_norm_is_a_file_of_its_own(tmp_path, layout, shards):
    source = tiny_llava(tmp_path / "source", layout=layout, shards=shards, dtype=torch.bfloat16)
    source, target, summary = converted(tmp_path, source)

    names = [f"model-{number:05d}-of-{shards + 1:05d}.safetensors" for number in range(1, shards + 2)]
    written = {path.name for path in target.iterdir()} - {
        "special_tokens_map.json"
    }  # transformers 4.57 writes that one
    assert written == WRITTEN_FOR_ALL | set(names) | {"model.safetensors.index.json"}
    for before, after in zip(sorted(source.glob("*.safetensors")), names[:-1], strict=True):
        assert before.read_bytes() == (target / after).read_bytes()
        assert not (target / after).is_symlink()
    norm = load_file(target / names[-1])
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in norm.items()} == {
        f"{PREFIX[layout]}align_norm.weight": (torch.float32, (HIDDEN,)),
        f"{PREFIX[layout]}align_norm.bias": (torch.float32, (HIDDEN,)),
    }
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    for name in names:
        with safe_open(target / name, framework="pt") as file:
            assert set(file.keys()) == {key for key, file_name in index.items() if file_name == name}
    assert summary["verification"]["untouched"] == len(index) - 2
    json.dumps(summary, allow_nan=False)


def test_the_gain_starts_at_the_mean_text_norm_over_sqrt_d(tmp_path):
    source, target, summary = converted(tmp_path)
    expected = mean_text_norm(source)
    assert summary["calibration"]["target_norm"] == pytest.approx(expected, rel=1e-12)
    norm = load(target).model.multi_modal_projector.align_norm
    torch.testing.assert_close(norm.weight, torch.full((HIDDEN,), expected / math.sqrt(HIDDEN)).float())
    assert torch.equal(norm.bias, torch.zeros(HIDDEN))

    stored = json.loads((target / "norm_align" / "calibration.json").read_text())
    assert stored["target_norm"] == summary["calibration"]["target_norm"]
    assert stored["table"]["rows"] == VOCAB and stored["table"]["rows_left_out"] == 1  # the padding row is zero
    assert set(stored["versions"]) >= {"llava_norm_align", "transformers", "torch"} and stored["schema_version"]


def test_every_field_of_the_source_config_stays_and_ours_are_added(tmp_path):
    source, target, _ = converted(tmp_path, bias=False, gradient_compensation=False, target_norm=1.5)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    ours = {
        "model_type": "llava_norm_align",
        "architectures": ["LlavaNormAlignForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_llava_norm_align.LlavaNormAlignConfig",
            "AutoModel": "modeling_llava_norm_align.LlavaNormAlignModel",
            "AutoModelForImageTextToText": "modeling_llava_norm_align.LlavaNormAlignForConditionalGeneration",
            "AutoModelForVision2Seq": "modeling_llava_norm_align.LlavaNormAlignForConditionalGeneration",
        },
        "norm_align_type": "layer_norm",
        "norm_align_bias": False,
        "norm_align_gradient_compensation": False,
        "norm_align_target": 1.5,
    }
    assert before["house_note"] == {"kept": True}
    assert after == before | ours


@pytest.mark.parametrize(
    ("vision", "layout", "tied"),
    [("clip", "old", False), ("siglip", "new", True), ("dinov2", "old", True), ("clip", "new", True)],
)
def test_the_converted_model_is_the_stock_model_with_a_layer_norm_after_the_projector(tmp_path, vision, layout, tied):
    source = tiny_llava(tmp_path / "source", layout=layout, vision=vision, tied=tied)
    source, target, summary = converted(tmp_path, source)
    stock, model = load(source, LlavaForConditionalGeneration), load(target)
    text = {"input_ids": torch.tensor([[1, 40, 50, 60]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    image = inputs(patches=4)

    def align(module, args, x):  # by the definition: xhat T / sqrt(D)
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mean_text_norm(source) / HIDDEN**0.5

    with torch.no_grad():
        assert torch.equal(stock(**text).logits, model(**text).logits)
        plain = stock(**image).logits
        stock.model.multi_modal_projector.register_forward_hook(align)
        aligned = stock(**image).logits
        torch.testing.assert_close(model(**image).logits, aligned, atol=1e-5, rtol=1e-5)
        assert (aligned - plain).abs().max() > 1e-3  # the comparison can fail
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


def test_the_inner_model_loads_alone(tmp_path):
    _, target, _ = converted(tmp_path)
    model = AutoModel.from_pretrained(target, dtype="auto")
    assert type(model).__name__ == "LlavaNormAlignModel"
    assert model.multi_modal_projector.align_norm.weight.dtype == torch.float32


def test_the_norm_stays_in_fp32_beside_bf16_weights(tmp_path):
    _, target, _ = converted(tmp_path, tiny_llava(tmp_path / "source", dtype=torch.bfloat16))
    model = load(target)
    norm = model.model.multi_modal_projector.align_norm
    assert norm.weight.dtype == norm.bias.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_the_stock_class_is_not_what_auto_classes_load(tmp_path):
    """A checkpoint that keeps the type llava loads in the stock class, which drops the norm without an error."""
    _, target, _ = converted(tmp_path)
    assert type(load(target)).__name__ == "LlavaNormAlignForConditionalGeneration"


@pytest.mark.parametrize("layout", ["old", "new"])
def test_the_norm_has_the_projectors_prefix(tmp_path, layout):
    """LLaVA's own training scripts save and reload the keys under that prefix, and no others."""
    _, target, summary = converted(tmp_path, tiny_llava(tmp_path / "source", layout=layout))
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    prefixes = {name[: name.index("multi_modal_projector.")] for name in index if "multi_modal_projector" in name}
    assert len(prefixes) == 1
    assert sum("align_norm" in name for name in index) == 2


@pytest.mark.parametrize("top", [True, False, None])
@pytest.mark.parametrize("text", [True, False, None])
def test_a_model_without_a_head_is_tied_for_every_reader(tmp_path, top, text):
    """4.57 reads the flag of text_config, 5 both: where a flag is missing, a reader has a random head."""
    source = tiny_llava(tmp_path / "source", tied=True)
    config = json.loads((source / "config.json").read_text())
    for part, flag in ((config, top), (config["text_config"], text)):
        part.pop("tie_word_embeddings") if flag is None else part.update(tie_word_embeddings=flag)
    write_json(source / "config.json", config)
    if not (top or text):
        with pytest.raises(InputError, match="have no lm_head.weight, and config.json does not tie it"):
            converted(tmp_path, source)
        return
    source, target, summary = converted(tmp_path, source)
    written = json.loads((target / "config.json").read_text())
    assert written["tie_word_embeddings"] is True and written["text_config"]["tie_word_embeddings"] is True
    assert any("tie_word_embeddings -> true" in note for note in summary["notes"]) == (not (top and text))
    model = load(target)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_stored_head_counts_where_only_the_top_level_says_tied(tmp_path):
    """The top level's flag is true by default in 4.57; both lines then use the head that is stored."""
    source = tiny_llava(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", config | {"tie_word_embeddings": True})
    source, target, _ = converted(tmp_path, source)
    assert torch.equal(
        load(target).lm_head.weight, load_file(source / "model.safetensors")["language_model.lm_head.weight"]
    )


def test_a_stored_head_that_equals_the_table_may_be_tied(tmp_path):
    source = tiny_llava(tmp_path / "source", tied=True)
    tensors = load_file(source / "model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    source, target, _ = converted(tmp_path, source)
    model = load(target)
    assert torch.equal(model.lm_head.weight, tensors["language_model.lm_head.weight"])


def test_rms_norm_without_bias(tmp_path):
    source, target, _ = converted(tmp_path, norm_type="rms_norm", bias=False)
    assert list(load_file(target / "model-00002-of-00002.safetensors")) == ["multi_modal_projector.align_norm.weight"]
    stock, model = load(source, LlavaForConditionalGeneration), load(target)
    stock.model.multi_modal_projector.register_forward_hook(
        lambda module, args, x: (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mean_text_norm(source) / HIDDEN**0.5
        )
    )
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs()).logits, stock(**inputs()).logits, atol=1e-5, rtol=1e-5)


def test_none_adds_no_tensor_and_changes_nothing(tmp_path):
    source, target, summary = converted(tmp_path, norm_type="none")
    assert [path.name for path in target.glob("model*.safetensors*")] == ["model.safetensors"]
    written = json.loads((target / "config.json").read_text())
    ours = {name: value for name, value in written.items() if name.startswith("norm_align")}
    assert ours == {"norm_align_type": "none", "norm_align_target": None}
    with torch.no_grad():
        stock = load(source, LlavaForConditionalGeneration)(**inputs()).logits
        assert torch.equal(load(target)(**inputs()).logits, stock)


def test_scale_brings_the_projectors_mean_norm_to_the_target(tmp_path, monkeypatch, photos):
    monkeypatch.setattr(conversion, "run_in_fresh_process", run_job)
    source, target, summary = converted(tmp_path, norm_type="scale", images=photos, target_norm=0.75)
    stock, norms = load(source, LlavaForConditionalGeneration), []
    stock.model.multi_modal_projector.register_forward_hook(lambda module, args, x: norms.append(x.norm(dim=-1)))
    process = AutoProcessor.from_pretrained(target).image_processor
    with torch.no_grad():
        for photo in photos:
            stock.model.get_image_features(process(open_image(photo), return_tensors="pt").pixel_values)
    expected = 0.75 / torch.cat(norms).mean().item()
    assert summary["norm"]["norm_align_scale"] == pytest.approx(expected, rel=1e-5)
    written = json.loads((target / "config.json").read_text())
    assert written["norm_align_scale"] == pytest.approx(expected, rel=1e-5)
    assert "norm_align_bias" not in written and written["norm_align_target"] == 0.75
    assert not list(target.glob("*.index.json"))
    load(target)


@pytest.fixture
def photos(tmp_path):
    paths = []
    for seed in range(2):
        pixels = torch.randint(0, 256, (40, 52, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        paths.append(tmp_path / f"photo{seed}.png")
        Image.fromarray(pixels.numpy()).save(paths[-1])
    return paths


def test_a_given_target_overrides_the_table(tmp_path):
    _, target, summary = converted(tmp_path, target_norm=3.0)
    assert summary["calibration"]["target_from"] == "given"
    weight = load_file(target / "model-00002-of-00002.safetensors")["multi_modal_projector.align_norm.weight"]
    torch.testing.assert_close(weight, torch.full((HIDDEN,), 3.0 / math.sqrt(HIDDEN)))


def test_small_text_files_come_along_and_training_leftovers_do_not(tmp_path):
    source = tiny_llava(tmp_path / "source")
    kept = {"README.md": "# card", "LICENSE": "text", "merges.txt": "a b", "added_tokens.json": "{}"}
    left = [
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "pytorch_model.bin",
        "modeling_other.py",
        ".gitattributes",
    ]
    for name in [*kept, *left]:
        (source / name).write_text(kept.get(name, "x"))
    (source / "checkpoint-1").mkdir()
    (source / "checkpoint-1" / "vocab.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ 1 }}")
    _, target, _ = converted(tmp_path, source)
    assert {name: (target / name).read_text() for name in kept} == kept
    assert not any((target / name).exists() for name in [*left, "checkpoint-1"])
    assert (target / "additional_chat_templates" / "tools.jinja").read_text() == "{{ 1 }}"
    for name in ("tokenizer.json", "generation_config.json", "chat_template.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path):
    source = tiny_llava(tmp_path / "source")
    write_json(source / "model.safetensors.index.json", {"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    _, target, _ = converted(tmp_path, source)
    load(target)


def test_a_source_of_links_gives_real_files(tmp_path):
    """The Hub's cache holds links into a folder of blobs."""
    blobs = tiny_llava(tmp_path / "blobs", shards=2)
    source = tmp_path / "source"
    source.mkdir()
    for path in blobs.iterdir():
        (source / path.name).symlink_to(path)
    _, target, _ = converted(tmp_path, source)
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "tokenizer.json").read_bytes() == (blobs / "tokenizer.json").read_bytes()
    load(target)


def test_an_existing_folder_is_replaced_only_on_demand(tmp_path):
    source, target, _ = converted(tmp_path)
    (target / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match="not empty"):
        convert(str(source), target, report=False)
    assert (target / "mine.txt").exists()
    convert(str(source), target, report=False, overwrite=True)
    assert not (target / "mine.txt").exists()
    load(target)


def test_a_conversion_without_a_report_does_not_claim_an_agreement(tmp_path):
    _, _, summary = converted(tmp_path)
    assert conclusion(summary) == (
        "Train this model before use: its agreement with the source was not measured (--report does)."
    )
