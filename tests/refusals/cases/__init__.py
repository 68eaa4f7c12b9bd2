"""Tables of calls that are refused, in files by what is called: data, which the tests beside this folder run."""
