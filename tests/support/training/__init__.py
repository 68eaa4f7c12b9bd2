"""Trainings on a mesh beside those of stock trainers."""
