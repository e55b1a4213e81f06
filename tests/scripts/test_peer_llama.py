"""The peer's step in plain torch against this library's Llama, and the rows and checks of its script, on a CPU."""

import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import profile_llama
import pytest

from tree_attn.measure.rows import read
from tree_attn.mesh import make_mesh
from tree_attn.models.llama import Generator, Llama, LlamaConfig, by_name, parameters, spread_over
from tree_attn.models.llama.config import Llama3RopeScaling

REASON = "needs torch: pip install torch==2.13.0"
torch = pytest.importorskip("torch", reason=REASON)

import peer_llama  # noqa: E402
import peer_llama_model as model  # noqa: E402

CONFIG = LlamaConfig(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=64,
    max_position=128, rope_theta=500.0, rope_scaling=Llama3RopeScaling(factor=8.0, original_max_position=32),
)  # fmt: skip
PROMPT, NEW = [3, 1, 4, 1, 5, 9, 2, 6], 8


@pytest.fixture(scope="module")
def ours():
    sharding = spread_over(CONFIG, make_mesh({"seq": 1}, jax.devices()[:1]))
    return Llama(CONFIG, sharding, parameters.random(sharding, jnp.float32), unroll_layers=True)


def as_torch(llama: Llama) -> model.Weights:
    """Returns our weights in the peer's order: queries, keys and values apart."""
    tensor = lambda parameter: torch.from_numpy(np.array(parameter[...]))

    def of_layer(layer) -> model.LayerWeights:
        kernel = tensor(layer.attention.query_key_value)  # [K, G + 2, H, D]
        parts = kernel[:, :-2], kernel[:, -2], kernel[:, -1]
        return model.LayerWeights(
            attention_norm=tensor(layer.attention_norm.scale),
            query_key_value=torch.cat([part.reshape(-1, kernel.shape[-1]) for part in parts]),
            output=tensor(layer.attention.output).flatten(1),
            mlp_norm=tensor(layer.mlp_norm.scale),
            gate_up=tensor(layer.mlp.gate_up).flatten(0, 1),
            down=tensor(layer.mlp.down),
        )

    return model.Weights(
        embedding=tensor(llama.embedding),
        layers=[of_layer(layer) for layer in llama.layers],
        final_norm=tensor(llama.final_norm.scale),
        head=tensor(llama.head),
    )


class StandIn(types.ModuleType):
    """FlashInfer's functions that the peer calls, by plain torch, with its arguments, layouts and writes in place."""

    def __init__(self):
        super().__init__("flashinfer")
        self.decode, self.calls = self, []

    def rmsnorm(self, x, scale, eps):
        return torch.nn.functional.rms_norm(x, scale.shape, scale, eps)

    def fused_add_rmsnorm(self, x, residual, scale, eps):
        x.copy_(self.rmsnorm(residual.add_(x), scale, eps))

    def silu_and_mul(self, x):
        return torch.nn.functional.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]

    def apply_rope_with_cos_sin_cache_inplace(self, positions, query, key, head_size, cos_sin_cache):
        assert cos_sin_cache.dtype == torch.float32
        for heads in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
            cosine, sine = cos_sin_cache[positions.long()][:, None].chunk(2, -1)
            first, second = heads.chunk(2, -1)
            heads.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1))

    def append_paged_kv_cache(self, key, value, batch, positions, cache, indices, starts, last, layout):
        page = cache.shape[2]
        assert layout == "NHD" and torch.equal(last, positions % page + 1)
        for i, (b, position) in enumerate(zip(batch.tolist(), positions.tolist(), strict=True)):
            place = indices[starts[b] + position // page]
            cache[place, 0, position % page], cache[place, 1, position % page] = key[i], value[i]

    def xqa_batch_decode_with_kv_cache(self, query, cache, _, table, lengths, longest, *, kv_layout, bmm1_scale):
        assert kv_layout == "NHD" and lengths.dtype == torch.uint32 and lengths.tolist() == [longest] * len(query)
        self.calls.append("xqa")
        pages = [cache[places.long()].transpose(0, 1).flatten(1, 2)[:, :longest] for places in table]  # [2, S, K, H]
        keys, values = torch.stack(pages, 1).transpose(2, 3)
        options = {"scale": bmm1_scale, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, **options)

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace, layout, *, use_tensor_cores):
        assert layout == "NHD" and use_tensor_cores
        return types.SimpleNamespace(plan=self._plan, run=self._run)

    def _plan(self, starts, indices, last, heads, kv_heads, head_dim, page, *, q_data_type, kv_data_type):
        assert (heads, kv_heads, head_dim, page) == (4, 2, 8, model.PAGE)
        counts = starts.diff()
        self.table, self.longest = indices.view(len(counts), -1), int((counts[0] - 1) * page + last[0])

    def _run(self, query, cache):
        lengths = torch.full((len(query),), self.longest).to(torch.uint32)
        options = dict(kv_layout="NHD", bmm1_scale=query.shape[-1] ** -0.5)
        out = self.xqa_batch_decode_with_kv_cache(query, cache, None, self.table, lengths, self.longest, **options)
        self.calls[-1] = "decode"
        return out[:, :, 0]


