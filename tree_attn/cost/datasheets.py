"""Machines that were not measured: rates of datasheets, each times what an H200 reaches of its own datasheet.

`datasheets.json` has the peaks of the datasheets: memory, its bandwidth, dense bfloat16 products, and the bytes per
second that one device sends to a neighbour. Each has the document that it is from: "source", or "other_sources" where
it differs. Launches and latencies are those measured on H200s, whatever the links.
"""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

from tree_attn.cost import machine
from tree_attn.cost.machine import AlphaBeta, ExchangeCost, LinkClass, Machine

FILE = pathlib.Path(__file__).with_name("datasheets.json")
MEASURED = "NVIDIA H200"
CONSTANTS = ("memory_bytes", "read_bytes_per_s", "product_flops_per_s", "link_bytes_per_s")
WITH_FUSED = ("H100",)  # the exchange kernel was run on H200s only; an H100 has the same links and instructions


def names() -> tuple[str, ...]:
    """Returns the short names: "H100", "TPU v5e". The H200, which was measured, is not among them."""
    return tuple(name for name, sheet in _sheets().items() if sheet["device_kind"] != MEASURED)


def rates(name: str) -> dict[str, float]:
    """Returns the peaks of a device's datasheet: `read_bytes_per_s`, dense bfloat16 `product_flops_per_s`.

    Args:
      name: a short name or a `jax.Device.device_kind`, as in `load`; the H200 too.

    Raises:
      KeyError: there is no such datasheet.

    Example:
      >>> rates("NVIDIA H200")["read_bytes_per_s"]
      4800000000000
    """
    return {rate: constants(name)[rate] for rate in ("read_bytes_per_s", "product_flops_per_s")}


def constants(name: str) -> dict[str, float]:
    """Returns the `CONSTANTS` of a datasheet; arguments and errors as `rates`."""
    return {constant: _sheet(name)[constant] for constant in CONSTANTS}


def sources(name: str) -> dict[str, str]:
    """Returns the document that each of the `CONSTANTS` is from; arguments and errors as `rates`.

    Example:
      >>> sources("A100")["read_bytes_per_s"]
      "NVIDIA's datasheet of the A100 80GB SXM"
    """
    sheet = _sheet(name)
    return {constant: sheet["source"] for constant in CONSTANTS} | sheet.get("other_sources", {})


def load(name: str) -> Machine | None:
    """Returns the machine of a datasheet; None if there is none. Its sources begin with "assumed".

    Args:
      name: a short name or a `jax.Device.device_kind`; letters' case, spaces and signs do not matter.

    Example:
      >>> load("h100").device_kind
      'NVIDIA H100 SXM'
    """
    sheet = _find(name)
    return None if sheet is None or sheet["device_kind"] == MEASURED else _machine(sheet)


def _machine(sheet: dict[str, Any]) -> Machine:
    known, reference = machine.load(MEASURED), _sheets()["H200"]
    part = lambda rate: sheet[rate] / reference[rate]
    costs = {
        name: ExchangeCost(
            round_us=cost.round_us,
            lines=tuple(
                AlphaBeta(alpha_us=line.alpha_us, bytes_per_s=line.bytes_per_s * part("link_bytes_per_s"))
                for line in cost.lines
            ),
        )
        for name, cost in known.node.costs.items()
        if name != "fused" or sheet["name"] in WITH_FUSED
    }
    rate = f"{sheet['links']}, {sheet['link_bytes_per_s'] / 1e9:g} GB/s each way"
    return dataclasses.replace(
        known,
        device_kind=sheet["title"],
        gpus_per_node=sheet["devices_per_node"],
        memory_bytes=sheet["memory_bytes"],
        read_bytes_per_s=known.read_bytes_per_s * part("read_bytes_per_s"),
        node=LinkClass(source=f"assumed: {rate} by the datasheet, latencies of H200s; not measured", costs=costs),
        fitted_devices=0,
        provenance={
            "datasheet": f"{sheet['source']}: {sheet['memory_bytes'] / 1e9:g} GB, "
            f"{sheet['read_bytes_per_s'] / 1e9:,g} GB/s. Predictions take the share of it that an H200 "
            "was measured to reach of its own datasheet"
        },
    )


def _find(name: str) -> dict[str, Any] | None:
    return next((sheet for sheet in _sheets().values() if _plain(name) in _names_of(sheet)), None)


def _sheet(name: str) -> dict[str, Any]:
    sheet = _find(name)
    if sheet is None:
        raise KeyError(name)
    return sheet


def _names_of(sheet: dict[str, Any]) -> set[str]:
    short = sheet["title"].removeprefix("NVIDIA ").removesuffix(" SXM")  # "A100 80GB"
    return {_plain(name) for name in (sheet["device_kind"], sheet["title"], short, sheet["name"])} | {
        _plain(f"NVIDIA {sheet['name']}")
    }


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


@functools.cache
def _sheets() -> dict[str, dict[str, Any]]:
    return {sheet["name"]: sheet for sheet in json.loads(FILE.read_text())}
