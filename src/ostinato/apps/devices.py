"""The devices that share the batches of a run, in one process or in several.

Every process makes all batches and computes its part of them; the parameters are the
same everywhere. Process 0 alone writes files and shows progress, and its clock counts.
Communication is that of JAX: `jax.distributed`, and collectives that XLA adds to
programs over sharded arrays.
"""

import atexit
import ipaddress
import itertools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostinato import ragged

from .errors import UserError
from .fields import check_range

AXIS = "batch"
START_SECONDS = 120  # most that processes wait for each other at the start
# Without a sign of life for so many seconds, JAX counts a process as lost and ends the
# others. On CPUs the collectives notice an end at once, so that the limit is for hosts
# that vanish, and a process that is merely stopped for a while may go on.
SILENT_SECONDS = {"cpu": 600, None: 60}
Item = TypeVar("Item")


class ProcessLostError(UserError):
    """Another process of the run has ended, or cannot be reached."""


def connect(
    distributed: bool,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> None:
    """Connect the processes of a run, by `jax.distributed.initialize`.

    Args:
        distributed: False for a run of one process.
        coordinator: host and port of process 0, such as `10.0.0.1:9876`. None, here and
            below, asks the cluster, if it is one that JAX knows, such as Slurm.
        processes: the number of processes.
        process: the number of this one, from 0.

    Raises:
        UserError: the addresses are incomplete, or no connection was made.
    """
    given = coordinator, processes, process
    if not distributed:
        if given != (None, None, None):
            raise UserError(
                "--coordinator, --processes and --process need --distributed"
            )
        return
    if None in given and given != (None, None, None):
        raise UserError(
            "`--distributed` must have all of --coordinator HOST:PORT, --processes and "
            "--process, or none in a cluster that JAX detects"
        )
    if coordinator is not None:
        found = re.fullmatch(r".+:([0-9]{1,5})", coordinator)
        good = found is not None and 1 <= int(found[1]) <= 65535
        wanted = "HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:9876"
        check_range("coordinator", wanted, coordinator, good)
    if processes is not None and process is not None:
        check_range("processes", "at least 1", processes, processes >= 1)
        wanted = f"from 0 to {processes - 1}, below `processes`"
        check_range("process", wanted, process, 0 <= process < processes)
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if not platforms or "cpu" in platforms.split(","):
        _check_host_name(coordinator, process)
    silent = SILENT_SECONDS.get(platforms, SILENT_SECONDS[None])
    # It would catch SIGTERM, which is to end the process.
    jax.config.update("jax_enable_preemption_service", False)
    begin = partial(
        jax.distributed.initialize,
        *given,
        initialization_timeout=START_SECONDS + 60,  # when JAX aborts the process
        heartbeat_timeout_seconds=silent,
    )
    if _uses_mpi():
        atexit.register(_end)  # earlier than JAX registers the end of MPI: runs later
    try:
        _wait_for(begin, coordinator)
    except UserError:
        atexit.unregister(_end)
        raise


def _wait_for(begin: Callable[[], object], where: str | None) -> None:
    """Connect the processes; raise a UserError if they do not."""
    try:
        # In another thread: JAX can be waited for no shorter, and not be stopped.
        ThreadPoolExecutor(1).submit(begin).result(START_SECONDS)
    except TimeoutError:
        where = where or "the coordinator that JAX found"
        raise UserError(
            f"`--distributed` has waited {START_SECONDS} s for all processes to "
            f"connect to {where}; check that each runs, was given this address and the "
            "same number of processes, and can reach it"
        ) from None
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"`--distributed` could not connect the processes: {reason}; give "
            "--coordinator HOST:PORT, --processes and --process"
        ) from None


def _uses_mpi() -> bool:
    """Return whether the collectives of CPUs are those of MPI, a choice of the user."""
    return jax.config.jax_cpu_collectives_implementation == "mpi"  # type: ignore[attr-defined]


def _end() -> None:
    """End the process at once: JAX would use MPI again, after its end, and abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(hasattr(sys, "last_value")))  # 1 after a traceback


def _check_host_name(coordinator: str | None, process: int | None) -> None:
    """Check that the name of this host leads other hosts to it.

    The collectives of CPUs, which JAX starts beside GPUs too, tell other processes the
    address that this host has for its own name.

    Raises:
        UserError: the name has no address, or one of this host alone although the
            coordinator is another host.
    """
    name = socket.gethostname()
    advice = "give it the address that other hosts reach, for example in /etc/hosts"
    own = _resolve(name)
    if own is None:
        raise UserError(
            f"`--distributed` found no address for the name of this host, {name!r}; "
            f"{advice}"
        )
    if not process or coordinator is None or not ipaddress.ip_address(own).is_loopback:
        return  # process 0 is where the coordinator is
    there = _resolve(coordinator.rpartition(":")[0].strip("[]"))
    if there is not None and not _is_local(there):
        raise UserError(
            f"`--distributed`: {coordinator} cannot reach this host by its name, "
            f"{name!r}, whose address {own} is known to this host alone; {advice}"
        )


def _resolve(host: str) -> str | None:
    """Return the first address of a host, or None."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).partition("%")[0]
    except OSError:
        return None


