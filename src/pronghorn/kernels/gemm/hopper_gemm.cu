// Products x W^T of bf16 on Hopper with what follows them done before the result leaves the multiprocessor.
//
//   GATED   [gate | up] = x W^T, W [2 F, K], is kept for the backward pass, and a = act(gate) up is written beside it: 537 MB
//           at 16,384 tokens and F = 8,192 that a separate kernel would read.
//   POWERS  2^(logit scale - anchor) of logits = x W^T, W [V, K], with the sum and the largest logit of each row of a tile,
//           and each row's logit at its label.
//   ROPE  [q | k | v] = x W^T, W [heads H, K], q and k rotated by RoPE: by halves, over the whole head.
//
// One block a multiprocessor, two blocks a cluster, which have the same columns and rows beside each other: each loads one half
// of the weight's tile for both. In a block one warp copies and two groups of four warps compute, each a tile of its own; while
// one multiplies, the other gives its results away, so that the tensor cores do not wait for that (which is what a step spends
// at its power limit on, see docs/log/2026-11-16-power-limit.md).
//
// Given by -D: one of GATED, POWERS and ROPE, HALF (columns of the half of a tile), STAGES, BUFFERS, LAST (sixteenths of
// terms that the last tile of them has); GELU for GATED (0: SiLU).
// The last terms of x may lie in a tensor of their own (`lora`): what adapters add, x A^T.
//
// The line WGMMA is replaced by the instruction for HALF before it is compiled.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 words[16]; };

#define ENDLESS __int_as_float(0x7f800000)
constexpr int ROWS = 128, TERMS = 64;  // of a tile
constexpr int COLUMNS = 2 * HALF, GROUPS = COLUMNS / 8;
constexpr u32 X_BYTES = ROWS * TERMS * 2, W_BYTES = HALF * TERMS * 2, STAGE_BYTES = X_BYTES + 2 * W_BYTES;
// What a group of warps gives away at a time: CHUNK columns of 64 rows; of gate, up and a, or of both halves of a head.
#if POWERS
constexpr int CHUNK = 64, CHUNKS = COLUMNS / CHUNK, GIVEN = 1;
#else
constexpr int CHUNK = 32, CHUNKS = HALF / CHUNK, GIVEN = GATED ? 3 : 2;
#endif
constexpr u32 CHUNK_BYTES = 64 * CHUNK * 2, BUFFER_BYTES = GIVEN * CHUNK_BYTES;

// ---- shared memory and its barriers

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}\n" ::"r"(barrier), "r"(parity) : "memory");
}

// Without a scope of its own: `.release.cluster` would wait for all of this thread's stores, 0.9 us a time.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- copies

// In the L2 cache: results, which are larger than it, leave first, and weights, which all rows need, last.
__device__ __forceinline__ u64 leaves_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 leaves_last() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void load(u32 to, const TensorMap* map, u32 barrier, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}

__device__ __forceinline__ void load_for_both(u32 to, const TensorMap* map, u32 barrier, int c0, int c1, int c2) {
  unsigned short both = 3;
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
               ::"r"(to), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(both), "l"(leaves_last()) : "memory");
}

__device__ __forceinline__ void give(const TensorMap* map, u32 from, int c0, int c1, int c2, u64 policy) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;"
               ::"l"(map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "l"(policy) : "memory");
}

// ---- the tensor cores

// A tile of shared memory with 64 terms, 128 bytes, a row, swizzled by the copy engine; groups of 8 rows lie 1,024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply(float (&d)[GROUPS * 4], u64 x, u64 w, int add) {
@WGMMA@
}

// The next tile of terms, of which PARTS sixteenths count, is on its way when this returns, and the one before is done. Sixteen
// terms are 32 bytes, 64 rows 8,192.
template <int PARTS>
__device__ __forceinline__ void multiply_tile(float (&d)[2][GROUPS * 4], u32 at, bool adds) {
  u64 x = descriptor(at), w = descriptor(at + X_BYTES);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    multiply(d[0], x + 2 * part, w + 2 * part, adds || part > 0);
    multiply(d[1], x + 512 + 2 * part, w + 2 * part, adds || part > 0);
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// ---- numbers

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_of(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_of(u32 packed) { return __uint_as_float(packed & 0xFFFF0000u); }

__device__ __forceinline__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ __forceinline__ void store_matrices(u32 to, const u32 (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3]) : "memory");
}

// ---- where

struct Place { int row_pair, column; };

