"""A checkpoint to the Hub: checks, card, upload, and a look at what arrived."""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi

from llava_norm_align.common.errors import CheckFailed, InputError
from llava_norm_align.common.results import provenance, write_text
from llava_norm_align.conversion.doctor import examine_stepwise
from llava_norm_align.release.card import CARD, Card, build_card, validate_card_online
from llava_norm_align.release.contents import Contents, Item, find_contents, without_homes
from llava_norm_align.release.upload import Pushed, Target, open_access, upload, visibility
from llava_norm_align.release.upload_access import check_names
from llava_norm_align.release.upload_errors import WAITS, check_version, clean_log
from llava_norm_align.release.verify import check_loading, check_remote

MESSAGE = "Release of a norm-aligned LLaVA"
ALONE = "answers alone in "  # name of the doctor's checks that load the model as others will


@dataclass(frozen=True)
class Words:
    """What the card says that no result file holds; see build_card."""

    license: str | None = None
    base_model: str | None = None
    language: Sequence[str] = ()


def release(
    folder: Path,
    target: Target,
    words: Words = Words(),
    *,
    pythons: Sequence[Path] = (),
    check: bool = False,
    card_out: Path | None = None,
    verify_load: bool = False,
    message: str = MESSAGE,
    api: HfApi | None = None,
    echo: Callable[[str], Any] = lambda text: None,
) -> dict[str, Any]:
    """Put the norm-aligned model in `folder` up as `target`, and check from there what arrived; a summary for JSON.

    First the files (contents), the card, the right to write, and the doctor, who loads the model here and in
    `pythons`; `check` stops there, without a token. `card_out`: the card is written there, too. Then one commit, the
    hash of each file as the Hub lists it, and config, processor and code loaded from that commit in fresh processes
    without a cache; `verify_load`: the weights, too, and one answer. The folder is only read.
    InputError and CheckFailed say what the Hub holds by then.
    """
    check_version()
    check_names(target)
    api = api or HfApi()
    with clean_log(api), tempfile.TemporaryDirectory(prefix="release-") as scratch:
        contents = without_homes(find_contents(folder, huggingface_hub.get_token()), Path(scratch, "folder"))
        card = _card(folder, target, words)
        access = None if check else open_access(target, api, _with_card(contents, card, Path(scratch)), echo)
        tried = _doctor(folder, pythons, echo)
        card = _card(folder, target, words, tried)
        validated = _validate(card, target, check, echo)
        items = _with_card(contents, card, Path(scratch))
        if card_out is not None:
            write_text(card_out, card.text)
        result = {
            **provenance(),
            "repo_id": target.repo_id,
            "checked_only": check,
            "tried": tried,
            "card": card.text,
            "card_validated_by_the_hub": validated,
            "files": {item.name: item.size for item in items},
            "left_out": dict(contents.left_out),
            "notes": [*contents.notes, *card.notes],
        }
        echo(describe_contents(result))
        if access is None:
            return result
        pushed = upload(api, target, access, items, message, echo)
        check_remote(api, pushed, items)
        echo(f"Verified: the {len(items)} files of commit {pushed.commit[:12]} have the hashes of those here")
        result |= {"pushed": vars(pushed), "loaded": _loaded(api, pushed, pythons, verify_load, echo)}
    echo(describe_pushed(pushed))
    return result


def _card(folder: Path, target: Target, words: Words, tried: Sequence[str] = ()) -> Card:
    return build_card(folder, repo_id=target.repo_id, **vars(words), tried=tried)


def _with_card(contents: Contents, card: Card, scratch: Path) -> list[Item]:
    """The files that go up, the card among them."""
    path = scratch / CARD
    write_text(path, card.text)
    others = [item for item in contents.items if item.name != CARD]
    return sorted([*others, Item(CARD, path, path.stat().st_size)], key=lambda item: item.name)


def _doctor(folder: Path, pythons: Sequence[Path], echo: Callable[[str], Any]) -> list[str]:
    """What the model was loaded with, such as "Python 3.11.7, transformers 5.24.0, torch 2.13.0"."""
    tried, failed = [], []
    for check in examine_stepwise(folder, load=True, pythons=pythons):
        echo(f"[{check.number}] {check.name}: {check.status} ({check.detail})")
        if check.status == "failed":
            failed.append(check)
        elif check.name.startswith(ALONE) and check.status == "ok":
            tried.append(check.detail.partition(": ")[0])
    if failed:
        raise CheckFailed(
            f"{folder} fails {len(failed)} of the doctor's checks ({failed[0].name}: {failed[0].detail.rstrip('.')}), "
            f"so nothing was uploaded. Run `llava-norm-align doctor {folder}`; --repair mends some."
        )
    return tried


def _validate(card: Card, target: Target, check: bool, echo: Callable[[str], Any]) -> bool:
    """Whether the Hub's validator took the card; False if it could not be asked, which a mere check allows.

    A release asks three times.
    """
    unasked = validate_card_online(card.text, target.repo_id)
    for wait in () if check else WAITS[:2]:
        if unasked:
            echo(f"{unasked} Trying again in {wait} s")
            time.sleep(wait)
            unasked = validate_card_online(card.text, target.repo_id)
    if unasked and not check:
        raise InputError(unasked)
    return not unasked


def _loaded(
    api: HfApi, pushed: Pushed, pythons: Sequence[Path], weights: bool, echo: Callable[[str], Any]
) -> list[dict[str, Any]]:
    found = []
    for python in (Path(sys.executable), *pythons):
        one = check_loading(api, pushed.repo_id, pushed.commit, python=python, weights=weights)
        found.append(one)
        said = f"; it answers {one['answer']!r}" if weights else ""
        echo(f"Loaded from the Hub with an empty cache, transformers {one['transformers']}: {one['config']}{said}")
    return found


def describe_contents(result: dict[str, Any]) -> str:
    """What goes up, what does not and why, and what the publisher should know."""
    files = result["files"]
    lines = [f"{len(files)} files, {sum(files.values()) / 1e6:,.1f} MB:"]
    lines += [f"    {name}  {size:,}" for name, size in files.items()]
    lines += [f"Left out: {name} ({why})" for name, why in result["left_out"].items()]
    lines += [f"Note: {note}" for note in result["notes"]]
    if not result["card_validated_by_the_hub"]:
        lines.append("Note: the card was checked here; the Hub's own validator could not be asked")
    return "\n".join(lines)


def describe_pushed(pushed: Pushed) -> str:
    """Where it is, and the line that loads it."""
    counts = f"{len(pushed.uploaded)} files uploaded, {len(pushed.unchanged)} unchanged, {len(pushed.deleted)} deleted"
    lines = [f"{pushed.pull_request or pushed.url} ({visibility(pushed.private)}): {counts}, commit {pushed.commit}"]
    if pushed.deleted:
        lines.append(f"Deleted there, as this release no longer has them: {', '.join(pushed.deleted)}")
    if pushed.kept:
        lines.append(f"Left as they are there, as no release writes them: {', '.join(pushed.kept)}")
    revision = "" if pushed.revision == "main" else f', revision="{pushed.revision}"'
    lines.append(
        f'Load it: AutoModelForImageTextToText.from_pretrained("{pushed.repo_id}"{revision}, trust_remote_code=True)'
    )
    return "\n".join(lines)
