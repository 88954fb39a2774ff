"""The target norm, and whether a language model scales its embeddings after the table."""

import hashlib
import json
import math
import re
import resource

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, LlavaForConditionalGeneration

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.weights import read_header
from llava_norm_align.conversion import calibration
from llava_norm_align.conversion.calibration import check_gain, check_target_norm, measure_table
from llava_norm_align.conversion.convert import convert
from llava_norm_align.conversion.embedding_scale import measure_embedding_scale
from llava_norm_align.diagnosis.measure import measure_layer0
from tests.helpers.convert import HIDDEN, VOCAB, tiny_config, tiny_llava

ROWS, WIDTH = 50, 6
TRANSFORMERS_5 = int(transformers.__version__.split(".")[0]) >= 5


def store(folder, table):
    """A file in which the table does not come first, so that its offset counts."""
    save_file({"a": torch.ones(7), "table": table, "z": torch.ones(3)}, folder / "weights.safetensors")
    return next(tensor for tensor in read_header(folder / "weights.safetensors") if tensor.name == "table")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mean_norm_of_the_rows_that_are_not_zero(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(calibration, "CHUNK", 7 * WIDTH * 2)  # several chunks, the last one shorter
    table = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).mul(0.1).to(dtype)
    table[[3, 17]] = 0  # reserved rows
    found = measure_table(store(tmp_path, table), ROWS, WIDTH)

    values = table.double().numpy()
    norms = np.sqrt((values**2).sum(axis=1))
    norms = norms[norms > 0]
    assert (found["rows"], found["rows_used"], found["rows_left_out"]) == (50, 48, 2)
    assert found["mean"] == pytest.approx(norms.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(norms.std(), rel=1e-12)
    assert found["median"] == pytest.approx(np.median(norms), rel=1e-12)
    for q, value in found["quantiles"].items():
        assert value == pytest.approx(np.quantile(norms, float(q)), rel=1e-12)
    raw = table.view(torch.uint8).numpy().tobytes()
    assert found["sha256"] == hashlib.sha256(raw).hexdigest()


def test_a_row_is_unused_by_its_norm_not_by_its_largest_entry(tmp_path):
    table = torch.zeros(3, WIDTH)
    table[0] = 1.0
    table[1] = calibration.UNUSED * 0.9  # every entry is under eps, the norm sqrt(6) * 0.9 eps is not
    table[2, 0] = calibration.UNUSED * 0.9
    assert measure_table(store(tmp_path, table), 3, WIDTH)["rows_used"] == 2


def test_half_precision_rows_are_squared_in_a_wider_type(tmp_path):
    table = torch.full((2, WIDTH), 1e-3, dtype=torch.float16)  # 1e-6 squared underflows in fp16 sums; 300**2 overflows
    table[1] = 300.0
    expected = (math.sqrt(WIDTH) * float(table[0, 0]) + math.sqrt(WIDTH) * 300) / 2
    assert measure_table(store(tmp_path, table), 2, WIDTH)["mean"] == pytest.approx(expected, rel=1e-12)


def spoiled(value):
    table = torch.ones(ROWS, WIDTH)
    table[5, 2] = value
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (spoiled(math.nan), "NaN or inf in 1 of 50 rows"),
        (spoiled(math.inf), "NaN or inf in 1 of 50 rows"),
        (torch.ones(ROWS + 1, WIDTH), r"shape \[51, 6\].*vocab_size 50 and hidden_size 6"),
        (torch.ones(ROWS, WIDTH - 1), r"shape \[50, 5\].*vocab_size 50 and hidden_size 6"),
        (torch.ones(ROWS * WIDTH), r"shape \[300\]"),
        (torch.ones(ROWS, WIDTH, dtype=torch.int8), "stored as I8: quantised"),
        (torch.ones(ROWS, WIDTH).to(torch.float8_e4m3fn), "quantised"),
    ],
)
def test_a_table_that_gives_no_target_is_refused(tmp_path, table, message):
    with pytest.raises(InputError, match=message):
        measure_table(store(tmp_path, table), ROWS, WIDTH)


def test_a_table_of_zeros_has_no_statistics(tmp_path):
    found = measure_table(store(tmp_path, torch.zeros(ROWS, WIDTH)), ROWS, WIDTH)
    assert (found["rows_used"], found["rows_left_out"], found["mean"], found["std"]) == (0, ROWS, None, None)
    json.dumps(found, allow_nan=False)


