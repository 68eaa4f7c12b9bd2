"""The native kernel for CPUs: `attend.cpp`, its library (`build`), and the kernel that calls it (`kernel`)."""
