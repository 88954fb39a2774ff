"""What the inserted norm does to a model before any training: source against target, on sample images.

Runs as a process of its own, `python -m llava_norm_align.conversion.report`: a line of JSON on standard input and one
on standard output. It ends with its parent, which keeps the input open.
"""

import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, ProcessorMixin

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_config, load_processor
from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.conversion.projector_file import load_projector
from llava_norm_align.conversion.source import read_source
from llava_norm_align.diagnosis.agreement import compare_answers, read_answers
from llava_norm_align.diagnosis.measure import measure_layer0
from llava_norm_align.diagnosis.running import RunningNorms
from llava_norm_align.modeling.families import FAMILIES

QUESTIONS = ("What is in the picture?", "Which colors do you see?", "Where was this picture taken?")
TEXT_PROMPTS = ("What is the capital of France?", "Count from one to ten.", "Write one sentence about the sea.")
ANSWER_TOKENS = 16
MODEL_INPUTS = ("input_ids", "attention_mask", "pixel_values", "image_sizes")


def run_in_fresh_process(job: dict[str, Any]) -> dict[str, Any]:
    """The result of `run_job(job)` in a new Python, which knows of the models only what lies in their folders."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "llava_norm_align.conversion.report"]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        os.fdopen(os.dup(2), "w") as bars,  # standard error of this process; the child's own is kept for its message
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[bars.fileno()],
            bufsize=0,
        ) as process,
    ):
        with suppress(BrokenPipeError):  # it ended before it read the job
            process.stdin.write(json.dumps({**job, "bars": bars.fileno()}).encode() + b"\n")
        output = process.stdout.read()
        code = process.wait()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no message"])[-1]
    if code != 0:
        hint = " A negative code is a signal; -9 is mostly a lack of memory." if code < 0 else ""
        hint += " Pass --no-report to convert without it." if job["task"] == "report" else ""
        raise CheckFailed(f"The {job['task']} process ended with code {code}: {last.rstrip('.')}.{hint}")
    result = json.loads(output.splitlines()[-1])
    if "input_error" in result:
        raise InputError(result["input_error"])
    return result


def run_job(job: dict[str, Any], bars: TextIO | None = None) -> dict[str, Any]:
    """The task "report" (see compare_models) or "projector_norm" (see there)."""
    source, target, images = Path(job["source"]), Path(job["target"]), [Path(path) for path in job["images"]]
    if job["task"] == "projector_norm":
        return {"projector_norm": projector_norm(source, load_processor(target), images, job.get("projector"))}
    return compare_models(source, target, images, bars, job.get("text_target"), job.get("starts", True))


@torch.no_grad()
def projector_norm(
    source: Path, processor: ProcessorMixin, images: Sequence[Path], projector: str | None = None
) -> float:
    """Mean L2 norm of the output of a stock LLaVA's projector, or of that in the file `projector`, over all visual
    tokens of all `images`.
    """
    model = load(source)
    if projector:
        load_projector(model, Path(projector))
        model.to(model.dtype)  # as from_pretrained reads the result
    measured = measure_layer0(model, image_prompts(model, processor, images, QUESTIONS[:1]))
    return finite_mean(measured.norms["projector_output"], source)


def finite_mean(norms: RunningNorms, source: Path) -> float:
    """The mean of the `norms` of visual tokens; InputError if some tokens of the model in `source` are no numbers."""
    found = norms.summary()
    if found["non_finite"]:
        raise InputError(
            f"The visual tokens of {source} have NaN or inf on the images, so nothing can be measured: its vision "
            "tower or projector is damaged. Download or train it again."
        )
    return found["mean"]


@torch.no_grad()
def compare_models(
    source: Path,
    target: Path,
    images: Sequence[Path],
    bars: TextIO | None = None,
    text_target: float | None = None,
    with_starts: bool = True,
) -> dict[str, Any]:
    """Compare a stock LLaVA with its converted folder; one model is in memory at a time.

    text_logits_equal: whether the logits of all positions of the text-only prompts are bit-equal.
    layer0_norms: mean L2 norm at the input of decoder layer 0, of visual and of text tokens (padding and the
    first token of the sequence, if it is one of its own, left out).
    kl_nats: mean over image prompts of KL(source || target) of the next token at the end of the prompt.
    top1_agreement: the share of answer positions at which both put the same token first, when both read the source's
    own greedy answer of up to 16 tokens (teacher forcing); positions of all prompts weigh the same. The answer holds
    no image placeholder.
    same_answers: the prompts to which both give the same greedy answer, token for token.
    starts: of a norm with a gain, the last three for both starts, "text" (at `text_target`, if there is one) and
    "visual" (at the source's mean visual norm), whichever was written; empty unless `with_starts`. `bars`: where
    progress bars go, if that is a terminal; None for standard error.
    """
    processor = load_processor(target)  # the source's may lack the fields that count image tokens
    model, number = load(source), len(images) * len(QUESTIONS)

    def prompts(what: str) -> Iterable[dict[str, torch.Tensor]]:
        inputs = image_prompts(model, processor, images, QUESTIONS)
        return tqdm(inputs, total=number, desc=f"report: {what}", file=bars, disable=None)

    measured = measure_layer0(model, prompts("norms")).norms
    norms = {"source": {"visual": finite_mean(measured["visual"], source), "text": measured["text"].summary()["mean"]}}
    texts = text_prompts(model, processor)
    answers = [greedy_answer(model, inputs) for inputs in prompts("answers")]
    text_logits = [model(**inputs).logits.cpu() for inputs in texts]
    before = read_answers(model, prompts("source"), answers)
    del model
    gc.collect()
    model = load(target)
    measured = measure_layer0(model, prompts("norms")).norms
    norms["target"] = {kind: measured[kind].summary()["mean"] for kind in ("visual", "text")}
    equal = all(torch.equal(model(**inputs).logits.cpu(), old) for inputs, old in zip(texts, text_logits, strict=True))
    agreement = compare_answers(before, read_answers(model, prompts("target"), answers))
    starts = {}
    gain = getattr(getattr(model.model.multi_modal_projector, "align_norm", None), "weight", None)
    if gain is not None and with_starts:
        for name, start in (("text", text_target), ("visual", norms["source"]["visual"])):
            if start is not None:
                gain.fill_(start / math.sqrt(len(gain)))
                starts[name] = {
                    "target_norm": start,
                    **compare_answers(before, read_answers(model, prompts(f"start at {start:.3g}"), answers)),
                }
    return {
        "images": [path.name for path in images],
        "questions": list(QUESTIONS),
        "text_prompts": len(texts),
        "image_prompts": number,
        "text_logits_equal": equal,
        "layer0_norms": norms,
        **agreement,
        "starts": starts,
    }


def load(folder: Path) -> PreTrainedModel:
    """A stock or a norm-aligned LLaVA in eval mode, on a GPU if there is one.

    A stock one loads through our class without a norm: the stock class of 4.57 misreads checkpoints that 5 saved.
    """
    kind = load_config(folder)["model_type"]
    if kind in FAMILIES:
        source = read_source(folder)
        model_class, config = source.model_class, source.config
    else:
        model_class = FAMILIES[kind.removesuffix("_norm_align")]
        config = model_class.config_class.from_pretrained(folder)
    # with "auto", 4.57 gives each part the dtype that its own config names, which may not be the one it is stored in
    model = model_class.from_pretrained(folder, config=config, dtype=config.dtype or "auto")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def text_prompts(model: PreTrainedModel, processor: ProcessorMixin) -> list[dict[str, torch.Tensor]]:
    return [_model_inputs(model, prepare_inputs(processor, [text], None)) for text in TEXT_PROMPTS]


def image_prompts(
    model: PreTrainedModel, processor: ProcessorMixin, images: Sequence[Path], questions: Sequence[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """One prompt per image and question, batch size 1: no padding that could change a result."""
    for path in images:
        image = open_image(path)
        for question in questions:
            yield _model_inputs(model, prepare_inputs(processor, [question], [image]))


def _model_inputs(model: PreTrainedModel, inputs: Any) -> dict[str, torch.Tensor]:
    kept = {name: inputs[name].to(model.device) for name in MODEL_INPUTS if name in inputs}
    if "pixel_values" in kept:
        kept["pixel_values"] = kept["pixel_values"].to(model.dtype)
    return kept


def greedy_answer(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The answer's token ids [1, 1 to 16], end token included."""
    end = model.generation_config.eos_token_id
    pad = model.generation_config.pad_token_id
    if pad is None and end is not None:
        pad = end if isinstance(end, int) else end[0]
    settings = GenerationConfig(
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=pad,
        suppress_tokens=[model.config.image_token_id],  # as input it would ask for an image's features
    )
    return model.generate(**inputs, generation_config=settings)[:, inputs["input_ids"].shape[1] :]


def exit_with_parent() -> None:
    """Wait until nobody holds the other end of standard input, then end this process."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        print(json.dumps(run_job(job, os.fdopen(job["bars"], "w"))))
    except InputError as error:
        print(json.dumps({"input_error": str(error)}))
