"""Clients of one group trained side by side: K rows, one set of operators.

`session` runs the steps of a pack. `forward` is the training step of K clients at once, with the
operators of `operators`; `steppers` updates K rows; `rules` says which groups are packed and why
others are not. Imports what `lightfed.local` may import, and files of it.
"""
