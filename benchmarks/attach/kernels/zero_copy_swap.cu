// What the daemon must not do: a kernel that swaps by reading or writing pinned host memory over the link.
// benchmarks/attach/interference.py shows what it costs an engine in another process. The oracle is NumPy's copy of the pieces.

// Piece i: `bytes` bytes from sources[i] to targets[i], all multiples of 16. A warp takes a piece, eight 16-byte words a
// lane at a time, so that enough reads are on their way to fill the link.
extern "C" __global__ void __launch_bounds__(1024)
zero_copy_swap(const unsigned long long* targets, const unsigned long long* sources, long long pieces, long long bytes) {
  const int WORDS = 8;
  const int warps = blockDim.x >> 5;
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  const long long words = bytes >> 4;
  for (long long piece = blockIdx.x * (long long)warps + warp; piece < pieces; piece += (long long)gridDim.x * warps) {
    const int4* source = (const int4*)sources[piece];
    int4* target = (int4*)targets[piece];
    for (long long first = lane; first < words; first += 32 * WORDS) {
      int4 held[WORDS];
#pragma unroll
      for (int k = 0; k < WORDS; ++k)
        if (first + 32 * k < words) held[k] = source[first + 32 * k];
#pragma unroll
      for (int k = 0; k < WORDS; ++k)
        if (first + 32 * k < words) target[first + 32 * k] = held[k];
    }
  }
}
