"""What each process of the sharding test runs; a module of its own, because processes import it."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard


def all_losses(rank: int) -> dict[str, tuple[list[float], int]]:
    """A model that is never injected, one injected before it is sharded, one after, and one whose projections are fused."""
    return {when: losses(rank, when) for when in ("never", "before", "after", "joined")}


def losses(rank: int, when: str) -> tuple[list[float], int]:
    """Three steps of a model sharded layer by layer, its GDN layers too: what they lose, and the kernel's calls."""
    from qwenlinear.hf import inject
    from qwenlinear.layers import projection
    from tests.hf.models import CountingKernel, make

    model, kernel = make("3.5"), CountingKernel()
    if when in ("before", "joined"):
        inject(model, kernel)
    if when == "joined":  # as on a GPU; in this process, which ends after it
        projection.why_not_faster = lambda device, tokens: None
        projection._Mixing.apply = counted(projection._Mixing.apply)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            fully_shard(layer.linear_attn)
        fully_shard(layer)
    fully_shard(model)
    if when == "after":
        inject(model, kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    seen = []
    for _ in range(3):
        ids = torch.randint(2, 97, (1, 9))
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen, kernel.chunks if when != "joined" else len(PRODUCTS)


PRODUCTS: list[int] = []


def counted(apply):
    """A function's twin that counts its calls."""

    def call(*args):
        PRODUCTS.append(1)
        return apply(*args)

    return call
