"""Ratios of timings taken in turn, A B C A B C ..., with an interval: a figure is met, not met, or not resolved."""

import json
import os
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

LEAST_ROUNDS = 5
RESULTS = Path(__file__).parent / "results"


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def ratio(rows: list[dict[str, float]], first: str, second: str, at_most: float) -> dict[str, Any]:
    """Median of first / second over the rows, with a 95 % bootstrap interval, against the figure `at_most`."""
    return figure(f"{first} / {second}", [row[first] / row[second] for row in rows], at_most)


def figure(of: str, values: list[float], at_most: float) -> dict[str, Any]:
    """Median of `values` with its interval, against the figure `at_most`; too few values resolve nothing."""
    low, high = interval(values)
    verdict = "met" if high <= at_most else "not met" if low > at_most else "not resolved"
    return {
        "of": of,
        "median": statistics.median(values),
        "interval": [low, high],
        "at_most": at_most,
        "verdict": verdict if len(values) >= LEAST_ROUNDS else "not resolved",
    }


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(10_000))
    return medians[249], medians[9749]


def write_result(name: str, rows: list[dict[str, float]], figures: list[dict[str, Any]], **details: Any) -> None:
    """Print the figures, and write them with the raw rows to results/NAME.json."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    result = {
        "name": name,
        "figures": figures,
        **details,
        "commit": commit,
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": platform.system(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "rows": rows,
    }
    for figure in figures:
        low, high = figure["interval"]
        print(
            f"{name}: {figure['of']} {figure['median']:.4g} ({low:.4g} to {high:.4g}), at most {figure['at_most']}: "
            f"{figure['verdict']}"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
