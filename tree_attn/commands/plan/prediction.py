"""The predictions of `tree-attn plan` for every strategy on a cluster, and the choice among them."""

import argparse
import dataclasses
import functools
import pathlib
from typing import Any

from tree_attn.commands.options import check_at_least, reading
from tree_attn.commands.units import size, time, times_as
from tree_attn.cost import datasheets, predict, prompt, ranges, rotation
from tree_attn.cost import machine as machines
from tree_attn.cost.machine import EXCHANGES, Machine
from tree_attn.cost.step import STATE_BYTES, DecodeStep
from tree_attn.measure.rows import strategy_label
from tree_attn.mesh import node_axes


def predict_all(args: argparse.Namespace) -> dict[str, Any]:
    """Returns everything that `tree-attn plan` shows, ready for JSON.

    Returns:
      `machine`, `datasheet` (None without one) and `links` (the sources of their parameters), `step`, `axis_sizes`,
      `fitted_devices` (the most devices that a constant was fitted to; 0: none was measured), `strategies` (the
      fastest first: the fields of `tree_attn.cost.predict.Prediction`, `latency_us`, `latency_range_us` as in
      `tree_attn.cost.ranges`, and `fits`), `left_out` (label -> why it cannot run there), `choice` (a label, or None
      where nothing fits) and `reason`; `rotations` (of a ring over all devices: the microseconds that each is predicted
      to add to the attention of one pass; empty where they are unknown); with `--prefill` also `prefill`, and with
      `--gradient` also `gradient`, True.

    Raises:
      ValueError: an option out of range, named; --gradient without --prefill.
    """
    check_at_least(args, nodes=1, gpus_per_node=1)
    if args.gradient and not args.prefill:
        raise ValueError("--gradient needs --prefill: a step of decoding has no backward pass here")
    machine = machine_of(args.machine, args.device_kind, with_datasheets=True)
    if args.nodes > 1 and machine.device_kind.startswith("TPU"):
        raise ValueError(
            f"--nodes must be 1 for a {machine.device_kind}, got {args.nodes}: chips of a slice have one kind of link; "
            "--gpus-per-node says how many there are"
        )
    fitted = machine.gpus_per_node if machine.fitted_devices is None else machine.fitted_devices
    gpus_per_node = args.gpus_per_node or machine.gpus_per_node
    machine = dataclasses.replace(machine, gpus_per_node=gpus_per_node, fitted_devices=fitted)
    step = DecodeStep(
        batch=args.batch,
        num_keys=args.keys,
        num_heads=args.heads,
        num_kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
        head_dim=args.head_dim,
        dtype=args.dtype,
        n_devices=args.nodes * machine.gpus_per_node,
    )
    axis_sizes = (machine.gpus_per_node, args.nodes) if args.nodes > 1 else (machine.gpus_per_node,)
    of_prompt = functools.partial(prompt_strategies_of, has_gradient=args.gradient)
    strategies_here = of_prompt if args.prefill else strategies_of
    strategies, left_out = strategies_here(step, axis_sizes, machine)
    choice, reason = _choose(strategies, step, machine)
    links = {"inside a node": machine.node.source} | (
        {"across nodes": machine.network.source} if args.nodes > 1 else {}
    )
    return {
        "machine": machine.device_kind,
        "datasheet": machine.provenance.get("datasheet"),
        "fitted_devices": machine.fitted_devices,
        "links": dict(list(links.items())[: len(axis_sizes)]),
        "step": dataclasses.asdict(step),
        "axis_sizes": axis_sizes,
        "memory_bytes_per_device": machine.memory_bytes,
        "strategies": strategies,
        "left_out": left_out,
        "choice": choice,
        "reason": reason,
        "rotations": _rotations(step, axis_sizes, machine, is_prompt=args.prefill),
    } | {name: True for name in ("prefill", "gradient") if getattr(args, name)}


def machine_of(path: pathlib.Path | None, device_kind: str, *, with_datasheets: bool = False) -> Machine:
    """Returns the machine in a file, or the package's own of this device kind, which was measured.

    Args:
      with_datasheets: where none was measured, take rates from a datasheet.

    Raises:
      ValueError: no file is given and the package has none of this kind; or the file is no machine.
    """
    if path is not None:
        with reading("--machine", path):
            path.read_text(encoding="utf-8")
        try:
            return machines.read(path)
        except ValueError as error:
            raise ValueError(f"--machine must be a file of a machine's parameters: {error}") from error
    found = machines.load(device_kind) or machines.load(f"NVIDIA {device_kind.upper()}")
    if found is None and with_datasheets:
        found = datasheets.load(device_kind)
    if found is None:
        known = (*machines.device_kinds(), *(datasheets.names() if with_datasheets else ()))
        names = ", ".join(name.removeprefix("NVIDIA ") for name in known)
        wanted = f"--device-kind must be one of {names}, or --machine" if with_datasheets else "--machine must be"
        raise ValueError(
            f"{wanted} given for {device_kind!r}{'' if with_datasheets else f': the package has {names} only'}; "
            "`tree-attn doctor --distributed --machine-out FILE` measures others"
        )
    return found


