"""Run by path as a script, in any interpreter: a model folder loads and answers once, without this package.

usage: python answer_alone.py FOLDER PROMPT LIFELINE

PROMPT is "image" (a generated picture and a question), "text" (for a folder without a processor), "ids" (for one
without a tokenizer) or "tokenizer" (nothing but the tokenizer is loaded). LIFELINE is the file descriptor of a pipe
that the parent keeps open: this process ends with it. The last line of standard output is a JSON object; the last line
of standard error says what went wrong. It is meant for older interpreters than the package, too.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

QUESTION = "What is in the picture?"
PLAIN_PROMPT = "USER: {} ASSISTANT:"
NEW_TOKENS = 8


def hide_the_package():
    """Neither an installed package nor the files beside this one can be imported."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    sys.modules["llava_norm_align"] = None


def exit_with_parent(lifeline):
    """Wait until nobody holds the other end of the pipe, then end this process."""
    os.read(lifeline, 1)
    os._exit(1)


def load_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


def prepare(folder, prompt):
    """Model inputs, the tokenizer that reads the answer (None for "ids") and what was left out, in words."""
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoProcessor

    note = ""
    if prompt == "image":
        try:
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        except ImportError as error:
            note = f"the processor needs what is not installed here: {one_line(error).partition('. ')[0]}"
        else:
            image = Image.linear_gradient("L").convert("RGB")
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
            text = processor.apply_chat_template(messages, add_generation_prompt=True)
            return processor(text=text, images=image, return_tensors="pt"), processor.tokenizer, note
    if prompt == "ids":
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True).get_text_config()
        start = config.bos_token_id if isinstance(config.bos_token_id, int) else 1
        ids = torch.tensor([[start]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, None, "the folder has no tokenizer"
    tokenizer = load_tokenizer(folder)
    inputs = tokenizer(PLAIN_PROMPT.format(QUESTION), return_tensors="pt", return_token_type_ids=False)
    return inputs, tokenizer, note or "the folder has no image processor"


def choose_device(folder):
    """CUDA if the weights and half as much again are free there, else the CPU."""
    import torch

    needed = 1.5 * sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    return "cuda" if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > needed else "cpu"


def generate(auto_class, folder, inputs, device):
    """The ids of a greedy answer [1 to 8]. ValueError if a logit is not finite."""
    import torch

    model = auto_class.from_pretrained(folder, trust_remote_code=True, dtype="auto").to(device).eval()
    inputs = {name: value.to(device) for name, value in inputs.items()}
    inputs = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True
    )
    if not all(torch.isfinite(logits).all() for logits in output.logits):
        raise ValueError("the logits of the answer are not finite: NaN or inf in the weights or the image")
    return output.sequences[0, inputs["input_ids"].shape[1] :].tolist()


def answer(folder, prompt):
    """Load `folder` as its users do, with every Auto class that this transformers has for it, and let it answer."""
    import platform

    import torch
    import transformers

    result = {"python": platform.python_version(), "transformers": transformers.__version__}
    if prompt == "tokenizer":
        return {**result, "tokenizer": type(load_tokenizer(folder)).__name__}
    classes = ["AutoModelForImageTextToText"]
    if transformers.__version__.startswith("4."):
        classes.append("AutoModelForVision2Seq")
    device = choose_device(folder)
    inputs, tokenizer, note = prepare(folder, prompt)
    answers = {name: generate(getattr(transformers, name), folder, inputs, device) for name in classes}
    ids = answers[classes[0]]
    if any(other != ids for other in answers.values()):
        raise ValueError(f"the classes answer differently: {answers}")
    text = str(ids) if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
    result.update(torch=torch.__version__, device=device, classes=classes, note=note, answer=text)
    return result


def one_line(error):
    return " ".join(str(error).split())[:400]


def main():
    folder, prompt, lifeline = sys.argv[1], sys.argv[2], int(sys.argv[3])
    threading.Thread(target=exit_with_parent, args=[lifeline], daemon=True).start()
    hide_the_package()
    started = time.perf_counter()
    try:
        result = answer(folder, prompt)
    except Exception as error:  # whatever the folder leads to
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
    print()
    print(json.dumps({**result, "seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