// `band` column tiles at a time and all rows for each, so that the band's weights stay in the L2 cache while the rows pass by.
__device__ __forceinline__ Place place_of(int tile, int row_pairs, int column_tiles, int band) {
  int first = tile / (row_pairs * band) * band, wide = min(band, column_tiles - first), rest = tile - first * row_pairs;
  return {rest / wide, first + rest % wide};
}

// columns: F, V or heads H; x has the first tiles of terms, its LoRA columns the others
struct Sizes { int rows, columns, row_pairs, column_tiles, k_tiles, x_tiles, band; };

struct Mine {  // a thread's part in giving a tile away
  int thread, warp, lane, group;
  u32 buffers;
  u64 policy;
};

// Before a buffer is written: what left it BUFFERS chunks ago has been read.
__device__ __forceinline__ u32 free_buffer(const Mine& mine, int number) {
  if (mine.thread == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUFFERS - 1) : "memory");
  sync(3 + mine.group, 128);
  return mine.buffers + number % BUFFERS * BUFFER_BYTES;
}

__device__ __forceinline__ void written(const Mine& mine) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync(3 + mine.group, 128);
}

// Of a tile's 8 x 8 matrices, a thread names the place of one row: four of them at a time, two above each other and two beside.
__device__ __forceinline__ u32 matrix_row(const Mine& mine, int pair) {
  int matrix = mine.lane / 8, row = mine.warp * 16 + matrix % 2 * 8 + mine.lane % 8, column = pair * 2 + matrix / 2;
  return CHUNK == 32 ? row * 64 + (column ^ (row >> 1 & 3)) * 16 : row * 128 + (column ^ (row & 7)) * 16;
}

#if GATED

__device__ __forceinline__ float gated(float gate, float up) {
#if GELU
  float near = fminf(fmaxf(gate, -10.0f), 10.0f);
  float power = near * (-2.302208198144325f - 0.10294323838002349f * (near * near));
#else
  float power = gate * -1.4426950408889634f;
#endif
  float sigmoid;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(power_of_2(power) + 1.0f));
#if GELU
  sigmoid = gate > -10.0f ? sigmoid : 0.0f;
#endif
  return gate * sigmoid * up;
}

__device__ __forceinline__ void give_tile(
    const float (&d)[2][GROUPS * 4], const Mine& mine, const TensorMap* gu, const TensorMap* a, const Sizes& sizes, int row,
    int tile) {
#pragma unroll
  for (int part = 0; part < 2 * CHUNKS; ++part) {
    int half = part / CHUNKS, chunk = part % CHUNKS, column = tile * HALF + chunk * CHUNK;
    u32 buffer = free_buffer(mine, part);
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) {
      u32 gate[4], up[4], product[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int j = (chunk * (CHUNK / 8) + pair * 2 + i / 2) * 4 + i % 2 * 2, k = j + HALF / 2;
        gate[i] = pack(d[half][j], d[half][j + 1]);
        up[i] = pack(d[half][k], d[half][k + 1]);
        product[i] = pack(gated(low_of(gate[i]), low_of(up[i])), gated(high_of(gate[i]), high_of(up[i])));
      }
      u32 to = buffer + matrix_row(mine, pair);
      store_matrices(to, gate);
      store_matrices(to + CHUNK_BYTES, up);
      store_matrices(to + 2 * CHUNK_BYTES, product);
    }
    written(mine);
    if (mine.thread == 0) {
      if (column < sizes.columns) {
        give(gu, buffer, column, 0, row + half * 64, mine.policy);
        give(gu, buffer + CHUNK_BYTES, column, 1, row + half * 64, mine.policy);
        give(a, buffer + 2 * CHUNK_BYTES, column, 0, row + half * 64, mine.policy);
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}

#elif POWERS

struct Labels { const float* anchors; const long long* labels; float* logits; };  // of each row

__device__ __forceinline__ void give_tile(
    const float (&d)[2][GROUPS * 4], const Mine& mine, const TensorMap* powers, const Labels& labels, float scale, float* sums,
    const Sizes& sizes, int row, int tile) {
  int left = sizes.columns - tile * COLUMNS - mine.lane % 4 * 2;  // columns from this thread's first one on
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int own = row + half * 64 + mine.warp * 16 + mine.lane / 4;
    float anchor[2], sum[2] = {0.0f, 0.0f}, most[2] = {-ENDLESS, -ENDLESS}, at_label[2] = {0.0f, 0.0f};
    int label[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bool there = own + 8 * i < sizes.rows;
      anchor[i] = there ? labels.anchors[own + 8 * i] : ENDLESS;
      label[i] = there ? (int)labels.labels[own + 8 * i] - (tile * COLUMNS + mine.lane % 4 * 2) : -1;  // among this thread's
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
      u32 buffer = free_buffer(mine, half * CHUNKS + chunk);
#pragma unroll
      for (int pair = 0; pair < CHUNK / 16; ++pair) {
        u32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int group = chunk * (CHUNK / 8) + pair * 2 + i / 2, j = group * 4 + i % 2 * 2;
          float low = group * 8 < left ? d[half][j] : -ENDLESS, high = group * 8 + 1 < left ? d[half][j + 1] : -ENDLESS;
          // A select for each: an index that is not known beforehand would put all of d into local memory.
          at_label[i % 2] = label[i % 2] == group * 8 ? low : label[i % 2] == group * 8 + 1 ? high : at_label[i % 2];
          most[i % 2] = fmaxf(most[i % 2], fmaxf(low, high));
          low = power_of_2(low * scale - anchor[i % 2]);
          high = power_of_2(high * scale - anchor[i % 2]);
          sum[i % 2] += low + high;
          packed[i] = pack(low, high);
        }
        store_matrices(buffer + matrix_row(mine, pair), packed);
      }
      written(mine);
      if (mine.thread == 0) {
        int column = tile * COLUMNS + chunk * CHUNK;
        if (column < sizes.columns) give(powers, buffer, column, 0, row + half * 64, mine.policy);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2) {
        sum[i] += __shfl_xor_sync(0xffffffff, sum[i], apart);
        most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffff, most[i], apart));
      }
      if (label[i] >= 0 && label[i] < COLUMNS && label[i] % 8 < 2) labels.logits[own + 8 * i] = at_label[i];
      if (mine.lane % 4 == 0 && own + 8 * i < sizes.rows) {
        sums[(u64)tile * sizes.rows + own + 8 * i] = sum[i];
        sums[(u64)(sizes.column_tiles + tile) * sizes.rows + own + 8 * i] = most[i];
      }
    }
  }
}

