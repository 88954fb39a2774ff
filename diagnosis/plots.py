"""The pictures of a diagnosis: PNGs that are readable at 480 pixels, and without colour vision.

Colours, sizes and the background are set here, so a user's matplotlibrc changes little, and nothing of pyplot or
rcParams is touched.
"""

import io
import math
from pathlib import Path
from typing import Any

from PIL import Image

from llava_norm_align.common.errors import missing_extra
from llava_norm_align.common.results import write_bytes
from llava_norm_align.diagnosis import formats
from llava_norm_align.diagnosis.formats import find, find_list, find_number, number

# The blue and vermilion of Okabe and Ito's palette, and a marker each.
KINDS = {"visual": ("#0072B2", "o"), "text": ("#D55E00", "s")}
INK, GREY = "#222222", "#777777"
LABEL, SMALL = 12, 10.5  # points; at 480 pixels an em is 13 and 12 pixels
WIDTH, DPI = 6.0, 160  # inches and dots an inch: 960 pixels
MAX_BYTES = 100_000
Results = list[dict[str, Any]]  # one, or two to compare


def write_plots(
    result: dict[str, Any], folder: Path, image: Image.Image | None = None, other: dict[str, Any] | None = None
) -> list[Path]:
    """Write what can be drawn of a result into `folder`; the paths. An older plot that cannot be drawn now is removed.

    layer0_norms.png, norms_by_layer.png, cosine_by_layer.png, attention_map.png. `image`: the picture of which
    `attention.map` is; `other`: a second result, dashed. InputError without matplotlib. Each is written beside its
    target, then renamed. What is null is not drawn.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "plots", "A plot") from None
    results = [result] if other is None else [result, other]
    figures = {
        "layer0_norms.png": draw_histograms(results),
        "norms_by_layer.png": draw_layers(results, "hidden_norm", "mean L2 norm of input", log=True),
        "cosine_by_layer.png": draw_layers(results, "cosine_adjacent", "cosine of input and output"),
        "attention_map.png": draw_attention(results, image),
    }
    for name, figure in figures.items():
        if figure is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_png(figure, folder / name)
    return [folder / name for name, figure in figures.items() if figure is not None]


def write_png(figure: Any, path: Path) -> None:
    """Draw `figure` and write it with as many colours as fit into 100 kB."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    for colours in (256, 128, 64, 32, 16):
        file = io.BytesIO()
        drawn.quantize(colours).save(file, "PNG", optimize=True)
        if file.tell() < MAX_BYTES:
            break
    write_bytes(path, file.getvalue())


def new_figure(height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    return figure


def style(axes: Any, xlabel: str = "", ylabel: str = "") -> None:
    axes.set_facecolor("white")
    axes.set_xlabel(xlabel, fontsize=LABEL, color=INK)
    axes.set_ylabel(ylabel, fontsize=LABEL, color=INK)
    axes.tick_params(which="both", labelsize=SMALL, colors=INK)
    axes.spines[:].set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Plain numbers on a log axis: 1, 2, 5 where it is short, powers of ten where it is long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,), numticks=20 if decades < 8 else 8))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(8, integer=True, min_n_ticks=1)


def draw_line(axes: Any, values: list[float], kind: str, index: int, name: str) -> None:
    """One value a layer; the second result is dashed, with hollow markers."""
    colour, marker = KINDS[kind]
    axes.plot(
        values,
        linestyle="--" if index else "-",
        color=colour,
        marker=marker,
        markersize=4.5 if len(values) <= 40 else 2.5,
        markerfacecolor="white" if index else colour,
        linewidth=1.8,
        label=name,
    )


def add_legend(figure: Any, axes: Any) -> None:
    """Above the axes, so that it never covers a line; names are not read as formulas."""
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=2 if len(labels) > 3 else len(labels),
        fontsize=SMALL,
        labelcolor=INK,
        frameon=False,
        columnspacing=1.2,
        handlelength=1.8,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def label(results: Results, index: int, kind: str) -> str:
    """A legend's entry, with the model's name where there are two; what the font may not have becomes "?"."""
    if len(results) == 1:
        return kind
    name = formats.model_name(results[index], 24)
    return f"{kind}, {name.encode('latin-1', 'replace').decode('latin-1')}"


def column(result: dict[str, Any], kind: str, key: str, log: bool) -> list[float]:
    """A number of every layer, NaN where there is none or a log axis has no place for it."""
    values = [find_number(layer, kind, key) for layer in find_list(result, "layers")]
    return [math.nan if value is None or (log and value <= 0) else value for value in values]


