// What kernels need to know of a batch's tokens: where rows begin, positions, slots, key ranges, the rows of a window.
// And group tables expanded to heads.
//
// Row b has added[b] new tokens behind cached[b] cached ones. Entries for tokens that there are not become -1.
#include "numbers.cuh"
#include "rows.cuh"

constexpr int SCAN_THREADS = 1024;
constexpr int SCAN_WARPS = SCAN_THREADS / WARP;
constexpr int THREADS = 256;
constexpr int ROW_THREADS = 128;
constexpr int COLUMNS = 4;  // of a window's rows that a thread writes at a time

static __device__ __forceinline__ int scanned(int value) {
    const int lane = threadIdx.x % WARP;
    for (int reach = 1; reach < WARP; reach *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, value, reach);
        value += lane >= reach ? before : 0;
    }
    return value;
}

// The sum over this thread and all before it; `sums` is shared, and free again when all are back.
static __device__ __forceinline__ int scanned_by_block(int value, int* sums, int* whole) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int own = scanned(value);
    if (lane == WARP - 1) {
        sums[warp] = own;
    }
    __syncthreads();
    if (warp == 0) {
        sums[lane] = scanned(sums[lane]);
    }
    __syncthreads();
    const int before = warp ? sums[warp - 1] : 0;
    *whole = sums[SCAN_WARPS - 1];
    __syncthreads();
    return before + own;
}

// starts_q: sums of the new tokens; starts_k: of these and of the cached ones within reach; longest: the largest step of
// each. One block of threads, any number of rows.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS)
    cumulate_lengths(const int* added, const int* cached, i64 rows, i64 window, i64 sinks, int* starts_q,
                     int* starts_k, int* longest) {
    __shared__ int sums[SCAN_WARPS];
    __shared__ int most[2];
    if (threadIdx.x < 2) {
        most[threadIdx.x] = 0;
    }
    __syncthreads();
    int before_q = 0, before_k = 0, most_q = 0, most_k = 0;
    for (i64 base = 0; base < rows; base += SCAN_THREADS) {
        const i64 row = base + threadIdx.x;
        const int step_q = row < rows ? added[row] : 0;
        const int held = row < rows ? static_cast<int>(Reach(cached[row], window, sinks).held()) : 0;
        const int step_k = step_q + held;
        int whole_q, whole_k;
        const int end_q = before_q + scanned_by_block(step_q, sums, &whole_q);
        const int end_k = before_k + scanned_by_block(step_k, sums, &whole_k);
        if (row < rows) {
            starts_q[row + 1] = end_q;
            starts_k[row + 1] = end_k;
        }
        before_q += whole_q;
        before_k += whole_k;
        most_q = max(most_q, step_q);
        most_k = max(most_k, step_k);
    }
    atomicMax(most, most_q);
    atomicMax(most + 1, most_k);
    __syncthreads();
    if (threadIdx.x == 0) {
        starts_q[0] = 0;
        starts_k[0] = 0;
    }
    if (threadIdx.x < 2) {
        longest[threadIdx.x] = most[threadIdx.x];
    }
}

