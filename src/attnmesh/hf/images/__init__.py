"""Images in the prompt: towers, the merge of their features with the text, and the prefix of a cache with images."""