def draw_layers(results: Results, key: str, ylabel: str, log: bool = False) -> Any:
    """A line per modality and result over the decoder layers; None if there are no numbers."""
    lines = [(index, kind, column(result, kind, key, log)) for index, result in enumerate(results) for kind in KINDS]
    lines = [line for line in lines if not all(map(math.isnan, line[2]))]
    if not lines:
        return None
    figure = new_figure(3.9)
    axes = figure.add_subplot()
    style(axes, "decoder layer", ylabel)
    for index, kind, values in lines:
        draw_line(axes, values, kind, index, label(results, index, kind))
    layers = find_list(results[0], "layers")
    added = [index for index, layer in enumerate(layers) if find(layer, "adds_visual_features")]
    for index in added:
        # the features are added to the layer's output, which is the next layer's input
        axes.axvline(
            index + 0.5,
            color=GREY,
            linestyle=":",
            linewidth=1.4,
            label="visual features added here" if index == added[0] else None,
        )
    axes.xaxis.set_major_locator(whole_numbers())
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    if log:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, *axes.get_ylim())
    add_legend(figure, axes)
    return figure


def histogram(result: dict[str, Any], kind: str) -> tuple[list[float], list[float]] | None:
    """Shares of tokens in percent and the bins' edges, or None if there are none."""
    edges, counts = (find_list(result, "histograms", kind, key) for key in ("edges", "counts"))
    numbers = [formats.finite(value) for value in (*edges, *counts)]
    if len(edges) != len(counts) + 1 or None in numbers or min(edges) <= 0 or sum(counts) <= 0:
        return None
    return [100 * count / sum(counts) for count in counts], edges


def draw_histograms(results: Results) -> Any:
    """The distribution of the norms at layer 0; None if there are none."""
    found = [
        (index, kind, drawn)
        for index, result in enumerate(results)
        for kind in KINDS
        if (drawn := histogram(result, kind))
    ]
    if not found:
        return None
    figure = new_figure(3.9)
    axes = figure.add_subplot()
    style(axes, "L2 norm at the input of layer 0", "share of tokens per bin (%)")
    for index, kind, (shares, edges) in found:
        colour = KINDS[kind][0]
        mean = find_number(results[index], "norms", kind, "mean")
        name = label(results, index, kind)
        text = name if mean is None or len(results) > 1 else f"{name}: mean {number(mean)}"
        if index:
            axes.stairs(shares, edges, color=colour, linestyle="--", linewidth=1.8, label=text)
        else:
            axes.stairs(shares, edges, fill=True, facecolor=f"{colour}66", edgecolor=colour, linewidth=1.4, label=text)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    log_ticks(axes.xaxis, *axes.get_xlim())
    add_legend(figure, axes)
    return figure


def attention_map(result: dict[str, Any]) -> list[list[float]] | None:
    """The map in percent of the attention, rows of equal length; None if there is none."""
    rows = find_list(result, "attention", "map", "values")
    if not rows or not all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows):
        return None
    return [percents(row) for row in rows]


def percents(values: list[Any]) -> list[float]:
    """Shares in percent, NaN for null."""
    return [math.nan if formats.finite(value) is None else 100 * value for value in values]


def draw_attention(results: Results, image: Image.Image | None) -> Any:
    """The map, beside its picture if there is one, over the share per layer; None if there is neither."""
    values = attention_map(results[0])
    shares = [percents(find_list(result, "attention", "image_share")) for result in results]
    if all(map(math.isnan, shares[0])):
        shares = []
    if not values and not shares:
        return None
    figure = new_figure(6.4 if values and shares else 3.9)
    parts = figure.add_gridspec(2, 1, height_ratios=(1.25, 1)) if values and shares else figure.add_gridspec(1, 1)
    if values:
        draw_map(figure, parts[0].subgridspec(1, 1 if image is None else 2), values, image)
    if shares:
        even = find_number(results[0], "attention", "image_tokens_share")
        draw_shares(figure.add_subplot(parts[-1]), results, shares, even)
    return figure


def draw_shares(axes: Any, results: Results, shares: list[list[float]], even: float | None) -> None:
    """A line of percents per result over the decoder layers, and where it would be if all tokens got the same."""
    style(axes, "decoder layer", "attention to image (%)")
    for index, line in enumerate(shares):
        draw_line(axes, line, "visual", index, label(results, index, "last prompt token"))
    if even is not None:
        axes.axhline(100 * even, color=GREY, linestyle=":", linewidth=1.4, label="if all tokens got the same")
    axes.set_ylim(0, 100)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    for text in axes.legend(fontsize=SMALL, labelcolor=INK, frameon=False).get_texts():
        text.set_parse_math(False)


def draw_map(figure: Any, grid: Any, values: list[list[float]], image: Image.Image | None) -> None:
    if image is not None:
        picture = image.convert("RGB")
        picture.thumbnail((480, 480))
        axes = figure.add_subplot(grid[0])
        style(axes)
        axes.imshow(picture)
        axes.set_axis_off()
    axes = figure.add_subplot(grid[-1])
    style(axes, "patch column", "patch row")
    sides = len(values), len(values[0])
    drawn = axes.imshow(values, cmap="viridis", vmin=0, aspect="auto" if max(sides) > 8 * min(sides) else "equal")
    axes.xaxis.set_major_locator(whole_numbers())
    axes.yaxis.set_major_locator(whole_numbers())
    bar = figure.colorbar(drawn, ax=axes, fraction=0.06, pad=0.03)
    bar.ax.tick_params(labelsize=SMALL, colors=INK)
    bar.set_label("attention (%)", fontsize=LABEL, color=INK)
