"""Answers of all models at once, word by word."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from queue import SimpleQueue

from PIL import Image

from llava_norm_align.common.prompts import prepare_inputs
from llava_norm_align.evaluation.answer import answer
from llava_norm_align.space.limits import Refused, check_tokens
from llava_norm_align.space.models import Shown


class _Stopped(Exception):
    """Ends a generation from within."""


def check_fits(shown: Shown, image: Image.Image, question: str, max_new_tokens: int) -> None:
    """Refused if question and answer do not fit into the model's context, or hold signs that are no text."""
    check_tokens(shown.processor, question)
    context = getattr(shown.model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return
    asked = prepare_inputs(shown.processor, [question], [image])["input_ids"].shape[1]
    if asked + max_new_tokens > context:
        raise Refused("The question and the longest answer do not fit into the model's context; shorten one of them.")


def stream_answers(
    models: Sequence[Shown], image: Image.Image, question: str, max_new_tokens: int, temperature: float
) -> Iterator[list[str]]:
    """Yield what each model has said so far, [models], whenever one says more; the last is stripped.

    Each model answers in its own thread; closing the iterator ends them at their next token. An error of one
    ends all and is raised here.
    """
    pieces: SimpleQueue[tuple[int, str | Exception | None]] = SimpleQueue()
    stopped = threading.Event()

    def work(position: int) -> None:
        def take(piece: str) -> None:
            if stopped.is_set():
                raise _Stopped
            pieces.put((position, piece))

        shown = models[position]
        try:
            options = {"max_new_tokens": max_new_tokens, "temperature": temperature}
            answer(shown.model, shown.processor, image, question, **options, on_text=take)
            pieces.put((position, None))
        except _Stopped:
            pass
        except Exception as error:  # it is raised where the visitor waits
            pieces.put((position, error))

    jobs = [shown.worker.submit(work, position) for position, shown in enumerate(models)]
    texts, running = [""] * len(models), len(models)
    try:
        while running:
            position, piece = pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if piece is None:
                running -= 1
            elif piece:
                texts[position] += piece
                yield list(texts)
        yield [text.strip() for text in texts]
    finally:
        stopped.set()
        wait(jobs)
