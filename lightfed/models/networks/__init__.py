"""The papers' networks: image, text and speech classifiers, and a language model.

A file a family; add one here. Imports `utils`.
"""
