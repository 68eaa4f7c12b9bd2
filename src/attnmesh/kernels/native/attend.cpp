// Attention of few query rows over many keys, in one pass over the keys, behind a plain C interface.
//
// A task is one key head of one sequence and one run of keys. Its rows are the queries of all heads that share the key
// head. A tile of keys is read once: its products with all rows, an online softmax, and the weighted sum of its values.
// Keys of four places of a tile are read at a time: a core reads four streams faster than one. Values are prefetched
// during the products. All sums are in float32, and do not depend on the threads.
//
// Keys and values may be stored in 8 bits: a row is its numbers, then a bfloat16 scale for each group of 128 columns. The
// products of a group take its scale once they are sums, and its values are weighted by weight times scale. Queries of
// bfloat16 are multiplied as such, two columns in one operation, where the processor has it: no product is rounded.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

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
constexpr int STREAMS = 4;               // keys that are read at a time
constexpr int64_t AHEAD = 8;              // rows that are fetched before they are read, where they are scattered
constexpr int64_t RUN = 2048;            // keys of a task
constexpr int64_t GROUP = 128;           // columns of a scale, in rows that are stored in 8 bits
constexpr int64_t TILE_BYTES = 1 << 18;  // keys and values of a tile, in float32; those in 8 bits are half as many
constexpr int64_t MOST_KEYS = 256;       // of a tile
constexpr int64_t NEAR_BYTES = 1 << 15;  // values of a tile that stay in the nearest cache for all rows
constexpr int64_t THREADED_BYTES = 1 << 19;  // keys and values that one thread reads sooner than several begin
constexpr float NONE = -INFINITY;
constexpr int NOT_FINITE = 1, NO_MEMORY = -1, FAILED = -2;  // what a call returns, if not 0

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

// e^x for x <= 0, to 2 units in the last place; 0 below -87.
inline Floats exponential(Floats x) {
    Ints tiny = x < all(-87.0f);
    x = larger(x, all(-87.0f));
    Floats rounder = all(12582912.0f), n = (x * 1.44269504f + rounder) - rounder;
    Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return pick(tiny, all(0.0f), y * (Floats)power);
}

inline Floats tanh_of(Floats x) {
    Floats size = pick(x < 0.0f, -x, x), e = exponential(-2.0f * size), far = (1.0f - e) / (1.0f + e), s = x * x;
    Floats near = size * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
    Floats out = pick(size < 0.1f, near, far);
    return pick(x < 0.0f, -out, out);
}

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

// One problem. Strides are in elements; the last dim of each tensor has stride 1. `out` and `lse` are float32.
struct Problem {
    // Fields of each call.
    const void *q, *k, *v;
    float *out, *lse;           // lse may be null
    const int64_t *low, *high;  // keys that each query sees, [low, high); null where all see all
    const int32_t* rows;        // (batch, keys), the keys of each sequence, by place in k and v; null for 0, 1, 2, ...
    const int64_t* counts;      // how many of these a sequence has
    int64_t q_strides[4], k_strides[4], v_strides[4], keys, threads;
    // Fields of all calls of a kind.
    int64_t batch, kv_heads, group, length, dim, value_dim;
    int64_t dtype, kv_dtype, k_scales, v_scales;  // where the scales begin in a row that is stored in 8 bits
    int64_t out_strides[3], lse_strides[3];  // sequence, head, token
    double scale, softcap;                   // softcap 0 for none
};

