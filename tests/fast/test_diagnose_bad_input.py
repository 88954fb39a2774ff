"""What `diagnose` refuses: one sentence, exit code 2, nothing written; and what it says when memory is short."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from llava_norm_align.common.errors import InputError
from llava_norm_align.diagnosis.diagnose import diagnose, diagnose_model
from tests.fast.test_images import bomb, cut
from tests.helpers import refusals, safety, tiny, vlms
from tests.helpers.faults import change_config
from tests.helpers.remote import write_remote, write_remote_vlm

NEEDS = (
    "from transformers import ProcessorMixin\n\n\nclass RemoteProcessor(ProcessorMixin):\n"
    "    attributes = []\n    pass\n\n\n"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Models that are whole, but not all of a kind that can be diagnosed; and photos."""
    root = tmp_path_factory.mktemp("sources")
    tiny.stock_llava().save_pretrained(root / "stock")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(tiny.text_config()).save_pretrained(root / "llama")
    vlms.mllama()[0].save_pretrained(root / "mllama")
    write_remote_vlm(root / "remote")
    write_remote(root / "expands")
    for name in ("stock", "mllama", "remote"):
        tiny.processor().save_pretrained(root / name)
    tiny.processor().tokenizer.save_pretrained(root / "llama")
    (root / "photos").mkdir()
    for number in range(2):
        tiny.photo(number).save(root / "photos" / f"{number}.png")
    return root


@pytest.fixture(autouse=True)
def forget_remote_code(monkeypatch):
    """transformers remembers a remote class by its configuration's; the next test brings another one."""
    for mapping in (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.CONFIG_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "linear_2.weight" in name)
    change(tensors, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_processor(folder, **fields):
    """Set fields of processor_config.json; None takes one away."""
    content = json.loads((folder / "processor_config.json").read_text()) | fields
    kept = {name: value for name, value in content.items() if value is not None}
    (folder / "processor_config.json").write_text(json.dumps(kept))


def remove(folder, pattern):
    for path in folder.glob(pattern):
        path.unlink()


def cut_weights(folder, size):
    os.truncate(folder / "model.safetensors", size)


def needs_video(folder, family):
    """A processor's files as `family` has them; 4.57 has its image processor only."""
    remove(folder, "*processor*")
    name = {"qwen2_vl": "Qwen2VL", "smolvlm": "SmolVLM"}[family]
    content = {"image_processor_type": f"{name}ImageProcessor", "processor_class": f"{name}Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{name}Processor"}))
    model = getattr(vlms, family)()[0]
    model.save_pretrained(folder)


def without_num2words(folder):
    """As SmolVLM's processor, whose video processor needs torchvision before that."""
    sentence = "Package `num2words` is required to run SmolVLM processor. Install it with `pip install num2words`."
    code = "    def __init__(self, *args, **kwargs):\n        raise ImportError({!r})\n"
    (folder / "processing_remote_vlm.py").write_text(NEEDS.replace("    pass\n", code.format(sentence)))


