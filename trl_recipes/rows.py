"""The rows that a training reads: LLaVA's JSON after its check, easy-VQA, or a conversational dataset."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset, load_dataset
from transformers import ProcessorMixin

from llava_norm_align.common.errors import InputError, NormAlignError
from llava_norm_align.common.loading import first_line
from llava_norm_align.data.check import bad_indices, cached_verdict, check_data
from llava_norm_align.data.easy_vqa import load_questions
from llava_norm_align.data.llava_json import Row, Turn, read_llava_json
from llava_norm_align.trl_recipes.arguments import EASY_VQA, ScriptArguments
from llava_norm_align.trl_recipes.collator import to_dataset
from llava_norm_align.trl_recipes.trainer import check_rows

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
CONVERSATIONS = ({"messages"}, {"prompt", "completion"})


def load_rows(
    script: ScriptArguments,
    processor: ProcessorMixin,
    template: str | None,
    max_length: int | None,
    echo: Callable[[str], None],
) -> Dataset:
    """The training rows as SFTTrainer takes them: `messages` (or `prompt`, `completion`) and `images`.

    `template`: the chat template's name or file that check-data counts tokens with. InputError for data that cannot
    be read, has no rows, or has bad ones without `skip_bad_rows`.
    """
    if script.data_path in EASY_VQA:
        return to_dataset(easy_vqa_rows(yes_no=script.data_path.endswith("yes-no")))
    if script.data_path is not None:
        bad = _on_main_process(lambda: _find_bad_rows(script, processor, template, max_length, echo))
        return to_dataset(read_llava_json(script.data_path, script.image_folder, skip=bad))
    return _load_conversations(script.dataset_name, script.dataset_train_split)


def easy_vqa_rows(yes_no: bool = False) -> Iterator[Row]:
    """easy-VQA's questions for training as rows of LLaVA's JSON."""
    for number, question in enumerate(load_questions("train", yes_no=yes_no)):
        turns = (Turn("user", question.question, image=True), Turn("assistant", question.answer))
        yield Row(str(number), turns, question.image)


def _find_bad_rows(
    script: ScriptArguments,
    processor: ProcessorMixin,
    template: str | None,
    max_length: int | None,
    echo: Callable[[str], None],
) -> set[int]:
    """Positions of the rows that check-data finds bad, by its kept verdict if nothing has changed since."""
    data = (script.data_path, script.image_folder, processor)
    options: dict[str, Any] = {
        "max_length": max_length,
        "template": template,
        "stage": 1 if script.prompt_format == "plain" else 2,
    }
    report = cached_verdict(*data, **options)
    source = "the kept verdict of check-data" if report else "check-data"
    report = report or check_data(*data, **options)
    counts = report["totals"]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report["counts"].items() if count)
    if counts["bad"] and not script.skip_bad_rows:
        first = report["rows"][0]
        raise InputError(
            f"{counts['bad']:,} of the {counts['rows']:,} rows of {script.data_path} are bad ({kinds}), such as row "
            f"{first['index']} (id {first['id']}): {first['sentence']} Write a file without them (check-data "
            "--clean), or train without them: --skip_bad_rows true."
        )
    left_out = f" and left out ({kinds})" if kinds else ""
    echo(f"data      {counts['rows']:,} rows, {counts['bad']:,} bad{left_out}: {source}")
    return bad_indices(report)


def _on_main_process(find: Callable[[], set[int]]) -> set[int]:
    """What `find` returns on the main process, on all; its InputError ends all."""
    state = PartialState()
    found: list[Any] = [None, None]
    if state.is_main_process:
        try:
            found[0] = find()
        except NormAlignError as error:
            if state.num_processes == 1:
                raise
            found[1] = str(error)
    if state.num_processes > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise InputError(found[1])
    return found[0]


def _load_conversations(name: str, split: str) -> Dataset:
    path = Path(name)
    try:
        if path.is_file() and path.suffix in BUILDERS:
            rows = load_dataset(BUILDERS[path.suffix], data_files=str(path), split=split)
        else:
            rows = load_dataset(name, split=split)
    except StopIteration:
        raise InputError(f"The dataset {name} is empty: rows with images were expected. Name another file.") from None
    except Exception as error:  # each format and the Hub have their own
        raise InputError(
            f"The dataset {name} (split {split}) cannot be read: {first_line(error)} Name a folder, a .json, "
            ".jsonl or .parquet file, or a Hub id."
        ) from error
    check_rows(rows)
    columns = set(rows.column_names)
    if not any(needed <= columns for needed in CONVERSATIONS):
        raise InputError(
            f"The dataset {name} has the columns {', '.join(rows.column_names)}, but `messages`, or `prompt` and "
            "`completion`, were expected (TRL's conversational format). Rename them, or write LLaVA's JSON."
        )
    return rows
