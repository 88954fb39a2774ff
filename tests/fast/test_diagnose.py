"""`diagnose` from a saved model to its files: the whole path, on tiny models."""

import hashlib
import json
import re
import sys

import accelerate
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, LlavaForConditionalGeneration

from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_model
from llava_norm_align.diagnosis.diagnose import diagnose_model
from tests.helpers import diagnosis_result, tiny
from tests.helpers.remote import write_remote, write_remote_vlm

QUESTION = "what is in the picture ?"
PLOTS = {"layer0_norms.png", "norms_by_layer.png", "cosine_by_layer.png", "attention_map.png"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with nine photos and other things."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(9):
        tiny.photo(number).save(folder / f"{number}.png")
    tiny.photo().save(folder / "paper.pdf")
    (folder / "notes.txt").write_text("no image")
    (folder / "._0.png").write_bytes(b"\0\5\x16\7")  # what macOS leaves beside a file
    (folder / "folder.png").mkdir()
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return save(tiny.stock_llava(), tmp_path_factory.mktemp("models") / "stock")


@pytest.fixture(scope="module")
def reference(stock, photos):
    return measure(load_model(stock), photos)


@pytest.fixture
def diagnose(run, photos, tmp_path):
    """Diagnose a model on `images` photos: the result file's content."""

    def call(folder, *arguments, images=2, out=None):
        out = out or tmp_path / "out"
        options = ["--images", photos, "--limit", images, "--prompt", QUESTION, "--out", out]
        code, _, err = run("diagnose", folder, *options, *arguments)
        assert code == 0, err
        return read(out)

    return call


def measure(model, photos, processor=None):
    """Diagnose a loaded model on the first two photos, as `diagnose` below; nothing is written."""
    images, options = [photos / "0.png", photos / "1.png"], dict(question=QUESTION, with_probe=True)
    return diagnose_model(model, processor or tiny.processor(), images, name="x", **options)


def save(model, folder):
    model.save_pretrained(folder)
    tiny.processor().save_pretrained(folder)
    return folder


def read(folder):
    def refuse(name):
        raise AssertionError(f"{name} in JSON")

    return json.loads((folder / "diagnosis.json").read_text(), parse_constant=refuse)


def names(folder):
    return {path.name for path in folder.iterdir()}


def numbers(result):
    """All that was measured: what does not depend on where the files lie."""
    return {key: value for key, value in result.items() if key not in ("command", "model", "images", "missing")}


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_keys(found, expected, place=""):
    """The same keys, wherever both are there."""
    if isinstance(found, list) and isinstance(expected, list) and found and expected:
        return assert_keys(found[0], expected[0], f"{place}/0")
    if isinstance(found, dict) and isinstance(expected, dict):
        assert set(found) == set(expected), place
        for key in found:
            assert_keys(found[key], expected[key], f"{place}/{key}")


def test_a_whole_run(run, stock, photos):
    before = names(stock)
    code, out, err = run("diagnose", stock, "--images", photos, "--prompt", QUESTION, "--probe")
    assert (code, err) == (0, "")
    assert "Ratio of mean norms at layer 0, visual / text" in out and "Probe: visual tokens" in out
    assert names(stock) == before | {"norm_align"}
    folder = stock / "norm_align"
    assert names(folder) == {"diagnosis.json", "diagnosis.md", *PLOTS}
    assert {line[9:] for line in out.splitlines() if line.startswith("Written: ")} == set(map(str, folder.iterdir()))
    assert set(re.findall(r"\((\w+\.png)\)", (folder / "diagnosis.md").read_text())) == PLOTS
    for name in PLOTS:
        Image.open(folder / name).load()

    result = read(folder)
    expected = diagnosis_result.full()
    del expected["controls"]["text_only"]  # of which the example has less
    assert set(result["controls"].pop("text_only")) == {"prompts", "norms", "layers"}
    assert_keys(result, expected)
    assert result["images"] == {"count": 9, "source": str(photos), "names": [f"{number}.png" for number in range(9)]}
    assert result["missing"] == [] and result["published"] is None
    assert result["command"].startswith("llava-norm-align diagnose ")
    digest = hashlib.sha256((stock / "model.safetensors").read_bytes()).hexdigest()
    assert result["model"] == {
        "name": str(stock),
        "revision": None,
        "model_type": "llava",
        "class": "LlavaForConditionalGeneration",
        "dtype": "float32",
        "quantization": None,
        "device": "cpu",
        "attention_implementation": "sdpa",
        "decoder_layers": 2,
        "hidden_size": 32,
        "parameters": sum(tensor.numel() for tensor in load_file(stock / "model.safetensors").values()),
        "projector": "model.multi_modal_projector",
        "weights_sha256": hashlib.sha256(f"{digest}  model.safetensors\n".encode()).hexdigest(),
    }
    assert result["verdicts"]["images"] == 9 and result["ratio"]["interval"][0] < result["ratio"]["interval"][1]


def test_the_norms_are_those_of_the_hidden_states(diagnose, stock, photos):
    result = diagnose(stock, images=3)
    model, norms = LlavaForConditionalGeneration.from_pretrained(stock).eval(), []
    for number in range(3):
        text = f"USER: <image> {QUESTION} ASSISTANT:"
        inputs = tiny.processor()(text=text, images=open_image(photos / f"{number}.png"), return_tensors="pt")
        with torch.no_grad():
            norms.append(model(**inputs, output_hidden_states=True).hidden_states[0][0].norm(dim=-1))
    norms = torch.stack(norms)  # USER:, 4 visual tokens, 6 words, ASSISTANT:
    visual, text, template = norms[:, 1:5], norms[:, 5:11], norms[:, [0, 11]]
    for name, expected in (("visual", visual), ("text", text), ("template", template)):
        assert result["norms"][name]["n"] == expected.numel()
        assert result["norms"][name]["mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert result["ratio"]["mean"] == pytest.approx((visual.mean() / text.mean()).item(), rel=1e-5)


def test_json_alone_on_standard_output(run, stock, photos, tmp_path):
    options = ["--images", photos / "0.png", "--images", photos / "1.png", "--prompt", QUESTION]
    code, out, _ = run("diagnose", stock, *options, "--json", "--out", tmp_path / "new" / "out", "--no-attention")
    result = json.loads(out)
    assert code == 0 and result == read(tmp_path / "new" / "out")
    assert result["attention"] is None and result["probe"] is None
    assert result["images"]["names"] == ["0.png", "1.png"]
    assert names(tmp_path / "new" / "out") == {"diagnosis.json", "diagnosis.md", *PLOTS - {"attention_map.png"}}


def test_a_second_run_replaces_the_files_with_the_same_numbers(diagnose, stock, tmp_path):
    first = diagnose(stock)
    files = {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}
    for name in files:
        (tmp_path / "out" / name).write_text("old " * 100_000)
    second = diagnose(stock)
    assert first == second
    assert files == {name: (tmp_path / "out" / name).read_bytes() for name in names(tmp_path / "out")}


def test_compare(run, diagnose, stock, photos, tmp_path):
    diagnose(stock, out=tmp_path / "first")
    options = ["--images", photos, "--limit", 3, "--prompt", "what is a cat", "--out", tmp_path / "second"]
    code, out, _ = run("diagnose", stock, *options, "--compare", tmp_path / "first")
    assert code == 0 and "this: " in out and "other: " in out and "The images differ" in out
    assert names(tmp_path / "second") == names(tmp_path / "first")
    assert (tmp_path / "second" / "norms_by_layer.png").read_bytes() != (
        tmp_path / "first" / "norms_by_layer.png"
    ).read_bytes()


def test_without_matplotlib_a_sentence_and_no_broken_link(diagnose, stock, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    result = diagnose(stock)
    assert [line for line in result["missing"] if "matplotlib" in line and "llava-norm-align[plots]" in line]
    assert len(result["missing"]) == 1
    assert names(tmp_path / "out") == {"diagnosis.json", "diagnosis.md"}
    assert ".png)" not in (tmp_path / "out" / "diagnosis.md").read_text()


def test_the_sample_photos_and_the_prompt_of_its_own(run, stock, tmp_path):
    assert run("diagnose", stock, "--limit", 2, "--out", tmp_path, "--no-attention")[0] == 0
    result = read(tmp_path)
    assert result["images"]["source"] == "scikit-image's photos" and len(result["images"]["names"]) == 2
    # the tiny tokenizer knows none of its words, so they cannot be told from the template's
    assert result["missing"] == [
        "The prompt's tokens do not spell out the question, so none of them counts as text."
    ] and result["ratio"] == {"mean": None, "interval": None, "median": None}


def test_the_checkpoints_dtype_and_another(reference, diagnose, photos, tmp_path):
    half = save(tiny.stock_llava().to(torch.bfloat16), tmp_path / "half")
    stored, widened = diagnose(half), measure(load_model(half, "float32"), photos)
    assert (stored["model"]["dtype"], widened["model"]["dtype"]) == ("bfloat16", "float32")
    for result in (stored, widened):
        for name in ("visual", "text"):
            assert result["norms"][name]["mean"] == pytest.approx(reference["norms"][name]["mean"], rel=2e-2)


def test_our_own_converted_model(run, diagnose, stock, tmp_path):
    assert run("convert", stock, tmp_path / "aligned", "--no-report")[0] == 0
    result = diagnose(tmp_path / "aligned")
    assert result["model"]["class"] == "LlavaNormAlignForConditionalGeneration"
    tensors = load_file(stock / "model.safetensors")
    table = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    target = table.norm(dim=1).mean().item()
    assert result["norms"]["text_table"]["mean_of_used_rows"] == pytest.approx(target, rel=1e-5)
    assert result["norms"]["visual"]["mean"] == pytest.approx(target, rel=1e-3)
    assert result["norms"]["projector_output"]["mean"] == result["norms"]["visual"]["mean"]


def test_a_processor_that_gives_more_than_a_model_takes(reference, stock, photos):
    processor = tiny.processor()
    processor.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert numbers(measure(load_model(stock), photos, processor)) == numbers(reference)
    forward = LlavaForConditionalGeneration.forward

    class Strict(LlavaForConditionalGeneration):
        def forward(self, input_ids=None, pixel_values=None, attention_mask=None):
            return forward(self, input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)

    model = Strict.from_pretrained(stock).eval()
    assert measure(model, photos, processor)["norms"] == reference["norms"]


# Remote code


def test_remote_code(diagnose, tmp_path):
    write_remote_vlm(tmp_path / "remote")
    tiny.processor().save_pretrained(tmp_path / "remote")
    result = diagnose(tmp_path / "remote", "--trust-remote-code")
    assert result["model"]["class"] == "RemoteVlm" and result["model"]["projector"] is None
    assert len(result["missing"]) == 1 and "The projector of RemoteVlm" in result["missing"][0]
    assert result["norms"]["projector_output"] is None and result["norms"]["visual"]["n"] == 2 * 4
    assert result["ratio"]["mean"] > 0 and len(result["layers"]) == 3


def test_remote_code_in_which_one_id_stands_for_the_whole_image(diagnose, tmp_path):
    result = diagnose(write_remote(tmp_path / "remote"), "--trust-remote-code", "--probe")
    assert [line.partition(" ")[0] for line in result["missing"]] == ["The", "The"]
    assert result["missing"][1].startswith("The text-only control is missing: RemoteProcessor cannot make")
    assert result["norms"]["visual"]["n"] == 2 * 4 and result["norms"]["text"]["n"] == 2 * 6
    assert result["attention"]["image_tokens_share"] == pytest.approx(4 / 12)
    assert result["controls"]["text_only"] is None and result["controls"]["blank_image"]["images"] == 2


# Where the weights lie


def wide_llava():
    """Of the widths that bitsandbytes can multiply on a CPU."""
    config = tiny.llava_config()
    for part in (config.vision_config, config.text_config):
        part.hidden_size, part.intermediate_size = 128, 256
    config.text_config.head_dim = 32
    torch.manual_seed(0)
    return tiny.randomize(LlavaForConditionalGeneration(config)).eval()


def test_four_bits(diagnose, photos, tmp_path):
    pytest.importorskip("bitsandbytes")
    folder = save(wide_llava(), tmp_path / "wide")
    whole, quantised = measure(load_model(folder), photos), diagnose(folder, "--load-in-4bit", "--device", "cpu")
    packed = AutoModelForImageTextToText.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    stored = measure(load_model(save(packed, tmp_path / "packed"), "float32"), photos)
    again = measure(load_model(tmp_path / "packed", "float32", four_bit=True), photos)
    assert whole["model"]["quantization"] is None
    for result in (quantised, stored, again):
        assert result["model"]["quantization"] == "bitsandbytes" and result["missing"] == []
        assert result["model"]["parameters"] == whole["model"]["parameters"]
        for name in ("text", "text_table", "text_embedding_output"):  # embeddings are not quantised
            assert result["norms"][name]["mean"] == pytest.approx(whole["norms"][name]["mean"], rel=1e-3)
        assert result["norms"]["visual"]["mean"] != whole["norms"]["visual"]["mean"]
    assert quantised["norms"]["text"] == whole["norms"]["text"]
    assert numbers(again) == numbers(stored)


def test_device_map(reference, diagnose, stock):
    assert numbers(diagnose(stock, "--device-map", "auto", "--probe")) == numbers(reference)


DISK = {
    "model.vision_tower": "cpu",
    "model.multi_modal_projector": "disk",
    "model.language_model.embed_tokens": "disk",
    "model.language_model.layers.0": "cpu",
    "model.language_model.layers.1": "disk",
    "model.language_model.norm": "cpu",
    "model.language_model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_offloaded_weights(reference, stock, photos, tmp_path, where):
    if where == "disk":
        model = AutoModelForImageTextToText.from_pretrained(stock, device_map=DISK, offload_folder=tmp_path / "disk")
    else:
        model = accelerate.cpu_offload(load_model(stock), execution_device=torch.device("cpu"))
    placed = {parameter.device.type for parameter in model.eval().parameters()}
    assert placed == ({"cpu", "meta"} if where == "disk" else {"meta"})
    result = measure(model, photos)
    assert numbers(result) == numbers(reference)
    assert result["missing"] == [] and result["model"]["device"] == "cpu"


# Numbers that are none


@pytest.mark.parametrize(("factor", "dtype"), [(float("nan"), "float32"), (1e5, "float16")])
def test_visual_tokens_that_are_not_finite(reference, diagnose, tmp_path, factor, dtype):
    folder = save(tiny.stock_llava(), tmp_path / "broken")
    name = next(name for name in load_file(folder / "model.safetensors") if "linear_2.weight" in name)
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name] * factor}))
    result = diagnose(folder, "--dtype", dtype, "--probe")
    for place in ("visual", "projector_output"):
        assert (result["norms"][place]["n"], result["norms"][place]["non_finite"]) == (0, 2 * 4)
        assert result["norms"][place]["mean"] is None
    for place in ("text", "encoder_features"):
        assert result["norms"][place]["mean"] == pytest.approx(reference["norms"][place]["mean"], rel=1e-3)
    assert result["ratio"] == {"mean": None, "interval": None, "median": None}
    assert result["verdicts"]["a1"] == result["verdicts"]["a2"] == {"holds": 0, "fails": 0, "undecided": 0, "none": 2}
    assert result["attention"] is None and result["probe"] is None
    assert [line.partition(".")[0].partition(":")[0] for line in result["missing"]] == [
        "The attention is not shown",
        "The probe is missing",
    ]


def test_one_image_whose_tokens_are_not_finite(photos):
    model, seen = tiny.stock_llava(), []

    def broken(module, args, output):
        seen.append(args[0])
        return output if torch.equal(args[0], seen[0]) else output * torch.nan

    model.model.multi_modal_projector.register_forward_hook(broken)
    result = measure(model, photos)
    assert result["norms"]["visual"]["non_finite"] == 4
    assert result["attention"]["images"] == result["probe"]["images"] == 1
    assert sorted(line.split(" left out of the ")[1][:5] for line in result["missing"]) == ["atten", "probe"]


def test_layers_that_drop_tokens(reference, stock, photos):
    model = load_model(stock)
    model.model.language_model.layers[-1].register_forward_hook(lambda module, args, output: output[:, ::2])
    result = measure(model, photos)
    assert result["layers"] == [] and result["norms"] == reference["norms"] and result["ratio"] == reference["ratio"]
    assert len(result["missing"]) == 1
    assert re.match(r"The layers are not measured\. Decoder layer 1 turns .* \[1, 12, 32\] into", result["missing"][0])
    assert result["controls"]["blank_image"]["layers"] == [] and result["attention"] and result["probe"]
