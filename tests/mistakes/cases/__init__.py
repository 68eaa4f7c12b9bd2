"""Tables of what users do wrong, in files by what is called: data, which the tests beside this folder run."""
