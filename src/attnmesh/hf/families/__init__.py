"""Model families: what each needs of transformers."""
