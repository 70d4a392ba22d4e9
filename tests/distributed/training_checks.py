"""Three training steps, bare and guarded, with everything that takes a group or a mesh."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from guard_checks import counting_policy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from qwenlinear.distributed import GuardedProcessGroup

warnings.filterwarnings("ignore")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(Mlp(), Mlp())


def _steps(model: nn.Module, rank: int, parameters: Any = None) -> list[float]:
    optimiser = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(x).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(groups: list[Any], rank: int) -> list[float]:
    model = DistributedDataParallel(_model(), process_group=groups[0], bucket_cap_mb=0.0001)
    return _steps(model, rank)


def ddp_compiled(groups: list[Any], rank: int) -> list[float]:
    model = torch.compile(DistributedDataParallel(_model(), process_group=groups[0]), backend="aot_eager")
    return _steps(model, rank)


def _mesh(groups: list[Any], size: int) -> DeviceMesh:
    # DTensor caches by the mesh's ranks and names: two meshes in one process must differ in one of them, or
    # the second gets the groups of the first.
    kind = "guarded" if isinstance(groups[0], GuardedProcessGroup) else "bare"
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=(kind,))
    ranks = torch.arange(size).reshape(2, size // 2)
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=(f"{kind}_replicate", f"{kind}_shard"))


def fsdp2(groups: list[Any], rank: int, compiled: bool = False) -> list[float]:
    model = _model()
    mesh = _mesh(groups, dist.get_world_size())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if compiled:
        model.compile(backend="aot_eager")
    losses = _steps(model, rank)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    state = [p.full_tensor().sum().item() for p in model.parameters()]
    return losses + state + [float(norm)]


def fsdp2_compiled(groups: list[Any], rank: int) -> list[float]:
    return fsdp2(groups, rank, compiled=True)


def tensor_parallel(groups: list[Any], rank: int) -> list[float]:
    mesh = _mesh(groups[:1], dist.get_world_size())
    model = _model()
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _steps(model, rank=0)


def dtensor(groups: list[Any], rank: int) -> list[float]:
    mesh = _mesh(groups[:1], dist.get_world_size())
    torch.manual_seed(3)
    weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
    losses = []
    for step in range(3):
        x = distribute_tensor(torch.full((4, 8), 1.0 + step), mesh, [Replicate()])
        loss = (x @ weight.redistribute(placements=[Shard(1)])).square().mean().full_tensor()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        losses.append(loss.item())
    return [*losses, weight.detach().full_tensor().sum().item()]


def _functional_loss(x: torch.Tensor, w: torch.Tensor, group: Any) -> torch.Tensor:
    y = funcol.all_gather_tensor(x @ w, gather_dim=0, group=group)
    z = funcol.reduce_scatter_tensor(y, "sum", scatter_dim=0, group=group)
    return funcol.all_reduce(z.square().sum(), "sum", group=group)


def functional(groups: list[Any], rank: int, wrap: Callable[..., Any] = lambda f: f) -> list[float]:
    group, values = groups[0], []
    step_fn = wrap(lambda x, w: _functional_loss(x, w, group))
    torch.manual_seed(5)
    w = torch.randn(8, 8)
    for step in range(3):
        x = torch.full((4, 8), 1.0 + rank + step)
        loss = step_fn(x, w)
        w = w - 1e-4 * loss
        values.append(loss.item())
    return values


def functional_compiled(groups: list[Any], rank: int) -> list[float]:
    return functional(groups, rank, lambda f: torch.compile(f, backend="aot_eager", fullgraph=True))


def functional_inductor(groups: list[Any], rank: int) -> list[float]:
    return functional(groups, rank, lambda f: torch.compile(f, fullgraph=True))


def plain_compiled(groups: list[Any], rank: int) -> list[float]:
    """dist.* inside a compiled function."""
    group = groups[0]

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y.sum()

    compiled = torch.compile(step, backend="aot_eager")
    return [compiled(torch.full((4,), float(rank + i))).item() for i in range(3)]


def train(rank: int, size: int, names: list[str]) -> dict[str, tuple[list[float], dict[str, int]]]:
    """Run each recipe bare, then guarded; fail unless the losses are equal and the guard was in the path."""
    world = list(range(size))
    bare: list[Any] = [dist.new_group(world)]
    two_dims: list[Any] = []
    for rows in ([[i, i + size // 2] for i in range(size // 2)], [world[: size // 2], world[size // 2 :]]):
        two_dims += [
            g for ranks in rows if rank in ranks for g in [dist.new_group(ranks, use_local_synchronization=True)]
        ]
    report = {}
    for name in names:
        recipe = globals()[name.removesuffix("_2d")]
        inner = two_dims if name.endswith("_2d") else bare
        policy, _ = counting_policy(interval=0)
        expected = recipe(copy.copy(inner), rank)
        torch._dynamo.reset()
        guards = [GuardedProcessGroup.wrap(group, policy) for group in inner]
        got = recipe(list(guards), rank)
        torch._dynamo.reset()
        assert got == expected, f"{name}: {got} is not {expected}"
        calls = {str(c): s.calls for guard in guards for c, s in guard.stats().items()}
        assert calls, f"{name}: the guard wasn't in the path"
        assert all(s.checks == s.calls for guard in guards for s in guard.stats().values())
        report[name] = (got, calls)
    return report
