"""The calls that SGLang and vLLM make for a batch of prompts, served without a copy, cast, gather or scatter.

What they do today around an implementation that takes dense tensors alone stands here as the reference.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from calls import filled  # noqa: E402

import flashkda  # noqa: E402
from flashkda.bits import same_bits  # noqa: E402
from flashkda.goldens.cases import HEAD_DIM  # noqa: E402

pytestmark = pytest.mark.gpu

HEADS = 12
SLOTS = 16
LOWER_BOUND = -5.0
SCALE = HEAD_DIM**-0.5
#: Prompts beside decoding requests of one token, and tokens of nobody at the end.
LENGTHS = (1, 8192, 1, 300, 1, 17, 1)
PADDED_TAIL = 55
NAN = 0xFF


def bf16(device, seed: int, *size: int):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=device).to(torch.bfloat16)


def fp32(device, seed: int, *size: int):
    return torch.rand(*size, generator=torch.Generator(device).manual_seed(seed), device=device)


def query_start_loc(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def dense_reference(q, k, v, g, beta, A_log, dt_bias, states, indices, has_initial_state, cu_seqlens):
    """out, and the pool after gather, a call on tensors made contiguous, cast and reshaped, and scatter."""
    initial = torch.where(has_initial_state.view(-1, 1, 1, 1), states[indices.long()], 0)
    out, final = torch.empty_like(v.contiguous()), torch.empty_like(initial)
    flashkda.fwd(
        q.contiguous(), k.contiguous(), v.contiguous(), g.contiguous(), beta.contiguous(), SCALE, out,
        A_log.reshape(HEADS), dt_bias.reshape(HEADS, HEAD_DIM), LOWER_BOUND,
        initial_state=initial, final_state=final, cu_seqlens=cu_seqlens.long(),
    )  # fmt: skip
    after = states.clone()
    after[indices.long()] = final
    return out, after


def sglang_extend(q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, has_initial_state, A_log, dt_bias,
                  lower_bound, workspace):  # fmt: skip
    """The body of a kernel class's `extend`, as the README shows it."""
    out = torch.empty_like(v)
    flashkda.fwd(
        q, k, v, g, beta, q.shape[-1] ** -0.5, out, A_log, dt_bias, lower_bound,
        initial_state=ssm_states, final_state=ssm_states, cu_seqlens=query_start_loc,
        state_indices=cache_indices, has_initial_state=has_initial_state, workspace=workspace,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sglang_extends_requests_straight_from_its_pool(dtype, device) -> None:
    tokens = sum(LENGTHS) + PADDED_TAIL
    rows = (1, tokens, HEADS, HEAD_DIM)
    # Convolved one by one: dense. g comes from its own projection, beta is a slice of a wide one.
    q, k, v, g = (bf16(device, seed, *rows) for seed in range(4))
    beta = bf16(device, 4, 1, tokens, 4 * HEADS * HEAD_DIM + HEADS + HEAD_DIM)[..., -HEADS - HEAD_DIM : -HEAD_DIM]
    A_log, dt_bias = fp32(device, 5, 1, 1, HEADS, 1), fp32(device, 6, HEADS * HEAD_DIM)
    # The pools of three layers in one allocation; this is the middle one's.
    layers = filled(3 * SLOTS * HEADS * HEAD_DIM**2 * dtype.itemsize, device).view(dtype)
    layers = layers.view(3, SLOTS, HEADS, HEAD_DIM, HEAD_DIM)
    cache_indices = torch.tensor([3, 15, 1, 8, 2, 5, 11], dtype=torch.int32, device=device)
    layers[1, cache_indices.long()] = bf16(device, 7, len(LENGTHS), *layers.shape[2:]).to(dtype)
    start = query_start_loc(LENGTHS, device)
    # A request's first piece starts from zero whatever its slot was left with.
    has_initial_state = torch.tensor([42, 0, 7, 64, 0, 0, 1], device=device) > 0
    layers[1, 15] = float("nan")
    live = sum(LENGTHS)
    wanted, after = dense_reference(
        *(x[:, :live] for x in (q, k, v, g, beta)), A_log, dt_bias, layers[1], cache_indices, has_initial_state, start
    )
    before, workspace = layers.clone(), filled(flashkda.workspace_size(tokens, HEADS, len(LENGTHS)), device)
    out = sglang_extend(
        q, k, v, g, beta, ssm_states=layers[1], cache_indices=cache_indices, query_start_loc=start,
        has_initial_state=has_initial_state, A_log=A_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND,
        workspace=workspace,
    )  # fmt: skip
    assert same_bits(out[:, :live], wanted) and same_bits(layers[1], after)
    assert same_bits(layers[0], before[0]) and same_bits(layers[2], before[2])


def carve(arena, *specs):
    """Tensors of (shape, dtype) one after another in a byte arena, each 256-byte aligned."""
    offset, found = 0, []
    for shape, dtype in specs:
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(arena[offset : offset + size].view(dtype).view(shape))
        offset += -(-size // 256) * 256
    return found, arena[offset:]


def vllm_prefill(q, k, v, g, beta, *, A_log, dt_bias, lower_bound, recurrent_state, state_indices, has_initial_state,
                 query_start_loc, out, workspace):  # fmt: skip
    """The call in place of the gather, the kernel and the scatter, as the README shows it."""
    flashkda.fwd(
        q, k, v, g, beta, q.shape[-1] ** -0.5, out, A_log, dt_bias, lower_bound,
        initial_state=recurrent_state, final_state=recurrent_state, cu_seqlens=query_start_loc,
        state_indices=state_indices, has_initial_state=has_initial_state, workspace=workspace,
    )  # fmt: skip
    return out


def test_vllm_prefills_behind_decodes_from_pages_into_a_shared_arena(device) -> None:
    decodes, capacity = 3, 8704
    prompts = (8192, 1, 300, 17, 1)
    tokens = decodes + sum(prompts)
    width, padding = HEADS * HEAD_DIM, 4
    # One projection of everything, padded for alignment; q, k, v are read where they lie in it.
    projected = bf16(device, 11, tokens + PADDED_TAIL, 4 * width + HEAD_DIM + HEADS + padding)
    mixed, _, _, beta, _ = projected.split([3 * width, width, HEAD_DIM, HEADS, padding], dim=-1)
    q, k, v = (x.unflatten(-1, (HEADS, HEAD_DIM)).unsqueeze(0) for x in mixed.split(width, dim=-1))
    g = bf16(device, 12, tokens + PADDED_TAIL, width).unflatten(-1, (HEADS, HEAD_DIM)).unsqueeze(0)
    # Decodes come first and go to another kernel; the padded tail is cut off.
    q, k, v, g, beta = (x[:, decodes:tokens] for x in (q, k, v, g, beta.unsqueeze(0)))
    A_log, dt_bias = fp32(device, 13, HEADS), fp32(device, 14, width)
    # A page holds a layer's convolution state and then its recurrent state.
    convolution, state = 3 * 3 * width * 2, HEADS * HEAD_DIM**2 * 4
    page = convolution + state + 512
    pages = filled(SLOTS * page, device)
    recurrent_state = pages.view(torch.float32).as_strided(
        (SLOTS, HEADS, HEAD_DIM, HEAD_DIM), (page // 4, HEAD_DIM**2, HEAD_DIM, 1), convolution // 4
    )
    indices = torch.tensor([9, 4, 1, 14, 6], dtype=torch.int32, device=device)
    has_initial_state = torch.tensor([True, False, True, False, True], device=device)
    resumed = bf16(device, 15, len(prompts), HEADS, HEAD_DIM, HEAD_DIM).float()
    resumed[~has_initial_state] = float("nan")
    recurrent_state[indices.long()] = resumed
    start = query_start_loc(prompts, device)
    wanted, after = dense_reference(
        q, k, v, g, beta, A_log, dt_bias, recurrent_state, indices, has_initial_state, start
    )
    expected_pages = pages.clone()
    expected_pages.view(torch.float32).as_strided(
        recurrent_state.shape, recurrent_state.stride(), recurrent_state.storage_offset()
    ).copy_(after)
    # Other layers' tensors have lain in the arena.
    sizes = flashkda.workspace_size(capacity, HEADS, SLOTS)
    out_bytes = capacity * width * 2
    arena = torch.full((out_bytes + sizes + 4096,), NAN, dtype=torch.uint8, device=device)
    (out, workspace), rest = carve(arena, ((1, capacity, HEADS, HEAD_DIM), torch.bfloat16), ((sizes,), torch.uint8))
    given = vllm_prefill(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=LOWER_BOUND, recurrent_state=recurrent_state,
        state_indices=indices, has_initial_state=has_initial_state, query_start_loc=start,
        out=out[:, : q.shape[1]], workspace=workspace,
    )  # fmt: skip
    assert same_bits(given, wanted)
    assert same_bits(pages, expected_pages)
    beyond = out[:, q.shape[1] :].contiguous().view(torch.uint8)
    assert bool((beyond == NAN).all()) and bool((rest == NAN).all())


CAPACITY = 8
MOST_TOKENS = 700


@pytest.mark.parametrize("initial", ["fp32", "bf16"])
def test_a_graph_of_capacity_shape_serves_any_number_of_sequences(initial, device, all_bv) -> None:
    flashkda.preload(device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[initial]
    q, k, v, g = (bf16(device, 20 + seed, 1, MOST_TOKENS, HEADS, HEAD_DIM) for seed in range(4))
    beta = bf16(device, 24, 1, MOST_TOKENS, HEADS + 4)[..., :HEADS]
    A_log, dt_bias = fp32(device, 25, 1, 1, HEADS, 1), fp32(device, 26, HEADS * HEAD_DIM)
    states = bf16(device, 27, SLOTS, HEADS, HEAD_DIM, HEAD_DIM).to(dtype)
    checkpoints = filled((MOST_TOKENS // 64 + CAPACITY) * states[0].numel() * 2, device).view(torch.bfloat16)
    checkpoints = checkpoints.view(-1, HEADS, HEAD_DIM, HEAD_DIM)
    blank = checkpoints.clone()
    pool, out = states.clone(), torch.empty_like(v)
    static = {
        "cu_seqlens": torch.zeros(CAPACITY + 1, dtype=torch.int32, device=device),
        "state_indices": torch.full((CAPACITY,), -1, dtype=torch.int32, device=device),
        "has_initial_state": torch.zeros(CAPACITY, dtype=torch.bool, device=device),
        "checkpoint_cu_starts": torch.zeros(CAPACITY + 1, dtype=torch.int32, device=device),
    }
    workspace = filled(flashkda.workspace_size(MOST_TOKENS, HEADS, CAPACITY), device)
    weights = {"A_log": A_log, "dt_bias": dt_bias, "scale": SCALE, "lower_bound": LOWER_BOUND}
    r = random.Random(28)
    for bv in all_bv:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            flashkda.fwd(
                q=q, k=k, v=v, g=g, beta=beta, out=out, initial_state=pool, final_state=pool, workspace=workspace,
                checkpoints=checkpoints, checkpoint_every=64, bv=bv, **weights, **static,
            )  # fmt: skip
        for live in (1, CAPACITY, *r.sample(range(2, CAPACITY), 3)):
            lengths = [r.choice([1, 16, 63, 64, r.randint(1, MOST_TOKENS // CAPACITY)]) for _ in range(live)]
            rows = [-(-length // 64) for length in lengths]
            metadata = {
                "cu_seqlens": query_start_loc(lengths, device),
                "state_indices": torch.tensor(r.sample(range(SLOTS), live), dtype=torch.int32, device=device),
                "has_initial_state": torch.tensor([r.random() < 0.6 for _ in lengths], device=device),
                "checkpoint_cu_starts": query_start_loc(rows, device),
            }
            # Slots of no sequence: offsets repeat the last one, the state index is padding.
            for name, tensor in static.items():
                given = metadata[name]
                tensor[: len(given)] = given
                tensor[len(given) :] = -1 if name == "state_indices" else given[-1]
            pool.copy_(states)
            checkpoints.copy_(blank)
            out.fill_(7.0)
            graph.replay()
            used = sum(lengths)
            eager = {"final_state": states.clone(), "checkpoints": blank.clone(), "out": torch.empty_like(v[:, :used])}
            flashkda.fwd(
                q=q[:, :used], k=k[:, :used], v=v[:, :used], g=g[:, :used], beta=beta[:, :used],
                initial_state=eager["final_state"], checkpoint_every=64, **weights, **metadata, **eager,
            )  # fmt: skip
            assert same_bits(out[:, :used], eager["out"]) and bool((out[:, used:] == 7.0).all())
            assert same_bits(pool, eager["final_state"])
            assert same_bits(checkpoints, eager["checkpoints"])