def test_a_table_of_zeros_is_no_obstacle_for_a_given_target(tmp_path):
    source = tiny_llava(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["language_model.model.embed_tokens.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    summary = convert(str(source), tmp_path / "target", report=False, target_norm=2.0)
    stored = json.loads((tmp_path / "target" / "norm_align" / "calibration.json").read_text())
    assert stored["target_norm"] == 2.0 and stored["target_from"] == "given"
    assert stored["table"]["mean"] is None and stored["table"]["rows_used"] == 0
    assert summary["norm"]["norm_align_target"] == 2.0


@pytest.mark.parametrize("target_norm", [1e300, 1e-300, 1e-38, 2e39])
def test_a_target_whose_gain_is_no_normal_float32_is_refused(tmp_path, target_norm):
    with pytest.raises(InputError, match="target norm .* gain of"):
        check_gain(target_norm, HIDDEN)
    with pytest.raises(InputError, match="target norm .* gain of"):
        convert(str(tiny_llava(tmp_path / "source")), tmp_path / "target", report=False, target_norm=target_norm)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("target_norm", [1e-37, 1.0, 1e39])
def test_a_target_whose_gain_is_a_normal_float32_is_taken(target_norm):
    check_gain(target_norm, HIDDEN)


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, "1.0"])
def test_a_target_must_be_a_positive_finite_norm(value):
    with pytest.raises(InputError, match="--target is .* positive, finite"):
        check_target_norm(value)


@pytest.mark.parametrize("value", [None, 1, 0.8, 1e-3])
def test_a_norm_is_a_good_target(value):
    check_target_norm(value)


def factors_in_a_whole_llava(config):
    """What text and image tokens are multiplied by on their way to decoder layer 0, read off a complete tiny LLaVA."""
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    table = model.get_input_embeddings().weight
    captured = {}
    model.model.multi_modal_projector.register_forward_hook(lambda module, args, output: captured.update(image=output))
    model.get_decoder().layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: captured.update(states=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    patches = 4 if config.vision_feature_select_strategy == "default" else 5
    ids = torch.tensor([[5, 6, *[config.image_token_id] * patches, 7]])
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=torch.randn(1, 3, 28, 28))
    states = captured["states"][0]
    return {
        "text": (states[0].norm() / table[5].norm()).item(),
        "image": (states[2 : 2 + patches].norm() / captured["image"].norm()).item(),
    }


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("llama", {}, (1, 1)),
        ("qwen2", {}, (1, 1)),
        ("mistral", {}, (1, 1)),
        ("granite", {"embedding_multiplier": 12.0}, (12, 12)),
        ("gemma", {}, (math.sqrt(HIDDEN), 1 if TRANSFORMERS_5 else math.sqrt(HIDDEN))),
        ("gemma2", {}, (math.sqrt(HIDDEN), 1 if TRANSFORMERS_5 else math.sqrt(HIDDEN))),
        ("gemma3_text", {}, (math.sqrt(HIDDEN), 1)),
    ],
)
def test_the_scale_after_the_table_is_measured_on_the_installed_transformers(text, fields, expected):
    config = tiny_config(text=text)
    for name, value in fields.items():
        setattr(config.text_config, name, value)
    scale = measure_embedding_scale(config.text_config)
    whole = factors_in_a_whole_llava(config)
    assert (scale.text, scale.image) == pytest.approx(expected, rel=1e-4)
    assert (scale.text, scale.image) == pytest.approx((whole["text"], whole["image"]), rel=1e-3)
    assert scale.is_one == (expected == (1, 1))


def test_measuring_the_scale_takes_no_memory_for_the_layers():
    """A 70B-sized language model: one layer alone would take 3.4 GB."""
    config = tiny_config().text_config
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = type(config)(**{**config.to_dict(), **wide, "head_dim": 128, "num_hidden_layers": 80})
    before = peak_memory()
    assert measure_embedding_scale(config).is_one
    assert peak_memory() - before < 100e6


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_an_embedding_that_is_not_a_multiple_of_its_row_has_no_scale():
    config = transformers.AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2)  # learned positions are added
    assert measure_embedding_scale(config) is None


@pytest.mark.parametrize(("text", "named"), [("gemma2", "gemma2"), ("granite", "granite")])
def test_a_language_model_that_scales_its_embeddings_needs_a_target(tmp_path, text, named):
    source = tiny_llava(tmp_path / "source", text=text)
    config = json.loads((source / "config.json").read_text())
    if text == "granite":
        config["text_config"]["embedding_multiplier"] = 12.0
        (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=rf"\({named}\) changes embeddings after the table: in transformers .* --target"
    ):
        convert(str(source), tmp_path / "target", report=False)
    assert not (tmp_path / "target").exists()

    summary = convert(str(source), tmp_path / "target", report=False, target_norm=2.5)
    assert summary["calibration"]["target_from"] == "given"
    assert summary["norm"]["norm_align_target"] == 2.5


def test_the_target_that_the_refusal_advises_gives_equal_norms(tmp_path):
    """Gemma 2: text arrives at layer 0 with sqrt(D) times its row's norm; visual tokens must arrive with the same."""
    source = tiny_llava(tmp_path / "source", text="gemma2")
    with pytest.raises(InputError) as refusal:
        convert(str(source), tmp_path / "target", report=False)
    advised = float(re.search(r"--target ([\d.]+)\.$", str(refusal.value))[1])
    convert(str(source), tmp_path / "target", report=False, target_norm=advised)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "target").eval()
    everything = torch.arange(3, VOCAB - 1)[None]
    ids = torch.cat([torch.full((1, 4), VOCAB - 1), everything], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 28, 28)}
    norms = measure_layer0(model, [inputs]).norms
    assert norms["visual"].summary()["mean"] == pytest.approx(norms["text"].summary()["mean"], rel=0.02)
