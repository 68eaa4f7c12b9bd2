"""Random problems, what is right for each, and how near to it a result has to be."""
