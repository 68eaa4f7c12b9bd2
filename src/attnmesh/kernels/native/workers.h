// Threads that share the work of a call, and the codes of its errors.

#pragma once

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <dlfcn.h>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <unistd.h>
#include <vector>

namespace attnmesh {  // one pool of threads for all files

constexpr int NO_MEMORY = -1, FAILED = -2;  // what a call returns if it has raised
constexpr int64_t THREADED_BYTES = 1 << 19;  // bytes that one thread reads in less time than several take to begin

// The code of the exception that is being handled. No exception may leave the library: it would end the process.
inline int code_of_exception() noexcept {
    try {
        throw;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::length_error&) {  // more than any memory has
        return NO_MEMORY;
    } catch (...) {
        return FAILED;
    }
}

// Blocks all signals in threads that start while this object lives: signals are for the threads of Python.
class SignalsHeld {
  public:
    SignalsHeld() {
        sigset_t every;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);
    }
    ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }

  private:
    sigset_t before;
};

inline const pid_t LOADER = getpid();  // the process that has loaded this library

// Threads that wait for work. Where PyTorch has an OpenMP, these are its threads: after a call they spin for a while, and
// would take the cores from other threads. A forked child has no thread of its parent, and makes its own. Where no more
// threads can start, those that run do the work.
class Workers {
  public:
    template <class Work>
    static void run(int64_t threads, Work& work) {
        if (threads <= 1) return work();
        run_on(threads, [](void* context) { (*(Work*)context)(); }, &work);
    }

  private:
    using Function = void (*)(void*);

    static void run_on(int64_t threads, Function call, void* work) {  // no template: each type would have threads of its own
        static const auto openmp = (void (*)(Function, void*, unsigned, unsigned))dlsym(RTLD_DEFAULT, "GOMP_parallel");
        if (openmp && getpid() == LOADER) return may_start(threads) ? openmp(call, work, threads, 0) : call(work);
        static std::mutex one;  // a second caller works alone
        std::unique_lock<std::mutex> mine(one, std::try_to_lock);
        if (!mine.owns_lock()) return call(work);
        static Workers* workers = nullptr;
        if (!workers || workers->process != getpid()) workers = new Workers();
        workers->share(threads - 1, call, work);
    }

    // OpenMP ends the process if a thread cannot start. So before it first makes `threads` threads, as many are started
    // here and ended again.
    static bool may_start(int64_t threads) {
        static thread_local int64_t tried = 1;
        if (threads <= tried) return true;
        std::atomic<bool> done{false};
        std::vector<std::thread> trial;
        bool started = true;
        try {
            SignalsHeld held;
            trial.reserve(threads);
            while ((int64_t)trial.size() < threads - tried) trial.emplace_back([&] { done.wait(false); });
        } catch (...) {
            started = false;
        }
        done = true, done.notify_all();
        for (std::thread& thread : trial) thread.join();
        return started && (tried = threads);
    }

    void share(int helpers, Function function, void* given) {
        try {
            SignalsHeld held;
            for (; count < helpers; count++) std::thread([this, number = count] { serve(number); }).detach();
        } catch (...) {
            helpers = count;
        }
        {
            std::lock_guard<std::mutex> hold(lock);
            call = function, context = given, wanted = helpers, busy = helpers, round++;
        }
        wake.notify_all();
        function(given);
        for (int left = busy.load(); left; left = busy.load()) busy.wait(left);
    }

    void serve(int number) {
        for (uint64_t seen = 0;;) {
            std::unique_lock<std::mutex> hold(lock);
            wake.wait(hold, [&] { return round != seen && (seen = round, number < wanted); });
            hold.unlock();
            call(context);
            if (--busy == 0) busy.notify_one();
        }
    }

    const pid_t process = getpid();
    std::mutex lock;
    std::condition_variable wake;
    std::atomic<int> busy{0};
    Function call = nullptr;
    void* context = nullptr;
    int wanted = 0, count = 0;
    uint64_t round = 0;
};

}  // namespace attnmesh

using namespace attnmesh;
