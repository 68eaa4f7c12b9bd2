// Vectors of float32: numbers of each type as they are loaded, and the sums of several vectors at once.

#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif

#if defined(__AVX512F__)
#define KEEP(x) asm("" : "+v"(x))  // keeps a vector in its register, or it is read again for each use
#elif defined(__x86_64__)
#define KEEP(x) asm("" : "+x"(x))
#else
#define KEEP(x)
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define ALONE __attribute__((noinline))  // inside of another loop, GCC keeps fewer vectors in registers

namespace {

constexpr int W = WIDTH;
constexpr int PAIR = 2 * W;              // columns that are read at a time

#if defined(__aarch64__)
typedef __fp16 Float16;  // GCC 12 has no _Float16 there
#else
typedef _Float16 Float16;
#endif
typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef Float16 Float16s __attribute__((vector_size(2 * W)));
typedef int16_t Shorts __attribute__((vector_size(2 * PAIR)));
typedef int8_t Bytes __attribute__((vector_size(PAIR)));

enum Dtype { FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8 };

struct BFloat16 {
    uint16_t bits;
};
struct Int8 {
    int8_t bits;
};
struct Float8 {  // e4m3: a sign, 4 bits of exponent, 3 of mantissa
    int8_t bits;
};

template <class T>
struct Dotted {  // a number of 8 bits that is read as bfloat16
    T number;
};

template <class T>
constexpr bool STORED = sizeof(T) == 1;
template <class T>
constexpr bool DOTTED = false;
template <class T>
constexpr bool DOTTED<Dotted<T>> = true;
template <class T>
constexpr bool SPLIT = std::is_same_v<T, BFloat16>;  // in even and odd columns
template <class T>
constexpr float UNIT = std::is_same_v<T, Float8> || std::is_same_v<T, Dotted<Float8>> ? 256.0f : 1.0f;  // by which loaded numbers are too small

inline Floats load(const float* x) {
    Floats out;
    std::memcpy(&out, x, sizeof(out));
    return out;
}

// Two vectors of consecutive numbers. Those of bfloat16 are the even and the odd ones, which takes fewer operations.
struct Pair {
    Floats a, b;
};

inline Pair load_pair(const float* x) { return {load(x), load(x + W)}; }

inline Pair load_pair(const BFloat16* x) {
    Words two;
    std::memcpy(&two, x, sizeof(two));
    return {(Floats)(two << 16), (Floats)(two & 0xffff0000u)};
}

// Numbers of float16. GCC converts one at a time, unless the operation is named.
inline Floats widen(Float16s x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)x);
#else
    return __builtin_convertvector(x, Floats);
#endif
}

inline Pair load_pair(const Float16* x) {
    Float16s half[2];
    std::memcpy(half, x, sizeof(half));
    return {widen(half[0]), widen(half[1])};
}

// Bytes as numbers of 16 bits, in one operation: GCC takes five for vectors of this width.
inline Shorts load_bytes(const void* x) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__AVX2__) && WIDTH == 8
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)x));
#else
    Bytes bytes;
    std::memcpy(&bytes, x, sizeof(bytes));
    return __builtin_convertvector(bytes, Shorts);
#endif
}

inline Floats widen(const BFloat16* x) {
    typedef uint16_t Bits __attribute__((vector_size(2 * W)));
    Bits bits;
    std::memcpy(&bits, x, sizeof(bits));
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline Floats widen(const Int8* x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)));
#else
    typedef int8_t Numbers __attribute__((vector_size(W)));
    Numbers numbers;
    std::memcpy(&numbers, x, sizeof(numbers));
    return __builtin_convertvector(numbers, Floats);
#endif
}

inline Pair load_pair(const Int8* x) { return {widen(x), widen(x + W)}; }

