"""Calls that are refused, in tables by what is called. `test_in_one_process.py` and `test_on_ranks.py` run all rows."""
