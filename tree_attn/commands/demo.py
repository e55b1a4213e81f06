"""`tree-attn demo`: one model answers under three attentions, token for token the same."""

import argparse
import dataclasses
import sys

HELP = """\
A real Llama (SmolLM2, 135M parameters) answers a prompt three times: its KV cache sharded over devices and read by Tree
Attention, the same cache read by Ring Attention, and everything on one device. The tokens must be the same, or the
exit status is 1. Then it prints what each attention costs.

No GPU is needed: without accelerators, devices are emulated on the CPU. Emulated devices share your cores, so the times
show that everything runs and not how fast it would be; memory and communication are those of real devices.

examples:
  tree-attn demo
  tree-attn demo --prompt "Why is the sky blue?" --max-new-tokens 60 --devices 4
"""

PROMPT = "What is the capital of France? Answer in one sentence."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn demo`."""
    parser.add_argument("--devices", type=int, metavar="N", help="default: all accelerators, or 8 emulated")
    parser.add_argument("--prompt", default=PROMPT, help=f"question to the model; default: {PROMPT}")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="stop after N tokens; default 48")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2 (default), a Hugging Face folder or id, or a .gguf file"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The tokens of one attention, and the cost of its step for one token on each device."""

    attention: str
    n_devices: int
    new_ids: list[int]
    per_token_s: float | None
    peak_memory_bytes: int | None
    collectives: int
    collectives_attention: int
    bytes_sent: float
    bytes_sent_attention: float


def run(args: argparse.Namespace) -> int:
    """Runs the three and prints answer and table; returns 0, or 1 when their tokens differ."""
    # These load JAX, which --help does without.
    import jax
    import jax.numpy as jnp

    from tree_attn.commands import session
    from tree_attn.models.llama.checkpoint.open import move
    from tree_attn.models.llama.generation.request import check_request

    devices = session.choose_devices(args.devices)
    many, one = session.Place(devices=devices), session.Place(devices=devices[:1])
    checkpoint = session.open_with_progress(args.model)
    prompt_ids = _encode(checkpoint.tokenizer, args.prompt)
    check_request(checkpoint.config, [prompt_ids], args.max_new_tokens)
    sharding = many.sharding(checkpoint.config)
    # Whole float32 products: with fewer digits, near ties would fall differently on one device and on many.
    with jax.default_matmul_precision("float32"):
        model = session.load_with_progress(checkpoint, sharding, jnp.float32)
        request = (prompt_ids, args.max_new_tokens, checkpoint.tokenizer.stop_ids)
        outcomes = [_try(name, model, *request) for name in ("tree", "ring")]
        alone = move(model, one.sharding(checkpoint.config))
        outcomes.append(_try("single", alone, *request))
    _report(args.prompt, checkpoint.tokenizer, outcomes, is_emulated=devices[0].platform == "cpu")
    return _compare(outcomes)


def _encode(tokenizer, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _try(name: str, model, prompt_ids: list[int], max_new_tokens: int, stop_ids) -> Outcome:
    from rich import console, progress

    from tree_attn.models.llama import Generator, by_name, generate

    generator = Generator(model, by_name(name, model.sharding))
    stderr = console.Console(stderr=True)
    with progress.Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(f"{name}: compiling", total=None)
        programs = generator.compile([prompt_ids], max_new_tokens)
        bar.update(task, description=f"{name}: generating", total=max_new_tokens)
        (result,) = generate(
            generator, [prompt_ids], max_new_tokens, stop_ids=stop_ids, on_token=lambda *_: bar.advance(task)
        )
    return Outcome(
        attention=name,
        n_devices=model.sharding.mesh.size,
        new_ids=result.new_ids,
        per_token_s=result.per_token_s,
        **_costs(programs.decode),
    )


def _costs(compiled) -> dict[str, float | int | None]:
    """Returns memory and communication of the compiled step for one token, per device, with attention's share."""
    from tree_attn.measure import hlo, hlo_text
    from tree_attn.measure.memory import compiled_memory

    text = compiled.as_text()
    instructions = [one for computation in hlo_text.parse(text).computations.values() for one in computation.values()]
    # The names of the model's scopes are in every instruction's metadata.
    in_attention = {one.name for one in instructions if "/attend/" in one.attributes}
    everything = hlo.collectives(text)
    attention = [collective for collective in everything if collective.name in in_attention]
    memory = compiled_memory(compiled)
    return {
        "peak_memory_bytes": None if memory is None else memory.peak_bytes,
        "collectives": sum(collective.count for collective in everything),
        "collectives_attention": sum(collective.count for collective in attention),
        "bytes_sent": hlo.total_bytes_sent_per_device(everything),
        "bytes_sent_attention": hlo.total_bytes_sent_per_device(attention),
    }


def _report(prompt: str, tokenizer, outcomes: list[Outcome], *, is_emulated: bool) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = Console()
    # Text, not markup: a model may well write square brackets.
    answer = Text(tokenizer.decode(outcomes[0].new_ids).strip())
    console.print(Panel(answer, title=Text(prompt), title_align="left"))
    table = Table(title="one new token, per device")
    for heading in ("attention", "devices", "time", "peak memory", "collectives\n(attention)", "sent\n(attention)"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for outcome in outcomes:
        table.add_row(
            outcome.attention,
            str(outcome.n_devices),
            "-" if outcome.per_token_s is None else f"{outcome.per_token_s * 1e3:.0f} ms",
            "-" if outcome.peak_memory_bytes is None else f"{outcome.peak_memory_bytes / 2**20:.1f} MiB",
            f"{outcome.collectives} ({outcome.collectives_attention})",
            f"{outcome.bytes_sent / 1024:.0f} KiB ({outcome.bytes_sent_attention / 1024:.0f})",
        )
    console.print(table)
    console.print(
        "Weights: heads, MLP and vocabulary are spread over the devices too, where they divide; that is what the "
        "collectives outside attention do.",
        style="dim",
    )
    if is_emulated:
        console.print("Emulated devices share this machine's cores: their times say nothing of real ones.", style="dim")


def _compare(outcomes: list[Outcome]) -> int:
    expected = outcomes[0].new_ids
    wrong = [outcome for outcome in outcomes if outcome.new_ids != expected]
    if not wrong:
        names = ", ".join(outcome.attention for outcome in outcomes)
        print(f"{names}: the same {len(expected)} tokens")
        return 0
    for outcome in wrong:
        step = _first_difference(expected, outcome.new_ids)
        print(f"{outcome.attention} differs from {outcomes[0].attention} from new token {step} on", file=sys.stderr)
    return 1


def _first_difference(expected: list[int], actual: list[int]) -> int:
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))
