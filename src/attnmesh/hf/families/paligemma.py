"""PaliGemma, whose types of tokens say which tokens are of the prompt: these see each other both ways."""

from attnmesh.hf.family import Family

FAMILIES = (Family("paligemma", prefix_types=True),)
