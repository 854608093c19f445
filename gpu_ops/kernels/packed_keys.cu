// Writes and reads packed keys: rows of fp8 values, a scale for each 128 of them, and rope in sixteen-bit floats as is.
//
// A tile's scale is max(largest / 448, smallest normal float), not rounded; the largest is that of the finite values.
// One warp for each token; a slot (page * block_tokens + place in it) outside of the pool, as -1 is, writes nothing and
// reads zeros.
#include "numbers.cuh"
#include "rows.cuh"

constexpr int WARPS = 8;
constexpr int VALUES = 16;
constexpr int STEP = WARP * VALUES;  // values that a warp takes at a time: four tiles
constexpr int TILE_VALUES = 128;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

struct Rows {
    u8* pool;
    i64 page_stride, pages, block_tokens, latent_values, rope_values;
    __device__ __forceinline__ i64 rope_offset() const {
        return latent_values + latent_values / TILE_VALUES * sizeof(float);
    }
    // Null for a slot that there is not.
    __device__ __forceinline__ u8* at(i64 slot) const {
        if (slot < 0 || slot >= pages * block_tokens) {
            return nullptr;
        }
        return pool + slot / block_tokens * page_stride +
               slot % block_tokens * (rope_offset() + 2 * rope_values);
    }
};

static __device__ __forceinline__ i64 token_of_warp() {
    return static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
}

template <class Half>
static __device__ __forceinline__ void write_row(const Rows& rows, const u8* latent, const u8* rope, u8* row) {
    const int lane = threadIdx.x % WARP;
    const uint4* rope_from = reinterpret_cast<const uint4*>(rope);
    uint4* rope_to = reinterpret_cast<uint4*>(row + rows.rope_offset());
    for (i64 at = lane; at < rows.rope_values / HALVES_PER_VECTOR; at += WARP) {
        rope_to[at] = rope_from[at];
    }
    float* scales = reinterpret_cast<float*>(row + rows.latent_values);
    for (i64 begin = 0; begin < rows.latent_values; begin += STEP) {  // a whole number of steps: see the wrapper
        const i64 mine = begin + lane * VALUES;
        const uint4* from = reinterpret_cast<const uint4*>(latent + 2 * mine);
        float values[VALUES];
        const uint4 first = from[0], second = from[1];
        widen_vector<Half>(first, values);
        widen_vector<Half>(second, values + HALVES_PER_VECTOR);
        const float scale = fmaxf(__fdiv_rn(largest_of_tile(values), MAX_E4M3), SMALLEST_NORMAL);
        *reinterpret_cast<uint4*>(row + mine) = encode_vector(values, scale);
        if (lane % LANES_PER_TILE == 0) {
            scales[mine / TILE_VALUES] = scale;
        }
    }
}

template <class Half>
static __device__ __forceinline__ void read_row(const Rows& rows, const u8* row, uint4* latent, uint4* rope) {
    const int lane = threadIdx.x % WARP;
    for (i64 at = lane; at < rows.rope_values / HALVES_PER_VECTOR; at += WARP) {
        rope[at] = row ? reinterpret_cast<const uint4*>(row + rows.rope_offset())[at] : zeros();
    }
    for (i64 mine = lane * VALUES; mine < rows.latent_values; mine += STEP) {
        uint4 first = zeros(), second = zeros();
        if (row) {
            const float scale = reinterpret_cast<const float*>(row + rows.latent_values)[mine / TILE_VALUES];
            scaled_vector<Half>(*reinterpret_cast<const uint4*>(row + mine), scale, &first, &second);
        }
        latent[mine / HALVES_PER_VECTOR] = first;
        latent[mine / HALVES_PER_VECTOR + 1] = second;
    }
}

#define PACKED_KEYS(SUFFIX, HALF)                                                                                      \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP)                                                         \
        write_packed_keys_##SUFFIX(u8* pool, i64 page_stride, i64 pages, i64 block_tokens, i64 latent_values,          \
                                   i64 rope_values, const i64* slots, i64 tokens, const u8* latent, i64 latent_stride, \
                                   const u8* rope, i64 rope_stride) {                                                  \
        const Rows rows = {pool, page_stride, pages, block_tokens, latent_values, rope_values};                        \
        const i64 token = token_of_warp();                                                                             \
        u8* row = token < tokens ? rows.at(slots[token]) : nullptr;                                                    \
        if (row) { /* whole warps */                                                                                   \
            write_row<HALF>(rows, latent + token * latent_stride, rope + token * rope_stride, row);                    \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP)                                                         \
        read_packed_keys_##SUFFIX(u8* pool, i64 page_stride, i64 pages, i64 block_tokens, i64 latent_values,           \
                                  i64 rope_values, const i64* slots, i64 tokens, u8* latent, u8* rope) {               \
        const Rows rows = {pool, page_stride, pages, block_tokens, latent_values, rope_values};                        \
        const i64 token = token_of_warp();                                                                             \
        if (token < tokens) {                                                                                          \
            read_row<HALF>(rows, rows.at(slots[token]), reinterpret_cast<uint4*>(latent + 2 * token * latent_values),  \
                           reinterpret_cast<uint4*>(rope + 2 * token * rope_values));                                  \
        }                                                                                                              \
    }

PACKED_KEYS(bf16, Bf16)
PACKED_KEYS(fp16, Fp16)
