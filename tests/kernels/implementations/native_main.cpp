// Random problems for the native kernel, run under sanitizers: any read or write outside of the tensors ends the program.

#include "attend.cpp"
#include "cache.cpp"
#include "linear.cpp"
#include "mailbox.cpp"

#include <cstdio>
#include <random>

std::mt19937 noise(7);

int64_t draw(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(noise); }

template <class T>
std::vector<T> numbers(int64_t count) {
    std::vector<T> out(count);
    for (T& x : out) {
        float value = std::normal_distribution<float>()(noise);
        if constexpr (std::is_same_v<T, BFloat16>) {
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            x.bits = bits >> 16;
        } else {
            x = (T)value;
        }
    }
    return out;
}

// Keys or values; rows in 8 bits end in scales of 2^-7.
template <class T>
std::vector<T> rows_of_numbers(int64_t rows, int64_t columns, int64_t width) {
    if constexpr (STORED<T>) {
        std::vector<T> out(rows * width);
        for (int64_t i = 0; i < rows * width; i++) {
            int64_t d = i % width;
            out[i].bits = d < columns ? draw(-126, 126) : (d - columns) % 2 ? 0x3c : 0;
        }
        return out;
    } else {
        return numbers<T>(rows * columns);
    }
}

template <class T, class Q = T>
bool run(Dtype kv_dtype, Dtype dtype) {
    Problem p = {};
    p.batch = draw(1, 3), p.kv_heads = draw(1, 3), p.group = draw(1, 5), p.length = draw(1, 7), p.keys = draw(1, 5000);
    p.dim = draw(1, 150), p.value_dim = draw(0, 1) ? p.dim : draw(1, 150), p.threads = draw(1, 4), p.dtype = dtype;
    if (draw(0, 1)) p.dim = p.value_dim = 64 * draw(1, 4);
    p.kv_dtype = kv_dtype, p.k_scales = p.dim, p.v_scales = p.value_dim;
    auto width = [](int64_t columns) { return columns + (STORED<T> ? 2 * ((columns + SCALE_COLUMNS - 1) / SCALE_COLUMNS) : 0); };
    int64_t k_width = width(p.dim), v_width = width(p.value_dim);
    p.scale = 0.1, p.softcap = draw(0, 3) ? 0 : 5;
    int64_t heads = p.kv_heads * p.group;
    auto q = numbers<Q>(p.batch * heads * p.length * p.dim);
    auto k = rows_of_numbers<T>(p.batch * p.kv_heads * p.keys, p.dim, k_width), v = rows_of_numbers<T>(p.batch * p.kv_heads * p.keys, p.value_dim, v_width);
    std::vector<float> out(p.batch * heads * p.length * p.value_dim, NAN), lse(p.batch * heads * p.length, NAN);
    std::vector<int64_t> low(p.length), high(p.length);
    for (int64_t i = 0; i < p.length; i++) low[i] = draw(0, p.keys), high[i] = draw(0, p.keys);
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.out = out.data(), p.lse = lse.data();
    if (draw(0, 1)) p.low = low.data(), p.high = high.data();
    auto set = [](int64_t* strides, int64_t count, int64_t tokens, int64_t width) {
        strides[0] = count * tokens * width, strides[1] = tokens * width, strides[2] = width;
    };
    set(p.q_strides, heads, p.length, p.dim), set(p.k_strides, p.kv_heads, p.keys, k_width);
    set(p.v_strides, p.kv_heads, p.keys, v_width), set(p.out_strides, heads, p.length, p.value_dim);
    set(p.lse_strides, heads, p.length, 1);
    if (attnmesh_attend(&p)) return false;
    for (float x : out)
        if (!std::isfinite(x)) return false;
    auto first = lse;
    p.threads = 1;
    if (attnmesh_attend(&p) || first != lse) return false;  // the same bits on any number of threads
    if (draw(0, 7)) return true;
    p.low = p.high = nullptr;
    if (attnmesh_attend(&p)) return false;
    first = lse;
    int64_t keys = p.keys, run = 0;
    p.all_runs = (keys + RUN - 1) / RUN;
    for (; run < p.all_runs; run++) {  // and in parts
        Problem part = p;
        part.keys = std::min(RUN, keys - run * RUN), part.first_run = run;
        part.k = k.data() + run * RUN * k_width, part.v = v.data() + run * RUN * v_width;
        if (attnmesh_attend(&part)) return false;
    }
    return first == lse;
}

// One rank of a host: merges with the others many times, by a tree if there are two, else all at once.
void talk(char* memory, int64_t rank, int64_t ranks, int64_t rows, int64_t width, std::vector<float>* found) {
    int64_t size = 2 + rows * (1 + width), box = sizeof(Box) + 4 * size + 64 - 4 * size % 64;
    std::vector<float> message(size);
    std::vector<int64_t> fields((sizeof(Exchange) + 2 * ranks * sizeof(Op)) / 8);
    auto* e = (Exchange*)fields.data();
    for (int64_t round = 0; round < 300; round++) {
        for (int64_t i = 0; i < size; i++) message[i] = (float)((rank + 1) * (i + round) % 17) - 8;
        int64_t count = 0;
        *e = {memory, (char*)message.data(), 4 * size, rows, width, rank % 2 ? 20000 : 0, 1000000, 0};
        for (int64_t peer = 0; peer < ranks; peer++)
            if (peer != rank) e->op[count++] = {SEND, (rank * ranks + peer) * box, round};
        for (int64_t peer = 0; peer < ranks; peer++)
            e->op[count++] = {peer == rank ? OWN : ranks == 2 ? MERGE : AWAIT, (peer * ranks + rank) * box, round + 1};
        if (ranks == 2) e->op[1] = {MERGE, ((1 - rank) * ranks + rank) * box, round + 1}, count = 2;
        e->ops = count;
        for (int64_t done = 0; (done = attnmesh_exchange(e, done)) < count;) {}
        found->insert(found->end(), message.begin(), message.end());
    }
}

