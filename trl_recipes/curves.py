"""The curves of a training as one picture."""

from pathlib import Path
from typing import Any

from llava_norm_align.common.errors import missing_extra
from llava_norm_align.diagnosis.plots import INK, KINDS, SMALL, log_ticks, new_figure, style, whole_numbers, write_png
from llava_norm_align.trl_recipes.groups import PARTS

BLUE, VERMILION, GREEN, PURPLE = KINDS["visual"][0], KINDS["text"][0], "#009E73", "#CC79A7"
# Each panel: its y label, whether its axis is logarithmic, and (key, name, colour, line style) of its lines.
PANELS = (
    ("loss", False, (("loss", "training", INK, "-"), ("eval_loss", "evaluation", GREEN, "--"))),
    ("mean L2 norm", True, (("visual_norm", "visual", BLUE, "-"), ("text_norm", "text", VERMILION, "--"))),
    ("norm layer", True, (("gain", "mean |gain|", INK, "-"), ("bias_norm", "norm of the bias", GREEN, "--"))),
    (
        "gradient norm",
        True,
        tuple(
            (f"gradient_norm_{part}", part, colour, dashes)
            for part, colour, dashes in zip(PARTS, (INK, BLUE, VERMILION, PURPLE), ("-", "--", "-.", ":"), strict=True)
        ),
    ),
)


def write_curves(history: list[dict[str, Any]], path: Path) -> None:
    """Write the picture of the trainer's log `history`, if it has numbers. InputError without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "plots", "The picture of the training") from None
    figure = draw_curves(history)
    if figure is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_png(figure, path)


def draw_curves(history: list[dict[str, Any]]) -> Any:
    """Each of PANELS that has numbers in the trainer's log `history`; None if none has."""
    panels = [(ylabel, log, drawn) for ylabel, log, lines in PANELS if (drawn := _with_numbers(history, lines, log))]
    if not panels:
        return None
    figure = new_figure(2.6 * len(panels))
    for number, (ylabel, log, lines) in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, number)
        style(axes, "step" if number == len(panels) else "", ylabel)
        for name, colour, dashes, steps, values in lines:
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.6, marker=marker, label=name)
        if log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(low / 2, high * 2)  # so that there are ticks
            log_ticks(axes.yaxis, *axes.get_ylim())
        axes.xaxis.set_major_locator(whole_numbers())
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.legend(fontsize=SMALL, labelcolor=INK, frameon=False, ncols=2)
    return figure


def _with_numbers(history: list[dict[str, Any]], lines: Any, log: bool) -> list[tuple[Any, ...]]:
    """The lines that have numbers, with their steps and values; a log axis has no place for 0."""
    found = []
    for key, name, colour, dashes in lines:
        points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
        points = [(step, value) for step, value in points if value > 0 or not log]
        if points:
            found.append((name, colour, dashes, *zip(*points, strict=True)))
    return found