@pytest.mark.parametrize("attention", ["decode", "xqa"])
def test_flashinfers_operations_get_what_makes_the_same_step(monkeypatch, attention):
    library = StandIn()
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(model, "WORKSPACE_BYTES", 16)
    weights = model.random_weights(CONFIG, dtype=torch.float32, device="cpu")
    options = dict(count=1, batch=3, capacity=70, dtype=torch.float32, device="cpu")
    plain = model.PlainOperations(CONFIG, **options)
    calling = model.FlashInferOperations(CONFIG, attention=attention, **options)
    calling.caches = [cache.clone() for cache in plain.caches]  # of random numbers, where no step writes
    found = []
    for run in (plain, calling):
        peer = model.Peer(weights, run, model.Alone())
        for position in (0, 1, 62, 63, 64, 65):
            peer.tokens.copy_(torch.tensor([5, 6, 7]) + position % 3)
            run.place(position)
            peer.step()
            found.append(peer.logits)
    steps = len(found) // 2
    for expected, logits in zip(found[:steps], found[steps:], strict=True):
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
    assert library.calls == [attention] * 2 * steps


def operations(count: int = 1, batch: int = 1, capacity: int = 100) -> model.PlainOperations:
    options = dict(count=count, batch=batch, capacity=capacity, dtype=torch.float32, device="cpu")
    return model.PlainOperations(CONFIG, **options)


def greedy(peer: model.Peer) -> np.ndarray:
    """Returns the logits of the prompt's last token and of all new ones but the last, `[NEW, V]`."""
    found = []
    for position in range(len(PROMPT) + NEW - 1):
        if position < len(PROMPT):
            peer.tokens.fill_(PROMPT[position])
        peer.operations.place(position)
        peer.step()
        found.append(peer.logits[0].numpy())
    return np.stack(found[len(PROMPT) - 1 :])


def test_steps_give_the_logits_and_tokens_of_our_llama(ours):
    steps = list(Generator(ours, by_name("single", ours.sharding)).stream([PROMPT], NEW))
    expected = np.stack([np.asarray(step.logits[0]) for step in steps])
    found = greedy(model.Peer(as_torch(ours), operations(), model.Alone()))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert found.argmax(-1).tolist() == [int(step.tokens[0]) for step in steps]


class Threads(model.Alone):
    """GPUs that are threads."""

    def __init__(self, rank: int, barrier: threading.Barrier, places: list):
        self.rank, self.count, self.barrier, self.places = rank, len(places), barrier, places

    def gathered(self, x):
        self.places[self.rank] = x
        self.barrier.wait(timeout=60)
        found = torch.stack(self.places)
        self.barrier.wait(timeout=60)
        return found

    def joined_product(self, x, weights):
        return self.gathered(super().joined_product(x, weights)).sum(0)


