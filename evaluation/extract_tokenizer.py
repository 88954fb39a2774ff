"""The tokenizer of an extracted language model: it reads as the LLaVA's does, and its chat template takes strings."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import first_line
from llava_norm_align.common.results import write_json
from llava_norm_align.common.weights import read_json
from llava_norm_align.conversion.files import COPIED_NAMES, small_files
from llava_norm_align.conversion.processor_fields import PROCESSOR_FILE, TOKENIZER_FILE, make_tokenizer_portable
from llava_norm_align.conversion.tokenizer_class import read_by_file
from llava_norm_align.conversion.verify import quiet_transformers

TOKENIZER_FILES = (
    "tokenizer.json", TOKENIZER_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt",
)  # fmt: skip
TOKENIZER_SUFFIXES = (".model", ".spm", ".tiktoken")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")  # one of them, or a file with such a suffix, is needed
TEMPLATE_FILE = "chat_template.jinja"
QUESTION, ANSWER = "What is this?", "A cat."
PROBES = (
    "What is in the picture?\n\nA cat, 1234 dogs.",
    "  two spaces ",
    " one",
    "def f(x):\n\treturn x  # caf\u00e9 \u2192",
)
# Stands before a LLaVA's template, which takes lists of parts, so that it takes strings, too.
PARTS_FROM_STRINGS = """\
{%- set listed = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set parts = [{'type': 'text', 'text': message['content']}] -%}
{%- set listed.messages = listed.messages + [dict(message, content=parts)] -%}
{%- else -%}
{%- set listed.messages = listed.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = listed.messages -%}
"""


def check_tokenizer_files(source: Path) -> None:
    """InputError if the folder has no tokenizer."""
    if not any(path.name in VOCABULARIES or path.suffix in TOKENIZER_SUFFIXES for path in small_files(source)):
        raise InputError(
            f"There is no tokenizer in {source}: tokenizer.json was expected beside the weights. Download it "
            "again, or copy the language model's own files there."
        )


def _copy_tokenizer(folder: Path, source: Path) -> dict[str, Any]:
    """Copy the tokenizer's files, for both lines; returns tokenizer_config.json."""
    for path in small_files(source):
        relative = path.relative_to(source)
        if path.name in TOKENIZER_FILES or path.suffix in TOKENIZER_SUFFIXES or len(relative.parts) > 1:
            (folder / relative).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / relative)
    make_tokenizer_portable(folder)
    return read_json(folder / TOKENIZER_FILE, "a tokenizer's settings") if _has(folder, TOKENIZER_FILE) else {}


def write_tokenizer(folder: Path, source: Path) -> None:
    """The tokenizer's files and the licences. The chat template, the processor's first, becomes a file."""
    settings = _copy_tokenizer(folder, source)
    template = _read_template(source, settings)
    settings = {key: value for key, value in settings.items() if key not in ("processor_class", "chat_template")}
    if settings:
        write_json(folder / TOKENIZER_FILE, settings)
    # The class of a language model's type would make rules of its own; LLaVA's types read tokenizer.json as it is.
    read_by_file(folder)
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    for path in small_files(source):
        if path.name.startswith(COPIED_NAMES):
            shutil.copyfile(path, folder / path.name)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _read_template(source: Path, settings: dict[str, Any]) -> str | None:
    """The chat template that the processor reads, else the tokenizer's."""
    if _has(source, TEMPLATE_FILE):
        return (source / TEMPLATE_FILE).read_text(encoding="utf-8")
    contents = [
        read_json(source / name, "a chat template")
        for name in ("chat_template.json", PROCESSOR_FILE)
        if _has(source, name)
    ]
    for content in [*contents, settings]:
        template = content.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}
        if isinstance(template, dict):
            template = template.get("default")
        if template:
            return template
    return None


def _load_tokenizers(folder: Path, source: Path, family: str) -> list[transformers.PreTrainedTokenizerBase]:
    """The tokenizer of `source`, as transformers reads it for a stock model of that `family`, and the new one."""
    try:
        with tempfile.TemporaryDirectory(prefix="llava-norm-align-") as scratch, quiet_transformers():
            _copy_tokenizer(Path(scratch), source)
            write_json(Path(scratch, "config.json"), {"model_type": family})
            return [AutoTokenizer.from_pretrained(place) for place in (scratch, folder)]
    except Exception as error:  # every tokenizer class has its own way to fail
        raise InputError(
            f"The tokenizer in {source} cannot be loaded ({type(error).__name__}: {first_line(error)}). Repair its "
            "files, or download them again."
        ) from error


def settle_tokenizer(folder: Path, source: Path, family: str, kind: str) -> list[str]:
    """Check that the tokenizer loads, and reads as the source's; let its chat template take strings; returns notes."""
    own, tokenizer = _load_tokenizers(folder, source, family)
    for text in PROBES:
        if own(text).input_ids != tokenizer(text).input_ids:
            raise InputError(
                f"The tokenizer in {source} reads {text!r} as {own(text).input_ids}, but for a {kind} transformers "
                f"{transformers.__version__} takes {type(tokenizer).__name__}, which reads it as "
                f"{tokenizer(text).input_ids}. Install transformers 4.57.6 to extract and use this model."
            )
    template = tokenizer.chat_template
    if template is None:
        return ["there is no chat template"]
    if not isinstance(template, str):  # with additional templates
        template = template["default"]
    if _render(tokenizer, template, as_parts=False):
        return []
    expected = _render(tokenizer, template, as_parts=True)
    listed = PARTS_FROM_STRINGS + template
    if expected is None or _render(tokenizer, listed, as_parts=False) != expected:
        return ["the chat template does not render text alone; it is kept as it is"]
    (folder / TEMPLATE_FILE).write_text(listed, encoding="utf-8")
    return ["the chat template takes strings, too: lines were added before it"]


def _render(tokenizer: transformers.PreTrainedTokenizerBase, template: str, as_parts: bool) -> str | None:
    """What a template makes of a question and an answer; None if it fails or leaves one of them out."""
    texts = [[{"type": "text", "text": text}] if as_parts else text for text in (QUESTION, ANSWER)]
    messages = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    try:
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # templates raise what they like
        return None
    return rendered if QUESTION in rendered and ANSWER in rendered else None
