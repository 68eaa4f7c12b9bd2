// Messages between the ranks of a host through shared memory, and the merge of the partials in them.
//
// If the message in a box has another size than this rank's own, the two ranks have made different calls. This rank then
// replaces its own message by a mark that fits no call, so that every rank to which it is passed on finds the difference.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "boxes.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF  // a merge gives the same bits whichever of two messages comes first
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

constexpr int64_t MOST_RANKS = 64;

// Marks a message whose sender has another call, unless it is poison, whose checksum is infinite. The mark fits no call in
// float32 or float64: it is larger than others, and finite. Its first number is UNEQUAL_CHECKSUM of comm/mismatch.py.
void mark_different(const Box& box, char* message, int64_t size) {
    float mark[4] = {1e38f, 1e38f, 1e38f, 1e38f}, first;
    double wide;
    std::memcpy(&first, box.message, sizeof(first)), std::memcpy(&wide, box.message, sizeof(wide));
    bool poison = first == INFINITY || wide == INFINITY;
    int64_t bytes = first == INFINITY ? 2 * sizeof(float) : 2 * sizeof(double);
    std::memcpy(message, poison ? box.message : (char*)mark, std::min(size, bytes));
}

// Merges partials, each (checksum of two numbers, lse of each row, out of each row). `into` may be the first of them.
void merge(const float* const* given, int64_t count, int64_t rows, int64_t width, float* into) {
    for (int i = 0; i < 2; i++) {
        float most = given[0][i];
        for (int64_t n = 1; n < count; n++) most = given[n][i] > most || std::isnan(given[n][i]) ? given[n][i] : most;
        into[i] = most;
    }
    for (int64_t r = 0; r < rows; r++) {
        float weights[MOST_RANKS], peak = -FLT_MAX, total = 0;  // in an empty row the peak is finite, and weights are 0
        for (int64_t n = 0; n < count; n++) {
            float lse = given[n][2 + r];
            peak = lse > peak || std::isnan(lse) ? lse : peak;
        }
        for (int64_t n = 0; n < count; n++) total += weights[n] = std::exp(given[n][2 + r] - peak);
        for (int64_t n = 0; n < count; n++) weights[n] /= std::max(total, 1.0f);
        float* out = into + 2 + rows + r * width;
        const float* first = given[0] + 2 + rows + r * width;
        if (count == 2) {
            const float* second = given[1] + 2 + rows + r * width;
            for (int64_t d = 0; d < width; d++) out[d] = first[d] * weights[0] + second[d] * weights[1];
        } else {
            for (int64_t d = 0; d < width; d++) {
                float sum = first[d] * weights[0];
                for (int64_t n = 1; n < count; n++) sum += given[n][2 + rows + r * width + d] * weights[n];
                out[d] = sum;
            }
        }
        into[2 + r] = peak + std::log(total);
    }
}

}  // namespace

enum Kind {
    SEND,   // put the message into a box
    COPY,   // take a message from a box
    MERGE,  // take a message, and merge it into this rank's
    AWAIT,  // wait for a message; at the end all awaited messages are merged, in the order of the operations
    OWN,    // the place of this rank's own message in that order
    TELL,   // count a message that this rank has written into the box itself
    FULL,   // wait until a box has a message, and leave it there
    EMPTY,  // wait until the message in a box is received
};

struct Op {
    int64_t kind, box, count;  // offset of the box; messages sent before this one, or received with it
};

// The messages of one merge, or one message. A message that is merged is in float32. `spin` and `sleep` are nanoseconds.
struct Exchange {
    char *memory, *message;
    int64_t size, rows, width, spin, sleep, ops;
    Op op[];
};

// Performs the operations from `done` on. Returns how many are done: fewer than all if a wait was long, or interrupted. The
// caller then calls again with this number.
extern "C" int64_t attnmesh_exchange(const Exchange* e, int64_t done) {
    const float* given[MOST_RANKS];
    int64_t count = 0;
    for (int64_t i = 0; i < e->ops; i++) {
        const Op& op = e->op[i];
        Box& box = *(Box*)(e->memory + op.box);
        if (op.kind == AWAIT || op.kind == OWN) given[count++] = (float*)(op.kind == OWN ? e->message : box.message);
        if (i < done || op.kind == OWN) continue;
        if (op.kind == TELL) {
            raise_to(box.sent, op.count);
            continue;
        }
        bool is_sent = op.kind == SEND || op.kind == EMPTY;
        if (!reached(is_sent ? box.received : box.sent, op.count, e->spin, e->sleep)) return i;
        if (op.kind == FULL || op.kind == EMPTY) continue;
        if (op.kind == SEND) {
            std::memcpy(box.message, e->message, e->size);
            box.sent.size = e->size;
            raise_to(box.sent, op.count + 1);
        } else if (op.kind != AWAIT) {
            const float* both[2] = {(float*)e->message, (float*)box.message};
            if (box.sent.size != e->size)
                mark_different(box, e->message, e->size);
            else if (op.kind == COPY)
                std::memcpy(e->message, box.message, e->size);
            else
                merge(both, 2, e->rows, e->width, (float*)e->message);
            raise_to(box.received, op.count);
        }
    }
    const Box* other = nullptr;
    for (int64_t i = 0; i < e->ops; i++) {
        const Box* box = (Box*)(e->memory + e->op[i].box);
        if (e->op[i].kind == AWAIT && box->sent.size != e->size) other = box;
    }
    if (other)
        mark_different(*other, e->message, e->size);
    else if (count)
        merge(given, count, e->rows, e->width, (float*)e->message);
    for (int64_t i = 0; i < e->ops; i++)
        if (e->op[i].kind == AWAIT) raise_to(((Box*)(e->memory + e->op[i].box))->received, e->op[i].count);
    return e->ops;
}
