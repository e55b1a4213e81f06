"""The scores that a call of `tree-attn eval` makes: its checked arguments."""

import argparse
import dataclasses
from typing import Any

from tree_attn.arguments import one_of
from tree_attn.commands.options import check_at_least, integers_in
from tree_attn.models.llama.evaluation.methods import Method, methods_for
from tree_attn.models.llama.evaluation.tasks import MIN_PASSAGE, TASKS, Sizes

Group = tuple[str, Sizes, int | None]  # task, sizes, and depth in percent; None for a task without depths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Checked arguments.

    Attributes:
      tasks, ratios, depths: as on the command line.
      num_kept: keys that SparQ keeps; None for a sixteenth of each context.
      sizes: of the samples, one for each context.
      has_ablations: SparQ alone, also with other temperatures and local windows.
    """

    tasks: list[str]
    ratios: list[int]
    num_kept: list[int] | None
    depths: list[int]
    sizes: list[Sizes]
    has_ablations: bool

    def sweep(self) -> dict[str, Any]:
        """Returns the facts that the rows of one file have in common.

        For one context they are those of the files that were written before a call could have several.
        """
        contexts = [sizes.context for sizes in self.sizes]
        common = dataclasses.asdict(self.sizes[0]) | {"tasks": self.tasks, "ratios": self.ratios, "kept": self.num_kept}
        if len(contexts) > 1:
            common["context"] = contexts
        elif self.num_kept is None:
            common["kept"] = self.num_kept_of(contexts[0])
        common |= {"depths": self.depths} if "needle_at_depth" in self.tasks else {}
        return common | ({"ablations": True} if self.has_ablations else {})

    def cases(self, context: int, head_dim: int) -> dict[Method, int]:
        """Returns the methods for a context, and the compression that was requested for each."""
        found = {Method(name="dense"): 1}
        for ratio in self.ratios:
            for num_kept in self.num_kept_of(context):
                methods = methods_for(1 / ratio, context, head_dim, num_kept)
                if self.has_ablations:
                    methods = [one for method in methods if method.is_sparq for one in (method, *method.ablations())]
                found |= {method: ratio for method in methods}
        return found

    def num_kept_of(self, context: int) -> list[int]:
        """Returns the numbers of keys that SparQ keeps of a context."""
        return [context // 16] if self.num_kept is None else self.num_kept

    def groups(self) -> list[Group]:
        """Returns the groups of samples: those of a group are read together."""
        depths = {task: self.depths if TASKS[task].has_depth else [None] for task in self.tasks}
        return [(task, sizes, depth) for task in self.tasks for sizes in self.sizes for depth in depths[task]]


def make_plan(args: argparse.Namespace) -> Plan:
    """Checks the arguments.

    Raises:
      ValueError: an argument is wrong; names the option.
    """
    if args.cache_dtype is not None:
        one_of("--cache-dtype", args.cache_dtype, ("float8_e4m3fn",))  # sparse attentions take no scales
    tasks = [name.strip() for name in args.tasks.split(",")]
    for task in tasks:
        one_of("--tasks", task, tuple(TASKS))
    ratios, contexts = integers_in("--ratios", args.ratios), integers_in("--context", args.context)
    num_kept = None if args.kept is None else integers_in("--kept", args.kept)
    if "needle_at_depth" in tasks and num_kept is not None and len(num_kept) > 1:
        raise ValueError(f"--kept must be one number for needle_at_depth, got {args.kept!r}")
    depths = integers_in("--depths", args.depths, minimum=0, maximum=100)
    check_at_least(args, samples=1, batch=1, tail=1)
    if args.ablations and "needle_at_depth" in tasks:
        raise ValueError(
            f"--tasks must not have needle_at_depth with --ablations, for its heatmap has one place for each method, "
            f"got {args.tasks!r}"
        )
    if min(contexts) < args.tail + MIN_PASSAGE:
        minimum = f"--tail + {MIN_PASSAGE} = {args.tail + MIN_PASSAGE}"
        raise ValueError(f"--context must be at least {minimum}, got {min(contexts)}")
    sizes = [Sizes(context=context, tail=args.tail, samples=args.samples) for context in contexts]
    return Plan(tasks=tasks, ratios=ratios, num_kept=num_kept, depths=depths, sizes=sizes, has_ablations=args.ablations)
