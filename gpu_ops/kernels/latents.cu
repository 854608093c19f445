// Reads cached latents by block tables and puts the new tokens' between them: [keys of row 0 | keys of row 1 | ...],
// cached before new, split into latent and rope. From pages of sixteen-bit floats, or of packed fp8 rows.
//
// A block of threads takes TILE output tokens: first one thread for each finds where it comes from, then all copy.
// What lies in a hole of the table becomes zeros.
#include "numbers.cuh"
#include "rows.cuh"

constexpr int TILE = 16;
constexpr int THREADS = 128;
constexpr int IN_FLIGHT = 3;
constexpr int VALUES = 16;  // what one thread takes of a packed row at a time
constexpr int TILE_VALUES = 128;

enum Kind { HOLE, CACHED, NEW };

struct Source {
    const u8* latent;
    const u8* rope;
    int kind;
};

struct Batch {
    const int* starts_q;
    const int* starts_k;
    const int* cached;  // null: all that lies before the new tokens, and no window
    i64 rows, window, sinks, new_tokens;
};

// Where the output token comes from; `rope_offset`: from a cached row to its rope.
static __device__ __forceinline__ Source source_of(i64 token, Batch batch, Table table, const u8* cache,
                                                   i64 page_stride, i64 block_tokens, i64 row_bytes, i64 rope_offset,
                                                   const u8* latent, i64 latent_stride, const u8* rope,
                                                   i64 rope_stride) {
    const i64 row = row_of(batch.starts_k, batch.rows, token);
    const i64 added = batch.starts_q[row + 1] - batch.starts_q[row];
    const i64 held = batch.starts_k[row + 1] - batch.starts_k[row] - added;
    const i64 index = token - batch.starts_k[row];
    if (index >= held) {
        const i64 from = batch.starts_q[row] + index - held;
        if (from >= batch.new_tokens) {
            return {nullptr, nullptr, HOLE};
        }
        return {latent + from * latent_stride, rope + from * rope_stride, NEW};
    }
    const i64 position =
        batch.cached ? Reach(batch.cached[row], batch.window, batch.sinks).position_at(index) : index;
    const i64 page = table.page_of(row, position / block_tokens);
    if (page < 0) {
        return {nullptr, nullptr, HOLE};
    }
    const u8* at = cache + page * page_stride + position % block_tokens * row_bytes;
    return {at, at + rope_offset, CACHED};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_latents(const u8* cache, i64 page_stride, i64 pages, i64 block_tokens, const int* cells, i64 table_stride,
                   i64 columns, const u8* latent, i64 latent_stride, const u8* rope, i64 rope_stride, i64 new_tokens,
                   const int* starts_q, const int* starts_k, const int* cached, i64 rows, i64 window, i64 sinks,
                   uint4* latent_out, uint4* rope_out, i64 tokens, i64 latent_vectors, i64 rope_vectors) {
    __shared__ Source sources[TILE];
    const i64 first = static_cast<i64>(blockIdx.x) * TILE;
    const i64 end = smaller(tokens, starts_k[rows]);
    const int count = static_cast<int>(smaller(TILE, end - first));
    if (static_cast<int>(threadIdx.x) < count) {
        sources[threadIdx.x] =
            source_of(first + threadIdx.x, {starts_q, starts_k, cached, rows, window, sinks, new_tokens},
                      {cells, table_stride, columns, pages}, cache, page_stride, block_tokens,
                      (latent_vectors + rope_vectors) * VECTOR_BYTES, latent_vectors * VECTOR_BYTES, latent,
                      latent_stride, rope, rope_stride);
    }
    __syncthreads();
    const int left = static_cast<int>(latent_vectors), right = static_cast<int>(rope_vectors);
    const int work = count * (left + right);
    for (int begin = threadIdx.x; begin < work; begin += THREADS * IN_FLIGHT) {
        uint4 held[IN_FLIGHT];
        uint4* to[IN_FLIGHT];
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step) {
            const int at = begin + step * THREADS;
            if (at < work) {
                const int token = at / (left + right), column = at % (left + right);
                const Source source = sources[token];
                const bool is_latent = column < left;
                const u8* from = is_latent ? source.latent : source.rope;
                const int vector = is_latent ? column : column - left;
                held[step] = source.kind == HOLE ? zeros() : reinterpret_cast<const uint4*>(from)[vector];
                to[step] = is_latent ? latent_out + (first + token) * left + vector
                                     : rope_out + (first + token) * right + vector;
            }
        }
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step) {
            if (begin + step * THREADS < work) {
                *to[step] = held[step];
            }
        }
    }
}

