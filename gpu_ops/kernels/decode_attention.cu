// Attention of one query a sequence over bf16 pages [pages, kv heads, block tokens, D], by a table for each head or for
// a group of heads, with a window and sinks for each head. Softmax and sums in fp32.
//
// The visible tokens of a sequence and head are cut into tiles of 16, the tiles into splits, one block of threads each;
// its warps take tiles in turn, and what several splits found is put together by merge_splits. Tiles without a visible
// token and holes of the table are passed over, and what is not visible is never read.
//
// No shared memory on the way of keys and values: the products are mma.m16n8k16, whose inner index may be permuted, so a
// lane's 16 bytes of a key row are its share of two steps, and its 16 bytes of four value rows its share of eight:
//   queries x keys:   inner index = D;     lane (g = lane / 4, t = lane % 4) has key g, elements 32 c + 8 t .. + 8
//   weights x values: inner index = token; lane has tokens 2t, 2t + 1, 2t + 8, 2t + 9, elements 64 c + 8 g .. + 8
// and column n of product j of chunk c is element 64 c + 8 n + j.
#include "numbers.cuh"
#include "rows.cuh"
#include "tiles.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int QUERIES = 16;  // rows of a product: query heads that share a kv head
constexpr int PAD_VECTORS = 4;  // between rows of queries, so that two of them lie in different banks

static __device__ __forceinline__ float no_score() { return __int_as_float(0xFF800000); }  // minus infinity

static __device__ __forceinline__ void multiply(float* sum, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ u32 word_of(const uint4& vector, int at) {
    return at == 0 ? vector.x : at == 1 ? vector.y : at == 2 ? vector.z : vector.w;
}

// What a warp found so far: for rows g and g + 8 the largest score, this lane's share of the sum of weights, and sums.
template <int D>
struct Found {
    float most[2], weight[2];
    float sums[D / 8][4];

    __device__ __forceinline__ void clear() {
        most[0] = most[1] = no_score();
        weight[0] = weight[1] = 0.f;
#pragma unroll
        for (int at = 0; at < D / 8; ++at) {
            sums[at][0] = sums[at][1] = sums[at][2] = sums[at][3] = 0.f;
        }
    }

    __device__ __forceinline__ void scale(float upper, float lower) {
        weight[0] *= upper;
        weight[1] *= lower;
#pragma unroll
        for (int at = 0; at < D / 8; ++at) {
            sums[at][0] *= upper;
            sums[at][1] *= upper;
            sums[at][2] *= lower;
            sums[at][3] *= lower;
        }
    }
};

// Scores of 16 tokens in powers of two, minus infinity where not visible. `queries`: rows of D values, padded.
template <int D>
static __device__ __forceinline__ void score(const Tile<D>& tile, const uint4* queries, const Visible& visible,
                                             int first, float log2_scale, float scores[2][4]) {
    constexpr int ROW = D / HALVES_PER_VECTOR + PAD_VECTORS;
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        scores[half][0] = scores[half][1] = scores[half][2] = scores[half][3] = 0.f;
    }
#pragma unroll
    for (int chunk = 0; chunk < Tile<D>::KEY_VECTORS; ++chunk) {
        const uint4 upper = queries[g * ROW + chunk * 4 + t];
        const uint4 lower = queries[(g + 8) * ROW + chunk * 4 + t];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 key = tile.keys[half][chunk];
            multiply(scores[half], upper.x, lower.x, upper.y, lower.y, key.x, key.y);
            multiply(scores[half], upper.z, lower.z, upper.w, lower.w, key.z, key.w);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            const bool is_visible = visible.has(first + half * 8 + 2 * t + at % 2);
            scores[half][at] = is_visible ? scores[half][at] * log2_scale : no_score();
        }
    }
}

// Takes a tile's scores and values in. Scores become weights.
template <int D>
static __device__ __forceinline__ void take_in(const Tile<D>& tile, float scores[2][4], Found<D>* found) {
    float rescale[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float most = fmaxf(fmaxf(scores[0][2 * row], scores[0][2 * row + 1]),
                           fmaxf(scores[1][2 * row], scores[1][2 * row + 1]));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        most = fmaxf(most, found->most[row]);  // a tile has a visible token: this is a number
        rescale[row] = exp2f(found->most[row] - most);
        found->most[row] = most;
    }
    found->scale(rescale[0], rescale[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int at = 0; at < 4; ++at) {
            scores[half][at] = exp2f(scores[half][at] - found->most[at / 2]);
            found->weight[at / 2] += scores[half][at];
        }
    }
    const u32 a0 = Bf16::pack(scores[0][0], scores[0][1]), a1 = Bf16::pack(scores[0][2], scores[0][3]);
    const u32 a2 = Bf16::pack(scores[1][0], scores[1][1]), a3 = Bf16::pack(scores[1][2], scores[1][3]);
#pragma unroll
    for (int chunk = 0; chunk < Tile<D>::VALUE_VECTORS; ++chunk) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 halves = j % 2 ? 0x7632 : 0x5410;  // the upper or the lower ones of two tokens
            const u32 b0 = __byte_perm(word_of(tile.values[0][chunk], j / 2), word_of(tile.values[1][chunk], j / 2),
                                       halves);
            const u32 b1 = __byte_perm(word_of(tile.values[2][chunk], j / 2), word_of(tile.values[3][chunk], j / 2),
                                       halves);
            multiply(found->sums[chunk * 8 + j], a0, a1, a2, a3, b0, b1);
        }
    }
}

