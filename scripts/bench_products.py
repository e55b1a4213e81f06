"""Times products of few rows with a Llama's weights on one GPU: the kernel beside XLA's products.

    python3 scripts/bench_products.py check                                             # exact? no row is written
    python3 scripts/bench_products.py time --out docs/results/products_h200/table.jsonl
    python3 scripts/bench_products.py time --parts layer --ways few_rows --layouts num_stages=4,block_in=128

A part is one product of a decoding step with what goes before and after it: the norm, SiLU and gate, the residual.
`layer` is all four of a layer, with a slice in attention's place. Steps follow one another in a chain, each on the
result of the one before, and on other weights than the L2 cache holds. Limits are the weights' bytes at the datasheet's
4.8 TB/s; the share is the limit over a step's time in the chain, launch gaps and the chain's own copies included.
`kernels` of a row has the time of each kernel by itself. The way "few_rows early" (JAX 0.12) reads weights before the
previous kernel has ended. The way "chain" also runs the three products after attention in one launch, and so has the
part `layer` only.
"""

import argparse
import dataclasses
import functools
import math
import pathlib

from benching import MissingRows

from tree_attn.measure.steps.chains import normals, time_steps
from tree_attn.measure.steps.step import READ_GB_PER_S, ROTATE_BYTES

ROWS = (1, 2, 4, 8, 16)
WAYS = ("xla", "few_rows", "few_rows early", "chain")
PARTS = ("query_key_value", "output", "gate_up", "down", "head", "layer")
LABELS = ("config", "part", "rows", "way", "layout")
EPS = 1e-5
# Of the largest result: x is rounded after its norm, and the result is.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A product with weights `[parts, out_features, in_features]`; a residual is as wide as its result."""

    out_features: int
    in_features: int
    parts: int = 1
    is_normed: bool = False
    is_added: bool = False
    out_dtype: str | None = None

    def weights(self, draw) -> tuple:
        """Returns weights, and the norm's scale or None."""
        scale = draw(self.in_features) if self.is_normed else None
        return draw(self.parts, self.out_features, self.in_features) * self.in_features**-0.5, scale

    def by_xla(self, x, weights, scale, residual):
        """Multiplies as the model's layers do."""
        import jax
        import jax.numpy as jnp

        if self.is_normed:
            wide = x.astype(jnp.float32)
            normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPS)
            x = normed.astype(x.dtype) * scale[None]
        flat = weights.reshape(-1, self.in_features)
        y = jnp.einsum("bi,oi->bo", x, flat, preferred_element_type=self.out_dtype)
        if self.parts == 2:
            gate, up = y[:, : self.out_features], y[:, self.out_features :]
            y = jax.nn.silu(gate) * up
        return y if residual is None else residual + y

    def by_kernel(self, x, weights, scale, residual, **options):
        """Multiplies by the kernel."""
        from tree_attn.kernels.few_rows_call import few_rows_product

        options |= {"activation": "silu" if self.parts == 2 else None, "out_dtype": self.out_dtype}
        weights = weights if self.parts == 2 else weights[0]
        return few_rows_product(x, weights, scale=scale, eps=EPS, residual=residual, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A part of a model's step, for so many rows."""

    config: str
    part: str
    rows: int

    @property
    def products(self) -> list[Product]:
        """The product of the part, or the four of a layer."""
        from tree_attn.models.llama.presets import preset

        config = preset(self.config)
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        of_part = {
            "query_key_value": Product(
                out_features=heads + 2 * config.num_kv_heads * config.head_dim, in_features=hidden, is_normed=True
            ),
            "output": Product(out_features=hidden, in_features=heads, is_added=True),
            "gate_up": Product(out_features=config.intermediate_size, in_features=hidden, parts=2, is_normed=True),
            "down": Product(out_features=hidden, in_features=config.intermediate_size, is_added=True),
        }
        head = Product(out_features=config.vocab_size, in_features=hidden, is_normed=True, out_dtype="float32")
        return list(of_part.values()) if self.part == "layer" else [(of_part | {"head": head})[self.part]]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, which a step reads once."""
        return sum(2 * math.prod((p.parts, p.out_features, p.in_features)) for p in self.products)

    @property
    def limit_us(self) -> float:
        """The time to read the weights at the datasheet's rate."""
        return self.weight_bytes / READ_GB_PER_S / 1e3

    @property
    def copies(self) -> int:
        """Sets of weights, of which the next is not in the L2 cache."""
        return max(2, -(-int(ROTATE_BYTES) // self.weight_bytes))

    def x(self, draw):
        """Returns the step's input, as wide as the first product's."""
        return draw(self.rows, self.products[0].in_features)

    def step(self, way: str, layout: dict):
        """Returns `step(x, *weights) -> x`, all of the part's products in order."""
        from tree_attn.kernels.few_rows_chain_call import AfterAttention, Norm
        from tree_attn.kernels.overlap import overlaps

        is_chained = way == "chain"
        options = {"is_early": way.endswith("early") or (is_chained and overlaps()), "layout": layout}
        products = self.products

        def step(x, *weights):
            inputs = [x]  # of the norms: a residual is the input of the norm before it
            y = x
            for product, (matrix, scale) in zip(products, weights):
                y = _as_wide(y, product.in_features)
                if is_chained and product.is_added:
                    (output, _), (gate_up, scale), (down, _) = weights[1:]
                    arrays = dict(attended=y[:, None, None], x=inputs[0][:, None], down=down[0])
                    arrays |= dict(output=output[0][:, None])
                    norm = Norm(scale=scale, eps=EPS)
                    return AfterAttention(**arrays, gate_up=gate_up, norm=norm, activation="silu").run()[:, 0]
                inputs = [y] if product.is_normed else inputs
                residual = _as_wide(inputs[0], product.out_features) if product.is_added else None
                call = product.by_xla if way == "xla" else functools.partial(product.by_kernel, **options)
                y = call(y, matrix, scale, residual)
            return _as_wide(y, x.shape[1]).astype(x.dtype)

        return step


def main() -> int:
    """Checks or times every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--configs", default="llama-3.1-8b,llama-3.2-1b", help="published shapes")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--layouts", default="", help="e.g. num_stages=4,block_in=128+num_stages=6; empty: the chosen")
    parser.add_argument("--iters", type=int, default=16, help="dispatches of each chain")
    parser.add_argument("--out", type=pathlib.Path, help="JSONL file, appended to; rows in it are not made again")
    args = parser.parse_args()
    if args.what == "time" and args.out is None:
        parser.error("time needs --out")
    from tree_attn.kernels.overlap import overlaps

    missing = None if args.what == "check" else MissingRows(args.out, LABELS)
    ways = [way for way in args.ways.split(",") if overlaps() or not way.endswith("early")]
    has_way = lambda case, way: case.part == "layer" or way != "chain"
    num_wrong = 0
    for case in cases(args):
        for way, layout in runs([way for way in ways if has_way(case, way)], args.layouts):
            if missing is None:
                num_wrong += not check(case, way, layout)
                continue
            labels = dataclasses.asdict(case) | {"way": way, "layout": layout, "dtype": "bfloat16"}
            title = f"{case.config} {case.part} {case.rows} {way} {layout}"
            missing.add(
                labels | {"limit_us": case.limit_us}, functools.partial(measure, case, way, layout, args.iters), title
            )
    return 1 if num_wrong else 0


def cases(args) -> list[Case]:
    """Returns the cases that the arguments name, in their order."""
    split = lambda text: text.split(",")
    return [
        Case(config=config, part=part, rows=int(rows))
        for config in split(args.configs)
        for part in split(args.parts)
        for rows in split(args.rows)
    ]


def runs(ways: list[str], layouts: str) -> list[tuple[str, str]]:
    """Returns ways with layouts; XLA's products and a chain's have none."""
    return [(way, layout) for way in ways for layout in ([""] if way in ("xla", "chain") else layouts.split(","))]


def parse_layout(text: str) -> dict[str, int]:
    """Returns the layout's fields that `num_stages=4+block_in=128` names."""
    return {name: int(value) for name, value in (part.split("=") for part in text.split("+") if part)}


def check(case: Case, way: str, layout: str) -> bool:
    """Returns whether a step is XLA's with float32 sums, and prints how near it is."""
    import jax
    import jax.numpy as jnp

    x, (weights,) = _arrays(case, copies=1)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(case.step("xla", {}))(wide[0], *wide[1])
    found = jax.jit(case.step(way, parse_layout(layout)))(x, *weights).astype(jnp.float32)
    error = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
    is_right = error <= TOLERANCE  # not if it is NaN
    print(
        f"{'ok    ' if is_right else 'WRONG '} {case.config} {case.part} {case.rows} {way} {layout}: {error:.1e}",
        flush=True,
    )
    return is_right


def measure(case: Case, way: str, layout: str, n_iters: int) -> dict:
    """Returns the fields of a row; one that cannot be measured has an error."""
    try:
        fields = time_steps(case.step(way, parse_layout(layout)), *_arrays(case, case.copies), n_iters)
    except Exception as error:  # of a layout that does not fit, or a compiler
        return {"error": repr(error)[:1000]}
    share = case.limit_us / fields["chain_us_median"]
    print(f"{share:.0%} of 4.8 TB/s:", end=" ")
    return fields | {"share": share}


def _arrays(case: Case, copies: int):
    draw = normals()
    return case.x(draw), [tuple(product.weights(draw) for product in case.products) for _ in range(copies)]


def _as_wide(y, features: int):
    """Returns the first `features`, or all of them as often as it takes."""
    import jax
    import jax.numpy as jnp

    if y.shape[1] < features:
        y = jnp.tile(y, (1, -(-features // y.shape[1])))
    elif y.shape[1] > features:  # else XLA would multiply by the weights of these features alone
        y = jax.lax.optimization_barrier(y)
    return y[:, :features]


if __name__ == "__main__":
    raise SystemExit(main())
