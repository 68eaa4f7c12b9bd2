// New tokens of a cache shard, written in place, or to the files of a shard with a record of them; and digests.

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <sys/stat.h>
#include <unistd.h>

#include "digest.h"

// Tokens to write after those in the shard. A row of a tensor is in one piece.
struct Append {
    void* stored[2];
    const void* given[2];
    int64_t *token_index, *device_counts;  // the token in each slot; the tokens on all ranks, and those in the shard
    int64_t stored_strides[2][4], given_strides[2][4], widths[2];  // in elements: sequence, head, token, column
    int64_t element, tensors, batch, heads, tokens;                // bytes of an element

    int64_t row_bytes(int64_t x) const { return widths[x] * element; }
};

// Tokens of a shard whose memory is a mapped file.
struct FileAppend {
    Append rows;
    const char* place;       // where the file begins in memory
    const int64_t* weights;  // of digests
    const int64_t* tokens;   // their numbers; null for the next ones
    int64_t* digest;               // of the new rows
    int64_t* sums;                 // how many tokens of the piece are summed, and the sums of their rows for its checksums
    int64_t file, journal, at;     // handles, and where the record goes in the journal
    int64_t key, serial, base;     // the journal's key, the record's number, and rows in whole pieces before
    int64_t length;                // tokens on all ranks after this
};

// A run of rows in each head of a tensor.
struct Run {
    const char* x;  // the first element
    const int64_t* weights;
    int64_t size, heads, step, count;        // bytes of an element, heads, bytes from head to head, elements of each run
    int64_t place, head_elements, elements;  // elements of the tensor: before the first run, of a head, of all
};

namespace {

constexpr int64_t FEW = 4096;  // bytes of a head: fewer are copied to the mapped memory, which is faster than a write

char* row_to(const Append& a, int64_t x, int64_t b, int64_t h, int64_t t) {
    const int64_t* step = a.stored_strides[x];
    return (char*)a.stored[x] + (b * step[0] + h * step[1] + t * step[2]) * a.element;
}

const char* row_from(const Append& a, int64_t x, int64_t b, int64_t h, int64_t t) {
    const int64_t* step = a.given_strides[x];
    return (const char*)a.given[x] + (b * step[0] + h * step[1] + t * step[2]) * a.element;
}

void copy_rows(const Append& a, int64_t x, int64_t b, int64_t h) {
    for (int64_t t = 0; t < a.tokens; t++)
        std::memcpy(row_to(a, x, b, h, a.device_counts[1] + t), row_from(a, x, b, h, t), a.row_bytes(x));
}

void note_tokens(const Append& a, const int64_t* tokens) {
    int64_t length = a.device_counts[0], used = a.device_counts[1];
    for (int64_t t = 0; t < a.tokens; t++) a.token_index[used + t] = tokens ? tokens[t] : length + t;
}

int64_t write_all(int64_t file, const char* from, int64_t count, int64_t at) {
    while (count > 0) {
        ssize_t done = pwrite((int)file, from, (size_t)count, (off_t)at);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? errno : ENOSPC;
        from += done, at += done, count -= done;
    }
    return 0;
}

// Writes the rows of a head to the file.
int64_t write_head(const FileAppend& f, int64_t x, int64_t b, int64_t h) {
    const Append& a = f.rows;
    int64_t bytes = a.tokens * a.row_bytes(x);
    bool is_whole = a.given_strides[x][2] == a.widths[x] && a.stored_strides[x][2] == a.widths[x];
    if (is_whole && bytes >= FEW)
        return write_all(f.file, row_from(a, x, b, h, 0), bytes, row_to(a, x, b, h, a.device_counts[1]) - f.place);
    copy_rows(a, x, b, h);
    return 0;
}

// Writes the rows of a tensor, and adds them up: each head is read from memory once for both.
template <class T>
int64_t write_tensor(const FileAppend& f, int64_t x, PartSums& sums) {
    const Append& a = f.rows;
    int64_t row = a.row_bytes(x) / (int64_t)sizeof(T);
    bool is_whole = a.given_strides[x][2] == a.widths[x];
    int64_t at_once = is_whole ? a.tokens : 1;
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t h = 0; h < a.heads; h++) {
            for (int64_t t = 0; t < a.tokens; t += at_once) {
                int64_t place = row_to(a, x, b, h, a.device_counts[1] + t) - (char*)a.stored[x];
                sums.add<T>(row_from(a, x, b, h, t), row * at_once, place / (int64_t)sizeof(T));
            }
            if (int64_t failed = write_head(f, x, b, h)) return failed;
        }
    return 0;
}

