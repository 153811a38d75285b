"""FlexiFed: clients of different depth share the layers that they have in common."""