bool merges(int64_t ranks) {
    int64_t rows = draw(1, 9), width = draw(1, 40);
    std::vector<Counter> memory(ranks * ranks * (4 + (2 + rows * (1 + width)) / 16));
    std::vector<std::vector<float>> found(ranks);
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < ranks; rank++) threads.emplace_back(talk, (char*)memory.data(), rank, ranks, rows, width, &found[rank]);
    for (auto& thread : threads) thread.join();
    for (auto& each : found)
        if (each != found[0]) return false;  // the same bits on all ranks
    return true;
}

bool appends() {
    int64_t batch = draw(1, 3), heads = draw(1, 3), width = draw(1, 20), slots = 40;
    std::vector<float> stored(batch * heads * slots * width);
    std::vector<int64_t> token_index(slots), state = {7, 0};
    while (state[1] < slots) {
        int64_t tokens = std::min(draw(1, 5), slots - state[1]);
        auto given = numbers<float>(batch * heads * tokens * width);
        Append a = {{stored.data()}, {given.data()}, token_index.data(), state.data(), {{heads * slots * width, slots * width, width, 1}},
                    {{heads * tokens * width, tokens * width, width, 1}}, {width}, 4, 1, batch, heads, tokens};
        attnmesh_append(&a);
    }
    return state[0] == 7 + slots && token_index[slots - 1] == 6 + slots;
}

// One rank of a host: computes its outputs of two layers, of which one is turned, many times in pieces: boards are small.
template <class T>
void share(char* boards, int64_t rank, int64_t ranks, const std::vector<T>* weights, const std::vector<T>* x, int64_t rows, int64_t columns, std::vector<T>* found) {
    int64_t first = weights[0].size() / columns, second = weights[1].size() / columns, half = TAG_BYTES + 4 * rows * 8;
    std::vector<int64_t> fields((sizeof(Linear) + 2 * sizeof(Layer)) / 8);
    auto* l = (Linear*)fields.data();
    found->resize(rows * (first + second));
    int64_t size = ranks * 8, pieces = (first + second + size - 1) / size, dtype = sizeof(T) == 4 ? FLOAT32 : std::is_same_v<T, BFloat16> ? BFLOAT16 : FLOAT16;
    *l = {x->data(), found->data(), rows, 9, 0, 1 + rank % 2, ranks > 1 ? boards : nullptr, dtype, columns,
          (int64_t)sizeof(Box) + 2 * half, half, ranks, rank, rank % 2 ? 20000 : 0, 1000000, first + second, 2};
    l->layer[0] = {weights[0].data(), nullptr, first, columns, false}, l->layer[1] = {weights[1].data(), weights[0].data(), second, second, true};
    for (int64_t round = 0; round < 20; round++, l->exchanges += pieces)
        for (int64_t done = 0; ranks > 1 && (done = attnmesh_linear(l, done)) < pieces * (ranks + 1);)
            if (done < 0) return found->clear();
    if (ranks == 1 && attnmesh_linear(l, 0) != 1) found->clear();
}

template <class T>
bool linears(int64_t ranks) {
    int64_t rows = draw(1, 9), columns = PAIR * draw(1, 4);
    std::vector<T> weights[2] = {numbers<T>(columns * draw(1, 90)), numbers<T>(columns * draw(1, columns))}, x = numbers<T>(rows * columns);
    std::vector<std::vector<T>> found(ranks + 1);
    std::vector<std::thread> threads;
    std::vector<Counter> boards(ranks * (2 + (TAG_BYTES + 4 * rows * 8) / 32));
    for (int64_t rank = 0; rank < ranks; rank++) threads.emplace_back(share<T>, (char*)boards.data(), rank, ranks, weights, &x, rows, columns, &found[rank]);
    for (auto& thread : threads) thread.join();
    share<T>(nullptr, 0, 1, weights, &x, rows, columns, &found[ranks]);
    for (auto& each : found)
        if (each.empty() || std::memcmp(each.data(), found[ranks].data(), each.size() * sizeof(T))) return false;  // the same bits on all ranks
    return true;
}

int main() {
    for (int64_t ranks = 1; ranks <= 5; ranks++)
        for (int i = 0; i < 4; i++)
            if (!linears<float>(ranks) || !linears<BFloat16>(ranks) || !linears<Float16>(ranks)) return printf("linears of %d ranks\n", (int)ranks), 1;
    for (int64_t ranks = 2; ranks <= 5; ranks++)
        if (!merges(ranks)) return printf("merges of %d ranks\n", (int)ranks), 1;
    for (int i = 0; i < 20; i++)
        if (!appends()) return printf("append %d\n", i), 1;
    for (int i = 0; i < 60; i++)
        if (!run<float>(FLOAT32, FLOAT32) || !run<BFloat16>(BFLOAT16, BFLOAT16) || !run<Float16>(FLOAT16, FLOAT16) ||
            !run<Int8, float>(INT8, FLOAT32) || !run<Int8, BFloat16>(INT8, BFLOAT16) || !run<Float8, Float16>(FLOAT8, FLOAT16) ||
            !run<Float8, BFloat16>(FLOAT8, BFLOAT16))
            return printf("problem %d\n", i), 1;
}
