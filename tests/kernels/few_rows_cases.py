"""Products of few rows: drawn, multiplied by the kernel, and by NumPy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import rounded

from tree_attn.kernels.few_rows import multiply_few_rows, multiply_into_cache
from tree_attn.kernels.few_rows_chain import multiply_chain
from tree_attn.kernels.few_rows_chain_call import NewHeads, Norm, WholeLayer
from tree_attn.kernels.few_rows_chain_layout import chain_configs
from tree_attn.kernels.few_rows_layers_call import MAX_LAYERS, Layers
from tree_attn.kernels.few_rows_layout import FewRowsConfig, FewRowsShape, Heads, few_rows_config
from tree_attn.kernels.launch_order import KERNELS_ARE_RECORDED

EPS = 1e-5
NORMED, GATED, ADDED = {"eps": EPS}, {"parts": 2, "activation": "silu"}, {"has_residual": True}
# In-features, out-features, and what goes with the product, of the products of a step: of query, key and value, of
# attention's output, of gate and up, down, and of the head.
LLAMA_1B = (
    (2048, 3072, NORMED),
    (2048, 2048, ADDED),
    (2048, 8192, NORMED | GATED),
    (8192, 2048, ADDED),
    (2048, 128256, NORMED | {"out_dtype": "float32"}),
)
LLAMA_8B = (
    (4096, 6144, NORMED),
    (4096, 4096, ADDED),
    (4096, 14336, NORMED | GATED),
    (14336, 4096, ADDED),
    (4096, 128256, NORMED | {"out_dtype": "float32"}),
)
H200_SMS = 132


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """One product, on so many CTAs; `layout` changes the layout that is chosen for them."""

    rows: int = 1
    in_features: int = 256
    out_features: int = 168
    dtype: str = "bfloat16"
    ctas: int = 3
    is_early: bool = False
    shares_sm: bool | None = None
    options: dict = dataclasses.field(default_factory=dict)
    layout: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        """A test's name: what differs from the default."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"options": "+".join(self.options), "layout": "_".join(map(str, self.layout.values()))}
        changed = (f"{name}={value}" for name, value in values.items() if value != getattr(Product, name, ""))
        return " ".join(changed) or "default"

    @property
    def shape(self) -> FewRowsShape:
        options = {"parts": 1, "out_dtype": self.dtype} | self.options
        dtypes = {name: jnp.dtype(x) for name, x in (("dtype", self.dtype), ("out_dtype", options.pop("out_dtype")))}
        return FewRowsShape(
            rows=self.rows, in_features=self.in_features, out_features=self.out_features, **dtypes, **options
        )

    @property
    def config(self) -> FewRowsConfig:
        return dataclasses.replace(few_rows_config(self.shape, self.ctas, self.is_early, self.shares_sm), **self.layout)

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.config.shares_sm else 1

    def shapes(self, sharding=None):
        """Returns the shapes of x, weights, scale and residual."""
        shape = self.shape
        of = lambda *size: jax.ShapeDtypeStruct(size, shape.dtype, sharding=sharding)
        return (
            of(shape.rows, shape.in_features),
            of(shape.parts, shape.out_features, shape.in_features),
            None if shape.eps is None else of(shape.in_features),
            of(shape.rows, shape.out_features) if shape.has_residual else None,
        )

    def inputs(self):
        rng = np.random.default_rng(0)
        sizes = (2.0, self.in_features**-0.5, 1.0, 1.0)
        draw = lambda x, size: None if x is None else rounded(size * rng.normal(size=x.shape), x.dtype)
        return [draw(x, size) for x, size in zip(self.shapes(), sizes)]

    def run(self, *inputs):
        return multiply_few_rows(*inputs, shape=self.shape, config=self.config)

    def expected(self, inputs=None):
        """Returns the result, float64."""
        arrays = self.inputs() if inputs is None else inputs
        x, weights, scale, residual = (None if a is None else np.asarray(a, np.float64) for a in arrays)
        shape = self.shape
        if shape.eps is not None:
            x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + shape.eps) * (scale + shape.adds_one)
        products = np.einsum("bi,poi->pbo", x, weights)
        if shape.activation is None:
            (result,) = products
        else:
            gate, up = products
            result = gate / (1 + np.exp(-gate)) * up
        return result if residual is None else result + residual