#else

struct Heads { int rotated, width; };  // heads of q and k, and of what width all are

// A tile has CHUNKS units, each of CHUNK columns of a head's lower half and the same of its upper half.
__device__ __forceinline__ int unit_column(const Heads& heads, int unit) {
  int units = heads.width / (2 * CHUNK);
  return unit / units * heads.width + unit % units * CHUNK;
}

__device__ __forceinline__ void give_tile(
    const float (&d)[2][GROUPS * 4], const Mine& mine, const TensorMap* qkv, const float* cos, const float* sin,
    const Heads& heads, const Sizes& sizes, int row, int tile) {
#pragma unroll
  for (int part = 0; part < 2 * CHUNKS; ++part) {
    int half = part / CHUNKS, chunk = part % CHUNKS, column = unit_column(heads, tile * CHUNKS + chunk);
    bool rotates = column / heads.width < heads.rotated;
    int own = row + half * 64 + mine.warp * 16 + mine.lane / 4, angle = column % heads.width + mine.lane % 4 * 2;
    u32 buffer = free_buffer(mine, part);
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; ++pair) {
      u32 lower[4], upper[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int j = (chunk * (CHUNK / 8) + pair * 2 + i / 2) * 4 + i % 2 * 2, k = j + HALF / 2;
        float2 c = {1.0f, 1.0f}, s = {0.0f, 0.0f};
        if (rotates && own + i % 2 * 8 < sizes.rows) {
          u64 at = (u64)(own + i % 2 * 8) * (heads.width / 2) + angle + (pair * 2 + i / 2) * 8;
          c = *(const float2*)(cos + at);
          s = *(const float2*)(sin + at);
        }
        lower[i] = pack(d[half][j] * c.x - d[half][k] * s.x, d[half][j + 1] * c.y - d[half][k + 1] * s.y);
        upper[i] = pack(d[half][k] * c.x + d[half][j] * s.x, d[half][k + 1] * c.y + d[half][j + 1] * s.y);
      }
      u32 to = buffer + matrix_row(mine, pair);
      store_matrices(to, lower);
      store_matrices(to + CHUNK_BYTES, upper);
    }
    written(mine);
    if (mine.thread == 0) {
      if (column < sizes.columns) {
        give(qkv, buffer, column, 0, row + half * 64, mine.policy);
        give(qkv, buffer + CHUNK_BYTES, column + heads.width / 2, 0, row + half * 64, mine.policy);
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}

#endif

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) hopper_gemm(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap lora, const __grid_constant__ TensorMap w,
    const __grid_constant__ TensorMap out,
#if GATED
    const __grid_constant__ TensorMap a,
#elif POWERS
    const Labels labels, float scale, float* sums, const int* wanted,
#else
    const float* cos, const float* sin, const Heads heads,
#endif
    const Sizes sizes) {
#if POWERS
  if (wanted && !*wanted) return;
#endif
  extern __shared__ unsigned char memory[];
  u32 base = (shared_address(memory) + 1023) & ~1023u, buffers = base + STAGES * STAGE_BYTES;
  u32 full = buffers + 2 * BUFFERS * BUFFER_BYTES, empty = full + STAGES * 8, rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  int cluster = blockIdx.x / 2, clusters = gridDim.x / 2, tiles = sizes.row_pairs * sizes.column_tiles;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full + 8 * stage, 1);
      barrier_init(empty + 8 * stage, 2);  // by one of each block: what is loaded for both must be free in both
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  int role = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (role == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0;
      u32 parity = 1;
      for (int tile = cluster; tile < tiles; tile += clusters) {
        Place place = place_of(tile, sizes.row_pairs, sizes.column_tiles, sizes.band);
        int row = (2 * place.row_pair + rank) * ROWS;
        for (int k = 0; k < sizes.k_tiles; ++k) {
          u32 to = base + stage * STAGE_BYTES, barrier = full + 8 * stage;
          barrier_wait(empty + 8 * stage, parity);
          barrier_expect(barrier, STAGE_BYTES);
          if (k < sizes.x_tiles) load(to, &x, barrier, k * TERMS, row);
          else load(to, &lora, barrier, (k - sizes.x_tiles) * TERMS, row);
#if GATED
          load_for_both(to + X_BYTES + rank * W_BYTES, &w, barrier, k * TERMS, place.column * HALF, rank);
#elif POWERS
          load_for_both(to + X_BYTES + rank * W_BYTES, &w, barrier, k * TERMS, place.column * COLUMNS + rank * HALF, 0);
#else
          for (int chunk = 0; chunk < CHUNKS; ++chunk)
            load_for_both(to + X_BYTES + rank * W_BYTES + chunk * CHUNK * TERMS * 2, &w, barrier, k * TERMS,
                          unit_column(heads, place.column * CHUNKS + chunk) + rank * (heads.width / 2), 0);
#endif
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int thread = threadIdx.x % 128, group = role - 1;
    Mine mine = {thread, thread / 32, thread % 32, group, buffers + group * BUFFERS * BUFFER_BYTES, leaves_first()};
    if (group == 1) arrive(1, 256);  // the first tile is group 0's
    int count = 0;
    for (int tile = cluster; tile < tiles; tile += clusters, ++count) {
      if (count % 2 != group) continue;
      Place place = place_of(tile, sizes.row_pairs, sizes.column_tiles, sizes.band);
      int row = (2 * place.row_pair + rank) * ROWS;
      u32 step = (u32)count * sizes.k_tiles, parity = step / STAGES & 1;
      int stage = step % STAGES, before = 0;
      float d[2][GROUPS * 4];
      sync(1 + group, 256);  // the other group has seen all that was loaded for it
      for (int k = 0; k < sizes.k_tiles - (LAST < 4); ++k) {
        u32 at = base + stage * STAGE_BYTES;
        barrier_wait(full + 8 * stage, parity);
        multiply_tile<TERMS / 16>(d, at, k > 0);
        if (k > 0 && thread < 2) barrier_arrive_at(empty + 8 * before, thread);
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
#if LAST < 4
      {  // the last tile of terms is not full
        u32 at = base + stage * STAGE_BYTES;
        barrier_wait(full + 8 * stage, parity);
        multiply_tile<LAST>(d, at, sizes.k_tiles > 1);
        if (sizes.k_tiles > 1 && thread < 2) barrier_arrive_at(empty + 8 * before, thread);
        before = stage;
      }
#endif
      arrive(2 - group, 256);
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < 2) barrier_arrive_at(empty + 8 * before, thread);
#if GATED
      give_tile(d, mine, &out, &a, sizes, row, place.column);
#elif ROPE
      give_tile(d, mine, &out, cos, sin, heads, sizes, row, place.column);
#else
      give_tile(d, mine, &out, labels, scale, sums, sizes, row, place.column);
#endif
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  cluster_sync();  // until then the other block may load for both, or arrive here
}
