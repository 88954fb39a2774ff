"""The sections of a model card on what a model is, how to load it, its norm, its diagnosis, its training, its limits.

Every sentence comes from config.json, a result file of the folder or the package's documentation; what is not known is
left out.
"""

import math
from collections.abc import Sequence
from typing import Any

from llava_norm_align.common.results import FOLDER
from llava_norm_align.diagnosis import formats
from llava_norm_align.diagnosis.describe import ASSUMPTIONS, CONTESTED, rotation_lines, verdict_sentence
from llava_norm_align.diagnosis.formats import counted, escape, find, find_list, find_number, markdown_table, number
from llava_norm_align.diagnosis.markdown import PICTURES, norms_section, sentences
from llava_norm_align.release.card_license import Origin
from llava_norm_align.release.card_results import Results, public

PAPER = "[arXiv 2512.08374](https://arxiv.org/abs/2512.08374)"
FAMILIES = {
    "llava_norm_align": "LLaVA",
    "llava_next_norm_align": "LLaVA-NeXT",
    "llava_onevision_norm_align": "LLaVA-OneVision",
    "vipllava_norm_align": "ViP-LLaVA",
}
NORMS = {
    "layer_norm": "a LayerNorm after its projector",
    "rms_norm": "an RMS norm after its projector",
    "scale": "one fixed factor after its projector",
    "none": "no norm after its projector",
}
LEARNED = ("layer_norm", "rms_norm")
PLOTS = ("layer0_norms.png", "norms_by_layer.png", "cosine_by_layer.png")
# fields of a recipe that say where something lies or how a run was watched, not what was computed
NOT_SHOWN = ("output_dir", "model_name_or_path", "data_path", "image_folder", "dataset_name", "projector", "overwrite")
NOT_SHOWN += (
    "resume",
    "run_name",
    "report_to",
    "logging_dir",
    "disable_tqdm",
    "debug",
    "project",
    "use_cpu",
    "dry_run",
)
NOT_SHOWN_PREFIXES = ("hub_", "push_", "logging_", "save_", "log_", "dataloader_", "trackio_", "ddp_", "deepspeed")
LOADING = """\
```python
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor{older}

model_id = "{repo_id}"
model = AutoModelForImageTextToText.from_pretrained(model_id, trust_remote_code=True, dtype="auto")
processor = AutoProcessor.from_pretrained(model_id, trust_remote_code=True)
content = [{{"type": "image"}}, {{"type": "text", "text": "What is in the picture?"}}]
question = [{{"role": "user", "content": content}}]
prompt = processor.apply_chat_template(question, add_generation_prompt=True)
inputs = processor(text=prompt, images=Image.open("photo.jpg"), return_tensors="pt").to(model.device, model.dtype)
answer = model.generate(**inputs, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(answer, skip_special_tokens=True))
```"""
CITATION = """\
## Citation

```bibtex
@inproceedings{unseen_bias_2026,
  title         = {The Unseen Bias: How Norm Discrepancy in Pre-Norm MLLMs Leads to Visual Information Loss},
  author        = {{Authors of arXiv:2512.08374}},
  booktitle     = {International Conference on Learning Representations (ICLR)},
  year          = {2026},
  eprint        = {2512.08374},
  archivePrefix = {arXiv},
  url           = {https://arxiv.org/abs/2512.08374}
}
```"""


def heading(results: Results, repo_id: str, origin: Origin) -> str:
    """The name, whether it can be used as it is, and what it is."""
    config = results.config
    kind = config.get("norm_align_type", "layer_norm")
    family = FAMILIES[config["model_type"]]
    what = f"A {family} with {NORMS.get(kind, 'a norm after its projector')}"
    if kind in (*LEARNED, "scale"):
        what += ", which gives visual tokens the L2 norm of text embeddings at its start"
    what += f" ({PAPER}; model type `{config['model_type']}`)."
    if origin.hub_id:
        what += f" Made from [{origin.hub_id}](https://huggingface.co/{origin.hub_id})."
    parts = {
        "language model": find(config, "text_config", "model_type"),
        "vision tower": find(config, "vision_config", "model_type"),
    }
    facts = [f"- {name}: {escape(value)}" for name, value in parts.items() if value]
    if kind in LEARNED:
        bias = "with" if config.get("norm_align_bias", True) else "without"
        gwc = "on" if config.get("norm_align_gradient_compensation", True) else "off"
        facts.append(f"- norm: {bias} a bias; Global Weight Compensation, in training only: {gwc}")
    title = f"# {escape(repo_id.rpartition('/')[2])}"
    return "\n\n".join(part for part in (title, warning(results), what, "\n".join(facts)) if part)


