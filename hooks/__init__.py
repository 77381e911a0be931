"""Seeing attention in a live model: tensors in, per-head numbers out. Imports torch and nothing of ours."""