def strategies_of(
    step: DecodeStep, axis_sizes: tuple[int, ...], machine: Machine
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns every strategy that can run, the fastest first; and for each that cannot, why."""
    found, left_out = [], {}
    trees = [("tree", reduction) for reduction in predict.candidates(len(axis_sizes))]
    for strategy, reduction in [*trees, ("ring_overlapped", None), ("ring_public", None)]:
        names = {"label": strategy_label(strategy, reduction), "strategy": strategy, "reduction": reduction}
        try:
            _check_exchanges(step, reduction, axis_sizes, machine)
            options = dict(machine=machine, axis_sizes=axis_sizes)
            predicted = predict.predict_step(step, strategy, reduction, **options)
            times = {"latency_range_us": ranges.latency_range_us(step, strategy, reduction, **options)}
        except NotImplementedError as error:
            left_out[names["label"]] = str(error)
            continue
        times |= {"latency_us": predicted.latency_us, **dataclasses.asdict(predicted)}
        found.append(names | times | {"fits": predicted.memory_bytes <= machine.memory_bytes})
    return sorted(found, key=lambda one: one["latency_us"]), left_out


def prompt_strategies_of(
    step: DecodeStep, axis_sizes: tuple[int, ...], machine: Machine, *, has_gradient: bool
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns the same for attention within a prompt; a node's devices make two axes where they have two factors."""
    found, left_out = [], {}
    factors = tuple((node_axes(step.n_devices) or {}).values()) or axis_sizes
    for strategy in prompt.STRATEGIES:
        names = {"label": strategy_label(strategy, None), "strategy": strategy, "reduction": None}
        sizes = axis_sizes if len(axis_sizes) > 1 or strategy != "ulysses_ring" else factors
        try:
            predicted = prompt.predict_prompt(
                step, strategy, machine=machine, axis_sizes=sizes, has_gradient=has_gradient
            )
        except NotImplementedError as error:
            left_out[names["label"]] = str(error)
            continue
        # A least time by the datasheet has no range.
        times = {"latency_range_us": None, "latency_us": predicted.latency_us, **dataclasses.asdict(predicted)}
        found.append(names | times | {"fits": predicted.memory_bytes <= machine.memory_bytes})
    return sorted(found, key=lambda one: one["latency_us"]), left_out


def _rotations(step: DecodeStep, axis_sizes: tuple[int, ...], machine: Machine, *, is_prompt: bool) -> dict[str, float]:
    """Returns what each rotation that can run adds to a pass of the ring, in us; by `rotation=None` the least runs."""
    candidates = [name for name in rotation.ROTATIONS if name != "two_way" or step.num_kv_heads > 1]
    try:
        ring = predict.ring_pass(step, machine)
        if is_prompt:
            ring = prompt.ring_pass(step, axis_sizes, attention_us=prompt.products_us(step, machine) / step.n_devices)
        return rotation.predict_rotations(ring, machine, candidates) if step.n_devices > 1 else {}
    except NotImplementedError:
        return {}


def _check_exchanges(
    step: DecodeStep, reduction: str | tuple[str, ...] | None, axis_sizes: tuple[int, ...], machine: Machine
) -> None:
    """Raises NotImplementedError, with the reason in words, for a reduction that these devices cannot run."""
    names = reduction if isinstance(reduction, tuple) else (reduction,)
    if "fused" in names and machine.device_kind.startswith("TPU"):
        raise NotImplementedError("fused is a kernel for NVIDIA GPUs")
    if names[-1] == "fused" and len(axis_sizes) > 1 and "fused" not in machine.network.costs:
        raise NotImplementedError("fused writes to the memory of other GPUs, which it can inside a node only")
    if names[0] == "fused" and axis_sizes[0] > 1 and "fused" not in machine.node.costs:
        raise NotImplementedError("the time of fused is known on H200s, where it was measured, and on H100s")
    elements = step.packed_state_bytes // STATE_BYTES
    for name in names:
        limit = EXCHANGES[name].max_elements if name in EXCHANGES else None
        if limit is not None and elements > limit:
            raise NotImplementedError(f"{name} exchanges up to {limit:,} elements, and this state has {elements:,}")


def _choose(strategies: list[dict[str, Any]], step: DecodeStep, machine: Machine) -> tuple[str | None, str]:
    """Returns the label of the fastest that fits, and a sentence with the reason."""
    device = "chip" if machine.device_kind.startswith("TPU") else "GPU"
    fitting = [one for one in strategies if one["fits"]]
    if not fitting:
        needed, capacity = size(step.key_value_bytes_per_device), size(machine.memory_bytes)
        return None, f"Nothing fits: keys and values alone take {needed} of each {device}, which has {capacity}."
    best, *others = fitting
    if step.n_devices == 1:
        return best["label"], (
            f"One {device} holds all keys and exchanges nothing: there is nothing to reduce, and every strategy takes "
            f"{time(best['latency_us'])}."
        )
    exchanged = best["latency_us"] - best["local_us"]
    reason = f"{best['label']} is predicted to be the fastest that fits: {time(best['latency_us'])}"
    reason += f", {time(best['local_us'])} of it attention on each {device}"
    reason += f" and {time(exchanged)} the exchange between them" if exchanged else ", which hides all transfers"
    ring = next((one for one in strategies if one["strategy"].startswith("ring")), None)
    if others:
        reason += f"; next is {others[0]['label']} with {time(others[0]['latency_us'])}"
    if ring is not None and ring is not best:
        reason += f", and the faster ring takes {times_as(ring['latency_us'] / best['latency_us'])} times as long"
    return best["label"], reason + "."
