"""The cases of `tree-attn compare --prefill`: attention within a prompt by every strategy, and its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tree_attn import reference
from tree_attn.arguments import default_scale
from tree_attn.commands.compare.cases import Case
from tree_attn.commands.compare.trial import Laboratory
from tree_attn.cost import prompt
from tree_attn.cost.step import DecodeStep
from tree_attn.local import cudnn
from tree_attn.mesh import node_axes
from tree_attn.placement import ZIGZAG, storage_order
from tree_attn.ring_baseline import ring_attention, ulysses_attention
from tree_attn.tolerances import relative_out_tolerance

AUTOMATIC = "automatic"  # the kernel that the library chooses, hop by hop
CHECKED_TOKENS = 32  # of each device: the oracle takes one query at a time
ONE_DEVICE = "jax_nn"  # the strategy of `OneDeviceCase`
GRADIENT_ERROR = 4  # of a gradient over that of a result: three rounded products, and a rounded cotangent
STRIPED = 1  # every device has the same share of a causal prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptCase(Case):
    """One row: a strategy of `prompt.STRATEGIES`. `step.num_keys` are the tokens of the prompt.

    has_gradient: the forward and the backward pass are one call, which returns the gradients
    """

    has_gradient: bool = False

    @property
    def block_size(self) -> int | str:
        """The placement."""
        return ZIGZAG if self.strategy == "ring_zigzag" else STRIPED

    @property
    def obstacle(self) -> str | None:
        """Why these devices cannot run the case, or None."""
        try:
            prompt.check_runs(self.step, self.strategy, self.axis_sizes)
        except NotImplementedError as error:
            return str(error)
        return None

    @property
    def bytes_sent(self) -> float | None:
        """Bytes that a device sends in a forward pass; None where the case is not possible, or has gradients."""
        if self.obstacle or self.has_gradient:
            return None
        return sum(prompt.exchange_bytes_sent(self.step, self.strategy, self.axis_sizes))

    @property
    def peak_memory_bytes(self) -> int | None:
        """Bytes of a device's arrays in a forward pass; None where the case is not possible, or has gradients."""
        if self.obstacle or self.has_gradient:
            return None
        return prompt.memory_bytes(self.step, self.strategy, self.axis_sizes)

    def decode(self, mesh: Mesh) -> Callable:
        """Returns the function that is compared: of (query, key, value), or of the three as one for gradients."""
        implementation = None if self.implementation == AUTOMATIC else self.implementation
        options = dict(axis_name=self.axes, mesh=mesh, block_size=self.block_size, implementation=implementation)
        if self.strategy.startswith("ulysses"):
            attention = functools.partial(ulysses_attention, rotation=self.rotation, **options)
        else:
            attention = functools.partial(ring_attention, rotation=self.rotation, **options)
        return functools.partial(_gradients, attention) if self.has_gradient else attention


class OneDeviceCase(PromptCase):
    """The row of one GPU without this library: cuDNN's attention by `jax.nn`, forward and backward its own."""

    @property
    def obstacle(self) -> str | None:
        """Why this device cannot run the case, or None."""
        return cudnn.unavailable()

    @property
    def bytes_sent(self) -> float:
        """Bytes that the device sends: none."""
        return 0.0

    @property
    def peak_memory_bytes(self) -> None:
        """No prediction: the memory of cuDNN's attention is not modelled."""
        return None

    def decode(self, mesh: Mesh) -> Callable:
        """Returns the function that is compared, as `PromptCase` does."""
        attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        return functools.partial(_gradients, attention) if self.has_gradient else attention


def _gradients(attention: Callable, arrays):
    out, pull = jax.vjp(attention, *arrays)
    return pull(out)


def plan(
    steps: Sequence[DecodeStep], implementations: Sequence[str | None], *, has_gradient: bool = False
) -> list[PromptCase]:
    """Lists all cases: for each step and implementation, every strategy; on one device cuDNN's own attention too."""
    cases = []
    for step in steps:
        factors = tuple((node_axes(step.n_devices) or {}).values()) or (step.n_devices,)
        for name in implementations:
            for strategy in prompt.STRATEGIES:
                sizes = factors if strategy == "ulysses_ring" else (step.n_devices,)
                cases.append(
                    PromptCase(
                        strategy=strategy, reduction=None, implementation=name or AUTOMATIC, step=step,
                        axis_sizes=sizes, has_gradient=has_gradient, rotation=prompt.ROTATION_OF.get(strategy),
                    )
                )  # fmt: skip
        if step.n_devices == 1:
            cases.append(
                OneDeviceCase(
                    strategy=ONE_DEVICE, reduction=None, implementation="cudnn", step=step, axis_sizes=(1,),
                    has_gradient=has_gradient,
                )
            )  # fmt: skip
    return cases


