"""One device: blocks, the driver, each kernel, `select`, and the operator `attend`."""
