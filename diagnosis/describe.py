"""The tables of a diagnosis for the terminal, at most 100 columns wide.

The numbers are measurements on some images and one prompt. What they mean for a model's quality is contested, and the
words here must not say more than was measured.
"""

import textwrap
from collections.abc import Collection
from typing import Any

from llava_norm_align.diagnosis import formats
from llava_norm_align.diagnosis.formats import find, find_interval, find_list, find_number, number

NORMS = {  # key in "norms": what it is called
    "encoder_features": "encoder features",
    "projector_output": "projector output",
    "visual": "visual, layer 0",
    "text_table": "text table, all rows",
    "text_embedding_output": "text embedding output",
    "text": "text, layer 0",
    "template": "template, layer 0",
    "system": "system, layer 0",
    "bos": "bos, layer 0",
    "newline": "newline, layer 0",
    "padding": "padding, layer 0",
}
STATISTICS = ("mean", "std", "median", "p1", "p99", "max")
IN_THE_PAPER = {"encoder_features": "before_projector", "projector_output": "after_projector", "text": "text"}
ASSUMPTIONS = {"a1": "A1 (equal mean update norms)", "a2": "A2 (equal mean update angles)"}
SIGNS = {"holds": "yes", "fails": "no", "undecided": "?"}
CONTESTED = (
    "The gap is a measurement. That it costs image information is what the paper (arXiv 2512.08374) argues; "
    "the claim is contested, and nothing here measures the quality of answers."
)


def describe(result: dict[str, Any]) -> str:
    """All tables of a result, the content of diagnosis.json."""
    return f"{first_table(result)}\n\n{later_tables(result, told=find_list(result, 'missing'))}"


def first_table(result: dict[str, Any]) -> str:
    """The norms, of a result that may lack all but its keys model, norms, ratio, published and missing."""
    rows = [["L2 norms", "n", *STATISTICS, "of fp16", "paper"]]
    for key, name in NORMS.items():
        statistics = find(result, "norms", key)
        if statistics is None:
            continue
        rows.append(
            [
                name,
                formats.count(find_number(statistics, "n")),
                *(number(find_number(statistics, statistic)) for statistic in STATISTICS),
                formats.percent(find_number(statistics, "fp16_share")),
                published_norm(result, key),
            ]
        )
    lines = [model_line(result), ""]
    lines += [formats.text_table(rows) if len(rows) > 1 else "No norms could be measured."]
    lines += ["p1, p99: percentiles. of fp16: the largest element of any token by fp16's limit, 65504."]
    lines += [ratio_line(result), *paper_lines(result), *notes_on_norms(result)]
    lines += [f"Missing: {formats.printable(sentence)}" for sentence in find_list(result, "missing")]
    return wrap(lines)


def later_tables(result: dict[str, Any], told: Collection[str] = ()) -> str:
    """What is measured after the first table; `told` are the sentences of `missing` that were printed with it."""
    blocks = [
        layer_lines(result),
        verdict_lines(result),
        control_lines(result),
        attention_lines(result),
        probe_lines(result),
        [
            f"Missing: {formats.printable(sentence)}"
            for sentence in find_list(result, "missing")
            if sentence not in told
        ],
        [CONTESTED],
    ]
    return "\n\n".join(wrap(lines) for lines in blocks if lines)


def wrap(lines: list[str]) -> str:
    """Sentences wrapped to the width; tables, which have several lines, as they are."""
    return "\n".join(
        line if "\n" in line else textwrap.fill(line, formats.WIDTH, subsequent_indent="  ") for line in lines
    )


def model_line(result: dict[str, Any]) -> str:
    """The model in a line: name, class, size, dtype."""
    model = find(result, "model") or {}
    layers, width = (find_number(model, key) for key in ("decoder_layers", "hidden_size"))
    facts = [
        formats.shorten(find(model, "class") or "", 60),
        f"{layers} decoder layers" if layers else "",
        f"D = {width}" if width else "",
        *(formats.printable(find(model, key) or "") for key in ("dtype", "quantization", "device")),
    ]
    return f"{formats.model_name(result)}: {', '.join(fact for fact in facts if fact)}"


def published_norm(result: dict[str, Any], key: str) -> str:
    """The paper's number beside a row of norms, as "mean +- standard deviation"; "" if there is none."""
    published = find(result, "published", IN_THE_PAPER.get(key, ""))
    if isinstance(published, list):
        return " +- ".join(number(value) for value in published)
    return "" if published is None else number(published)


def ratio_line(result: dict[str, Any]) -> str:
    """The gap in a sentence."""
    mean, interval = find_number(result, "ratio", "mean"), find_interval(result, "ratio", "interval")
    if mean is None:
        return "Ratio of mean norms at layer 0, visual / text: could not be measured"
    ends = (
        f" (95 % interval over images, for this prompt, {number(interval[0])} to {number(interval[1])})"
        if interval
        else ""
    )
    median = find_number(result, "ratio", "median")
    medians = "" if median is None else f"; of the medians {number(median)}"
    return f"Ratio of mean norms at layer 0, visual / text: {number(mean)}{ends}{medians}"


