"""Test sets of our own and benchmarks that run in a harness: lm-eval for text, lmms-eval for images."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import InputError
from llava_norm_align.common.loading import resolve_weights
from llava_norm_align.common.results import provenance, weights_sha256, write_json, write_text
from llava_norm_align.diagnosis.files import result_folder
from llava_norm_align.evaluation.candidates import find_candidates, split_seeds
from llava_norm_align.evaluation.evaluate import BATCH_SIZE, MAX_NEW_TOKENS, evaluate
from llava_norm_align.evaluation.lmms import LLAVA_TASKS, PAPER_TASKS, evaluate_lmms, lmms_table
from llava_norm_align.evaluation.tasks import GROUPS
from llava_norm_align.evaluation.text_tasks import TEXT_TASKS, evaluate_text, text_table

TASKS_OF = {"paper": PAPER_TASKS, "llava": LLAVA_TASKS, "lmms": (), "text": TEXT_TASKS}


def evaluate_any(
    model: str,
    tasks: Sequence[str],
    *,
    baselines: Sequence[str] = (),
    images: Path | None = None,
    untouched: str | None = None,
    include_path: Path | None = None,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    max_new_tokens: int | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    four_bit: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    echo: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run `tasks`: test sets of our own (see evaluate), or one group; the content of the JSON file that it writes.

    A group is `paper` or `llava` (lmms-eval), `text` (lm-eval), or tasks of a harness by name: `lmms:mmstar,pope`,
    `text:arc_easy`. Its files are evaluation-lmms.json and .md, or evaluation-text.json and .md, in the folder of
    evaluation.json. `untouched`: see evaluate_text. `include_path`: a folder with more tasks of the harness.
    InputError for options that do not belong to the tasks, and for what evaluate, evaluate_text and evaluate_lmms
    refuse.
    """
    chosen = [name.partition(":") for name in tasks if name.partition(":")[0] in GROUPS]
    if not chosen:
        _refuse("groups of benchmarks", tasks, {"--untouched": untouched, "--include-path": include_path})
        longest = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        return evaluate(
            model,
            tasks,
            baselines=baselines,
            images=images,
            limit=limit,
            batch_size=batch_size,
            max_new_tokens=longest,
            out=out,
            overwrite=overwrite,
            dtype=dtype,
            device=device,
            device_map=device_map,
            four_bit=four_bit,
            trust_remote_code=trust_remote_code,
            revision=revision,
            echo=echo,
        )
    if len(tasks) > 1:
        raise InputError(
            f"--tasks names {', '.join(tasks)}, but a group has result files of its own and runs alone. Run evaluate "
            "once for each group, and once for the other test sets."
        )
    ((group, _, names),) = chosen
    wanted = tuple(name for name in names.split(",") if name) or TASKS_OF[group]
    if not wanted:
        raise InputError(f"--tasks {tasks[0]} names no task. Name some of lmms-eval's, as in lmms:mmstar,pope.")
    for name, value in (("--limit", limit), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}, but at least 1 was expected. Raise it, or leave it out.")
    _refuse("test sets of our own", tasks, {"--images": images, "--max-new-tokens": max_new_tokens})
    common = {"tasks": wanted, "revision": revision, "limit": limit, "batch_size": batch_size, "dtype": dtype}
    common |= {"device": device, "include_path": include_path}
    for name in (model, *baselines):
        if len(split_seeds(name)) > 1:
            raise InputError(
                f"{name} names seeds of one training, which groups of benchmarks do not pool. Name one model, and the "
                "other seeds with --baseline."
            )
    _refuse("test sets of our own", tasks, {"--overwrite": overwrite})
    kind = "text" if group == "text" else "lmms"
    if kind == "text":
        loading = {"--device-map": device_map, "--load-in-4bit": four_bit, "--trust-remote-code": trust_remote_code}
        _refuse("tasks about images", tasks, loading)
        models = [model, *baselines]
        paths = [resolve_weights(name, None if number else revision) for number, name in enumerate(models)]
        if len({path.resolve() for path in paths}) < len(paths):
            raise InputError(f"{', '.join(models)}: a model is named twice. Leave one out.")
        target = result_folder(models[0], paths[0], out)
        result, table = evaluate_text(models, untouched=untouched, **common), text_table
    else:
        _refuse("tasks of text", tasks, {"--untouched": untouched})
        same = {"dtype": dtype, "four_bit": four_bit, "max_new_tokens": MAX_NEW_TOKENS}  # the last is the task's own
        candidates = find_candidates(model, baselines, revision=revision, trust_remote_code=trust_remote_code, **same)
        folders = [folder for candidate in candidates for folder in candidate.folders]
        models, paths = [folder.name for folder in folders], [folder.path for folder in folders]
        target = result_folder(models[0], paths[0], out)
        loading = {"device_map": device_map, "four_bit": four_bit, "trust_remote_code": trust_remote_code}
        result, table = evaluate_lmms(models, **common, **loading), lmms_table
    named = dict(zip(models, paths, strict=True)) | ({untouched: resolve_weights(untouched)} if untouched else {})
    hashes = {name: weights_sha256(path) for name, path in named.items()}
    result = {**provenance(), "weights_sha256": hashes, **result}
    write_json(target / f"evaluation-{kind}.json", result)
    write_text(target / f"evaluation-{kind}.md", f"## Evaluation: {result['harness']}\n\n{table(result)}")
    echo(table(result))
    echo(f"Written: {target / f'evaluation-{kind}.json'} and evaluation-{kind}.md")
    return result


def _refuse(other: str, tasks: Sequence[str], options: dict[str, Any]) -> None:
    """InputError for an option that was passed, but is one of `other` tasks."""
    for name, value in options.items():
        if value:
            raise InputError(f"{name} belongs to {other}, but --tasks is {','.join(tasks)}. Leave it out.")
