"""What several files of tests use, each once: tests/README.md says which helper does what."""
