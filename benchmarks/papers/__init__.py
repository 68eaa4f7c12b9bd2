"""The figures that two papers published, beside what the library's cost model predicts for them."""
