"""Blocks and groups of the chunked form: wherever the work is cut, the values are those of one uncut piece."""

from __future__ import annotations

import pytest
import torch

from qwenlinear import PackedSequences, TorchKernel
from qwenlinear.kernels import chunk_layout

DENSE = [(1, 1), (1, 64), (2, 130), (3, 100), (5, 7), (9, 1)]
PACKED = [[5], [1] * 40, [30, 30, 30], [1, 64, 65, 1, 69], [3, 47, 3, 147, 90, 10], [0, 5, 0, 0, 130, 3]]


def _call(B: int, T: int, packed: PackedSequences | None, state: bool) -> list[torch.Tensor]:
    """o, the final state and every gradient."""
    torch.manual_seed(0)
    H, HV, K, V = 2, 4, 8, 6
    N = B if packed is None else packed.num_sequences
    q, k = (torch.randn(B, T, H, K, dtype=torch.float64) for _ in range(2))
    tensors = [q, k, torch.randn(B, T, HV, V, dtype=torch.float64), -2 * torch.rand(B, T, HV, dtype=torch.float64)]
    tensors.append(torch.rand(B, T, HV, dtype=torch.float64))
    tensors.extend([torch.randn(N, HV, K, V, dtype=torch.float64)] if state else [])
    leaves = [x.requires_grad_() for x in tensors]
    *five, initial = [*leaves, None] if not state else leaves
    o, final = TorchKernel()(*five, None, initial, True, True, packed)
    assert final is not None
    weights = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view_as(o)
    return [o, final, *torch.autograd.grad((o * weights).sum() + final.square().sum(), leaves)]


@pytest.mark.parametrize("state", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("budget", [1, 30_000, 120_000])
@pytest.mark.parametrize("lengths", [*DENSE, *PACKED], ids=str)
def test_blocks_change_no_value(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int] | list[int], budget: int, state: bool
) -> None:
    def run(bytes_: int) -> list[torch.Tensor]:
        monkeypatch.setattr(chunk_layout, "_budget", lambda device: bytes_)
        if isinstance(lengths, tuple):
            return _call(*lengths, None, state)
        return _call(1, sum(lengths), PackedSequences.from_lengths(lengths), state)

    for cut, whole in zip(run(budget), run(10**12), strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-11, atol=1e-13)


def test_a_block_stays_small_however_long_the_sequence_is() -> None:
    layout = chunk_layout.ChunkLayout.of(
        None, 1, 65_536, torch.device("cpu"), row_bytes=10**6, state_bytes=10**6, keeps=False
    )
    (group,) = layout.groups
    assert sum(sum(block.counts) for block in group.blocks) * layout.size == 65_536
    assert max(block.rows for block in group.blocks) <= chunk_layout._budget(torch.device("cpu")) // 10**6


def test_many_documents_are_taken_in_groups() -> None:
    packed = PackedSequences.from_lengths([1, 2] * 1500)
    layout = chunk_layout.ChunkLayout.of(
        packed, 1, 4500, torch.device("cpu"), row_bytes=10**5, state_bytes=10**5, keeps=False
    )
    assert len(layout.groups) > 1
    assert sum(group.number for group in layout.groups) == 3000


def test_documents_of_one_length_are_a_dense_batch() -> None:
    packed = PackedSequences.from_lengths([32] * 64)
    layout = chunk_layout.ChunkLayout.of(
        packed, 1, 2048, torch.device("cpu"), row_bytes=10**6, state_bytes=10**6, keeps=False
    )
    assert layout.shape == (64, 32)
    x = torch.empty(1, 2048, 3)
    assert layout.fold(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 4), (4096, 5), (16_384, 8)])
def test_blocks_that_keep_their_state_are_smaller_for_short_sequences(tokens: int, rows: int) -> None:
    budget = chunk_layout._budget(torch.device("cpu"))
    shapes = {"row_bytes": budget // 15, "state_bytes": budget // 15}
    for keeps, expected in ((True, rows), (False, 8)):
        layout = chunk_layout.ChunkLayout.of(None, 1, tokens, torch.device("cpu"), **shapes, keeps=keeps)
        assert layout.size == 32
        assert max(block.rows for block in layout.groups[0].blocks) == expected
