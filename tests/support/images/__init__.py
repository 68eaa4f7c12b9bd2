"""Models that read images and videos, their prompts, and what a rank checks of them."""
