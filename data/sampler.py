"""The order of training: rows of one sort (with an image, or text alone) and of similar length together."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class ModalityLengthSampler(Sampler[int]):
    """Row indices in groups of `group_size` rows that all have an image or all have none, longest first.

    `group_size`: the rows of one optimizer step (per device x devices x accumulation steps). The groups come in
    random order; what is left over of both sorts forms the last ones, and only there a group may be mixed, images
    first (LLaVA's group_by_modality_length). Similar lengths need little padding, and a batch of text alone skips the
    vision tower.

    `lengths`: of each row, in tokens or words. `has_image`: of each row. The order is set by `seed` and the epoch
    (`set_epoch`, which Trainer calls) alone, so a resumed run that skips what it has seen goes on as it would have.
    """

    def __init__(self, lengths: Sequence[int], has_image: Sequence[bool], group_size: int, seed: int = 0):
        self.lengths = list(lengths)
        self.has_image = list(has_image)
        self.group_size = group_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self), generator=generator).tolist()
        full, left = [], []
        for kind in (True, False):
            groups = self._groups([row for row in shuffled if self.has_image[row] == kind])
            if groups and len(groups[-1]) < self.group_size:
                left += groups.pop()
            full += groups
        order = [full[group] for group in torch.randperm(len(full), generator=generator).tolist()]
        for group in [*order, *self._groups(left)]:
            yield from sorted(group, key=lambda row: (not self.has_image[row], -self.lengths[row]))

    def _groups(self, rows: list[int]) -> list[list[int]]:
        return [rows[start : start + self.group_size] for start in range(0, len(rows), self.group_size)]
