"""Code that several papers share."""
