"""Previews of a configuration without training: the plan of a run, shared layers."""
