"""diagnosis.md: a diagnosis as Markdown for a model card, with headings from the second level down and no HTML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_norm_align.diagnosis import formats
from llava_norm_align.diagnosis.describe import (
    ASSUMPTIONS,
    CONTESTED,
    NORMS,
    STATISTICS,
    attention_lines,
    control_note,
    control_rows,
    notes_on_norms,
    paper_lines,
    probe_rows,
    published_norm,
    ratio_line,
    rotation_lines,
    verdict_sentence,
)
from llava_norm_align.diagnosis.formats import decimals, escape, find, find_list, find_number, markdown_table, number

PICTURES = {  # the files that plots.write_plots may write: what they show
    "layer0_norms.png": "Histogram of the L2 norms of visual and text tokens at the input of layer 0",
    "norms_by_layer.png": "Mean L2 norm of the hidden states of visual and text tokens by decoder layer",
    "cosine_by_layer.png": "Cosine of each decoder layer's input and output, for visual and text tokens",
    "attention_map.png": "Attention of the last prompt token to the image, by layer and over the picture",
}
SHOWN_NAMES = 8


def markdown(
    result: dict[str, Any],
    pictures: Sequence[Path | str] = tuple(PICTURES),
    other: dict[str, Any] | None = None,
) -> str:
    """The whole file. `pictures` are the plots that lie beside it (what write_plots returned); others get no link.
    `other`: a second result, which the plots show dashed.
    """
    names = {Path(picture).name for picture in pictures}
    sections = [
        heading(result),
        "" if other is None else f"Dashed in the plots: {escape(formats.model_name(other, 80))}.",
        norms_section(result),
        picture("layer0_norms.png", names),
        layers_section(result, names),
        controls_section(result),
        attention_section(result, names),
        probe_section(result),
        missing_section(result),
        how_section(result),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def picture(name: str, names: set[str]) -> str:
    return f"![{PICTURES[name]}]({name})" if name in names else ""


def sentences(lines: Sequence[str]) -> str:
    """Lines of the terminal as a list, escaped, each ending with a full stop."""
    return "\n".join(f"- {escape(line).rstrip('.')}." for line in lines)


def heading(result: dict[str, Any]) -> str:
    return (
        f"## Norm gap of {escape(formats.model_name(result, 80))}\n\n"
        "L2 norms of visual and text tokens where they enter the language model, and what its layers do to them, "
        "after [arXiv 2512.08374](https://arxiv.org/abs/2512.08374) (*The Unseen Bias: How Norm Discrepancy in "
        f"Pre-Norm MLLMs Leads to Visual Information Loss*).\n{CONTESTED.replace(' (arXiv 2512.08374)', '')}"
    )


def norms_section(result: dict[str, Any]) -> str:
    published = bool(find(result, "published"))
    rows = [["L2 norms", "n", *STATISTICS, "largest element / fp16 limit", *(["paper"] if published else [])]]
    for key, name in NORMS.items():
        statistics = find(result, "norms", key)
        if statistics is not None:
            rows.append(
                [
                    name,
                    formats.count(find_number(statistics, "n")),
                    *(number(find_number(statistics, statistic)) for statistic in STATISTICS),
                    formats.percent(find_number(statistics, "fp16_share")),
                    *([published_norm(result, key)] if published else []),
                ]
            )
    table = [markdown_table(rows)] if len(rows) > 1 else []
    words = sentences([ratio_line(result), *paper_lines(result), *notes_on_norms(result)])
    return "\n\n".join(["### Norms", *table, words])


def layers_section(result: dict[str, Any], names: set[str]) -> str:
    layers = find_list(result, "layers")
    if not layers:
        return ""
    verdicts = [sentence for assumption in ASSUMPTIONS if (sentence := verdict_sentence(result, assumption))]
    columns = (
        ("norm", "hidden_norm", number),
        ("C", "update_norm", number),
        ("C / norm", "relative_update", number),
        ("cosine", "cosine_adjacent", lambda value: decimals(value, 3)),
        ("cosine to layer 0", "cosine_layer0", lambda value: decimals(value, 3)),
        ("phi", "update_angle_degrees", lambda value: decimals(value, 1)),
        ("rotation", "rotation_degrees", lambda value: decimals(value, 1)),
        ("predicted", "rotation_predicted_degrees", lambda value: decimals(value, 1)),
    )
    rows = [["layer", *(f"{name}, {kind}" for name, _, _ in columns for kind in ("v", "t")), "A1", "A2"]]
    for layer in layers:
        added = find(layer, "adds_visual_features")
        cells = [write(find_number(layer, kind, key)) for _, key, write in columns for kind in ("visual", "text")]
        a1 = verdict_cell(number(find_number(layer, "a1", "ratio")), find(layer, "a1", "verdict"))
        difference = decimals(find_number(layer, "a2", "difference_degrees"), 1, sign=True)
        a2 = verdict_cell(difference, find(layer, "a2", "verdict"))
        rows.append(
            [
                f"{formats.count(find_number(layer, 'layer'))}{' (adds visual features)' if added else ''}",
                *cells,
                a1,
                a2,
            ]
        )
    legend = (
        "v: visual tokens, t: the question's text tokens. norm: of the layer's input. C: norm of its update. phi: "
        "angle between input and update, degrees. cosine: of input and output. rotation: angle between input and "
        "output, degrees; predicted: what the paper's theory predicts, atan2(C sin phi, norm + C cos phi). A1: C "
        "of visual over C of text tokens. A2: phi of visual less phi of text tokens. Both hold where the 95 % "
        "interval over images lies within 0.8 to 1.25 and -5 to 5 degrees, and fail where it lies wholly outside."
    )
    parts = ["### Layers", sentences([*verdicts, *rotation_lines(result)])]
    parts += [picture(name, names) for name in ("norms_by_layer.png", "cosine_by_layer.png")]
    return "\n\n".join(part for part in [*parts, markdown_table(rows), legend] if part)


def verdict_cell(value: str, verdict: Any) -> str:
    return f"{value} {verdict}" if verdict in ("holds", "fails", "undecided") else value


def controls_section(result: dict[str, Any]) -> str:
    rows = control_rows(result)
    return f"### Controls\n\n{markdown_table(rows)}\n\n{control_note(result)}" if len(rows) > 2 else ""


def attention_section(result: dict[str, Any], names: set[str]) -> str:
    lines = attention_lines(result)
    if not lines:
        return ""
    seen = picture("attention_map.png", names)
    return "\n\n".join(["### Attention", sentences(lines), *([seen] if seen else [])])


def probe_section(result: dict[str, Any]) -> str:
    rows = probe_rows(result)
    if len(rows) == 1:
        return ""
    return (
        "### Probe without training\n\n"
        "The visual tokens at layer 0 times a factor; the next token after the prompt against factor 1.\n\n"
        f"{markdown_table(rows)}\n\n"
        "`=`: mean text norm by mean visual norm, over all images. The larger the KL there, the further an untrained "
        "model with such a norm is from this one; it does not say which answer is better."
    )


def missing_section(result: dict[str, Any]) -> str:
    missing = find_list(result, "missing")
    return "\n".join(["### Not measured\n", *(f"- {escape(sentence)}" for sentence in missing)]) if missing else ""


def how_section(result: dict[str, Any]) -> str:
    """Everything that it takes to measure again."""
    model, images = find(result, "model") or {}, find(result, "images") or {}
    shown = [escape(formats.shorten(name, 60)) for name in find_list(images, "names")]
    more = len(shown) - SHOWN_NAMES
    names = ", ".join(shown[:SHOWN_NAMES]) + (f" and {more} more (all in diagnosis.json)" if more > 0 else "")
    facts = {
        "model class": find(model, "class"),
        "revision": find(model, "revision"),
        "weights, sha256": find(model, "weights_sha256"),
        "parameters": formats.count(find_number(model, "parameters")),
        "dtype": find(model, "dtype"),
        "quantization": find(model, "quantization"),
        "device": find(model, "device"),
        "attention implementation": find(model, "attention_implementation"),
        "projector": find(model, "projector"),
        "prompt": find(result, "prompt"),
        "versions": ", ".join(f"{name} {version}" for name, version in (find(result, "versions") or {}).items()),
    }
    lines = [f"- {name}: {escape(value)}" for name, value in facts.items() if value not in (None, "", "-")]
    number_of = formats.count(find_number(images, "count"))
    lines.append(f"- images: {number_of} from {escape(find(images, 'source') or '-')}{f': {names}' if names else ''}")
    return "\n".join(
        [
            "### How it was measured\n",
            *lines,
            "\nTo repeat it with the versions and images above (all numbers are in diagnosis.json):\n",
            formats.code_block(find(result, "command") or "llava-norm-align diagnose MODEL"),
        ]
    )
