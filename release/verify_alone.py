"""Run by path as a script, in any interpreter: a model on the Hub loads without this package.

usage: python verify_alone.py REPOSITORY COMMIT WHAT LIFELINE

WHAT is "files" (config, processor and code) or "weights" (the model, too, which answers once). LIFELINE is the file
descriptor of a pipe that the parent keeps open: this process ends with it. The last line of standard output is a JSON
object; the last line of standard error says what went wrong. It is meant for older interpreters than the package, too.
"""

import json
import os
import platform
import sys
import threading
from pathlib import Path

QUESTION = "What is in the picture?"
NEW_TOKENS = 8
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def hide_the_package():
    """Neither an installed package nor the files beside this one can be imported."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    sys.modules["llava_norm_align"] = None


def exit_with_parent(lifeline):
    """Wait until nobody holds the other end of the pipe, then end this process."""
    os.read(lifeline, 1)
    os._exit(1)


def load_processor(repository, source):
    """The processor, or None and the reason."""
    import transformers
    from huggingface_hub import list_repo_files, snapshot_download
    from transformers import AutoProcessor

    if not set(PROCESSOR_FILES) & set(list_repo_files(repository, revision=source["revision"])):
        return None, "it has no processor"
    if transformers.__version__.startswith("4."):  # 4.57 looks for its class in main, whatever the revision
        repository = snapshot_download(repository, revision=source["revision"], ignore_patterns=["*.safetensors"])
        source = {"trust_remote_code": True}
    try:
        return AutoProcessor.from_pretrained(repository, **source), ""
    except ImportError as error:
        return None, f"the processor needs what is not installed here: {one_line(error).partition('. ')[0]}"


def load_code(repository, commit, config):
    """The classes that auto_map names."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    references = sorted(set((getattr(config, "auto_map", None) or {}).values()))
    found = [get_class_from_dynamic_module(reference, repository, revision=commit) for reference in references]
    return [each.__name__ for each in found]


def answer(repository, source, config, processor):
    """The first words of an answer about a generated picture; ids where there is no processor."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    options = {"dtype": "auto", "output_loading_info": True, **source}
    model, info = AutoModelForImageTextToText.from_pretrained(repository, **options)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise ValueError(f"the weights do not fit: {info}")
    if processor is None:
        start = config.get_text_config().bos_token_id
        ids = torch.tensor([[start if isinstance(start, int) else 1]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
        text = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=text, images=Image.linear_gradient("L").convert("RGB"), return_tensors="pt")
    inputs = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    output = model.eval().generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    if not all(torch.isfinite(logits).all() for logits in output.logits):
        raise ValueError("the logits of the answer are not finite: NaN or inf in the weights or the image")
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return str(ids) if processor is None else processor.tokenizer.decode(ids, skip_special_tokens=True)


def load(repository, commit, what):
    import transformers
    from transformers import AutoConfig

    source = {"revision": commit, "trust_remote_code": True}
    config = AutoConfig.from_pretrained(repository, **source)
    processor, note = load_processor(repository, source)
    result = {
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "config": type(config).__name__,
        "processor": type(processor).__name__ if processor else None,
        "classes": load_code(repository, commit, config),
        "note": note,
    }
    if what == "weights":
        result["answer"] = answer(repository, source, config, processor)
    return result


def one_line(error):
    return " ".join(str(error).split())[:400]


def main():
    repository, commit, what, lifeline = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    threading.Thread(target=exit_with_parent, args=[lifeline], daemon=True).start()
    hide_the_package()
    try:
        result = load(repository, commit, what)
    except Exception as error:  # whatever the repository leads to
        sys.exit(f"{type(error).__name__}: {one_line(error)}")
    print()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