class PromptLaboratory(Laboratory):
    """A laboratory for prompts: queries are sharded too, and a short prompt stands for the long one in the check."""

    def _make_arrays(self, case: Case, mesh: Mesh) -> tuple:
        step, along = case.step, NamedSharding(mesh, P(None, case.axes))

        @functools.partial(jax.jit, out_shardings=along)
        def draw():
            keys = jax.random.split(jax.random.key(self.seed), 3)
            return tuple(jax.random.normal(key, shape, step.dtype) for key, shape in zip(keys, _shapes(step)))

        return _as_arguments(case, draw())

    def _compare_with_oracle(self, case: Case, output: Any) -> dict[str, Any]:
        tokens = min(case.step.num_keys, CHECKED_TOKENS * case.step.n_devices)
        short = dataclasses.replace(case, step=dataclasses.replace(case.step, num_keys=tokens, batch=1))
        mesh, along = case.mesh(self.devices), P(None, case.axes)
        rng = np.random.default_rng(self.seed)
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in _shapes(short.step)]
        arrays = [np.asarray(x.astype(jnp.dtype(short.step.dtype))) for x in arrays]
        order = storage_order(tokens, case.step.n_devices, case.block_size)
        sharding = NamedSharding(mesh, along)
        stored = tuple(
            jax.make_array_from_callback(x.shape, sharding, lambda part, x=x: x[:, order][part]) for x in arrays
        )
        replicated = NamedSharding(mesh, P())
        run = jax.jit(lambda *arguments: case.decode(mesh)(*arguments), out_shardings=replicated)
        found = jax.tree.leaves(run(*_as_arguments(case, stored)))
        actual = [np.asarray(x.addressable_data(0)).astype(np.float64) for x in found]

        def errors() -> list[tuple[float, float]]:
            expected = expected_results(*arrays, has_gradient=case.has_gradient)
            return [
                (np.abs(one - wanted[:, order]).max(), _tolerance(case, wanted))
                for one, wanted in zip(actual, expected, strict=True)
            ]

        error, tolerance = self._verdict(case, errors, num_keys=tokens)
        return {
            "max_abs_error": error, "tolerance": tolerance, "oracle_num_keys": tokens, "oracle_batch": 1,
            "oracle_num_kv_heads": case.step.num_kv_heads,
        }  # fmt: skip


def _tolerance(case: Case, expected: np.ndarray) -> float:
    """Returns the error allowed."""
    return (GRADIENT_ERROR if case.has_gradient else 1) * relative_out_tolerance(case.step.dtype, expected)


def expected_results(query, key, value, *, has_gradient: bool) -> list[np.ndarray]:
    """Returns in float64 causal attention within a prompt; or its gradients, where its result is the cotangent."""
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    out, lse = reference.attention(query, key, value, is_causal=True)
    if not has_gradient:
        return [out]
    num_tokens, (num_kv_heads, dim) = query.shape[1], key.shape[2:]
    by_group = lambda x: x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])
    scale = default_scale(None, dim)
    grouped, of_out, lse = by_group(query), by_group(out), by_group(lse)
    logits = np.einsum("btkgh,bskh->btkgs", grouped, key) * scale
    sees = np.tri(num_tokens, dtype=bool)[None, :, None, None, :]
    weights = np.where(sees, np.exp(np.where(sees, logits, 0.0) - lse[..., None]), 0.0)
    of_weights = np.einsum("btkgh,bskh->btkgs", of_out, value) - (of_out**2).sum(-1, keepdims=True)
    of_logits = weights * of_weights * scale
    of_query = np.einsum("btkgs,bskh->btkgh", of_logits, key).reshape(query.shape)
    of_key = np.einsum("btkgs,btkgh->bskh", of_logits, grouped)
    return [of_query, of_key, np.einsum("btkgs,btkgh->bskh", weights, of_out)]


def _shapes(step: DecodeStep) -> list[tuple[int, ...]]:
    """Returns the shapes of query, key and value."""
    return [(step.batch, step.num_keys, heads, step.head_dim) for heads in (step.num_heads, *2 * (step.num_kv_heads,))]


def _as_arguments(case: Case, arrays: tuple) -> tuple:
    """Returns the arguments of `case.decode`."""
    return (arrays,) if case.has_gradient else arrays