// Sixteen values of a row on their way: two vectors, or the first alone and a scale.
struct Piece {
    uint4 first, second;
    uint4* to;
    float scale;
    bool is_packed;
};

static __device__ __forceinline__ Piece load_piece(const Source& source, i64 token, int column, int latent_pieces,
                                                   int rope_pieces, uint4* latent_out, uint4* rope_out) {
    const bool is_latent = column < latent_pieces;
    const int piece = is_latent ? column : column - latent_pieces;
    Piece read;
    read.to = is_latent ? latent_out + (token * latent_pieces + piece) * 2
                        : rope_out + (token * rope_pieces + piece) * 2;
    read.is_packed = is_latent && source.kind == CACHED;
    read.scale = 0.f;
    read.first = read.second = zeros();
    if (read.is_packed) {
        read.first = reinterpret_cast<const uint4*>(source.latent)[piece];
        const u8* scales = source.latent + latent_pieces * VALUES;
        read.scale = reinterpret_cast<const float*>(scales)[piece / (TILE_VALUES / VALUES)];
    } else if (source.kind != HOLE) {
        const uint4* from = reinterpret_cast<const uint4*>(is_latent ? source.latent : source.rope) + piece * 2;
        read.first = from[0];
        read.second = from[1];
    }
    return read;
}

template <class Half>
static __device__ __forceinline__ void copy_pieces(const Source* sources, i64 first, int count, int latent_pieces,
                                                   int rope_pieces, uint4* latent_out, uint4* rope_out) {
    const int pieces = latent_pieces + rope_pieces;
    const int work = count * pieces;
    for (int begin = threadIdx.x; begin < work; begin += THREADS * IN_FLIGHT) {
        Piece held[IN_FLIGHT];
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step) {
            const int at = begin + step * THREADS;
            if (at < work) {
                held[step] = load_piece(sources[at / pieces], first + at / pieces, at % pieces, latent_pieces,
                                        rope_pieces, latent_out, rope_out);
            }
        }
#pragma unroll
        for (int step = 0; step < IN_FLIGHT; ++step) {
            if (begin + step * THREADS < work) {
                Piece& read = held[step];
                if (read.is_packed) {
                    scaled_vector<Half>(read.first, read.scale, &read.first, &read.second);
                }
                read.to[0] = read.first;
                read.to[1] = read.second;
            }
        }
    }
}

template <class Half>
static __device__ __forceinline__ void gather_packed(const u8* cache, i64 page_stride, i64 block_tokens, Table table,
                                                     const u8* latent, i64 latent_stride, const u8* rope,
                                                     i64 rope_stride, Batch batch, uint4* latent_out, uint4* rope_out,
                                                     i64 tokens, i64 latent_values, i64 rope_values) {
    __shared__ Source sources[TILE];
    const i64 first = static_cast<i64>(blockIdx.x) * TILE;
    const i64 end = smaller(tokens, batch.starts_k[batch.rows]);
    const int count = static_cast<int>(smaller(TILE, end - first));
    const i64 rope_offset = latent_values + latent_values / TILE_VALUES * sizeof(float);
    if (static_cast<int>(threadIdx.x) < count) {
        sources[threadIdx.x] =
            source_of(first + threadIdx.x, batch, table, cache, page_stride, block_tokens,
                      rope_offset + 2 * rope_values, rope_offset, latent, latent_stride, rope, rope_stride);
    }
    __syncthreads();
    copy_pieces<Half>(sources, first, count, static_cast<int>(latent_values / VALUES),
                      static_cast<int>(rope_values / VALUES), latent_out, rope_out);
}

#define GATHER_PACKED(NAME, HALF)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        NAME(const u8* cache, i64 page_stride, i64 pages, i64 block_tokens, const int* cells, i64 table_stride,        \
             i64 columns, const u8* latent, i64 latent_stride, const u8* rope, i64 rope_stride, i64 new_tokens,        \
             const int* starts_q, const int* starts_k, const int* cached, i64 rows, i64 window, i64 sinks,             \
             uint4* latent_out, uint4* rope_out, i64 tokens, i64 latent_values, i64 rope_values) {                     \
        gather_packed<HALF>(cache, page_stride, block_tokens, {cells, table_stride, columns, pages}, latent,           \
                            latent_stride, rope, rope_stride,                                                          \
                            {starts_q, starts_k, cached, rows, window, sinks, new_tokens}, latent_out, rope_out,       \
                            tokens, latent_values, rope_values);                                                       \
    }

GATHER_PACKED(gather_packed_latents_bf16, Bf16)
GATHER_PACKED(gather_packed_latents_fp16, Fp16)
