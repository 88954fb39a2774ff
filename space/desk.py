"""What the page's buttons do, in plain Python: asking, seeing, stopping, remembering."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Asked:
    """What a visitor asked, as it was when they pressed the button."""

    picture: str  # path
    small: str  # the picture's thumbnail as a data: address
    question: str
    max_new_tokens: int
    temperature: float


@dataclass
class Visit:
    """What the server keeps of one visitor, in memory."""

    asked: Asked | None = None  # the last question
    entries: list[dict] = field(default_factory=list)  # the answered ones, the oldest first
    ends: int = 0  # presses of Stop and Clear, each of which ends the answer that runs

    def keep(self, answers: Sequence[str]) -> None:
        """Remember the last question with `answers`, unless it was stopped before the first word.

        In place of the one before, if that was the same question about the same picture.
        """
        if self.asked is None or not any(answers):
            return
        entry = {"question": self.asked.question, "answers": list(answers), "picture": self.asked.small}
        if self.entries and all(self.entries[-1][key] == entry[key] for key in ("question", "picture")):
            self.entries.pop()
        self.entries = [*self.entries, entry][-REMEMBERED:]

    def stop(self) -> None:
        self.ends += 1

    def clear(self) -> None:
        self.asked, self.entries = None, []
        self.ends += 1


class Desk:
    """Serves visitors with the models that they all share; who calls it lets one request run at a time."""

    def __init__(self, models: Sequence[Shown], settings: Settings):
        self.models = list(models)
        self.settings = settings
        self._stream, self._measure = on_gpu(self._answers), on_gpu(self._diagnoses)
        self.compare = lru_cache(maxsize=1)(lambda: compare(self.models))

    # Errors become sentences in here, as ZeroGPU runs both in a process of its own that lets no other error out.
    def _answers(self, *asked: Any) -> Iterator[list[str]]:
        with one_sentence():
            yield from stream_answers(self.models, *asked)

    def _diagnoses(self, path: str, question: str) -> list[dict[str, Any]]:
        with one_sentence():
            return see.measure(self.models, path, question)

    def accept(self, path: str | None, question: str | None, max_new_tokens: float, temperature: float) -> Asked:
        """What is to be answered. Refused if something is missing or beyond the limits."""
        small = thumbnail(limits.open_picture(path))
        question = limits.check_question(question)
        sampling = limits.check_sampling(max_new_tokens, temperature, self.settings.max_new_tokens)
        return Asked(path, small, question, *sampling)

    def ask(self, asked: Asked) -> Iterator[list[str]]:
        """Yield the answers so far, [models], until they end or the iterator is closed. Refused as in `accept`."""
        image = limits.open_picture(asked.picture)
        for shown in self.models:
            check_fits(shown, image, asked.question, asked.max_new_tokens)
        with closing(self._stream(image, asked.question, asked.max_new_tokens, asked.temperature)) as stream:
            yield from stream

    def measure(self, path: str | None, question: str | None) -> tuple[list[dict[str, Any]], Image.Image]:
        """The diagnosis of each model on the picture, and the picture. Refused as in `accept`."""
        image = limits.open_picture(path)
        question = limits.check_question(question)
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
        head = words.seen(thumbnail(image), results[0]["prompt"])
        return head + see.table(results), words.plots(drawn, len(self.models)), see.numbers(results)

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
                "megabytes": limits.MAX_BYTES // 2**20,
                "megapixels": limits.MAX_PIXELS // 1_000_000,
                "characters": limits.MAX_QUESTION,
            },
        }


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
