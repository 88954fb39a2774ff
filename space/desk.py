"""What the page's buttons do, in plain Python: asking, seeing, stopping, remembering."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

from PIL import Image

from llava_norm_align.space import limits, see, words
from llava_norm_align.space.answers import check_fits, stream_answers
from llava_norm_align.space.compare import compare
from llava_norm_align.space.guard import one_sentence
from llava_norm_align.space.models import Shown
from llava_norm_align.space.settings import Settings

REMEMBERED = 20  # questions of a visitor
THUMBNAIL = 88  # pixels
GPU_SECONDS = 60  # that ZeroGPU lends for one request


class Desk:
    """Serves visitors with the models that they all share; who calls it lets one request run at a time."""

    def __init__(self, models: Sequence[Shown], settings: Settings):
        self.models = list(models)
        self.settings = settings
        self._asking: str | None = None  # the visitor whose question is answered now
        self._unwanted: set[str] = set()  # visitors who pressed Stop
        self._stream, self._measure = on_gpu(self._answers), on_gpu(self._diagnoses)
        self.compare = lru_cache(maxsize=1)(lambda: compare(self.models))

    # Errors become sentences in here, as ZeroGPU runs both in a process of its own that lets no other error out.
    def _answers(self, *asked: Any) -> Iterator[list[str]]:
        with one_sentence():
            yield from stream_answers(self.models, *asked)

    def _diagnoses(self, path: str, question: str) -> list[dict[str, Any]]:
        with one_sentence():
            return see.measure(self.models, path, question)

    def ask(
        self, path: str | None, question: str | None, max_new_tokens: float, temperature: float, visitor: str
    ) -> Iterator[list[str]]:
        """Yield the answers so far, [models]. Refused if something is beyond the limits."""
        question = limits.check_question(question)
        sampling = limits.check_sampling(max_new_tokens, temperature, self.settings.max_new_tokens)
        image = limits.open_picture(path)
        for shown in self.models:
            check_fits(shown, image, question, sampling[0])
        self._asking = visitor
        try:
            if visitor in self._unwanted:
                return
            with closing(self._stream(image, question, *sampling)) as stream:
                for texts in stream:
                    if visitor in self._unwanted:
                        return
                    yield texts
        finally:
            self._asking = None
            self._unwanted.discard(visitor)

    def stop(self, visitor: str) -> None:
        """End the visitor's running answers at the next word; those that wait end as soon as they begin."""
        self._unwanted.add(visitor)

    def leave(self, visitor: str) -> None:
        """A visitor has closed the page: nobody waits for the rest of the answer."""
        if self._asking == visitor:
            self._unwanted.add(visitor)
        else:
            self._unwanted.discard(visitor)

    def begin(self, visitor: str) -> None:
        """A visitor asks anew: an earlier Stop no longer counts."""
        self._unwanted.discard(visitor)

    def measure(self, path: str | None, question: str | None) -> tuple[list[dict[str, Any]], Image.Image]:
        """The diagnosis of each model on the picture, and the picture. Refused as in `ask`."""
        question = limits.check_question(question)
        image = limits.open_picture(path)
        for shown in self.models:
            check_fits(shown, image, question, 0)
        return self._measure(path, question), image

    def numbers(self, path: str | None, question: str | None) -> list[dict[str, Any]]:
        """The diagnosis of each model, for a program."""
        return see.numbers(self.measure(path, question)[0])

    def see(self, path: str | None, question: str | None) -> tuple[str, str, list[dict[str, Any]]]:
        """(table as HTML, plots as HTML, numbers) of the picture and question."""
        results, image = self.measure(path, question)
        drawn = see.draw(self.models, results, image)
        return see.table(results), words.plots(drawn), see.numbers(results)

    def about(self) -> dict[str, Any]:
        """What a program may want to know of the page."""
        models = [
            {"name": one.name, "kind": "norm-aligned" if one.aligned else "stock", "trained_steps": one.trained_steps}
            for one in self.models
        ]
        return {
            "models": models,
            "limits": {
                "max_new_tokens": self.settings.max_new_tokens,
                "waiting": self.settings.queue,
                "megabytes": limits.MAX_BYTES // 1_000_000,
                "megapixels": limits.MAX_PIXELS // 1_000_000,
                "characters": limits.MAX_QUESTION,
            },
        }


def remember(entries: list[dict], path: str | None, question: str, answers: Sequence[str], again: bool) -> list[dict]:
    """The visitor's questions with this one, unless it was stopped before the first word.

    `again`: in place of the last, if that was the same question.
    """
    if not any(answers):
        return entries
    entry = {"question": question.strip(), "answers": list(answers), "picture": thumbnail(limits.open_picture(path))}
    same = ("question", "picture")
    if again and entries and all(entries[-1][key] == entry[key] for key in same):
        entries = entries[:-1]
    return [*entries, entry][-REMEMBERED:]


def thumbnail(image: Image.Image) -> str:
    """A small copy as a data: address."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def on_gpu(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` as ZeroGPU runs it, with a GPU for its time; elsewhere as it is."""
    try:
        import spaces
    except ImportError:
        return work
    return spaces.GPU(work, duration=GPU_SECONDS)