def paper_lines(result: dict[str, Any]) -> list[str]:
    """What the paper's column is, and its ratio."""
    published = find(result, "published")
    if not published:
        return []
    ratio = find_number(published, "ratio")
    said = "" if ratio is None else f"; projector output / text there {ratio:g}"
    words = (find(published, key) for key in ("source", "model", "note"))
    source, model, note = (formats.printable(word or "") for word in words)
    return [f"Paper: {source}, {model}{said}{f' ({note})' if note else ''}."]


def notes_on_norms(result: dict[str, Any]) -> list[str]:
    """The paper's T, and what stands out: NaN, near-constant tokens, elements near fp16's limit."""
    lines = []
    target = find_number(result, "norms", "text_table", "mean_of_used_rows")
    if target is not None:
        lines.append(f"Text table without its rows of zeros: mean norm {target:.4f} (the paper's T)")
    for key, name in NORMS.items():
        broken, constant, share = (
            find_number(result, "norms", key, what) or 0 for what in ("non_finite", "near_constant", "fp16_share")
        )
        if broken:
            lines.append(f"Note: {name}: {formats.counted(broken, 'token')} with NaN or inf, left out of the numbers")
        if constant and key == "visual":
            lines.append(
                f"Note: {name}: {formats.counted(constant, 'near-constant token')} (standard deviation over channels "
                "< 3e-3): a LayerNorm's eps matters there"
            )
        if share >= 0.5:
            lines.append(f"Note: {name}: the largest element is {100 * share:.0f} % of fp16's limit, 65504")
    return lines


def layer_lines(result: dict[str, Any]) -> list[str]:
    """One row per decoder layer, and what the columns mean."""
    layers = find_list(result, "layers")
    if not layers:
        return []
    head = "layer,norm v,norm t,C v,C t,cos v,cos t,rot v,rot t,pred v,pred t,C v/t,A1,phi v-t,A2"
    rows = [head.split(",")]
    for layer in layers:
        both = [find(layer, kind) for kind in ("visual", "text")]
        added = find(layer, "adds_visual_features")
        rows.append(
            [
                f"{formats.count(find_number(layer, 'layer'))}{'*' if added else ''}",
                *(number(find_number(one, key)) for key in ("hidden_norm", "update_norm") for one in both),
                *(formats.decimals(find_number(one, "cosine_adjacent"), 3) for one in both),
                *(
                    formats.decimals(find_number(one, key), 1)
                    for key in ("rotation_degrees", "rotation_predicted_degrees")
                    for one in both
                ),
                number(find_number(layer, "a1", "ratio")),
                SIGNS.get(find(layer, "a1", "verdict"), "-"),
                formats.decimals(find_number(layer, "a2", "difference_degrees"), 1, sign=True),
                SIGNS.get(find(layer, "a2", "verdict"), "-"),
            ]
        )
    lines = ["Decoder layers: v visual tokens, t the question's text tokens", formats.text_table(rows)]
    if any(find(layer, "adds_visual_features") for layer in layers):
        lines.append("*: after this layer the model adds visual features outside the block (DeepStack)")
    lines += [
        "norm: L2 norm of the layer's input. C: norm of its update. phi: angle between input and update, degrees.",
        "cos: cosine of input and output; near 1 the layer hardly changes a token's direction.",
        "rot: rotation, the angle between input and output, degrees; pred: what the paper's theory predicts of it "
        "from norm, C and phi.",
    ]
    return lines


def verdict_lines(result: dict[str, Any]) -> list[str]:
    """How the paper's assumptions fare, and at how many layers visual tokens turn less."""
    lines = [sentence for assumption in ASSUMPTIONS if (sentence := verdict_sentence(result, assumption))]
    if lines:
        lines.append(
            "holds: the 95 % interval over images lies within C v/t 0.8 to 1.25 (A1), phi v-t -5 to 5 degrees (A2); "
            "fails: it lies wholly outside. In the table: yes, no, ? for undecided, - for no verdict."
        )
    return [*lines, *rotation_lines(result)]


def verdict_sentence(result: dict[str, Any], assumption: str) -> str:
    """Such as "A1 (equal mean update norms): holds at 3, fails at 25, undecided at 2 of 30 layers"."""
    counts = find(result, "verdicts", assumption)
    if not isinstance(counts, dict):
        return ""
    images, least = (find_number(result, "verdicts", key) for key in ("images", "least_images"))
    name = ASSUMPTIONS[assumption]
    if images is not None and least is not None and images < least:
        return f"{name}: no verdict under {least} images ({images} measured)"
    counts = {verdict: find_number(counts, verdict) or 0 for verdict in ("holds", "fails", "undecided", "none")}
    words = [f"{verdict} at {counts[verdict]}" for verdict in ("holds", "fails", "undecided")]
    if counts["none"]:
        words.append(f"no verdict at {counts['none']}")
    return f"{name}: {', '.join(words)} of {sum(counts.values())} layers"


