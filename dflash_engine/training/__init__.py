"""Trains a DFlash draft for a target from the target's own responses (docs/training.md)."""
