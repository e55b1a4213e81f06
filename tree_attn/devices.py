"""The devices that a command runs on: real ones if there are enough, otherwise emulated ones on the CPU."""

import ctypes
import importlib.util
import os
from collections.abc import Sequence

import jax


def ensure_devices(n_devices: int) -> list[jax.Device]:
    """Returns `n_devices` devices: accelerators if there are at least that many, otherwise emulated CPU devices.

    Call it before anything else uses a device: JAX fixes the number of its CPU devices when its backends start.

    Args:
      n_devices: devices over all processes; at least 1.
    Raises:
      ValueError: `n_devices` is not a positive integer. Or there are fewer accelerators, and JAX started earlier with
        fewer CPU devices; the message gives the remedy.

    Example:
      >>> mesh = make_mesh({"seq": 8}, devices=ensure_devices(8))
    """
    if not isinstance(n_devices, int) or isinstance(n_devices, bool) or n_devices < 1:
        raise ValueError(f"n_devices must be an integer of at least 1, got {n_devices!r}")
    request_cpu_devices(n_devices)
    default = started_devices()
    if len(default) >= n_devices:
        return default[:n_devices]
    emulated = jax.devices("cpu")
    if len(emulated) >= n_devices:
        # With too few GPUs present, arrays and the choice of kernels must follow to the CPU.
        jax.config.update("jax_default_device", jax.local_devices(backend="cpu")[0])
        return emulated[:n_devices]
    have = f"{len(default)} {default[0].platform.upper()}"
    have += "" if default[0].platform == "cpu" else f" and {len(emulated)} CPU"
    raise ValueError(
        f"n_devices={n_devices} devices were asked for, and JAX has already started with {have} devices. Start over "
        f"with jax.config.update('jax_num_cpu_devices', {n_devices}) before anything uses a device, or with the "
        f"environment variable XLA_FLAGS=--xla_force_host_platform_device_count={n_devices}"
    )


def started_devices() -> list[jax.Device]:
    """Returns `jax.devices()`, of all processes; starts JAX's backends if they have not started.

    Raises:
      ValueError: JAX_PLATFORMS names platforms of which none can start here.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the named platforms has started
        platforms = jax.config.jax_platforms
        if not platforms:
            raise
        reason = str(error).strip() or "no plugin for them is installed"
        raise ValueError(
            f"JAX_PLATFORMS={platforms} must name a platform that can start here, cpu for one: {reason}"
        ) from error


def check_nccl(devices: Sequence[jax.Device]) -> None:
    """Raises where XLA's collectives cannot run over these devices, because the NCCL that it has loaded is too old.

    With JAX 0.12 they need a function of NCCL 2.29.2. JAX's packages ask for no such version, and PyTorch may keep an
    older one.

    Raises:
      NotImplementedError: names the version that is loaded, and how to get a newer one.
    """
    if len(devices) < 2 or jax.__version_info__ < (0, 12) or runtime_of(devices[0]) != "cuda":
        return
    nccl = _loaded_nccl()
    if nccl is None or hasattr(nccl, "ncclGetPeerDevicePointer"):
        return
    raise NotImplementedError(
        f"devices must be one GPU with JAX {jax.__version__} and NCCL {loaded_nccl_version()}, got {len(devices)}: XLA "
        "needs NCCL 2.29.2 or newer for more. Install it with pip install --upgrade nvidia-nccl-cu13 (or -cu12)"
    )


def loaded_nccl_version() -> str | None:
    """Returns the version of the NCCL that this process has loaded, as XLA does with its GPUs; None without one."""
    nccl, number = _loaded_nccl(), ctypes.c_int()
    if nccl is None or nccl.ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    thousands, rest = divmod(number.value, 10_000)
    return f"{thousands}.{rest // 100}.{rest % 100}"


def _loaded_nccl() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def default_platform() -> str:
    """Returns the platform that programs run on by default, e.g. "cpu" or "gpu"; kernels are chosen by it.

    It is JAX's default backend, or that of the default device where one is set (`jax.default_device`).
    """
    return jax.default_backend() if jax.config.jax_default_device is None else _default_device().platform


def is_rocm(device: jax.Device) -> bool:
    """Returns whether the device is a GPU that JAX runs by ROCm; its platform is "gpu", as with CUDA."""
    return device.platform == "gpu" and "rocm" in device.client.platform_version.lower()


def runtime_of(device: jax.Device) -> str:
    """Returns what runs programs on the device: "cuda" or "rocm" for a GPU, else its platform, e.g. "cpu" or "tpu"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if is_rocm(device) else "cuda"


def default_runtime() -> str:
    """Returns `runtime_of` the device that programs run on by default; what is NVIDIA's is chosen by it."""
    return runtime_of(_default_device())


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def request_cpu_devices(n_devices: int) -> None:
    """Asks for at least `n_devices` emulated CPU devices per process; too late (backends have started) is no error."""
    if jax.distributed.is_initialized():
        return  # `tree_attn.initialize` has requested this process's part already
    try:
        # The option overrides the environment variable, so it must not lower what that asks for.
        jax.config.update("jax_num_cpu_devices", max(n_devices, planned_cpu_devices()))
    except RuntimeError:
        return


def planned_cpu_devices() -> int:
    """Returns the number of CPU devices that this process has, or will have when JAX starts."""
    flag = "--xla_force_host_platform_device_count="
    flags = [word.removeprefix(flag) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(flag)]
    return max([1, jax.config.jax_num_cpu_devices, *(int(count) for count in flags if count.isdigit())])


def visible_gpus() -> tuple[str, ...]:
    """Returns the PCI addresses of the NVIDIA GPUs that JAX will use here, in its order; () where it will use the CPU.

    Reads them from the driver and starts no backend, so it can be called before `jax.distributed` connects.

    Example:
      >>> visible_gpus()
      ('0000:1B:00.0', '0000:43:00.0')
    """
    platforms = jax.config.jax_platforms
    if platforms and platforms.split(",")[0] not in ("cuda", "gpu"):
        return ()
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_pci_address(driver, device) for device in range(count.value))


def _pci_address(driver: ctypes.CDLL, device: int) -> str:
    text = ctypes.create_string_buffer(32)
    driver.cuDeviceGetPCIBusId(text, len(text), device)
    return text.value.decode()
