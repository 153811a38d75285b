"""The steps of a pack: its tensors, its optimisers, and steps that a device replays.

`tensors` holds what K sessions have on the device. `steppers` updates K rows, `fused` does so in
one pass over a matrix of them, and `optimizers` are those that can. `captured` keeps recorded
steps, which `recorder` makes. What a group has of this is its `packing`.
"""
