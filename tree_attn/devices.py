"""Which devices a command runs on: real ones if there are enough, otherwise emulated ones on the CPU."""

import os

import jax


def ensure_devices(n_devices: int) -> list[jax.Device]:
    """Returns `n_devices` devices: accelerators if there are at least that many, otherwise emulated CPU devices.

    Call it before anything else uses a device: how many CPU devices JAX emulates is fixed when its backends start.

    Args:
        n_devices: how many, over all processes; at least 1.

    Raises:
        ValueError: `n_devices` is not a positive integer; or there are fewer accelerators and JAX started earlier with
            fewer CPU devices (says how to get them).

    Example:
        >>> mesh = make_mesh({"device": 8}, devices=ensure_devices(8))
    """
    if not isinstance(n_devices, int) or isinstance(n_devices, bool) or n_devices < 1:
        raise ValueError(f"n_devices must be an integer of at least 1, got {n_devices!r}")
    request_cpu_devices(n_devices)
    default = jax.devices()
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


def default_platform() -> str:
    """The platform that programs run on unless told otherwise, e.g. "cpu" or "gpu": what kernels are chosen by.

    JAX's default backend, or that of the default device where one is set (`jax.default_device`).
    """
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def start_distributed(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    local_device_ids: list[int] | None = None,
    n_devices: int | None = None,
) -> None:
    """Joins this process to the others, when there are others: a thin, checked `jax.distributed.initialize`.

    Args:
        coordinator_address: "host:port" of process 0, reachable from all; None means that there is one process.
        num_processes: how many processes there are.
        process_id: this one, 0 to num_processes - 1; process 0 prints and writes files.
        local_device_ids: which of this machine's accelerators are this process's own; None takes all that it can see.
        n_devices: devices over all processes; without accelerators every process emulates its equal part of them.

    Raises:
        ValueError: some of the three are given and others are not, or `process_id` is out of range, or `n_devices` is
            not a multiple of `num_processes`.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    if all(value is None for value in given.values()):
        return
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given too: {', '.join(given)} go together")
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise ValueError(f"process_id must lie in 0 .. num_processes - 1 = {num_processes - 1}, got {process_id}")
    if n_devices is not None:
        if n_devices % num_processes:
            raise ValueError(f"n_devices must be a multiple of num_processes={num_processes}, got {n_devices}")
        request_cpu_devices(n_devices // num_processes)
    jax.distributed.initialize(coordinator_address, num_processes, process_id, local_device_ids)


def request_cpu_devices(n_devices: int) -> None:
    """Asks for at least `n_devices` emulated CPU devices per process; too late (backends have started) is no error."""
    if jax.distributed.is_initialized():
        return  # `start_distributed` has asked for this process's part already
    # The option overrides the environment variable, so it must not lower what that asks for.
    flag = "--xla_force_host_platform_device_count="
    flags = [word.removeprefix(flag) for word in os.environ.get("XLA_FLAGS", "").split() if word.startswith(flag)]
    wanted = max([n_devices, jax.config.jax_num_cpu_devices, *(int(count) for count in flags if count.isdigit())])
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError:
        return
