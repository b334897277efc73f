"""Ragged multi-head attention with log-sum-exp on Hopper, for keys of 192 and values of 128 dims in bf16.

A program has three parts that run beside each other: one warp copies tiles into shared memory, and two warpgroups take 64 queries each.
The two take turns at the matrix units: while one multiplies, the other does its softmax. Within a warpgroup the product of one tile's
probabilities with its values runs beside the softmax of the next tile's scores. Tiles of keys go from the last to the first, so that those
with masks come first.

    copy         K3 | K2  V3 | K1  V2 | K0  V1 | V0           k and v: two stages each, a barrier for "full" and one for "empty"
    multiply     S3 | S2 P3V3 | S1 P2V2 | S0 P1V1 | P0V0
    softmax         P3   |   P2    |   P1    |   P0
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

KEY_DIM, VALUE_DIM, BLOCK_M, BLOCK_N = 192, 128, 128, 128
_LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
_LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
_M: gl.constexpr = gl.constexpr(BLOCK_M)
_N: gl.constexpr = gl.constexpr(BLOCK_N)
_HALF: gl.constexpr = gl.constexpr(BLOCK_M // 2)
_STAGES: gl.constexpr = gl.constexpr(2)
# A key is copied in two parts, 192 = 128 + 64.
_A: gl.constexpr = gl.constexpr(128)
_B: gl.constexpr = gl.constexpr(64)
_K: gl.constexpr = gl.constexpr(KEY_DIM)
_V: gl.constexpr = gl.constexpr(VALUE_DIM)


@gluon.jit
def _tile(i, q_starts_ptr, k_starts_ptr, num_seqs, num_places, num_tiles, CAUSAL: gl.constexpr):
    """The i-th tile of this program: whether there is one, its head and block of queries, first query and key of the sequence, their
    numbers, how many tiles of keys all its queries see whole, and how many any sees (one, if none).

    Each head has places for the blocks of all sequences, one after the other: those of sequence s begin at `starts[s] // 128 + s`, which
    leaves at most one place too many for each. The longest tiles of a sequence come first. From round to round a program moves on by seven
    places, so that none meets long tiles, or empty places, each time.
    """
    programs = gl.num_programs(0)
    tile = i * programs + (gl.program_id(0) + 7 * i) % programs
    head = tile // num_places
    place = num_places - 1 - tile % num_places
    seq, after = gl.to_tensor(0), num_seqs
    while after - seq > 1:
        middle = (seq + after) // 2
        here = gl.load(q_starts_ptr + middle) // _M + middle <= place
        seq, after = gl.where(here, middle, seq), gl.where(here, after, middle)
    q_first, k_first = gl.load(q_starts_ptr + seq), gl.load(k_starts_ptr + seq)
    q_len, k_len = gl.load(q_starts_ptr + seq + 1) - q_first, gl.load(k_starts_ptr + seq + 1) - k_first
    block = place - (q_first // _M + seq)
    whole, high = k_len, k_len
    if CAUSAL:
        whole = gl.minimum(k_len, gl.maximum(0, k_len - q_len + 1 + block * _M))
        high = gl.minimum(k_len, k_len - q_len + (block + 1) * _M)
    count = gl.maximum(1, (high + _N - 1) // _N)
    return (tile < num_tiles) & (block * _M < q_len), head, block, q_first, q_len, k_first, k_len, whole // _N, count


@gluon.jit
def _next(stage, phase):
    stage += 1
    return gl.where(stage == _STAGES, 0, stage), gl.where(stage == _STAGES, phase ^ 1, phase)


@gluon.jit
def _copy(
    q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc, q_a, q_b, k_a, k_b, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    q_starts_ptr, k_starts_ptr, num_heads, num_seqs, num_places, num_tiles, rounds, CAUSAL: gl.constexpr,
):  # fmt: skip
    # The first wait for an empty place passes: a fresh barrier's phase before the first counts as over.
    q_phase = gl.to_tensor(1)
    k_stage, k_phase, v_stage, v_phase = gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(0), gl.to_tensor(1)
    for i in range(rounds):
        real, head, block, q_first, _, k_first, _, _, count = _tile(
            i, q_starts_ptr, k_starts_ptr, num_seqs, num_places, num_tiles, CAUSAL
        )  # fmt: skip
        if real:
            mbarrier.wait(q_empty, q_phase)
            q_phase ^= 1
            mbarrier.expect(q_full, _M * _K * 2)
            for half in gl.static_range(2):
                row = q_first + block * _M + half * _HALF
                tma.async_copy_global_to_shared(q_a_desc, [row, head * _K], q_full, q_a.index(half))
                tma.async_copy_global_to_shared(q_b_desc, [row, head * _K + _A], q_full, q_b.index(half))
            for j in range(count + 1):
                if j < count:
                    row = k_first + (count - 1 - j) * _N
                    full = k_full.index(k_stage)
                    mbarrier.wait(k_empty.index(k_stage), k_phase)
                    mbarrier.expect(full, _N * _K * 2)
                    tma.async_copy_global_to_shared(k_a_desc, [row, head * _K], full, k_a.index(k_stage))
                    tma.async_copy_global_to_shared(k_b_desc, [row, head * _K + _A], full, k_b.index(k_stage))
                    k_stage, k_phase = _next(k_stage, k_phase)
                if j > 0:
                    row = k_first + (count - j) * _N
                    full = v_full.index(v_stage)
                    mbarrier.wait(v_empty.index(v_stage), v_phase)
                    mbarrier.expect(full, _N * _V * 2)
                    tma.async_copy_global_to_shared(v_desc, [row, head * _V], full, v.index(v_stage))
                    v_stage, v_phase = _next(v_stage, v_phase)


@gluon.jit
def _release(barrier):
    """One warpgroup is done with what the barrier guards: all its warps are, and one thread says so."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _start_scores(q_a, q_b, k_a, k_b, layout: gl.constexpr):
    scores = gl.zeros((_HALF, _N), gl.float32, layout)
    scores = warpgroup_mma(q_a, k_a.permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(q_b, k_b.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _softmax(scores, top, total, scale, first_key, k_len, visible, MASKED: gl.constexpr):
    """scale includes log2(e). Returns probabilities fp32, and how much what came before decays."""
    if MASKED:
        position = first_key + gl.arange(0, _N, gl.SliceLayout(0, scores.type.layout))
        seen = (position < k_len)[None, :] & (position[None, :] < visible[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    shift = new_top * scale
    if MASKED:
        shift = gl.where(new_top == float("-inf"), 0.0, shift)
    probs = gl.exp2(scores * scale - shift[:, None])
    decay = gl.exp2(top * scale - shift)
    return probs, new_top, total * decay + gl.sum(probs, 1), decay


@gluon.jit
def _step(
    q_a, q_b, k_a, k_b, v, k_full, k_empty, v_full, v_empty, k_stage, k_phase, v_stage, v_phase, mine, other, turn, probs, top, total, acc,
    scale, first_key, k_len, visible, nowhere, score_layout: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of one tile of keys, beside the product of the tile before with its values. nowhere: a pointer, see below."""
    mbarrier.wait(k_full.index(k_stage), k_phase)
    mbarrier.wait(mine, turn)
    scores = _start_scores(q_a, q_b, k_a.index(k_stage), k_b.index(k_stage), score_layout)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = warpgroup_mma(probs, v.index(v_stage), acc, is_async=True)
    mbarrier.arrive(other, count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    _release(k_empty.index(k_stage))
    new_probs, top, total, decay = _softmax(scores, top, total, scale, first_key, k_len, visible, MASKED)
    # A store that never happens, and a barrier behind it: without them the assembler moves the wait before the softmax.
    gl.store(nowhere + gl.zeros_like(visible), total, total < 0)
    gl.thread_barrier()
    acc = warpgroup_mma_wait(0, deps=[acc])
    _release(v_empty.index(v_stage))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    probs = gl.convert_layout(new_probs.to(gl.bfloat16), probs.type.layout)
    k_stage, k_phase = _next(k_stage, k_phase)
    v_stage, v_phase = _next(v_stage, v_phase)
    return k_stage, k_phase, v_stage, v_phase, turn ^ 1, probs, top, total, acc


@gluon.jit
def _multiply(
    q_a, q_b, k_a, k_b, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, mine, other, out_ptr, lse_ptr, q_starts_ptr, k_starts_ptr,
    num_heads, num_seqs, num_places, num_tiles, rounds, scale, HALF: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Half of each tile's queries. mine, other: whose turn at the matrix units it is."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _V, 16])
    probs_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    scale = scale * _LOG2_E
    q_phase, turn = gl.to_tensor(0), gl.to_tensor(0)
    k_stage, k_phase, v_stage, v_phase = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    q_a, q_b = q_a.index(HALF), q_b.index(HALF)
    for i in range(rounds):
        real, head, block, q_first, q_len, _, k_len, whole, count = _tile(
            i, q_starts_ptr, k_starts_ptr, num_seqs, num_places, num_tiles, CAUSAL
        )  # fmt: skip
        if real:
            rows = block * _M + HALF * _HALF + gl.arange(0, _HALF, rows_layout)
            visible = k_len + gl.zeros_like(rows)
            if CAUSAL:
                visible = k_len - q_len + 1 + rows
            top = gl.full((_HALF,), float("-inf"), gl.float32, rows_layout)
            total = gl.zeros((_HALF,), gl.float32, rows_layout)
            acc = gl.zeros((_HALF, _V), gl.float32, out_layout)
            mbarrier.wait(q_full, q_phase)
            mbarrier.wait(k_full.index(k_stage), k_phase)
            mbarrier.wait(mine, turn)
            scores = _start_scores(q_a, q_b, k_a.index(k_stage), k_b.index(k_stage), score_layout)
            mbarrier.arrive(other, count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            _release(k_empty.index(k_stage))
            k_stage, k_phase = _next(k_stage, k_phase)
            q_phase, turn = q_phase ^ 1, turn ^ 1
            fp32_probs, top, total, _ = _softmax(scores, top, total, scale, (count - 1) * _N, k_len, visible, True)
            probs = gl.convert_layout(fp32_probs.to(gl.bfloat16), probs_layout)
            masked = gl.maximum(0, count - 1 - whole)
            for j in range(masked):
                k_stage, k_phase, v_stage, v_phase, turn, probs, top, total, acc = _step(
                    q_a, q_b, k_a, k_b, v, k_full, k_empty, v_full, v_empty, k_stage, k_phase, v_stage, v_phase, mine, other, turn,
                    probs, top, total, acc, scale, (count - 2 - j) * _N, k_len, visible, lse_ptr, score_layout, True,
                )  # fmt: skip
            for _ in range(count - 1 - masked):
                k_stage, k_phase, v_stage, v_phase, turn, probs, top, total, acc = _step(
                    q_a, q_b, k_a, k_b, v, k_full, k_empty, v_full, v_empty, k_stage, k_phase, v_stage, v_phase, mine, other, turn,
                    probs, top, total, acc, scale, 0, k_len, visible, lse_ptr, score_layout, False,
                )  # fmt: skip
            # The tile's last scores are done, so its queries may be overwritten.
            mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(probs, v.index(v_stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(v_empty.index(v_stage))
            v_stage, v_phase = _next(v_stage, v_phase)
            _store(acc, top * scale, total, out_ptr, lse_ptr, q_first, rows, q_len, head, num_heads)


@gluon.jit
def _store(acc, top, total, out_ptr, lse_ptr, q_first, rows, q_len, head, num_heads):
    """out `[T, H, 128]` and lse `[T, H]` of half a tile; top in powers of two."""
    seen = total > 0.0
    lse = gl.where(seen, (top + gl.log2(total)) * _LN_2, float("-inf"))
    gl.store(lse_ptr + (q_first + rows).to(gl.int64) * num_heads + head, lse, rows < q_len)
    row_layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    acc = acc * gl.convert_layout(1.0 / gl.where(seen, total, 1.0), row_layout)[:, None]
    rows = gl.convert_layout(rows, row_layout)
    cols = gl.arange(0, _V, gl.SliceLayout(0, acc.type.layout))
    place = ((q_first + rows).to(gl.int64) * num_heads + head) * _V
    gl.store(out_ptr + place[:, None] + cols[None, :], acc.to(gl.bfloat16), (rows < q_len)[:, None] & (cols < _V)[None, :])


@gluon.jit(do_not_specialize=["num_seqs", "num_places", "num_tiles"])
def hopper_prefill_kernel(
    q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc, out_ptr, lse_ptr, q_starts_ptr, k_starts_ptr, num_heads, num_seqs, num_places,
    num_tiles, scale, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Grid (programs that run at once,), 4 warps. num_places: tokens // 128 + sequences; num_tiles: heads x num_places.

    Descriptors of q `[T, H * 192]` with boxes of 64 x 128 and 64 x 64, k likewise with 128 rows, v `[S, H * 128]` with 128 x 128.
    """
    q_a = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, _A], q_a_desc.layout)
    q_b = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, _B], q_b_desc.layout)
    k_a = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _N, _A], k_a_desc.layout)
    k_b = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _N, _B], k_b_desc.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _N, _V], v_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    q_full, q_empty, turn_0, turn_1 = bars.index(0), bars.index(1), bars.index(2), bars.index(3)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(turn_0, count=1)
    mbarrier.init(turn_1, count=1)
    for s in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    fence_async_shared()
    mbarrier.arrive(turn_0, count=1)
    rounds = (num_tiles + gl.num_programs(0) - 1) // gl.num_programs(0)
    gl.warp_specialize(
        [
            (_multiply, (q_a, q_b, k_a, k_b, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn_0, turn_1, out_ptr, lse_ptr,
                         q_starts_ptr, k_starts_ptr, num_heads, num_seqs, num_places, num_tiles, rounds, scale, 0, CAUSAL)),
            (_multiply, (q_a, q_b, k_a, k_b, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn_1, turn_0, out_ptr, lse_ptr,
                         q_starts_ptr, k_starts_ptr, num_heads, num_seqs, num_places, num_tiles, rounds, scale, 1, CAUSAL)),
            (_copy, (q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc, q_a, q_b, k_a, k_b, v, q_full, q_empty, k_full, k_empty, v_full,
                     v_empty, q_starts_ptr, k_starts_ptr, num_heads, num_seqs, num_places, num_tiles, rounds, CAUSAL)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )  # fmt: skip
