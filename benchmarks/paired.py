"""Ratios of two timings taken in turn, A B A B ..., with an interval: a figure is met, not met, or not resolved."""

import json
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def compare(first: Callable[[], Any], second: Callable[[], Any], pairs: int) -> list[dict[str, float]]:
    """`pairs` rows of seconds of both actions, after one call of each that is not counted."""
    first(), second()
    return [{"first": seconds(first), "second": seconds(second)} for _ in range(pairs)]


def summarise(name: str, rows: list[dict[str, float]], at_most: float, **details: Any) -> dict[str, Any]:
    """Median of first / second with a 95 % bootstrap interval over pairs; printed, and written with the raw rows."""
    ratios = [row["first"] / row["second"] for row in rows]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    low, high = medians[249], medians[9749]
    verdict = "met" if high <= at_most else "not met" if low > at_most else "not resolved"
    result = {
        "name": name,
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "at_most": at_most,
        "verdict": verdict,
        **details,
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": {"processor": platform.machine(), "cores": torch.get_num_threads(), "system": platform.system()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
    }
    print(f"{name}: {result['ratio']:.4f} ({low:.4f} to {high:.4f}), at most {at_most}: {verdict}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result