static __device__ __forceinline__ i64 thread_of_grid() {
    return static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    token_positions(const int* starts_q, const int* cached, i64 rows, i64 tokens, int* positions) {
    const i64 token = thread_of_grid();
    if (token >= tokens) {
        return;
    }
    i64 position = -1;
    if (token < starts_q[rows]) {
        const i64 row = row_of(starts_q, rows, token);
        position = cached[row] + token - starts_q[row];
    }
    positions[token] = static_cast<int>(position);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    token_slots(const int* starts_q, const int* cached, i64 rows, const int* cells, i64 table_stride, i64 columns,
                i64 pages, i64 block_tokens, i64 tokens, i64* slots) {
    const i64 token = thread_of_grid();
    if (token >= tokens) {
        return;
    }
    i64 slot = -1;
    if (token < starts_q[rows]) {
        const i64 row = row_of(starts_q, rows, token);
        const i64 position = cached[row] + token - starts_q[row];
        const i64 page = Table{cells, table_stride, columns, pages}.page_of(row, position / block_tokens);
        slot = page < 0 ? -1 : page * block_tokens + position % block_tokens;
    }
    slots[token] = slot;
}

// Which of the keys gathered by starts_k a query may see: [begins, ends), the causal rule aligned to the last key.
extern "C" __global__ void __launch_bounds__(THREADS)
    key_ranges(const int* starts_q, const int* starts_k, i64 rows, i64 tokens, int* begins, int* ends) {
    const i64 token = thread_of_grid();
    if (token >= tokens) {
        return;
    }
    int begin = -1, end = -1;
    if (token < starts_q[rows]) {
        const i64 row = row_of(starts_q, rows, token);
        begin = starts_k[row];
        const int held = starts_k[row + 1] - begin - (starts_q[row + 1] - starts_q[row]);
        end = begin + held + static_cast<int>(token) - starts_q[row] + 1;
    }
    begins[token] = begin;
    ends[token] = end;
}

// The positions that a query sees, in order: the sinks before its window, then the window, which ends with itself.
struct Wanted {
    int sinks, start, count;
    __device__ __forceinline__ Wanted(i64 position, i64 window, i64 sink_tokens) {
        start = static_cast<int>(window_start(position, window));
        sinks = static_cast<int>(smaller(sink_tokens, start));
        count = sinks + static_cast<int>(position) - start + 1;
    }
    __device__ __forceinline__ int position_at(int index) const { return index < sinks ? index : start + index - sinks; }
};

// Positions that follow one another, as rows of the pool. It divides where a run of them begins, and only there.
struct PagedCursor {
    Table table;
    i64 row;
    u32 block;
    u32 column, rest;
    int page;
    __device__ __forceinline__ void seek(int position) {
        column = static_cast<u32>(position) / block;
        rest = static_cast<u32>(position) - column * block;
        page = static_cast<int>(table.page_of(row, column));
    }
    __device__ __forceinline__ void next() {
        if (++rest == block) {
            rest = 0;
            page = static_cast<int>(table.page_of(row, ++column));
        }
    }
    __device__ __forceinline__ int value() const { return page < 0 ? -1 : static_cast<int>(page * block + rest); }
};

// The same as rows of what was gathered: `base` + a position, from the first one behind the sinks' gap on.
struct GatheredCursor {
    int begin, sinks, gap;
    int position;
    __device__ __forceinline__ void seek(int to) { position = to; }
    __device__ __forceinline__ void next() { ++position; }
    __device__ __forceinline__ int value() const { return begin + (position < sinks ? position : position - gap); }
};

// Writes one query's row of `width` entries: what the cursor says of each wanted position, then -1. One warp.
template <class Cursor>
static __device__ __forceinline__ void write_wanted(const Wanted& wanted, i64 width, int* out, Cursor cursor) {
    const int columns = static_cast<int>(width);
    for (int column = threadIdx.x % WARP * COLUMNS; column < columns; column += WARP * COLUMNS) {
        int found[COLUMNS] = {-1, -1, -1, -1};
        if (column < wanted.count) {
            cursor.seek(wanted.position_at(column));
#pragma unroll
            for (int at = 0; at < COLUMNS; ++at) {
                if (at && column + at < wanted.count) {
                    if (column + at == wanted.sinks) {
                        cursor.seek(wanted.start);
                    } else {
                        cursor.next();
                    }
                }
                found[at] = column + at < wanted.count ? cursor.value() : -1;
            }
        }
        *reinterpret_cast<int4*>(out + column) = make_int4(found[0], found[1], found[2], found[3]);
    }
}

static __device__ __forceinline__ void write_nothing(i64 width, int* out) {
    for (i64 column = threadIdx.x % WARP * COLUMNS; column < width; column += WARP * COLUMNS) {
        *reinterpret_cast<int4*>(out + column) = make_int4(-1, -1, -1, -1);
    }
}

static __device__ __forceinline__ i64 warp_of_grid() {
    return static_cast<i64>(blockIdx.x) * (ROW_THREADS / WARP) + threadIdx.x / WARP;
}

// For decode: rows of the pool, page * block_tokens + place. One warp for each query.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    window_rows_paged(const int* starts_q, const int* cached, i64 rows, const int* cells, i64 table_stride, i64 columns,
                      i64 pages, i64 block_tokens, i64 window, i64 sinks, i64 width, i64 tokens, int* out) {
    const i64 token = warp_of_grid();
    if (token >= tokens) {
        return;
    }
    out += token * width;
    if (token >= starts_q[rows]) {
        write_nothing(width, out);
        return;
    }
    const i64 row = row_of(starts_q, rows, token);
    const Wanted wanted(cached[row] + token - starts_q[row], window, sinks);
    write_wanted(wanted, width, out,
                 PagedCursor{{cells, table_stride, columns, pages}, row, static_cast<u32>(block_tokens), 0, 0, -1});
}

// For prefill: rows of the buffer that gather_latents fills with the same window and sinks. One warp for each query.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    window_rows_gathered(const int* starts_q, const int* starts_k, const int* cached, i64 rows, i64 window, i64 sinks,
                         i64 width, i64 tokens, int* out) {
    const i64 token = warp_of_grid();
    if (token >= tokens) {
        return;
    }
    out += token * width;
    if (token >= starts_q[rows]) {
        write_nothing(width, out);
        return;
    }
    const i64 row = row_of(starts_q, rows, token);
    const Reach reach(cached[row], window, sinks);
    const Wanted wanted(cached[row] + token - starts_q[row], window, sinks);
    const int held = static_cast<int>(reach.sinks);
    write_wanted(wanted, width, out, GatheredCursor{starts_k[row], held, static_cast<int>(reach.first) - held, 0});
}

// One group's table [batch, columns] to the rows b * heads + h of its heads, those with a bit in `members`. A cell is
// read once and written for each of them. `Cells` is int, or int4 where all rows begin on 16 bytes.
template <class Cells>
static __device__ __forceinline__ void expand(const Cells* cells, i64 table_stride, i64 columns, i64 heads, u64 members,
                                              i64 out_stride, i64 width, Cells* out, Cells hole) {
    const i64 column = static_cast<i64>(blockIdx.y) * THREADS + threadIdx.x;
    if (column >= width) {
        return;
    }
    const i64 row = blockIdx.x;
    const Cells found = column < columns ? cells[row * table_stride + column] : hole;
    for (u64 left = members; left; left &= left - 1) {
        out[(row * heads + __ffsll(static_cast<i64>(left)) - 1) * out_stride + column] = found;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    expand_table(const int* cells, i64 table_stride, i64 columns, i64 heads, u64 members, i64 out_stride, i64 width,
                 int* out) {
    expand(cells, table_stride, columns, heads, members, out_stride, width, out, -1);
}

// Strides, columns and width count int4.
extern "C" __global__ void __launch_bounds__(THREADS)
    expand_table_by_4(const int4* cells, i64 table_stride, i64 columns, i64 heads, u64 members, i64 out_stride,
                      i64 width, int4* out) {
    expand(cells, table_stride, columns, heads, members, out_stride, width, out, make_int4(-1, -1, -1, -1));
}
