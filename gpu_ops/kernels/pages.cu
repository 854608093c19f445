// Fills pages of a plane with bytes that tell their seed, and counts the words that are not what they should be.
//
// Engines, tests, benchmarks and replays run this in their own process, on their own stream; the daemon never does.
// A page's bytes are the words of splitmix64 from its seed, little-endian; the last word is cut where the page ends.
// One block of the grid's x for each page, as many of its y as the page has chunks.

typedef unsigned long long u64;
typedef long long i64;

constexpr int WORD_BYTES = 8;
constexpr int WARP = 32;

static __device__ __forceinline__ u64 word_of(u64 seed, i64 index) {
    u64 word = seed + static_cast<u64>(index + 1) * 0x9E3779B97F4A7C15ULL;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    return word ^ (word >> 31);
}

// True where whole words may be read and written at once: an odd width makes every other page an odd address.
static __device__ __forceinline__ bool is_aligned(const unsigned char* page) {
    return reinterpret_cast<u64>(page) % WORD_BYTES == 0;
}

static __device__ __forceinline__ int bytes_of_word(i64 index, i64 width) {
    const i64 left = width - index * WORD_BYTES;
    return left < WORD_BYTES ? static_cast<int>(left) : WORD_BYTES;
}

extern "C" __global__ void stamp_pages(unsigned char* plane, i64 page_stride, i64 width, const i64* pages,
                                       const u64* seeds) {
    unsigned char* page = plane + pages[blockIdx.x] * page_stride;
    const u64 seed = seeds[blockIdx.x];
    const bool aligned = is_aligned(page);
    const i64 step = static_cast<i64>(gridDim.y) * blockDim.x;
    for (i64 index = static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x; index * WORD_BYTES < width;
         index += step) {
        const u64 word = word_of(seed, index);
        const int bytes = bytes_of_word(index, width);
        if (aligned && bytes == WORD_BYTES) {
            reinterpret_cast<u64*>(page)[index] = word;
            continue;
        }
        for (int at = 0; at < bytes; ++at) {
            page[index * WORD_BYTES + at] = static_cast<unsigned char>(word >> (8 * at));
        }
    }
}

// Adds to `wrong`, one counter for each page: zero them on the stream first.
extern "C" __global__ void check_pages(const unsigned char* plane, i64 page_stride, i64 width, const i64* pages,
                                       const u64* seeds, unsigned int* wrong) {
    const unsigned char* page = plane + pages[blockIdx.x] * page_stride;
    const u64 seed = seeds[blockIdx.x];
    const bool aligned = is_aligned(page);
    const i64 step = static_cast<i64>(gridDim.y) * blockDim.x;
    unsigned int found = 0;
    for (i64 index = static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x; index * WORD_BYTES < width;
         index += step) {
        u64 differing = word_of(seed, index);
        const int bytes = bytes_of_word(index, width);
        if (aligned && bytes == WORD_BYTES) {
            differing ^= reinterpret_cast<const u64*>(page)[index];
        } else {
            for (int at = 0; at < bytes; ++at) {
                differing ^= static_cast<u64>(page[index * WORD_BYTES + at]) << (8 * at);
            }
            differing <<= 8 * (WORD_BYTES - bytes);  // what lies beyond the page is no part of its word
        }
        found += differing != 0;
    }
    for (int reach = WARP / 2; reach; reach /= 2) {  // every thread of the warp comes here
        found += __shfl_down_sync(0xFFFFFFFFu, found, reach);
    }
    if (threadIdx.x % WARP == 0 && found) {
        atomicAdd(wrong + blockIdx.x, found);
    }
}
