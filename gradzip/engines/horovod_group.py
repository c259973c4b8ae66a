"""A torch process group beside Horovod, for rings: stock Horovod has no point-to-point messages."""

from __future__ import annotations

import datetime
import os
import secrets
import socket
from typing import Any

import torch
import torch.distributed as dist

from .ring import RingError


def group_from_horovod(process_set: Any = None, timeout: float = 60.0) -> Any:
    """A gloo process group of the ranks of a Horovod process set (default: all), independent of torch.distributed.

    All ranks of the process set must call it. Rank 0 listens on a free port and broadcasts its addresses. The group
    uses the first address that all ranks can reach, and each rank's own address on that connection. Rank 0 tries the
    interfaces in GLOO_SOCKET_IFNAME first, or in HOROVOD_GLOO_IFACE (which `horovodrun --network-interface` sets) if
    that is not set, then the loopback, then all others.

    Args:
        timeout: seconds for the group to form, and for operations without a timeout of their own.

    Raises:
        RingError: no address of rank 0 can be reached by all ranks.
    """
    import horovod.torch as hvd
    import psutil  # Horovod depends on it

    members = hvd.global_process_set if process_set is None else process_set
    rank, size, name = members.rank(), members.size(), "gradzip.ring"
    wait = datetime.timedelta(seconds=timeout)
    token = secrets.token_hex(16)
    store: Any = None
    message: Any = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        store.set("token", token)
        preferred = (os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE", "")).split(",")
        candidates = [
            (interface not in preferred, not a.address.startswith("127."), a.address)
            for interface, of_one in psutil.net_if_addrs().items()
            for a in of_one
            if a.family == socket.AF_INET
        ]
        message = token, store.port, [address for *_, address in sorted(candidates)]
    root = members.ranks[0]
    token, port, addresses = hvd.broadcast_object(message, root, name=f"{name}.addresses", process_set=members)
    mine: tuple[str, Any] | None = None
    reached = []
    for address in addresses:
        mine = (address, store) if rank == 0 else _reach(address, port, token, wait)
        if mine is not None:
            reached.append(address)
        ok = torch.tensor([float(mine is not None)], device="cpu")
        if hvd.allreduce(ok, name=f"{name}.reached", op=hvd.Min, process_set=members).item():
            break
    else:
        raise RingError(
            f"group_from_horovod: got no address of rank 0 that all {size} ranks reach among {addresses} (rank {rank} "
            f"reaches {reached}); open TCP between the hosts"
        )
    assert mine is not None
    here, store = mine
    gloo: Any = dist.ProcessGroupGloo  # incomplete in torch's type stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=here)]
    options._timeout = wait
    return gloo(dist.PrefixStore(name, store), rank, size, options)


def _reach(address: str, port: int, token: str, wait: datetime.timedelta) -> tuple[str, Any] | None:
    """This host's address on a connection to `address`, and rank 0's store; None if that is not rank 0."""
    try:
        with socket.create_connection((address, port), timeout=3) as connection:
            here = connection.getsockname()[0]
        # Connect first: torch may wait seconds for an address where nothing listens. Compare the token: 127.0.0.1 is
        # another host on every rank, and another program may listen there.
        store = dist.TCPStore(address, port, is_master=False, timeout=wait)
        return (here, store) if store.get("token").decode() == token else None
    except (OSError, RuntimeError):
        return None
