// Digests of tensors, as `core/digest.py` defines them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t ROW = 1 << 16;  // elements in one weighted sum, and weights
constexpr int64_t AT_ONCE = 4;    // rows that are added together

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
            if (place == ROW) rows.push_back((int64_t)sum), sum = place = 0;
            if (place == 0 && count >= AT_ONCE * ROW) {
                add_rows(x);
                x += AT_ONCE * ROW * (int64_t)sizeof(T), count -= AT_ONCE * ROW;
                continue;
            }
            int64_t part = std::min(count, ROW - place);
            uint64_t more = 0;
            for (int64_t i = 0; i < part; i++) more += (uint64_t)number(x, i) * (uint64_t)weights[place + i];
            sum += more, place += part, x += part * (int64_t)sizeof(T), count -= part;
        }
    }

    int64_t value() {
        if (rows.empty()) return (int64_t)sum;
        rows.push_back((int64_t)sum);
        Digest<int64_t> of_rows(weights);
        of_rows.add(rows.data(), (int64_t)rows.size());
        return of_rows.value();
    }

  private:
    static int64_t number(const char* x, int64_t i) { return number_of<T>(x, i); }

    // Adds whole rows. Each weight is read once for all of them: weights are more bytes than most rows.
    void add_rows(const char* x) {
        uint64_t sums[AT_ONCE] = {};
        for (int64_t i = 0; i < ROW; i++)
            for (int64_t n = 0; n < AT_ONCE; n++) sums[n] += (uint64_t)number(x, n * ROW + i) * (uint64_t)weights[i];
        rows.insert(rows.end(), sums, sums + AT_ONCE - 1);
        sum = sums[AT_ONCE - 1], place = ROW;
    }

    const int64_t* weights;
    uint64_t sum = 0;
    int64_t place = 0;
    std::vector<int64_t> rows;  // sums of whole rows, of more elements than one has
};

template <class T>
int64_t digest(const void* x, int64_t count, const int64_t* weights) {
    Digest<T> found(weights);
    found.add(x, count);
    return found.value();
}

// Sums of the rows of some elements, of which no other one counts: those of all elements are the sums of them.
class RowSums {
  public:
    RowSums(int64_t elements, const int64_t* weights) : sums((elements + ROW - 1) / ROW), weights(weights) {}

    // Adds elements that stand at a place and after it.
    template <class T>
    void add(const void* from, int64_t count, int64_t place) {
        const char* x = (const char*)from;  // at any address
        while (count > 0) {
            int64_t first = place % ROW, part = std::min(count, ROW - first);
            uint64_t more = 0;
            for (int64_t i = 0; i < part; i++) more += (uint64_t)number_of<T>(x, i) * (uint64_t)weights[first + i];
            sums[place / ROW] += more;
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
