"""Every spelling of the installed PyTorch is known, and none is known that means something else."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist

from qwenlinear.distributed import Collective, GuardedProcessGroup
from qwenlinear.distributed.collectives import METHODS
from qwenlinear.distributed.methods import DELEGATED, REFUSED

# What is on ProcessGroup and isn't a collective, a delegated or a refused method: answered by the guard
# itself or by its C++ base, which knows rank, size and nothing more.
OWN_OR_BASE = {
    "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_device_types",
    "_end_coalescing", "_id", "_pybind11_conduit_v1_", "_set_group_desc", "_set_group_name",
    "_start_coalescing", "bound_device_id", "boxed", "end_coalescing", "group_desc", "group_name", "rank",
    "shutdown", "size", "start_coalescing", "unbox",
}  # fmt: skip

# Functions of torch.distributed that are no collectives of a group: they make, destroy or query something.
NOT_COLLECTIVES = {
    "GroupName", "_coalescing_manager", "_compute_bucket_assignment_by_size", "_create_process_group_wrapper",
    "_create_store_from_options", "_get_process_group_name", "_get_reconfigure_handle",
    "_is_spmd_types_available", "_make_distributed_pdb", "_make_nccl_premul_sum", "_new_window",
    "_rank_not_in_group", "_reconfigure", "_register_builtin_comm_hook", "_register_comm_hook",
    "_spmd_no_typecheck", "_supports_reconfigure", "_supports_window", "_test_python_store",
    "_time_estimator", "_verify_params_across_processes", "breakpoint", "destroy_process_group",
    "get_backend", "get_backend_config", "get_backend_impl", "get_debug_level",
    "get_default_backend_for_device", "get_global_rank", "get_group_rank", "get_node_local_rank",
    "get_pg_count", "get_process_group_ranks", "get_rank", "get_world_size", "init_device_mesh",
    "init_process_group", "is_available", "is_backend_available", "is_gloo_available", "is_initialized",
    "is_mpi_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available",
    "is_xccl_available", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "record_comm",
    "register_rendezvous_handler", "rendezvous", "set_debug_level", "set_debug_level_from_env", "set_timeout",
    "shrink_group", "split_group", "supports_complex",
}  # fmt: skip


def test_every_method_of_the_installed_process_group_is_classified() -> None:
    known = set(METHODS) | DELEGATED | REFUSED | OWN_OR_BASE
    unknown = [name for name in dir(dist.ProcessGroup) if not name.startswith("__") and name not in known]
    assert unknown == [], f"new on ProcessGroup: {unknown}; add each to METHODS, DELEGATED, REFUSED or OWN_OR_BASE"


def test_every_function_of_the_installed_torch_distributed_is_classified() -> None:
    functions = [
        name
        for name, value in vars(dist).items()
        if callable(value) and not inspect.isclass(value) and not name.startswith("__")
    ]
    unknown = [n for n in functions if n not in NOT_COLLECTIVES and n not in _spellings()]
    assert unknown == [], f"new in torch.distributed: {unknown}; add each to collectives.py or to NOT_COLLECTIVES"


def test_every_collective_of_the_base_is_overridden() -> None:
    inherited = [n for n in METHODS if hasattr(dist.ProcessGroup, n) and n not in vars(GuardedProcessGroup)]
    assert inherited == []


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather_into_tensor"),
        ("_all_gather_base", "all_gather_into_tensor"),
        ("all_gather_single", "all_gather_into_tensor"),
        ("allgather_into_tensor_coalesced", "all_gather_into_tensor_coalesced"),
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"),
        ("_reduce_scatter_base", "reduce_scatter_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        ("alltoall_base", "all_to_all_single"),
        ("alltoall", "all_to_all"),
        ("broadcast_object_list", "broadcast"),
        ("all_gather_object", "all_gather"),
        ("isend", "send"),
        ("irecv", "recv"),
        ("recv_anysource", "recv"),
        ("batch_isend_irecv", "send"),
    ],
)
def test_spellings_parse_to_one_name(name: str, canonical: str) -> None:
    assert Collective.parse(name) is Collective(canonical)
    assert Collective.parse(Collective(canonical)) is Collective(canonical)


def test_names_with_two_carriers_name_both() -> None:
    assert Collective.carriers("batch_isend_irecv") == (Collective.SEND, Collective.RECV)
    assert Collective.carriers("gather_object") == (Collective.GATHER, Collective.ALL_GATHER)
    assert Collective.carriers("scatter_object_list") == (Collective.SCATTER, Collective.BROADCAST)


@pytest.mark.parametrize("name", ["all_gather_in_tensor", "", "ALL_REDUCE", None, 3, b"all_reduce"])
def test_unknown_names_raise_with_the_word(name: object) -> None:
    with pytest.raises(ValueError, match="a collective's name is needed") as caught:
        Collective.parse(name)  # type: ignore[arg-type]
    assert repr(name) in str(caught.value)


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*all_gather_into_tensor"):
        Collective.parse("all_gather_in_tensor")


def _spellings() -> set[str]:
    from qwenlinear.distributed import collectives

    return set(collectives._CARRIERS)