namespace {

struct Shape {
    int64_t rows, dim, value_dim, tile, runs;  // dims are padded to whole vectors
    bool packs;                                // tiles are copied, with columns of zeros
};

Shape shape_of(const Problem& p) {
    Shape s;
    s.rows = p.group * p.length;
    s.dim = (p.dim + PAIR - 1) / PAIR * PAIR;
    s.value_dim = (p.value_dim + PAIR - 1) / PAIR * PAIR;
    s.tile = std::clamp<int64_t>(TILE_BYTES / ((p.kv_dtype < INT8 ? 4 : 8) * (s.dim + s.value_dim)) / 16 * 16, 16, MOST_KEYS);
    s.runs = std::max<int64_t>(1, (p.keys + RUN - 1) / RUN);
    s.packs = p.rows || p.dim % PAIR || p.value_dim % PAIR;
    return s;
}

// Numbers at the start of a cache line: vectors that cross lines take twice as long to load.
class Lines {
  public:
    float* fit(int64_t count) {
        if ((int64_t)memory.size() < count + 16) memory.resize(count + 16);
        return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    }

  private:
    std::vector<float> memory;
};

// Memory of a thread.
struct Memory {
    Lines lines[6];
    float *q, *logits, *some, *scales, *keys, *values;
    void fit(const Shape& s) {
        q = lines[0].fit(s.rows * s.dim), logits = lines[1].fit(s.rows * s.tile), scales = lines[2].fit(s.tile);
        some = lines[3].fit(s.rows * s.tile);
        if (s.packs) keys = lines[4].fit(s.tile * s.dim), values = lines[5].fit(s.tile * s.value_dim);
    }
};

// The products of some columns of some rows, which are `width` numbers apart, with some keys. Rows of `out` are
// `tile` numbers apart, and keys `step`.
template <class T, int ROWS, int KEYS>
ALONE void products(const float* q, int64_t width, const T* const* keys, int64_t columns, float* out, int64_t tile, int64_t step) {
    constexpr int ALL = ROWS * KEYS;
    constexpr int PADDED = (ALL + W - 1) / W * W;
    Floats total[PADDED] = {};
    auto add = [&](const float* query, const Floats* key) __attribute__((always_inline)) {
        for (int i = 0; i < ROWS; i++) {
            Floats x = load(query + i * width);
            KEEP(x);
            for (int j = 0; j < KEYS; j++) total[vector_of(i * KEYS + j)] += x * key[j];
        }
    };
    for (int64_t d = 0; d < columns; d += PAIR, q += PAIR) {
        Floats first[KEYS], second[KEYS];
        for (int j = 0; j < KEYS; j++) {
            Pair key = load_pair(keys[j] + d);
            first[j] = key.a, second[j] = key.b;
        }
        for (int j = 0; j < KEYS; j++) KEEP(first[j]);
        add(q, first);
        for (int j = 0; j < KEYS; j++) KEEP(second[j]);
        add(q + W, second);
    }
    float sum[PADDED];
    for (int at = 0; at < PADDED; at += W) sums(total + at, sum + at);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < KEYS; j++) out[i * tile + j * step] = sum[i * KEYS + j];
}

// Rows of memory that are read later.
struct Rows {
    const char* first;
    int64_t stride, bytes;

    Rows at(int64_t row, int64_t byte) const { return {first + row * stride + byte, stride, std::max<int64_t>(0, bytes - byte)}; }
    // Numbers of float32 are too long for the nearest cache.
    template <class T>
    void prefetch(int64_t row, int64_t most) const {
        for (int64_t at = 0; at < std::min(bytes, most); at += 64) __builtin_prefetch(first + row * stride + at, 0, sizeof(T) < 4 ? 3 : 2);
    }
};

template <class T>
Rows rows_of(const T* first, int64_t stride, int64_t dim) {
    return {(const char*)first, stride * (int64_t)sizeof(T), dim * (int64_t)sizeof(T)};
}

