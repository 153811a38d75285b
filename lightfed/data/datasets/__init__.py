"""The data sets, a family per file, and how their files become samples."""
