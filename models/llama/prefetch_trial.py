import functools, os
import jax, jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from tree_attn.local.hopper import launch

POINTS = os.environ.get("PREFETCH", "")  # e.g. "gate_up:2,down:2,qkv:2,kv:2": blocks of 256 columns per 8
PLAN = dict((p.split(":")[0], float(p.split(":")[1])) for p in POINTS.split(",") if p)
CTAS = int(os.environ.get("PREFETCH_CTAS", "32"))
TOKENS = []


def prefetch(name, weights, after):
    if name not in PLAN:
        return
    w = weights.reshape(-1, weights.shape[-1])
    TOKENS.append(_prefetch(w, after, num=int(PLAN[name] * 2**20)))


@functools.partial(jax.jit, static_argnames="num")
def _prefetch(w, after, num):
    """Of every 64 rows the first so many columns... interleaved: boxes of 64 rows x 256 columns, evenly chosen."""
    rows, cols = w.shape
    box_r, box_c = 64, 256
    panels = cols // box_c
    boxes = (rows // box_r) * panels
    count = min(boxes, num // (box_r * box_c * 2))

    def body(w_ref, after_ref, out_ref):
        cta = lax.axis_index("cta")

        def step(i, _):
            j = i * CTAS + cta

            @pl.when(j < count)
            def _():
                box = lax.div(j * boxes, count)
                r, c = lax.div(box, panels), lax.rem(box, panels)
                plgpu.async_prefetch(w_ref.at[pl.ds(r * box_r, box_r), pl.ds(c * box_c, box_c)])

        lax.fori_loop(0, -(-count // CTAS), step, None)

        @pl.when(cta == 0)
        def _():
            out_ref[...] = plgpu.layout_cast(jnp.zeros((128,), jnp.int32), plgpu.Layout.WG_STRIDED((128,), 1))

    return launch(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32), grid=(CTAS,), grid_names=("cta",), scratch_bytes=2048,
        name="prefetch",
    )(w, after)
