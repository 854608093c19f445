// Which row of a batch a token belongs to, which of its positions are within reach, and where they lie.
//
// `starts` has rows + 1 entries, the first one 0. A window of 0 tokens has no bound; a window counts the query itself.

// The row of a token before starts[rows]; empty rows are passed over.
static __device__ __forceinline__ i64 row_of(const int* starts, i64 rows, i64 token) {
    i64 low = 0, high = rows;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (starts[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static __device__ __forceinline__ i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// The first position that the window of a query at `position` reaches.
static __device__ __forceinline__ i64 window_start(i64 position, i64 window) {
    return window && position >= window ? position - window + 1 : 0;
}

// What a prefill needs of the cached positions: the sinks [0, sinks), then [first, cached).
struct Reach {
    i64 sinks, first, cached;
    __device__ __forceinline__ Reach(i64 cached_tokens, i64 window, i64 sink_tokens) {
        cached = cached_tokens;
        first = window_start(cached_tokens, window);
        sinks = smaller(sink_tokens, first);
    }
    __device__ __forceinline__ i64 held() const { return sinks + cached - first; }
    __device__ __forceinline__ i64 position_at(i64 index) const { return index < sinks ? index : first + index - sinks; }
    __device__ __forceinline__ i64 index_of(i64 position) const {
        return position < sinks ? position : sinks + position - first;
    }
};

// Block tables, [rows, columns].
struct Table {
    const int* cells;
    i64 stride, columns, pages;
    // The page that holds a block of a row, or -1: a hole, beyond the table, or no page of the pool.
    __device__ __forceinline__ i64 page_of(i64 row, i64 block) const {
        if (block >= columns) {
            return -1;
        }
        const i64 page = cells[row * stride + block];
        return page >= 0 && page < pages ? page : -1;
    }
};
