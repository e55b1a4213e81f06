"""Memory of each GPU of a host that its peers can write to, for as long as the process lives.

XLA has no buffers that outlive a program and that a peer may write to. Its remote references cost a rendezvous of the
hosts and a wait for the device per kernel (docs/log/fused.md: "Mosaic GPU's remote references cost a rendezvous of the
hosts"). So the memory is the CUDA driver's own, allocated once per mesh, a buffer per GPU. Other GPUs reach it directly
within a process, and by CUDA's IPC handles between processes.

Every process sees the buffers at other addresses, but a program must be the same in all. So a program holds the address
of a table where the host finds the buffers. The table is in each process's memory, at a place that is free in all.
"""

import collections
import contextlib
import ctypes
import functools
import itertools
import mmap
import pathlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tree_attn.devices import runtime_of

Groups = tuple[tuple[jax.Device, ...], ...]

TABLE_BYTES = 4096
TABLE_ADDRESSES = tuple(0x5D00_0000_0000 + (i << 32) for i in range(64))  # one per mesh, where it is free
TIMEOUT_S = 60
_calls: collections.Counter = collections.Counter()


class PeerMemoryError(NotImplementedError):
    """The GPUs cannot have memory in common; the message has the reason."""


def peer_memory(groups: Groups, num_bytes: int) -> int:
    """Allocates `num_bytes` of zeros on each GPU, for all GPUs of its group to write to; kept until the process ends.

    Every process that has one of the GPUs must call this, and waits for the others. A failure in one is one in all.

    Args:
      groups: each of equally many GPUs of one host, in the order of their ranks. One process has all GPUs of a single
        group, or each GPU has a process of its own.
    Returns:
      The address of a table in host memory, the same in all processes, uint64 `[ranks + 1]`: this process's addresses
      of its group's buffers by rank, then the rank of its first GPU.
    Raises:
      PeerMemoryError: the GPUs are not NVIDIA's, are on several hosts, or cannot reach each other.
      RuntimeError: a process did not answer in time.
    """
    table = _table(groups, num_bytes)
    if isinstance(table, PeerMemoryError):
        raise PeerMemoryError(str(table))
    return table


def check_platform(devices: Sequence[jax.Device]) -> None:
    """Raises PeerMemoryError unless the devices are GPUs that CUDA runs, and for which the exchange is written."""
    if (runtime := runtime_of(devices[0])) != "cuda":
        raise PeerMemoryError(f"fused needs NVIDIA GPUs, got {runtime!r} devices")
    from tree_attn.kernels.exchange_words import MIN_CTAS
    from tree_attn.kernels.targets import TARGETS

    capability = getattr(devices[0], "compute_capability", "9.0")  # devices to compile for have none
    if capability not in TARGETS:
        raise PeerMemoryError(
            f"fused is written for compute capability {', '.join(TARGETS)}, this GPU has {capability}"
        )
    # CTAs that exchange wait for one other to come and go (`tree_attn.kernels.epilogue`).
    if (sms := getattr(devices[0], "core_count", None)) is not None and sms <= MIN_CTAS:
        raise PeerMemoryError(f"fused needs a GPU of more than {MIN_CTAS} multiprocessors, this GPU has {sms}")


@functools.cache  # failures too: another attempt would allocate again
def _table(groups: Groups, num_bytes: int) -> int | PeerMemoryError:
    try:
        return _share(groups, num_bytes)
    except PeerMemoryError as error:
        return error


def _share(groups: Groups, num_bytes: int) -> int:
    devices = tuple(itertools.chain(*groups))
    check_platform(devices)
    # All processes decide alike, from what all have: one that went on alone would wait for the others.
    in_process = collections.Counter(device.process_index for device in devices)
    if max(in_process.values()) > 1 and (len(in_process) > 1 or len(groups) > 1):
        raise PeerMemoryError(
            "fused needs one process for all GPUs, which all meet, or one for each GPU, got "
            f"{max(in_process.values())} of {len(devices)} GPUs in a process, meeting in {len(groups)} group(s)"
        )
    group = next(group for group in groups if any(map(_is_local, group)))
    local = {rank: device.local_hardware_id for rank, device in enumerate(group) if _is_local(device)}

    def allocate():
        cuda = _Driver()
        buffers = {rank: cuda.allocate(ordinal, num_bytes) for rank, ordinal in local.items()}
        return (cuda, buffers), {group[rank].id: (_host(), cuda.handle(buffers[rank])) for rank in buffers}

    def open_all(cuda, buffers, offers):
        for ordinal, peer in itertools.permutations(local.values(), 2):
            cuda.enable_peer(ordinal, peer)
        with cuda.context(local[min(local)]):
            return [
                buffers[r] if r in buffers else cuda.open(*offers[device.id]) for r, device in enumerate(group)
            ], None

    (cuda, buffers), offers = _together(allocate, devices)
    table, _ = _together(lambda: open_all(cuda, buffers, dict(collections.ChainMap(*offers))), devices)
    # No device writes before all have opened: programs need an address from `_place`, which waits for all processes.
    return _place(np.asarray([*table, min(local)], np.uint64), devices)


