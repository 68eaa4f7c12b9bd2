// Boxes in memory that the ranks of a host share, and how a rank waits for another.
//
// A box has one writer and one reader. Its head has the number of messages sent and the number received. The box is empty
// when they are equal. A board is a box that all other ranks read.
// A rank that waits spins for a moment, lets ranks that share its core go first, and then sleeps until another wakes it.
// No wake is lost: a waiter adds itself to `sleepers` and then reads the counter, and a sender raises the counter and then
// reads `sleepers`. So the waiter sees the new count, or the sender sees the waiter.

#pragma once

#include <cstdint>
#include <ctime>
#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int YIELDS = 10;  // times that a waiting rank lets others go first: a switch of ranks costs less than a sleep

struct alignas(64) Counter {
    int64_t messages;
    int32_t sleepers;
    int64_t size;  // bytes of the last message sent
};

struct Box {
    Counter sent, received;
    char message[];
};

int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The low half of a counter, which a rank sleeps on.
int32_t* word_of(Counter& counter) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return (int32_t*)&counter.messages + 1;
#else
    return (int32_t*)&counter.messages;
#endif
}

void sleep_on(Counter& counter, int32_t seen, int64_t longest) {
#if defined(__linux__)
    timespec limit = {longest / 1000000000L, longest % 1000000000L};
    syscall(SYS_futex, word_of(counter), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    timespec nap = {0, 200000};
    nanosleep(&nap, nullptr);
#endif
}

// Raises the counter, and wakes the ranks that sleep on it.
void raise_to(Counter& counter, int64_t count) {
    __atomic_store_n(&counter.messages, count, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&counter.sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, word_of(counter), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

bool has(Counter& counter, int64_t count) { return __atomic_load_n(&counter.messages, __ATOMIC_SEQ_CST) >= count; }

// Waits for `spin` nanoseconds awake, then while others go first, and then asleep. Returns whether the counter has reached the count.
bool reached(Counter& counter, int64_t count, int64_t spin, int64_t sleep) {
    if (has(counter, count)) return true;
    for (int64_t end = spin ? nanoseconds() + spin : 0; spin && nanoseconds() < end;)
        for (int i = 0; i < 50; i++) {
            if (has(counter, count)) return true;
            relax();
        }
    for (int i = 0; i < YIELDS; i++) {
        sched_yield();
        if (has(counter, count)) return true;
    }
    __atomic_fetch_add(&counter.sleepers, 1, __ATOMIC_SEQ_CST);
    int32_t seen = __atomic_load_n(word_of(counter), __ATOMIC_SEQ_CST);
    if (!has(counter, count)) sleep_on(counter, seen, sleep);
    __atomic_fetch_sub(&counter.sleepers, 1, __ATOMIC_SEQ_CST);
    return has(counter, count);
}

}  // namespace
