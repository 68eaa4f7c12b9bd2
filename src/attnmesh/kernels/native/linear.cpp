// Linear layers of one input of few rows: each rank of a host computes some of the outputs, and all read them all.
//
// One rank computes an output whole, and the order of its sum depends neither on the ranks nor on the rows. A rank writes
// its outputs to one half of its board, counts them, and waits for the counts of the others. The halves take turns. Rank A,
// which has read all outputs of exchange 4, writes exchange 5 to the other half while rank B still reads exchange 4. A writes
// exchange 6 only after B has counted exchange 5, and B does so after it has read exchange 4. Outputs that do not fit in a
// half go piece by piece.

#include <atomic>

#include "boxes.h"
#include "products.h"
#include "workers.h"

namespace {

constexpr int64_t BLOCK = 16384;  // sums of the products with a transposed weight that stay in a near cache
constexpr int TRANSPOSED = std::min(16, PAIR);  // columns of a transposed weight that are read at a time
constexpr int64_t TAG_BYTES = 64;  // a tag of the call, before its outputs on a half
constexpr int64_t DIFFERENT_CALL = -3;  // a call returns this less r if rank r has made another call

struct Layer {
    const void *weight, *bias;            // (outputs, columns), or (columns, outputs) if it is transposed; bias may be null
    int64_t outputs, stride, transposed;  // `stride` is between rows of the weight
};

struct Linear {
    // Fields of each call.
    const void* x;  // (rows, columns)
    void* out;      // of each layer (rows, outputs), one after the other
    int64_t rows, tag, exchanges, threads;  // exchanges before this call
    // Fields of all calls of these layers.
    char* boards;  // the first of them; null for one rank
    int64_t dtype, columns, board_bytes, half_bytes, ranks, rank, spin, sleep, outputs, layers;
    Layer layer[];
};

// Outputs of a piece: those that all ranks compute between two exchanges.
int64_t piece_of(const Linear& l) { return l.ranks * ((l.half_bytes - TAG_BYTES) / 4 / l.rows); }

// The first of `outputs` outputs that a rank computes.
int64_t cut(int64_t outputs, int64_t rank, int64_t ranks) { return outputs * rank / ranks; }

struct Half {
    int64_t* tag;
    float* outputs;
};

Half half_of(const Linear& l, int64_t rank, int64_t exchange) {
    char* start = ((Box*)(l.boards + rank * l.board_bytes))->message + exchange % 2 * l.half_bytes;
    return {(int64_t*)start, (float*)(start + TAG_BYTES)};
}

inline void round_to(float& to, float x) { to = x; }
inline void round_to(Float16& to, float x) { to = (Float16)x; }
inline void round_to(BFloat16& to, float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Calls `work(layer, low, high, before, at)` for each layer with outputs from `first` up to `stop` of all: the layer's own are
// `low` up to `high`. `before` outputs are of earlier layers, and `at` of those from `first` on.
template <class Work>
void by_layers(const Linear& l, int64_t first, int64_t stop, Work work) {
    int64_t before = 0;
    for (int64_t i = 0; i < l.layers; before += l.layer[i++].outputs) {
        int64_t low = std::max(first - before, (int64_t)0), high = std::min(stop - before, l.layer[i].outputs);
        if (low < high) work(l.layer[i], low, high, before, before + low - first);
    }
}

inline Floats load_one(const float* x) { return load(x); }
inline Floats load_one(const BFloat16* x) { return widen(x); }
inline Floats load_one(const Float16* x) {
    Float16s half;
    std::memcpy(&half, x, sizeof(half));
    return widen(half);
}

// The products of all rows with n outputs of a transposed weight. Each is a sum in the order of the columns, whatever n is:
// the outputs after the last whole vector are copied to a vector. Rows of `out` are `tile` numbers apart, which is at least n
// rounded up to whole vectors.
template <class T>
void transposed_products(Queries q, const T* weight, int64_t stride, int64_t n, float* out, int64_t tile) {
    std::fill(out, out + q.rows * tile, 0.0f);
    int64_t block = std::max<int64_t>(1, BLOCK / W / q.rows) * W;
    for (int64_t first = 0; first < n; first += block) {
        int64_t stop = std::min(n, first + block), whole = stop / W * W;
        for (int64_t d = 0; d < q.width; d += TRANSPOSED) {
            T rest[TRANSPOSED][W] = {};
            for (int j = 0; j < TRANSPOSED; j++) std::memcpy(rest[j], weight + (d + j) * stride + whole, (stop - whole) * sizeof(T));
            for (int64_t i = first; i < stop; i += W) {
                Floats read[TRANSPOSED];
                for (int j = 0; j < TRANSPOSED; j++) read[j] = load_one(i < whole ? weight + (d + j) * stride + i : rest[j]);
                for (int64_t r = 0; r < q.rows; r++) {
                    Floats sum = load(out + r * tile + i);
                    for (int j = 0; j < TRANSPOSED; j++) sum += q.first[r * q.width + place_of<T>(d + j)] * read[j];
                    store(out + r * tile + i, sum);
                }
            }
        }
    }
}

// Reads the input, with its columns in the order of loaded weights.
template <class T>
void read(const Linear& l, float* x) {
    for (int64_t r = 0; r < l.rows; r++)
        for (int64_t d = 0; d < l.columns; d++) x[r * l.columns + place_of<T>(d)] = value(((const T*)l.x)[r * l.columns + d]);
}

// Computes outputs of a layer in float32. Rows of `into` are `width` numbers apart.
template <class T>
void compute(const Linear& l, const Layer& layer, const float* x, int64_t first, int64_t stop, float* into, int64_t width) {
    int64_t bytes = (stop - first) * l.columns * (int64_t)sizeof(T), threads = bytes < THREADED_BYTES ? 1 : l.threads;
    int64_t some = (stop - first + threads - 1) / threads;
    std::atomic<int64_t> next{first};
    std::atomic<int> code{0};
    auto work = [&] {
        static thread_local Lines own;
        try {
            for (int64_t at; !code && (at = next.fetch_add(some)) < stop;) {
                int64_t n = std::min(some, stop - at), tile = (n + W - 1) / W * W;
                float* found = own.fit(l.rows * tile);
                const T* weight = (const T*)layer.weight + at * (layer.transposed ? 1 : layer.stride);
                if (layer.transposed)
                    transposed_products<T>({x, l.rows, l.columns}, weight, layer.stride, n, found, tile);
                else
                    all_products<T>({x, l.rows, l.columns}, weight, l.columns, layer.stride, n, Rows(), found, tile);
                for (int64_t r = 0; r < l.rows; r++)
                    for (int64_t i = 0; i < n; i++)
                        into[r * width + at - first + i] = found[r * tile + i] + (layer.bias ? value(((const T*)layer.bias)[at + i]) : 0.0f);
            }
        } catch (...) {
            code = code_of_exception();
        }
    };
    Workers::run(threads, work);
    if (code) throw (int)code;
}

// Computes the outputs from `first` up to `stop` of all layers, (rows, outputs).
template <class T>
void compute_all(const Linear& l, int64_t first, int64_t stop, float* into) {
    static thread_local Lines lines;
    float* x = lines.fit(l.rows * l.columns);
    read<T>(l, x);
    by_layers(l, first, stop, [&](const Layer& layer, int64_t low, int64_t high, int64_t, int64_t at) {
        compute<T>(l, layer, x, low, high, into + at, stop - first);
    });
}

// Writes the outputs from `first` up to `stop` of all to their layers' places in `out`, in the dtype of the input.
template <class T>
void put(const Linear& l, int64_t first, int64_t stop, const float* from) {
    by_layers(l, first, stop, [&](const Layer& layer, int64_t low, int64_t high, int64_t before, int64_t at) {
        for (int64_t r = 0; r < l.rows; r++) {
            T* to = (T*)l.out + before * l.rows + r * layer.outputs;
            for (int64_t i = low; i < high; i++) round_to(to[i], from[r * (stop - first) + at + i - low]);
        }
    });
}

template <class T>
int64_t run(const Linear& l, int64_t done) {
    if (l.ranks == 1) {
        static thread_local Lines own;
        float* found = own.fit(l.rows * l.outputs);
        compute_all<T>(l, 0, l.outputs, found);
        put<T>(l, 0, l.outputs, found);
        return 1;
    }
    int64_t size = piece_of(l), pieces = (l.outputs + size - 1) / size, ops_per_piece = l.ranks + 1;
    for (int64_t piece = done / ops_per_piece; piece < pieces; piece++) {
        int64_t first = piece * size, outputs = std::min(size, l.outputs - first), exchange = l.exchanges + piece + 1;
        auto from = [&](int64_t rank) { return first + cut(outputs, rank, l.ranks); };
        if (done <= piece * ops_per_piece) {
            int64_t low = from(l.rank), high = from(l.rank + 1);
            Half own = half_of(l, l.rank, exchange);
            *own.tag = l.tag;
            compute_all<T>(l, low, high, own.outputs);
            raise_to(((Box*)(l.boards + l.rank * l.board_bytes))->sent, exchange);
        }
        for (int64_t rank = 0; rank < l.ranks; rank++)
            if (rank != l.rank && !reached(((Box*)(l.boards + rank * l.board_bytes))->sent, exchange, l.spin, l.sleep))
                return piece * ops_per_piece + 1 + rank;
        for (int64_t rank = 0; rank < l.ranks; rank++) {
            Half half = half_of(l, rank, exchange);
            if (*half.tag != l.tag) return DIFFERENT_CALL - rank;
            put<T>(l, from(rank), from(rank + 1), half.outputs);
        }
    }
    return pieces * ops_per_piece;
}

}  // namespace

// A piece has one op to compute it, and one to wait for each rank. Performs the ops from `done` on. Returns how many are done,
// fewer than all if a wait was long, or a code.
extern "C" int64_t attnmesh_linear(const Linear* linear, int64_t done) {
    try {
        return linear->dtype == FLOAT32 ? run<float>(*linear, done) : linear->dtype == BFLOAT16 ? run<BFloat16>(*linear, done) : run<Float16>(*linear, done);
    } catch (int code) {
        return code;
    } catch (...) {
        return code_of_exception();
    }
}
