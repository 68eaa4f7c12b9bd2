"""The native kernel for CPUs: its C++ sources, their library (`build`), and the kernel that calls it (`kernel`)."""
