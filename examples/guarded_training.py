"""Train with FSDP2 over a guarded group, and suspend it while an inference engine would use the device.

Two processes, on CPUs (gloo) or on GPUs (NCCL)::

    torchrun --standalone --nproc-per-node 2 examples/guarded_training.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from qwenlinear import usage
from qwenlinear.distributed import CommMemoryPolicy, GuardedProcessGroup, resume_all, suspend_all


def build_model(mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """Make a small model that is sharded over the mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4)))
    model = model.to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds = "rounds of training between rollouts (default: 3)"
    parser.add_argument("--rounds", type=usage.whole(1), default=3, help=rounds)
    parser.add_argument("--steps", type=usage.whole(1), default=5, help="steps of a round (default: 5)")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train, give the communicators' memory back, take it again, train on."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise usage.UsageError("needs torchrun: torchrun --standalone --nproc-per-node 2 examples/guarded_training.py")

    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")

    # The guard owns this group, so it can be suspended. It keeps 2 GiB of a GPU free; on a CPU it is idle.
    policy = CommMemoryPolicy.profiled().replace(min_free_bytes=2 * 2**30)
    group = GuardedProcessGroup.new_group(policy=policy, backend="nccl" if gpu else "gloo", group_desc="training")
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
    model = build_model(mesh, device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for round_ in range(args.rounds):
        for _ in range(args.steps):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM, group=group)
        if dist.get_rank() == 0:
            print(f"round {round_}: loss {mean.item() / dist.get_world_size():.4f}")

        suspend_all()  # the communicators' memory goes back to the device
        ...  # here the inference engine generates
        resume_all()

    if dist.get_rank() == 0:
        print(group.describe())
    dist.destroy_process_group()


if __name__ == "__main__":
    usage.run(main, command_line())