def warning(results: Results) -> str:
    """What has to be known first: that the model is not trained, and how far the insertion moved it."""
    if results.untrained:
        words = "> **Train this model before use.** The norm was inserted into a trained model, and "
        if results.doubted:
            words += "is still as it was at its start, although a training is recorded in this folder."
        else:
            words += "nothing in this folder says that it was trained again with it."
        return "\n>\n> ".join([words, *agreement(results)])
    if results.training and results.training.get("completed") is False:
        return f"> **This training ended early**, at step {formats.count(find_number(results.training, 'steps'))}."
    return ""


def agreement(results: Results) -> list[str]:
    """How far an untrained model is from its source, if the conversion measured it."""
    report = find(results.calibration, "report")
    kl, share = find_number(report, "kl_nats"), find_number(report, "top1_agreement")
    if kl is None or share is None:
        return []
    prompts = counted(find_number(report, "image_prompts"), "prompt")
    return [
        f"Measured at the conversion, {prompts} with an image: KL {number(kl)} nats of the next token from the "
        f"source's, top-1 agreement {100 * share:.1f} %."
    ]


def loading(results: Results, repo_id: str, tried: Sequence[str]) -> str:
    """The lines that load it, and with what that was tried."""
    auto_map = results.config.get("auto_map") or {}
    older = "  # in 4.57 also AutoModelForVision2Seq" if "AutoModelForVision2Seq" in auto_map else ""
    parts = [
        "## Loading",
        "The model carries its code, so transformers asks for `trust_remote_code`; the package llava-norm-align need "
        "not be installed.",
        LOADING.format(repo_id=repo_id, older=older),
    ]
    if results.config["model_type"] == "llava_onevision_norm_align":
        parts.append("The processor of LLaVA-OneVision needs torchvision.")
    if tried:
        parts.append("Loaded, and asked about an image, before this release with:\n\n" + _list(tried))
    else:
        versions = written_with(results)
        parts.append(f"Written with {versions}; other versions were not tried for this release." if versions else "")
    return "\n\n".join(part for part in parts if part)


def written_with(results: Results) -> str:
    """The versions that the newest result file names."""
    for content in (results.training, results.merged, results.calibration, results.diagnosis):
        versions = find(content, "versions")
        if isinstance(versions, dict):
            shown = (name for name in ("transformers", "torch", "python") if versions.get(name))
            return ", ".join(f"{name} {escape(versions[name])}" for name in shown)
    return ""


def calibration(results: Results) -> str:
    """T, where it came from, and the gain that it makes."""
    content, config = results.calibration, results.config
    target = find_number(content, "target_norm")
    if content is None or target is None or config.get("norm_align_type") == "none":
        return ""
    origin = {
        "table": "the mean L2 norm of the text embeddings",
        "given": "given, not measured",
        "visual": "the mean L2 norm of the source's own visual tokens",
        "projector file": "the norm that the projector's file says its norm started at",
    }.get(content.get("target_from"), "")
    lines = [f"- target norm T: {target:.4f}{f' ({origin})' if origin else ''}"]
    rows, left = (find_number(content, "table", key) for key in ("rows_used", "rows_left_out"))
    if rows is not None and content.get("target_from") == "table":
        lines.append(f"- rows of the text table: {rows:,} used, {formats.count(left)} left out (zeros or added)")
    width = find_number(config, "text_config", "hidden_size")
    if config.get("norm_align_type") in LEARNED and width:
        gain = target / math.sqrt(width)
        bias = "; bias 0" if config.get("norm_align_bias", True) else ""
        lines.append(f"- gain at the start: T / sqrt({width}) = {gain:.4g} on every channel{bias}")
        state = {True: "it has moved since", False: "it has not moved since"}.get(results.moved)
        lines += [f"- the norm now: {state}"] if state else []
    if config.get("norm_align_type") == "scale" and find_number(config, "norm_align_scale"):
        lines.append(f"- factor: {number(find_number(config, 'norm_align_scale'))}")
    file = find(content, "projector", "file")
    if file:
        both = "projector and norm" if find(content, "projector", "norm") else "projector"
        lines.append(f"- {both}: from {public(file)}, sha256 {escape(find(content, 'projector', 'sha256'))}")
    return "\n".join(["## Calibration\n", *lines])


