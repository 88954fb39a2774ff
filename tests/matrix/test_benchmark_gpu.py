"""The GPU benchmark runs on a CPU with tiny shapes; its FLOPs are those of a count by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")  # with transformers 5

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", BENCHMARKS / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("paired", "shapes"):
        sys.modules.pop(name, None)


def test_it_runs_on_tiny_shapes(gpu, tmp_path, capsys):
    result = gpu.main(
        ["--tiny", "--layers", "1", "--batch", "1", "--rounds", "1", "--out", str(tmp_path / "out.json")]
    )
    said = capsys.readouterr().out
    assert (tmp_path / "out.json").is_file()
    for number, stage in enumerate(result["stages"], start=1):
        assert stage["stage"] == number and stage["tokens_per_step"] == 576 + 128
        assert all(len(values) == 2 for values in stage["seconds"].values())
        for name in ("norm", "none"):
            assert f"{stage[name]['tokens_per_second']:,.0f}" in said
            assert stage[name]["share_of_matrix_product"] > 0


def test_the_count_of_operations(gpu):
    text, vision = {**gpu.TINY_TEXT, "num_hidden_layers": 1}, gpu.TINY_VISION
    tower = 2 * (4 * 32 * 32 + 2 * 32 * 64) * 2 * 577  # two layers, forward
    layer, head = 4 * 64 * 64 + 3 * 64 * 128, 64 * (32_000 + 64)
    projector = 6 * (32 * 64 + 64 * 64) * 576
    attention = 12 * 64 * 704**2
    for stage, factor in ((1, 4), (2, 6)):
        model = gpu.build(True, stage, "cpu", text, vision)
        expected = tower + projector + factor * (layer + head) * 704 + attention
        assert gpu.flops(model, 1, 704) == pytest.approx(expected, rel=1e-12)
