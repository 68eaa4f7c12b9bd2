"""The native kernel for CPUs: its C++ sources, and their library (`build`), whose kernel is `implementations.native`."""
