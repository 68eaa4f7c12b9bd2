"""The C++ sources of the native kernel, and their library (`build`). The kernel is `implementations.native`."""
