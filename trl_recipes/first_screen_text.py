"""The first screen of a training in words, at most 100 columns wide."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from llava_norm_align.diagnosis.formats import WIDTH, counted, number, shorten, text_table

LABEL = 10  # columns before the text of a line
ROW_LENGTH = 900  # characters of the row that is shown
OPENS, CLOSES = "[[", "]]"  # around supervised tokens
GIB = 2**30
MIXED = {"no": "no mixed precision", "bf16": "bf16 mixed precision"}
GWC_UNCLIPPED = (
    "GWC multiplies the projector's gradient by one factor, which {optimizer} divides away again. Without clipping, "
    "its expected effect is within noise: see docs/training.md."
)
GWC_CLIPPED = (
    "with GWC the projector's gradient can take most of the global norm, so that the other parts are clipped to "
    "little: watch projector_gradient_share, and see docs/training.md."
)
GWC_BY_PART = (
    "with GWC the projector's gradient reaches its own limit at other steps, and takes nothing from the other parts: "
    "see docs/training.md."
)


def line(label: str, text: str, cut_words: bool = False) -> str:
    """A labelled line, wrapped under its text; paths stay whole unless `cut_words`."""
    indents = {"initial_indent": label.ljust(LABEL), "subsequent_indent": " " * LABEL}
    return textwrap.fill(text, WIDTH, **indents, break_long_words=cut_words, break_on_hyphens=False)


def describe(facts: Mapping[str, Any]) -> str:
    """What is trained and how; `facts` are first_screen_facts.read_back's, with notes."""
    name = shorten(facts["model"] or "a model without a name", 80)
    lines = [
        line("model", f"{name}: {facts['class']}, {facts['parameters']:,} parameters"),
        line("device", describe_devices(facts)),
        *(line("note", note) for note in facts["notes"]),
        "",
        describe_groups(facts["groups"]),
        "",
        line("norm", describe_norm(facts["norm"])),
    ]
    if facts["lora"]:
        lines.append(line("lora", _lora(facts["lora"])))
    lines += [
        line("optimizer", _optimizer(facts)),
        line("clipping", describe_clipping(facts)),
        line("batch", _batch(facts)),
        line("steps", _steps(facts)),
        line("precision", _precision(facts)),
    ]
    return "\n".join(lines)


def describe_devices(facts: Mapping[str, Any]) -> str:
    """The processes and the first one's device."""
    if facts["processes"] == 1:
        return f"{facts['device']}, one process"
    return f"{facts['processes']} processes ({facts['distributed']}), the first on {facts['device']}"


def describe_groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """The table of parameter groups and frozen parts."""
    rows = [["part", "parameters", "dtype", "learning rate", "weight decay"]]
    for group in groups:
        frozen = group.get("frozen", False)
        rows.append(
            [
                group["part"],
                f"{group['parameters']:,}",
                ", ".join("4 bit" if dtype == "uint8" else dtype for dtype in group["dtypes"]),
                "frozen" if frozen else f"{group['learning_rate']:g}",
                "" if frozen else f"{group['weight_decay']:g}",
            ]
        )
    return text_table(rows)


def describe_norm(norm: Mapping[str, Any]) -> str:
    """The norm after the projector: type, gain, gradient compensation."""
    if norm["type"] is None:
        return "none: a stock projector"
    if norm["type"] == "none":
        return "none (a control of type none)"
    if norm["type"] == "scale":
        return f"a fixed factor of {norm['scale']:.4g}"
    compensation = f"on (floor {norm['floor']:g})" if norm["gwc"] else "off"
    return f"{norm['type'].replace('_', ' ')}, mean |g| {norm['gain']:.4g}, GWC {compensation}"


def _lora(lora: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, lora["ranks"]))
    return f"rank {ranks} on {counted(lora['layers'], 'layer')}: {', '.join(lora['names'])}"


def _optimizer(facts: Mapping[str, Any]) -> str:
    optimizer, schedule = facts["optimizer"], facts["schedule"]
    words = [optimizer["name"]]
    if "betas" in optimizer:
        words.append(f"betas {' and '.join(f'{beta:g}' for beta in optimizer['betas'])}")
    if "eps" in optimizer:
        words.append(f"eps {optimizer['eps']:g}")
    return f"{', '.join(words)}; {schedule['name']} schedule, warm-up {counted(schedule['warm_up'], 'step')}"


def describe_clipping(facts: Mapping[str, Any]) -> str:
    """What clips the gradients, and what that means for GWC."""
    kind, limit = facts["clipping"]["kind"], facts["clipping"].get("limit", 0)
    text = {"off": "off", "global": f"all gradients together to a norm of {limit:g}"}.get(
        kind, f"the gradients of each part to a norm of {limit:g}"
    )
    behind = any(row["part"] in ("projector", "vision") and not row.get("frozen") for row in facts["groups"])
    if not (facts["norm"].get("gwc") and behind and "adam" in facts["optimizer"]["name"].lower()):
        return text
    if kind == "off":
        return f"{text}. {GWC_UNCLIPPED.format(optimizer=facts['optimizer']['name'])}"
    return f"{text}; {GWC_CLIPPED if kind == 'global' else GWC_BY_PART}"


def _batch(facts: Mapping[str, Any]) -> str:
    batch = facts["batch"]
    return (
        f"{counted(batch['total'], 'row')} a step = {batch['per_device']} per device x {facts['processes']} "
        f"process{'es' if facts['processes'] > 1 else ''} x {batch['accumulated']} accumulated"
    )