def test_weights_and_heads_cut_over_two_give_the_same():
    draw = lambda **part: model.random_weights(CONFIG, dtype=torch.float32, device="cpu", **part)
    whole = draw()
    expected = greedy(model.Peer(whole, operations(), model.Alone()))
    barrier, places, found = threading.Barrier(2), [None, None], [None, None]

    def work(rank: int) -> None:
        weights = draw(rank=rank, count=2)
        assert weights.num_bytes < whole.num_bytes * 0.6
        found[rank] = greedy(model.Peer(weights, operations(count=2), Threads(rank, barrier, places)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(np.concatenate(found, -1), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", [None, "rotation", "cache"])
def test_the_check_tells_wrong_logits_from_right_ones(monkeypatch, capsys, change):
    if change == "rotation":
        monkeypatch.setattr(model.PlainOperations, "_rotated", lambda self, heads: heads)
    if change == "cache":
        place = model.PlainOperations.place
        monkeypatch.setattr(model.PlainOperations, "place", lambda self, position: place(self, min(position, 64)))
    monkeypatch.setattr(peer_llama, "time_cases", lambda *_: pytest.fail("--out is not given"))
    status = peer_llama.main(["--config", "llama-3.2-1b", "--device", "cpu", "--check"])
    assert (status, capsys.readouterr().out.split()[0]) == ((0, "ok") if change is None else (1, "WRONG"))


def test_rows_have_times_bytes_and_provenance(monkeypatch, tmp_path):
    monkeypatch.setattr("tree_attn.models.llama.presets.preset", lambda name: CONFIG)
    out = tmp_path / "rows.jsonl"
    numbers = ["--context", "70,5", "--batch", "1,3", "--n-iters", "3", "--replays", "2"]
    assert peer_llama.main(["--config", "tiny", "--device", "cpu", "--out", str(out), *numbers]) == 0
    rows = read(out)
    assert [(row["context"], row["batch"]) for row in rows] == [(70, 1), (70, 3), (5, 1), (5, 3)]
    for row in rows:
        assert 0 < row["per_token_ms_p10"] <= row["per_token_ms_median"] <= row["per_token_ms_p90"]
        assert row["way"] == "plain torch" and row["peer_versions"]["torch"] == torch.__version__
        assert row["cache_bytes_per_device"] == 2 * 2 * 4 * 8 * 2 * row["context"] * row["batch"]
        assert {"date", "host", "driver", "clock_sm_mhz", "git_commit", "hardware", "versions", "command"} <= row.keys()
    layer = 32 * (4 + 2 * 2) * 8 + 32 * 4 * 8 + 3 * 32 * 64 + 2 * 32
    assert rows[0]["weights_bytes_per_device"] == 4 * (2 * layer + 32 + 64 * 32)
    assert rows[0]["layer_weights_bytes"] == 4 * layer
    arguments = types.SimpleNamespace(context=70, products="xla", new_tokens=2)
    ours = profile_llama.timeline_fields(CONFIG, arguments, "NVIDIA H200", [])  # of bfloat16
    assert all(2 * ours[name] == rows[0][name] for name in ("layer_weights_bytes", "layer_cache_bytes"))
    assert ours["read_bytes_per_s"] == 4.8e12 and rows[0]["read_bytes_per_s"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "qwen3-8b"], "a plain Llama, got qwen3-8b, which has query_key_norm"),
        (["--devices", "3"], "--devices must divide 8 KV heads"),
        (["--sums", "ring"], "--sums must be of nccl, one_shot, got ring"),
        (["--attention", "decode,flash"], "--attention must be of decode, xqa"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        peer_llama.main(["--out", "rows.jsonl", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_case_that_fails_leaves_a_row_with_its_error(monkeypatch, tmp_path):
    monkeypatch.setattr("tree_attn.models.llama.presets.preset", lambda name: CONFIG)
    monkeypatch.setattr(model.Peer, "step", lambda self: 1 / 0)
    out = tmp_path / "rows.jsonl"
    assert peer_llama.main(["--device", "cpu", "--context", "5", "--out", str(out)]) == 1
    assert read(out)[0]["error"].startswith("ZeroDivisionError")


def test_a_part_of_the_weights_is_that_of_its_heads():
    layer = model.random_weights(CONFIG, dtype=torch.float32, device="cpu").layers[0]
    first, second = (layer.part(CONFIG, rank, 2) for rank in range(2))
    queries, keys, values = layer.query_key_value.split([32, 16, 16])
    assert torch.equal(second.query_key_value, torch.cat([queries[16:], keys[8:], values[8:]]))
    assert torch.equal(torch.cat([first.output, second.output], 1), layer.output)
    assert torch.equal(first.gate_up, torch.cat([layer.gate_up[:32], layer.gate_up[64:96]]))
    assert layer.part(CONFIG, 0, 1) is layer
