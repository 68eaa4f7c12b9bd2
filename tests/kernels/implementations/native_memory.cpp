// Memory of a library that runs out: after so many allocations, all others fail.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<int64_t> left{INT64_MAX};

}  // namespace

extern "C" void few_allocations(int64_t count) { left = count; }

void* operator new(std::size_t size) {
    void* memory = --left >= 0 ? std::malloc(size) : nullptr;
    if (!memory) throw std::bad_alloc();
    return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
