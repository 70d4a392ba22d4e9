"""PackedSequences: the boundaries it takes and refuses, that nobody can rewrite them, and what is kept."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from qwenlinear import PackedSequences

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "packed",
    [
        PackedSequences.from_lengths([3, 0, 5]),
        PackedSequences.from_lengths((3, 0, 5), device="cpu"),
        PackedSequences.from_lengths(torch.tensor([3, 0, 5])),
        PackedSequences.from_cu_seqlens([0, 3, 3, 8]),
        PackedSequences.from_cu_seqlens(torch.tensor([0, 3, 3, 8], dtype=torch.int32)),
    ],
)
def test_every_way_in_gives_the_same_boundaries(packed):
    assert packed.bounds == (0, 3, 3, 8)
    assert packed.lengths == (3, 0, 5)
    assert (packed.num_sequences, packed.total_tokens) == (3, 8)
    assert packed == PackedSequences.from_lengths([3, 0, 5])
    assert hash(packed) == hash(PackedSequences.from_lengths([3, 0, 5]))
    assert repr(packed) == "PackedSequences(N=3, T=8, lengths=[3, 0, 5])"


@pytest.mark.parametrize(
    ("position_ids", "lengths"),
    [
        ([0, 1, 2, 0, 1], (3, 2)),
        (torch.tensor([0, 1, 2, 0, 1]), (3, 2)),
        (torch.tensor([[0, 1, 2, 0, 1]]), (3, 2)),
        ([0, 0, 0], (1, 1, 1)),
        ([0], (1,)),
        ([0, 1, 2, 3], (4,)),
    ],
)
def test_positions_restart_at_zero(position_ids, lengths):
    assert PackedSequences.from_position_ids(position_ids).lengths == lengths


@pytest.mark.parametrize(
    ("build", "value", "words"),
    [
        ("from_lengths", [], "at least one document"),
        ("from_lengths", [3, -1], "token counts >= 0, got -1 at document 1"),
        ("from_lengths", [3, 1.5], "whole numbers"),
        ("from_lengths", [True], "whole numbers"),
        ("from_lengths", torch.tensor([1.0]), "int32 or int64"),
        ("from_lengths", torch.tensor([[1]]), "one-dimensional"),
        ("from_cu_seqlens", [0], r"\[N\+1\] with N >= 1"),
        ("from_cu_seqlens", [1, 3], "start at 0, got 1"),
        ("from_cu_seqlens", [0, 5, 3], "got 5 then 3 at document 1"),
        ("from_cu_seqlens", torch.tensor([0, 5], dtype=torch.int16), "int32 or int64"),
        ("from_position_ids", [], "no token"),
        ("from_position_ids", [1, 2], "start at 0, got 1"),
        ("from_position_ids", [0, 1, 3], "got 1 then 3 at token 2"),
        ("from_position_ids", [0, 1, 1], "got 1 then 1 at token 2"),
        ("from_position_ids", torch.zeros(2, 3, dtype=torch.int64), "one-dimensional"),
    ],
)
def test_what_is_no_boundary_is_refused(build, value, words):
    with pytest.raises(ValueError, match=words):
        getattr(PackedSequences, build)(value)


def test_rewriting_the_source_changes_nothing():  # case 11
    source = torch.tensor([0, 4, 10])
    packed = PackedSequences.from_cu_seqlens(source)
    source.copy_(torch.tensor([0, 7, 10]))
    assert packed.bounds == (0, 4, 10)
    assert packed.cu_seqlens().tolist() == [0, 4, 10]


def test_what_is_handed_out_is_the_callers():
    packed = PackedSequences.from_lengths([4, 6])
    packed.cu_seqlens().fill_(0)
    packed.cu_seqlens(dtype=torch.int64).fill_(0)
    assert packed.cu_seqlens().tolist() == [0, 4, 10]
    assert packed.cu_seqlens().dtype == torch.int32
    assert packed.cu_seqlens(dtype=torch.int64).dtype == torch.int64


def test_it_is_immutable():
    packed = PackedSequences.from_lengths([4, 6])
    for name in ("_bounds", "bounds", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(packed, name, (0,))
    with pytest.raises(TypeError, match="from_lengths"):
        PackedSequences()


def test_the_shared_boundaries_are_made_once_for_each_device_and_dtype():
    packed = PackedSequences.from_lengths([4, 6])
    assert packed._boundaries(CPU) is packed._boundaries(CPU)
    assert packed._boundaries(CPU, torch.int64) is not packed._boundaries(CPU)
    assert packed._boundaries(CPU, torch.int64).dtype == torch.int64


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [([0, 3, 0, 2], [3, 2]), ([3, 0], [3]), ([0, 3], [3]), ([3, 2], [3, 2]), ([0, 0], [0, 0])],
)
def test_the_same_documents_without_the_empty_ones(lengths, kept):
    packed = PackedSequences.from_lengths(lengths)
    assert packed.nonempty.lengths == tuple(kept)
    assert packed.nonempty is packed.nonempty
    assert (packed.nonempty is packed) == (lengths == kept)
    if 0 not in kept:
        assert packed._nonempty_index(CPU).tolist() == [n for n, length in enumerate(lengths) if length]


def test_segment_ids_name_the_document_of_each_token():
    assert PackedSequences.from_lengths([2, 0, 3]).segment_ids().tolist() == [0, 0, 2, 2, 2]


def test_derived_values_are_made_once_and_serve_a_later_backward_pass():
    packed, made = PackedSequences.from_lengths([4, 6]), []

    def make():
        made.append(None)
        return torch.ones(2)

    with torch.inference_mode():
        first = packed.derive("mine", make)
    assert packed.derive("mine", make) is first
    assert made == [None]
    assert not first.is_inference()
    x = torch.ones(2, requires_grad=True)
    (x * first).sum().backward()  # saves `first`, which an inference tensor would not allow
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_copies_have_the_boundaries_and_not_the_caches(clone):
    packed = PackedSequences.from_lengths([4, 0, 6], device="cpu")
    assert clone(packed) == packed
    assert clone(packed)._cache == {}


class Whole:
    """An integer as NumPy has them: no `int`, but an index."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_whatever_is_an_index_is_a_whole_number():
    packed = PackedSequences.from_lengths([Whole(3), 0, Whole(5)])
    assert packed.bounds == (0, 3, 3, 8)
    assert all(type(bound) is int for bound in packed.bounds)
    assert PackedSequences.from_cu_seqlens([Whole(0), Whole(8)]).bounds == (0, 8)
