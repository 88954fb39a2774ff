"""What the tables of a diagnosis share: lookups that bear null, numbers in few characters, escaped names."""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

WIDTH = 100  # columns of a terminal table


def find(content: Any, *keys: str) -> Any:
    """content[key][key]..., or None where something on the way is missing or null."""
    for key in keys:
        if not isinstance(content, dict):
            return None
        content = content.get(key)
    return content


def find_list(content: Any, *keys: str) -> list[Any]:
    """The list under `keys`, or an empty one."""
    found = find(content, *keys)
    return found if isinstance(found, list) else []


def find_number(content: Any, *keys: str) -> float | None:
    """The finite number under `keys`, or None."""
    return finite(find(content, *keys))


def finite(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def find_interval(content: Any, *keys: str) -> tuple[float, float] | None:
    """The two ends under `keys`, or None."""
    ends = [finite(end) for end in find_list(content, *keys)]
    return (ends[0], ends[1]) if len(ends) == 2 and None not in ends else None


def without_nan(content: Any) -> Any:
    """A copy of JSON-like `content` with null for NaN and inf, which JSON does not know."""
    if isinstance(content, dict):
        return {key: without_nan(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [without_nan(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def number(value: float | None) -> str:
    """`value` in at most 8 characters, with two digits or more; "-" if there is none."""
    value = finite(value)
    if value is None or value == 0:
        return "-" if value is None else "0"
    size = abs(value)
    if size >= 99999.5 or size < 5e-4:
        return f"{value:.1e}"
    digits = next(digits for digits, least in enumerate((1000, 100, 1, 0.1, 0)) if size >= least)
    return f"{value:.{digits}f}"


def decimals(value: float | None, digits: int, sign: bool = False) -> str:
    """`value` with fixed decimals, for what has a known range; "-" if there is none."""
    value = finite(value)
    return "-" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def count(value: float | None) -> str:
    """A whole number in at most 9 characters."""
    value = finite(value)
    return "-" if value is None else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.1e}"


def counted(value: float | None, noun: str) -> str:
    """Such as "1 image", "32 images" and "- images"."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def percent(share: float | None) -> str:
    """A share as a percentage, never rounded to zero."""
    share = finite(share)
    if share is None:
        return "-"
    return "< 0.1 %" if 0 < share < 5e-4 else f"{100 * share:.1f} %"


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are finite numbers, or None."""
    kept = [value for value in map(finite, values) if value is not None]
    return sum(kept) / len(kept) if kept else None


def first_layers(layers: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The first quarter of the layers, at least one: where the paper sees visual tokens rotate least."""
    return layers[: max(1, len(layers) // 4)]


def printable(text: Any) -> str:
    """`text` on one line, without control, formatting and other invisible characters."""
    seen = ("" if unicodedata.category(char) in ("Cf", "Cs") else char for char in str(text))
    shown = (" " if unicodedata.category(char)[0] in "CZ" else char for char in "".join(seen))
    return " ".join("".join(shown).split())


def shorten(text: Any, length: int) -> str:
    """`text` on one line of at most `length` characters: its middle gives way, as both ends of a name tell most."""
    text = printable(text)
    if len(text) <= length:
        return text
    tail = (length - 3) * 2 // 3
    return f"{text[: length - 3 - tail]}...{text[-tail:]}"


def model_name(result: dict[str, Any], length: int = 60) -> str:
    """A Hub id, or the last folder of a path, shortened."""
    name = printable(find(result, "model", "name") or "unnamed model").rstrip("/")
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return shorten(name.rpartition("/")[2] or name if is_path or len(name) > length else name, length)


def escape(text: Any) -> str:
    """`text` as plain words in Markdown, in a table too: no markup, link, HTML, mention or formula."""
    return re.sub(r"([\\`*_\[\]<>#|~&$@]|:(?=//)|(?<=www)\.)", r"\\\1", printable(text), flags=re.IGNORECASE)


def code_block(text: Any) -> str:
    """`text` as a fenced block that nothing in it can end."""
    text = printable(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left and the others to the right; those that have only a head are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    lines = []
    for cells in zip(*columns, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(gap.join([cells[0].ljust(widths[0]), *padded[1:]]).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row is the head; the cells are Markdown already."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