template <int D>
static __device__ __forceinline__ void walk_tiles(const Cache& cache, const Visible& visible, const Table& table,
                                                  i64 row, int head, int begin, int end, const uint4* queries,
                                                  float log2_scale, Found<D>* found) {
    constexpr bool READS_AHEAD = D < 256;  // registers do not suffice for more
    const int tiles_of_block = cache.block_tokens / TILE;
    Walk walk = {begin + static_cast<int>(threadIdx.x / WARP), end, 0, 0};
    walk.find(visible, table, row, tiles_of_block);
    if (walk.is_over()) {
        return;
    }
    Tile<D> tile;
    tile.load_keys(cache, visible, walk, head);
    while (true) {
        Walk next = walk;
        next.index += WARPS;
        next.find(visible, table, row, tiles_of_block);
        if (READS_AHEAD) {
            tile.load_values(cache, visible, walk, head);
        }
        float scores[2][4];
        score<D>(tile, queries, visible, walk.tile * TILE, log2_scale, scores);
        if (READS_AHEAD && !next.is_over()) {
            tile.load_keys(cache, visible, next, head);
        }
        if (!READS_AHEAD) {
            tile.load_values(cache, visible, walk, head);
        }
        take_in<D>(tile, scores, found);
        if (next.is_over()) {
            return;
        }
        if (!READS_AHEAD) {
            tile.load_keys(cache, visible, next, head);
        }
        walk = next;
    }
}

template <int D>
struct Shared {
    uint4 queries[QUERIES * (D / HALVES_PER_VECTOR + PAD_VECTORS)];
    float sums[QUERIES][D];
    float most[WARPS][QUERIES], weight[WARPS][QUERIES];
    float whole_most[QUERIES], whole_weight[QUERIES];
};

// Puts together what the block's warps found, in `shared`: sums not divided by their weight yet.
template <int D>
static __device__ __forceinline__ void merge_warps(Shared<D>* shared, Found<D>* found, int rows) {
    const int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float weight = found->weight[row];
        weight += __shfl_xor_sync(ALL_LANES, weight, 1);
        weight += __shfl_xor_sync(ALL_LANES, weight, 2);
        if (t == 0) {
            shared->most[warp][g + 8 * row] = found->most[row];
            shared->weight[warp][g + 8 * row] = weight;
        }
    }
    __syncthreads();
    float rescale[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int query = g + 8 * row;
        float most = no_score(), weight = 0.f;
        for (int other = 0; other < WARPS; ++other) {
            most = fmaxf(most, shared->most[other][query]);
        }
        for (int other = 0; other < WARPS; ++other) {
            const float theirs = shared->most[other][query];
            weight += theirs == no_score() ? 0.f : shared->weight[other][query] * exp2f(theirs - most);
        }
        rescale[row] = found->most[row] == no_score() ? 0.f : exp2f(found->most[row] - most);
        shared->whole_most[query] = most;  // every warp writes the same
        shared->whole_weight[query] = weight;
    }
    found->scale(rescale[0], rescale[1]);
    for (int turn = 0; turn < WARPS; ++turn) {
        if (turn == warp) {
#pragma unroll
            for (int at = 0; at < D / 8; ++at) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int query = g + part / 2 * 8;
                    const int element = at / 8 * VALUE_CHUNK + 8 * (2 * t + part % 2) + at % 8;
                    if (query < rows) {
                        const float before = turn ? shared->sums[query][element] : 0.f;
                        shared->sums[query][element] = before + found->sums[at][part];
                    }
                }
            }
        }
        __syncthreads();
    }
}

static __device__ __forceinline__ u16 narrow(float value) { return static_cast<u16>(Bf16::pack(value, 0.f)); }

