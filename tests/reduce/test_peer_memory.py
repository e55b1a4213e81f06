"""Memory that GPUs have in common: opened buffers, the place of the table, and failures in every process."""

import collections
import ctypes
import dataclasses
import threading
import types

import jax
import numpy as np
import pytest

from tree_attn.reduce import peer_memory as module
from tree_attn.reduce.peer_memory import PeerMemoryError

BUFFER = 0x1000_0000  # GPU i's is at (i + 1) times that
MINE = "this host"


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    platform: str = "gpu"
    version: str = "cuda 13000"
    compute_capability: str = "9.0"
    core_count: int = 132

    @property
    def client(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(platform_version=self.version)

    @property
    def local_hardware_id(self) -> int:
        return self.id


class Driver:
    """A `_Driver` without a GPU; `opened` and `reached` record its calls."""

    def __init__(self):
        self.opened, self.reached = [], []

    def allocate(self, ordinal, num_bytes):
        return BUFFER * (ordinal + 1)

    def handle(self, address):
        return address.to_bytes(8, "little")

    def open(self, host, handle):
        self.opened.append((host, int.from_bytes(handle, "little")))
        return 7 * int.from_bytes(handle, "little")  # elsewhere than where its owner has it

    def enable_peer(self, ordinal, peer):
        self.reached.append((ordinal, peer))

    def context(self, ordinal):
        return threading.Lock()  # a context manager that does nothing


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(module, "_Driver", lambda: fake)
    monkeypatch.setattr(module, "_host", lambda: MINE)
    return fake


def allocated(*groups, num_bytes=4096):
    module._table.cache_clear()
    return module.peer_memory(groups, num_bytes)


def table_at(address, ranks):
    return list(np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (ranks,)))


def test_within_a_process_every_gpu_reaches_every_other(driver):
    address = allocated((Device(1), Device(0), Device(2)))
    assert table_at(address, 3) == [2 * BUFFER, BUFFER, 3 * BUFFER]
    assert sorted(driver.reached) == [(i, j) for i in range(3) for j in range(3) if i != j]
    assert not driver.opened


def test_each_table_has_a_place_of_its_own(driver):
    first, second = (allocated((Device(0), Device(1))) for _ in range(2))
    assert first != second
    assert table_at(first, 2) == table_at(second, 2) == [BUFFER, 2 * BUFFER]


def test_a_process_opens_the_buffers_of_its_group(driver, monkeypatch):
    """This process has the second GPU of the second of two groups; each GPU has a process."""
    groups = tuple(tuple(Device(i, process_index=i) for i in pair) for pair in ((0, 1), (2, 3)))
    monkeypatch.setattr(jax, "process_index", lambda: 3)

    def with_others(step, devices):
        local_result, shared = step()
        others = [{i: (MINE, driver.handle(BUFFER * (i + 1)))} for i in range(3)]
        return local_result, [*others, shared] if isinstance(shared, dict) else [True] * 3 + [shared]

    monkeypatch.setattr(module, "_together", with_others)
    assert table_at(allocated(*groups), 3) == [7 * 3 * BUFFER, 4 * BUFFER, 1]  # and its rank
    assert driver.opened == [(MINE, 3 * BUFFER)]


def test_buffers_of_another_host_are_not_opened(monkeypatch):
    monkeypatch.setattr(module, "_host", lambda: MINE)
    with pytest.raises(PeerMemoryError, match="in one host"):
        module._Driver.open(object(), "another host", b"")


@pytest.mark.parametrize(
    "groups, said",
    [
        ([(Device(0, platform="cpu"),)], "needs NVIDIA GPUs, got 'cpu'"),
        ([(Device(0, version="rocm 70000"),)], "needs NVIDIA GPUs, got 'rocm'"),
        ([(Device(0, compute_capability="7.5"),)], "written for compute capability 8.0, .*, this GPU has 7.5"),
        ([(Device(0, compute_capability="8.9", core_count=46),)], "more than 64 multiprocessors, this GPU has 46"),
        ([(Device(0), Device(1), Device(2, 1), Device(3, 1))], "got 2 of 4 GPUs in a process"),
        ([(Device(0), Device(1)), (Device(2), Device(3))], "got 4 of 4 GPUs in a process, meeting in 2 group"),
        ([(Device(0),), (Device(1),)], "got 2 of 2 GPUs in a process, meeting in 2 group"),  # an axis of one device
        ([(Device(0), Device(2, 1)), (Device(1), Device(3, 1))], "got 2 of 4 GPUs in a process"),  # one of each group
        ([(Device(0), Device(1, 1), Device(2, 1))], "got 2 of 3 GPUs in a process"),  # seen from the one that has one
    ],
)
def test_what_cannot_be_is_named(groups, said, driver):
    with pytest.raises(PeerMemoryError, match=said):
        allocated(*groups)


def test_what_failed_is_not_tried_again(driver, monkeypatch):
    """Every call that is traced would otherwise allocate once more."""
    allocations = []
    monkeypatch.setattr(driver, "allocate", lambda *args: allocations.append(args) or BUFFER)
    monkeypatch.setattr(driver, "enable_peer", raising("no peer access"))
    module._table.cache_clear()
    for _ in range(3):
        with pytest.raises(PeerMemoryError, match="no peer access"):
            module.peer_memory(((Device(0), Device(1)),), 4096)
    assert len(allocations) == 2


