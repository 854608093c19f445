// Copies pages within planes: page a to page b in every plane of a list, as when a shared last block is about to be
// written.
//
// planes: [n][address, page stride, page bytes]; pairs: [m][from, to]. No page is written twice, and none that is
// written is read. One block of threads for each CHUNK of a page; the grid is [chunks, pairs, planes].
#include "numbers.cuh"

constexpr int THREADS = 256;
constexpr int IN_FLIGHT = 4;
constexpr i64 CHUNK_BYTES = THREADS * IN_FLIGHT * VECTOR_BYTES;

struct Plane {
    u8* pages;
    i64 stride, bytes;
};

extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(const Plane* planes, const i64* pairs) {
    const Plane plane = planes[blockIdx.z];
    const i64 begin = blockIdx.x * CHUNK_BYTES;
    if (begin >= plane.bytes) {
        return;
    }
    const u8* from = plane.pages + pairs[2 * blockIdx.y] * plane.stride + begin;
    u8* to = plane.pages + pairs[2 * blockIdx.y + 1] * plane.stride + begin;
    const int bytes = static_cast<int>(plane.bytes - begin < CHUNK_BYTES ? plane.bytes - begin : CHUNK_BYTES);
    const bool is_aligned = (reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) % VECTOR_BYTES == 0;
    const int vectors = is_aligned ? bytes / VECTOR_BYTES : 0;
    uint4 held[IN_FLIGHT];
#pragma unroll
    for (int step = 0; step < IN_FLIGHT; ++step) {
        const int at = threadIdx.x + step * THREADS;
        if (at < vectors) {
            held[step] = reinterpret_cast<const uint4*>(from)[at];
        }
    }
#pragma unroll
    for (int step = 0; step < IN_FLIGHT; ++step) {
        const int at = threadIdx.x + step * THREADS;
        if (at < vectors) {
            reinterpret_cast<uint4*>(to)[at] = held[step];
        }
    }
    for (int at = vectors * VECTOR_BYTES + threadIdx.x; at < bytes; at += THREADS) {
        to[at] = from[at];
    }
}