def _is_local(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def _place(table: np.ndarray, devices: Sequence[jax.Device]) -> int:
    """Copies `table` to an address that is free in all processes."""
    for address in TABLE_ADDRESSES:
        is_free = _map(address)
        _, answers = _together(lambda is_free=is_free: (None, is_free), devices)
        if all(answers):
            ctypes.memmove(address, table.ctypes.data, table.nbytes)
            return address
        if is_free:
            _unmap(address)
    raise PeerMemoryError(f"none of {', '.join(map(hex, TABLE_ADDRESSES))} is free in all processes")


def _together(step: Callable[[], tuple[Any, Any]], devices: Sequence[jax.Device]) -> tuple[Any, list[Any]]:
    """Runs `step` in all processes that have a device; it returns one value for this process and one to share.

    Returns:
      This process's value, and the shared values of all processes.
    Raises:
      PeerMemoryError: the step failed in some process; all raise the same.
    """
    local_result, shared, error = None, None, None
    try:
        local_result, shared = step()
    except PeerMemoryError as raised:
        error = str(raised)
    answers = [(shared, error)]
    processes = sorted({device.process_index for device in devices})
    if len(processes) > 1:
        from jax._src.distributed import global_state

        call = "/".join(("tree_attn/peer_memory", *(str(device.id) for device in devices)))
        _calls[call, jax.process_index()] += 1
        key = f"{call}/{_calls[call, jax.process_index()]}"
        global_state.client.key_value_set_bytes(f"{key}/{jax.process_index()}", pickle.dumps(answers[0]))
        get = functools.partial(global_state.client.blocking_key_value_get_bytes, timeout_in_ms=TIMEOUT_S * 1000)
        answers = []
        for process in processes:
            try:
                answers.append(pickle.loads(get(f"{key}/{process}")))
            except jax.errors.JaxRuntimeError as late:
                raise RuntimeError(
                    f"process {process} did not share its GPUs' memory within {TIMEOUT_S} s; every process must run "
                    "the same reduction='fused'"
                ) from late
    for process, (_, failed) in zip(processes, answers):
        if failed is not None:
            raise PeerMemoryError(failed + (f" (in process {process})" if len(processes) > 1 else ""))
    return local_result, [shared for shared, _ in answers]


def _host() -> str:
    """Returns a name that no two running machines share."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _map(address: int) -> bool:
    """Takes `TABLE_BYTES` of this process's memory at `address`; False if something is there."""
    map_fixed_noreplace = 0x100000
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    where = ctypes.c_void_p(address), ctypes.c_size_t(TABLE_BYTES)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed_noreplace
    return libc.mmap(*where, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0)) == address


def _unmap(address: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(TABLE_BYTES))


class _Driver:
    """The few functions of the CUDA driver that are needed; each raises PeerMemoryError when it fails."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryError(f"fused needs the CUDA driver: {error}") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def allocate(self, ordinal: int, num_bytes: int) -> int:
        """Returns the address of `num_bytes` of zeros on GPU `ordinal`."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        with self.context(ordinal):
            self._call("cuMemAlloc_v2", ctypes.byref(address), size)
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
            self._call("cuCtxSynchronize")
        return address.value

    def handle(self, address: int) -> bytes:
        """Returns the handle by which another process opens the memory."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, host: str, handle: bytes) -> int:
        """Returns where the current context has another process's memory."""
        if host != _host():
            raise PeerMemoryError("fused needs all GPUs in one host")
        address, with_peer_access = ctypes.c_uint64(), ctypes.c_uint(1)
        handle = _Handle.from_buffer_copy(handle)
        self._call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, with_peer_access,
            needs="fused needs GPUs that reach each other's memory, and a GPU of another process cannot be reached",
        )  # fmt: skip
        return address.value

    def enable_peer(self, ordinal: int, peer: int) -> None:
        """Lets GPU `ordinal` reach the memory of GPU `peer` of the same process."""
        already = 704
        with self.context(ordinal):
            needs = f"fused needs GPUs that reach each other's memory, and GPU {ordinal} cannot reach GPU {peer}"
            self._call("cuCtxEnablePeerAccess", self._context(peer), ctypes.c_uint(0), accept=(0, already), needs=needs)

    @contextlib.contextmanager
    def context(self, ordinal: int):
        """Makes the context that JAX uses on GPU `ordinal` the current one."""
        self._call("cuCtxPushCurrent_v2", self._context(ordinal))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, ordinal: int) -> ctypes.c_void_p:
        if ordinal not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[ordinal] = context
        return self._contexts[ordinal]

    def _call(self, name: str, *args, accept: tuple[int, ...] = (0,), needs: str = "") -> None:
        status = getattr(self._library, name)(*args)
        if status not in accept:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            needs = f"{needs}: " if needs else ""
            raise PeerMemoryError(f"{needs}{name} failed: {(text.value or b'unknown error').decode()} ({status})")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which CUDA takes by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]