def of_model(shapes, **options) -> list[Product]:
    """Returns products of a model on an H200."""
    return [Product(in_features=i, out_features=o, options=of, ctas=H200_SMS, **options) for i, o, of in shapes]


def compiled_products() -> list[Product]:
    """Returns products of the two models that differ in the compiled kernel."""
    return [
        *of_model(LLAMA_8B),
        *of_model(LLAMA_8B[:1] + LLAMA_8B[2:3], rows=16, is_early=True),
        *of_model(LLAMA_8B[4:], is_early=True, shares_sm=False),
        *of_model(LLAMA_1B[3:4]),
        *of_model(LLAMA_1B[1:2], rows=12, dtype="float16"),
        *of_model(LLAMA_8B[3:4], rows=16, layout={"stack": 2, "block_in": 128, "num_stages": 6}),
    ]


def more_compiled_products() -> list[Product]:
    """Returns further products, each of which is like one of `compiled_products`."""
    return [
        *of_model(LLAMA_8B[2:3], rows=16),
        *of_model(LLAMA_8B[1:2], rows=16, is_early=True),
        *of_model(LLAMA_1B[:1], layout={"stack": 2, "block_in": 128, "num_stages": 6}),
        *of_model(LLAMA_1B[3:4], layout={"stack": 4, "block_in": 128, "num_stages": 6}),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Append:
    """Queries, keys and values of new tokens, of which keys and values go to a cache's slots."""

    batch: int = 1
    tokens: int = 1
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 32
    in_features: int = 128
    slots: int = 8
    ctas: int = 3
    dtype: str = "bfloat16"
    is_early: bool = False
    adds_one: bool = False

    def __str__(self):
        """A test's name: what differs from the default."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "append " + " ".join(f"{name}={value}" for name, value in values if value != getattr(Append, name))

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.is_early else 1

    @property
    def shape(self) -> FewRowsShape:
        dtype = jnp.dtype(self.dtype)
        return FewRowsShape(
            rows=self.batch * self.tokens, in_features=self.in_features, dtype=dtype, out_dtype=dtype, parts=1,
            out_features=self.kv_heads * (self.group + 2) * self.head_dim, eps=EPS, adds_one=self.adds_one,
            heads=Heads(head_dim=self.head_dim, group=self.group, tokens=self.tokens),
        )  # fmt: skip

    def shapes(self, sharding=None):
        """Returns the shapes of x, weights, scale, angles, slots, keys and values."""
        shape = self.shape
        of = lambda *size, dtype=self.dtype: jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=sharding)
        cache = of(self.batch, self.slots, self.kv_heads, self.head_dim)
        return (
            of(shape.rows, shape.in_features), of(1, shape.out_features, shape.in_features), of(shape.in_features),
            of(2, shape.rows, self.head_dim // 2, dtype="float32"), of(shape.columns, dtype="int32"), cache, cache,
        )  # fmt: skip

    def inputs(self):
        """Returns them: the last row's slot is beyond the cache, the others' differ in each sequence."""
        rng = np.random.default_rng(0)
        shapes = self.shapes()
        x, weights, scale, _, _, key, value = (rng.normal(size=x.shape) for x in shapes)
        angles = rng.uniform(0, 6, shapes[3].shape[1:])
        slots = np.full(self.shape.columns, -1)
        slots[: self.shape.rows] = np.concatenate(
            [rng.permutation(self.slots)[: self.tokens] for _ in range(self.batch)]
        )
        if self.shape.rows > 1:
            slots[self.shape.rows - 1] = self.slots
        arrays = x, weights * self.in_features**-0.5, scale, [np.cos(angles), np.sin(angles)], slots, key, value
        return [jnp.asarray(array, of.dtype) for array, of in zip(arrays, shapes)]

    def run(self, *inputs):
        config = few_rows_config(self.shape, self.ctas, self.is_early)
        return multiply_into_cache(*inputs, shape=self.shape, config=config)

    def expected(self, inputs=None):
        """Returns queries, and the cache's keys and values, float64."""
        arrays = self.inputs() if inputs is None else inputs
        x, weights, scale, (cosine, sine), slots, key, value = (np.array(x, np.float64) for x in arrays)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * (scale + self.adds_one)
        heads = (x @ weights[0].T).reshape(len(x), self.kv_heads, self.group + 2, self.head_dim)
        first, second = np.split(heads, 2, axis=-1)
        cosine, sine = cosine[:, None, None], sine[:, None, None]
        rotated = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
        for row, slot in enumerate(slots[: len(x)].astype(int)):
            if slot < self.slots:
                key[row // self.tokens, slot] = rotated[row, :, self.group]
                value[row // self.tokens, slot] = heads[row, :, self.group + 1]
        return rotated[:, :, : self.group].reshape(len(x), -1, self.head_dim), key, value


def compiled_appends() -> list[Append]:
    """Returns those of the two models that are compiled."""
    of_8b = dict(kv_heads=8, group=4, head_dim=128, in_features=4096, slots=8192, ctas=H200_SMS)
    return [
        Append(**of_8b),
        Append(**of_8b, batch=16),
        Append(**of_8b, batch=4, tokens=4, is_early=True),
        Append(**of_8b | {"head_dim": 64, "in_features": 2048}),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """The products of a layer from attention's result on: its output, gate and up, and down.

    With heads those of the next layer follow, whose keys and values go to a cache of so many slots.
    """

    rows: int = 1
    hidden: int = 256
    intermediate: int = 512
    num_features: int = 256  # of attention's result
    ctas: int = 3
    smem_bytes: int = 227 * 1024
    adds_one: bool = False
    heads: tuple[int, int, int] | None = None  # KV heads, queries of each, and their dim
    slots: int = 8

    def __str__(self):
        """A test's name: what differs from the default."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "chain " + " ".join(f"{name}={value}" for name, value in values if value != getattr(Chain, name))

    @property
    def products(self) -> tuple[Product, ...]:
        """The products of the layer itself."""
        hidden, intermediate = self.hidden, self.intermediate
        of = lambda inside, outside, options: Product(
            rows=self.rows, in_features=inside, out_features=outside, options=options
        )
        normed = NORMED | GATED | {"adds_one": self.adds_one}
        return (
            of(self.num_features, hidden, ADDED), of(hidden, intermediate, normed), of(intermediate, hidden, ADDED)
        )  # fmt: skip

    @property
    def append(self) -> "Append | None":
        """The product of the next layer's heads, each row of a sequence of its own."""
        if self.heads is None:
            return None
        kv_heads, group, head_dim = self.heads
        return Append(
            batch=self.rows, kv_heads=kv_heads, group=group, head_dim=head_dim, in_features=self.hidden,
            slots=self.slots, adds_one=self.adds_one,
        )  # fmt: skip

    @property
    def shapes(self) -> tuple[FewRowsShape, ...]:
        """The shapes of all products."""
        return tuple(product.shape for product in (*self.products, self.append) if product is not None)

    @property
    def configs(self) -> tuple[FewRowsConfig, ...]:
        configs = chain_configs(self.shapes, self.ctas, self.smem_bytes)
        assert isinstance(configs, tuple), configs
        return configs

    def _gathered(self, of_product):
        """Returns x, residual, weights and scales, and what else the heads take, or None."""
        arrays = [of_product(product) for product in self.products]
        weights, scales = (tuple(array[i] for array in arrays) for i in (1, 2))
        heads = None
        if self.append is not None:
            _, weight, scale, *heads = of_product(self.append)
            weights, scales = (*weights, weight), (*scales, scale)
        return arrays[0][0], arrays[0][3], weights, scales, heads

    def array_shapes(self, sharding=None):
        """Returns the shapes of what `run` takes."""
        return self._gathered(lambda product: product.shapes(sharding))

    def inputs(self):
        """Returns what `run` takes."""
        x, residual, *others = self._gathered(lambda product: product.inputs())
        return x, 0.3 * residual, *others

    def run(self, *inputs):
        return multiply_chain(*inputs, shapes=self.shapes, configs=self.configs)

    def expected(self):
        """Returns the results, float64, where every product's is rounded as the kernel rounds it."""
        x, residual, weights, scales, heads = self.inputs()
        for product, weight, scale in zip(self.products, weights, scales):
            added = residual if product.shape.has_residual else None
            result = product.expected((x, weight, scale, added))
            x = jnp.asarray(result, product.shape.out_dtype)
            residual = residual if added is None else x
        if self.append is None:
            return (result,)
        return result, *self.append.expected((x, weights[-1], scales[-1], *heads))


def chains_of_models() -> list[Chain]:
    """Returns those of models."""
    of_8b = dict(hidden=4096, intermediate=14336, num_features=4096, ctas=H200_SMS)
    return [
        Chain(**of_8b),
        Chain(**of_8b, rows=16),
        Chain(hidden=2048, intermediate=8192, num_features=2048, ctas=H200_SMS),
        Chain(**of_8b | {"intermediate": 11008}),  # of Llama 2 7B: products have CTAs of different numbers
        Chain(**of_8b, heads=(8, 4, 128), slots=8192),
        Chain(**of_8b, heads=(8, 4, 128), slots=8192, rows=16),
        Chain(hidden=2048, intermediate=8192, num_features=2048, ctas=H200_SMS, heads=(8, 4, 64), slots=8192, rows=3),
    ]


def compiled_chains() -> list[Chain]:
    """Returns those that are compiled: with heads, and where products have CTAs of different numbers."""
    return chains_of_models()[3:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """A whole layer of one token for each sequence, with attention to a cache of so many slots."""

    batch: int = 1
    hidden: int = 4096
    intermediate: int = 14336
    heads: tuple[int, int, int] = (8, 4, 128)  # KV heads, queries of each, and their dim
    slots: int = 32768

    def __str__(self):
        """A test's name: what differs from the default."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "layer " + " ".join(f"{name}={value}" for name, value in values if value != getattr(Layer, name))

    def array_shapes(self, sharding=None):
        """Returns the shapes of what `run` takes."""
        of = lambda *size, dtype="bfloat16": jax.ShapeDtypeStruct(size, jnp.dtype(dtype), sharding=sharding)
        hidden, inner, (kv_heads, group, head_dim) = self.hidden, self.intermediate, self.heads
        cache = of(self.batch, self.slots, kv_heads, head_dim)
        return (
            of(self.batch, 1, hidden), of(hidden), of(hidden), of(kv_heads, group + 2, head_dim, hidden),
            of(hidden, kv_heads * group, head_dim), of(2, inner, hidden), of(hidden, inner), cache, cache,
            of(self.batch, dtype="int32"), of(self.batch, 1, 1, head_dim // 2, dtype="float32"),
        )  # fmt: skip

    def run(self, *arrays):
        """Runs the layer."""
        return self.call(*arrays).run()

    def call(self, x, norm, mlp_norm, heads, output, gate_up, down, key, value, lengths, angle) -> WholeLayer:
        """Returns the call of the kernel."""
        new = NewHeads(
            norm=Norm(scale=norm, eps=EPS), weights=heads, key=key, value=value, slots=lengths[:, None],
            cosine_sine=(angle, angle),
        )  # fmt: skip
        return WholeLayer(
            x=x, heads=new, spans=(jnp.zeros((1, 1), jnp.int32), lengths[:, None] + 1), scale=0.1, output=output,
            gate_up=gate_up, down=down, norm=Norm(scale=mlp_norm, eps=EPS), activation="silu",
        )  # fmt: skip


OF_1B = dict(hidden=2048, intermediate=8192, heads=(8, 4, 64), slots=1088)


def compiled_layers() -> list[Layer]:
    """Returns those of models that are compiled."""
    return [Layer(), Layer(batch=4), Layer(slots=64), Layer(**OF_1B), Layer(**OF_1B, batch=3)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several:
    """So many layers in one launch."""

    layer: Layer = Layer()
    count: int = MAX_LAYERS

    def __str__(self):
        """A test's name."""
        return f"{self.count} of {self.layer}"

    def array_shapes(self, sharding=None):
        """Returns the shapes of what `run` takes: x, what each layer has of its own, and what they share."""
        x, *arrays, lengths, angle = self.layer.array_shapes(sharding)
        return x, [arrays] * self.count, lengths, angle

    def run(self, x, of_layers, lengths, angle):
        """Runs the layers."""
        return Layers([self.layer.call(x, *of_layer, lengths, angle) for of_layer in of_layers]).run()


def compiled_several() -> list[Several]:
    """Returns those that are compiled; with an older JAX each layer is a launch of its own."""
    if jax.__version_info__ < KERNELS_ARE_RECORDED:
        return []
    return [Several(layer=layer) for layer in (Layer(), Layer(batch=4), Layer(**OF_1B), Layer(**OF_1B, batch=4))]


def more_compiled_several() -> list[Several]:
    """Returns further ones, each of which is like one of `compiled_several`."""
    if jax.__version_info__ < KERNELS_ARE_RECORDED:
        return []
    return [Several(layer=Layer(batch=2)), Several(layer=Layer(**OF_1B, batch=2), count=2)]
