"""Checks of a model card: its front matter as the Hub wants it, offline and by the Hub's own validator."""

import json
import math
import re
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import first_line
from llava_norm_align.release.card_license import LICENSES, is_hub_id

MARK = "<!-- llava-norm-align card -->"  # in cards that are made; a README.md without it was written by hand
LANGUAGE = r"[a-z]{2,3}|multilingual|code"
# what the Hub asks of a model-index; seen in its error messages
DATASET_TYPE = r"(?:[\w-]+/)?[\w.-]+"
LICENSE_NAME = r"[a-z0-9.-]+"


def read_front(text: str, name: str = "README.md") -> dict[str, Any]:
    """The front matter of a card. InputError, with the line, if there is none or it is no YAML mapping."""
    import yaml  # comes with huggingface_hub

    if not re.match(r"\s*---[ \t]*\r?\n", text):
        raise InputError(
            f"{name} starts without front matter: a line ---, then YAML such as license: apache-2.0, then a line --- "
            "were expected. Write it, or remove the file to let a card be made."
        )
    block = REGEX_YAML_BLOCK.match(text)
    if block is None:
        raise InputError(f"The front matter of {name} has no end. Write a line --- after its last field.")
    first = block[1].count("\n") + 1  # of the YAML, in the file
    try:
        front = yaml.safe_load(block[2])
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {first + mark.line} of {name}" if mark else name
        reason = getattr(error, "problem", None) or first_line(error)
        raise InputError(f"The front matter is no YAML at {where}: {reason}. Correct that line.") from None
    except ValueError as error:  # a date that is none
        raise InputError(f"The front matter of {name} is no YAML: {first_line(error)}. Correct it.") from None
    if not isinstance(front, dict):
        raise InputError(
            f"The front matter of {name} is a {type(front).__name__}, but fields were expected, such as "
            f"license: apache-2.0, from line {first} on. Correct it."
        )
    return front


def check_card(text: str, name: str = "README.md") -> None:
    """InputError unless the front matter of a card is as the Hub wants it, as far as this can be said offline."""
    front = read_front(text, name)
    wrong = [
        *_wrong_texts(front),
        *_wrong_license(front),
        *_wrong_lists(front),
        *_wrong_scores(front),
    ]
    if not wrong:
        try:
            ModelCard(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            wrong = [first_line(error).rstrip(".")]
    if wrong:
        raise InputError(f"The front matter of {name} is not as the Hub wants it: {wrong[0]}. Correct it there.")


def validate_card_online(text: str, repo_id: str) -> str | None:
    """InputError if the Hub's validator refuses the card of `repo_id`; a sentence if it cannot be asked."""
    try:
        ModelCard(text).validate()
    except ValueError as error:
        reason = re.sub(r"\s*\n\s*", "; ", _refusal(str(error)).strip())
        raise InputError(f"The Hub refuses the card of {repo_id}: {reason[:500].rstrip('.')}. Correct it.") from None
    except Exception as error:  # each version of huggingface_hub has another HTTP library, with errors of its own
        return (
            f"The Hub cannot be asked whether it takes the card of {repo_id} ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}). Check the connection, and that HF_HUB_OFFLINE is not set."
        )
    return None


def _refusal(answer: str) -> str:
    """The words of the validator's answer, which is text or JSON."""
    try:
        return "; ".join(one["message"] for one in json.loads(answer)["errors"]) or answer
    except (ValueError, TypeError, KeyError):
        return answer


def _wrong_texts(front: dict[str, Any]) -> list[str]:
    wrong = [f"{key!r} is no name of a field" for key in front if not isinstance(key, str)]
    wrong += [f"{key} has no value" for key, value in front.items() if value is None]
    wrong += [
        f"{key} is {front[key]!r}, but a text was expected"
        for key in ("library_name", "pipeline_tag", "license_name", "license_link")
        if not isinstance(front.get(key, ""), str)
    ]
    return wrong


def _wrong_license(front: dict[str, Any]) -> list[str]:
    found = front.get("license")
    if found is None:
        return ["it has no license; an identifier such as apache-2.0 or llama3.2 was expected"]
    texts = found if isinstance(found, list) and found else [found]
    wrong = [f"license holds {one!r}, but a text was expected" for one in texts if not isinstance(one, str)]
    if not wrong:
        wrong = [
            f"license is {one!r}, which the Hub does not know; for one that is not in its list "
            "(https://huggingface.co/docs/hub/repositories-licenses), license: other and license_name were expected"
            for one in texts
            if one not in LICENSES
        ]
    named = front.get("license_name")
    if not wrong and "other" in texts and not named:
        wrong = ["license is other, but license_name does not say which"]
    if not wrong and isinstance(named, str) and not re.fullmatch(LICENSE_NAME, named):
        wrong = [f"license_name is {named!r}, but small letters, digits, . and - were expected"]
    return wrong


def _wrong_lists(front: dict[str, Any]) -> list[str]:
    wrong = []
    for key in ("tags", "datasets", "metrics", "language", "base_model"):
        value = front.get(key, [])
        texts = [value] if isinstance(value, str) and key != "tags" else value
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
            wrong.append(f"{key} is {value!r}, but a list of texts was expected")
        elif key == "language":
            found = [one for one in texts if not re.fullmatch(LANGUAGE, one)]
            wrong += [f"language is {one!r}, but a code such as en was expected (ISO 639)" for one in found]
        elif key == "base_model":
            wrong += [f"base_model is {one!r}, but the id of a model on the Hub was expected" for one in texts
                      if not is_hub_id(one)]  # fmt: skip
    return wrong


def _wrong_scores(front: dict[str, Any]) -> list[str]:
    """What is wrong in the model-index; its structure is looked at by huggingface_hub."""
    entries = front.get("model-index", [])
    if not isinstance(entries, list):
        return ["model-index is no list"]
    try:
        results = [result for entry in entries for result in entry["results"]]
        metrics = [metric for result in results for metric in result["metrics"]]
        kinds = [result["dataset"]["type"] for result in results]
    except (KeyError, TypeError) as error:
        return [f"model-index lacks {error}, or it is of another form"]
    wrong = [
        f"the type of a dataset in model-index is {kind!r}, but an id such as easy-vqa was expected"
        for kind in kinds
        if not isinstance(kind, str) or not re.fullmatch(DATASET_TYPE, kind)
    ]
    for metric in metrics:
        value = metric.get("value") if isinstance(metric, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            wrong.append(f"a value in model-index is {value!r}, but a number was expected")
        elif isinstance(value, float) and not math.isfinite(value):
            wrong.append(f"a value in model-index is {value}, but a finite number was expected")
    return wrong
