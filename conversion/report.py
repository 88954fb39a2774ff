"""What the inserted norm does to a model before any training: source against target, on sample images.

Runs as a process of its own, `python -m llava_norm_align.conversion.report`: a line of JSON on standard input and one
on standard output. It ends with its parent, which keeps the input open.
"""

import gc
import importlib.util
import json
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

from llava_norm_align.common.errors import CheckFailed, InputError, missing_extra
from llava_norm_align.common.images import open_image
from llava_norm_align.common.loading import load_processor
from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.conversion.source import read_source
from llava_norm_align.diagnosis.norms import layer0_norms
from llava_norm_align.modeling import LlavaNormAlignForConditionalGeneration

SAMPLE_PHOTOS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
)  # those that scikit-image's wheel contains
QUESTIONS = ("What is in the picture?", "Which colors do you see?", "Where was this picture taken?")
TEXT_PROMPTS = ("What is the capital of France?", "Count from one to ten.", "Write one sentence about the sea.")
ANSWER_TOKENS = 16
MODEL_INPUTS = ("input_ids", "attention_mask", "pixel_values", "image_sizes")


def sample_photos() -> list[Path]:
    """The photos of scikit-image, without importing it."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise missing_extra("scikit-image", "samples", "A report without --images")
    return [Path(spec.origin).parent / "data" / name for name in SAMPLE_PHOTOS]


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
    return json.loads(output.splitlines()[-1])


def run_job(job: dict[str, Any], bars: TextIO | None = None) -> dict[str, Any]:
    """The task "report" (see compare_models) or "projector_norm" (see there)."""
    source, target, images = Path(job["source"]), Path(job["target"]), [Path(path) for path in job["images"]]
    if job["task"] == "projector_norm":
        return {"projector_norm": projector_norm(source, load_processor(target), images)}
    return compare_models(source, target, images, bars)


@torch.no_grad()
def projector_norm(source: Path, processor: ProcessorMixin, images: Sequence[Path]) -> float:
    """Mean L2 norm of the output of a stock LLaVA's projector, over all visual tokens of all `images`."""
    model, norms = load_stock(source), []
    model.model.multi_modal_projector.register_forward_hook(
        lambda module, args, output: norms.append(torch.linalg.vector_norm(output.double(), dim=-1).flatten())
    )
    for inputs in image_prompts(model, processor, images, QUESTIONS[:1]):
        layer0_norms(model, inputs)
    return torch.cat(norms).mean().item()


@torch.no_grad()
def compare_models(source: Path, target: Path, images: Sequence[Path], bars: TextIO | None = None) -> dict[str, Any]:
    """Compare a stock LLaVA with its converted folder; one model is in memory at a time.

    text_logits_equal: whether the logits of all positions of the text-only prompts are bit-equal.
    layer0_norms: mean L2 norm at the input of decoder layer 0, of visual and of text tokens (padding left out).
    kl_nats: mean over image prompts of KL(source || target) of the next token at the end of the prompt.
    top1_agreement: the share of answer positions at which both put the same token first, when both read the source's
    own greedy answer of up to 16 tokens (teacher forcing); positions of all prompts weigh the same. The answer holds
    no image placeholder. `bars`: where progress bars go, if that is a terminal; None for standard error.
    """
    processor = load_processor(target)  # the source's may lack the fields that count image tokens
    model = load_stock(source)
    texts = text_prompts(model, processor)
    prompts = list(image_prompts(model, processor, images, QUESTIONS))
    answers = [
        greedy_answer(model, inputs) for inputs in tqdm(prompts, desc="report: answers", file=bars, disable=None)
    ]
    before = observe(model, texts, tqdm(prompts, desc="report: source", file=bars, disable=None), answers)
    del model
    gc.collect()
    model = to_device(LlavaNormAlignForConditionalGeneration.from_pretrained(target, dtype="auto"))
    after = observe(model, texts, tqdm(prompts, desc="report: target", file=bars, disable=None), answers)

    kl = [
        torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum").item()
        for old, new in zip(before["next_logprobs"], after["next_logprobs"], strict=True)
    ]
    same = torch.cat(before["top1"]) == torch.cat(after["top1"])
    return {
        "images": [path.name for path in images],
        "questions": list(QUESTIONS),
        "text_prompts": len(texts),
        "image_prompts": len(prompts),
        "text_logits_equal": all(map(torch.equal, before["text_logits"], after["text_logits"])),
        "layer0_norms": {"source": before["layer0_norms"], "target": after["layer0_norms"]},
        "kl_nats": sum(kl) / len(kl),
        "answer_positions": len(same),
        "top1_agreement": same.double().mean().item(),
    }


def load_stock(folder: Path) -> PreTrainedModel:
    """A stock LLaVA through our class without a norm: the stock class of 4.57 misreads checkpoints that 5 saved."""
    config = read_source(folder).config
    return to_device(LlavaNormAlignForConditionalGeneration.from_pretrained(folder, config=config, dtype="auto"))


def to_device(model: PreTrainedModel) -> PreTrainedModel:
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


def observe(
    model: PreTrainedModel,
    texts: Sequence[dict[str, torch.Tensor]],
    prompts: Iterable[dict[str, torch.Tensor]],
    answers: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Text-only logits, mean norms at layer 0, and per prompt the next token's log probabilities [vocabulary] and the
    first choice at each answer position [answer tokens].
    """
    norms: dict[str, list[torch.Tensor]] = {"visual": [], "text": []}
    next_logprobs, top1 = [], []
    for inputs, answer in zip(prompts, answers, strict=True):
        for kind, values in layer0_norms(model, inputs).items():
            norms[kind].append(values)
        length = answer.shape[1]
        forced = inputs | {
            "input_ids": torch.cat([inputs["input_ids"], answer], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(answer)], dim=1),
        }
        logits = model(**forced).logits[0, -length - 1 : -1]
        next_logprobs.append(torch.log_softmax(logits[0].double(), dim=-1).cpu())
        top1.append(logits.argmax(-1).cpu())
    return {
        "text_logits": [model(**inputs).logits.cpu() for inputs in texts],
        "layer0_norms": {kind: torch.cat(values).mean().item() for kind, values in norms.items()},
        "next_logprobs": next_logprobs,
        "top1": top1,
    }


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
        sys.exit(str(error))
