"""Measurements that anyone can run again: rivals side by side, warm, with spread, beside the machine's limit."""