def first_rotations(layers: list[dict[str, Any]], key: str = "rotation_degrees") -> list[float | None]:
    """The mean of an angle over the first quarter of the layers: [visual, text], degrees."""
    first = formats.first_layers(layers)
    return [formats.mean_of([find_number(layer, kind, key) for layer in first]) for kind in ("visual", "text")]


def layers_named(layers: list[dict[str, Any]]) -> str:
    """The first quarter of the layers in words."""
    last = len(formats.first_layers(layers)) - 1
    return f"layers 0 to {last}" if last > 0 else "layer 0"


def rotation_lines(result: dict[str, Any]) -> list[str]:
    """At how many layers visual tokens turn less than text tokens, where the theory expects it and elsewhere."""
    measured, expected = [], []
    for layer in find_list(result, "layers"):
        for found, key in ((measured, "rotation_degrees"), (expected, "rotation_predicted_degrees")):
            visual, text = (find_number(layer, kind, key) for kind in ("visual", "text"))
            found.append(None if visual is None or text is None else visual < text)
    both = [(less, theory) for less, theory in zip(measured, expected, strict=True) if None not in (less, theory)]
    if not both:
        return []
    less, theory = (sum(column) for column in zip(*both, strict=True))
    agreed = sum(one and other for one, other in both)
    return [
        f"Visual tokens turn less than text tokens at {less} of {len(both)} layers; the paper's theory predicts it "
        f"from the norms at {theory}, of which it is measured at {agreed}"
    ]


def control_lines(result: dict[str, Any]) -> list[str]:
    """Photos, a blank image and text alone, side by side."""
    rows = control_rows(result)
    if len(rows) < 3:
        return []
    return [
        "Controls",
        formats.text_table(rows),
        control_note(result),
    ]


def control_note(result: dict[str, Any]) -> str:
    """What the numbers of control_rows are."""
    where = layers_named(find_list(result, "layers"))
    return (
        f"norm: mean at layer 0; rotation: mean in {where}, degrees. What stays with a blank image is not due to what "
        "a picture shows."
    )


def control_rows(result: dict[str, Any]) -> list[list[str]]:
    """A head, the images of this run, and each control that was measured."""
    rows = [["", "norm visual", "norm text", "rotation visual", "rotation text"]]
    parts = [(formats.counted(find_number(result, "images", "count"), "image"), result)]
    blank, text_only = (find(result, "controls", key) for key in ("blank_image", "text_only"))
    if blank:
        parts.append((f"blank image ({formats.counted(find_number(blank, 'images'), 'run')})", blank))
    if text_only:
        parts.append((f"text only ({formats.counted(find_number(text_only, 'prompts'), 'prompt')})", text_only))
    for name, part in parts:
        rows.append(
            [
                name,
                *(number(find_number(part, "norms", kind, "mean")) for kind in ("visual", "text")),
                *(formats.decimals(angle, 1) for angle in first_rotations(find_list(part, "layers"))),
            ]
        )
    return rows


def attention_lines(result: dict[str, Any]) -> list[str]:
    """How much of the last prompt token's attention goes to the image."""
    shares = find_list(result, "attention", "image_share")
    mean = formats.mean_of(shares)
    if mean is None:
        return []
    every = find_number(result, "attention", "image_tokens_share")
    tokens = "" if every is None else f"; visual tokens are {formats.percent(every)} of all tokens"
    images = formats.counted(find_number(result, "attention", "images"), "image")
    origin = formats.printable(find(result, "attention", "from") or "last prompt token")
    percents = [formats.decimals(None if formats.finite(share) is None else 100 * share, 1) for share in shares]
    return [
        f"Attention of the {origin} to the image: {formats.percent(mean)}, "
        f"mean over heads, layers and {images}{tokens}",
        f"by layer, %: {' '.join(percents)}",
        "Attention shows where a layer looks, not what it takes from there.",
    ]


def probe_rows(result: dict[str, Any]) -> list[list[str]]:
    """A head and a row per factor; "=" marks the factor at which visual and text tokens have the same norm."""
    matching = find_number(result, "probe", "matching_factor")
    rows = [["factor", "visual norm", "KL (nats)", "95 % interval", "same first token"]]
    for row in find_list(result, "probe", "factors"):
        factor, ends = find_number(row, "factor"), find_interval(row, "interval")
        rows.append(
            [
                number(factor) + (" =" if factor is not None and factor == matching else ""),
                number(find_number(row, "visual_norm")),
                number(find_number(row, "kl_nats")),
                f"{number(ends[0])} to {number(ends[1])}" if ends else "",
                formats.percent(find_number(row, "top1_agreement")),
            ]
        )
    return rows


def probe_lines(result: dict[str, Any]) -> list[str]:
    """How far the next token moves when visual tokens are rescaled and nothing is trained."""
    rows = probe_rows(result)
    if len(rows) == 1:
        return []
    images = formats.counted(find_number(result, "probe", "images"), "image")
    return [
        f"Probe: visual tokens at layer 0 times a factor, nothing trained; next token against factor 1, {images}",
        formats.text_table(rows),
        "=: mean text norm by mean visual norm, over all images. The larger the KL there, the further an untrained "
        "model with such a norm is from this one; it does not say which answer is better.",
    ]
