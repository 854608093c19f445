// Sixteen-bit floats, fp8 e4m3 and their conversions, to and from fp32, sixteen values at a time where it matters.
//
// No header of CUDA's is needed. Every conversion rounds to nearest even; a NaN becomes 0x7FFF, or 0x7F in fp8, and
// fp8 saturates at 448, which an infinity becomes too. gpu_ops.reference_numbers says the same in NumPy.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
constexpr int VECTOR_BYTES = 16;
constexpr int HALVES_PER_VECTOR = 8;
constexpr float MAX_E4M3 = 448.f;
constexpr u32 NAN_E4M3 = 0x7F, MAX_CODE_E4M3 = 0x7E, SIGN_E4M3 = 0x80;

static __device__ __forceinline__ uint4 zeros() { return make_uint4(0, 0, 0, 0); }

// Products and quotients that keep denormals, which bf16 has as fp32 has. CuPy compiles with -ftz=true, but the compiler
// does not change PTX.
static __device__ __forceinline__ float times(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

static __device__ __forceinline__ float over(float a, float b) {
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}

struct Bf16 {
    static __device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
    static __device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

struct Fp16 {
    static __device__ __forceinline__ float widen(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ float low(u32 pair) { return widen(static_cast<u16>(pair)); }
    static __device__ __forceinline__ float high(u32 pair) { return widen(static_cast<u16>(pair >> 16)); }
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

static __device__ __forceinline__ u32 encode_e4m3_by_bits(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = bits >> 24 & SIGN_E4M3;
    const u32 size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) {
        return NAN_E4M3;
    }
    if (size >= 0x43E00000u) {  // 448
        return sign | MAX_CODE_E4M3;
    }
    if (size < 0x3C800000u) {  // 2^-6: below it codes count 2^-9, which is the last bit of a float from 2^14 on
        return sign | (__float_as_uint(__uint_as_float(size) + 16384.f) & 0xF);
    }
    const u32 rounded = size + 0x7FFFFu + (size >> 20 & 1);  // of 23 bits behind the point 3 stay
    return sign | ((rounded >> 20) - ((127 - 7) << 3));
}

// Two values as fp8, the first in the low byte.
static __device__ __forceinline__ u32 encode_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return encode_e4m3_by_bits(low) | encode_e4m3_by_bits(high) << 8;
#endif
}

static __device__ __forceinline__ float decode_e4m3_by_bits(u32 code) {
    const u32 size = code & 0x7F;
    if (size == NAN_E4M3) {
        return __uint_as_float(0x7FFFFFFFu);
    }
    // As the top of an fp16 it is 2^-8 of itself: the exponents' biases are 7 and 15. Denormal codes are so too.
    return Fp16::low((code & SIGN_E4M3) << 8 | size << 7) * 256.f;
}

// Two codes, the first in the low byte, as floats.
static __device__ __forceinline__ void decode_e4m3(u32 codes, float* low, float* high) {
#if __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<u16>(codes)));
    *low = Fp16::low(pair);
    *high = Fp16::high(pair);
#else
    *low = decode_e4m3_by_bits(codes & 0xFF);
    *high = decode_e4m3_by_bits(codes >> 8 & 0xFF);
#endif
}

// Four codes times a scale, as four sixteen-bit floats.
template <class Half>
static __device__ __forceinline__ uint2 scaled_word(u32 codes, float scale) {
    float a, b, c, d;
    decode_e4m3(codes & 0xFFFF, &a, &b);
    decode_e4m3(codes >> 16, &c, &d);
    return make_uint2(Half::pack(times(a, scale), times(b, scale)), Half::pack(times(c, scale), times(d, scale)));
}

// Sixteen codes times a scale, as sixteen sixteen-bit floats.
template <class Half>
static __device__ __forceinline__ void scaled_vector(uint4 codes, float scale, uint4* first, uint4* second) {
    const uint2 x = scaled_word<Half>(codes.x, scale);
    const uint2 y = scaled_word<Half>(codes.y, scale);
    const uint2 z = scaled_word<Half>(codes.z, scale);
    const uint2 w = scaled_word<Half>(codes.w, scale);
    *first = make_uint4(x.x, x.y, y.x, y.y);
    *second = make_uint4(z.x, z.y, w.x, w.y);
}

// Eight sixteen-bit floats as floats.
template <class Half>
static __device__ __forceinline__ void widen_vector(uint4 halves, float* values) {
    const u32 pairs[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int at = 0; at < 4; ++at) {
        values[2 * at] = Half::low(pairs[at]);
        values[2 * at + 1] = Half::high(pairs[at]);
    }
}

static __device__ __forceinline__ u32 encode_word(const float* values, float scale) {
    return encode_e4m3(over(values[0], scale), over(values[1], scale)) |
           encode_e4m3(over(values[2], scale), over(values[3], scale)) << 16;
}

// Sixteen values divided by a scale, as sixteen codes.
static __device__ __forceinline__ uint4 encode_vector(const float* values, float scale) {
    return make_uint4(encode_word(values, scale), encode_word(values + 4, scale), encode_word(values + 8, scale),
                      encode_word(values + 12, scale));
}

constexpr int LANES_PER_TILE = 8;

// The largest size among the finite ones of the 128 values that eight lanes hold, sixteen each. All lanes come here.
static __device__ __forceinline__ float largest_of_tile(const float* values) {
    float largest = 0.f;
#pragma unroll
    for (int at = 0; at < 16; ++at) {
        const float size = fabsf(values[at]);
        largest = size <= 3.402823466e38f && size > largest ? size : largest;
    }
    for (int reach = LANES_PER_TILE / 2; reach; reach /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, reach));
    }
    return largest;
}
