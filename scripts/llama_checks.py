"""Decoding steps of a small Llama: products by the kernel beside XLA's, and beside float32, for gpu_check.py."""

import concurrent.futures
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from oracle_case import is_same_everywhere

# Of the largest logit. Each way rounds to bfloat16 where it does, in two layers.
TOLERANCE = 0.03
# New tokens begin a KV tile, and CTAs share those of a sequence.
PROMPT, STEPS, CAPACITY = 766, 4, 1024
WAYS = ("mosaic_gpu", "mosaic_gpu_chain")
PICKED = "picked"  # by `products=None`: over devices a chain whose attention is a launch of its own
# Of a chain's products gate and up have fewer CTAs than others, and steps go round the ring more than once.
SMALL = dict(intermediate_size=1792, num_heads=16, head_dim=64)
# Those of Llama 3.1 8B. With these and the small ones, over two devices, CTAs add up what each device gives of the
# output and of down, for one row and for two.
LARGE = dict(intermediate_size=14336, num_heads=32, head_dim=128)
# Those of Llama 3.2 1B: CTAs add up the output so, and get down by a broadcast.
TINY = dict(hidden_size=2048, intermediate_size=8192, num_heads=32, head_dim=64)
# Sequences, new tokens of each, the model's window, and its sizes.
CASES = (
    (1, 1, None, SMALL), (2, 1, None, SMALL), (3, 1, None, SMALL), (4, 1, None, SMALL), (1, 3, None, SMALL),
    (2, 1, 100, SMALL), (8, 1, None, SMALL), (16, 1, None, SMALL), (1, 4, None, SMALL), (3, 3, None, SMALL),
    (1, 1, None, LARGE), (2, 1, None, LARGE), (3, 1, None, LARGE), (1, 1, None, TINY), (2, 1, None, TINY),
    (4, 1, None, LARGE),
)  # fmt: skip


def llama_checks(num_devices: int) -> Iterator[dict]:
    """Checks logits of some steps after a prompt; every way reads XLA's tokens, after a prompt that XLA read."""
    import jax
    import jax.numpy as jnp

    from tree_attn import make_mesh
    from tree_attn.models.llama import LlamaConfig, spread_over
    from tree_attn.models.llama.product_choice import OVER_GPUS

    mesh = make_mesh({"seq": num_devices})
    for batch, tokens, window, sizes in CASES:
        fixed = dict(num_layers=2, num_kv_heads=8, vocab_size=4096, max_position=1024, window=window)
        shape = LlamaConfig(**{"hidden_size": 4096} | fixed | sizes)
        sharding = spread_over(shape, mesh)
        # With a window, and of several tokens, attention is a launch of its own in any case.
        has_choice = num_devices > 1 and sharding.is_on_gpus and window is None
        has_choice &= tokens == 1 and batch <= OVER_GPUS["max_rows"]
        ways = (*WAYS, PICKED) if has_choice else WAYS
        steps = _Steps(shape, sharding, batch, tokens)
        steps.compile([("xla", jnp.bfloat16), *((name, jnp.bfloat16) for name in ways)])
        by_xla, followed, _ = steps.run("xla", jnp.bfloat16, None)
        with jax.default_matmul_precision("highest"):
            exact, *_ = steps.run("xla", jnp.float32, followed)
        for name in ways:
            labels = dict(what="llama", how=name, implementation=name, batch=batch, num_queries=tokens)
            labels |= {} if window is None else {"window": window}
            labels |= {} if sizes is SMALL else {"sizes": sizes}
            try:
                found, _, calls = steps.run(name, jnp.bfloat16, followed)
            except NotImplementedError as error:
                yield labels | dict(passed=None, reason=str(error))
                continue
            # Memory that kernels are to write first holds NaN in the second run.
            jax.block_until_ready(jnp.full(1 << 28, jnp.nan))
            again, *_ = steps.run(name, jnp.bfloat16, followed)
            largest = float(jnp.abs(exact).max())
            error, of_xla = (float(jnp.abs(x - exact).max()) / largest for x in (found, by_xla))
            same = bool(jnp.array_equal(found, again)) and is_same_everywhere(found)
            expected = _expected_calls(name, sharding, (batch, tokens, window), shape)
            passed = error <= TOLERANCE and same and calls == expected  # not if it is NaN
            row = dict(max_relative_error=error, of_xla=of_xla, tolerance=TOLERANCE, same_bits=same, calls=calls)
            yield labels | row | dict(passed=bool(passed))


def _expected_calls(name: str, sharding, case: tuple, shape) -> list[int]:
    """Returns how often a step of two layers calls products, those that end in a sum, chains, and launches of layers.

    Over devices a layer's two sums are ends, but for those of more numbers than devices exchange.
    """
    import jax

    from tree_attn.kernels.few_rows_broadcast import MAX_ROWS
    from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED
    from tree_attn.reduce.activations import exchanges

    (batch, tokens, window), is_alone = case, sharding.mesh.size == 1
    if not is_alone and not exchanges(batch * tokens * shape.hidden_size, ("seq",), sharding.mesh):
        return [7, 0, 0, 0]  # of each layer heads, output, gate and up, down; and the head
    if name in ("mosaic_gpu_chain", PICKED):
        # The head; over devices the first heads too, where attention is a launch of its own; a chain of each layer.
        is_whole = name != PICKED and tokens == 1 and batch <= MAX_ROWS and window is None
        # Where CTAs lack parts of products after attention, and over devices, layers are launches of their own.
        have_parts = shape.intermediate_size != SMALL["intermediate_size"]
        if is_whole and is_alone and have_parts and jax.__version_info__ >= KERNELS_ARE_RECORDED:
            return [1, 0, 0, 1]
        return [1 if is_alone or is_whole else 2, 0, 2, 0]
    return [7, 0, 0, 0] if is_alone else [5, 4, 0, 0]


