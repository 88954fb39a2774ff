"""The report of check-data as a dict, and in words."""

from collections import Counter
from typing import Any

from llava_norm_align.common.results import provenance
from llava_norm_align.data.llava_json import Fault

KINDS = (
    "wrong_type", "role_order", "image_count", "empty_answer", "duplicate_id", "outside_folder", "missing_image",
    "broken_image", "tiny_image", "too_long", "stage_1",
)  # fmt: skip


def build_report(faults: list[Fault], totals: dict[str, int], lengths: list[int] | None, **where: Any) -> dict:
    """The report, ready for JSON; `lengths`: tokens of the rows that were counted."""
    bad = len({fault.index for fault in faults})
    found = Counter(fault.kind for fault in faults)
    return {
        **provenance(),
        **where,
        "totals": {**totals, "good": totals["rows"] - bad, "bad": bad},
        "counts": {kind: found[kind] for kind in KINDS},
        "lengths": length_summary(lengths) if lengths else None,
        "rows": [
            {"index": fault.index, "id": fault.id, "kind": fault.kind, "sentence": fault.sentence} for fault in faults
        ],
        "clean": None,
    }


def length_summary(lengths: list[int]) -> dict[str, Any]:
    """p50, p99 (nearest rank) and max of the lengths, and how many rows have at most 1, 2, 4, 8, ... tokens."""
    ordered = sorted(lengths)
    bins = Counter(1 << (length - 1).bit_length() for length in ordered)
    return {
        "rows": len(ordered),
        **{f"p{share}": ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 99)},
        "max": ordered[-1],
        "histogram": [{"over": bound // 2, "up_to": bound, "rows": bins[bound]} for bound in sorted(bins)],
    }


def describe(report: dict[str, Any]) -> str:
    """The report in a few lines: totals, lengths, and each kind of fault with its first row."""
    totals, images, lengths = report["totals"], report["images"], report["lengths"]
    lines = [
        f"{report['data']['path']}: {totals['rows']:,} rows, {totals['with_image']:,} with an image, "
        f"{totals['text_only']:,} of text alone; {images['files']:,} images in {images['path']}"
    ]
    if lengths:
        each = report["options"]["image_tokens"]
        lines.append(
            f"Tokens in a row: median {lengths['p50']:,}, 99th percentile {lengths['p99']:,}, "
            f"most {lengths['max']:,}; an image is {f'{each:,}' if each else 'as many as its size gives'}"
        )
    lines.append(f"Bad rows: {totals['bad']:,}" if totals["bad"] else "No row has a fault")
    for kind, count in report["counts"].items():
        if count:
            first = next(row for row in report["rows"] if row["kind"] == kind)
            lines.append(f"  {kind:<15}{count:>9,}   row {first['index']} (id {first['id']}): {first['sentence']}")
    if report["clean"]:
        lines.append(f"Written: {report['clean']} ({totals['good']:,} rows)")
    return "\n".join(lines)


def one_sentence(report: dict[str, Any]) -> str:
    """What to say of a file without a good row."""
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report["counts"].items() if count)
    first = report["rows"][0]
    return (
        f"Every row of {report['data']['path']} is bad ({counts}), such as row {first['index']} (id {first['id']}): "
        f"{first['sentence']} Check that {report['images']['path']} is the folder that its image paths start from."
    )
