"""Run by tests as a script: writes, reads and saves models as a user without the package does.

usage: python alone.py REQUEST.json ANSWER.json     a list of tasks in, a list of results out
"""

import json
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
from transformers import AutoProcessor  # noqa: E402
from transformers.dynamic_module_utils import get_class_from_dynamic_module  # noqa: E402

MODEL_FILE = "modeling_llava_norm_align"


def model_class(task):
    name = task.get("class", "AutoModelForImageTextToText")
    if hasattr(transformers, name):
        return getattr(transformers, name)
    return get_class_from_dynamic_module(f"{MODEL_FILE}.{name}", task["code"])


def load(task):
    options = {"trust_remote_code": True, "output_loading_info": True, **task.get("options", {})}
    return model_class(task).from_pretrained(task["folder"], **options)


def write_stock(task):
    model = tiny.stock_llava(task["tower"], task["family"], task["tied"])
    model.save_pretrained(task["folder"], max_shard_size=task["shard"])
    tiny.processor(task["tower"]).save_pretrained(task["folder"])
    return {}


def read(task):
    model, info = load(task)
    processor = AutoProcessor.from_pretrained(task["folder"], trust_remote_code=True)
    inputs = tiny.prompt_with_image(processor)
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is a cat"}]}],
        add_generation_prompt=True,
    )
    torch.save({"logits": logits, "pixel_values": inputs["pixel_values"]}, task["out"])
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "input_ids": inputs["input_ids"][0].tolist(),
        "prompt": prompt,
        "class": type(model).__name__,
        "norm_dtype": str(model.model.multi_modal_projector.align_norm.weight.dtype),
    }


def save_again(task):
    model, _ = load(task)
    model.save_pretrained(task["out"], max_shard_size=task["shard"])
    AutoProcessor.from_pretrained(task["folder"], trust_remote_code=True).save_pretrained(task["out"])
    return {}


def check(task):
    """Whether it loads, and what the answer or the error is."""
    try:
        model, _ = load(task)
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    with torch.no_grad():
        inputs = tiny.prompt_with_image(tiny.processor())
        return {"error": None, "logits": model.eval()(**inputs)[0].double().sum().item()}


if __name__ == "__main__":
    tasks = json.loads(Path(sys.argv[1]).read_text())
    results = [globals()[task["do"]](task) for task in tasks]
    Path(sys.argv[2]).write_text(json.dumps(results))
