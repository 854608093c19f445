// Tiles of 16 tokens of paged keys and values: which ones a query sees, where they lie, and a warp's registers of one.
//
// A tile lies in one page, since a block holds a whole number of them. What is not visible is never read: its place is
// taken by zeros. decode_attention.cu says which element a lane holds.

constexpr int WARPS = 4;
constexpr int TILE = 16;
constexpr int KEY_CHUNK = 32;
constexpr int VALUE_CHUNK = 64;
constexpr int BF16_BYTES = 2;

struct Cache {
    const u8* keys;
    i64 key_page_stride, key_head_stride;
    const u8* values;
    i64 value_page_stride, value_head_stride;
    int block_tokens;
};

// What one sequence's query sees by one head's rule, in tiles.
struct Visible {
    int length, start, sinks, sink_tiles, first_tile, tiles;
    __device__ __forceinline__ Visible(int tokens, int window, int sink_tokens) {
        length = tokens;
        start = window && tokens > window ? tokens - window : 0;  // the query is the last token
        sinks = sink_tokens;
        first_tile = start / TILE;
        sink_tiles = min(tiles_of(sinks), first_tile);
        tiles = length > 0 ? sink_tiles + tiles_of(length) - first_tile : 0;
    }
    static __device__ __forceinline__ int tiles_of(int tokens) { return tokens / TILE + (tokens % TILE != 0); }
    __device__ __forceinline__ int tile_at(int index) const {
        return index < sink_tiles ? index : first_tile + index - sink_tiles;
    }
    __device__ __forceinline__ bool has(int token) const {
        return token < length && (token >= start || token < sinks);
    }
};

// A warp's walk over its tiles of a split: every WARPS-th, without those whose page is a hole.
struct Walk {
    int index, end, tile;
    i64 page;
    __device__ __forceinline__ void find(const Visible& visible, const Table& table, i64 row, int tiles_of_block) {
        for (; index < end; index += WARPS) {
            tile = visible.tile_at(index);
            page = table.page_of(row, tile / tiles_of_block);
            if (page >= 0) {
                return;
            }
        }
    }
    __device__ __forceinline__ bool is_over() const { return index >= end; }
};

template <int D>
struct Tile {
    static constexpr int KEY_VECTORS = D / KEY_CHUNK, VALUE_VECTORS = D / VALUE_CHUNK;
    uint4 keys[2][KEY_VECTORS];
    uint4 values[4][VALUE_VECTORS];

    __device__ __forceinline__ void load_keys(const Cache& cache, const Visible& visible, const Walk& walk, int head) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        const int first = walk.tile * TILE;
        const u8* base = cache.keys + walk.page * cache.key_page_stride + head * cache.key_head_stride +
                         first % cache.block_tokens * (D * BF16_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = half * 8 + g;
            const uint4* row = reinterpret_cast<const uint4*>(base + at * D * BF16_BYTES);
            const bool is_visible = visible.has(first + at);
#pragma unroll
            for (int chunk = 0; chunk < KEY_VECTORS; ++chunk) {
                keys[half][chunk] = is_visible ? row[chunk * 4 + t] : zeros();
            }
        }
    }

    __device__ __forceinline__ void load_values(const Cache& cache, const Visible& visible, const Walk& walk,
                                                int head) {
        const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
        const int first = walk.tile * TILE;
        const u8* base = cache.values + walk.page * cache.value_page_stride + head * cache.value_head_stride +
                         first % cache.block_tokens * (D * BF16_BYTES);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int at = 2 * t + part % 2 + part / 2 * 8;
            const uint4* row = reinterpret_cast<const uint4*>(base + at * D * BF16_BYTES);
            const bool is_visible = visible.has(first + at);  // else a NaN would outlive its weight of zero
#pragma unroll
            for (int chunk = 0; chunk < VALUE_VECTORS; ++chunk) {
                values[part][chunk] = is_visible ? row[chunk * 8 + g] : zeros();
            }
        }
    }
};