def raising(message):
    def fail(*_):
        raise PeerMemoryError(message)

    return fail


class Store:
    """The part of JAX's distributed client that is used: one process sets a value, and another waits for it."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            assert key not in self._values
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]


@pytest.fixture
def three_processes(monkeypatch):
    """Runs a function of the process's number in three threads, each with a process index."""
    from jax._src.distributed import global_state

    current = threading.local()
    monkeypatch.setattr(jax, "process_index", lambda: current.index)
    monkeypatch.setattr(global_state, "client", Store())
    monkeypatch.setattr(module, "_calls", collections.Counter())

    def run(function):
        results = [None] * 3

        def one(index):
            current.index = index
            try:
                results[index] = function(index)
            except (PeerMemoryError, RuntimeError) as error:
                results[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


DEVICES = tuple(Device(i, process_index=i) for i in range(3))


def test_what_is_shared_reaches_all_and_what_is_kept_does_not(three_processes):
    def steps(index):
        return [module._together(lambda turn=turn: (f"local {index}", (index, turn)), DEVICES) for turn in range(2)]

    for index, result in enumerate(three_processes(steps)):
        assert result == [(f"local {index}", [(i, turn) for i in range(3)]) for turn in range(2)]


def test_what_fails_in_one_process_fails_in_all(three_processes):
    def step(index):
        if index == 1:
            raise PeerMemoryError("no memory")
        return None, None

    results = three_processes(lambda index: module._together(lambda: step(index), DEVICES))
    assert [str(error) for error in results] == ["no memory (in process 1)"] * 3


def test_a_process_that_does_not_come_is_named(three_processes, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    absent = lambda index: None if index == 2 else module._together(lambda: (None, None), DEVICES)
    *waited, _ = three_processes(absent)
    assert all("process 2 did not share its GPUs' memory within 0.2 s" in str(error) for error in waited)


def test_a_table_lies_where_all_have_room(three_processes, monkeypatch):
    """The first address is taken in one process, so none uses it, and those that had taken it give it back."""
    taken, given_back = module.TABLE_ADDRESSES[0], []
    monkeypatch.setattr(module, "_map", lambda address: (jax.process_index(), address) != (1, taken))
    monkeypatch.setattr(module, "_unmap", lambda address: given_back.append((jax.process_index(), address)))
    monkeypatch.setattr(module.ctypes, "memmove", lambda *args: None)
    places = three_processes(lambda index: module._place(np.zeros(3, np.uint64), DEVICES))
    assert places == [module.TABLE_ADDRESSES[1]] * 3
    assert sorted(given_back) == [(0, taken), (2, taken)]


class Library:
    """A CUDA driver without a GPU: `called` records names and numbers, `statuses` has what fails."""

    def __init__(self):
        self.called, self.statuses = [], {}

    def __getattr__(self, name):
        def function(*args):
            numbers = [x.value for x in args if hasattr(x, "value")]
            self.called.append((name, *numbers))
            if name in ("cuMemAlloc_v2", "cuDevicePrimaryCtxRetain", "cuDeviceGet"):
                args[0]._obj.value = 0x40 + len(self.called)  # a number that no other call is given
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_OF_A_KIND"
            return self.statuses.get(name, 0)

        return function

    def count(self, name):
        return sum(call[0] == name for call in self.called)


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: fake)
    return fake


def test_the_driver_zeros_memory_in_the_context_of_its_gpu(library):
    driver = module._Driver()
    first, second = driver.allocate(0, 256), driver.allocate(0, 512)
    assert first != second
    assert [call[1:] for call in library.called if call[0] == "cuMemsetD8_v2"] == [(first, 0, 256), (second, 0, 512)]
    assert library.count("cuDevicePrimaryCtxRetain") == 1, "a GPU's context is retained once"
    driver.allocate(1, 256)
    assert library.count("cuDevicePrimaryCtxRetain") == 2
    assert library.count("cuCtxPushCurrent_v2") == library.count("cuCtxPopCurrent_v2") == 3


def test_a_call_of_the_driver_that_fails_is_named_and_its_context_left(library):
    driver = module._Driver()
    library.statuses["cuMemAlloc_v2"] = 2
    with pytest.raises(PeerMemoryError, match=r"cuMemAlloc_v2 failed: CUDA_ERROR_OF_A_KIND \(2\)"):
        driver.allocate(0, 256)
    assert library.count("cuCtxPopCurrent_v2") == 1
    library.statuses["cuCtxEnablePeerAccess"] = 704  # already enabled
    driver.enable_peer(0, 1)
    library.statuses["cuCtxEnablePeerAccess"] = 217
    unreached = r"needs GPUs that reach each other's memory, and GPU 0 cannot reach GPU 1: cuCtxEnablePeerAccess failed"
    with pytest.raises(PeerMemoryError, match=unreached):
        driver.enable_peer(0, 1)
    library.statuses["cuIpcOpenMemHandle_v2"] = 217
    with pytest.raises(PeerMemoryError, match="another process cannot be reached: cuIpcOpenMemHandle_v2 failed"):
        driver.open(module._host(), bytes(ctypes.sizeof(module._Handle)))


def test_memory_of_another_process_is_opened_for_peers(library):
    """The flag is CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only one there is."""
    module._Driver().open(module._host(), bytes(ctypes.sizeof(module._Handle)))
    assert [call[-1] for call in library.called if call[0] == "cuIpcOpenMemHandle_v2"] == [1]