def florence(folder):
    vision = dict(embed_dim=[8, 8], num_heads=[2, 2], num_groups=[2, 2], depths=[1, 1], window_size=4)
    vision |= dict(patch_size=[7, 3], patch_stride=[4, 2], patch_padding=[3, 1], projection_dim=32)
    text = dict(model_type="bart", vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1)
    text |= dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64)
    text |= dict(max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = transformers.Florence2Config(
        text_config=text, vision_config=vision, image_token_id=tiny.IMAGE_TOKEN_ID, is_encoder_decoder=True
    )
    transformers.Florence2ForConditionalGeneration(config).save_pretrained(folder)


def blind(folder):
    """A model that does not look."""
    code = folder / "modeling_remote_vlm.py"
    code.write_text(code.read_text().replace("seen = self.eyes(pixel_values)", "seen = self.eyes(pixel_values * 0)"))


def write(name, content):
    return lambda folder: (folder / name).write_text(content)


PROCESSOR_FILES = r"patch_size.*num_additional_image_tokens in processor_config.json.*`llava-norm-align doctor`"
# a source, what is done to the copy of it, further options, and what is said
MODELS = {
    "unknown type": ("stock", lambda folder: change_config(folder, model_type="foovlm"), "", "foovlm .*newer transf"),
    "no type": ("stock", lambda folder: change_config(folder, model_type=None), "", "no model_type"),
    "no config": ("stock", lambda folder: remove(folder, "config.json"), "", "no config.json"),
    "broken config": ("stock", write("config.json", "{"), "", "config.json is broken"),
    "untrusted": ("remote", lambda folder: None, "", "own code .*--trust-remote-code"),
    "untrusted processor": (
        "stock",
        lambda folder: change_processor(folder, auto_map={"AutoProcessor": "p.P"}, processor_class="P"),
        "",
        "own code for its processor.*--trust-remote-code|has no processor",
    ),
    "text only": ("llama", lambda folder: None, "", "is a llama, which AutoModelForImageTextToText does not load"),
    "text only with a processor": ("llama", lambda folder: tiny.processor().save_pretrained(folder), "", "is a llama"),
    "cross-attention": ("mllama", lambda folder: None, "", "cross-attention"),
    "does not look": ("remote", blind, "--trust-remote-code", "changes with the image"),
    "processor of another kind": ("expands", lambda folder: tiny.processor().save_pretrained(folder), "--trust-remote-code", "RemoteVlm fails on what LlavaProcessor makes"),  # noqa: E501
    "no processor": ("stock", lambda folder: remove(folder, "*processor*"), "", "no processor"),
    "no tokenizer": ("stock", lambda folder: remove(folder, "token*"), "", "no processor that can be loaded"),
    "broken processor": ("stock", write("processor_config.json", "{"), "", "processor_config.json"),
    "no patch_size": ("stock", lambda folder: change_processor(folder, patch_size=None), "", PROCESSOR_FILES),
    "no strategy": ("stock", lambda folder: change_processor(folder, vision_feature_select_strategy=None), "", f"tokens: 5, features.*{PROCESSOR_FILES}"),  # noqa: E501
    "no additional tokens": ("stock", lambda folder: change_processor(folder, num_additional_image_tokens=None), "", f"tokens: 3, features.*{PROCESSOR_FILES}"),  # noqa: E501
    "broken template": ("stock", write("chat_template.jinja", "{% for %}"), "", "TemplateSyntaxError.*chat template"),
    "template without image": ("stock", write("chat_template.jinja", "hello"), "", "chat template"),
    "qwen2_vl": ("stock", lambda folder: needs_video(folder, "qwen2_vl"), "", "(?i)torchvision.* Install it"),
    "smolvlm": ("stock", lambda folder: needs_video(folder, "smolvlm"), "", "(?i)torchvision.* Install it"),
    "num2words": ("expands", without_num2words, "--trust-remote-code", "num2words"),
    "missing tensor": ("stock", lambda folder: change_tensors(folder, lambda tensors, name: tensors.pop(name)), "", "missing in .*linear_2.weight"),  # noqa: E501
    "wrong shape": ("stock", lambda folder: change_tensors(folder, lambda tensors, name: tensors.update({name: torch.zeros(3, 3)})), "", "shape in .*linear_2.weight"),  # noqa: E501
    "cut": ("stock", lambda folder: cut_weights(folder, 100_000), "", "model.safetensors is (cut|damaged)"),
    "cut in the header": ("stock", lambda folder: cut_weights(folder, 100), "", "model.safetensors is (cut|damaged)"),
    "no weights": ("stock", lambda folder: remove(folder, "model.safetensors"), "", "no file named"),
}  # fmt: skip
if vlms.TRANSFORMERS_5:  # 4.57 has no Florence 2
    MODELS["encoder-decoder"] = ("stock", florence, "", "is an encoder-decoder")


@pytest.mark.parametrize(("source", "change", "options", "message"), MODELS.values(), ids=MODELS.keys())
def test_a_model_that_cannot_be_diagnosed(sources, tmp_path, run, capsys, source, change, options, message):
    shutil.copytree(sources / source, tmp_path / "source")
    change(tmp_path / "source")
    capsys.readouterr()
    line = f"diagnose {{source}} --images {{parts}}/photos --prompt picture {options}"
    refusals.check_refused(line, message, tmp_path, sources, run)


OPTIONS = {
    "--prompt=": "--prompt is empty",
    "--dtype int8": "--dtype is 'int8'; one of auto, float32, bfloat16, float16",
    "--device gpu0": "--device is 'gpu0'",
    "--device meta": "--device is 'meta'",
    "--device cuda:99": "--device is 'cuda:99'",
    "--device-map everywhere": "--device-map is 'everywhere'.*one of auto, balanced",
    "--device-map auto --device cpu": "exclude each other",
    "--revision main": "no revision main",
    "--images {root}/none.png": "no image file at",
    "--images {root}/empty": "no image file",
    "--images {root}/texts": "no image file",
    "--images {root}/text.png": "not an image",
    "--images {root}/bomb.png": "pixels",
    "--images {root}/cut.png": "broken image",
    "--images {root}/cuts": "cut.png is a broken image",
    "--compare {root}/none.json": "no none.json",
    "--compare {root}/empty": "no diagnosis.json",
    "--compare {root}/broken.json": "is broken",
    "--compare {source}/config.json": "no schema_version",
    "--out {root}/text.png": "text.png cannot be written",
    "--out {root}/text.png/below": "text.png/below cannot be written",
}


@pytest.fixture
def traps(sources, tmp_path, monkeypatch):
    shutil.copytree(sources / "stock", tmp_path / "source")
    for name in ("empty", "texts", "cuts"):
        (tmp_path / name).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "bomb.png").write_bytes(bomb())
    for name in ("cut.png", "cuts/cut.png"):
        (tmp_path / name).write_bytes(cut())
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("options", "message"), OPTIONS.items(), ids=OPTIONS.keys())
def test_bad_options(sources, traps, run, options, message):
    if "--images" not in options:
        options += " --images {parts}/photos"
    refusals.check_refused(f"diagnose {{source}} {options}", message, traps, sources, run)