// Writes the rows and their tokens. `sums` gets an entry for each tensor, of the widest integers that its rows are made of,
// and one for the tokens.
int64_t write_rows(const FileAppend& f, std::vector<PartSums>& sums) {
    const Append& a = f.rows;
    for (int64_t x = 0; x < a.tensors; x++) {
        int64_t bytes = a.row_bytes(x) % 8, size = !bytes ? 8 : bytes == 4 ? 4 : bytes % 2 ? 1 : 2;
        PartSums& own = sums.emplace_back(a.batch * a.stored_strides[x][0] * a.element / size, f.weights);
        int64_t failed = size == 8   ? write_tensor<int64_t>(f, x, own)
                         : size == 4 ? write_tensor<int32_t>(f, x, own)
                         : size == 2 ? write_tensor<int16_t>(f, x, own)
                                     : write_tensor<int8_t>(f, x, own);
        if (failed) return failed;
    }
    note_tokens(a, f.tokens);
    int64_t used = a.device_counts[1];
    sums.emplace_back(used + a.tokens, f.weights).add<int64_t>(a.token_index + used, a.tokens, used);
    uint64_t digest = 0, weight = 1;
    for (const PartSums& own : sums) digest += weight * (uint64_t)own.value(), weight += 2;
    *f.digest = (int64_t)digest;
    return 0;
}

// Adds the sums to those of the piece, if the piece's are of all earlier tokens.
void add_sums(const FileAppend& f, const std::vector<PartSums>& sums) {
    if (f.sums[0] != f.rows.device_counts[1]) return;
    int64_t* at = f.sums + 1;
    for (const PartSums& own : sums) own.add_to(at), at += own.count();
    f.sums[0] += f.rows.tokens;
}

// Writes the record of `journal.py`.
int64_t write_record(const FileAppend& f) {
    int64_t start = f.base + f.rows.device_counts[1];
    int64_t fields[6] = {f.key, f.serial, start, start + f.rows.tokens, f.length, *f.digest};
    int64_t record[8] = {fields[1], fields[2], fields[3], fields[4], fields[5], digest<int64_t>(fields, 6, f.weights)};
    return write_all(f.journal, (const char*)record, sizeof(record), f.at);
}

}  // namespace

extern "C" int64_t attnmesh_append(const Append* a) {
    for (int64_t x = 0; x < a->tensors; x++)
        for (int64_t b = 0; b < a->batch; b++)
            for (int64_t h = 0; h < a->heads; h++) copy_rows(*a, x, b, h);
    note_tokens(*a, nullptr);
    a->device_counts[0] += a->tokens, a->device_counts[1] += a->tokens;
    return 0;
}

// Returns 0 or the system's error. After an error the counts are as before, so the rows are no tokens.
extern "C" int64_t attnmesh_append_to_file(const FileAppend* f) {
    struct stat found;
    if (fstat((int)f->journal, &found)) return errno;
    if (!found.st_nlink) return ENOENT;  // nobody would find what is written
    std::vector<PartSums> sums;
    if (int64_t failed = write_rows(*f, sums)) return failed;
    if (int64_t failed = write_record(*f)) return failed;
    add_sums(*f, sums);
    f->rows.device_counts[0] = f->length, f->rows.device_counts[1] += f->rows.tokens;
    return 0;
}

// Returns the digest of a tensor that is zeros but for a run of rows in each head.
extern "C" int64_t attnmesh_digest_run(const Run* r) {
    PartSums sums(r->elements, r->weights);
    for (int64_t h = 0; h < r->heads; h++) {
        const char* x = r->x + h * r->step;
        int64_t place = r->place + h * r->head_elements;
        if (r->size == 8)
            sums.add<int64_t>(x, r->count, place);
        else if (r->size == 4)
            sums.add<int32_t>(x, r->count, place);
        else if (r->size == 2)
            sums.add<int16_t>(x, r->count, place);
        else
            sums.add<int8_t>(x, r->count, place);
    }
    return sums.value();
}

extern "C" int64_t attnmesh_digest(const void* x, int64_t count, int64_t bytes, const int64_t* weights) {
    return bytes == 1   ? digest<int8_t>(x, count, weights)
           : bytes == 2 ? digest<int16_t>(x, count, weights)
           : bytes == 4 ? digest<int32_t>(x, count, weights)
                        : digest<int64_t>(x, count, weights);
}
