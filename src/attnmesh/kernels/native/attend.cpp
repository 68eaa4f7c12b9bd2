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
//
// Keys may come in parts, a call for each. All parts but the last are whole runs: then the result has the bits of one call.

#include <atomic>
#include <cmath>

#include "products.h"
#include "workers.h"

namespace {

constexpr int64_t AHEAD = 8;              // rows that are fetched before they are read, where they are scattered
constexpr int64_t RUN = 2048;            // keys of a task
constexpr int64_t SCALE_COLUMNS = 128;   // columns of a scale, in rows that are stored in 8 bits
constexpr int64_t TILE_BYTES = 1 << 18;  // keys and values of a tile, in float32; those in 8 bits are half as many
constexpr int64_t MOST_KEYS = 256;       // of a tile
constexpr int64_t NEAR_BYTES = 1 << 15;  // values of a tile that stay in the nearest cache for all rows
constexpr float NONE = -INFINITY;
constexpr int NOT_FINITE = 1;  // what a call returns, beside the codes of errors

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

}  // namespace

// One problem. Strides are in elements; the last dim of each tensor has stride 1. `out` and `lse` are float32.
struct Problem {
    // Fields of each call.
    const void *q, *k, *v;
    float *out, *lse;           // lse may be null
    const int64_t *low, *high;  // keys that each query sees, [low, high); null where all see all
    const int32_t* indices;     // (batch, keys), the keys of each sequence, by place in k and v; null for 0, 1, 2, ...
    const int64_t* counts;      // how many of these indices a sequence has
    int64_t q_strides[4], k_strides[4], v_strides[4], keys, threads;
    // Fields of all calls of a kind.
    int64_t batch, kv_heads, group, length, dim, value_dim;
    int64_t dtype, kv_dtype, k_scales, v_scales;  // where the scales begin in a row that is stored in 8 bits
    int64_t out_strides[3], lse_strides[3];  // sequence, head, token
    double scale, softcap;                   // softcap 0 for none
    int64_t first_run, all_runs;             // where these keys begin among the runs of all parts; 0 runs if there are no parts
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
    s.packs = p.indices || p.dim % PAIR || p.value_dim % PAIR;
    return s;
}

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
void pack(const T* x, const int32_t* indices, int64_t stride, int64_t scales, int64_t n, int64_t dim, int64_t width, float* out) {
    Rows lines = rows_of(x, stride, dim);
    for (int64_t t = 0; t < n; t++) {
        if (indices && t + AHEAD < n) lines.prefetch<T>(indices[t + AHEAD], lines.bytes);
        const T* from = x + (indices ? indices[t] : t) * stride;
        for (int64_t d = 0; d < width; d += PAIR) {
            T rest[PAIR] = {};
            if (d + PAIR > dim) std::copy(from + d, from + dim, rest);
            Pair both = load_pair(d + PAIR > dim ? rest : from + d);
            if (STORED<T>) {
                float scale = value(scale_of(from, scales, d / SCALE_COLUMNS));
                both.a = both.a * UNIT<T> * scale, both.b = both.b * UNIT<T> * scale;
            }
            store(out + t * width + d, both.a), store(out + t * width + d + W, both.b);
        }
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
    for (int64_t d = 0; d < width; d += SCALE_COLUMNS) {
        for (int64_t t = 0; t < n; t++) read[t] = scale_of(x + t * stride, scales, d / SCALE_COLUMNS);
        for (int64_t t = 0; t < n; t += W) store(own + t, widen(read + t) * factor);
        work(d, std::min(SCALE_COLUMNS, width - d));
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
        all_products({m.q + d, s.rows, s.dim}, k + d, columns, p.k_strides[2], n, d ? Rows() : values, found, s.tile);
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
    int64_t run = task % s.runs, head = task / s.runs % p.kv_heads, sequence = task / s.runs / p.kv_heads;
    int64_t q = sequence * p.q_strides[0] + head * p.group * p.q_strides[1];
    const T* k = (const T*)p.k + sequence * p.k_strides[0] + head * p.k_strides[1];
    const T* v = (const T*)p.v + sequence * p.v_strides[0] + head * p.v_strides[1];
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
    const int32_t* indices = p.indices ? p.indices + sequence * p.keys : nullptr;
    Queries queries{memory.q, s.rows, s.dim};
    if (indices) stop = std::min(stop, p.counts[sequence]);
    for (int64_t at = first; at < stop; at += s.tile) {
        int64_t n = std::min(s.tile, stop - at);
        if (!is_seen(p, at, at + n)) continue;
        int64_t place = indices ? 0 : at;
        const T *keys = k + place * p.k_strides[2], *values = v + place * p.v_strides[2];
        Rows next = rows_of(values, p.v_strides[2], p.value_dim);
        if constexpr (DOTTED<T>) {
            stored_products(p, s, keys, n, next, memory);  // never copied
        } else if (s.packs) {
            const int32_t* some = indices ? indices + at : nullptr;
            pack(keys, some, p.k_strides[2], p.k_scales, n, p.dim, s.dim, memory.keys);
            pack(values, some, p.v_strides[2], p.v_scales, n, p.value_dim, s.value_dim, memory.values);
            all_products(queries, memory.keys, s.dim, s.dim, n, Rows(), memory.logits, s.tile);
        } else if (STORED<T>) {
            stored_products(p, s, keys, n, next, memory);
        } else {
            all_products(queries, keys, s.dim, p.k_strides[2], n, next, memory.logits, s.tile);
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

template <class T>
int attend(const Problem& p) {
    Shape s = shape_of(p);
    int64_t heads = p.batch * p.kv_heads, tasks = heads * s.runs, size = (s.rows * (s.value_dim + 2) + 15) / 16 * 16;
    int64_t all_runs = p.all_runs ? p.all_runs : s.runs;
    int64_t bytes = heads * p.keys * (p.dim + p.value_dim) * sizeof(T);
    static thread_local Lines partials;  // those of earlier parts stay: the size is the same
    float* memory = partials.fit(heads * all_runs * size);
    auto partial_of = [&](int64_t task) { return memory + (task / s.runs * all_runs + p.first_run + task % s.runs) * size; };
    std::atomic<int64_t> next{0};
    std::atomic<int> code{0};
    auto work = [&] {
        static thread_local Memory own;
        try {
            for (int64_t task; !code && (task = next++) < tasks;)
                if (!run_task<T>(p, s, task, own, partial_of(task))) code = NOT_FINITE;
        } catch (...) {
            code = code_of_exception();
        }
    };
    Workers::run(bytes < THREADED_BYTES ? 1 : std::min(p.threads, tasks), work);
    if (p.first_run + s.runs < all_runs) return code;
    s.runs = all_runs;
    for (int64_t head = 0; !code && head < heads; head++)
        if (!finish<T>(p, s, head, memory + head * all_runs * size, size)) code = NOT_FINITE;
    return code;
}

int attend_by_dtype(const Problem& p) {
#if defined(DOTS)
    if (p.dtype == BFLOAT16 && p.kv_dtype >= INT8 && p.dim % PAIR == 0 && p.value_dim % PAIR == 0 && !p.indices)
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
