"""Chat templates for training: Jinja with `{% generation %}` around what an assistant says and its end of turn.

A loss on answers needs these marks. What a marked template renders is byte for byte what the processor's own does, so
a trained model is asked as it was trained.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from llava_norm_align.common.errors import InputError

FOLDER = Path(__file__).with_name("templates")
NAMED = ("vicuna_v1", "smollm2")  # LLaVA-1.5's conversation, and SmolLM2's ChatML
OPTION = "chat_template_path"

# Makes a language model's own template, which joins strings, take lists of parts; stands before that template.
FLATTEN_PARTS = (FOLDER / "flatten_parts.jinja").read_text(encoding="utf-8")

# The turns of Llama 3.1, 3.2 and 3.3, for which TRL has no marked template.
LLAMA_TURN = (
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
    "'<|eot_id|>' }}"
)
LLAMA_MARKED_TURN = """\
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message['role'] == 'assistant' %}
            {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}"""

MARKS = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")  # a dash takes the white space beside it away

QUESTION, ANSWER = "What is this?", "A cat."


def training_template(processor: ProcessorMixin, choice: str | Path | None = None) -> str:
    """The chat template to train with, its answers marked.

    `choice`: "vicuna_v1", "smollm2" or a Jinja file. None: the processor's own, as it is if it has the marks, else
    ours or TRL's marked form of it. InputError if there is none, or if the template shows no image, marks no end of
    turn, or ends its turns with a token that the tokenizer lacks.
    """
    template = _read(choice) if choice else _marked(processor)
    _check(template, processor, str(choice) if choice else "The processor's chat template")
    return template


def without_marks(template: str) -> str:
    """The template as a processor keeps it: it renders the same, and programs that do not know the marks read it."""
    return MARKS.sub(r"{#\1 \2#}", template)


def leading_bos(processor: ProcessorMixin, text: str = "") -> str:
    """The BOS token if the tokenizer puts one before every text and `text` does not start with it yet, else ""."""
    tokenizer = processor.tokenizer
    ids = tokenizer("").input_ids
    if tokenizer.bos_token is None or tokenizer.bos_token_id not in ids or text.startswith(tokenizer.bos_token):
        return ""
    return tokenizer.bos_token


def render(
    template: str, processor: ProcessorMixin, messages: list[dict[str, Any]], add_generation_prompt: bool = False
) -> tuple[str, list[str]]:
    """The text of `messages` and those stretches of it that the template marks."""
    texts, spans = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        return_assistant_tokens_mask="endgeneration" in template,
        add_generation_prompt=add_generation_prompt,
        **processor.tokenizer.special_tokens_map,
    )
    return texts[0], [texts[0][start:end] for start, end in (spans[0] if spans else [])]


def _read(choice: str | Path) -> str:
    path = FOLDER / f"{choice}.jinja" if str(choice) in NAMED else Path(choice)
    if not path.is_file():
        raise InputError(
            f"There is no chat template file {choice}. Name a Jinja file, or one of {', '.join(NAMED)}, with "
            f"--{OPTION}."
        )
    return path.read_text(encoding="utf-8")


def _marked(processor: ProcessorMixin) -> str:
    """The processor's own template with marks."""
    own = processor.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    if own is None:
        raise InputError(
            f"The processor has no chat template. Choose vicuna_v1, as LLaVA-1.5, or write one to a Jinja file, and "
            f"name it with --{OPTION}."
        )
    if _has_marks(own):
        return own
    expected = _renderings(own, processor)
    for template in _candidates(own, processor):
        if expected and _renderings(template, processor) == expected:
            return template
    raise InputError(
        "The processor's chat template does not mark what the assistant says, and no marked form that renders the "
        "same is known. Copy it to a file such as chat_template.jinja, put {% generation %} before an assistant's "
        f"text and {{% endgeneration %}} after its end-of-turn token, and pass --{OPTION} chat_template.jinja; or "
        f"train on LLaVA-1.5's conversation with --{OPTION} vicuna_v1."
    )


def _has_marks(template: str) -> bool:
    return "endgeneration" in template


def _candidates(own: str, processor: ProcessorMixin) -> Iterator[str]:
    for name in NAMED:
        yield _read(name)
    if own.count(LLAMA_TURN) == 1:
        yield own.replace(LLAMA_TURN, LLAMA_MARKED_TURN)
    try:
        from trl import get_training_chat_template
    except ImportError:
        return
    bare = copy.copy(processor.tokenizer)  # TRL knows the templates of language models, so without our first lines
    bare.chat_template = own.removeprefix(FLATTEN_PARTS)
    try:
        marked = get_training_chat_template(bare)
    except (ValueError, TypeError, TemplateError):
        return
    yield own[: len(own) - len(bare.chat_template)] + marked


def _conversation(system: bool = False, image: bool = False) -> list[dict[str, Any]]:
    """Two questions, each with its answer."""
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}] if system else []
    for turn in range(2):
        question = [{"type": "image"}] if image and turn == 0 else []
        messages.append({"role": "user", "content": [*question, {"type": "text", "text": QUESTION}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": ANSWER}]})
    return messages


def _renderings(template: str, processor: ProcessorMixin) -> list[str] | None:
    """What the template makes of some conversations; None if it cannot render them."""
    texts = []
    for system, image in ((False, False), (False, True), (True, True)):
        messages = _conversation(system, image)
        try:
            texts.append(render(template, processor, messages)[0])
            texts.append(render(template, processor, messages[:-1], add_generation_prompt=True)[0])
        except (TemplateError, TypeError):
            return None
    return texts


def _check(template: str, processor: ProcessorMixin, name: str) -> None:
    """InputError unless both answers are marked up to an end of turn that is one token, and the image is shown."""
    try:
        text, spans = render(template, processor, _conversation(image=True))
    except (TemplateError, TypeError) as error:
        raise InputError(
            f"{name} cannot be rendered with an image ({error}). Content that is a list of parts "
            f"({{'type': 'image'}}, {{'type': 'text', 'text': ...}}) was expected to work; mend it, or choose another "
            f"with --{OPTION}."
        ) from None
    if text.count(processor.image_token) != 1:
        raise InputError(
            f"{name} shows {text.count(processor.image_token)} {processor.image_token} for one image part; 1 was "
            f"expected. Mend it, or choose another with --{OPTION}."
        )
    if len(spans) != 2 or not all(span.lstrip().startswith(ANSWER) for span in spans):
        raise InputError(
            f"{name} marks {len(spans)} stretches of 2 answers; {{% generation %}} was expected right before each "
            f"assistant's text. Mend it, or choose another with --{OPTION}."
        )
    tokenizer = processor.tokenizer
    end = spans[0].partition(ANSWER)[2].strip()
    if end not in {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}:
        found = f"{end}, which is not a special token of the tokenizer" if end else "no end of turn"
        raise InputError(
            f"{name} marks after an answer {found}, so a model would not learn to stop. Put "
            "{% endgeneration %} after the end-of-turn token, or train on LLaVA-1.5's conversation "
            f"with --{OPTION} vicuna_v1."
        )