// Grid: [splits, kv heads x sixteens of their query heads, sequences].
template <int D>
static __device__ __forceinline__ void attend(const u8* queries, i64 query_stride, i64 query_head_stride,
                                              const Cache& cache, const Table& table, i64 tables, const int* table_of,
                                              const int* windows, const int* sinks, const int* lengths, i64 kv_heads,
                                              i64 shared_by, float log2_scale, u16* out, float* partial_sums,
                                              float* partial_weights) {
    __shared__ Shared<D> shared;
    constexpr int VECTORS = D / HALVES_PER_VECTOR;
    const int sixteens = static_cast<int>((shared_by + QUERIES - 1) / QUERIES);
    const int head = blockIdx.y / sixteens, first_query = blockIdx.y % sixteens * QUERIES;
    const int rows = static_cast<int>(smaller(QUERIES, shared_by - first_query));
    const i64 sequence = blockIdx.z;
    const i64 query_head = head * shared_by + first_query;
    const u8* from = queries + sequence * query_stride + query_head * query_head_stride;
    for (int at = threadIdx.x; at < QUERIES * VECTORS; at += THREADS) {
        const int row = at / VECTORS, vector = at % VECTORS;
        shared.queries[row * (VECTORS + PAD_VECTORS) + vector] =
            row < rows ? reinterpret_cast<const uint4*>(from + row * query_head_stride)[vector] : zeros();
    }
    __syncthreads();
    const Visible visible(lengths[sequence], windows[head], sinks[head]);
    const int splits = gridDim.x;
    const int share = (visible.tiles + splits * WARPS - 1) / (splits * WARPS) * WARPS;
    const int begin = blockIdx.x * share;
    Found<D> found;
    found.clear();
    walk_tiles<D>(cache, visible, table, sequence * tables + table_of[head], head, begin,
                  min(begin + share, visible.tiles), shared.queries, log2_scale, &found);
    merge_warps<D>(&shared, &found, rows);
    const i64 output_row = sequence * kv_heads * shared_by + query_head;
    for (int at = threadIdx.x; at < rows * D; at += THREADS) {
        const int row = at / D, element = at % D;
        const float sum = shared.sums[row][element], weight = shared.whole_weight[row];
        if (splits == 1) {
            out[(output_row + row) * D + element] = narrow(weight > 0.f ? sum / weight : 0.f);
        } else if (weight > 0.f) {
            partial_sums[((output_row + row) * splits + blockIdx.x) * D + element] = sum;
        }
    }
    if (splits > 1 && static_cast<int>(threadIdx.x) < rows) {
        float* to = partial_weights + ((output_row + threadIdx.x) * splits + blockIdx.x) * 2;
        to[0] = shared.whole_most[threadIdx.x];
        to[1] = shared.whole_weight[threadIdx.x];
    }
}

#define DECODE_ATTENTION(D)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        decode_attention_##D(const u8* queries, i64 query_stride, i64 query_head_stride, const u8* keys,               \
                             i64 key_page_stride, i64 key_head_stride, const u8* values, i64 value_page_stride,        \
                             i64 value_head_stride, i64 pages, i64 block_tokens, const int* cells, i64 table_stride,   \
                             i64 columns, i64 tables, const int* table_of, const int* windows, const int* sinks,       \
                             const int* lengths, i64 kv_heads, i64 shared_by, float log2_scale, u16* out,              \
                             float* partial_sums, float* partial_weights) {                                            \
        attend<D>(queries, query_stride, query_head_stride,                                                            \
                  {keys, key_page_stride, key_head_stride, values, value_page_stride, value_head_stride,               \
                   static_cast<int>(block_tokens)},                                                                                      \
                  {cells, table_stride, columns, pages}, tables, table_of, windows, sinks, lengths, kv_heads,          \
                  shared_by, log2_scale, out, partial_sums, partial_weights);                                          \
    }

DECODE_ATTENTION(64)
DECODE_ATTENTION(128)
DECODE_ATTENTION(256)

// One block of threads for each query, one thread for each element.
extern "C" __global__ void merge_splits(const float* partial_sums, const float* partial_weights, i64 splits, u16* out) {
    const i64 query = blockIdx.x;
    const int width = blockDim.x;
    const float* weights = partial_weights + query * splits * 2;
    float most = no_score();
    for (i64 split = 0; split < splits; ++split) {
        most = fmaxf(most, weights[2 * split]);
    }
    float sum = 0.f, weight = 0.f;
    for (i64 split = 0; split < splits; ++split) {
        const float theirs = weights[2 * split + 1];
        if (theirs > 0.f) {  // else its sums were not written
            const float rescale = exp2f(weights[2 * split] - most);
            weight += theirs * rescale;
            sum += partial_sums[(query * splits + split) * width + threadIdx.x] * rescale;
        }
    }
    out[query * width + threadIdx.x] = narrow(weight > 0.f ? sum / weight : 0.f);
}