def diagnosis(results: Results) -> str:
    """The norms, the verdicts and the plots of these weights."""
    content = results.diagnosis
    if content is None:
        return ""
    images = counted(find_number(content, "images", "count"), "image")
    lines = [verdict_sentence(content, assumption) for assumption in ASSUMPTIONS]
    lines = [line for line in [*lines, *rotation_lines(content)] if line]
    more = f"{FOLDER}/diagnosis.md"
    report = results.folder / more
    linked = report.read_text(encoding="utf-8", errors="replace") if report.is_file() else ""
    # a plot that diagnosis.md does not show is of an earlier diagnosis
    there = [name for name in PLOTS if f"]({name})" in linked and (results.folder / FOLDER / name).is_file()]
    parts = [
        "## Norms of visual and text tokens",
        f"Measured on {images} with one prompt. {CONTESTED.replace(' (arXiv 2512.08374)', '')}",
        norms_section(content).removeprefix("### Norms").strip(),
        sentences(lines) if lines else "",
        *(f"![{PICTURES[name]}]({FOLDER}/{name})" for name in there),
        f"All layers and controls: [{more}]({more})." if linked else "",
    ]
    return "\n\n".join(part for part in parts if part)


def training(results: Results) -> str:
    """The recipe, the data by name, what was trained, and what the monitor said."""
    content = results.training
    if content is None:
        return _merged(results)
    recipe = find(content, "recipe") or {}
    began = f"Trained for {formats.count(find_number(content, 'steps'))} steps"
    data = next((recipe[key] for key in ("data_path", "dataset_name") if isinstance(recipe.get(key), str)), None)
    parts = ["## Training"]
    if results.doubted:
        parts.append(
            "The norm has not moved from its start, so these may not be the weights that the recorded training made, "
            "or it left the norm out. Recorded is:"
        )
    parts.append(f"{began} on {public(data)}." if data else f"{began}.")
    rows = [["part", "parameters", "learning rate", "weight decay"]]
    for group in find_list(content, "groups"):
        trained = not find(group, "frozen")
        rate, decay = (find_number(group, key) for key in ("learning_rate", "weight_decay"))
        cells = [f"{rate:g}" if trained and rate is not None else "frozen", f"{decay:g}" if decay is not None else ""]
        size = find_number(group, "parameters")
        rows.append([public(find(group, "part")), "-" if size is None else f"{size:,.0f}", *cells])
    parts += [markdown_table(rows)] if len(rows) > 1 else []
    shown = [f"{escape(name)} {_value(value)}" for name, value in recipe.items() if _is_shown(name, value)]
    parts += ["Other fields of the recipe: " + "; ".join(shown) + "."] if shown else []
    losses = [loss for entry in find_list(content, "history") if (loss := find_number(entry, "loss")) is not None]
    if losses:
        parts.append(f"Loss of the first logged step: {losses[0]:.4g}; of the last: {losses[-1]:.4g}.")
    alarms = [f"- {escape(find(alarm, 'message'))}" for alarm in find_list(content, "alarms")]
    parts += ["Alarms of the monitor:\n\n" + "\n".join(alarms)] if alarms else []
    if (results.folder / FOLDER / "curves.png").is_file():
        parts.append(f"![Loss, norms and gradients by step]({FOLDER}/curves.png)")
    return "\n\n".join(parts)


def _merged(results: Results) -> str:
    if results.merged is not None:
        return "## Training\n\nA LoRA adapter was merged into its base model; how it was trained is not recorded here."
    if results.moved:
        return "## Training\n\nThe norm is not where it started, so it was trained; how is not recorded here."
    return ""


def _is_shown(name: Any, value: Any) -> bool:
    hidden = str(name) in NOT_SHOWN or str(name).startswith(NOT_SHOWN_PREFIXES)
    return not hidden and isinstance(value, (bool, int, float, str, list)) and value not in ("", [])


def _value(value: Any) -> str:
    return ", ".join(map(public, value)) if isinstance(value, list) else public(value)


def limits(results: Results) -> str:
    """What the model cannot do, by config.json and the package's documentation."""
    kind = results.config.get("norm_align_type", "layer_norm")
    lines = ["- That a norm gap costs image information is what the paper argues; the claim is contested."]
    if results.untrained:
        lines.insert(0, "- It needs training before use: the norm was inserted into a model that was trained without.")
    if kind in LEARNED:
        lines.append("- A norm cannot be folded into another layer, so this is no stock LLaVA.")
    if kind != "none":
        lines.append("- llama.cpp and AWQ do not load it: they know LLaVA's projector, not one with a norm.")
    lines.append("- It loads with `trust_remote_code=True`, or with the package llava-norm-align imported before.")
    return "\n".join(["## Limits\n", *lines])


def _list(lines: Sequence[Any]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)
