// Digests of tensors, as `core/digest.py` defines them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t SUM_ELEMENTS = 1 << 16;  // elements in one weighted sum, and weights
constexpr int64_t AT_ONCE = 4;             // parts that are added together

// Bits of an int64 with the high ones copied into the low ones, of any other integer as they are.
template <class T>
int64_t folded(T x) {
    return sizeof(T) == 8 ? (int64_t)((uint64_t)x ^ (uint64_t)x >> 32) : (int64_t)x;
}

template <class T>
int64_t number_of(const char* x, int64_t i) {
    T found;
    std::memcpy(&found, x + i * (int64_t)sizeof(T), sizeof(T));
    return folded(found);
}

// The digest of elements that come one run after the other.
template <class T>
class Digest {
  public:
    explicit Digest(const int64_t* weights) : weights(weights) {}

    void add(const void* from, int64_t count) {
        const char* x = (const char*)from;  // at any address
        while (count > 0) {
            if (place == SUM_ELEMENTS) parts.push_back((int64_t)sum), sum = place = 0;
            if (place == 0 && count >= AT_ONCE * SUM_ELEMENTS) {
                add_parts(x);
                x += AT_ONCE * SUM_ELEMENTS * (int64_t)sizeof(T), count -= AT_ONCE * SUM_ELEMENTS;
                continue;
            }
            int64_t part = std::min(count, SUM_ELEMENTS - place);
            uint64_t more = 0;
            for (int64_t i = 0; i < part; i++) more += (uint64_t)number(x, i) * (uint64_t)weights[place + i];
            sum += more, place += part, x += part * (int64_t)sizeof(T), count -= part;
        }
    }

    int64_t value() {
        if (parts.empty()) return (int64_t)sum;
        parts.push_back((int64_t)sum);
        Digest<int64_t> of_parts(weights);
        of_parts.add(parts.data(), (int64_t)parts.size());
        return of_parts.value();
    }

  private:
    static int64_t number(const char* x, int64_t i) { return number_of<T>(x, i); }

    // Adds whole parts, of `SUM_ELEMENTS` each. Each weight is read once for all of them: weights are more bytes than most parts.
    void add_parts(const char* x) {
        uint64_t sums[AT_ONCE] = {};
        for (int64_t i = 0; i < SUM_ELEMENTS; i++)
            for (int64_t n = 0; n < AT_ONCE; n++) sums[n] += (uint64_t)number(x, n * SUM_ELEMENTS + i) * (uint64_t)weights[i];
        parts.insert(parts.end(), sums, sums + AT_ONCE - 1);
        sum = sums[AT_ONCE - 1], place = SUM_ELEMENTS;
    }

    const int64_t* weights;
    uint64_t sum = 0;
    int64_t place = 0;
    std::vector<int64_t> parts;  // sums of whole parts, where there are several
};

template <class T>
int64_t digest(const void* x, int64_t count, const int64_t* weights) {
    Digest<T> found(weights);
    found.add(x, count);
    return found.value();
}

// Sums of the parts of some elements, of which no other one counts: those of all elements are the sums of them.
class PartSums {
  public:
    PartSums(int64_t elements, const int64_t* weights) : sums((elements + SUM_ELEMENTS - 1) / SUM_ELEMENTS), weights(weights) {}

    // Adds elements that stand at a place and after it.
    template <class T>
    void add(const void* from, int64_t count, int64_t place) {
        const char* x = (const char*)from;  // at any address
        while (count > 0) {
            int64_t first = place % SUM_ELEMENTS, part = std::min(count, SUM_ELEMENTS - first);
            uint64_t more = 0;
            for (int64_t i = 0; i < part; i++) more += (uint64_t)number_of<T>(x, i) * (uint64_t)weights[first + i];
            sums[place / SUM_ELEMENTS] += more;
            place += part, count -= part, x += part * (int64_t)sizeof(T);
        }
    }

    void add_to(int64_t* others) const {
        for (size_t i = 0; i < sums.size(); i++) others[i] = (int64_t)((uint64_t)others[i] + sums[i]);
    }

    int64_t count() const { return (int64_t)sums.size(); }
    int64_t value() const { return count() == 1 ? (int64_t)sums[0] : digest<int64_t>(sums.data(), count(), weights); }

  private:
    std::vector<uint64_t> sums;
    const int64_t* weights;
};

}  // namespace
