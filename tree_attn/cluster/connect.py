"""The connection of JAX's processes after the roll call, and the first collective that shows that it works."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tree_attn.cluster import gloo, relay
from tree_attn.cluster.launch import Launch
from tree_attn.cluster.progress import Limits
from tree_attn.cluster.rollcall import Members
from tree_attn.cluster.watchdog import Watchdog
from tree_attn.devices import started_devices
from tree_attn.mesh import make_mesh

STAGES = ("connecting to JAX's coordinator", "starting its devices", "the first collective")
_JAX_SILENCE_S = 7 * 86400


def connect_jax(launch: Launch, members: Members, limits: Limits, watchdog: Watchdog) -> None:
    """Runs the stages after the roll call. The watchdog keeps their time limits: some of them cannot be interrupted."""
    _bypass_proxies()
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It would catch SIGTERM: a cancelled job would go on until it is killed.
        jax.config.update("jax_enable_preemption_service", False)
    gloo.listen_on(members.address)
    port = members.jax_port
    if launch.process_id != 0:
        port = relay.start(members.channels[0].socket.getpeername()[0], port)
    try:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            launch.num_processes,
            launch.process_id,
            list(launch.local_device_ids) if launch.local_device_ids else None,
            # `detect` has found and checked all that JAX would detect.
            cluster_detection_method="deactivate",
            # These are the backstop: the watchdog ends first, with a clearer message. JAX counts suspended time as
            # silence, and a job may be suspended overnight.
            initialization_timeout=math.ceil(limits.stage_s) + 30,
            heartbeat_timeout_seconds=_JAX_SILENCE_S,
        )
        watchdog.reach(1)
        started_devices()
        watchdog.reach(2)
        _first_collective()
        watchdog.reach(3)
    except RuntimeError as error:
        reason = str(error).strip()[:500]
        raise ConnectionError(f"{launch.name_of(launch.process_id)} could not begin: {reason}") from error


def _first_collective() -> None:
    """Sums over all devices, and checks the sum."""
    mesh = make_mesh({"all": jax.device_count()})
    number = lambda: jax.lax.psum(1.0 + jax.lax.axis_index("all").astype(jnp.float32), "all")
    total = jax.jit(jax.shard_map(number, mesh=mesh, in_specs=(), out_specs=P()))()
    expected = jax.device_count() * (jax.device_count() + 1) / 2
    result = float(np.asarray(total.addressable_data(0)))
    if result != expected:
        raise ConnectionError(f"the first sum over {jax.device_count()} devices gave {result} and not {expected}")


def _bypass_proxies() -> None:
    """Keeps gRPC, by which JAX reaches its coordinator, from waiting for an HTTP proxy for ever."""
    if any(os.environ.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        for name in ("no_grpc_proxy", "no_proxy"):
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
