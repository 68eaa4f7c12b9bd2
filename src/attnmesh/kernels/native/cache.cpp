// New tokens of a cache shard, written in place.

#include <cstdint>
#include <cstring>

// Tokens to write after those in the shard. Strides are in bytes; a row of a tensor is in one piece.
struct Append {
    void* stored[2];
    const void* given[2];
    int64_t *token_index, *state;  // the token in each slot; the tokens on all ranks, and those in the shard
    int64_t stored_strides[2][3], given_strides[2][3], row_bytes[2];  // sequence, head, token
    int64_t tensors, batch, heads, tokens;
};

extern "C" int64_t attnmesh_append(const Append* a) {
    int64_t length = a->state[0], used = a->state[1];
    for (int64_t x = 0; x < a->tensors; x++)
        for (int64_t b = 0; b < a->batch; b++)
            for (int64_t h = 0; h < a->heads; h++)
                for (int64_t t = 0; t < a->tokens; t++) {
                    const int64_t *to = a->stored_strides[x], *from = a->given_strides[x];
                    std::memcpy((char*)a->stored[x] + b * to[0] + h * to[1] + (used + t) * to[2],
                                (const char*)a->given[x] + b * from[0] + h * from[1] + t * from[2], a->row_bytes[x]);
                }
    for (int64_t t = 0; t < a->tokens; t++) a->token_index[used + t] = length + t;
    a->state[0] += a->tokens, a->state[1] += a->tokens;
    return 0;
}
