"""Running statistics of norms against numpy on all values at once."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from llava_norm_align.diagnosis import running
from llava_norm_align.diagnosis.running import LogHistogram, RunningNorms

N = 1_000_000
QUANTILES = (0.01, 0.5, 0.99)
BIN = 2 ** (1 / 512) - 1  # a bin's relative width
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def heavy_tailed():
    """name: a million positive values."""
    random = np.random.default_rng(0)
    normal = random.standard_normal(N)
    return {
        "lognormal": np.exp(3 * normal),
        "pareto": 1 / (1 - random.random(N)),
        "outlier": np.append(np.abs(40 + 45 * normal[:-1]), 1e15),
        "two_populations": np.where(random.random(N) < 0.3, 1.1 + 0.05 * normal, 3484 * np.exp(normal)),
        "tiny": 1e-9 * np.exp(2 * normal),
        "huge": 1e9 * np.exp(2 * normal),
        "all_scales": 10 ** random.uniform(-12, 12, N),
    }


def rank_error(values, value, q):
    """How far q lies from the ranks that `value` has among the sorted `values`."""
    below = np.searchsorted(values, value, side="left") / len(values)
    up_to = np.searchsorted(values, value, side="right") / len(values)
    return max(below - q, q - up_to, 0)


def test_quantiles_have_the_rank_of_numpys():
    for name, values in heavy_tailed().items():
        histogram = LogHistogram()
        histogram.add(torch.from_numpy(values))
        values = np.sort(values)
        for q in QUANTILES:
            found = histogram.quantile(q)
            assert rank_error(values, found, q) < 0.005, (name, q)
            assert found == pytest.approx(np.quantile(values, q), rel=2 * BIN), (name, q)


def test_equal_values_and_zeros():
    histogram = LogHistogram()
    histogram.add(torch.full((1000,), 1.09))
    assert histogram.quantile(0.01) == histogram.quantile(0.99) == np.float32(1.09)

    ties = np.sort(np.concatenate([np.full(900_000, 3.2022), np.random.default_rng(0).lognormal(size=100_000)]))
    histogram = LogHistogram()
    histogram.add(torch.from_numpy(ties))
    for q in QUANTILES:  # inside a bin the ties cannot be told from their neighbours
        assert histogram.quantile(q) == pytest.approx(np.quantile(ties, q), rel=BIN)

    histogram = LogHistogram()
    histogram.add(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert histogram.quantile(0.5) == 0
    assert histogram.quantile(1.0) == pytest.approx(5, rel=BIN)


@pytest.mark.parametrize("values", [[7.0], [1.0, 9.0], [1.0, 2.0, 4.0], [3.0, 1.0, 100.0, 2.0, 50.0]])
def test_few_values_are_interpolated_as_numpy_does(values):
    histogram = LogHistogram()
    histogram.add(torch.tensor(values))
    for q in (0.0, 0.01, 0.3, 0.5, 0.9, 1.0):
        assert histogram.quantile(q) == pytest.approx(np.quantile(values, q), rel=BIN)


def test_many_small_adds_equal_one():
    values = torch.from_numpy(np.random.default_rng(1).lognormal(sigma=3, size=5000))
    one, many = LogHistogram(), LogHistogram()
    one.add(values)
    for piece in values.split(7):
        many.add(piece)
    assert torch.equal(one.counts, many.counts)
    assert one.counts.sum() == 5000
    assert [one.quantile(q) for q in QUANTILES] == [many.quantile(q) for q in QUANTILES]


def test_a_value_is_counted_between_its_edges_and_others_not_at_all():
    histogram = LogHistogram(bins_per_octave=8)
    histogram.add(torch.tensor([[1.5, -2.0], [math.nan, math.inf]]))
    histogram.add(torch.tensor([]))
    (place,) = histogram.counts.nonzero().flatten().tolist()
    assert histogram.edges[place - 1] <= 1.5 < histogram.edges[place]
    assert histogram.edges[1] / histogram.edges[0] == pytest.approx(2 ** (1 / 8))
    assert (histogram.edges[0], histogram.edges[-1]) == (2.0**-64, 2.0**64)
    assert math.isnan(LogHistogram().quantile(0.5))


def test_rows_are_histograms_of_their_own():
    histogram = LogHistogram(bins_per_octave=128, rows=3)
    histogram.add(torch.tensor([[1.0, 1.0], [4.0, 4.0], [math.nan, math.nan]]))
    histogram.add(torch.tensor([[1.0], [math.nan], [0.0]]))
    assert [histogram.quantile(0.5, row) for row in range(3)] == [1.0, 4.0, 0.0]


def numpy_statistics(vectors):
    """The summary of finite vectors [N, D], from all of them at once."""
    norms = np.sqrt((vectors**2).sum(axis=1))
    return {
        "n": len(norms),
        "mean": norms.mean(),
        "std": norms.std(),
        "max": norms.max(),
        "max_element": np.abs(vectors).max(),
        "fp16_share": np.abs(vectors).max() / 65504,
        "near_constant": int((vectors.std(axis=1) < 3e-3).sum()),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_in_every_dtype(dtype, monkeypatch):
    monkeypatch.setattr(running, "CHUNK", 100)  # several chunks, the last one shorter
    vectors = torch.randn(40, 5, 16, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)
    vectors[0, 0] = 0.7  # constant
    vectors[1, 2] = 0
    vectors[2, 3] = 5
    vectors[2, 3, ::2] += 0.02 if dtype != torch.bfloat16 else 0.0625  # not constant: a deviation of 0.01 or more
    norms = RunningNorms()
    norms.add(vectors[:1])
    norms.add(vectors[1:30])
    norms.add(vectors[30:30])
    norms.add(vectors[30:].reshape(-1, 16))

    flat = vectors.double().numpy().reshape(-1, 16)
    expected, found = numpy_statistics(flat), norms.summary()
    assert found["non_finite"] == 0
    assert expected["near_constant"] == 2
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    sizes = np.sqrt((flat**2).sum(axis=1))
    for name, q in (("p1", 0.01), ("median", 0.5), ("p99", 0.99)):
        assert found[name] == pytest.approx(np.quantile(sizes, q), rel=2 * BIN), name
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_with_nan_or_inf_is_counted_and_left_out(dtype, bad):
    vectors = torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    vectors[7, 3] = bad
    vectors[7, 4] = 60000.0  # the largest element, but of a vector that does not count
    vectors[20] = bad  # near-constant, were it finite
    norms = RunningNorms()
    norms.add(vectors)
    found = norms.summary()
    kept = np.delete(vectors.double().numpy(), [7, 20], axis=0)
    for name, value in numpy_statistics(kept).items():
        assert found[name] == pytest.approx(value, rel=1e-12), name
    assert found["non_finite"] == 2


def test_bf16_holds_elements_whose_square_float32_does_not():
    norms = RunningNorms()
    norms.add(torch.full((1, 4), 2.0**100, dtype=torch.bfloat16))
    found = norms.summary()
    assert (found["mean"], found["non_finite"]) == (2.0**101, 0)
    assert found["fp16_share"] == 2.0**100 / 65504


@pytest.mark.parametrize("mean, std", [(3484.24, 3882.82), (1e4, 1e-2), (1e-3, 1e-9)])
def test_the_standard_deviation_is_stable(mean, std):
    values = np.abs(np.random.default_rng(2).normal(mean, std, size=200_000))
    norms = RunningNorms()
    for piece in torch.from_numpy(values).split(999):
        norms.add(piece[:, None])  # D = 1: the norm is the value
    found = norms.summary()
    assert found["n"] == 200_000
    assert found["mean"] == pytest.approx(values.mean(), rel=1e-13)
    assert found["std"] == pytest.approx(values.std(), rel=1e-8)


def test_near_constant_is_by_the_population_deviation():
    norms = RunningNorms()
    norms.add(torch.tensor([[5, 5.0058], [5, 5.0062]], dtype=torch.float64))  # 0.0029 and 0.0031
    assert norms.summary()["near_constant"] == 1


def test_nothing_added_and_nothing_finite():
    norms = RunningNorms()
    norms.add(torch.empty(0, 8))
    assert norms.summary() is None
    assert norms.histogram() == {"edges": [], "counts": []}
    norms.add(torch.full((3, 8), math.nan))
    found = norms.summary()
    assert (found.pop("n"), found.pop("non_finite"), found.pop("near_constant")) == (0, 3, 0)
    assert len(found) == 8 and set(found.values()) == {None}
    norms.add(torch.ones(1, 4))  # a first piece without finite vectors leaves no trace
    found = norms.summary()
    assert (found["n"], found["mean"], found["std"], found["median"], found["max"]) == (1, 2, 0, 2, 2)


def test_histogram_for_a_plot():
    values = np.array([0.9, 1.0, 1.05, 3.0, 40.0, 0.0])
    norms = RunningNorms()
    norms.add(torch.from_numpy(values)[:, None])
    found = norms.histogram()
    edges = np.array(found["edges"])
    assert np.diff(np.log2(edges)) == pytest.approx(1 / 8)
    assert edges[0] <= 0.9 < edges[1] and edges[-2] <= 40 < edges[-1]
    assert found["counts"] == np.histogram(values, bins=edges)[0].tolist()
    assert sum(found["counts"]) == 5  # the zero has no place on the axis
    json.dumps(found)


def test_adding_never_waits_for_the_device():
    with FakeTensorMode():  # refuses .item(), bool(tensor) and indexing by a mask
        norms = RunningNorms()
        for _ in range(3 * running.WAITING):
            norms.add(torch.empty(7, 4, dtype=torch.bfloat16))


def test_memory_does_not_grow():
    norms, sizes = RunningNorms(), []
    for _ in range(4 * running.WAITING):
        norms.add(torch.rand(100, 4))
        sizes.append(len(pickle.dumps(norms)))
    joined = sizes[running.WAITING - 1 :: running.WAITING]  # nothing waits
    assert max(joined) < min(joined) + 100
    assert max(sizes) < joined[0] + running.WAITING * (24 * 100 + 1000)  # what waits, and pickle's own words