// Adds the weighted values of some keys to some rows, in `PAIRS` pairs of vectors.
template <class T, int ROWS, int PAIRS>
ALONE void add_columns(const float* weights, int64_t tile, const T* v, int64_t stride, int64_t n, float* out, int64_t width, Rows next) {
    Floats total[ROWS][2 * PAIRS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2 * PAIRS; j++) total[i][j] = load(out + i * width + j * W);
    for (int64_t t = 0; t < n; t++) {
        next.prefetch<T>(t, PAIRS * PAIR * sizeof(T));
        for (int j = 0; j < PAIRS; j++) {
            Pair x = load_pair(v + t * stride + j * PAIR);
            KEEP(x.a);
            KEEP(x.b);
            for (int i = 0; i < ROWS; i++) {
                float weight = weights[i * tile + t];
                total[i][2 * j] += weight * x.a, total[i][2 * j + 1] += weight * x.b;
            }
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < 2 * PAIRS; j++) store(out + i * width + j * W, total[i][j]);
}

template <class T, int ROWS>
inline void add_values(const float* weights, int64_t tile, const T* v, int64_t stride, int64_t n, float* out, int64_t width, int64_t columns, Rows next) {
    constexpr int PAIRS = ROWS == 1 ? 4 : REGISTERS == 32 ? 2 : 1, SOME = PAIRS * PAIR;
    int64_t d = 0;
    for (; d + SOME <= columns; d += SOME) add_columns<T, ROWS, PAIRS>(weights, tile, v + d, stride, n, out + d, width, next.at(0, d * sizeof(T)));
    for (; d < columns; d += PAIR) add_columns<T, ROWS, 1>(weights, tile, v + d, stride, n, out + d, width, next.at(0, d * sizeof(T)));
}

// The scale of a group of columns of a stored row.
inline BFloat16 scale_of(const void* row, int64_t scales, int64_t group) {
    BFloat16 scale;
    std::memcpy(&scale, (const char*)row + scales + group * sizeof(scale), sizeof(scale));
    return scale;
}

template <class T>
void pack(const T* x, const int32_t* rows, int64_t stride, int64_t scales, int64_t n, int64_t dim, int64_t width, float* out) {
    Rows lines = rows_of(x, stride, dim);
    for (int64_t t = 0; t < n; t++) {
        if (rows && t + AHEAD < n) lines.prefetch<T>(rows[t + AHEAD], lines.bytes);
        const T* from = x + (rows ? rows[t] : t) * stride;
        for (int64_t d = 0; d < width; d += PAIR) {
            T rest[PAIR] = {};
            if (d + PAIR > dim) std::copy(from + d, from + dim, rest);
            Pair both = load_pair(d + PAIR > dim ? rest : from + d);
            if (STORED<T>) {
                float scale = value(scale_of(from, scales, d / GROUP));
                both.a = both.a * UNIT<T> * scale, both.b = both.b * UNIT<T> * scale;
            }
            store(out + t * width + d, both.a), store(out + t * width + d + W, both.b);
        }
    }
}

// Calls `work` with a constant number of rows and the first of them: 4 at a time, then 1.
template <class Work>
inline void by_rows(int64_t rows, Work work) {
    int64_t r = 0;
    for (; rows - r >= 4; r += 4) work(std::integral_constant<int, 4>(), r);
    for (; r < rows; r++) work(std::integral_constant<int, 1>(), r);
}

// The products of all rows with the keys of a tile, while the lines of the values are fetched.
template <class T>
void all_products(const Shape& s, const float* q, const T* k, int64_t columns, int64_t stride, int64_t n, Rows values, float* logits) {
    int64_t step = (n + STREAMS - 1) / STREAMS;
    for (int64_t t = 0; t < step; t++) {
        const T* keys[STREAMS];
        for (int j = 0; j < STREAMS; j++) {
            int64_t place = std::min(t + j * step, n - 1);
            keys[j] = k + place * stride;
            values.prefetch<T>(place, values.bytes);
        }
        by_rows(s.rows, [&](auto count, int64_t r) __attribute__((always_inline)) {
            constexpr int ROWS = count, KEYS = ROWS == 1 || REGISTERS == 32 ? STREAMS : 2;
            for (int j = 0; j < STREAMS; j += KEYS)  // logits after the last of a tile are of no key
                products<T, ROWS, KEYS>(q + r * s.dim, s.dim, keys + j, columns, logits + r * s.tile + t + j * step, s.tile, step);
        });
    }
}

template <class T>
void all_values(const Shape& s, const float* weights, const T* v, int64_t columns, int64_t stride, int64_t n, Rows next, float* out) {
    int64_t some = std::max<int64_t>(16, NEAR_BYTES / (int64_t)sizeof(T) / s.value_dim);
    for (int64_t t = 0; t < n; t += some)
        by_rows(s.rows, [&](auto count, int64_t r) {
            add_values<T, count>(weights + r * s.tile + t, s.tile, v + t * stride, stride, std::min(some, n - t),
                                 out + r * s.value_dim, s.value_dim, columns, r ? Rows() : next.at(t, 0));
        });
}

// The scales of a group of columns of some rows, times a factor; with them `work` gets the group's first column and their number.
template <class T, class Work>
void by_groups(const T* x, int64_t width, int64_t stride, int64_t scales, int64_t n, float factor, float* own, Work work) {
    BFloat16 read[MOST_KEYS];
    for (int64_t d = 0; d < width; d += GROUP) {
        for (int64_t t = 0; t < n; t++) read[t] = scale_of(x + t * stride, scales, d / GROUP);
        for (int64_t t = 0; t < n; t += W) store(own + t, widen(read + t) * factor);
        work(d, std::min(GROUP, width - d));
    }
}

// Calls `work` with the places of all logits of a tile, W at a time, and the scales there.
template <class Work>
void by_vectors(const Shape& s, int64_t n, const float* scales, Work work) {
    for (int64_t r = 0; r < s.rows; r++)
        for (int64_t t = 0; t < n; t += W) work(r * s.tile + t, load(scales + t));
}

// The logits of a tile of stored keys: each group of columns has products of its own.
template <class T>
void stored_products(const Problem& p, const Shape& s, const T* k, int64_t n, Rows values, const Memory& m) {
    by_groups(k, s.dim, p.k_strides[2], p.k_scales, n, UNIT<T>, m.scales, [&](int64_t d, int64_t columns) {
        float* found = d ? m.some : m.logits;
        all_products(s, m.q + d, k + d, columns, p.k_strides[2], n, d ? Rows() : values, found);
        by_vectors(s, n, m.scales, [&](int64_t at, Floats scale) {
            Floats x = load(found + at) * scale;
            store(m.logits + at, d ? load(m.logits + at) + x : x);
        });
    });
}

#if defined(DOTS)
// The products of some rows with 16 keys, times their scales; `more` are added. A vector has 16 columns of each of four
// keys, and then four sums of each.
template <class T, int ROWS>
ALONE void dots(const float* q, int64_t width, const Dotted<T>* const* keys, int64_t columns, Floats scales, bool more, float* out, int64_t tile) {
    Floats total[ROWS][4] = {};
    for (int64_t d = 0; d < columns; d += 16) {
        Halves key[4];
        UNROLL for (int j = 0; j < 4; j++) {
            auto part = [&](int i) { return _mm_loadu_si128((const __m128i*)(keys[4 * i + j] + d)); };
            __m512i four = _mm512_inserti32x4(_mm512_castsi128_si512(part(0)), part(1), 1);
            key[j] = look_up<T>(_mm512_inserti32x4(_mm512_inserti32x4(four, part(2), 2), part(3), 3));
        }
        UNROLL for (int half = 0; half < 2; half++)
            UNROLL for (int i = 0; i < ROWS; i++) {
                __m512bh x = (__m512bh)_mm512_broadcast_f32x4(_mm_loadu_ps(q + i * width + d / 2 + 4 * half));
                UNROLL for (int j = 0; j < 4; j++)
                    total[i][j] = (Floats)_mm512_dpbf16_ps((__m512)total[i][j], x, half ? key[j].b : key[j].a);
            }
    }
    UNROLL for (int i = 0; i < ROWS; i++) {
        Floats sum = to_singles(to_pairs(total[i][0], total[i][1]), to_pairs(total[i][2], total[i][3])) * scales;
        KEEP(sum);  // not fused with the addition below, or bits would depend on the number of rows
        store(out + i * tile, more ? load(out + i * tile) + sum : sum);
    }
}

template <class T>
void stored_products(const Problem& p, const Shape& s, const Dotted<T>* k, int64_t n, Rows values, const Memory& m) {
    int64_t stride = p.k_strides[2];
    by_groups(k, s.dim, stride, p.k_scales, n, (float)p.scale, m.scales, [&](int64_t d, int64_t columns) {
        for (int64_t t = 0; t < n; t += W) {
            const Dotted<T>* keys[W];
            for (int j = 0; j < W; j++) {
                int64_t place = std::min(t + j, n - 1);
                keys[j] = k + place * stride + d;
                if (!d) values.prefetch<T>(place, values.bytes);
            }
            by_rows(s.rows, [&](auto count, int64_t r) {
                dots<T, count>(m.q + r * s.dim + d / 2, s.dim, keys, columns, load(m.scales + t), d > 0, m.logits + r * s.tile + t, s.tile);
            });
        }
    });
}
#endif

template <class T>
void stored_values(const Problem& p, const Shape& s, const T* v, int64_t n, Rows next, const Memory& m, float* out) {
    by_groups(v, s.value_dim, p.v_strides[2], p.v_scales, n, 1.0f, m.scales, [&](int64_t d, int64_t columns) {
        by_vectors(s, n, m.scales, [&](int64_t at, Floats scale) { store(m.some + at, load(m.logits + at) * scale); });
        all_values(s, m.some, v + d, columns, p.v_strides[2], n, next.at(0, d), out + d);
    });
}

// The weights of one row from its logits, and the row's new maximum, sum and values. Returns whether logits are finite.
bool weigh(float* logits, int64_t n, int64_t low, int64_t high, float cap, float* out, int64_t width, float& most, float& sum) {
    int64_t whole = (n + W - 1) / W * W;
    for (int64_t t = n; t < whole; t++) logits[t] = logits[n - 1];
    Floats top = all(NONE), bad = {};
    for (int64_t t = 0; t < whole; t += W) {
        Floats x = load(logits + t);
        bad += x * 0.0f;
        if (cap) store(logits + t, x = cap * tanh_of(x * (1.0f / cap)));
        top = larger(x, top);
    }
    for (int64_t t = 0; t < std::min(low, whole); t++) logits[t] = NONE;
    for (int64_t t = std::max<int64_t>(0, std::min(n, high)); t < whole; t++) logits[t] = NONE;
    if (low > 0 || high < n) {
        top = all(NONE);
        for (int64_t t = 0; t < whole; t += W) top = larger(load(logits + t), top);
    }
    float peak = NONE, odd = 0;
    for (int i = 0; i < W; i++) peak = std::max(peak, top[i]), odd += bad[i];
    if (odd != 0) return false;
    float now = std::max(most, peak);
    if (now == NONE) {
        std::fill(logits, logits + whole, 0.0f);
        return true;
    }
    if (now != most) {
        float less = most == NONE ? 0.0f : exponential(all(most - now))[0];
        sum *= less;
        for (int64_t d = 0; d < width; d += W) store(out + d, load(out + d) * less);
        most = now;
    }
    Floats total = {};
    for (int64_t t = 0; t < whole; t += W) {
        Floats x = exponential(load(logits + t) - now);
        store(logits + t, x);
        total += x;
    }
    for (int i = 0; i < W; i++) sum += total[i];
    return true;
}

// Whether any query sees any key from `first` up to `stop`.
bool is_seen(const Problem& p, int64_t first, int64_t stop) {
    for (int64_t i = 0; p.low && i < p.length; i++)
        if (p.low[i] < std::min(stop, p.high[i]) && p.high[i] > first) return true;
    return !p.low;
}

// Copies the queries of one key head, with the columns in the order of loaded keys: times the scale, or as they are.
template <class T, class Q>
void read_queries(const Problem& p, const Shape& s, const Q* q, float* out) {
    for (int64_t r = 0; r < s.rows; r++, out += s.dim) {
        const Q* from = q + r / p.length * p.q_strides[1] + r % p.length * p.q_strides[2];
        for (int64_t d = 0; d < s.dim; d++) {
            int64_t place = place_of<T>(d);
            if constexpr (DOTTED<T>)
                ((BFloat16*)out)[place] = from[d];
            else
                out[place] = d < p.dim ? value(from[d]) * (float)p.scale : 0.0f;
        }
    }
}

// `sums_of_task` are the values of each row, then the maximum and the sum of each.
template <class T>
bool run_task(const Problem& p, const Shape& s, int64_t task, Memory& memory, float* sums_of_task) {
    memory.fit(s);
    int64_t run = task % s.runs, head = task / s.runs % p.kv_heads, row = task / s.runs / p.kv_heads;
    int64_t q = row * p.q_strides[0] + head * p.group * p.q_strides[1];
    const T* k = (const T*)p.k + row * p.k_strides[0] + head * p.k_strides[1];
    const T* v = (const T*)p.v + row * p.v_strides[0] + head * p.v_strides[1];
    if constexpr (DOTTED<T>)
        read_queries<T>(p, s, (const BFloat16*)p.q + q, memory.q);
    else if (p.dtype == FLOAT32)
        read_queries<T>(p, s, (const float*)p.q + q, memory.q);
    else if (p.dtype == BFLOAT16)
        read_queries<T>(p, s, (const BFloat16*)p.q + q, memory.q);
    else
        read_queries<T>(p, s, (const Float16*)p.q + q, memory.q);
    float *most = sums_of_task + s.rows * s.value_dim, *sum = most + s.rows;
    std::fill(sums_of_task, most, 0.0f), std::fill(most, sum, NONE), std::fill(sum, sum + s.rows, 0.0f);
    int64_t first = run * RUN, stop = std::min(p.keys, first + RUN);
    if (p.low) {  // no row sees keys before or after
        int64_t least = p.keys, last = 0;
        for (int64_t i = 0; i < p.length; i++)
            if (p.low[i] < p.high[i]) least = std::min(least, p.low[i]), last = std::max(last, p.high[i]);
        first = std::max(first, least / s.tile * s.tile), stop = std::min(stop, last);
    }
    const int32_t* rows = p.rows ? p.rows + row * p.keys : nullptr;
    if (rows) stop = std::min(stop, p.counts[row]);
    for (int64_t at = first; at < stop; at += s.tile) {
        int64_t n = std::min(s.tile, stop - at);
        if (!is_seen(p, at, at + n)) continue;
        int64_t place = rows ? 0 : at;
        const T *keys = k + place * p.k_strides[2], *values = v + place * p.v_strides[2];
        Rows next = rows_of(values, p.v_strides[2], p.value_dim);
        if constexpr (DOTTED<T>) {
            stored_products(p, s, keys, n, next, memory);  // never copied
        } else if (s.packs) {
            const int32_t* some = rows ? rows + at : nullptr;
            pack(keys, some, p.k_strides[2], p.k_scales, n, p.dim, s.dim, memory.keys);
            pack(values, some, p.v_strides[2], p.v_scales, n, p.value_dim, s.value_dim, memory.values);
            all_products(s, memory.q, memory.keys, s.dim, s.dim, n, Rows(), memory.logits);
        } else if (STORED<T>) {
            stored_products(p, s, keys, n, next, memory);
        } else {
            all_products(s, memory.q, keys, s.dim, p.k_strides[2], n, next, memory.logits);
        }
        for (int64_t r = 0; r < s.rows; r++) {
            int64_t i = r % p.length, low = p.low ? p.low[i] - at : 0, high = p.low ? p.high[i] - at : n;
            if (!weigh(&memory.logits[r * s.tile], n, low, high, (float)p.softcap, sums_of_task + r * s.value_dim, s.value_dim, most[r], sum[r]))
                return false;
        }
        next = rows_of(keys + n * p.k_strides[2], p.k_strides[2], p.dim);
        if (s.packs)
            all_values(s, memory.logits, memory.values, s.value_dim, s.value_dim, n, Rows(), sums_of_task);
        else if (STORED<T>)
            stored_values(p, s, values, n, next, memory, sums_of_task);
        else
            all_values(s, memory.logits, values, s.value_dim, p.v_strides[2], n, next, sums_of_task);
    }
    return true;
}

// Merges the runs of keys in their order. Returns whether the outputs are finite.
template <class T>
bool finish(const Problem& p, const Shape& s, int64_t head, float* partials, int64_t size) {
    int64_t row = head / p.kv_heads, kv_head = head % p.kv_heads;
    float bad = 0, unit = STORED<T> && !s.packs ? UNIT<T> : 1.0f;
    for (int64_t r = 0; r < s.rows; r++) {
        float most = NONE, sum = 0;
        for (int64_t run = 0; run < s.runs; run++) most = std::max(most, partials[run * size + s.rows * s.value_dim + r]);
        float* total = partials + r * s.value_dim;
        for (int64_t run = 0; run < s.runs; run++) {
            float* own = partials + run * size + s.rows * s.value_dim + r;
            float factor = *own == NONE ? 0.0f : *own == most ? 1.0f : exponential(all(*own - most))[0];
            sum += factor * own[s.rows];
            const float* part = partials + run * size + r * s.value_dim;
            for (int64_t d = 0; d < s.value_dim; d += W)
                store(total + d, run ? load(total + d) + factor * load(part + d) : factor * load(part + d));
        }
        int64_t q_head = kv_head * p.group + r / p.length, token = r % p.length;
        float* out = p.out + row * p.out_strides[0] + q_head * p.out_strides[1] + token * p.out_strides[2];
        for (int64_t d = 0; d < p.value_dim; d++) out[d] = sum ? total[place_of<T>(d)] / sum * unit : 0.0f, bad += out[d] * 0.0f;
        float lse = sum ? most + std::log(sum) : NONE;
        if (p.lse) p.lse[row * p.lse_strides[0] + q_head * p.lse_strides[1] + token * p.lse_strides[2]] = lse;
    }
    return bad == 0;
}

// The code of the exception that is being handled. None may leave the library, or the process would end.
int code_of_exception() noexcept {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::length_error&) {  // more than any memory has
        return NO_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

// Holds signals back, which are for the threads of Python, from threads that start meanwhile.
class SignalsHeld {
  public:
    SignalsHeld() {
        sigset_t every;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
    }
    ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }

  private:
    sigset_t before;
};

const pid_t LOADER = getpid();  // the process that has loaded this library

// Threads that wait for work: those of PyTorch's OpenMP where there is one, which would spin beside others for a while.
// A forked child has none of its parent's, and makes its own. Where no more can start, those that there are do the work.
class Workers {
  public:
    template <class Work>
    static void run(int64_t threads, Work& work) {
        if (threads <= 1) return work();
        run_on(threads, [](void* context) { (*(Work*)context)(); }, &work);
    }

  private:
    using Function = void (*)(void*);

    static void run_on(int64_t threads, Function call, void* work) {  // no template, or each type had threads of its own
        static const auto openmp = (void (*)(Function, void*, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
        if (openmp && getpid() == LOADER) return may_start(threads) ? openmp(call, work, threads, 0) : call(work);
        static std::mutex one;  // a second caller works alone
        std::unique_lock<std::mutex> mine(one, std::try_to_lock);
        if (!mine.owns_lock()) return call(work);
        static Workers* workers = nullptr;
        if (!workers || workers->process != getpid()) workers = new Workers();
        workers->share(threads - 1, call, work);
    }

    // OpenMP ends the process where a thread cannot start. So as many threads are tried before it first makes them.
    static bool may_start(int64_t threads) {
        static thread_local int64_t tried = 1;
        if (threads <= tried) return true;
        std::atomic<bool> done{false};
        std::vector<std::thread> trial;
        bool started = true;
        try {
            SignalsHeld held;
            trial.reserve(threads);
            while ((int64_t)trial.size() < threads - tried) trial.emplace_back([&] { done.wait(false); });
        } catch (...) {
            started = false;
        }
        done = true, done.notify_all();
        for (std::thread& thread : trial) thread.join();
        return started && (tried = threads);
    }

    void share(int helpers, Function function, void* given) {
        try {
            SignalsHeld held;
            for (; count < helpers; count++) std::thread([this, number = count] { serve(number); }).detach();
        } catch (...) {
            helpers = count;
        }
        {
            std::lock_guard<std::mutex> hold(lock);
            call = function, context = given, wanted = helpers, busy = helpers, round++;
        }
        wake.notify_all();
        function(given);
        for (int left = busy.load(); left; left = busy.load()) busy.wait(left);
    }

    void serve(int number) {
        for (uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> hold(lock);
            wake.wait(hold, [&] { return round != seen && (seen = round, number < wanted); });
            hold.unlock();
            call(context);
            if (--busy == 0) busy.notify_one();
        }
    }

    const pid_t process = getpid();
    std::mutex lock;
    std::condition_variable wake;
    std::atomic<int> busy{0};
    Function call = nullptr;
    void* context = nullptr;
    int wanted = 0, count = 0;
    uint64_t round = 0;
};

template <class T>
int attend(const Problem& p) {
    Shape s = shape_of(p);
    int64_t heads = p.batch * p.kv_heads, tasks = heads * s.runs, size = (s.rows * (s.value_dim + 2) + 15) / 16 * 16;
    int64_t bytes = heads * p.keys * (p.dim + p.value_dim) * sizeof(T);
    static thread_local Lines partials;
    float* memory = partials.fit(tasks * size);
    std::atomic<int64_t> next{0};
    std::atomic<int> code{0};
    auto work = [&] {
        static thread_local Memory own;
        try {
            for (int64_t task; !code && (task = next++) < tasks;)
                if (!run_task<T>(p, s, task, own, memory + task * size)) code = NOT_FINITE;
        } catch (...) {
            code = code_of_exception();
        }
    };
    Workers::run(bytes < THREADED_BYTES ? 1 : std::min(p.threads, tasks), work);
    for (int64_t head = 0; !code && head < heads; head++)
        if (!finish<T>(p, s, head, memory + head * s.runs * size, size)) code = NOT_FINITE;
    return code;
}

int attend_by_dtype(const Problem& p) {
#if defined(DOTS)
    if (p.dtype == BFLOAT16 && p.kv_dtype >= INT8 && p.dim % PAIR == 0 && p.value_dim % PAIR == 0 && !p.rows)
        return p.kv_dtype == INT8 ? attend<Dotted<Int8>>(p) : attend<Dotted<Float8>>(p);
#endif
    switch (p.kv_dtype) {
        case FLOAT32: return attend<float>(p);
        case BFLOAT16: return attend<BFloat16>(p);
        case FLOAT16: return attend<Float16>(p);
        case INT8: return attend<Int8>(p);
        default: return attend<Float8>(p);
    }
}

}  // namespace

// Writes `out` and `lse`. Returns 0, or a code if nothing is to be used: `NOT_FINITE` if a logit or an output is not.
extern "C" int64_t attnmesh_attend(const Problem* problem) {
    try {
        return attend_by_dtype(*problem);
    } catch (...) {
        return code_of_exception();
    }
}
