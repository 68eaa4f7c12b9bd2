// Random problems for the native kernel, run under sanitizers: any read or write outside of the tensors ends the program.

#include "attend.cpp"

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

template <class T>
bool run(Dtype dtype) {
    Problem p = {};
    p.batch = draw(1, 3), p.kv_heads = draw(1, 3), p.group = draw(1, 5), p.length = draw(1, 7), p.keys = draw(1, 5000);
    p.dim = draw(1, 150), p.value_dim = draw(0, 1) ? p.dim : draw(1, 150), p.threads = draw(1, 4), p.dtype = dtype;
    p.scale = 0.1, p.softcap = draw(0, 3) ? 0 : 5;
    int64_t heads = p.kv_heads * p.group;
    auto q = numbers<T>(p.batch * heads * p.length * p.dim);
    auto k = numbers<T>(p.batch * p.kv_heads * p.keys * p.dim), v = numbers<T>(p.batch * p.kv_heads * p.keys * p.value_dim);
    std::vector<float> out(p.batch * heads * p.length * p.value_dim, NAN), lse(p.batch * heads * p.length, NAN);
    std::vector<int64_t> low(p.length), high(p.length);
    for (int64_t i = 0; i < p.length; i++) low[i] = draw(0, p.keys), high[i] = draw(0, p.keys);
    p.q = q.data(), p.k = k.data(), p.v = v.data(), p.out = out.data(), p.lse = lse.data();
    if (draw(0, 1)) p.low = low.data(), p.high = high.data();
    auto set = [](int64_t* strides, int64_t count, int64_t tokens, int64_t width) {
        strides[0] = count * tokens * width, strides[1] = tokens * width, strides[2] = width;
    };
    set(p.q_strides, heads, p.length, p.dim), set(p.k_strides, p.kv_heads, p.keys, p.dim);
    set(p.v_strides, p.kv_heads, p.keys, p.value_dim), set(p.out_strides, heads, p.length, p.value_dim);
    set(p.lse_strides, heads, p.length, 1);
    if (attnmesh_attend(&p)) return false;
    for (float x : out)
        if (!std::isfinite(x)) return false;
    auto first = lse;
    p.threads = 1;
    return attnmesh_attend(&p) == 0 && first == lse;  // the same bits on any number of threads
}

int main() {
    for (int i = 0; i < 60; i++)
        if (!run<float>(FLOAT32) || !run<BFloat16>(BFLOAT16) || !run<_Float16>(FLOAT16)) return printf("problem %d\n", i), 1;
}