// The bits of e4m3 are among those of float16, whose exponent is 8 more.
inline Pair load_pair(const Float8* x) {
    Shorts bits = load_bytes(x) << 7 & (int16_t)0xbfff;
    return load_pair((const Float16*)&bits);
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define DOTS
struct Halves {
    __m512bh a, b;
};

// The low or the high bytes of the numbers 0, 1, ..., 127 in bfloat16. They are given by their bits.
template <class T>
struct Table {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr Table() {
        for (int i = 0; i < 128; i++) {
            float x = std::is_same_v<T, Int8> ? i : i < 8 ? i * 0x1p-9f : (8 + i % 8) * 0x1p-10f;
            for (int power = 8; std::is_same_v<T, Float8> && power <= i; power += 8) x *= 2;
            uint32_t bits = std::bit_cast<uint32_t>(x);
            low[i] = bits >> 16, high[i] = bits >> 24;
        }
    }
};

// 64 numbers, looked up. Of each 16 the first 8 are in `a` and the last 8 in `b`.
template <class T>
inline Halves look_up(__m512i bytes) {
    static constexpr Table<T> table;
    auto find = [](const uint8_t* from, __m512i at) { return _mm512_permutex2var_epi8(_mm512_load_si512(from), at, _mm512_load_si512(from + 64)); };
    __m512i at = std::is_same_v<T, Int8> ? _mm512_abs_epi8(bytes) : bytes;
    __m512i low = find(table.low, at), high = find(table.high, at) | (bytes & _mm512_set1_epi8((char)0x80));
    return {(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
}

template <class T>
inline Pair load_pair(const Dotted<T>* x) {
    return load_pair((const T*)x);
}
#endif

// The place of column d among numbers as they are loaded.
template <class T>
inline int64_t place_of(int64_t d) {
    return SPLIT<T> ? d / PAIR * PAIR + d % 2 * W + d % PAIR / 2 : d;
}

inline float value(float x) { return x; }
inline float value(Float16 x) { return (float)x; }
inline float value(BFloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline void store(float* x, Floats y) { std::memcpy(x, &y, sizeof(y)); }
inline Floats all(float x) { return x - Floats{}; }
inline Floats pick(Ints where, Floats yes, Floats no) { return where ? yes : no; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Each function halves two vectors, or four, and adds the halves: after log2(W) levels W vectors are one vector of sums.
#define ADD(a, b, low, high) (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define INDEX(...) __VA_ARGS__
#if WIDTH == 16
inline Floats halves(Floats a, Floats b) {
    return ADD(a, b, INDEX(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23), INDEX(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
}
inline Floats to_lanes(const Floats* x) {
    Floats a = halves(x[0], x[1]), b = halves(x[2], x[3]);
    return ADD(a, b, INDEX(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27), INDEX(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
}
inline Floats to_pairs(Floats a, Floats b) {
    return ADD(a, b, INDEX(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29), INDEX(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
}
inline Floats to_singles(Floats a, Floats b) {
    return ADD(a, b, INDEX(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30), INDEX(1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
}
#elif WIDTH == 8
inline Floats to_lanes(const Floats* x) { return ADD(x[0], x[1], INDEX(0, 1, 2, 3, 8, 9, 10, 11), INDEX(4, 5, 6, 7, 12, 13, 14, 15)); }
inline Floats to_pairs(Floats a, Floats b) { return ADD(a, b, INDEX(0, 1, 8, 9, 4, 5, 12, 13), INDEX(2, 3, 10, 11, 6, 7, 14, 15)); }
inline Floats to_singles(Floats a, Floats b) { return ADD(a, b, INDEX(0, 2, 8, 10, 4, 6, 12, 14), INDEX(1, 3, 9, 11, 5, 7, 13, 15)); }
#else
inline Floats to_lanes(const Floats* x) { return x[0]; }
inline Floats to_pairs(Floats a, Floats b) { return ADD(a, b, INDEX(0, 1, 4, 5), INDEX(2, 3, 6, 7)); }
inline Floats to_singles(Floats a, Floats b) { return ADD(a, b, INDEX(0, 2, 4, 6), INDEX(1, 3, 5, 7)); }
#endif

constexpr int LANES = W / 4;

// The sums of W vectors. out[i] is that of x[vector_of(i)].
inline void sums(const Floats* x, float* out) {
    Floats first = to_pairs(to_lanes(x), to_lanes(x + LANES)), last = to_pairs(to_lanes(x + 2 * LANES), to_lanes(x + 3 * LANES));
    store(out, to_singles(first, last));
}

constexpr int vector_of(int i) { return i / W * W + i % 4 * LANES + i % W / 4; }

}  // namespace
