"""Memory of each GPU that all GPUs of a mesh can write to.

XLA has no buffers that outlive a program and that a peer may write to, and what it has instead costs a rendezvous of the
hosts and a wait for the device per kernel (docs/log.md). So the memory is the CUDA driver's own, allocated once per mesh: a
buffer per GPU, reached by every other GPU directly within a process, by CUDA's IPC handles between processes.

Every process sees the buffers at other addresses, but a program must be the same in all. So it holds the address of a
table, in each process's own memory and at a place that all have free, where the host finds the buffers at each launch.
"""

import contextlib
import ctypes
import functools
import itertools
import mmap
import pathlib
import pickle

import jax
import numpy as np

TABLE_BYTES = 4096
TABLE_BASES = tuple(0x5D00_0000_0000 + (i << 32) for i in range(64))  # one per group of devices, where it is free
TIMEOUT_S = 60
_count = itertools.count()


class PeerMemoryError(NotImplementedError):
    """These GPUs have no memory in common, for a reason that the message gives."""


@functools.cache
def peer_memory(devices: tuple, num_bytes: int) -> int:
    """Allocates `num_bytes` of zeros on each of `devices`, for all of them to write to; kept until the process ends.

    Every process that has one of `devices` must call this, and waits for the others.

    Args:
      devices: GPUs of one host in the order of their ranks, all of one process or each of its own.
    Returns:
      The address of the table: this process's addresses of all buffers, uint64 `[len(devices)]` in host memory.
    Raises:
      PeerMemoryError: devices that are not NVIDIA's, that are on several hosts, or that cannot reach each other.
    """
    if any(device.platform != "gpu" for device in devices):
        raise PeerMemoryError(f"fused needs NVIDIA GPUs, got {devices[0].platform!r} devices")
    local = {rank: device for rank, device in enumerate(devices) if device.process_index == jax.process_index()}
    if len(local) not in (1, len(devices)):
        raise PeerMemoryError(f"fused needs one process for all GPUs or one for each, got {len(local)} in this one")
    cuda = _Driver()
    buffers = {rank: cuda.allocate(device.local_hardware_id, num_bytes) for rank, device in local.items()}
    offers = _exchange({rank: (_host(), cuda.handle(address)) for rank, address in buffers.items()}, devices)
    for rank, (host, _) in offers.items():
        if host != _host():
            raise PeerMemoryError(f"fused needs all GPUs in one host; {devices[rank]} is in another")
    for device, peer in itertools.permutations(local.values(), 2):
        cuda.enable_peer(device.local_hardware_id, peer.local_hardware_id)
    with cuda.context(local[min(local)].local_hardware_id):
        table = [buffers[rank] if rank in buffers else cuda.open(offers[rank][1]) for rank in range(len(devices))]
    address = _place(np.asarray(table, np.uint64), devices)
    _exchange(dict.fromkeys(local), devices)  # no rank writes to a buffer before its owner has opened all
    return address


def _place(table: np.ndarray, devices: tuple) -> int:
    """Copies `table` to an address that is free in all processes."""
    for address in TABLE_BASES:
        is_free = _map(address)
        if all(_exchange({jax.process_index(): is_free}, devices).values()):
            ctypes.memmove(address, table.ctypes.data, table.nbytes)
            return address
        if is_free:
            _unmap(address)
    raise PeerMemoryError(f"none of {[hex(address) for address in TABLE_BASES]} is free in all processes")


def _host() -> str:
    """What no two running machines share."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _exchange(values: dict, devices: tuple) -> dict:
    """Joins the dictionaries of all processes that have one of `devices`."""
    processes = sorted({device.process_index for device in devices})
    if len(processes) == 1:
        return values
    from jax._src.distributed import global_state

    key = f"tree_attn/peer_memory/{'-'.join(str(device.id) for device in devices)}/{next(_count)}"
    global_state.client.key_value_set_bytes(f"{key}/{jax.process_index()}", pickle.dumps(values))
    joined = {}
    for process in processes:
        joined |= pickle.loads(global_state.client.blocking_key_value_get_bytes(f"{key}/{process}", TIMEOUT_S * 1000))
    return joined


class _Driver:
    """The few calls of the CUDA driver's interface that are needed, each raising on failure."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryError(f"fused needs the CUDA driver: {error}") from error
        self._call("cuInit", 0)

    def _call(self, name: str, *args, accept=(0,)) -> int:
        status = getattr(self._library, name)(*args)
        if status not in accept:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise PeerMemoryError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
        return status

    @contextlib.contextmanager
    def context(self, ordinal: int):
        """The context that JAX uses on GPU `ordinal`, current within."""
        context = self._primary(ordinal)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield context
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @functools.cache  # noqa: B019: lives as long as the process
    def _primary(self, ordinal: int):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context

    def allocate(self, ordinal: int, num_bytes: int) -> int:
        """Zeros on GPU `ordinal`."""
        address = ctypes.c_uint64()
        with self.context(ordinal):
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
            self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            self._call("cuCtxSynchronize")
        return address.value

    def handle(self, address: int) -> bytes:
        """What another process opens memory by."""
        handle = (ctypes.c_char * 64)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Another process's memory, for the current context."""
        address = ctypes.c_uint64()
        struct = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), struct, ctypes.c_uint(1))
        return address.value

    def enable_peer(self, ordinal: int, peer: int) -> None:
        """Lets GPU `ordinal` reach the memory of GPU `peer` of the same process."""
        already = 704
        with self.context(ordinal):
            self._call("cuCtxEnablePeerAccess", self._primary(peer), ctypes.c_uint(0), accept=(0, already))


def _map(address: int) -> bool:
    """Takes `TABLE_BYTES` of host memory at `address`; False if something is there."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    no_replace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_replace
    sizes = ctypes.c_void_p(address), ctypes.c_size_t(TABLE_BYTES)
    got = library.mmap(*sizes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
    return got == address


def _unmap(address: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(TABLE_BYTES))


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]
