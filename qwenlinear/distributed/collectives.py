"""One canonical name per collective, and every spelling that PyTorch has for it.

PyTorch renames collectives: what a user calls ``all_gather_into_tensor`` reaches a process group as
``_allgather_base`` (before 2.12), as ``all_gather_single`` (since), or, coalesced, as
``all_gather_single_coalesced``. A policy that is keyed on one spelling misses the others, so policies and
counters speak of `Collective` only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum


class Collective(str, Enum):
    """What a process group can be asked to do; the value is the name in ``torch.distributed`` where there is
    one.

    Example:
        >>> Collective.parse("_allgather_base")
        <Collective.ALL_GATHER_INTO_TENSOR: 'all_gather_into_tensor'>
        >>> Collective.parse("isend") is Collective.SEND
        True
    """

    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_COALESCED = "all_reduce_coalesced"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    ALL_GATHER_COALESCED = "all_gather_coalesced"
    ALL_GATHER_INTO_TENSOR = "all_gather_into_tensor"
    ALL_GATHER_INTO_TENSOR_COALESCED = "all_gather_into_tensor_coalesced"
    GATHER = "gather"
    GATHER_INTO_TENSOR = "gather_into_tensor"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_TENSOR = "reduce_scatter_tensor"
    REDUCE_SCATTER_TENSOR_COALESCED = "reduce_scatter_tensor_coalesced"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"
    MONITORED_BARRIER = "monitored_barrier"

    def __str__(self) -> str:
        return self.value

    @property
    def is_point_to_point(self) -> bool:
        """Whether only two ranks take part."""
        return self in (Collective.SEND, Collective.RECV)

    @classmethod
    def parse(cls, name: str | Collective) -> Collective:
        """Find the collective that a spelling stands for.

        A group can't tell ``broadcast_object_list`` from ``broadcast`` nor ``isend`` from ``send``: such
        names parse to the operation that carries their payload. Some have a second carrier; see `carriers`.

        Args:
            name: a spelling in ``torch.distributed`` or on ``ProcessGroup`` of PyTorch 2.8 to 2.15, or a
                `Collective`.

        Returns:
            The collective.

        Raises:
            ValueError: if no PyTorch calls a collective so.
        """
        return cls.carriers(name)[0]

    @classmethod
    def carriers(cls, name: str | Collective) -> tuple[Collective, ...]:
        """Find all operations that a group sees when a name is called, the one that carries the payload
        first.

        Args:
            name: as for `parse`.

        Returns:
            One collective, or two where the name needs two (sizes first, then the payload; or a send and a
            receive).

        Raises:
            ValueError: if no PyTorch calls a collective so.

        Example:
            >>> [str(c) for c in Collective.carriers("scatter_object_list")]
            ['scatter', 'broadcast']
        """
        if isinstance(name, Collective):
            return (name,)
        found = _CARRIERS.get(name) if isinstance(name, str) else None
        if found is None:
            near = difflib.get_close_matches(str(name), _CARRIERS, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(c.value for c in cls)}"
            raise ValueError(f"a collective's name is needed, got {name!r}; {hint}")
        return found


# The methods of `ProcessGroup`, over all supported versions, by what they do.
METHODS: dict[str, Collective] = {
    "allreduce": Collective.ALL_REDUCE,
    "allreduce_coalesced": Collective.ALL_REDUCE_COALESCED,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "allgather": Collective.ALL_GATHER,
    "allgather_coalesced": Collective.ALL_GATHER_COALESCED,
    "_allgather_base": Collective.ALL_GATHER_INTO_TENSOR,
    "all_gather_single": Collective.ALL_GATHER_INTO_TENSOR,
    "allgather_into_tensor_coalesced": Collective.ALL_GATHER_INTO_TENSOR_COALESCED,
    "all_gather_single_coalesced": Collective.ALL_GATHER_INTO_TENSOR_COALESCED,
    "gather": Collective.GATHER,
    "gather_into_tensor": Collective.GATHER_INTO_TENSOR,
    "gather_single": Collective.GATHER_INTO_TENSOR,
    "scatter": Collective.SCATTER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER_TENSOR,
    "reduce_scatter_single": Collective.REDUCE_SCATTER_TENSOR,
    "reduce_scatter_tensor_coalesced": Collective.REDUCE_SCATTER_TENSOR_COALESCED,
    "reduce_scatter_single_coalesced": Collective.REDUCE_SCATTER_TENSOR_COALESCED,
    "alltoall": Collective.ALL_TO_ALL,
    "alltoall_base": Collective.ALL_TO_ALL_SINGLE,
    "all_to_all_single": Collective.ALL_TO_ALL_SINGLE,
    "send": Collective.SEND,
    "recv": Collective.RECV,
    "recv_anysource": Collective.RECV,
    "barrier": Collective.BARRIER,
    "monitored_barrier": Collective.MONITORED_BARRIER,
}

# Further names in `torch.distributed`: other spellings, then functions that are carried by operations of
# other names.
_FUNCTIONS: dict[str, tuple[Collective, ...]] = {
    "_all_gather_base": (Collective.ALL_GATHER_INTO_TENSOR,),
    "_broadcast_coalesced": (Collective.BROADCAST,),
    "isend": (Collective.SEND,),
    "irecv": (Collective.RECV,),
    "batch_isend_irecv": (Collective.SEND, Collective.RECV),
    "send_object_list": (Collective.SEND,),
    "recv_object_list": (Collective.RECV,),
    "broadcast_object_list": (Collective.BROADCAST,),
    "all_gather_object": (Collective.ALL_GATHER,),
    "gather_object": (Collective.GATHER, Collective.ALL_GATHER),
    "scatter_object_list": (Collective.SCATTER, Collective.BROADCAST),
}

_CARRIERS: dict[str, tuple[Collective, ...]] = {
    **{collective.value: (collective,) for collective in Collective},
    **{name: (collective,) for name, collective in METHODS.items()},
    **_FUNCTIONS,
}


def parse_names(names: Iterable[str | Collective], argument: str) -> frozenset[Collective]:
    """Parse a collection of names, every carrier of each.

    Args:
        names: spellings or collectives.
        argument: what the caller calls them, for the error.

    Returns:
        The collectives.

    Raises:
        ValueError: for an unknown name, or for one string where a collection is needed.
    """
    if isinstance(names, str):
        raise ValueError(f"{argument} needs a collection of names, got the string {names!r}; write [{names!r}]")
    if not isinstance(names, Iterable):
        raise ValueError(f"{argument} needs a collection of names, got {names!r}")
    try:
        return frozenset(carrier for name in names for carrier in Collective.carriers(name))
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from None