class _Steps:
    """Steps of a model by its products, after a prompt that XLA reads; what is compiled once runs again."""

    def __init__(self, config, sharding, batch: int, tokens: int):
        import jax

        from tree_attn.models.llama import by_name

        self._config, self._sharding, self._batch, self._tokens = config, sharding, batch, tokens
        self._attention = by_name("single" if sharding.mesh.size == 1 else "tree", sharding)
        # Where a step takes tokens: of any other place it would be another program.
        self._placed = jax.jit(lambda x: x, out_shardings=sharding.named("batch", None))
        self._programs: dict = {}
        self._prompts: dict = {}

    def compile(self, ways: Sequence[tuple]) -> None:
        """Compiles steps by `(products, dtype)`, all at once where one process runs; what cannot run is left out."""
        import jax

        lowered = []
        for products, dtype in ways:
            with contextlib.suppress(NotImplementedError):
                state, _, cache = self._prompt(dtype)
                lowered.append(self._lowered(products, dtype, state, cache)[1])
        if jax.process_count() == 1:
            with concurrent.futures.ThreadPoolExecutor() as threads:
                list(threads.map(lambda one: one.compile(), lowered))

    def run(self, products: str, dtype, followed):
        """Returns the logits of all steps, float32, the tokens that they read, and how often a step calls the kernel.

        The tokens are `followed`, or its own greedy ones. Calls are of products, of those that end in a sum, and of
        chains.
        """
        import jax
        import jax.numpy as jnp

        state, logits, cache = self._prompt(dtype)
        cache = jax.tree.map(jnp.copy, cache)  # a step takes its memory
        decode, calls = self._program(products, dtype, state, cache)
        last, found, read = logits, [], []
        for step in range(STEPS):
            chosen = jnp.argmax(last, axis=-1).astype(jnp.int32)[:, None] if followed is None else followed[step]
            # Further tokens of a step are any: they are verified together.
            others = [chosen[:, :1] * 7 % self._config.vocab_size + i for i in range(1, self._tokens)]
            chosen = self._placed(jnp.concatenate([chosen[:, :1], *others], 1))
            logits, cache = decode(state, chosen, cache)
            read.append(chosen)
            found.append(logits)
            last = logits[:, -1]
        return jnp.stack(found), read, calls

    def _model(self, products: str | None, create):
        from flax import nnx

        from tree_attn.models.llama import Llama

        products = None if products == PICKED else products
        return nnx.split(Llama(self._config, self._sharding, create, products=products, unroll_layers=True))

    def _prompt(self, dtype):
        """Returns the weights, and the prompts' last logits and cache."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from tree_attn.models.llama import parameters
        from tree_attn.models.llama.storage import empty_cache

        if dtype not in self._prompts:
            structure, state = self._model("xla", parameters.random(self._sharding, dtype))
            cache = empty_cache(
                self._config, self._sharding, batch=self._batch, capacity=CAPACITY, dtype=dtype, stacks_layers=False
            )
            rng = np.random.default_rng(0)
            prompts = jnp.asarray(rng.integers(0, self._config.vocab_size, (self._batch, PROMPT)), jnp.int32)
            lengths = jnp.asarray(PROMPT - np.arange(self._batch), jnp.int32)
            prefill = jax.jit(
                lambda state, cache: nnx.merge(structure, state).prefill(prompts, lengths, cache, self._attention)
            )
            self._prompts[dtype] = state, *prefill(state, cache)
        return self._prompts[dtype]

    def _program(self, products: str, dtype, state, cache):
        """Returns a step, and its calls."""
        decode, lowered = self._lowered(products, dtype, state, cache)
        text = lowered.as_text()
        names = "multiply_few_rows", "multiply_and_sum", "multiply_chain", "run_layers"
        return decode, [text.count(f"call @{name}") for name in names]

    def _lowered(self, products: str, dtype, state, cache):
        """Returns a step as a function, and lowered: whichever compiles first, the other has its program."""
        import jax
        import jax.numpy as jnp
        from flax import nnx

        from tree_attn.models.llama import parameters

        if (products, dtype) not in self._programs:
            structure, _ = self._model(products, parameters.abstract(self._sharding, dtype))

            def step(state, tokens, cache):
                return nnx.merge(structure, state).decode(tokens, cache, self._attention)

            decode = jax.jit(step, donate_argnums=2)
            tokens = self._placed(jnp.ones((self._batch, self._tokens), jnp.int32))
            self._programs[products, dtype] = decode, decode.lower(state, tokens, cache)
        return self._programs[products, dtype]
