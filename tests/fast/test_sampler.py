"""The order of training: groups of one sort of rows, and of similar length."""

import random

import pytest
from torch.utils.data import DataLoader

from llava_norm_align.data.sampler import ModalityLengthSampler

GROUP = 8


def rows(images, texts, seed=0):
    generator = random.Random(seed)
    has_image = [True] * images + [False] * texts
    generator.shuffle(has_image)
    return [generator.randint(1, 99) for _ in has_image], has_image


def groups(order):
    return [order[start : start + GROUP] for start in range(0, len(order), GROUP)]


@pytest.mark.parametrize(("images", "texts"), [(61, 38), (64, 40), (0, 21), (21, 0), (3, 2), (15, 15), (0, 0)])
def test_every_row_once_and_groups_of_one_sort(images, texts):
    lengths, has_image = rows(images, texts)
    order = list(ModalityLengthSampler(lengths, has_image, GROUP))
    assert sorted(order) == list(range(images + texts))
    assert len(ModalityLengthSampler(lengths, has_image, GROUP)) == images + texts
    full = images // GROUP + texts // GROUP  # what is left over of both sorts comes after them
    for number, group in enumerate(groups(order)):
        kinds = [has_image[row] for row in group]
        if number < full:
            assert len(set(kinds)) == 1
        assert kinds == sorted(kinds, reverse=True)
        for kind in set(kinds):
            of_kind = [lengths[row] for row in group if has_image[row] == kind]
            assert of_kind == sorted(of_kind, reverse=True)


def test_sorts_are_not_in_blocks():
    lengths, has_image = rows(400, 400)
    kinds = [has_image[group[0]] for group in groups(list(ModalityLengthSampler(lengths, has_image, GROUP)))]
    assert 20 < sum(a != b for a, b in zip(kinds, kinds[1:], strict=False)) < 80


def test_rows_meet_others_in_each_epoch():
    lengths, has_image = rows(61, 38)
    sampler = ModalityLengthSampler(lengths, has_image, GROUP, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    assert list(ModalityLengthSampler(lengths, has_image, GROUP, seed=4)) != first
    sampler.set_epoch(1)
    second = list(sampler)
    assert {frozenset(group) for group in groups(second)}.isdisjoint({frozenset(group) for group in groups(first)})
    resumed = ModalityLengthSampler(lengths, has_image, GROUP, seed=3)
    resumed.set_epoch(1)
    assert list(resumed) == second


def test_accelerate_hands_the_epoch_on_and_skips_what_was_seen():
    from accelerate import skip_first_batches
    from accelerate.data_loader import prepare_data_loader

    lengths, has_image = rows(61, 38)
    sampler = ModalityLengthSampler(lengths, has_image, GROUP)
    sampler.set_epoch(2)
    expected = list(sampler)
    loader = DataLoader(range(99), batch_size=4, sampler=ModalityLengthSampler(lengths, has_image, GROUP))
    loader = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=False)
    loader = skip_first_batches(loader, 5)
    loader.set_epoch(2)
    assert [row for batch in loader for row in batch.tolist()] == expected[20:]


def test_two_processes_take_batches_of_one_sort():
    from accelerate.data_loader import prepare_data_loader

    lengths, has_image = rows(64, 40)
    seen = []
    for process in range(2):
        sampler = ModalityLengthSampler(lengths, has_image, GROUP)  # 2 processes x 2 rows x 2 accumulation steps
        loader = DataLoader(range(104), batch_size=2, sampler=sampler)
        loader = prepare_data_loader(loader, num_processes=2, process_index=process, put_on_device=False)
        seen.append([batch.tolist() for batch in loader])
    for first, second in zip(*seen, strict=True):
        assert len({has_image[row] for row in [*first, *second]}) == 1
    assert sorted(row for batches in seen for batch in batches for row in batch) == list(range(104))
