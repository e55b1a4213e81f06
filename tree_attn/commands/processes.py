"""The options by which a command runs as several processes; under `srun` and `torchrun` none of them is needed."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, to those commands that can run as several processes."""
    group = parser.add_argument_group("several processes (found by themselves under srun and torchrun)")
    group.add_argument("--coordinator-address", metavar="HOST:PORT", help="of process 0")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I")
    group.add_argument(
        "--local-device-ids", type=_integers, metavar="I,J", help="this process's accelerators (default: its part)"
    )


def join(args: argparse.Namespace, n_devices: int | None):
    """`tree_attn.initialize` with these options; NCCL then makes the most of links."""
    from tree_attn.cluster.join import initialize
    from tree_attn.measure import links

    links.spread_transfers()
    several = (args.coordinator_address, args.num_processes, args.process_id)
    return initialize(*several, args.local_device_ids, n_devices=n_devices)


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers such as 0,1, got {text!r}") from None
