"""Every operation of a group, by all spellings of ``torch.distributed``, with tensors from which errors would show."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Op = Callable[[Any, int, int, bool], Any]


def _wait(work: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    if work is not None:
        work.wait()
    return list(tensors)


def _data(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10.0 * rank


def _empty(size: int, *shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape) for _ in range(size)]


def _all_reduce(g: Any, r: int, n: int, a: bool) -> Any:
    x = _data(r, 3)
    return _wait(dist.all_reduce(x, group=g, async_op=a), x)


def _all_reduce_max(g: Any, r: int, n: int, a: bool) -> Any:
    x = _data(r, 3)
    return _wait(dist.all_reduce(x, op=dist.ReduceOp.MAX, group=g, async_op=a), x)


def _all_reduce_coalesced(g: Any, r: int, n: int, a: bool) -> Any:
    xs = [_data(r, 3), _data(r, 2)]
    return _wait(dist.all_reduce_coalesced(xs, group=g, async_op=a), *xs)


def _broadcast(g: Any, r: int, n: int, a: bool) -> Any:
    x = _data(r, 3)
    return _wait(dist.broadcast(x, src=n - 1, group=g, async_op=a), x)


def _reduce(g: Any, r: int, n: int, a: bool) -> Any:
    x = _data(r, 3)
    return _wait(dist.reduce(x, dst=1, group=g, async_op=a), x) if r == 1 else (
        _wait(dist.reduce(x, dst=1, group=g, async_op=a)))  # elsewhere the buffer is scratch  # fmt: skip


def _all_gather(g: Any, r: int, n: int, a: bool) -> Any:
    out = _empty(n, 3)
    return _wait(dist.all_gather(out, _data(r, 3), group=g, async_op=a), *out)


def _all_gather_into_tensor(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3 * n)
    return _wait(dist.all_gather_into_tensor(out, _data(r, 3), group=g, async_op=a), out)


def _all_gather_coalesced(g: Any, r: int, n: int, a: bool) -> Any:
    out = [_empty(2, 3) for _ in range(n)]
    works = dist.all_gather_coalesced(out, [_data(r, 3), _data(r + 1, 3)], group=g, async_op=a)
    return _wait(works, *(t for row in out for t in row))


def _gather(g: Any, r: int, n: int, a: bool) -> Any:
    out = _empty(n, 3) if r == 0 else None
    return _wait(dist.gather(_data(r, 3), out, dst=0, group=g, async_op=a), *(out or []))


def _gather_into_tensor(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3 * n) if r == 0 else None
    function = getattr(dist, "gather_into_tensor", None)
    if function is None:
        return "this PyTorch has no gather_into_tensor"
    return _wait(function(_data(r, 3), out, dst=0, group=g, async_op=a), *([out] if out is not None else []))


def _scatter(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3)
    parts = [_data(i, 3) for i in range(n)] if r == 0 else None
    return _wait(dist.scatter(out, parts, src=0, group=g, async_op=a), out)


def _reduce_scatter(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3)
    return _wait(dist.reduce_scatter(out, [_data(r + i, 3) for i in range(n)], group=g, async_op=a), out)


def _reduce_scatter_tensor(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(2)
    return _wait(dist.reduce_scatter_tensor(out, _data(r, 2 * n), group=g, async_op=a), out)


def _all_to_all(g: Any, r: int, n: int, a: bool) -> Any:
    out = _empty(n, 2)
    return _wait(dist.all_to_all(out, [_data(r + i, 2) for i in range(n)], group=g, async_op=a), *out)


def _all_to_all_single(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(2 * n)
    return _wait(dist.all_to_all_single(out, _data(r, 2 * n), group=g, async_op=a), out)


def _all_to_all_single_uneven(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(n * (r + 1))
    sizes = list(range(1, n + 1))
    source = _data(r, sum(sizes))
    return _wait(dist.all_to_all_single(out, source, [r + 1] * n, sizes, group=g, async_op=a), out)


def _barrier(g: Any, r: int, n: int, a: bool) -> Any:
    return _wait(dist.barrier(group=g, async_op=a))


def _monitored_barrier(g: Any, r: int, n: int, a: bool) -> Any:
    g.monitored_barrier(timedelta(seconds=10))
    return []


def _send_recv(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3)
    to, of = (r + 1) % n, (r - 1) % n
    if a:
        works = [dist.irecv(out, src=of, group=g), dist.isend(_data(r, 3), dst=to, group=g)]
        for work in works:
            work.wait()
    elif r % 2 == 0:
        dist.send(_data(r, 3), dst=to, group=g)
        dist.recv(out, src=of, group=g)
    else:
        dist.recv(out, src=of, group=g)
        dist.send(_data(r, 3), dst=to, group=g)
    return [out]


def _recv_anysource(g: Any, r: int, n: int, a: bool) -> Any:
    if r:
        dist.send(_data(r, 3), dst=0, group=g)
        return []
    got = {}
    for _ in range(n - 1):
        out = torch.zeros(3)
        got[dist.recv(out, group=g)] = out
    return [got[i] for i in sorted(got)]


def _batch_isend_irecv(g: Any, r: int, n: int, a: bool) -> Any:
    out = torch.zeros(3)
    ops = [
        dist.P2POp(dist.irecv, out, (r - 1) % n, group=g),
        dist.P2POp(dist.isend, _data(r, 3), (r + 1) % n, group=g),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


def _objects(g: Any, r: int, n: int, a: bool) -> Any:
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": r}, group=g)
    sent: list[Any] = [("from", r), r]
    dist.broadcast_object_list(sent, src=0, group=g)
    on_one: list[Any] | None = [None] * n if r == 1 else None
    dist.gather_object(r * r, on_one, dst=1, group=g)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(n)] if r == 0 else None, src=0, group=g)
    passed: list[Any] = [r]
    if r == 0:
        dist.send_object_list(["one", 1], dst=1, group=g)
    elif r == 1:
        passed = [None, None]
        dist.recv_object_list(passed, src=0, group=g)
    return [gathered, sent, on_one, mine, passed]


def _coalescing_manager(g: Any, r: int, n: int, a: bool) -> Any:
    xs = [_data(r, 3), _data(r, 4)]
    with dist._coalescing_manager(group=g, async_ops=a) as manager:
        for x in xs:
            dist.all_reduce(x, group=g)
    if a:
        manager.wait()
    return xs


def _coalesced_gather(g: Any, r: int, n: int, a: bool) -> Any:
    outs = [torch.zeros(3 * n), torch.zeros(2 * n)]
    with dist._coalescing_manager(group=g, async_ops=a) as manager:
        for out, width in zip(outs, (3, 2), strict=True):
            dist.all_gather_into_tensor(out, _data(r, width), group=g)
    if a:
        manager.wait()
    return outs


OPS: dict[str, tuple[Op, str]] = {
    "all_reduce": (_all_reduce, "all_reduce"),
    "all_reduce max": (_all_reduce_max, "all_reduce"),
    "all_reduce_coalesced": (_all_reduce_coalesced, "all_reduce_coalesced"),
    "broadcast": (_broadcast, "broadcast"),
    "reduce": (_reduce, "reduce"),
    "all_gather": (_all_gather, "all_gather"),
    "all_gather_into_tensor": (_all_gather_into_tensor, "all_gather_into_tensor"),
    "all_gather_coalesced": (_all_gather_coalesced, "all_gather_coalesced"),
    "gather": (_gather, "gather"),
    "gather_into_tensor": (_gather_into_tensor, "gather_into_tensor"),
    "scatter": (_scatter, "scatter"),
    "reduce_scatter": (_reduce_scatter, "reduce_scatter"),
    "reduce_scatter_tensor": (_reduce_scatter_tensor, "reduce_scatter_tensor"),
    "all_to_all": (_all_to_all, "all_to_all"),
    "all_to_all_single": (_all_to_all_single, "all_to_all_single"),
    "all_to_all_single uneven": (_all_to_all_single_uneven, "all_to_all_single"),
    "barrier": (_barrier, "barrier"),
    "monitored_barrier": (_monitored_barrier, "monitored_barrier"),
    "send and recv": (_send_recv, "send"),
    "recv from anyone": (_recv_anysource, "recv"),
    "batch_isend_irecv": (_batch_isend_irecv, "send"),
    "objects": (_objects, "all_gather"),
    "coalescing manager": (_coalescing_manager, "all_reduce_coalesced"),
    "coalesced gather": (_coalesced_gather, "all_gather_into_tensor_coalesced"),
}


def outcome(op: Op, group: Any, rank: int, size: int, async_op: bool) -> tuple[str, Any]:
    try:
        return "value", op(group, rank, size, async_op)
    except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
        return type(error).__name__, str(error).splitlines()[0]


def plain(value: Any) -> Any:
    """Turn tensors into lists so that results can be compared by ==."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value