def _steps(facts: Mapping[str, Any]) -> str:
    steps, batch = facts["schedule"]["steps"], facts["batch"]
    text = counted(steps, "step")
    if batch["rows"]:
        epochs = steps / math.ceil(batch["rows"] / batch["total"])  # the last step of an epoch may have fewer rows
        text += f" = {number(epochs)} epochs of {counted(batch['rows'], 'row')}"
    if facts["resumed_at"]:
        text += f"; resumed after step {facts['resumed_at']:,}"
    return text


def _precision(facts: Mapping[str, Any]) -> str:
    mixed = MIXED.get(facts["mixed_precision"], f"{facts['mixed_precision']} mixed precision")
    tower = ", the frozen vision tower without gradients" if facts["tower_without_grad"] else ""
    return f"{mixed}, activation checkpointing {'on' if facts['checkpointing'] else 'off'}{tower}"


# The first batch


def mark_supervised(tokenizer: Any, ids: Sequence[int], supervised: Sequence[bool], image_token: int) -> str:
    """A row in words: its supervised tokens in [[ ]], a run of image tokens as "<image> x 576"."""
    kinds = ["image" if token == image_token else kept for token, kept in zip(ids, supervised, strict=True)]
    starts = [number for number, kind in enumerate(kinds) if number == 0 or kind != kinds[number - 1]]
    words = []
    for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
        if kinds[start] == "image":
            token = f"{tokenizer.convert_ids_to_tokens(image_token)} x {end - start}"
            words.append(f"{OPENS}{token}{CLOSES}" if supervised[start] else f" {token} ")
        else:
            text = _visible(_decode(tokenizer, ids, start, end))
            words.append(f"{OPENS}{text}{CLOSES}" if kinds[start] else text)
    return "".join(words).replace("  ", " ").strip()


def _decode(tokenizer: Any, ids: Sequence[int], start: int, end: int) -> str:
    """The text of ids[start:end] as it follows the token before it: alone, some tokenizers drop its first space."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = tokenizer.decode(ids[max(start - 1, 0) : start], **options)
    text = tokenizer.decode(ids[max(start - 1, 0) : end], **options)
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(ids[start:end], **options)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def describe_batch(batch: Mapping[str, Any]) -> str:
    """The first row, and what is supervised in the first batch."""
    text = batch["text"]
    if len(text) > ROW_LENGTH:
        half = ROW_LENGTH // 2
        text = f"{text[:half]} ... {text[-half:]}"
    rows = len(batch["supervised"])
    supervised = _range(batch["supervised"])
    return "\n".join(
        [
            line("first row", text, cut_words=True),
            line(
                "labels",
                f"{supervised} supervised of {_range(batch['tokens'])} tokens a row, {sum(batch['image_labels'])} "
                f"image tokens in labels, in the first {counted(rows, 'row')}; supervised are those in "
                f"{OPENS} {CLOSES}",
            ),
        ]
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def describe_checkpoint(checkpoint: Mapping[str, Any] | None) -> str:
    """How the first checkpoint was read back."""
    if checkpoint is None:
        return line("saved", "no checkpoint before the first step, so none was reloaded")
    return line("saved", f"{checkpoint['folder']}; {checkpoint['how']}")


# After two steps


def describe_estimate(result: Mapping[str, Any]) -> str:
    """Time, memory and disk of the run, from its first steps."""
    return "\n".join(
        [line("time", _time(result)), line("memory", describe_memory(result["memory"])), describe_disk(result["disk"])]
    )


def _time(result: Mapping[str, Any]) -> str:
    told = [
        f"step {count}: {number(step['seconds'])} s, {step['tokens']:,} tokens"
        for count, step in enumerate(result["timed"], result["resumed_at"] + 1)
    ]
    estimate = result["estimate"]
    basis = f" at {number(estimate['seconds_per_step'])} s a step" + (
        ", the first left out as warm-up" if estimate["first_left_out"] else ""
    )
    return f"{'; '.join(told)}. {counted(estimate['steps'], 'step')} in about {duration(estimate['hours'])}{basis}"


def duration(hours: float) -> str:
    """Such as "12 s", "25 minutes" and "31.5 hours"."""
    if hours < 2 / 60:
        return f"{number(3600 * hours)} s"
    return f"{60 * hours:.0f} minutes" if hours < 2 else f"{hours:.1f} hours"


def describe_memory(peaks: Sequence[Mapping[str, Any]]) -> str:
    """The most memory that the devices, or processes on CPUs, had in use."""
    used = [size(peak["peak"]) for peak in sorted(peaks, key=lambda peak: peak["peak"])]
    total = size(min((peak["total"] for peak in peaks), default=0))
    text = (
        f"at most {used[0] if len(set(used)) == 1 else f'{used[0]} to {used[-1]}'} of {total}" if used else "unknown"
    )
    if len(peaks) > 1:
        return f"{text} on each of {len(peaks)} {'GPUs' if peaks[0]['device'] == 'cuda' else 'processes'}"
    return text


def size(count: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{1024 * count / GIB:.1f} MiB"


def describe_disk(disk: Mapping[str, Any]) -> str:
    """What the checkpoints of the run need on disk, and a warning if there is less."""
    parts = [f"the finished model ({size(disk['finished'])})"]
    if disk["checkpoints"]:
        state = "with" if disk["with_optimizer"] else "without"
        parts.append(
            f"{counted(disk['checkpoints'], 'checkpoint')} of {size(disk['checkpoint'])} {state} the optimizer"
        )
    text = f"{size(disk['needed'])} for {' and '.join(parts)}; {size(disk['available'])} can be used"
    if disk["needed"] > disk["available"]:
        return line("disk", f"NOT ENOUGH: {text}. Set save_total_limit, or name an output_dir with more room.")
    return line("disk", text)
