"""A model of lmms-eval: any checkpoint that evaluate loads, stock or norm-aligned, asked as evaluate asks it.

lmms-eval finds it through the entry point in setup.cfg; it needs lmms-eval at its import, which no other module does.
"""

import functools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance
from lmms_eval.api.model import lmms
from PIL import Image
from tqdm import tqdm

from llava_norm_align.common.errors import InputError, NormAlignError
from llava_norm_align.common.loading import first_line, load_model, load_processor, resolve_weights
from llava_norm_align.common.prompts import image_token, prepare_inputs
from llava_norm_align.evaluation.generate import answer_batch, greedy

LONGEST = 1024  # new tokens where a task names no limit, as in lmms-eval's own models
SEARCH = ("num_beams", "length_penalty", "early_stopping", "min_new_tokens", "repetition_penalty")
SAMPLING = ("temperature", "top_p", "top_k")
# the original LLaVA's, where here the processor's files decide; lmms-eval's --seed decides, and greedy search has none
NOT_OURS = ("image_aspect_ratio", "seed")
PLACE = "<image>"  # of an image in a task's text


def ends_the_run(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error in `method` ends the program with exit code 1.

    lmms-eval logs any Exception of a model and exits with 0, so SystemExit is raised in its place.
    """

    @functools.wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except Exception as error:  # every model and processor has its own way to fail
            if isinstance(error, NormAlignError):
                raise SystemExit(f"Error: {error}") from error
            traceback.print_exc()
            raise SystemExit(f"Error: {type(error).__name__}: {first_line(error)}") from error

    return called


class LlavaNormAlign(lmms):
    """`--model llava_norm_align`; the arguments of __init__ are its --model_args, with the meaning of evaluate's.

    Several processes (accelerate launch) share the questions, each with the model on a GPU of its own.
    """

    is_simple = True

    @ends_the_run
    def __init__(
        self,
        pretrained: str,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        device_map: str | None = None,
        load_in_4bit: bool = False,
        trust_remote_code: bool = False,
        batch_size: int | str = 1,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise InputError(f"batch_size is {batch_size!r}, but a number from 1 was expected. Pass --batch_size 8.")
        self.batch_size = int(batch_size)
        self.accelerator = Accelerator()
        self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self._world_size > 1:
            if device or device_map:
                raise InputError("Several processes take a GPU each. Leave out device and device_map.")
            device = str(self.accelerator.device)
        # lmms-eval makes numbers of names such as 7
        folder = resolve_weights(str(pretrained), None if revision is None else str(revision))
        self.model = load_model(
            folder, dtype, device, device_map=device_map, four_bit=load_in_4bit, trust_remote_code=trust_remote_code
        )
        self.processor = load_processor(folder, trust_remote_code)

    @property
    def device(self) -> torch.device:
        """Where lmms-eval puts the numbers that its processes exchange."""
        return self.accelerator.device if self._world_size > 1 else self.model.device

    @ends_the_run
    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The answer to each request, greedy unless its task asks for sampling, cut before the task's `until`."""
        answers: dict[int, str] = {}
        with tqdm(total=len(requests), desc="answering", disable=self.rank != 0) as bar:
            for asked, rows in _alike(requests):
                longest, until, options = generation_options(asked)
                with greedy(self.model, self.processor, longest, **options):
                    for start in range(0, len(rows), self.batch_size):
                        batch = rows[start : start + self.batch_size]
                        said = self._answer([requests[row].args for row in batch])
                        answers |= {row: cut(text, until) for row, text in zip(batch, said, strict=True)}
                        bar.update(len(batch))
        return [answers[row] for row in range(len(requests))]

    def _answer(self, batch: Sequence[tuple[Any, ...]]) -> list[str]:
        """The answers to a batch; questions with images and those without are put apart."""
        images = [self._images(*place) for _, _, *place in batch]
        prompts = [self._text(context, shown) for (context, *_), shown in zip(batch, images, strict=True)]
        said: dict[int, str] = {}
        for without in (False, True):
            rows = [row for row, pictures in enumerate(images) if (not pictures) == without]
            if rows:
                shown = None if without else [images[row] for row in rows]
                texts = answer_batch(self.model, self.processor, [prompts[row] for row in rows], shown)
                said |= dict(zip(rows, texts, strict=True))
        return [said[row] for row in range(len(batch))]

    @ends_the_run
    def loglikelihood(self, requests: Sequence[Instance]) -> list[GenerationResult]:
        """For each request (loss, greedy): the mean negative log-likelihood of a token of its continuation (lmms-eval
        takes the least for the model's choice), and whether the continuation is what greedy search would say.

        GenerationResult is what lmms-eval 0.7 hands on as it is; of a bare tuple it would make a string.
        """
        rows = tqdm(requests, desc="scoring", disable=self.rank != 0)
        return [GenerationResult(self._loss(*request.args)) for request in rows]

    @torch.inference_mode()
    def _loss(
        self, context: str, target: str | Callable[[Any], str], visual: Any, doc_id: int, task: str, split: str
    ) -> tuple[float, bool]:
        continuation = target if isinstance(target, str) else target(self.task_dict[task][split][doc_id])
        images = self._images(visual, doc_id, task, split)
        prompts, shown = [self._text(context, images)], [images] if images else None
        before = prepare_inputs(self.processor, prompts, shown)["input_ids"].shape[1]
        inputs = prepare_inputs(self.processor, prompts, shown, [continuation]).to(self.model.device, self.model.dtype)
        ids = inputs["input_ids"][0, before:]
        if not len(ids):
            raise InputError(f"Question {doc_id} of {task} has an empty answer to score. Correct its choices.")
        logits = self.model(**inputs).logits[0, before - 1 : -1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids.to(logits.device))
        return loss.item(), bool((logits.argmax(-1) == ids.to(logits.device)).all())

    @ends_the_run
    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        raise NotImplementedError(
            "llava_norm_align answers one question at a time; tasks of several rounds "
            f"({requests[0].task_name}) are not supported. Leave the task out."
        )

    def _text(self, context: str, images: Sequence[Image.Image]) -> str:
        """A task's text with the processor's own token at the places of images. InputError for a place without one."""
        if context.count(PLACE) > len(images):
            raise InputError(
                f"A question has {context.count(PLACE)} places for images ({PLACE}), but {len(images)} images: "
                f"{context[:200]!r}. Leave the task out."
            )
        return context.replace(PLACE, image_token(self.processor))

    def _images(self, visual: Callable[[Any], Any], doc_id: int, task: str, split: str) -> list[Image.Image]:
        """The images of a question in RGB. InputError for video, audio and whatever else is no image."""
        found = visual(self.task_dict[task][split][doc_id]) or []
        for one in found:
            if not isinstance(one, Image.Image):
                raise InputError(
                    f"Question {doc_id} of {task} has a {type(one).__name__} where an image was expected; video and "
                    "audio are not supported. Leave the task out."
                )
        return [one.convert("RGB") for one in found]


def _alike(requests: Sequence[Instance]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """The requests by their task's settings of generation: (settings, positions), each in order."""
    groups: dict[str, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(row)
    for rows in groups.values():
        yield requests[rows[0]].args[1], rows


def generation_options(asked: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
    """What a task's generation_kwargs ask for: the most new tokens, where to stop, and fields of a GenerationConfig.

    It is greedy unless they say do_sample, or a temperature over 0 and nothing of do_sample. InputError for settings
    that are not known, as an answer without them would not be what the task asks for.
    """
    unknown = sorted({*asked} - {*SEARCH, *SAMPLING, *NOT_OURS, "until", "max_new_tokens", "do_sample"})
    if unknown:
        raise InputError(
            f"A task asks for generation with {', '.join(unknown)}, which llava_norm_align does not know; it knows "
            f"do_sample, max_new_tokens, until, {', '.join((*SAMPLING, *SEARCH))}. Leave the task out."
        )
    until = asked.get("until") or []
    options = {name: asked[name] for name in SEARCH if asked.get(name) is not None}
    temperature = asked.get("temperature")
    if asked.get("do_sample", bool(temperature)) and temperature != 0:
        options |= {"do_sample": True} | {name: asked[name] for name in SAMPLING if asked.get(name) is not None}
    return asked.get("max_new_tokens") or LONGEST, [until] if isinstance(until, str) else list(until), options


def cut(text: str, until: Sequence[str]) -> str:
    """`text` up to the first place where one of `until` begins."""
    ends = [text.find(stop) for stop in until if stop]
    return text[: min((end for end in ends if end >= 0), default=len(text))].strip()
