// Products of few rows with many, of which a core reads four streams at a time.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int STREAMS = 4;  // keys that are read at a time

// Rows of numbers in the order in which they are loaded; `width` is a multiple of PAIR.
struct Queries {
    const float* first;
    int64_t rows, width;
};

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

// Calls `work` with a constant number of rows and the first of them: 4 at a time, then 1.
template <class Work>
inline void by_rows(int64_t rows, Work work) {
    int64_t r = 0;
    for (; rows - r >= 4; r += 4) work(std::integral_constant<int, 4>(), r);
    for (; r < rows; r++) work(std::integral_constant<int, 1>(), r);
}

// The products of all rows with n keys, while the lines of the values are fetched. Rows of `out` are `tile` numbers apart,
// which is at least n rounded up to whole streams.
template <class T>
void all_products(Queries q, const T* k, int64_t columns, int64_t stride, int64_t n, Rows values, float* out, int64_t tile) {
    int64_t step = (n + STREAMS - 1) / STREAMS;
    for (int64_t t = 0; t < step; t++) {
        const T* keys[STREAMS];
        for (int j = 0; j < STREAMS; j++) {
            int64_t place = std::min(t + j * step, n - 1);
            keys[j] = k + place * stride;
            values.prefetch<T>(place, values.bytes);
        }
        by_rows(q.rows, [&](auto count, int64_t r) __attribute__((always_inline)) {
            constexpr int ROWS = count, KEYS = ROWS == 1 || REGISTERS == 32 ? STREAMS : 2;
            for (int j = 0; j < STREAMS; j += KEYS)  // products after the last key are of none
                products<T, ROWS, KEYS>(q.first + r * q.width, q.width, keys + j, columns, out + r * tile + t + j * step, tile, step);
        });
    }
}

}  // namespace
