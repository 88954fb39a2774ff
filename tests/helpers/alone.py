"""Run by tests as a script: writes, reads and saves models as a user without the package does.

usage: python alone.py REQUEST.json ANSWER.json     a list of tasks in, a list of results out
"""

import json
import shutil
import sys
import warnings
from pathlib import Path

sys.modules["llava_norm_align"] = None  # an installed package cannot be imported either
sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("error", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*AutoModelForVision2Seq.*")  # 4.57.6 always gives it
warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")  # PEFT asks for it

import tiny  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoProcessor, AutoTokenizer  # noqa: E402
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: E402

CONFIG_FIELDS = (
    "norm_align_type",
    "norm_align_bias",
    "norm_align_eps",
    "norm_align_target",
    "norm_align_scale",
    "norm_align_gradient_compensation",
    "norm_align_compensation_floor",
    "image_token_index",
    "image_token_id",
    "image_seq_length",
    "projector_hidden_act",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "multimodal_projector_bias",
    # not every kind of model has these
    "projector_layernorm_eps",
    "image_grid_pinpoints",
    "vision_aspect_ratio",
    "video_token_index",
    "tie_word_embeddings",
)
NO_PROCESSOR = "llava_onevision"  # its processor needs torchvision in transformers 5


def model_class(task):
    name = task.get("class", "AutoModelForImageTextToText")
    if hasattr(transformers, name):
        return getattr(transformers, name)
    return get_class_from_dynamic_module(name, task["code"])  # file.Class


def load(task):
    options = {"trust_remote_code": True, "output_loading_info": True, **task.get("options", {})}
    return model_class(task).from_pretrained(task["folder"], **options)


def write_stock(task):
    """Save a stock LLaVA, and what it answers when a norm written in plain tensors follows its projector."""
    kind, tower = task["kind"], task["tower"]
    model = tiny.stock_llava(tower, task["family"], task["tied"], kind=kind)
    model.save_pretrained(task["folder"], max_shard_size=task["shard"])
    processor = tiny.processor(tower, kind)
    (processor.tokenizer if kind == NO_PROCESSOR else processor).save_pretrained(task["folder"])
    target = model.get_input_embeddings().weight.detach().double().norm(dim=1).mean().item()

    def align(module, inputs, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * target / x.shape[-1] ** 0.5

    model.model.multi_modal_projector.register_forward_hook(align)
    with torch.no_grad():
        torch.save({"logits": model(**tiny.inputs(kind, tower)).logits}, task["out"])
    return {}


def read(task):
    model, info = load(task)
    if task["kind"] == NO_PROCESSOR:
        inputs, prompt = tiny.inputs(task["kind"]), None
    else:
        processor = AutoProcessor.from_pretrained(task["folder"], trust_remote_code=True)
        inputs = tiny.prompt_with_image(processor)
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is a cat"}]}],
            add_generation_prompt=True,
        )
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    torch.save({"logits": logits, "pixel_values": inputs["pixel_values"]}, task["out"])
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "input_ids": inputs["input_ids"][0].tolist(),
        "prompt": prompt,
        "class": type(model).__name__,
        "config": {name: getattr(model.config, name, None) for name in CONFIG_FIELDS},
        "norm_dtype": str(model.model.multi_modal_projector.align_norm.weight.dtype),
    }


def save_again(task):
    """Save the model anew; the processor's files are copied, because 4.57 cannot read a tokenizer that 5 saved."""
    model, _ = load(task)
    model.save_pretrained(task["out"], max_shard_size=task["shard"])
    for path in Path(task["folder"]).iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".jinja", ".model")
            and not Path(task["out"], path.name).exists()
        ):
            if not path.name.startswith("model.safetensors"):
                shutil.copy(path, task["out"])
    return {}


def answer(task):
    """The logits for the model inputs in a file."""
    model, info = load(task)
    with torch.no_grad():
        torch.save(model.eval()(**torch.load(task["inputs"])).logits, task["out"])
    return {"class": type(model).__name__, "missing": sorted(info["missing_keys"])}


def tokenize(task):
    """What the tokenizer makes of some texts, and its chat template of a question."""
    tokenizer = AutoTokenizer.from_pretrained(task["folder"])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is a cat"}], tokenize=False, add_generation_prompt=True
    )
    return {"ids": [tokenizer(text).input_ids for text in task["texts"]], "prompt": prompt}


def token_ids(task):
    """What the tokenizer of a processor makes of some texts: each alone, all as one padded batch, and back as text.

    With "only_tokenizer" the tokenizer is loaded without its processor; with "save" what was loaded is saved there.
    """
    loaded = (AutoTokenizer if task["only_tokenizer"] else AutoProcessor).from_pretrained(task["folder"])
    if "save" in task:
        loaded.save_pretrained(task["save"])
    tokenizer = loaded if task["only_tokenizer"] else loaded.tokenizer
    ids = [tokenizer(text).input_ids for text in task["texts"]]
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    batch = dict(tokenizer(task["texts"], padding=True)) if tokenizer.pad_token else {}
    return {"ids": ids, "decoded": [tokenizer.decode(found) for found in ids], "special": special, "batch": batch}


def check(task):
    """Whether it loads, and what the answer or the error is."""
    try:
        model, _ = load(task)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    with torch.no_grad():
        inputs = tiny.inputs(task.get("kind", "llava"))
        return {"error": None, "logits": model.eval()(**inputs)[0].double().sum().item()}


if __name__ == "__main__":
    tasks = json.loads(Path(sys.argv[1]).read_text())
    results = [globals()[task["do"]](task) for task in tasks]
    Path(sys.argv[2]).write_text(json.dumps(results))