def _is_local(address: str) -> bool:
    """Return whether an address is one of this host: no other lets sockets have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as listener:
            listener.bind((address, 0))
    except OSError:  # of the socket, too, where the system has no IPv6
        return False
    return True


def all_devices(platform: str | None = None) -> list[Any]:
    """Return the devices of JAX on its first platform, or on the one that is named.

    A command calls it before it computes: JAX itself may fail at the first call alone.

    Raises:
        ProcessLostError: another process has ended before it told its devices.
        UserError: JAX has none, such as a GPU that `JAX_PLATFORMS` asks for.
    """
    try:
        return jax.devices(platform)
    except (AssertionError, RuntimeError) as error:
        # JAX only asserts that there is a GPU where JAX_PLATFORMS is cuda.
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = (
            " ".join(str(error).split()) or f"JAX_PLATFORMS allows {platforms} alone"
        )
    if jax.distributed.is_initialized():
        raise ProcessLostError(
            "another process of this run has ended before it began, or cannot be "
            f"reached ({reason[:120]}); see what it says"
        )
    kind = "devices" if platform is None else f"{platform.upper()} here"
    raise UserError(f"JAX has no {kind}: {reason}")


class Devices:
    """The devices of a run.

    Args:
        count: the devices of each process. None takes one, and all if there are several
            processes. A CPU is one device; more are emulated on the same cores.

    Attributes:
        total_count: the devices of all processes together.
        processes: the number of processes.
        first: whether this is process 0, which writes and shows progress.
        everywhere: the sharding of what all devices have; None for a single device.

    Raises:
        UserError: a process has fewer devices, or JAX has none.
        ProcessLostError: another process has ended before it told its devices.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise UserError(f"`devices` must be at least 1, got {count}")
        if count is not None and count > 1:
            _emulate(count)
        every = all_devices()
        self.processes, self._rank = jax.process_count(), jax.process_index()
        self.first = self._rank == 0
        local = jax.local_devices()
        count = count or (len(local) if self.processes > 1 else 1)
        if count > len(local):
            raise UserError(
                f"`devices` must be at most {len(local)}, the devices of this process "
                f"({local[0].device_kind}), got {count}"
            )
        if count > 1 and _uses_mpi() and jax.distributed.is_initialized():
            raise UserError(
                f"`devices` must be 1 where JAX uses MPI, got {count}; start more "
                "processes instead"
            )
        by_process: list[list[Any]] = [[] for _ in range(self.processes)]
        for device in every:
            by_process[device.process_index].append(device)
        chosen = [device for many in by_process for device in many[:count]]
        self.total_count = len(chosen)
        self.everywhere: NamedSharding | None = None
        if self.total_count > 1:
            self._mesh = Mesh(np.array(chosen), (AXIS,))
            self.everywhere = NamedSharding(self._mesh, PartitionSpec())

    def replicate(self, tree: Any) -> Any:
        """Return arrays that every process has as arrays of all devices."""
        return self._put(tree, self.everywhere)

    def split(self, batch: Any) -> Any:
        """Deal a batch out: each device gets a part of it along the first axis.

        The examples of RaggedArrays are dealt out by their lengths.
        """
        if self.everywhere is None:
            return batch
        is_ragged = lambda x: isinstance(x, ragged.RaggedArray)  # noqa: E731
        if any(map(is_ragged, jax.tree.leaves(batch, is_leaf=is_ragged))):
            capacity = partial(ragged.round_capacity, per_octave=2)
            return ragged.shard(batch, self._mesh, AXIS, capacity=capacity)
        return self._put(batch, NamedSharding(self._mesh, PartitionSpec(AXIS)))

    def clock(self, seconds: float) -> Any:
        """Return the time of each device's process, `[devices]`, dealt out to them."""
        return self.split(np.full(self.total_count, seconds, np.float32))

    def local(self, tree: Any) -> Any:
        """Return arrays of all devices as those of one device of this process."""
        if self.everywhere is None:
            return tree
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield those of many items that this process works on."""
        return itertools.islice(items, self._rank, None, self.processes)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of float64 arrays over all processes."""
        values = np.ascontiguousarray(values, np.float64)
        rows = self._gather(values.view(np.uint8).ravel())
        numbers = np.stack([row.view(np.float64) for row in rows])
        return numbers.sum(0).reshape(values.shape)

    def agree(self, value: float) -> float:
        """Return the value that process 0 has."""
        return self.total(np.array([value if self.first else 0.0])).item()

    def check_same(self, text: str) -> None:
        """Check that all processes have the same settings and data.

        Raises:
            UserError: they have others.
        """
        rows = self._gather(
            np.frombuffer(blake2b(text.encode(), digest_size=8).digest(), np.uint8)
        )
        for other, row in enumerate(rows):
            if not np.array_equal(row, rows[0]):
                started = "; one `mpiexec` must start them all" if _uses_mpi() else ""
                raise UserError(
                    f"all processes must have the same files and options, got others "
                    f"in process {other} than in process 0{started}"
                )

    def _gather(self, row: np.ndarray) -> list[np.ndarray]:
        """Return the bytes of all processes."""
        if self.processes == 1:
            return [row]
        return list(np.ascontiguousarray(multihost_utils.process_allgather(row)))

    def _put(self, tree: Any, sharding: NamedSharding | None) -> Any:
        if sharding is None:
            return tree

        def one(x: Any) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

        return jax.tree.map(one, tree)


def _emulate(count: int) -> None:
    """Let a CPU count as several devices, unless JAX has already looked at it."""
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return
