"""Statistics of many vectors' L2 norms in fixed memory, kept on the device where the vectors come."""

import math

import numpy as np
import torch

OCTAVES = 64  # a histogram covers 2^-64 to 2^64: beyond, float32 cannot square a value
BINS_PER_OCTAVE = 512  # a bin is 0.14 % wide
PLOT_BINS_PER_OCTAVE = 8
NEAR_CONSTANT = 3e-3  # a standard deviation over channels under which LayerNorm's eps of 1e-5 takes over
FLOAT16_MAX = 65504
CHUNK = 2**19  # elements that are copied to float64 at a time
WAITING = 32  # pieces of which three numbers a vector wait to be joined


def widest_float(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


class LogHistogram:
    """Counts of values >= 0 in fixed bins in log2, of which quantiles are read.

    Bin 0 holds zeros and what is under 2^-64, the last bin also what is over 2^64. Negative, infinite and NaN values
    are not counted. With `rows`, that many histograms of their own. Adding never waits for the device.
    """

    def __init__(self, bins_per_octave: int = BINS_PER_OCTAVE, rows: int = 1) -> None:
        self.bins_per_octave = bins_per_octave
        self.rows = rows
        self.bins = 1 + 2 * OCTAVES * bins_per_octave
        self.counts: torch.Tensor | None = None  # int64 [rows * bins]

    @property
    def edges(self) -> np.ndarray:
        """Edges of the bins 1 to last, in the values' unit: float64 [bins]."""
        return np.exp2(np.arange(self.bins) / self.bins_per_octave - OCTAVES)

    def add(self, values: torch.Tensor) -> None:
        """Count `values` of any float dtype: of any shape, or [rows, N]."""
        if values.numel() == 0:
            return
        if self.counts is None:
            wide = {"device": values.device, "dtype": widest_float(values.device)}
            self.counts = torch.zeros(self.rows * self.bins, dtype=torch.int64, device=values.device)
            self._starts = torch.arange(self.rows, device=values.device)[:, None] * self.bins
            self._lowest = torch.full((self.rows,), math.inf, **wide)
            self._highest = torch.full((self.rows,), -math.inf, **wide)
        values = values.reshape(self.rows, -1).to(self._lowest)
        counted = (values >= 0) & (values < math.inf)
        places = ((values.log2() + OCTAVES) * self.bins_per_octave).floor() + 1  # -inf for a zero, NaN if negative
        places = torch.where(counted, places, 0).clamp(0, self.bins - 1).long() + self._starts
        self.counts.scatter_add_(0, places.flatten(), counted.long().flatten())
        self._lowest = torch.minimum(self._lowest, torch.where(counted, values, math.inf).amin(dim=1))
        self._highest = torch.maximum(self._highest, torch.where(counted, values, -math.inf).amax(dim=1))

    def quantile(self, q: float, row: int = 0) -> float:
        """The q-quantile (0 to 1) as numpy's "linear" defines it, in the values' unit; NaN if nothing was counted.

        It is off by one bin's width at most. Its rank is within 0.5 % for values that spread over many bins.
        """
        if self.counts is None:
            return math.nan
        counts = self.counts[row * self.bins : (row + 1) * self.bins].cpu().numpy()
        up_to = counts.cumsum()
        if up_to[-1] == 0:
            return math.nan
        rank = q * (up_to[-1] - 1)
        below = self._ranked(math.floor(rank), counts, up_to)
        above = self._ranked(math.ceil(rank), counts, up_to)
        value = below + (rank - math.floor(rank)) * (above - below)
        return float(min(max(value, self._lowest[row].item()), self._highest[row].item()))

    def _ranked(self, rank: int, counts: np.ndarray, up_to: np.ndarray) -> float:
        """The value with `rank` smaller ones, as if the values of a bin were evenly spread in it."""
        place = int(np.searchsorted(up_to, rank, side="right"))
        if place == 0:
            return 0.0
        inside = (rank - (up_to[place] - counts[place]) + 0.5) / counts[place]
        return 2.0 ** ((place - 1 + inside) / self.bins_per_octave - OCTAVES)


class RunningNorms:
    """Statistics of the L2 norms of vectors; a vector with NaN or inf is counted as non-finite and left out.

    Vectors may come in any number of pieces. Adding never waits for the device.
    """

    def __init__(self) -> None:
        self._log_histogram = LogHistogram()
        self._count: torch.Tensor | None = None
        self._waiting: list[torch.Tensor] = []  # [3, N] each: small pieces are joined together

    def add(self, vectors: torch.Tensor) -> None:
        """Add vectors [..., D] of any float dtype; squares and sums are float64, float32 where there is none."""
        rows = vectors.detach().reshape(-1, vectors.shape[-1])
        if len(rows) == 0:
            return
        size, wide = max(1, CHUNK // rows.shape[1]), widest_float(rows.device)
        # One tensor for all chunks, made before them: small ones between large ones would fragment the memory.
        piece = torch.empty(3, len(rows), dtype=wide, device=rows.device)
        for chunk, (norms, largest, spread) in zip(rows.split(size), piece.split(size, dim=1), strict=True):
            chunk = chunk.to(wide, copy=True)  # it is centered in place
            norms.copy_(torch.linalg.vector_norm(chunk, dim=1))
            largest.copy_(torch.linalg.vector_norm(chunk, ord=math.inf, dim=1))
            spread.copy_(torch.linalg.vector_norm(chunk.sub_(chunk.mean(dim=1, keepdim=True)), dim=1))
        piece[2] /= rows.shape[1] ** 0.5
        self._waiting.append(piece)
        if len(self._waiting) >= WAITING:
            self._join()

    def _join(self) -> None:
        """Take the waiting vectors into the sums."""
        if not self._waiting:
            return
        device = self._waiting[0].device if self._count is None else self._count.device
        norms, largest, spread = torch.cat([piece.to(device) for piece in self._waiting], dim=1)
        self._waiting = []
        if self._count is None:
            zero = norms.new_zeros(())
            self._mean, self._squares, self._max, self._max_element = zero, zero, zero, zero
            self._count = self._non_finite = self._near_constant = zero.long()
        finite = norms.isfinite()
        self._log_histogram.add(norms)
        self._non_finite = self._non_finite + (~finite).sum()
        self._near_constant = self._near_constant + (spread < NEAR_CONSTANT).sum()  # NaN if not finite: not under it
        self._max = torch.maximum(self._max, torch.where(finite, norms, 0).max())
        self._max_element = torch.maximum(self._max_element, torch.where(finite, largest, 0).max())
        # Chan's rule joins the mean and the squared deviations of two sets: E[x^2] - E[x]^2 would lose a small spread.
        count = finite.sum()
        mean = torch.where(finite, norms, 0).sum() / count.clamp(min=1)
        share = count / (self._count + count).clamp(min=1).to(mean)
        step = mean - self._mean
        self._squares = self._squares + torch.where(finite, norms - mean, 0).square().sum()
        self._squares = self._squares + step * step * share * self._count
        self._mean = self._mean + step * share
        self._count = self._count + count

    def summary(self) -> dict[str, float | int | None] | None:
        """The statistics, or None when nothing was added.

        `n` finite vectors with the `mean`, population `std`, `median`, `p1`, `p99` and `max` of their norms (None if
        n is 0); `max_element`, their largest |element|, and `fp16_share`, that as a share of float16's largest number;
        `non_finite` vectors; `near_constant` vectors, whose elements have a standard deviation under 3e-3.
        """
        self._join()
        if self._count is None:
            return None
        n = self._count.item()
        quantile = self._log_histogram.quantile
        max_element = self._max_element.item() if n else None
        return {
            "n": n,
            "mean": self._mean.item() if n else None,
            "std": math.sqrt(self._squares.item() / n) if n else None,
            "median": quantile(0.5) if n else None,
            "p1": quantile(0.01) if n else None,
            "p99": quantile(0.99) if n else None,
            "max": self._max.item() if n else None,
            "max_element": max_element,
            "fp16_share": max_element / FLOAT16_MAX if n else None,
            "non_finite": self._non_finite.item(),
            "near_constant": self._near_constant.item(),
        }

    def histogram(self) -> dict[str, list]:
        """{"edges": [k + 1], "counts": [k]}: norms in 8 bins an octave, from the first to the last that has any.

        Zeros have no place on the log axis: they are left out. Both lists are empty if there is nothing to show.
        """
        self._join()
        if self._count is None:
            return {"edges": [], "counts": []}
        fine = self._log_histogram.counts[1:].cpu().numpy()
        counts = fine.reshape(-1, BINS_PER_OCTAVE // PLOT_BINS_PER_OCTAVE).sum(axis=1)
        used = counts.nonzero()[0]
        if len(used) == 0:
            return {"edges": [], "counts": []}
        start, end = used[0], used[-1] + 1
        edges = np.exp2(np.arange(start, end + 1) / PLOT_BINS_PER_OCTAVE - OCTAVES)
        return {"edges": edges.tolist(), "counts": counts[start:end].tolist()}
