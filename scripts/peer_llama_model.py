"""A Llama's decoding step in PyTorch, by FlashInfer's kernels and cuBLAS or by plain torch: for `peer_llama.py`.

Weights and KV heads may be cut over GPUs (tensor parallelism): each GPU has the same part of every layer, and two sums
a layer join the parts. Every GPU has the whole embedding, of which a step reads one row a sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from tree_attn.models.llama import LlamaConfig
from tree_attn.models.llama.rope import inverse_frequencies

PAGE = 64  # slots
WORKSPACE_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of a layer, outputs before inputs.

    Attributes:
      attention_norm, mlp_norm: `[D]`.
      query_key_value: `[(N + 2 K) H, D]`, all queries first, then keys, then values.
      output: `[D, N H]`.
      gate_up: `[2 F, D]`, the gate first.
      down: `[D, F]`.
    """

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def part(self, config: LlamaConfig, rank: int, count: int) -> "LayerWeights":
        """Returns the weights of one of `count` GPUs: those of its heads and of its columns of the MLP."""
        if count == 1:
            return self
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        projections = self.query_key_value.split([heads, kv_heads, kv_heads])
        of_rank = lambda weights, axis=0: weights.chunk(count, axis)[rank]
        return dataclasses.replace(
            self,
            query_key_value=torch.cat([of_rank(weights) for weights in projections]),
            output=of_rank(self.output, 1).contiguous(),
            gate_up=torch.cat([of_rank(weights) for weights in self.gate_up.chunk(2)]),
            down=of_rank(self.down, 1).contiguous(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a model: of one GPU but for the embedding `[V, D]`; `head` is `[V / GPUs, D]`."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes that a step reads, without the embedding's row."""
        tensors = [self.head, self.final_norm, *(t for layer in self.layers for t in vars(layer).values())]
        return sum(tensor.nbytes for tensor in tensors)


def random_weights(
    config: LlamaConfig, *, dtype: torch.dtype, device: str, rank: int = 0, count: int = 1, seed: int = 0
) -> Weights:
    """Draws the same weights for any number of GPUs, each matrix whole, and keeps this GPU's part.

    They are normal numbers over the square root of the fan-in; norms' scales are about 1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=dtype, device=device, generator=generator)
    draw = lambda rows, columns: normal(rows, columns).mul_(columns**-0.5)
    norm = lambda: 1 + 0.1 * normal(config.hidden_size)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(),
            query_key_value=draw(heads + 2 * config.num_kv_heads * config.head_dim, hidden),
            output=draw(hidden, heads),
            mlp_norm=norm(),
            gate_up=draw(2 * config.intermediate_size, hidden),
            down=draw(hidden, config.intermediate_size),
        ).part(config, rank, count)

    layers = [layer() for _ in range(config.num_layers)]
    embedding = draw(config.vocab_size, hidden)
    head = embedding if config.tie_embeddings else draw(config.vocab_size, hidden)
    return Weights(embedding=embedding, layers=layers, final_norm=norm(), head=head.chunk(count)[rank])


class Alone:
    """The only GPU of a model, and what several GPUs do in its place."""

    rank, count = 0, 1

    def joined_product(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiplies `[B, I]` by `[O, I]`, of which I is cut over the GPUs, to the whole product `[B, O]`."""
        return functional.linear(x, weights)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the `[B, X]` of all GPUs, `[GPUs, B, X]`."""
        return x[None]


class Nccl(Alone):
    """Sums by all-reduces of `torch.distributed`: NCCL's, or on CPUs Gloo's."""

    def __init__(self):
        """Takes the process group that was made for this process."""
        self.rank, self.count = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def joined_product(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiplies, and sums in place."""
        product = functional.linear(x, weights)
        torch.distributed.all_reduce(product)
        return product

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers by one collective."""
        out = x.new_empty(self.count, *x.shape)
        torch.distributed.all_gather(list(out), x.contiguous())
        return out


class OneShot(Nccl):
    """Sums in one kernel that reads the parts of all GPUs, by torch's symmetric memory."""

    def __init__(self, batch: int, hidden_size: int, dtype: torch.dtype):
        """Makes the memory that the other GPUs read."""
        super().__init__()
        from torch.distributed import _symmetric_memory

        self._group = torch.distributed.group.WORLD.group_name
        self._part = _symmetric_memory.empty(batch, hidden_size, dtype=dtype, device="cuda")
        _symmetric_memory.rendezvous(self._part, self._group)

    def joined_product(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Multiplies into that memory, and sums."""
        torch.mm(x, weights.T, out=self._part)
        return torch.ops.symm_mem.one_shot_all_reduce(self._part, "sum", self._group)


class PlainOperations:
    """Norms, rotation and attention by plain torch, for any device and dtype; and the cache that they write.

    Attributes:
      caches: of each layer, `[B * pages, 2, PAGE, K, H]`: a sequence's pages lie together; keys are 0 and values 1.
    """

    def __init__(self, config: LlamaConfig, *, count: int, batch: int, capacity: int, dtype: torch.dtype, device: str):
        """Makes a cache of random numbers.

        Args:
          config: the model's shape.
          count: GPUs over which the heads are cut.
          batch: sequences.
          capacity: tokens of each.
          dtype: of keys and values.
          device: of all tensors.
        """
        self.eps, self.batch, self.num_pages = config.rms_norm_eps, batch, -(-capacity // PAGE)
        self.heads = config.num_heads // count, config.num_kv_heads // count, config.head_dim
        _, kv_heads, head_dim = self.heads
        shape = batch * self.num_pages, 2, PAGE, kv_heads, head_dim
        self.caches = [torch.randn(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        angles = torch.outer(torch.arange(self.num_pages * PAGE), torch.from_numpy(inverse_frequencies(config)))
        self.cosine_sine = torch.cat([angles.cos(), angles.sin()], -1).to(device)  # float32 [positions, H]
        self.positions = torch.zeros(batch, dtype=torch.int32, device=device)

    def place(self, position: int) -> None:
        """Sets the position of the next token of every sequence; it sees all before it."""
        self.positions.fill_(position)
        self.length = position + 1

    def norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the RMS norm of `[B, D]`, computed in float32."""
        return functional.rms_norm(x.float(), scale.shape, eps=self.eps).to(x.dtype) * scale

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Adds x to the residual in place, and returns the residual's norm."""
        return self.norm(residual.add_(x), scale)

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns `silu(gate) * up` of `[B, 2 F]`."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, N, H]` and `[B, K, H]`, writes keys and values, and attends: `[B, N, H]`."""
        query, key = self._rotated(query), self._rotated(key)
        pages = cache.view(self.batch, self.num_pages, *cache.shape[1:])
        page, slot = divmod(self.length - 1, PAGE)
        pages[:, page, 0, slot], pages[:, page, 1, slot] = key, value
        # [B, pages, 2, PAGE, K, H] to keys and values [B, K, S, H]
        keys, values = pages.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)[:, :, :, : self.length]
        out = functional.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
        return out[:, :, 0]

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.cosine_sine[self.positions.long()][:, None].chunk(2, -1)
        first, second = heads.float().chunk(2, -1)
        turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
        return turned.to(heads.dtype)


class FlashInferOperations(PlainOperations):
    """The same by FlashInfer's kernels, on a GPU. A plan serves all layers, and all steps at its position."""

    def __init__(self, config: LlamaConfig, *, attention: str, device: str, **options):
        """Makes the cache, and memory for partial results.

        Args:
          config: the model's shape.
          attention: "decode", `BatchDecodeWithPagedKVCacheWrapper` on tensor cores; or "xqa".
          device: of all tensors.
          options: the others, as `PlainOperations` takes them.
        """
        import flashinfer

        super().__init__(config, device=device, **options)
        self._flashinfer, self._is_xqa = flashinfer, attention == "xqa"
        self._int32 = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # XQA's must be zeros
        self._sequences = self._int32(range(self.batch))
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)

    def place(self, position: int) -> None:
        """Sets the position, and plans attention for it."""
        super().place(position)
        used = -(-self.length // PAGE)
        self._table = self._int32([[b * self.num_pages + page for page in range(used)] for b in range(self.batch)])
        self._pages = self._table.flatten()
        self._starts = self._int32(range(0, self.batch * used + 1, used))
        self._last = self._int32([(self.length - 1) % PAGE + 1] * self.batch)
        if self._is_xqa:
            lengths = [self.length] * self.batch
            self._lengths = torch.tensor(lengths, dtype=torch.uint32, device=self.positions.device)
            return
        dtype = self.caches[0].dtype
        self._decode.plan(
            self._starts, self._pages, self._last, *self.heads, PAGE, q_data_type=dtype, kv_data_type=dtype
        )  # fmt: skip

    def norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the RMS norm of `[B, D]`."""
        return self._flashinfer.rmsnorm(x, scale, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Adds x to the residual in place, and writes the residual's norm in the place of x."""
        self._flashinfer.fused_add_rmsnorm(x, residual, scale, self.eps)
        return x

    def gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns `silu(gate) * up` of `[B, 2 F]`."""
        return self._flashinfer.silu_and_mul(gate_up)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Rotates in place, writes keys and values, and attends: three launches, and a merge where keys are split."""
        head_dim = query.shape[-1]
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            self.positions, query.flatten(1), key.flatten(1), head_dim, self.cosine_sine
        )
        self._flashinfer.append_paged_kv_cache(
            key, value, self._sequences, self.positions, cache, self._pages, self._starts, self._last, "NHD"
        )
        if not self._is_xqa:
            return self._decode.run(query, cache)
        run = self._flashinfer.decode.xqa_batch_decode_with_kv_cache
        return run(
            query.contiguous(), cache, self._workspace, self._table, self._lengths, self.length, kv_layout="NHD",
            bmm1_scale=head_dim**-0.5,
        ).view(query.shape)  # fmt: skip


class Peer:
    """The model: a step takes `tokens`, leaves `logits`, and puts the next tokens in their place.

    Attributes:
      tokens: int64 `[B]`, always the same memory, as CUDA graphs need it.
      logits: of this GPU's part of the vocabulary, `[B, V / GPUs]`; None before the first step.
    """

    def __init__(self, weights: Weights, operations: PlainOperations, group: Alone):
        """Joins the parts; `operations` have the cache."""
        self.weights, self.operations, self.group = weights, operations, group
        self.tokens = torch.zeros(operations.batch, dtype=torch.int64, device=weights.head.device)
        self.logits: torch.Tensor | None = None

    def step(self) -> None:
        """Makes a step at the position that the operations were placed at."""
        layers, run = self.weights.layers, self.operations
        residual = functional.embedding(self.tokens, self.weights.embedding)
        x = run.norm(residual, layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in layers[1:]), self.weights.final_norm]
        for layer, cache, next_norm in zip(layers, run.caches, next_norms, strict=True):
            attended = run.attend(*self._heads(functional.linear(x, layer.query_key_value)), cache)
            x = self.group.joined_product(attended.flatten(1), layer.output)
            x = run.add_and_norm(x, residual, layer.mlp_norm)
            x = self.group.joined_product(run.gated(functional.linear(x, layer.gate_up)), layer.down)
            x = run.add_and_norm(x, residual, next_norm)
        self.logits = functional.linear(x, self.weights.head)
        self.tokens.copy_(self._next_tokens())

    def _heads(self, projections: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns views of queries, keys and values: `[B, N, H]`, and `[B, K, H]` twice."""
        heads, kv_heads, head_dim = self.operations.heads
        return projections.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)

    def _next_tokens(self) -> torch.Tensor:
        if self.group.count == 1:
            return self.logits.argmax(-1)
        best, index = self.logits.float().max(-1)
        index = index + self.group.rank * self.logits.shape[1]  # float32 holds a vocabulary's integers
        bests, indices = self.group.gathered(torch.stack([best, index.float()], -1)).unbind(-1)
        return indices.gather(0, bests.argmax(0, keepdim=True))[0].long()


def full_logits(weights: Weights, config: LlamaConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Computes the logits of whole sequences `[B, T]` at once, in float32, by plain torch: `[B, T, V]`."""
    wide = lambda tensor: tensor.float()
    x = wide(weights.embedding)[tokens]
    angles = torch.outer(torch.arange(tokens.shape[1]), torch.from_numpy(inverse_frequencies(config))).to(x.device)
    turns = torch.polar(torch.ones_like(angles), angles)  # complex [T, H / 2]
    heads, kv_heads = config.num_heads, config.num_kv_heads

    def norm(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * wide(scale)

    def rotated(x):  # [B, n, T, H]
        pairs = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat([pairs.real, pairs.imag], -1)

    for layer in weights.layers:
        projections = norm(x, layer.attention_norm) @ wide(layer.query_key_value).T
        parts = projections.unflatten(-1, (-1, config.head_dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], 1)
        query, key, value = rotated(parts[0]), *(part.repeat_interleave(config.group_size, 1) for part in parts[1:])
        scores = query @ rotated(key).mT / math.sqrt(config.head_dim)
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -torch.inf)
        x = x + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) @ wide(layer.output).T
        gate, up = (norm(x, layer.mlp_norm) @ wide(layer.gate_up).T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ wide(layer.down).T
    return norm(x, weights.final_norm) @ wide(weights.head).T
