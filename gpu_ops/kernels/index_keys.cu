// Writes, reads and gathers indexer keys: 128 fp8 values and one scale a token, in two planes.
//
// A page holds all its values, then all its scales; or the planes lie apart: `values` and `scales` are where page 0's
// begin, each with its stride from page to page. A scale is max(largest, 1e-4) / 448, where asked rounded up to a power
// of two; the largest is that of the finite values. Eight lanes for each token.
#include "numbers.cuh"
#include "rows.cuh"

constexpr int THREADS = 128;
constexpr int VALUES = 16;
constexpr int KEY_VALUES = 128;
constexpr int TOKENS = THREADS / LANES_PER_TILE;
constexpr int IN_FLIGHT = 4;
constexpr int GATHERED = TOKENS * IN_FLIGHT;
constexpr float SMALLEST_LARGEST = 1e-4f;
constexpr i64 POWER_OF_TWO = 1;

struct Planes {
    u8* values;
    i64 value_stride;
    u8* scales;
    i64 scale_stride, pages, block_tokens;
    __device__ __forceinline__ bool has(i64 slot) const { return slot >= 0 && slot < pages * block_tokens; }
    __device__ __forceinline__ uint4* values_of(i64 page, i64 place) const {
        return reinterpret_cast<uint4*>(values + page * value_stride + place * KEY_VALUES);
    }
    __device__ __forceinline__ float* scale_of(i64 page, i64 place) const {
        return reinterpret_cast<float*>(scales + page * scale_stride) + place;
    }
};

static __device__ __forceinline__ float scale_for(float largest, i64 rounding) {
    const float scale = __fdiv_rn(fmaxf(largest, SMALLEST_LARGEST), MAX_E4M3);
    if (rounding != POWER_OF_TWO) {
        return scale;
    }
    return __uint_as_float((__float_as_uint(scale) + 0x7FFFFFu) & 0x7F800000u);  // the next exponent, if there is a rest
}

static __device__ __forceinline__ i64 token_of_lanes() {
    return static_cast<i64>(blockIdx.x) * TOKENS + threadIdx.x / LANES_PER_TILE;
}

template <class Half>
static __device__ __forceinline__ void write_keys(const Planes& planes, const i64* slots, i64 tokens, const u8* keys,
                                                  i64 key_stride, i64 rounding) {
    const i64 token = token_of_lanes();
    const int lane = threadIdx.x % LANES_PER_TILE;
    const i64 slot = token < tokens ? slots[token] : -1;
    float values[VALUES] = {};
    if (planes.has(slot)) {
        const uint4* from = reinterpret_cast<const uint4*>(keys + token * key_stride) + 2 * lane;
        const uint4 first = from[0], second = from[1];
        widen_vector<Half>(first, values);
        widen_vector<Half>(second, values + HALVES_PER_VECTOR);
    }
    const float scale = scale_for(largest_of_tile(values), rounding);
    if (planes.has(slot)) {
        const i64 page = slot / planes.block_tokens, place = slot % planes.block_tokens;
        planes.values_of(page, place)[lane] = encode_vector(values, scale);
        if (lane == 0) {
            *planes.scale_of(page, place) = scale;
        }
    }
}

template <class Half>
static __device__ __forceinline__ void read_keys(const Planes& planes, const i64* slots, i64 tokens, uint4* keys) {
    const i64 token = token_of_lanes();
    const int lane = threadIdx.x % LANES_PER_TILE;
    if (token >= tokens) {
        return;
    }
    const i64 slot = slots[token];
    uint4 first = zeros(), second = zeros();
    if (planes.has(slot)) {
        const i64 page = slot / planes.block_tokens, place = slot % planes.block_tokens;
        scaled_vector<Half>(planes.values_of(page, place)[lane], *planes.scale_of(page, place), &first, &second);
    }
    keys[token * VALUES + 2 * lane] = first;  // a key of 128 values is sixteen vectors
    keys[token * VALUES + 2 * lane + 1] = second;
}

#define INDEX_KEYS(SUFFIX, HALF)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        write_index_keys_##SUFFIX(u8* values, i64 value_stride, u8* scales, i64 scale_stride, i64 pages,               \
                                  i64 block_tokens, const i64* slots, i64 tokens, const u8* keys, i64 key_stride,      \
                                  i64 rounding) {                                                                      \
        write_keys<HALF>({values, value_stride, scales, scale_stride, pages, block_tokens}, slots, tokens, keys,       \
                         key_stride, rounding);                                                                        \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        read_index_keys_##SUFFIX(u8* values, i64 value_stride, u8* scales, i64 scale_stride, i64 pages,                \
                                 i64 block_tokens, const i64* slots, i64 tokens, uint4* keys) {                        \
        read_keys<HALF>({values, value_stride, scales, scale_stride, pages, block_tokens}, slots, tokens, keys);       \
    }

INDEX_KEYS(bf16, Bf16)
INDEX_KEYS(fp16, Fp16)

// Codes and scales of all keys of a batch, one after another: row b's positions 0, 1, ... begin at starts_k[b]. A hole
// of the table becomes zeros, and what lies beyond starts_k[rows] is not touched.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_index_keys(u8* values, i64 value_stride, u8* scales, i64 scale_stride, i64 pages, i64 block_tokens,
                      const int* cells, i64 table_stride, i64 columns, const int* starts_k, i64 rows, uint4* values_out,
                      float* scales_out, i64 tokens) {
    __shared__ const uint4* sources[GATHERED];
    const Planes planes = {values, value_stride, scales, scale_stride, pages, block_tokens};
    const Table table = {cells, table_stride, columns, pages};
    const i64 first = static_cast<i64>(blockIdx.x) * GATHERED;
    const int count = static_cast<int>(smaller(GATHERED, smaller(tokens, starts_k[rows]) - first));
    if (static_cast<int>(threadIdx.x) < count) {
        const i64 token = first + threadIdx.x;
        const i64 row = row_of(starts_k, rows, token);
        const i64 position = token - starts_k[row];
        const i64 page = table.page_of(row, position / block_tokens);
        sources[threadIdx.x] = page < 0 ? nullptr : planes.values_of(page, position % block_tokens);
        scales_out[token] = page < 0 ? 0.f : *planes.scale_of(page, position % block_tokens);
    }
    __syncthreads();
    const int token = threadIdx.x / LANES_PER_TILE, lane = threadIdx.x % LANES_PER_TILE;
    uint4 held[IN_FLIGHT];
#pragma unroll
    for (int step = 0; step < IN_FLIGHT; ++step) {
        const int at = token + step * TOKENS;
        held[step] = at < count && sources[at] ? sources[at][lane] : zeros();
    }
#pragma unroll
    for (int step = 0; step < IN_FLIGHT; ++step) {
        const int at = token + step * TOKENS;
        if (at < count) {
            values_out[(first + at) * LANES_PER_TILE + lane] = held[step];
        }
    }
}