@pytest.mark.parametrize(
    ("model", "message"),
    [("{root}/none", "no folder"), ("{root}/empty", "is empty"), ("{root}/text.png", "is a file"), ("a/b", "the Hub")],
)
def test_what_is_no_model(sources, traps, run, model, message):
    line = f"diagnose {model} --images {{parts}}/photos"
    refusals.check_refused(line, message, traps, sources, run)


def test_limit_0(traps, run):
    before = refusals.state(traps)
    code, _, err = run("diagnose", "source", "--limit", 0)
    assert code == 2 and "--limit" in err and "Traceback" not in err
    assert refusals.state(traps) == before
    with pytest.raises(InputError, match="--limit is 0"):
        diagnose("source", limit=0)
    with pytest.raises(InputError, match="no images"):
        diagnose_model(tiny.stock_llava(), tiny.processor(), [], name="x")


def test_image_files_of_every_kind(sources, tmp_path):
    """Two of each kind, so that both the first and a later one is of it."""
    photo, folder = tiny.photo(), tmp_path / "kinds"
    folder.mkdir()
    photo.convert("CMYK").save(folder / "cmyk.jpg")
    photo.convert("P").save(folder / "palette.png")
    photo.convert("RGBA").save(folder / "alpha.png")
    Image.fromarray(np.arange(2080, dtype=np.uint16).reshape(40, 52) * 31).save(folder / "16.png")
    photo.save(folder / "animated.gif", save_all=True, append_images=[tiny.photo(1)])
    Image.new("RGB", (1, 1), "red").save(folder / "1x1.png")
    result = diagnose(str(sources / "stock"), images=[folder], question="what is", out=tmp_path / "out")
    assert result["images"]["count"] == 6 and result["norms"]["visual"]["n"] == 6 * 4
    assert result["norms"]["visual"]["non_finite"] == 0


ALLOCATE = "torch.empty(10**15, device='cpu')"
CUDA = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")'


@pytest.mark.parametrize(
    ("fault", "said"),
    [(ALLOCATE, "allocate memory"), (CUDA, "CUDA out of memory"), ("raise MemoryError", "MemoryError")],
)
@pytest.mark.parametrize("where", ["forward", "__init__"])
def test_out_of_memory(tmp_path, sources, run, fault, said, where):
    before = {"forward": "        seen = self.eyes", "__init__": "        self.post_init()"}[where]
    folder = shutil.copytree(sources / "expands", tmp_path / "source")
    code = folder / "modeling_remote_vlm.py"
    code.write_text(code.read_text().replace(before, f"        {fault}\n{before}"))
    line = "diagnose {source} --images {parts}/photos --prompt picture --trust-remote-code"
    message = f"memory did not suffice .*{said}.*--no-attention.*bfloat16.*--load-in-4bit.*smaller images"
    refusals.check_refused(line, message, tmp_path, sources, run)


@pytest.fixture
def shared(sources):
    """A model and photos that everybody may read, unlike those in pytest's own folders."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o755)
    for name in ("stock", "photos"):
        shutil.copytree(sources / name, folder / name)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_may_not_be_written(shared, tmp_path):
    (shared / "stock").chmod(0o555)
    for path in shared.glob("*/*"):
        path.chmod(0o444)
    before = refusals.state(shared)
    command = ["diagnose", shared / "stock", "--images", shared / "photos"]
    code, output = safety.run(command, tmp_path / "log", safety.become_nobody)
    (shared / "stock").chmod(0o755)
    assert code == 2 and output.count("\n") == 1 and refusals.state(shared) == before
    assert output.startswith(
        f"Error: The folder {shared / 'stock' / 'norm_align'} cannot be written (Permission denied)"
    )
    assert "Name another --out" in output


def test_attention_that_runs_out_of_memory_keeps_the_norms(sources):
    model = tiny.stock_llava()

    def full(module, args):
        if model.get_decoder().config._attn_implementation == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.get_decoder().layers[1].register_forward_pre_hook(full)
    images = [sources / "photos" / "0.png", sources / "photos" / "1.png"]
    result = diagnose_model(model, tiny.processor(), images, name="x", question="what is")
    assert result["attention"] is None and result["norms"]["visual"]["n"] == 2 * 4
    assert len(result["missing"]) == 1 and "memory did not suffice" in result["missing"][0]
